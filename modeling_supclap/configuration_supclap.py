"""Configuration classes: `SupCLAPConfig` (two-tower model), and the encoders that transformers lacks."""

import math
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from .auto_classes import register  # first: it checks the version of transformers

# isort: split
from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__
from transformers.dynamic_module_utils import get_relative_import_files

# File and class of the towers that transformers lacks, by model type. A file is imported when first used.
# A saved model contains only the files of its own towers.
OWN_TOWERS = {
    "ced": ("modeling_ced", "CEDModel"),
    "cnn14": ("modeling_cnn14", "CNN14Model"),
    "m2m_100": ("modeling_sonar", "SonarTextModel"),
    "modern_text": ("modeling_modern_text", "ModernTextModel"),
    "naflex": ("modeling_naflex", "NaFlexModel"),
}
# Model types of the audio towers with their own pooling. `run_encoder` runs all other towers.
AUDIO_TOWERS = ("ced", "clap_audio_model", "cnn14", "naflex")
ANY_AUDIO_TOWER = ("audio_encoder", "run_encoder")

# More layers than any encoder has. To build the millions that a damaged or hostile file may state would take hours.
MAX_LAYERS = 1000

# The text encoder of SONAR (Duquenne et al., 2023, arXiv 2308.11466), in the field names of M2M100.
SONAR_TEXT_CONFIG: dict[str, Any] = {
    "model_type": "m2m_100",
    "vocab_size": 256206,
    "d_model": 1024,
    "encoder_layers": 24,
    "encoder_ffn_dim": 8192,
    "encoder_attention_heads": 16,
    "encoder_layerdrop": 0.0,
    "max_position_embeddings": 1024,
}


def check_depth(config: PreTrainedConfig) -> None:
    """Raise ValueError if a configuration, or one within it, has more than `MAX_LAYERS` layers."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            check_depth(value)
        elif name.endswith(("layer", "layers", "depth", "depths")):
            counts = [count for count in (value if isinstance(value, list) else [value]) if isinstance(count, int)]
            if sum(counts) > MAX_LAYERS:
                raise ValueError(f"{name} is {value}; a tower has at most {MAX_LAYERS} layers")


class OwnTypeMixin:
    """Mixin for configurations: `from_pretrained` raises ValueError if the file has a different `model_type`."""

    model_type: ClassVar[str]
    base_config_key: ClassVar[str]
    # Alternative to suggest in the error message.
    advice: ClassVar[str] = ""

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: Any, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a configuration as in transformers. Raise ValueError if its `model_type` differs or is missing."""
        name, parent = pretrained_model_name_or_path, cast(Any, super())
        try:
            fields, rest = parent.get_config_dict(name, **kwargs)
        except OSError as error:
            raise OSError(f"cannot read a configuration from the folder or Hub id {str(name)!r}: {error}") from error

        # The file of a two-tower model contains the configuration of a tower under this key.
        model_type = (fields.get(cls.base_config_key) or fields).get("model_type")
        if model_type != cls.model_type:
            problem = f"has model_type {model_type!r}" if fields else "is not a checkpoint: it has no config.json"
            raise ValueError(f"{name} {problem}; pass a {cls.model_type!r} checkpoint{cls.advice}")

        return fields, rest

    def validate_depth(self) -> None:
        """Raise ValueError for too many layers. The constructor calls this method."""
        check_depth(cast(PreTrainedConfig, self))


