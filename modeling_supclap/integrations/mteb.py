"""A SupCLAP model inside mteb, the benchmark of embeddings: its text tasks, its audio tasks and those of both.

    encoder = SupCLAPEncoder.from_model(model, processor)        # or SupCLAPEncoder("outputs/esc10")
    result = mteb.evaluate(encoder, mteb.get_tasks(["ESC50_Zeroshot"]), cache=None)

Every text is embedded in its own language where the task says which that is. Needs the extra: pip install
"supclap[mteb]".
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
    raise ImportError(
        f'mteb 2 does not import: {error}\nIt is an extra; install it with: pip install "supclap[mteb]"'
    ) from error


class SupCLAPEncoder(AbsEncoder):
    """mteb's encoder protocol around a model; clips are heard from beginning to end, at the model's own rate.

    Args:
        model_name: Folder or Hub id of a SupCLAP model.
        revision: A revision of the Hub repository.
        device: Where to run; None is a GPU where there is one.
        language: ISO 639-3 code of texts whose task says nothing, or several things; None is the tokenizer's setting.
        model: A model that is loaded already.
        processor: The one that goes with it.
        **kwargs: As for `SupCLAPModel.from_pretrained`.
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
        """Wraps a model that is loaded already.

        Args:
            model: The model.
            processor: The model's.
            name: What mteb calls it, `organisation/name`; None takes it from where the model was loaded.
            device: Where to run; None leaves the model where it is.
            language: As for the class.
        """
        own_name, where = str(name or model.name_or_path), device or str(model.device)
        return cls(own_name, device=where, language=language, model=model, processor=processor)

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
        """Embeds what mteb's data loader gives.

        Args:
            inputs: A data loader whose batches have a column `text`, a column `audio`, or both.
            task_metadata: What mteb knows of the task; its languages say which one the texts are in.
            hf_split: Not used, as are `prompt_type`, since the model knows no instructions, and further options.
            hf_subset: The part of the task, usually one of its languages.
            batch_size: Inputs that go through the model at once.
            show_progress_bar: Whether to show one.

        Returns:
            (N, projection_dim) float32, unit norm; of rows with text and sound the normalised sum of both.

        Raises:
            ValueError: There is neither text nor sound.
        """
        columns = set(inputs.dataset.features)
        if not columns & {"text", "audio"}:
            raise ValueError(f"the columns are {sorted(columns)}; this model embeds 'text' and 'audio'")

        if "audio" in columns:
            extractor = self.processor.feature_extractor
            # A benchmark has clips that are too short to encode; silence makes them long enough.
            inputs.collate_fn = AudioCollator(
                target_sampling_rate=extractor.sampling_rate, min_samples=getattr(extractor, "min_samples", None)
            )

        texts: list[str] = []
        audio: list[np.ndarray] = []
        for batch in inputs:
            texts += batch["text"] if "text" in columns else []
            if "audio" in columns:  # batch by batch: the sound of a whole task does not fit in memory
                audio.append(self.model.encode_audio(batch["audio"], self.processor, batch_size=batch_size))

        parts = [np.concatenate(audio)] if audio else []
        if texts:
            spoken = self._language(task_metadata, hf_subset)
            options = {"batch_size": batch_size, "show_progress_bar": show_progress_bar}
            parts.append(self.model.encode_text(texts, self.processor, language=spoken, **options))

        total = np.sum(parts, axis=0)
        return total if len(parts) == 1 else total / np.linalg.norm(total, axis=-1, keepdims=True).clip(1e-12)

    def _language(self, task_metadata: Any, hf_subset: str) -> str | None:
        """The language of a task's texts in the tokenizer's terms, if there is one and the tokenizer has it."""
        known = task_metadata.hf_subsets_to_langscripts.get(hf_subset) or []
        spoken = set(known) - {"zxx-Zxxx"}  # no language at all
        if len(spoken) != 1:
            return self.language

        code = spoken.pop().replace("-", "_")
        has_it = self.processor.tokenizer.convert_tokens_to_ids(code) != self.processor.tokenizer.unk_token_id
        return code if has_it else self.language


def _describe(model: SupCLAPModel, processor: SupCLAPProcessor, name: str, revision: str | None) -> ModelMeta:
    """What mteb writes beside the scores. Names are `organisation/name` there: a folder is `local/name`."""
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
