"""The model in mteb: scores of small tasks, compared with scores computed by hand."""

import sys
from functools import partial
from typing import Any

import builders
import numpy as np
import open_clip_folders as folders
import pandas
import pytest
from commands import run_recipe
from datasets import Dataset, DatasetDict
from scipy.stats import pearsonr
from sentence_models import save_code

pytest.importorskip("mteb", reason="the extra mteb is not installed")
import mteb
from mteb.abstasks import AbsTaskSTS, AbsTaskZeroShotClassification
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.cache import ResultCache

from modeling_supclap import SupCLAPModel
from modeling_supclap.datasets_scripts.audio import resample
from modeling_supclap.evaluation import load_embedding_model
from modeling_supclap.evaluation.results import score
from modeling_supclap.integrations.mteb import SupCLAPEncoder, evaluate_task
from modeling_supclap.recipes import evaluate_supclap

LABELS = ["a dog barks", "the rain falls", "un chien aboie", "la pluie tombe"]
CLIPS = [builders.tone(150.0 * 2 ** (index / 2), 16000 + 1000 * index) for index in range(12)]
TRUTH = [index % 4 for index in range(12)]


def metadata(name, kind, languages, modalities, category, score):
    return TaskMetadata(
        name=name,
        description="Made in the test.",
        dataset={"path": "local/none", "revision": "1"},
        type=kind,
        category=category,
        modalities=modalities,
        eval_splits=["test"],
        eval_langs=languages,
        main_score=score,
    )


class LocalSTS(AbsTaskSTS):
    metadata = metadata("LocalSTS", "STS", {"fra": ["fra-Latn"]}, ["text"], "t2t", "cosine_spearman")

    def load_data(self, **kwargs):
        pairs = {"sentence1": LABELS, "sentence2": LABELS[1:] + LABELS[:1], "score": [1.0, 4.0, 2.0, 5.0]}
        self.dataset = {"fra": DatasetDict(test=Dataset.from_dict(pairs))}
        self.data_loaded = True


def sounds(**columns):
    rows = {"audio": [{"array": clip, "sampling_rate": 16000} for clip in CLIPS], **columns}
    return Dataset.from_dict(rows)


class LocalZeroShot(AbsTaskZeroShotClassification):
    metadata = metadata(
        "LocalZeroShot", "AudioZeroshotClassification", ["eng-Latn"], ["audio", "text"], "a2t", "accuracy"
    )
    input_column_name = "audio"
    label_column_name = "label"

    def get_candidate_labels(self):
        return LABELS

    def load_data(self, **kwargs):
        self.dataset = DatasetDict(test=sounds(label=TRUTH))
        self.data_loaded = True


@pytest.fixture(scope="module")
def encoder():
    # With such large weights the predictions differ between clips.
    config = builders.supclap_config(builders.sonar_config(), builders.ced_config(initializer_range=0.3))
    model = builders.supclap_model(config, seed=2)
    return SupCLAPEncoder("", model=model, processor=builders.nllb_processor())


def run(encoder, task):
    result = mteb.evaluate(encoder, task, cache=None, show_progress_bar=False, co2_tracker=False)
    (scores,) = result.task_results[0].scores["test"]
    return scores


def test_texts_are_embedded_in_the_language_of_the_task(encoder):
    scores = run(encoder, LocalSTS())
    by_language = {}
    for language in ("fra", "eng"):
        embeds = encoder.model.encode_text(LABELS, encoder.processor, language=language)
        cosines = (embeds * np.roll(embeds, -1, axis=0)).sum(axis=1)
        by_language[language] = pearsonr(cosines, [1.0, 4.0, 2.0, 5.0]).statistic
    # the cosines of this random model differ little, so that their correlation enlarges rounding errors
    assert scores["cosine_pearson"] == pytest.approx(by_language["fra"], abs=2e-4)
    assert scores["cosine_pearson"] != pytest.approx(by_language["eng"], abs=1e-3)


def stored_clips():
    """Return the clips as the dataset stores them."""
    return [np.array(row["audio"]["array"], np.float32) for row in sounds()]


@pytest.mark.filterwarnings("ignore:Precision is ill-defined")
def test_zero_shot_classification(encoder):
    audio = encoder.model.encode_audio(stored_clips(), encoder.processor, sampling_rate=16000)
    text = encoder.model.encode_text(LABELS, encoder.processor, language="eng")
    predicted = (audio @ text.T).argmax(axis=1)
    assert len(set(predicted)) >= 3
    expected = (predicted == TRUTH).mean()
    assert run(encoder, LocalZeroShot())["accuracy"] == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Precision is ill-defined")