@strict
class CEDConfig(OwnTypeMixin, PreTrainedConfig):
    """Configuration of a CED or Dasheng audio encoder.

    The published `config.json` files of `mispeech/ced-*` load unchanged. Fields of the published classifier
    (`outputdim`, `loss`, `eval_avg`, ...) are kept but not used.

    The default is CED-base. `embed_dim` and `num_heads` are 192 and 3 for CED-tiny, 256 and 4 for mini, and 384 and 6
    for small (table 1 of CED, Dinkel et al., 2023, arXiv 2308.11957).

    Dasheng (Dinkel et al., 2024, arXiv 2406.06992), the audio tower of GLAP, is the same encoder with
    `patch_size=[64, 4]` (all 64 mel bands, 4 frames) and `target_length=1008`.

    Args:
        embed_dim: Embedding dimension; `hidden_size` is an alias.
        depth: Number of transformer blocks; `num_hidden_layers` is an alias.
        num_heads: Attention heads per block; `num_attention_heads` is an alias.
        mlp_ratio: Hidden width of the MLP divided by `embed_dim`.
        n_mels: Number of mel bands of the input.
        patch_size: Patch size as (mel bands, frames); one number means a square patch.
        patch_stride: Step between patches. It must equal `patch_size`, because patches do not overlap. None: use
            `patch_size`.
        target_length: Maximum chunk length in frames; longer clips are split into chunks (1012 frames = 10.12 s).
        pad_last: Whether to pad the incomplete last chunk of a long clip with zeros; False drops this chunk.
        qkv_bias: Whether the query, key and value projections have a bias.
        drop_rate: Dropout probability of embeddings, attention output and MLP.
        attn_drop_rate: Dropout probability of attention weights.
        drop_path_rate: Stochastic depth rate of the last block. The rate rises linearly from 0 in the first block.
        layer_norm_eps: Epsilon of the layer norms.
        initializer_range: Standard deviation of newly initialised weights.
        n_fft, win_size, hop_size: FFT size, window length and hop length in samples. Only
            `CEDFeatureExtractor.from_config` uses these fields and the fields below.
        f_min, f_max: Lowest and highest frequency of the mel bands in hertz. f_max=None: half the sampling rate.
        center: Whether frame t is centred at sample t * `hop_size`, as in `torch.stft`.

    Example:
        >>> config = CEDConfig(embed_dim=192, num_heads=3)  # CED-tiny
        >>> config.hidden_size, config.num_hidden_layers, config.num_attention_heads
        (192, 12, 3)
    """

    model_type = "ced"
    base_config_key = "audio_config"
    attribute_map = {  # noqa: RUF012, transformers declares it as a plain class attribute
        "hidden_size": "embed_dim",
        "num_hidden_layers": "depth",
        "num_attention_heads": "num_heads",
    }

    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float | int = 4.0
    n_mels: int = 64
    patch_size: int | list[int] | tuple[int, ...] = 16
    patch_stride: int | list[int] | tuple[int, ...] | None = None
    target_length: int = 1012
    pad_last: bool = True
    qkv_bias: bool = True
    drop_rate: float | int = 0.0
    attn_drop_rate: float | int = 0.0
    drop_path_rate: float | int = 0.0
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    n_fft: int = 512
    win_size: int = 512
    hop_size: int = 160
    f_min: float | int = 0
    f_max: float | int | None = 8000
    center: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.patch_stride is None:
            self.patch_stride = self.patch_size
        super().__post_init__(**kwargs)

    @property
    def patch_mels(self) -> int:
        """Number of mel bands per patch."""
        return _pair(self.patch_size)[0]

    @property
    def patch_frames(self) -> int:
        """Number of frames per patch, the minimum length of a clip."""
        return _pair(self.patch_size)[1]

    def validate_architecture(self) -> None:
        """Raise ValueError for patches that the encoder would not cover. The constructor calls this method."""
        stride, size = self.patch_stride, self.patch_size
        if _pair(stride) != _pair(size):
            raise ValueError(f"patch_stride={stride} must be {size} like patch_size; patches do not overlap")
        if self.n_mels % self.patch_mels:
            raise ValueError(f"n_mels={self.n_mels} must be a multiple of patch_size={self.patch_mels}")


def _pair(size: Any) -> tuple[int, int]:
    mels, frames = (size, size) if isinstance(size, int) else size
    return mels, frames


@strict
class CNN14Config(OwnTypeMixin, PreTrainedConfig):
    """Configuration of a CNN14 audio encoder (PANNs: Kong et al., 2020, arXiv 1912.10211), used in MS-CLAP 2022.

    Args:
        hidden_size: Dimension of the embedding.
        n_mels: Number of mel bands of the input.
        channels: Output channels of each convolution block. Each block except the last halves time and frequency.
        dropout: Dropout probability after each block.
        embedding_dropout: Dropout probability before and after the last linear layer.
    """

    model_type = "cnn14"
    base_config_key = "audio_config"

    hidden_size: int = 2048
    channels: list[int] | tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)
    n_mels: int = 64
    dropout: float | int = 0.2
    embedding_dropout: float | int = 0.5


