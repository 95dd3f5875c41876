"""Zero-shot audio classification pipeline that embeds recordings and labels as `encode_audio` and `encode_text` do."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset
from transformers import ZeroShotAudioClassificationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .audio_input import Recording, as_recordings
from .encoding import embed_recordings, encode_text, mean_embedding
from .processing_supclap import SupCLAPProcessor

TASK = "zero-shot-audio-classification"
OPTIONS = ("candidate_labels", "hypothesis_template", "sampling_rate", "language", "top_k")
DEFAULT_TEMPLATE = "This is a sound of {}."


class ClipPipeline(ZeroShotAudioClassificationPipeline):
    """Zero-shot audio classification pipeline for `SupCLAPModel` and `ClapModel`.

    All inputs are computed by `SupCLAPProcessor`: prefix and length of the captions, chunks of long recordings,
    resampling. Nothing is random. Scores are the softmax of the logits of a recording over the labels.
    """

    # The processor contains the other parts. It is optional (None), because a model object may have one.
    _load_processor = None  # type: ignore[assignment]
    _load_feature_extractor = False
    _load_tokenizer = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        has_parts = {"feature_extractor", "tokenizer"} <= kwargs.keys()
        parts: Any = self if has_parts else self.processor or getattr(self.model, "processor", None)
        if parts is None:
            raise ValueError(f"no processor can be loaded for this {type(self.model).__name__}; pass processor=")
        if not isinstance(parts, SupCLAPProcessor):
            parts = SupCLAPProcessor(parts.feature_extractor, parts.tokenizer)
        self.processor: Any = parts
        self.feature_extractor: Any = parts.feature_extractor
        self.tokenizer: Any = parts.tokenizer

    def _sanitize_parameters(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return the options of a call, or the defaults that `pipeline(...)` was given."""
        options.pop("local_files_only", None)  # `pipeline` passes this option of the Hub, too
        for name in options.keys() - set(OPTIONS):
            raise TypeError(
                f"the pipeline has no option {name!r}; it has {', '.join(OPTIONS)}, batch_size and num_workers"
            )
        return {name: value for name, value in options.items() if value is not None}, {}, {}

    def __call__(  # type: ignore[override]
        self, audios: Any, *, batch_size: int | None = None, num_workers: int | None = None, **kwargs: Any
    ) -> Any:
        """Score labels for one or more recordings.

        Args:
            audios: One recording or a list, in any format that `encode_audio` accepts: a path, the bytes of a file, a
                waveform, `{"raw": waveform, "sampling_rate": 44100}`, an item of a `datasets.Audio` column, and others.
                Or a generator or `torch.utils.data.Dataset` of recordings.
            batch_size: Number of chunks per batch.
            num_workers: Number of threads that prefetch audio.
            **kwargs: Options, which can also be passed to `pipeline(...)`:

                - `candidate_labels`: List of labels, or a string of labels with commas between them.
                - `hypothesis_template`: Caption of a label, with {} in place of the label. Pass "{}" if labels are
                  captions. Default: "This is a sound of {}."
                - `sampling_rate`: Sampling rate in hertz of waveforms that are passed without it: one value for all,
                  or a list. Default: the model's sampling rate.
                - `language`: ISO 639-3 code of the labels, or a list with one per label.
                - `top_k`: Number of labels to return. Default: all.

        Returns:
            For each recording, a list of `{"score": ..., "label": ...}`, highest score first. A list of recordings
            returns a list, a generator or dataset returns a generator.

        Raises:
            OSError: A file is missing or unreadable.
            TypeError: An option is unknown.
            ValueError: A label, the template or another option is invalid, or a recording is unusable.
        """
        options = {**self._preprocess_params, **self._sanitize_parameters(**kwargs)[0]}
        labels = as_labels(options.get("candidate_labels"))
        template = options.get("hypothesis_template", DEFAULT_TEMPLATE)
        if not isinstance(template, str) or "{}" not in template:
            raise ValueError(f"hypothesis_template is {template!r}; it must contain {{}}, the place of the label")
        top_k = options.get("top_k", len(labels))
        if not isinstance(top_k, (int, np.integer)) or top_k < 1:
            raise ValueError(f"top_k is {top_k!r}; it must be an integer, at least 1")

        model, captions = self.model, [template.replace("{}", label) for label in labels]
        language = options.get("language")
        text_embeds = encode_text(model, captions, self.processor, language=language, convert_to_tensor=True)
        if batch_size is None:
            batch_size = self._batch_size or 1
        workers = (self._num_workers if num_workers is None else num_workers) or 0

        def classify(recordings: Iterable[Recording]) -> Iterator[list[dict[str, Any]]]:
            scale: Any = model.logit_scale_a if hasattr(model, "logit_scale_a") else model.logit_scale
            embedded = embed_recordings(model, self.processor, recordings, batch_size=batch_size, num_workers=workers)
            for chunks in embedded:
                # (M, d), (d,) -> (M,); a bias of the logits would not change the softmax
                logits = scale.detach().float().exp() * (text_embeds @ mean_embedding(chunks.embeds).to(text_embeds))
                scores = logits.softmax(dim=0).tolist()
                ranked = sorted(zip(scores, labels, strict=True), key=lambda pair: -pair[0])
                yield [{"score": score, "label": label} for score, label in ranked[:top_k]]

        rate_hz = options.get("sampling_rate", self.feature_extractor.sampling_rate)
        if isinstance(audios, (Iterator, Dataset)):
            return classify(_read_lazily(audios, rate_hz))
        recordings, is_one = as_recordings(audios, rate_hz)
        results = list(classify(recordings))
        return results[0] if is_one else results


def as_labels(labels: Any) -> list[str]:
    """Convert labels to a list: one string contains labels with commas between them, as in transformers.

    Raises:
        ValueError: There are no labels, or a label is blank or not a string.

    >>> as_labels("rain, dog"), as_labels(["rain, heavy", "dog"])
    (['rain', 'dog'], ['rain, heavy', 'dog'])
    """
    if isinstance(labels, str):
        labels = [label.strip() for label in labels.split(",") if label.strip()]
    if labels is None or not isinstance(labels, Iterable) or isinstance(labels, (bytes, dict)):
        raise ValueError(f"candidate_labels is {labels!r}; pass a list of labels, such as ['rain', 'dog']")
    labels = list(labels)
    if not labels:
        raise ValueError("candidate_labels is empty; pass at least one label")
    for index, label in enumerate(labels):
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"label {index} of candidate_labels is {label!r}; pass a string that is not blank")
    return labels


def _read_lazily(audios: Any, sampling_rate: Any) -> Iterator[Recording]:
    """Yield the recording of each item of a generator or dataset."""
    items = audios if isinstance(audios, Iterator) else (audios[index] for index in range(len(audios)))
    for item in items:
        yield as_recordings([item], sampling_rate)[0][0]


# Code in a saved model folder uses `SupCLAPConfig.custom_pipelines` instead.
if not __name__.startswith("transformers_modules."):
    PIPELINE_REGISTRY.supported_tasks[TASK]["impl"] = ClipPipeline
