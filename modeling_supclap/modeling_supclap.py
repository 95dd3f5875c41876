"""SupCLAP model: an audio encoder and a text encoder with projections into one embedding space."""

import importlib
import math
import os
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.dynamic_module_utils import custom_object_save
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .auto_classes import register
from .configuration_supclap import ANY_AUDIO_TOWER, AUDIO_TOWERS, SupCLAPConfig
from .encoding import EncodingMixin, Localization, Processor, Texts
from .pipeline_supclap import ClipPipeline  # noqa: F401, registers itself
from .pooling import SentenceDense, last_pool, mean_pool, replace_pooled
from .strict_loading import StrictLoadingMixin
from .towers import build_tower, check_tower, freeze_idle, import_tower_code, takes

# Arguments of `from_pretrained` that also apply to the processor of the model.
_LOADING_OPTIONS = ("cache_dir", "local_files_only", "proxies", "subfolder", "token")


@dataclass
class SupCLAPOutput(ModelOutput):
    """Output of `SupCLAPModel` for n clips and m texts.

    Args:
        loss: Scalar, the sum of the InfoNCE losses of both directions, or None if `return_loss` is not True.
        logits_per_audio: Cosine similarity / temperature (+ bias), (n, m); entry (i, j) compares clip i with text j.
        logits_per_text: Transpose of `logits_per_audio`, (m, n).
        audio_embeds: Audio embeddings of unit norm, (n, projection_dim).
        text_embeds: Text embeddings of unit norm, (m, projection_dim).
        audio_model_output: Output of the audio tower, with `audio_embeds` as its `pooler_output`.
        text_model_output: Output of the text tower, with `text_embeds` as its `pooler_output`.
    """

    loss: Tensor | None = None
    logits_per_audio: Tensor | None = None
    logits_per_text: Tensor | None = None
    audio_embeds: Tensor | None = None
    text_embeds: Tensor | None = None
    audio_model_output: BaseModelOutputWithPooling | None = None
    text_model_output: BaseModelOutputWithPooling | None = None


class SupCLAPProjection(nn.Module):
    """Projection head that maps the output of a tower to a unit vector, y / ||y||.

    `projection_type="mlp"` (ML-CLAP: Yan et al., 2024, arXiv 2406.07012): y = linear2(activation(linear1(x))).
    `projection_type="residual"` (MS-CLAP: Elizalde et al., 2023, arXiv 2206.04769): h = linear1(x) and
    y = LayerNorm(h + linear2(activation(h))). The linear layers have no bias.
    "linear" and "linear_bias" (CLIP, CLAP2): y = linear1(x).
    """

    def __init__(self, width: int, config: SupCLAPConfig, kind: str) -> None:
        super().__init__()
        has_bias, is_residual = kind in ("mlp", "linear_bias"), kind == "residual"
        self.linear1 = nn.Linear(width, config.projection_dim, bias=has_bias)
        self.activation = ACT2FN[config.projection_hidden_act]
        self.linear2 = None
        if kind in ("mlp", "residual"):
            self.linear2 = nn.Linear(config.projection_dim, config.projection_dim, bias=has_bias)
        self.layer_norm = nn.LayerNorm(config.projection_dim) if is_residual else None

    def forward(self, pooled: Tensor) -> Tensor:
        """Map (B, width) to embeddings (B, projection_dim) with unit norm. A zero vector stays zero."""
        hidden = self.linear1(pooled)
        projected = hidden if self.linear2 is None else self.linear2(self.activation(hidden))
        if self.layer_norm is not None:
            projected = self.layer_norm(hidden + projected)
        # In float32 or wider, so that the eps of `normalize` does not underflow.
        return nn.functional.normalize(projected.to(torch.promote_types(projected.dtype, torch.float32)), dim=-1)