@strict
class NaFlexConfig(OwnTypeMixin, PreTrainedConfig):
    """Configuration of a NaFlex audio encoder, the audio tower of CLAP2.

    The fields have the names and defaults of OpenCLIP's `audio_cfg` and of timm's `NaFlexVitCfg`, so that the values in
    an `open_clip_config.json` can be used unchanged.

    Args:
        embed_dim: Embedding dimension; `hidden_size` is an alias.
        depth: Number of transformer blocks; `num_hidden_layers` is an alias.
        num_heads: Attention heads per block; `num_attention_heads` is an alias.
        mlp_ratio: Hidden width of the MLP divided by `embed_dim`.
        n_mels: Number of mel bands of the input.
        patch_freq, patch_time: Patch size in mel bands and frames.
        patch_pad_mode: Values after the end of a clip in its last patch: "floor" (lowest level of the clip), "silence"
            (-100 dB) or "repeat" (last frame).
        init_values: Initial layer scale; None: no layer scale.
        attn_only_layer_scale: Whether the layer scale applies to the attention only.
        class_token: Whether there is a class token.
        reg_tokens: Number of register tokens.
        pre_norm: Whether to normalise the tokens before the first block. The patch embedding then has no bias.
        qk_norm: Whether to normalise queries and keys.
        qkv_bias: Whether the query, key, value and gate projections have a bias.
        attn_gated: Whether a sigmoid gate scales the output of the attention.
        scale_attn_inner_norm, scale_mlp_norm: Whether to normalise within the attention and within the MLP.
        swiglu_mlp: Whether the MLP is SwiGLU.
        global_pool: "map" (attention with one learned query) or "avg" (mean over the patches).
        pool_include_prefix: Whether the pooling includes the class and register tokens.
        attn_pool_num_heads, attn_pool_mlp_ratio: Heads and MLP ratio of the pooling; None: as in the blocks.
        norm_layer: "rmsnorm", or None for layer norm.
        rope_temperature: Temperature of the rotary positions.
        rope_rotate_half: Whether rotary positions pair element j with j + head_dim / 2, not 2j with 2j + 1.
        layer_norm_eps: Epsilon of all norms.
        initializer_range: Standard deviation of newly initialised weights.
    """

    model_type = "naflex"
    base_config_key = "audio_config"
    attribute_map = CEDConfig.attribute_map

    embed_dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float | int = 4.0
    n_mels: int = 64
    patch_freq: int = 64
    patch_time: int = 4
    patch_pad_mode: Literal["floor", "silence", "repeat"] = "floor"
    init_values: float | int | None = None
    attn_only_layer_scale: bool = False
    class_token: bool = False
    reg_tokens: int = 0
    pre_norm: bool = False
    qk_norm: bool = False
    qkv_bias: bool = True
    attn_gated: bool = False
    scale_attn_inner_norm: bool = False
    scale_mlp_norm: bool = False
    swiglu_mlp: bool = False
    global_pool: Literal["map", "avg"] = "map"
    pool_include_prefix: bool = False
    attn_pool_num_heads: int | None = None
    attn_pool_mlp_ratio: float | int | None = None
    norm_layer: Literal["rmsnorm"] | None = None
    rope_temperature: float | int = 10000.0
    rope_rotate_half: bool = False
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02

    @property
    def prefix_tokens(self) -> int:
        """Number of class and register tokens before the patches."""
        return self.class_token + self.reg_tokens

    def validate_architecture(self) -> None:
        """Raise ValueError for invalid sizes. The constructor calls this method."""
        if self.n_mels % self.patch_freq:
            raise ValueError(f"n_mels={self.n_mels} must be a multiple of patch_freq={self.patch_freq}")
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError(
                f"embed_dim={self.embed_dim} must be a multiple of 4 x num_heads={self.num_heads}, because rotary "
                "positions split each head into four"
            )


