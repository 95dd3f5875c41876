"""Small evaluation results with values that are easy to recognise."""

from pathlib import Path

import numpy as np
import soundfile

from modeling_supclap.evaluation.results import SCHEMA, Results, score
from modeling_supclap.metrics.names import RETRIEVAL_METRICS
from modeling_supclap.recipes import sweep

NUM_CLIPS = 6


PROTOCOL = {
    "dataset_hash": "d",
    "positives": "clip",
    "caption_handling": "all",
    "missing_clips": [],
    "audio": {"chunk_seconds": None},
    "intervals": {},
    "zste": {"set_hash": "s", "clip_seconds": {"pair": None}},
}


def outcome_results(hits, name="model", ids=None, clusters=None, **protocol):
    """Return results of one retrieval direction and one ZSTE task, both with these outcomes."""
    hits = np.asarray(hits, dtype=np.float64)
    ids = np.array([f"clip{index}" for index in range(len(hits))] if ids is None else ids)
    clusters = ids if clusters is None else np.array(clusters)
    prefix = "retrieval/eng/t2a"
    arrays = {f"{prefix}/{one}": hits for one in ("R@1", "R@5", "R@10", "mAP@10")}
    arrays |= {f"{prefix}/rank": 3 - 3 * hits.astype(int), f"{prefix}/query_id": ids, f"{prefix}/cluster": clusters}
    arrays |= {"zste/eng/3A/score": hits, "zste/eng/3A/query_id": ids, "zste/eng/3A/cluster": clusters}
    content = {
        "schema": SCHEMA,
        "model": {"name": name},
        "protocol": {**PROTOCOL, **protocol},
        "scores": {"retrieval": {"eng": {"t2a": {"R@1": score(hits.mean())}}}, "zste": {"eng": {}}},
    }
    return Results(content, arrays)


def query_results(hits, clusters=None, interval=None, chance=None, **content):
    """Return results of text-to-audio retrieval, with a hit (0 or 1) for each query and one cluster per query."""
    queries = np.arange(len(hits))
    clusters = queries if clusters is None else clusters
    arrays = {"R@1": np.array(hits, float), "query_id": queries.astype(str), "cluster": clusters.astype(str)}
    scores = {"retrieval": {"eng": {"t2a": {"R@1": score(float(np.mean(hits)), interval, chance)}}}}
    content = {"schema": SCHEMA, "protocol": {"languages": ["eng"]}, "scores": scores, **content}
    return Results(content, {f"retrieval/eng/t2a/{name}": values for name, values in arrays.items()})


PAPER_TRAINING = {
    "seconds": 1.0,
    "steps": 12,
    "arguments": {
        "loss": "kcl",
        "languages": ["eng", "fra"],
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
    },
}


