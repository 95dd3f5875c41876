"""`evaluate`: one call, its results, and the same results from the cache."""

from pathlib import Path

import builders
import numpy as np
import pandas
import pytest
from datasets import Dataset
from fake_models import ToneModel, caption_tones
from processes import run_python
from recordings import tone_rows

from modeling_supclap import evaluation
from modeling_supclap.evaluation import EmbeddingCache, EvaluationOptions, evaluate

TASKS = ["retrieval", "zero_shot", "zste"]
ZSTE = evaluation.ZSTEOptions(num_items=8, num_candidates=12)
PHRASES = {
    f"tone_{number}": {"eng": f"a dog {number}", "fra": f"un chien {number}", "jpn": f"犬{number}"}
    for number in range(4)
}


@pytest.fixture
def rows(tmp_path):
    """Rows of eight tones in four classes, with two captions in each of two languages."""
    return tone_rows(tmp_path)


def steady(results):
    """Return the results without the values that differ between equal runs."""
    return {key: part for key, part in results.content.items() if key != "run"}


def test_a_perfect_model_and_a_second_run_from_the_cache(tmp_path, rows):
    models = [ToneModel(caption_tones(rows)) for _ in range(2)]
    results = [evaluate(one, rows, tasks=TASKS, zste=ZSTE, cache=EmbeddingCache(tmp_path / "cache")) for one in models]
    for task, value in results[0].scores["zste"]["eng"].items():
        assert value["value"] == 1, task
    assert results[0].scores["retrieval"]["eng"]["t2a"]["R@1"]["value"] == 1
    assert results[0].scores["zero_shot"]["eng"]["supclap"]["top1"]["value"] == 1
    assert models[1].calls == []
    assert results[1].content["run"]["cache"]["embedded"] == 0
    assert steady(results[0]) == steady(results[1])
    for folder, result in zip(("one", "two"), results, strict=True):
        result.save(tmp_path / folder)
    one, two = ((tmp_path / folder / "outcomes.npz").read_bytes() for folder in ("one", "two"))
    assert one == two