@strict
class ModernTextConfig(OwnTypeMixin, PreTrainedConfig):
    """Configuration of the text encoder of CLAP2: a transformer with rotary positions and a pooled output.

    The fields without an equivalent in transformers have the names of OpenCLIP's `text_cfg` (`text_arch="modern"`).

    Args:
        vocab_size: Number of tokens.
        hidden_size, num_hidden_layers, num_attention_heads: Width, number of blocks, heads per block.
        mlp_ratio: Hidden width of the MLP divided by `hidden_size`.
        mlp_type: "swiglu", "relu2" (squared ReLU) or "mlp" (GELU).
        max_position_embeddings: Maximum number of tokens.
        pad_token_id, bos_token_id, eos_token_id: Ids of the special tokens.
        pool_type: "eos" (first EOS token), "mean" (over all tokens except padding) or "map" (attention with one learned
            query).
        attention_mode: "causal" or "bidirectional".
        norm_type: "rmsnorm" or "layernorm".
        norm_eps: Epsilon of all norms.
        norm_placement: "pre", or "sandwich" for a second norm after the attention and the MLP.
        pre_norm: Whether to normalise the token embeddings before the first block.
        qk_norm: Whether to normalise queries and keys.
        attn_gated: Whether a sigmoid gate scales the output of the attention.
        attention_bias, mlp_bias: Whether the attention and the MLP have biases.
        gate_bias: Whether the gate has a bias; None: as `attention_bias`.
        value_residual: Whether each block interpolates its values with those of the first block.
        reg_tokens: Number of register tokens before the text.
        ls_init_value: Initial layer scale; None: no layer scale.
        rope_temperature: Temperature of the rotary positions.
        initializer_range: Standard deviation of newly initialised weights.
    """

    model_type = "modern_text"
    base_config_key = "text_config"
    # the names of `NaFlexConfig`, for the parts of both towers
    attribute_map = {  # noqa: RUF012
        "norm_layer": "norm_type",
        "layer_norm_eps": "norm_eps",
        "qkv_bias": "attention_bias",
    }

    vocab_size: int = 50260
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    mlp_ratio: float | int = 2.6666667
    mlp_type: Literal["swiglu", "relu2", "mlp"] = "swiglu"
    max_position_embeddings: int = 256
    pad_token_id: int | None = 50258
    bos_token_id: int | None = 50259
    eos_token_id: int | None = 50257
    pool_type: Literal["eos", "mean", "map"] = "map"
    attention_mode: Literal["causal", "bidirectional"] = "bidirectional"
    norm_type: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "sandwich"] = "pre"
    pre_norm: bool = False
    qk_norm: bool = False
    attn_gated: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    gate_bias: bool | None = None
    value_residual: bool = False
    reg_tokens: int = 0
    ls_init_value: float | int | None = None
    rope_temperature: float | int = 10000.0
    initializer_range: float = 0.02

    def validate_architecture(self) -> None:
        """Raise ValueError for invalid sizes. The constructor calls this method."""
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 x num_attention_heads="
                f"{self.num_attention_heads}"
            )


# Configurations of the towers that transformers lacks.
OWN_CONFIGS: dict[str, Any] = {
    "ced": CEDConfig,
    "cnn14": CNN14Config,
    "naflex": NaFlexConfig,
    "modern_text": ModernTextConfig,
}


