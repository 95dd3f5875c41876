"""Evaluate models with mteb, the embedding benchmark, on text, audio and audio-text tasks.

    encoder = SupCLAPEncoder("outputs/esc10")  # or SupCLAPEncoder("name", model=model, processor=processor)
    result = mteb.evaluate(encoder, mteb.get_tasks(["ESC50_Zeroshot"]), cache=None)

`supclap evaluate --mteb ESC50_Zeroshot` does the same for any model that `supclap evaluate` loads.

If a task has one language, its texts are embedded in that language.
Requires the extra: pip install "supclap[mteb]".
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..audio_input import Recording, as_recordings
from ..encoding import mean_embedding
from ..evaluation import EmbeddingModel, Results, load_embedding_model, make_results
from ..evaluation.models import default_device
from ..evaluation.results import score
from ..hub_ids import is_hub_id
from ..languages import LANGUAGE_TABLE
from ..modeling_supclap import SupCLAPModel
from ..processing_supclap import SupCLAPProcessor

try:
    import mteb
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
    from mteb.models.model_meta import ScoringFunction
except ImportError as error:
    raise ImportError(f'mteb 2 cannot be imported: {error}\nInstall the extra: pip install "supclap[mteb]"') from error


class SupCLAPEncoder(AbsEncoder):
    """mteb encoder for an embedding model. Clips are embedded in full length, at the model's sampling rate.

    The revision in mteb, which names the folder of cached results, is the fingerprint of the weights and settings.

    Args:
        model_name: Folder or Hub id of a model that `load_embedding_model` loads.
        revision: Branch, tag or commit of a SupCLAP model on the Hub. None: use the latest version.
        device: Torch device. None: use a GPU if there is one, or that of `model`.
        language: ISO 639-3 code of the texts, for tasks with several languages or with a language that the tokenizer
            does not support. None: use the tokenizer's setting.
        model: Loaded model, or an `evaluation.EmbeddingModel`. None: load it from `model_name`.
        processor: Processor of the model. None: use `model.processor`.
        trust_remote_code: Whether a model in the format of sentence-transformers may run code from its repository.
        **kwargs: Arguments for `SupCLAPModel.from_pretrained`.
    """

    def __init__(
        self,
        model_name: str,
        revision: str | None = None,
        device: str | None = None,
        language: str | None = None,
        *,
        model: SupCLAPModel | EmbeddingModel | None = None,
        processor: SupCLAPProcessor | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        loaded: Any = model or model_name
        if model is None and (revision or kwargs):
            hub: dict[str, Any] = {} if revision is None else {"revision": revision}
            loaded = SupCLAPModel.from_pretrained(model_name, **hub, **kwargs)
            loaded.to(device or default_device())
        elif device is not None and isinstance(model, SupCLAPModel):
            loaded.to(device)
        model = load_embedding_model(loaded, processor, device, model_name, trust_remote_code)
        self.embedding_model = model
        self.model, self.processor, self.device = model.model, model.processor, model.device
        self.language = language
        self.mteb_model_meta = _describe(model, model_name, language)

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        batch_size: int = 32,
        **kwargs: Any,
    ) -> np.ndarray:
        """Embed the texts and recordings from an mteb data loader. The other arguments of mteb are not used.

        `inputs` is a data loader with the columns `text`, `audio`, or both. `hf_subset` is usually one language.

        Returns:
            Embeddings with unit norm, float32 (N, projection_dim). If the data has text and audio, each is the
            normalised sum of the text embedding and the audio embedding.

        Raises:
            ValueError: The columns contain neither text nor audio.
        """
        columns = set(inputs.dataset.features)
        if not columns & {"text", "audio"}:
            raise ValueError(f"the columns are {sorted(columns)}; this model embeds 'text' and 'audio'")

        model = self.embedding_model
        if "audio" in columns:
            inputs.collate_fn = _collate

        texts: list[str] = []
        audio: list[np.ndarray] = []
        for batch in inputs:
            texts += batch["text"] if "text" in columns else []
            # encode each batch immediately, because the audio of a task may not fit in memory
            if "audio" in columns:
                recordings = [self._pad(recording) for recording in as_recordings(batch["audio"])[0]]
                for chunks in model.chunk_embeddings(recordings, batch_size=batch_size):
                    audio.append(mean_embedding(chunks.embeds).numpy())

        parts = [np.stack(audio)] if audio else []
        if texts:
            parts.append(model.encode_text(texts, self._language(task_metadata, hf_subset), batch_size=batch_size))

        total = np.sum(parts, axis=0)
        return total if len(parts) == 1 else total / np.linalg.norm(total, axis=-1, keepdims=True).clip(1e-12)

    def _pad(self, recording: Recording) -> Recording:
        """Read a recording, and pad it with silence if it is too short to encode, as some clips of benchmarks are."""
        model = self.embedding_model
        rate_hz, least = model.sampling_rate_hz, round(model.min_seconds * model.sampling_rate_hz)
        waveform = recording.read(rate_hz, resampling_method=model.resampling_method)
        return Recording(np.pad(waveform, (0, max(least - len(waveform), 0))), rate_hz, recording.name)

    def _language(self, task_metadata: Any, hf_subset: str) -> str | None:
        """Return the language code for the texts of a task: the language of the task, if it has only one.

        If the task has several languages, or one that the tokenizer does not support, return `self.language`. A model
        without a processor uses ISO 639-3 codes, by default "eng".
        """
        languages = set(task_metadata.hf_subsets_to_langscripts.get(hf_subset) or [])
        languages -= {"zxx-Zxxx"}  # mteb's code for "no linguistic content"
        code = languages.pop().replace("-", "_") if len(languages) == 1 else None
        if self.processor is None:
            return code[:3] if code is not None else self.language or "eng"
        tokenizer = self.processor.tokenizer
        is_known = code is not None and tokenizer.convert_tokens_to_ids(code) != tokenizer.unk_token_id
        return code if is_known else self.language


def _collate(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Batch rows by column, with audio at its own sampling rate."""
    batch = {}
    for column in rows[0]:
        batch[column] = [row[column] for row in rows]
    return batch