def test_the_protocol_describes_the_evaluation(rows):
    Path(rows[7]["audio_path"]).unlink()
    rows[6]["labels"] = ["tone_2", "tone_0"]
    results = evaluate(
        ToneModel(caption_tones(rows) | caption_tones(rows, "fra")),
        rows,
        EvaluationOptions(languages=["fra", "eng"], positives="captions", caption_handling="parallel"),
        EmbeddingCache(None),
        tasks=["retrieval", "zero_shot"],
        audio=evaluation.AudioPolicy(0.4, 0.25, "best", pad_short_clips=True),
        on_bad_audio="skip",
        folds={f"clip{index}": 2 - index % 2 for index in range(8)},
        data={"dataset": "tones", "split": "test"},
        intervals=evaluation.Intervals(50, 0.9, seed=3),
    )
    policy = "the first 0.4 s of each recording, in chunks of 0.25 s if it is longer; the best chunk for each text; "
    policy += "shorter clips than the model's minimum are padded with zeros"
    zero_shot = {"templates": {"supclap": ["This is a sound of {}"]}, "languages": ["eng"], "classes": None}
    assert len(results.protocol["zero_shot"].pop("prompts_hash")) == 64
    assert results.protocol == {
        "dataset": "tones",
        "origin": "tones",
        "dataset_config": {},
        "split": "test",
        "folds": [1, 2],
        "shared_sources": None,
        "without_rows": None,
        "dataset_hash": evaluation.hash_dataset(rows[:7], evaluation.hash_recordings(rows[:7])),
        "clips": 7,
        "captions": {"eng": 14, "fra": 14},
        "classes": 4,
        "missing_clips": ["clip7"],
        "on_bad_audio": "skip",
        "positives": "captions",
        "caption_handling": "parallel",
        "languages": ["fra", "eng"],
        "audio": {
            "sampling_rate_hz": 16_000,
            "max_audio_seconds": 0.4,
            "chunk_seconds": 0.25,
            "pooling": "best",
            "policy": policy,
        },
        "intervals": {
            "method": "percentile bootstrap over source recordings",
            "num_resamples": 50,
            "confidence": 0.9,
            "seed": 3,
        },
        "seed": 3,
        "zero_shot": zero_shot,
    }
    assert results.content["model"] == {
        "name": "ToneModel",
        "kind": "custom",
        "class": "ToneModel",
        "fingerprint": "tone",
        "parameters": None,
        "embedding_dim": 41,
        "resampling_method": "kaiser_best",
    }
    packages = {"torch", "torchaudio", "transformers", "datasets", "accelerate", "numpy"}
    assert results.content["versions"].keys() == {"python", "supclap", *packages}
    assert results.content["run"].keys() == {"device", "dtype", "created", "seconds", "cache"}
    assert 0 <= results.content["run"]["seconds"]["embed"] <= results.content["run"]["seconds"]["all"] < 1e3
    assert results.content["run"]["cache"] == {"read": 0, "embedded": 4}  # clips, class prompts, and two languages
    names = [f"clip{index}" for index in range(7)]
    assert results.arrays["clips/id"].tolist() == names
    assert results.arrays["clips/source"].tolist() == [f"recording{index}" for index in range(7)]
    assert results.arrays["clips/audio_path"].tolist() == [f"tone_{index}.wav" for index in range(7)]
    assert results.arrays["clips/label"][5:].tolist() == ["tone_1", "tone_2, tone_0"]
    assert results.arrays["embeddings/audio"].shape == (7, 41)
    assert results.arrays["embeddings/text_clip/eng"].tolist() == list(range(7))
    assert "retrieval eng t2a R@1" in results.table()
    assert not [name for name, values in results.arrays.items() if values.dtype == object]
    assert results.scores["zero_shot"].keys() == {"eng"}


def test_the_captions_of_a_dataset_are_in_the_first_language(rows):
    captions = [row["captions"]["fra"][0] for row in rows]
    columns = {"audio_path": [row["audio_path"] for row in rows], "caption": captions}
    model = ToneModel(caption_tones(rows, "fra"))
    results = evaluate(model, Dataset.from_dict(columns), languages=["fra"], cache=EmbeddingCache(None))
    assert results.protocol["captions"] == {"fra": 8}
    assert results.arrays["captions/fra/text"].tolist() == captions


def test_rows_to_train_on_are_embedded_only_for_probes(tmp_path, rows):
    (tmp_path / "train").mkdir()
    train = [{**row, "clip_id": f"train{index}"} for index, row in enumerate(tone_rows(tmp_path / "train", 10))]
    for row in train:
        row["source"] = row["clip_id"]
    train[0]["labels"] = ["tone_9"]
    calls = {}
    for task in ("zero_shot", "linear_probe", "few_shot"):
        model = ToneModel()
        options = {"train_rows": train, "audio": evaluation.AudioPolicy(max_audio_seconds=0.25), "shots": [1]}
        results = evaluate(model, rows, tasks=[task], cache=EmbeddingCache(None), **options)
        calls[task] = [count for kind, count, _ in model.calls if kind == "audio"]
        assert results.protocol["classes"] == 5  # one of them only in the training rows
    assert calls == {"zero_shot": [8], "linear_probe": [8, 10], "few_shot": [8, 10]}