@strict
class SupCLAPConfig(OwnTypeMixin, PreTrainedConfig):
    """Configuration of `SupCLAPModel`. The default is the ML-CLAP model, with CED-base and SONAR as encoders.

    Args:
        audio_config: Configuration of the audio encoder, or a dictionary with `model_type`.
        text_config: Configuration of the text encoder, or a dictionary with `model_type`.
        projection_dim: Dimension of the shared embedding space.
        projection_type: "mlp" (ML-CLAP: linear, activation, linear) or "residual" (MS-CLAP: the output of the second
            layer is added to the output of the first layer, then a layer norm).
        text_projection_type: Type of the text projection: as `projection_type`, or "linear" or "linear_bias" (CLAP2:
            one linear layer, without or with a bias). None: `projection_type`.
        projection_hidden_act: Activation between the two layers of each projection.
        temperature: Initial temperature; the model learns log(1 / temperature).
        logit_bias: Initial value of a learnable bias added to the logits (-10 in SigLIP); None disables the bias.
        audio_pooling: Pooling of a transformers audio encoder: "mean" over the frames of the clip, or "pooler" (the
            `pooler_output` of the encoder). None means "pooler" if the encoder has one, else "mean". Leave None for
            CED, CNN14 and HTSAT, which have their own pooling.
        text_pooling: Pooling of the text tokens: "mean" (excluding padding), "cls" (first token), "last" (last token
            before padding, for decoders such as GPT-2) or "pooler" (the `pooler_output` of the encoder).
        text_dense: Dense layers after the pooling, as in LaBSE: one dictionary per layer with `out_features`,
            `activation` and `bias`. None: no dense layers.
        text_normalize: Whether to scale the pooled text vector to unit norm before the projection.

    Example:
        >>> config = SupCLAPConfig(audio_config=CEDConfig(embed_dim=192), text_config={"model_type": "bert"})
        >>> config.audio_config.hidden_size, config.text_config.hidden_size, config.projection_dim
        (192, 768, 1024)
    """

    model_type = "supclap"
    advice = ", or join two encoders with SupCLAPModel.from_encoders"
    sub_configs = {"audio_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012, as in transformers

    audio_config: dict[str, Any] | PreTrainedConfig | None = None
    text_config: dict[str, Any] | PreTrainedConfig | None = None
    projection_dim: int = 1024
    projection_type: Literal["mlp", "residual"] = "mlp"
    text_projection_type: Literal["mlp", "residual", "linear", "linear_bias"] | None = None
    projection_hidden_act: str = "relu"
    temperature: float | int = 0.07
    logit_bias: float | int | None = None
    audio_pooling: Literal["mean", "pooler"] | None = None
    text_pooling: Literal["mean", "cls", "last", "pooler"] = "mean"
    text_dense: list[Any] | None = None
    text_normalize: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.audio_config = config_from_dict(self.audio_config or CEDConfig())
        self.text_config = config_from_dict(self.text_config or SONAR_TEXT_CONFIG)
        # With an empty dictionary, each tower keeps its own setting. None would copy that of a tower already built.
        super().__post_init__(**{"attn_implementation": {}, **kwargs})

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dictionary. It contains only the folder names of local encoders, not their absolute paths."""
        content = super().to_dict()
        for part in (content["audio_config"], content["text_config"]):
            if isinstance(part, dict) and os.path.isabs(str(part.get("_name_or_path", ""))):
                part["_name_or_path"] = os.path.basename(os.path.normpath(part["_name_or_path"]))
        return content

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Save the configuration. If the folder contains model code, also copy the code of the two encoders.

        The function adds an import of each encoder to `towers.py` in the folder, because transformers downloads only
        code files that are imported.
        """
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        folder, source = Path(save_directory), Path(__file__).parent
        if not (towers := folder / "towers.py").is_file():
            return saved

        audio, text = cast(Any, self.audio_config).model_type, cast(Any, self.text_config).model_type
        modules = [OWN_TOWERS.get(text), OWN_TOWERS.get(audio) if audio in AUDIO_TOWERS else ANY_AUDIO_TOWER]
        for module, name in filter(None, modules):
            line = f"from .{module} import {name}  # noqa: E402, F401\n"
            if line not in towers.read_text(encoding="utf-8"):
                path = str(source / f"{module}.py")
                for needed in (path, *get_relative_import_files(path)):
                    shutil.copyfile(needed, folder / os.path.basename(needed))
                with towers.open("a", encoding="utf-8") as code:
                    code.write(line)
        return saved

    def validate_architecture(self) -> None:
        """Raise ValueError for invalid values. The constructor calls this method."""
        if self.projection_dim < 1:
            raise ValueError(f"projection_dim must be at least 1, got {self.projection_dim}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive (0.07 in the papers), got {self.temperature}")


def config_from_dict(config: dict[str, Any] | PreTrainedConfig) -> PreTrainedConfig:
    """Create the configuration object of a tower from a dictionary. A configuration object is returned unchanged.

    Configurations in `OWN_CONFIGS` are created without `AutoConfig`, because it may not know their model types.

    Raises:
        ValueError: `model_type` is missing or unknown to transformers.
    """
    if isinstance(config, PreTrainedConfig):
        return config

    # auto_map points to the code of the original repository; the tower is built by this package.
    fields = {name: value for name, value in config.items() if name != "auto_map"}
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ValueError(
            f"the configuration of a tower must have a 'model_type', got only the fields {sorted(fields)}"
        )

    if model_type in OWN_CONFIGS:
        return OWN_CONFIGS[model_type](**fields)
    # the error of transformers lists all of its types
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"the model type {model_type!r} is unknown to transformers {__version__}; pass another encoder"
        )
    tower = AutoConfig.for_model(model_type, **fields)
    check_depth(tower)
    return tower


register(AutoConfig, SupCLAPConfig.model_type, SupCLAPConfig)
for _config in (CNN14Config, NaFlexConfig, ModernTextConfig):
    register(AutoConfig, _config.model_type, _config)
# "ced" is not registered: `AutoConfig` would use this class instead of the code in the published CED folders, even with
# trust_remote_code=True, and their tagger could not be loaded.
CEDConfig.register_for_auto_class()

if __name__.startswith("transformers_modules."):
    # The code of a saved folder is not registered (see `auto_classes.register`); this makes its pipeline available.
    # A new dictionary for each call, because transformers changes it.
    SupCLAPConfig.custom_pipelines = property(  # type: ignore[attr-defined]
        lambda config: {
            "zero-shot-audio-classification": {"impl": "pipeline_supclap.ClipPipeline", "pt": ["AutoModel"]}
        }
    )