def test_a_task_in_the_table_of_a_suite(tmp_path, monkeypatch, encoder):
    encoder.model.save_pretrained(tmp_path / "model")
    encoder.processor.save_pretrained(tmp_path / "model")
    builders.save_clap(tmp_path / "clap")
    monkeypatch.setitem(sys.modules["mteb.get_tasks"]._TASKS_REGISTRY, "LocalZeroShot", LocalZeroShot)
    models = [str(tmp_path / name) for name in ("model", "clap")] + [f"{__name__}:Parity"]
    (tmp_path / "suite.yaml").write_text("- {mteb: LocalZeroShot}\n")
    words = ["--suite", tmp_path / "suite.yaml", "--output_dir", tmp_path / "out", "--model"]
    run_recipe(evaluate_supclap, *words, *models)

    scores = []
    for name in models:
        model = load_embedding_model(name)
        clips = [resample(clip, 16000, model.sampling_rate_hz) for clip in stored_clips()]
        audio = np.concatenate([model.encode_audio([clip], 1) for clip in clips])
        predicted = (audio @ model.encode_text(LABELS, "eng").T).argmax(axis=1)
        scores.append((predicted == TRUTH).mean())
    table = pandas.read_csv(tmp_path / "out" / "table.csv")
    assert set(table["dataset"] + " " + table["score"]) == {"LocalZeroShot mteb accuracy main_score"}
    assert table["value"].tolist() == pytest.approx(scores)
    assert table["difference"].tolist()[1:] == pytest.approx([score - scores[0] for score in scores[1:]])
    for suffix in ("md", "html", "tex"):
        assert f"{100 * scores[1]:.1f}" in (tmp_path / "out" / f"table.{suffix}").read_text()

    (tmp_path / "suite.yaml").write_text("- {mteb: LocalZeroShoot}\n")
    with pytest.raises(ValueError, match=r"'LocalZeroShoot'.*'LocalZeroShot'"):
        run_recipe(evaluate_supclap, *words, models[0])


class Parity:
    """Model that embeds clips and texts by their lengths: odd or even."""

    sampling_rate = 8000

    def encode_audio(self, waveforms):
        return np.array([[1.0, 0.0] if len(clip) % 2 else [0.6, 0.8] for clip in waveforms])

    def encode_text(self, texts, language):
        assert language in ("eng", "fra")
        return np.array([[0.8, 0.6] if len(text) % 2 else [0.0, 1.0] for text in texts])


class Loader(list[Any]):
    """Minimal data loader for `encode`, with two rows in a batch."""

    def __init__(self, batch, features):
        super().__init__([batch])
        self.dataset = Dataset.from_dict({name: [0] for name in features})
        self.rows = batch

    def __iter__(self):
        names = list(self.rows)
        rows = [dict(zip(names, row, strict=True)) for row in zip(*self.rows.values(), strict=True)]
        for start in range(0, len(rows), 2):
            batch = {name: values[start : start + 2] for name, values in self.rows.items()}
            yield self.collate_fn(rows[start : start + 2]) if hasattr(self, "collate_fn") else batch


CALL = {"task_metadata": LocalZeroShot.metadata, "hf_split": "test", "hf_subset": "default"}


def test_rows_of_text_and_sound_are_fused(encoder):
    arrays = [*CLIPS[:2], np.concatenate([CLIPS[2]] * 14)]  # the last one has two chunks
    clips = [{"array": clip, "sampling_rate": rate} for clip, rate in zip(arrays, (16000, 8000, 16000), strict=True)]
    embeds = encoder.encode(Loader({"text": LABELS[:3], "audio": clips}, ["text", "audio"]), **CALL)
    audio = encoder.model.encode_audio(clips, encoder.processor)
    expected = audio + encoder.model.encode_text(LABELS[:3], encoder.processor, language="eng")
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(embeds, expected, atol=1e-6)


def test_a_clip_too_short_to_encode_is_filled_with_silence(encoder):
    clip = builders.noise(400, seed=1)
    embeds = encoder.encode(Loader({"audio": [{"array": clip, "sampling_rate": 16000}]}, ["audio"]), **CALL)
    filled = np.pad(clip, (0, 2000))
    expected = encoder.model.encode_audio([filled], encoder.processor, sampling_rate=16000)
    np.testing.assert_allclose(embeds, expected, atol=1e-6)


