"""What an audio-text model is made of: the audio encoders CED and CNN14, and the two-tower model around one.

Declared fields only: constructing a configuration reads no file and needs no network.
"""

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

# (embed_dim, num_heads) of the published checkpoints, table 1 of CED (Dinkel et al., 2023, arXiv 2308.11957).
CED_SIZES = {"tiny": (192, 3), "mini": (256, 4), "small": (384, 6), "base": (768, 12)}

# File and class of the towers that transformers lacks, by model type. Each file is imported when it is first needed.
# A saved model holds the files of its own towers only.
OWN_TOWERS = {
    "ced": ("modeling_ced", "CEDModel"),
    "cnn14": ("modeling_cnn14", "CNN14Model"),
    "m2m_100": ("modeling_sonar", "SonarTextModel"),
}

# The text encoder of SONAR (Duquenne et al., 2023, arXiv 2308.11466) in the vocabulary of M2M100.
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


class OwnTypeMixin:
    """Makes `from_pretrained` refuse a folder of another model, of which transformers only warns.

    It would go on to build the default model, which may be of any size, and fail on the weights or not at all.
    """

    model_type: ClassVar[str]
    base_config_key: ClassVar[str]
    # What else could have been meant, for the message of the error.
    advice: ClassVar[str] = ""

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict, dict]:
        """As in transformers, of this type of model.

        Raises:
            OSError: There is no such folder or id, or its file cannot be read.
            ValueError: There is no configuration, or it is of another model.
        """
        name, parent = pretrained_model_name_or_path, cast(Any, super())
        try:
            fields, rest = parent.get_config_dict(name, **kwargs)
        except OSError as error:
            raise OSError(f"no configuration can be read from {str(name)!r}, as folder or Hub id: {error}") from error

        # A whole model's file has the part that is asked for under this key, from where transformers takes it.
        found = (fields.get(cls.base_config_key) or fields).get("model_type")
        if found != cls.model_type:
            seen = f"is of a model of type {found!r}" if fields else "is no checkpoint: it holds no config.json"
            raise ValueError(f"{name} {seen}; give a {cls.model_type!r} checkpoint{cls.advice}")

        return fields, rest


