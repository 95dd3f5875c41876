"""Evaluate SupCLAP models with mteb, the embedding benchmark, on text, audio and audio-text tasks.

    encoder = SupCLAPEncoder.from_model(model, processor)        # or SupCLAPEncoder("outputs/esc10")
    result = mteb.evaluate(encoder, mteb.get_tasks(["ESC50_Zeroshot"]), cache=None)

If a task has one language, its texts are embedded in that language. Requires the extra: pip install "supclap[mteb]".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..hub_ids import is_hub_id
from ..languages import LANGUAGE_TABLE
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

try:
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.modality_collators import AudioCollator
    from mteb.models.model_meta import ScoringFunction
except ImportError as error:
    raise ImportError(f'mteb 2 cannot be imported: {error}\nInstall the extra: pip install "supclap[mteb]"') from error


class SupCLAPEncoder(AbsEncoder):
    """mteb encoder for a SupCLAP model. Clips are resampled to the model's sampling rate and embedded in full length.

    Args:
        model_name: Folder or Hub id of a SupCLAP model.
        revision: Revision of the Hub repository.
        device: Torch device. None: use a GPU if there is one.
        language: ISO 639-3 code for tasks with several languages, or with a language that the tokenizer does not
            support. None: use the tokenizer's setting.
        model: Loaded model. None: load it from `model_name`.
        processor: Processor of the model. None: load it from `model_name`.
        **kwargs: Arguments for `SupCLAPModel.from_pretrained`.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        device: str | None = None,
        language: str | None = None,
        *,
        model: SupCLAPModel | None = None,
        processor: SupCLAPProcessor | None = None,
        **kwargs: Any,
    ) -> None:
        hub: dict[str, Any] = {} if revision is None else {"revision": revision}
        loaded: Any = model or SupCLAPModel.from_pretrained(model_name, **hub, **kwargs)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = loaded.to(self.device).eval()
        self.processor = processor or SupCLAPProcessor.from_pretrained(model_name, **hub)
        self.language = language
        self.mteb_model_meta = _describe(self.model, self.processor, model_name, revision)

    @classmethod
    def from_model(
        cls,
        model: SupCLAPModel,
        processor: SupCLAPProcessor,
        name: str | None = None,
        device: str | None = None,
        language: str | None = None,
    ) -> SupCLAPEncoder:
        """Wrap a loaded model. The other arguments are those of the class.

        Args:
            name: Model name in mteb, `organisation/name`. None: use the folder or Hub id of the model.
            device: Torch device. None: keep the model's device.
        """
        model_name, device = str(name or model.name_or_path), device or str(model.device)
        return cls(model_name, device=device, language=language, model=model, processor=processor)

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        **kwargs: Any,
    ) -> np.ndarray:
        """Embed the texts and recordings from an mteb data loader. The other arguments of mteb are not used.

        Args:
            inputs: Data loader with the columns `text`, `audio`, or both.
            task_metadata: mteb task metadata, including the languages.
            hf_subset: Subset of the task, usually one language.
            batch_size: Batch size for the model.
            show_progress_bar: Whether to show a progress bar for texts.

        Returns:
            Embeddings with unit norm, float32 (N, projection_dim). If the data has text and audio, they are the
            normalised sums of both embeddings.

        Raises:
            ValueError: The columns contain neither text nor audio.
        """
        columns = set(inputs.dataset.features)
        if not columns & {"text", "audio"}:
            raise ValueError(f"the columns are {sorted(columns)}; this model embeds 'text' and 'audio'")

        if "audio" in columns:
            extractor = self.processor.feature_extractor
            # Some benchmark clips are too short to encode; pad them with silence.
            inputs.collate_fn = AudioCollator(
                target_sampling_rate=extractor.sampling_rate, min_samples=getattr(extractor, "min_samples", None)
            )

        texts: list[str] = []
        audio: list[np.ndarray] = []
        for batch in inputs:
            texts += batch["text"] if "text" in columns else []
            if "audio" in columns:  # encode each batch immediately, because the audio of a task may not fit in memory
                audio.append(self.model.encode_audio(batch["audio"], self.processor, batch_size=batch_size))

        parts = [np.concatenate(audio)] if audio else []
        if texts:
            language = self._language(task_metadata, hf_subset)
            options = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
            parts.append(self.model.encode_text(texts, self.processor, language=language, **options))

        total = np.sum(parts, axis=0)
        return total if len(parts) == 1 else total / np.linalg.norm(total, axis=-1, keepdims=True).clip(1e-12)

    def _language(self, task_metadata: Any, hf_subset: str) -> str | None:
        """Return the language code of a task for the tokenizer.

        If the task has several languages, or one that the tokenizer does not support, return `self.language`.
        """
        languages = set(task_metadata.hf_subsets_to_langscripts.get(hf_subset) or [])
        languages -= {"zxx-Zxxx"}  # mteb's code for "no linguistic content"
        code = languages.pop().replace("-", "_") if len(languages) == 1 else None
        tokenizer = self.processor.tokenizer
        is_known = code is not None and tokenizer.convert_tokens_to_ids(code) != tokenizer.unk_token_id
        return code if is_known else self.language


def _describe(model: SupCLAPModel, processor: SupCLAPProcessor, name: str, revision: str | None) -> ModelMeta:
    """Create the mteb model metadata. A name that is not a Hub id is changed to `local/name`."""
    if not is_hub_id(name) or "/" not in name:
        name = f"local/{Path(name).name or 'supclap'}"
    languages = None
    if hasattr(processor.tokenizer, "src_lang"):
        languages = [language.flores.replace("_", "-") for language in LANGUAGE_TABLE.values()]

    facts = {
        "loader": SupCLAPEncoder,
        "name": name,
        "revision": revision or "unknown",
        "n_parameters": model.num_parameters(),
        "n_embedding_parameters": sum(map(torch.numel, model.get_input_embeddings().parameters())),
        "embed_dim": model.config.projection_dim,
        "max_tokens": processor.max_tokens,
        "similarity_fn_name": ScoringFunction.COSINE,
        "framework": ["PyTorch", "Transformers"],
        "modalities": ["audio", "text"],
        "use_instructions": False,
        "open_weights": True,
        "languages": languages,
    }
    return ModelMeta.create_empty(overwrites=facts)
