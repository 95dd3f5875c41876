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
    results = evaluate(
        ToneModel(caption_tones(rows)),
        rows,
        EvaluationOptions(tasks=TASKS, zste=ZSTE, audio=evaluation.AudioPolicy(max_audio_seconds=0.4)),
        EmbeddingCache(None),
        folds={f"clip{index}": index % 2 for index in range(8)},
        data={"dataset": "tones", "split": "test"},
        intervals=evaluation.Intervals(50, seed=3),
    )
    protocol = results.protocol
    assert (protocol["dataset"], protocol["split"], protocol["clips"], protocol["classes"]) == ("tones", "test", 8, 4)
    assert protocol["captions"] == {"eng": 16}
    assert protocol["folds"] == [0, 1]
    assert protocol["audio"]["policy"] == "the first 0.4 s of each recording, embedded at once"
    assert results.content["model"]["resampling_method"] == "kaiser_best"
    assert protocol["intervals"]["num_resamples"] == 50
    assert protocol["seed"] == 3
    assert protocol["zero_shot"]["templates"] == {"supclap": ["This is a sound of {}"]}
    assert protocol["zste"]["num_items"] == 8
    assert len(protocol["dataset_hash"]) == 64
    assert results.content["model"]["class"] == "ToneModel"
    assert results.content["model"]["embedding_dim"] == 41
    assert results.content["versions"].keys() >= {"torch", "transformers", "numpy", "python", "supclap"}
    assert results.scores["zero_shot"]["eng"]["supclap"]["per_fold"] == {"0": 1.0, "1": 1.0}
    assert results.arrays["clips/audio_path"].tolist() == [Path(row["audio_path"]).name for row in rows]
    assert results.arrays["embeddings/audio"].shape == (8, 41)
    assert results.arrays["embeddings/text_clip/eng"].tolist() == list(range(8))
    assert "retrieval eng t2a R@1" in results.table()
    assert not [name for name, values in results.arrays.items() if values.dtype == object]


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


def test_languages_that_no_task_uses_are_named():
    with pytest.warns(UserWarning, match="fra, deu.*zero_shot_languages"):
        EvaluationOptions(tasks=["zero_shot"], languages=["eng", "fra", "deu"])


def test_an_empty_split_is_an_error():
    with pytest.raises(ValueError, match=r"split.*empty"):
        evaluate(ToneModel(), [], cache=EmbeddingCache(None))


@pytest.mark.process
def test_evaluation_loads_nothing_of_training():
    code = "import sys, modeling_supclap.evaluation; print(*sys.modules)"
    loaded = run_python("-c", code).split()
    unwanted = ("modeling_supclap.training", "peft", "transformers.trainer", "transformers.training_args")
    assert not [name for name in loaded if name.startswith(unwanted)]