@pytest.mark.parametrize("kind", ["supclap", "clap", "fused"])
def test_real_models_in_every_task_and_language(tmp_path, rows, kind):
    builders.save_pair(kind, tmp_path / kind)
    options = EvaluationOptions(
        tasks=TASKS,
        languages=["eng", "fra"],
        zero_shot_languages=["eng", "jpn"],
        zste=ZSTE,
        zste_languages=["eng", "fra"],
        template_sets=evaluation.TEMPLATE_SETS,
    )
    results = evaluate(tmp_path / kind, rows, options, EmbeddingCache(None), phrases=PHRASES)
    scores = results.scores
    assert scores.keys() == {"retrieval", "multilingual", "zero_shot", "zste"}
    assert scores["zero_shot"]["eng"].keys() == evaluation.TEMPLATE_SETS.keys()
    assert scores["zero_shot"]["jpn"].keys() == {"captions"}
    assert scores["zste"].keys() == {"eng", "fra", "all"}
    assert results.protocol["audio"]["chunk_seconds"] == (None if kind == "supclap" else 1)
    parameters = builders.pair(kind)[0].num_parameters()
    described = {"kind": "supclap" if kind == "supclap" else "clap", "parameters": parameters, "embedding_dim": 16}
    assert described.items() <= results.content["model"].items()
    assert (results.content["run"]["device"], results.content["run"]["dtype"]) == ("cpu", "float32")
    ranks = results.arrays["multilingual/ranks"]
    assert scores["multilingual"]["all"]["MRV"]["value"] == pytest.approx(ranks.var(axis=1).mean())
    # Compare with the embeddings in the results: the closest clip of each first caption.
    similarity = results.arrays["embeddings/text/eng"] @ results.arrays["embeddings/audio"].T
    first = results.arrays["retrieval/eng/t2a/top"][::2, 0]
    assert (similarity.argmax(axis=1) == first).all()
    # Compare with embedding one clip at a time.
    again = evaluate(tmp_path / kind, rows, options, EmbeddingCache(None), phrases=PHRASES, batch_size=1)
    np.testing.assert_allclose(again.arrays["embeddings/audio"], results.arrays["embeddings/audio"], atol=1e-6)


def test_embeddings_are_normalised_with_a_warning(rows):
    expected = evaluate(ToneModel(caption_tones(rows)), rows, cache=EmbeddingCache(None))
    with pytest.warns(UserWarning, match=r"\b3\b"):
        result = evaluate(ToneModel(caption_tones(rows), scale=3.0), rows, cache=EmbeddingCache(None))
    assert result.scores == expected.scores


def test_embeddings_that_are_not_numbers_are_an_error(rows):
    class Broken(ToneModel):
        def encode_text(self, texts, language):
            return super().encode_text(texts, language) * np.nan

    with pytest.raises(ValueError, match=r"Broken.*text"):
        evaluate(Broken(caption_tones(rows)), rows, cache=EmbeddingCache(None))


def test_letters_are_not_queries_or_classes(rows):
    for changed in ({**rows[0], "labels": "tone_0"}, {**rows[0], "captions": {"eng": "a tone"}}):
        for form in (list, Dataset.from_list):
            with pytest.raises(ValueError, match="list of strings"):
                evaluate(ToneModel(), form([changed]), tasks=["zero_shot"], cache=EmbeddingCache(None))
    with pytest.raises(ValueError, match="DataFrame"):
        evaluate(ToneModel(), pandas.DataFrame(rows), cache=EmbeddingCache(None))
    for name in ("tasks", "languages", "classes"):
        with pytest.raises(ValueError, match=rf"{name} is the string 'eng'"):
            EvaluationOptions(**{name: "eng"})
    for templates in ("a {}", ["a {}"]):
        with pytest.raises(ValueError, match=r"template_sets is .*a \{\}"):
            EvaluationOptions(template_sets=templates)


def test_an_empty_split_is_an_error():
    with pytest.raises(ValueError, match=r"split.*empty"):
        evaluate(ToneModel(), [], cache=EmbeddingCache(None))


@pytest.mark.process
def test_evaluation_loads_nothing_of_training():
    code = "import sys, modeling_supclap.evaluation; print(*sys.modules)"
    loaded = run_python("-c", code).split()
    unwanted = ("modeling_supclap.training", "peft", "transformers.trainer", "transformers.training_args")
    assert not [name for name in loaded if name.startswith(unwanted)]