@strict
class CEDConfig(OwnTypeMixin, PreTrainedConfig):
    """Shape of a CED or Dasheng audio encoder, in the field names of the `mispeech/ced-*` checkpoints.

    Dasheng (Dinkel et al., 2024, arXiv 2406.06992), the audio tower of GLAP, is the same encoder with other patches:
    `patch_size=[64, 4]`, all mel bands by 4 frames, in chunks of `target_length=1008`.

    Their `config.json` loads unchanged: fields of their classifier that the encoder has no use for (`outputdim`,
    `loss`, `eval_avg`, ...) are kept and written back.

    Args:
        embed_dim: Width of a token; also readable as `hidden_size`.
        depth: Number of transformer blocks; also readable as `num_hidden_layers`.
        num_heads: Attention heads of a block; also readable as `num_attention_heads`.
        mlp_ratio: Width of a block's MLP in units of `embed_dim`.
        n_mels: Mel bands of the input.
        patch_size: Side of a square patch, or its mel bands and its frames.
        patch_stride: Step between patches, which do not overlap, so that it equals `patch_size`; None takes it from
            there.
        target_length: Frames of one chunk; a longer clip is cut in chunks of this length (1012 frames = 10.12 s).
        pad_last: Fill the last, incomplete chunk of a long clip with zeros; otherwise drop it.
        qkv_bias: Whether the query, key and value projections have a bias.
        drop_rate: Dropout of embeddings, attention output and MLP, in training.
        attn_drop_rate: Dropout of attention weights, in training.
        drop_path_rate: Stochastic depth of the last block, in training; it grows linearly from 0 in the first.
        layer_norm_eps: Epsilon of the layer norms.
        initializer_range: Standard deviation of freshly drawn weights.
        n_fft: Samples of one Fourier transform of the front end that the weights were trained on. It and the fields
            below are for `CEDFeatureExtractor.from_config`; the encoder reads none of them.
        win_size: Samples of the analysis window.
        hop_size: Samples between two frames.
        f_min: Lower edge of the mel bands in hertz.
        f_max: Upper edge of the mel bands in hertz; None is half the sampling rate.
        center: Whether frames are centred on their time stamps.

    Example:
        >>> config = CEDConfig.from_size("tiny")
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
    patch_size: int | list | tuple = 16
    patch_stride: int | list | tuple | None = None
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

    @classmethod
    def from_size(cls, size: str, **kwargs: Any) -> Self:
        """The configuration of a published size: "tiny", "mini", "small" or "base" (5.4, 9.6, 21.4, 85.3 M weights).

        Args:
            size: Name of the size.
            **kwargs: Further fields, as for the constructor.

        Raises:
            ValueError: `size` is none of the four.

        Example:
            >>> CEDConfig.from_size("mini").embed_dim
            256
        """
        if size not in CED_SIZES:
            raise ValueError(f"CED has no size {size!r}; give one of {', '.join(CED_SIZES)}")
        embed_dim, num_heads = CED_SIZES[size]
        return cls(embed_dim=embed_dim, num_heads=num_heads, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.patch_stride is None:
            self.patch_stride = self.patch_size
        super().__post_init__(**kwargs)

    @property
    def patch_mels(self) -> int:
        """The mel bands of a patch."""
        return _pair(self.patch_size)[0]

    @property
    def patch_frames(self) -> int:
        """The frames of a patch, the fewest that can be encoded."""
        return _pair(self.patch_size)[1]

    def validate_architecture(self) -> None:
        """Refuse shapes that cannot be built; called by the constructor."""
        sizes = ("embed_dim", "depth", "num_heads", "n_mels", "patch_mels", "patch_frames", "target_length")
        if bad := {name: getattr(self, name) for name in sizes if getattr(self, name) < 1}:
            raise ValueError(f"sizes must be at least 1, got {bad}")
        largest = {
            "depth": 1_000,
            "embed_dim": 100_000,
            "target_length": 1_000_000,
        }  # a damaged file would build for hours
        if bad := {name: getattr(self, name) for name, limit in largest.items() if getattr(self, name) > limit}:
            raise ValueError(f"sizes must be at most {largest}, got {bad}")
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim={self.embed_dim} must be a multiple of num_heads={self.num_heads}")

        if _pair(self.patch_stride) != _pair(self.patch_size):
            raise ValueError(f"patches do not overlap: patch_stride={self.patch_stride} must be {self.patch_size}")
        if self.n_mels % self.patch_mels:
            raise ValueError(f"n_mels={self.n_mels} must be a multiple of patch_size={self.patch_mels}")
        if self.target_length < self.patch_frames:
            raise ValueError(f"target_length={self.target_length} is shorter than one patch of {self.patch_frames}")

        rates = ("drop_rate", "attn_drop_rate", "drop_path_rate")
        if bad := {name: getattr(self, name) for name in rates if not 0 <= getattr(self, name) < 1}:
            raise ValueError(f"dropout rates lie in [0, 1), got {bad}")


def _pair(size: Any) -> tuple[int, int]:
    """The mel bands and the frames of a patch, which are equal where one number is given."""
    mels, frames = (size, size) if isinstance(size, int) else size
    return mels, frames


@strict
class CNN14Config(OwnTypeMixin, PreTrainedConfig):
    """Shape of a CNN14 audio encoder (PANNs: Kong et al., 2020, arXiv 1912.10211), the audio tower of MS-CLAP 2022.

    Args:
        hidden_size: Width of the embedding.
        channels: Channels of each block of convolutions; all blocks but the last halve both axes.
        n_mels: Mel bands of the input.
        dropout: Dropout behind each block, in training.
        embedding_dropout: Dropout before and after the last linear layer, in training.

    Example:
        >>> CNN14Config().hidden_size
        2048
    """

    model_type = "cnn14"
    base_config_key = "audio_config"

    hidden_size: int = 2048
    channels: list | tuple = (64, 128, 256, 512, 1024, 2048)
    n_mels: int = 64
    dropout: float | int = 0.2
    embedding_dropout: float | int = 0.5

    def validate_architecture(self) -> None:
        """Refuse shapes that cannot be built; called by the constructor."""
        if min(self.hidden_size, self.n_mels, *self.channels) < 1:
            raise ValueError(f"sizes must be at least 1, got {self.hidden_size}, {self.n_mels} and {self.channels}")


@strict
class SupCLAPConfig(OwnTypeMixin, PreTrainedConfig):
    """Two towers and what joins them. Without arguments: CED-base and SONAR, the model of ML-CLAP.

    Args:
        audio_config: Configuration (or its dictionary, with `model_type`) of the audio tower.
        text_config: Configuration (or its dictionary, with `model_type`) of the text tower.
        projection_dim: Dimension of the shared space.
        projection_type: What projects each tower: "mlp" is Linear, activation, Linear, as in ML-CLAP; "residual" is
            that of MS-CLAP, in which the second layer adds to the first and a layer norm follows.
        projection_hidden_act: Activation between the two layers of each projection.
        temperature: Temperature that training starts from, the papers' unit; the model learns log(1 / temperature).
        logit_bias: Where a learnable bias of the logits starts (SigLIP has -10); None means that there is none.
        audio_pooling: How the frames of an audio encoder of transformers become one vector: "mean" over a clip's own
            frames, or "pooler" (the tower's own `pooler_output`). None is "pooler" if the tower has one, else "mean".
            CED, CNN14 and HTSAT always have their own.
        text_pooling: How the text tower's tokens become one vector: "mean" over real tokens, "cls" (the first
            token), "last" (the last real token, which is how a decoder such as GPT-2 is read) or "pooler" (the
            tower's own `pooler_output`).
        text_dense: Dense layers after the pooling, as sentence-transformers has for LaBSE: a dictionary for each, with
            `out_features`, `activation` and `bias`.
        text_normalize: Whether the text is brought to unit norm before its projection, as sentence-transformers does.

    Example:
        >>> config = SupCLAPConfig(audio_config=CEDConfig.from_size("tiny"), text_config={"model_type": "bert"})
        >>> config.audio_config.hidden_size, config.text_config.hidden_size, config.projection_dim
        (192, 768, 1024)
    """

    model_type = "supclap"
    advice = ", or join two encoders with SupCLAPModel.from_encoders"
    sub_configs = {"audio_config": AutoConfig, "text_config": AutoConfig}  # noqa: RUF012, as in transformers

    audio_config: dict | PreTrainedConfig | None = None
    text_config: dict | PreTrainedConfig | None = None
    projection_dim: int = 1024
    projection_type: str = "mlp"
    projection_hidden_act: str = "relu"
    temperature: float | int = 0.07
    logit_bias: float | int | None = None
    audio_pooling: str | None = None
    text_pooling: str = "mean"
    text_dense: list | None = None
    text_normalize: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.audio_config = config_from_dict(self.audio_config or CEDConfig())
        self.text_config = config_from_dict(self.text_config or SONAR_TEXT_CONFIG)
        # An empty dictionary lets each tower keep its own; None would take it from a tower that is built already.
        super().__post_init__(**{"attn_implementation": {}, **kwargs})

    def to_dict(self) -> dict[str, Any]:
        """As in transformers; of a tower's folder on this machine only the name, for files that others read."""
        content = super().to_dict()
        for part in (content["audio_config"], content["text_config"]):
            if isinstance(part, dict) and os.path.isabs(str(part.get("_name_or_path", ""))):
                part["_name_or_path"] = os.path.basename(os.path.normpath(part["_name_or_path"]))
        return content

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; adds the code of the towers to a folder that holds the code of the model."""
        saved = super().save_pretrained(save_directory, *args, **kwargs)
        for tower in (self.audio_config, self.text_config):
            _save_tower_code(Path(save_directory), cast(PreTrainedConfig, tower).model_type)
        return saved

    def validate_architecture(self) -> None:
        """Refuse values that cannot be built; called by the constructor."""
        if self.projection_dim < 1:
            raise ValueError(f"projection_dim must be at least 1, got {self.projection_dim}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be positive (0.07 in the papers), got {self.temperature}")
        if self.projection_type not in ("mlp", "residual"):
            raise ValueError(f"projection_type must be 'mlp' or 'residual', got {self.projection_type!r}")
        if self.audio_pooling not in (None, "mean", "pooler"):
            raise ValueError(f"audio_pooling must be None, 'mean' or 'pooler', got {self.audio_pooling!r}")
        if self.text_pooling not in ("mean", "cls", "last", "pooler"):
            raise ValueError(f"text_pooling must be 'mean', 'cls', 'last' or 'pooler', got {self.text_pooling!r}")


def _save_tower_code(folder: Path, model_type: str) -> None:
    """Copy the code of a tower next to the code of the model, and import it there.

    transformers copies and later fetches the files that are imported by `from .name import`.
    """
    towers = folder / "towers.py"
    if model_type not in OWN_TOWERS or not towers.is_file():
        return

    module, name = OWN_TOWERS[model_type]
    line = f"from .{module} import {name}  # noqa: E402, F401\n"
    if line not in towers.read_text(encoding="utf-8"):
        source = Path(__file__).with_name(f"{module}.py")
        for path in (source, *map(Path, get_relative_import_files(source))):
            shutil.copyfile(path, folder / path.name)
        with towers.open("a", encoding="utf-8") as code:
            code.write(line)


def config_from_dict(config: dict[str, Any] | PreTrainedConfig) -> PreTrainedConfig:
    """A tower's configuration from its dictionary; one that is built already comes back as it is.

    Our own types are found here whether or not they are registered with `AutoConfig`, so that a saved model loads as
    remote code.

    Args:
        config: A configuration, or its fields together with `model_type`.

    Raises:
        ValueError: There is no `model_type`, or transformers knows none of that name.
    """
    if isinstance(config, PreTrainedConfig):
        return config

    # auto_map would name the code of the repository that the tower comes from; it is built by ours.
    fields = {name: value for name, value in config.items() if name != "auto_map"}
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ValueError(f"a tower's configuration needs its 'model_type'; got only the fields {sorted(fields)}")

    for own in (CEDConfig, CNN14Config):
        if model_type == own.model_type:
            return own(**fields)

    return AutoConfig.for_model(model_type, **fields)


for _config in (CEDConfig, CNN14Config, SupCLAPConfig):
    _config.register_for_auto_class()

if __name__.startswith("transformers_modules."):
    # Code of a saved folder, which is not registered (see `auto_classes.register`). Its pipeline is found by this.
    SupCLAPConfig.custom_pipelines = {  # type: ignore[attr-defined]
        "zero-shot-audio-classification": {"impl": "pipeline_supclap.ClipPipeline", "pt": ["AutoModel"]}
    }
else:
    # Not "ced": `AutoConfig` would prefer our class to the code of the published CED folders, even with
    # trust_remote_code=True, and their tagger could not be loaded.
    AutoConfig.register(CNN14Config.model_type, CNN14Config)
    AutoConfig.register(SupCLAPConfig.model_type, SupCLAPConfig)