class SupCLAPModel(EncodingMixin, StrictLoadingMixin, PreTrainedModel):
    """Two-tower model that embeds recordings and captions into one space, where matching pairs have a high cosine.

    The training losses are in `modeling_supclap.losses`; the model itself computes only plain InfoNCE.

    Args:
        audio_model: Pretrained audio tower with the configuration `config.audio_config`. None: use random weights.
        text_model: Pretrained text tower with the configuration `config.text_config`. None: use random weights.

    Raises:
        ValueError: The model type of a tower is not supported, or a tower differs from its configuration or does not
            support the configured pooling.

    Example:
        >>> text = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> audio = {"model_type": "ced", "embed_dim": 8, "depth": 1, "num_heads": 2}
        >>> model = SupCLAPModel(SupCLAPConfig(audio_config=audio, text_config=text, projection_dim=4)).eval()
        >>> out = model(input_features=torch.zeros(2, 64, 101), input_ids=torch.tensor([[5, 6, 7]] * 3))
        >>> out.logits_per_audio.shape, out.text_embeds.shape
        (torch.Size([2, 3]), torch.Size([3, 4]))
    """

    config: SupCLAPConfig
    # Training checkpoints contain the model as "model.*" and the parameters of the loss as "objective.*".
    base_model_prefix = "model"
    # CLAP's scales are saved for `ClapModel` (see `save_pretrained`).
    _keys_to_ignore_on_load_unexpected = [r"^objective\.", r"^logit_scale_[at]$"]  # noqa: RUF012, as in transformers
    main_input_name = "input_features"
    input_modalities = ["audio", "text"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    # The loss is a mean over the batch; the Trainer must not rescale it.
    accepts_loss_kwargs = False

    def __init__(
        self,
        config: SupCLAPConfig,
        audio_model: PreTrainedModel | None = None,
        text_model: PreTrainedModel | None = None,
    ) -> None:
        super().__init__(config)
        self.audio_model = audio_model or build_tower("audio", config.audio_config)
        self.text_model = text_model or build_tower("text", config.text_config, config.text_pooling)
        check_tower("audio", self.audio_model, config.audio_config, config.audio_pooling)
        check_tower("text", self.text_model, config.text_config, config.text_pooling)
        freeze_idle(self)
        self.audio_projection = SupCLAPProjection(self.audio_model.config.hidden_size, config, config.projection_type)
        self.text_dense = nn.ModuleList()
        text_width = self.text_model.config.hidden_size
        for layer in config.text_dense or ():
            self.text_dense.append(SentenceDense(text_width, **layer))
            text_width = layer["out_features"]
        text_kind = config.text_projection_type or config.projection_type
        self.text_projection = SupCLAPProjection(text_width, config, text_kind)

        # Shape (1,), because FSDP does not shard scalar parameters.
        self.logit_scale = nn.Parameter(torch.empty(1))
        self.logit_bias = None if config.logit_bias is None else nn.Parameter(torch.empty(1))
        has_own_pooling = self.audio_model.config.model_type in AUDIO_TOWERS
        self._run_encoder = None if has_own_pooling else import_tower_code(*ANY_AUDIO_TOWER)
        self._audio_options = [name for name in ("audio_attention_mask", "is_longer") if takes(self.audio_model, name)]
        self._text_takes_types = takes(self.text_model, "token_type_ids")
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SupCLAPModel):
            init.constant_(module.logit_scale, -math.log(self.config.temperature))
            if module.logit_bias is not None:
                init.constant_(module.logit_bias, self.config.logit_bias or 0.0)

    @classmethod
    def from_pretrained(
        cls, *args: Any, temperature: float | None = None, logit_bias: float | None = None, **kwargs: Any
    ) -> Self:
        """Load a model (see `StrictLoadingMixin`). Weights that no embedding depends on are frozen.

        `temperature` and `logit_bias` replace those of the model, as in `set_temperature`.
        """
        loaded: Any = super().from_pretrained(*args, **kwargs)
        # a tuple with output_loading_info=True
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model._loading_options = {name: value for name, value in kwargs.items() if name in _LOADING_OPTIONS}
        model.set_temperature(temperature, logit_bias)
        freeze_idle(model)
        return loaded

    def set_temperature(self, temperature: float | None = None, logit_bias: float | None = None) -> None:
        """Replace the temperature, and the bias of the logits (SigLIP), also in the configuration. None: keep it.

        Raises:
            ValueError: The temperature is not positive.
        """
        if temperature is not None:
            self.config.temperature = temperature
            self.config.validate_architecture()
            nn.init.constant_(self.logit_scale, -math.log(temperature))
        if logit_bias is not None:
            self.config.logit_bias = logit_bias
            self.logit_bias = nn.Parameter(torch.full_like(self.logit_scale, logit_bias))

    @classmethod
    def from_encoders(cls, audio: str, text: str, audio_seconds: int | None = None, **kwargs: Any) -> Self:
        """Build a model from two pretrained encoders.

        The projections and the temperature are newly initialised and must be trained.
        `SupCLAPProcessor.from_encoders` builds the matching processor.

        Args:
            audio: Hub id or folder of the audio encoder: a CED checkpoint such as "mispeech/ced-base", or any encoder
                that `AutoModel` and `AutoFeatureExtractor` load (AST, Whisper, wav2vec 2.0, HuBERT, ...).
            text: Hub id or folder of the text encoder: SONAR, or any encoder that `AutoModel` loads. A
                sentence-transformers model (LaBSE, e5) keeps its pooling, dense layers and normalisation.
                For both, a SupCLAP model provides its encoder alone, without dense layers and projection. It sets the
                default of `text_pooling`.
            audio_seconds: Length of the clips that Whisper's encoder takes, in whole seconds. None: 30. Its positions
                are cut, so the embeddings of shorter clips differ from those with 30 s. The processor needs the same
                value.
            **kwargs: Further fields of `SupCLAPConfig`. If `text_pooling` differs from the pooling of a
                sentence-transformers model, its dense layers and normalisation are not used.

        Returns:
            The model in float32, in evaluation mode.

        Raises:
            OSError: The folder or Hub id does not exist, or a weight file is damaged.
            TypeError: A keyword is not a field of `SupCLAPConfig`.
            ValueError: A checkpoint cannot be a tower, weights are missing, or a pooling is not supported.
        """
        # By name, because transformers requires each package that the code of a saved folder imports.
        return importlib.import_module("modeling_supclap.joining").join_models(
            cls, audio, text, audio_seconds, **kwargs
        )

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save a model as in transformers.

        If transformers' `ClapModel` can load the towers, the weights also contain its two logit scales. Otherwise it
        would load the folder with an untrained temperature.
        """
        config: Any = self.config
        towers = (config.audio_config.model_type, config.text_config.model_type)
        if towers == ("clap_audio_model", "clap_text_model") and not self._hf_peft_config_loaded:
            state_dict = dict(self.state_dict() if state_dict is None else state_dict)
            if "logit_scale" in state_dict:
                for name in ("logit_scale_a", "logit_scale_t"):
                    state_dict[name] = state_dict["logit_scale"].detach().reshape(()).clone()
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)

    def save_code(self, folder: str | os.PathLike[str]) -> None:
        """Save the configuration, and the code of the model and of its towers, to a folder that gets the weights."""
        config: Any = self.config
        custom_object_save(self, folder, config=config)
        config.save_pretrained(folder)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode. Batch norms stay in evaluation mode, so that embeddings do not depend on the batch."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def localize(
        self,
        audio: Any,
        texts: Texts,
        processor: Processor = None,
        language: Texts | None = None,
        sampling_rate: float | None = None,
        window_seconds: float = 1.0,
        hop_seconds: float = 0.5,
        chunk_seconds: float | None = None,
        batch_size: int = 16,
        device: str | torch.device | None = None,
    ) -> Localization:
        """Score texts against sliding windows over a recording.

        Args:
            audio: One recording of any length and sampling rate. `encode_audio` describes `processor`,
                `sampling_rate` and `device`.
            texts: One text or a list of texts. `encode_text` describes `language`.
            window_seconds: Length of a window in seconds.
            hop_seconds: Time between the starts of two windows in seconds.
            chunk_seconds: Chunk length for the audio tower in seconds, preferably the length of the training clips.
                None: use 5 s, or the maximum of the feature extractor (CLAP: 10 s, CLAP2: 30 s).
            batch_size: Number of chunks per batch. A chunk longer than 10 s counts as several chunks.

        Returns:
            Scores (T, n_texts), with the start and end times of the windows. The last window starts earlier, so that it
            ends with the recording. A recording shorter than `window_seconds` is a single window.

        Raises:
            OSError: The file is missing or unreadable.
            ValueError: An input or length is invalid, or the audio tower does not average its output over time steps.
        """
        localization = importlib.import_module("modeling_supclap.localization")
        return localization.localize(
            self,
            audio,
            texts,
            processor,
            language,
            sampling_rate,
            window_seconds,
            hop_seconds,
            chunk_seconds,
            batch_size,
            device,
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings of the text tower, for `resize_token_embeddings`."""
        return self.text_model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings of the text tower."""
        self.text_model.set_input_embeddings(value)

    @can_return_tuple
    def get_audio_features(
        self,
        input_features: Tensor,
        audio_attention_mask: Tensor | None = None,
        is_longer: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Compute audio embeddings.

        Args:
            input_features: Audio features from the processor: (B, 64, T) for CED, (B, samples) for wav2vec 2.0.
            audio_attention_mask: (B, T), 1 for frames of the clip, 0 for padding. None: no padding.
            is_longer: (B, 1), True for clips that CLAP's feature extractor shortened. Other towers ignore it.
            **kwargs: `output_hidden_states`, `output_attentions` and `return_dict`, as in transformers.

        Returns:
            Output of the audio tower. `pooler_output` is the embedding (B, projection_dim), in float32 or higher
            precision, scaled to unit norm (a zero vector stays zero).
        """
        outputs = self.run_audio_tower(input_features, audio_attention_mask, is_longer, **kwargs)
        return replace_pooled(outputs, self.audio_projection(outputs.pooler_output))

    def run_audio_tower(
        self,
        input_features: Tensor,
        audio_attention_mask: Tensor | None = None,
        is_longer: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the audio tower without the projection. The output contains `pooler_output` (B, width)."""
        if self._run_encoder is not None:
            pooling = self.config.audio_pooling
            return self._run_encoder(self.audio_model, input_features, audio_attention_mask, pooling, **kwargs)
        options = {"audio_attention_mask": audio_attention_mask, "is_longer": is_longer}
        kwargs |= {name: options[name] for name in self._audio_options}
        # CED and CNN14 normalise their input in float32 and then cast it; the CLAP tower of transformers does not cast.
        if self.audio_model.config.model_type == "clap_audio_model":
            input_features = input_features.to(self.audio_model.dtype)
        return self.audio_model(input_features=input_features, return_dict=True, **kwargs)

    @can_return_tuple
    def get_text_features(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Compute text embeddings.

        Args:
            input_ids: Token ids, (B, N).
            attention_mask: (B, N), 1 for real tokens, 0 for padding; None masks the padding tokens in `input_ids`.
            token_type_ids: Token types, (B, N). They are ignored if the text tower does not accept them.
            **kwargs: As in `get_audio_features`.

        Returns:
            Output of the text tower, with the embedding as its `pooler_output`, as in `get_audio_features`.
        """
        outputs = self.run_text_tower(input_ids, attention_mask, token_type_ids, **kwargs)
        return replace_pooled(outputs, self.text_projection(outputs.pooler_output))

    def run_text_tower(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Run the text tower without the projection. The output contains `pooler_output` (B, width)."""
        padding = getattr(self.config.text_config, "pad_token_id", None)
        if attention_mask is None and padding is not None:
            attention_mask = input_ids.ne(padding).long()
        if self._text_takes_types:
            kwargs["token_type_ids"] = token_type_ids
        outputs = self.text_model(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)

        tokens = outputs.last_hidden_state  # (B, N, D)
        match self.config.text_pooling:
            case "mean":
                pooled = mean_pool(tokens, attention_mask)
            case "cls":
                pooled = tokens[:, 0]
            case "last":
                pooled = last_pool(tokens, attention_mask)
            case _:
                pooled = outputs.pooler_output

        for layer in self.text_dense:
            pooled = layer(pooled)
        if self.config.text_normalize:
            pooled = nn.functional.normalize(pooled, dim=-1)
        return replace_pooled(outputs, pooled)

    @can_return_tuple
    def forward(
        self,
        input_features: Tensor | None = None,
        audio_attention_mask: Tensor | None = None,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        return_loss: bool | None = None,
        is_longer: Tensor | None = None,
        **kwargs: Any,
    ) -> SupCLAPOutput:
        """Compute the similarity logits between n clips and m texts, and optionally the InfoNCE loss.

        logits_per_audio[i, j] = exp(logit_scale) * cos(audio i, text j) (+ logit_bias)

        Args:
            input_features: Audio features. `get_audio_features` describes this argument, `audio_attention_mask` and
                `is_longer`.
            input_ids: Token ids. `get_text_features` describes this argument, `attention_mask` and `token_type_ids`.
            return_loss: Whether to compute the InfoNCE loss, where clip i matches text i. It is the sum over both
                directions, as in the SupCLAP paper. At chance it is 2 log(n); the minimum is near 0.
            **kwargs: As in `get_audio_features`.

        Raises:
            ValueError: `input_features` or `input_ids` is None, or `return_loss` is set and m != n.
        """
        if input_features is None:
            raise ValueError("input_features is missing; to embed texts only, call get_text_features")
        if input_ids is None:
            raise ValueError("input_ids is missing; to embed clips only, call get_audio_features")

        audio = self.get_audio_features(input_features, audio_attention_mask, is_longer, return_dict=True, **kwargs)
        text = self.get_text_features(input_ids, attention_mask, token_type_ids, return_dict=True, **kwargs)

        # With a device_map the towers may be on two devices.
        audio_embeds, text_embeds = audio.pooler_output, text.pooler_output.to(audio.pooler_output.device)
        logits = self.logit_scale.exp().to(audio_embeds.device) * audio_embeds @ text_embeds.T
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(logits.device)

        loss = None
        if return_loss:
            clips, texts = logits.shape
            if clips != texts:
                raise ValueError(f"return_loss pairs clip i with text i; got {clips} clips and {texts} texts")
            pairs = torch.arange(clips, device=logits.device)
            loss = nn.functional.cross_entropy(logits, pairs) + nn.functional.cross_entropy(logits.T, pairs)

        return SupCLAPOutput(
            loss=loss,
            logits_per_audio=logits,
            logits_per_text=logits.T,
            audio_embeds=audio_embeds,
            text_embeds=text_embeds,
            audio_model_output=audio,
            text_model_output=text,
        )


register(AutoModel, SupCLAPConfig, SupCLAPModel)