def load_task(name: str) -> Any:
    """Return a task of mteb, such as "ESC50_Zeroshot". Raise ValueError if it does not exist."""
    try:
        return mteb.get_task(name)
    except KeyError as error:
        raise ValueError(f"mteb has no task {name!r}: {error.args[0]}") from error


def evaluate_task(model: EmbeddingModel, task: Any) -> Results:
    """Evaluate a model on a task of mteb. The results contain the main score, averaged over splits and subsets."""
    encoder: Any = SupCLAPEncoder(model.name, model=model)
    (result,) = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False, co2_tracker=False).task_results
    main = task.metadata.main_score
    protocol = {"dataset": task.metadata.name, "split": "+".join(result.scores), "mteb": {"version": mteb.__version__}}
    scores = {"mteb": {main: {"main_score": score(result.get_score())}}}
    return make_results(model, scores, {}, protocol)


def _describe(model: EmbeddingModel, name: str, language: str | None) -> ModelMeta:
    """Create the mteb model metadata. A name that is not a Hub id is changed to `local/name`.

    A custom model without a fingerprint has a new revision each time, so that mteb never reads its cached results.
    """
    if not is_hub_id(name) or "/" not in name:
        name = f"local/{Path(name).name or 'supclap'}"
    revision = "-".join(filter(None, [model.fingerprint or uuid.uuid4().hex, language]))
    facts: dict[str, Any] = {}
    if model.processor is not None:
        embeddings = model.model.text_model.get_input_embeddings()
        facts = {
            "n_parameters": model.model.num_parameters(),
            "n_embedding_parameters": sum(map(torch.numel, embeddings.parameters())),
            "embed_dim": model.model.config.projection_dim,
            "max_tokens": model.processor.max_tokens,
        }
        if hasattr(model.processor.tokenizer, "src_lang"):
            facts["languages"] = [language.flores.replace("_", "-") for language in LANGUAGE_TABLE.values()]

    facts |= {
        "loader": SupCLAPEncoder,
        "name": name,
        "revision": revision,
        "similarity_fn_name": ScoringFunction.COSINE,
        "framework": ["PyTorch", "Transformers"],
        "modalities": ["audio", "text"],
        "use_instructions": False,
        "open_weights": True,
    }
    return ModelMeta.create_empty(overwrites=facts)