def test_other_modalities_are_refused(encoder):
    with pytest.raises(ValueError, match=r"\['image'\]"):
        encoder.encode(Loader({"image": [0]}, ["image"]), **CALL)


@pytest.mark.parametrize(
    ("subset", "language", "expected"),
    [
        ("fra", None, "fra_Latn"),
        ("fra", "deu", "fra_Latn"),
        ("mixed", "deu", "deu"),  # two languages: the language of a text is unknown
        ("xxx", "deu", "deu"),  # the tokenizer has no such language
        ("none", None, None),
        ("sung", None, "fra_Latn"),  # beside recordings without language
    ],
)
def test_language_of_a_subset(encoder, monkeypatch, subset, language, expected):
    langs = {"fra": ["fra-Latn"], "mixed": ["fra-Latn", "eng-Latn"], "xxx": ["kor-Hang"]}
    langs["sung"] = ["zxx-Zxxx", "fra-Latn"]
    task = metadata("Languages", "STS", langs, ["text"], "t2t", "cosine_spearman")
    monkeypatch.setattr(encoder, "language", language)
    assert encoder._language(task, subset) == expected
    any_model = SupCLAPEncoder("parity", language=language, model=load_embedding_model(Parity()))
    codes = {"fra": "fra", "sung": "fra", "xxx": "kor"}
    assert any_model._language(task, subset) == codes.get(subset, language or "eng")


def test_a_folder_by_name_and_the_metadata_of_mteb(tmp_path, encoder):
    encoder.model.save_pretrained(tmp_path / "tiny")
    encoder.processor.save_pretrained(tmp_path / "tiny")
    loaded = SupCLAPEncoder(str(tmp_path / "tiny"), device="cpu")
    assert isinstance(loaded.model, SupCLAPModel)
    meta = loaded.mteb_model_meta
    assert (meta.name, meta.embed_dim, meta.max_tokens) == ("local/tiny", 16, 514)
    assert meta.n_parameters == sum(weight.numel() for weight in encoder.model.parameters())
    assert meta.n_embedding_parameters == encoder.model.text_model.get_input_embeddings().weight.numel()
    assert "jpn-Jpan" in meta.languages
    assert (meta.loader, meta.framework, meta.modalities) == (
        SupCLAPEncoder,
        ["PyTorch", "Transformers"],
        ["audio", "text"],
    )
    assert (meta.use_instructions, meta.open_weights, meta.similarity_fn_name.value) == (False, True, "cosine")
    text = Loader({"text": LABELS}, ["text"])
    np.testing.assert_array_equal(loaded.encode(text, **CALL), encoder.encode(text, **CALL))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("org/name", "org/name"), ("name", "local/name"), ("/models/final", "local/final"), ("", "local/supclap")],
)
def test_the_name_in_mteb_is_an_id_of_the_hub(encoder, name, expected):
    meta = SupCLAPEncoder(name, language="fra", model=encoder.model, processor=encoder.processor).mteb_model_meta
    assert (meta.name, meta.revision) == (expected, f"{encoder.embedding_model.fingerprint}-fra")


def test_options_of_the_hub_and_the_device_reach_the_model(encoder, monkeypatch):
    calls = []

    def load(*name, **options):
        calls.append((*name, options))
        return encoder.model

    monkeypatch.setattr(SupCLAPModel, "from_pretrained", load)
    monkeypatch.setattr(SupCLAPModel, "to", lambda model, device: calls.append(device))
    monkeypatch.setattr("modeling_supclap.integrations.mteb.default_device", lambda: "cuda")
    monkeypatch.setattr(
        "modeling_supclap.integrations.mteb.load_embedding_model",
        lambda *words: (calls.append(words[2:]), encoder.embedding_model)[1],
    )
    SupCLAPEncoder("org/name", "v1", "cuda:1", token="x")
    SupCLAPEncoder("org/name", "v1")
    SupCLAPEncoder("org/name", dtype="float16")
    SupCLAPEncoder("org/name", device="cuda:2", model=encoder.model)
    SupCLAPEncoder("org/name", model=encoder.model)
    SupCLAPEncoder("org/name", device="cuda:3", model=encoder.embedding_model)
    assert calls == [
        *[("org/name", {"revision": "v1", "token": "x"}), "cuda:1", ("cuda:1", "org/name", False)],
        *[("org/name", {"revision": "v1"}), "cuda", (None, "org/name", False)],
        *[("org/name", {"dtype": "float16"}), "cuda", (None, "org/name", False)],
        *["cuda:2", ("cuda:2", "org/name", False)],
        (None, "org/name", False),
        ("cuda:3", "org/name", False),
    ]