def paired_queries(hits):
    """Return results with one query per entry of `hits`, two queries per recording."""
    results = query_results(hits, np.arange(len(hits)) // 2, chance=0.016, training=PAPER_TRAINING)
    results.arrays["similarity/eng/positive"] = np.array([0.99, 0.99, -1], np.float32)
    return results


def fake_training(monkeypatch, train):
    """Replace the training of `supclap sweep` and `reproduce` by a function from settings to results.

    Return the list of the settings of all calls.
    """
    calls = []

    def run(*groups):
        calls.append({})
        for group in groups:
            calls[-1] |= vars(group)
        train(calls[-1]).save(calls[-1]["output_dir"])
        Path(calls[-1]["output_dir"], "README.md").touch()

    monkeypatch.setitem(sweep.RECIPES, "train", sweep.RECIPES["train"]._replace(run=run))
    return calls


def direction_scores(value):
    more = {"R@1": (0, 0.05), "R@5": (0.1, 0.25), "R@10": (0.2, 0.5), "mAP@10": (0.05, 0.1)}
    return {name: score(value + plus, (value - 0.1, value + 0.1), chance) for name, (plus, chance) in more.items()}


def retrieval_arrays(language, ranks):
    return {
        f"captions/{language}/text": np.array([f"{language} caption {index}" for index in range(NUM_CLIPS)]),
        f"captions/{language}/clip": np.arange(NUM_CLIPS),
        f"retrieval/{language}/t2a/rank": np.array(ranks),
        f"retrieval/{language}/t2a/top": np.array([[index if rank == 0 else 0] for index, rank in enumerate(ranks)]),
        f"similarity/{language}/positive": np.linspace(0.2, 0.8, NUM_CLIPS),
        f"similarity/{language}/negative": np.linspace(-0.5, 0.3, NUM_CLIPS),
        f"embeddings/text/{language}": np.random.default_rng(1).standard_normal((NUM_CLIPS, 8)).astype(np.float32),
        f"embeddings/text_clip/{language}": np.arange(NUM_CLIPS),
    }


def make_results(folder):
    """Return results of two languages and all tasks, with recordings in the folder; the last recording is missing."""
    paths = [folder / f"{index}.wav" for index in range(NUM_CLIPS)]
    for index, path in enumerate(paths[:-1]):
        soundfile.write(path, 0.1 * np.sin(np.arange(8000) * (index + 1) / 20), 16000)
    content = {
        "schema": SCHEMA,
        "model": {"name": "folder <b>", "class": "SupCLAPModel", "fingerprint": "abc", "parameters": 1234567},
        "protocol": {
            "dataset": "esc50",
            "split": "test",
            "clips": NUM_CLIPS,
            "captions": {"eng": NUM_CLIPS, "fra": NUM_CLIPS},
            "classes": 2,
            "missing_clips": ["gone"],
            "positives": "clip",
            "caption_handling": "all",
            "languages": ["eng", "fra"],
            "audio": {"policy": "all of each recording, embedded at once"},
            "intervals": {"method": "percentile bootstrap over source recordings", "confidence": 0.95},
            "zero_shot": {"templates": {"supclap": ["This is a sound of {}"]}, "languages": ["eng"]},
            "zste": {"set_hash": "def", "num_candidates": 50},
            "dataset_hash": "ghi",
            "seed": 0,
        },
        "scores": {
            "retrieval": {
                "eng": {"t2a": direction_scores(0.4321), "a2t": direction_scores(0.5)},
                "fra": {"t2a": direction_scores(0.3), "a2t": direction_scores(0.35)},
                "mean": dict.fromkeys(("t2a", "a2t"), dict.fromkeys(RETRIEVAL_METRICS, score(0.46, None, 0.05))),
            },
            "multilingual": {
                "all": {"MRV": score(7.25, (6, 8))},
                "fra": {"Gap": score(0.125), "Dis": score(0.375, (0.3, 0.4))},
            },
            "zero_shot": {
                "eng": {
                    "supclap": {
                        "top1": score(0.75, (0.6, 0.9), 0.5),
                        "top5": score(1.0),
                        "mean_per_class": score(0.75),
                        "per_class": {"cat": 0.5, "dog": 1.0},
                    }
                }
            },
            "zste": {
                "eng": {"3A": score(0.61, None, 1 / 3, 1 / 2)},
                "fra": {"3A": score(0.58, None, 1 / 3, 1 / 2)},
                "all": {"3A": {"MRV": score(0.5)}},
            },
        },
        "versions": {"supclap": "0.1.0"},
        "run": {"device": "cpu", "dtype": "float32", "seconds": {"all": 3.0}, "created": "2026-01-01T00:00:00+00:00"},
    }
    arrays = {
        "clips/id": np.array([str(index) for index in range(NUM_CLIPS)]),
        "clips/audio_path": np.array([str(path) for path in paths]),
        "clips/label": np.array(["dog"] * NUM_CLIPS),
        **retrieval_arrays("eng", [0, 3, 0, 5, 0, 2]),
        **retrieval_arrays("fra", [0] * NUM_CLIPS),
        "multilingual/ranks": np.array([[0, 0], [3, 4], [0, 9], [5, 5], [0, 1], [0, 9]]),
        "multilingual/text": np.array(["everywhere", "b", "torn", "d", "e", "torn"]),
        "zero_shot/classes": np.array(["cat", "dog"]),
        "zero_shot/eng/supclap/confusion": np.array([[17, 3], [0, 41]]),
        "embeddings/audio": np.random.default_rng(0).standard_normal((NUM_CLIPS, 8)).astype(np.float32),
        "embeddings/audio_clip": np.arange(NUM_CLIPS),
    }
    return Results(content, arrays)