@pytest.mark.filterwarnings("ignore:Precision is ill-defined")
def test_the_results_of_a_task_are_those_of_the_model_in_memory():
    model = load_embedding_model(Parity(), name="no folder of this name")
    results = evaluate_task(model, LocalZeroShot())
    audio = model.encode_audio([resample(clip, 16000, 8000) for clip in stored_clips()], 1)
    predicted = (audio @ model.encode_text(LABELS, "eng", 1).T).argmax(axis=1)
    assert results.scores["mteb"] == {"accuracy": {"main_score": score(np.mean(predicted == TRUTH))}}
    assert results.protocol == {"dataset": "LocalZeroShot", "split": "test", "mteb": {"version": mteb.__version__}}


@pytest.mark.parametrize("save", [builders.save_clap, partial(folders.write_folder, name="A")])
def test_public_models_are_loaded_by_name(tmp_path, save):
    save(tmp_path / "public")
    encoder = SupCLAPEncoder(str(tmp_path / "public"), device="cpu")
    expected = load_embedding_model(tmp_path / "public", device="cpu").encode_text(LABELS, None)
    found = encoder.encode(Loader({"text": LABELS}, ["text"]), **CALL)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert encoder.mteb_model_meta.embed_dim == expected.shape[1]


def test_code_of_a_repository_runs_only_if_it_is_trusted(tmp_path):
    folder = str(save_code(tmp_path / "model"))
    with pytest.raises(ValueError, match="trust_remote_code"):
        SupCLAPEncoder(folder)
    encoder = SupCLAPEncoder(folder, device="cpu", trust_remote_code=True)
    found = encoder.encode(Loader({"text": LABELS}, ["text"]), **CALL)
    np.testing.assert_allclose(found, np.full((len(LABELS), 2), 0.5**0.5), atol=1e-6)


def encode_calls(encoder, cache):
    """Evaluate with a results cache; return the number of calls of `encode`."""
    calls = []
    embed = encoder.encode
    encoder.encode = lambda *args, **kwargs: calls.append(args) or embed(*args, **kwargs)
    mteb.evaluate(encoder, LocalSTS(), cache=cache, show_progress_bar=False, co2_tracker=False)
    encoder.encode = embed
    return len(calls)


def test_cached_results_are_those_of_the_weights(tmp_path):
    """Runs have equal folder names, such as `final`; a cached result is read only for equal weights and language."""
    cache = ResultCache(tmp_path / "results")
    folders = {name: tmp_path / name / "final" for name in ("a", "b", "copy")}
    for folder, seed in zip(folders.values(), (0, 1, 0), strict=True):
        builders.supclap_model(builders.supclap_config(builders.sonar_config()), seed=seed).save_pretrained(folder)
        builders.nllb_processor().save_pretrained(folder)

    first, second, copy = (SupCLAPEncoder(str(folder), device="cpu") for folder in folders.values())
    assert first.mteb_model_meta.revision == first.embedding_model.fingerprint
    once = encode_calls(first, cache)
    assert once
    assert (encode_calls(copy, cache), encode_calls(second, cache)) == (0, once)
    in_german = SupCLAPEncoder(str(folders["a"]), device="cpu", language="deu")
    assert encode_calls(in_german, cache) == once

    second.model.logit_scale.data += 1  # trained on: the encoder of the same model, once more
    assert (
        encode_calls(SupCLAPEncoder(second.model.name_or_path, model=second.model, processor=second.processor), cache)
        == once
    )
    for _ in range(2):  # without a fingerprint
        assert encode_calls(SupCLAPEncoder("parity", model=load_embedding_model(Parity())), cache) == once


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.delitem(sys.modules, "modeling_supclap.integrations.mteb")
    monkeypatch.setitem(sys.modules, "mteb.models", None)
    with pytest.raises(ImportError, match=r'pip install "supclap\[mteb\]"'):
        import modeling_supclap.integrations.mteb  # noqa: F401
