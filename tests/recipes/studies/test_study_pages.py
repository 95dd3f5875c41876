"""The generated pages are those of the committed files."""

import json

import pytest
import torch
import yaml
from transformers import BertConfig

from modeling_supclap import SupCLAPConfig, SupCLAPModel
from modeling_supclap.configuration_supclap import CNN14Config
from modeling_supclap.recipes.options import LastPartArguments
from modeling_supclap.recipes.posttrain_teminal import count_trained
from modeling_supclap.recipes.studies import pages
from modeling_supclap.recipes.studies.plan import PUBLISHED_CLIPS
from modeling_supclap.recipes.train_supclap import choose_parameters
from modeling_supclap.training.hard_batches import POOL_SIZE


def test_a_claim_about_a_table_with_several_datasets_names_one(tmp_path, monkeypatch):
    claim = "{claim: c, table: supclap_table1, row: table1_infonce, baseline: 0.5, columns: [], change: up}"
    (tmp_path / "claims.yaml").write_text(f"- {claim}\n")
    (tmp_path / "results").symlink_to(pages.STUDIES / "results")
    monkeypatch.setattr(pages, "STUDIES", tmp_path)
    with pytest.raises(ValueError, match="esc10"):
        pages.list_claims()


def test_a_claim_has_the_control_of_its_study(tmp_path, monkeypatch):
    (tmp_path / "results" / "mini").mkdir(parents=True)
    (tmp_path / "results" / "evidence").mkdir()
    score = {"values": [0.7, 0.8], "differences": [0.2, 0.25], "low": 0.1, "high": 0.35}
    rows = [{"row": "new", "baseline": "base", "dataset": "esc10", "seeds": [0, 1], "scores": {"R@1": score}}]
    (tmp_path / "results" / "mini" / "t.json").write_text(json.dumps({"rows": rows}))
    verdicts = {
        "a": "holds as a speed-up, explained by a control: X, explained by a control",
        "b": "open",
        "c": "holds",
    }
    for name, verdict in verdicts.items():
        (tmp_path / "results" / "evidence" / f"{name}.json").write_text(json.dumps({"verdict": verdict}))
    entry = {"table": "t", "row": "new", "baseline": "base", "columns": ["R@1"]}
    claims = [{**entry, "claim": f"claim {name}", "study": name, "change": "up"} for name in verdicts]
    claims.append({**entry, "claim": "down", "study": "a", "change": "down"})
    claims.append({**entry, "claim": "gain", "change": "up", "gain": True})
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(claims))
    monkeypatch.setattr(pages, "STUDIES", tmp_path)
    heading, *lines = pages.list_claims().lines
    assert heading == ["claim", "difference, 95 % interval", "seeds", "verdict"]
    interval = "+22.5 (+10.0 to +35.0)"
    assert lines == [
        ["claim a", interval, "2", "holds, explained by a control: X, explained by a control"],
        ["claim b", interval, "2", "holds"],
        ["claim c", interval, "2", "holds"],
        ["down", interval, "2", "does not hold"],
        ["gain", interval, "2", "holds as a speed-up"],
    ]


def test_the_command_writes_each_page(tmp_path, monkeypatch):
    written = {tmp_path / "new" / "a.md": "# One\n", tmp_path / "b.md": "# Two\n"}
    monkeypatch.setattr(pages, "write_pages", lambda: written)
    pages.main()
    assert {path: path.read_text() for path in tmp_path.rglob("*.md")} == written


def test_the_pages_are_those_of_the_committed_files():
    written = pages.write_pages()
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, path
    shown = "".join(written.values())
    results = sorted(pages.STUDIES.glob("results/*/*.json"))
    assert len(results) > 40
    for path in results:
        assert f"### {path.stem.replace('_', '/', 1)}: " in shown
    verdicts = written[pages.DOCS / "studies" / "verdicts.md"]
    assert verdicts.count("| `evidence/") == len(list(pages.STUDIES.glob("results/evidence/*.json")))
    assert (pages.DOCS / "studies" / "vectors.md").exists()  # not generated


def test_the_page_of_results_is_short():
    page = (pages.DOCS / "results.md").read_text(encoding="utf-8")
    assert len(page.split()) <= 1500


def test_the_guides_are_short():
    guides = [path.read_text(encoding="utf-8") for path in (pages.DOCS / "guides").glob("*.md")]
    assert 10_000 < sum(len(guide.split()) for guide in guides) <= 20_000


def test_every_setting_of_our_choice_has_its_reason():
    settings = (pages.DOCS / "paper_settings.md").read_text(encoding="utf-8")
    lines = [line.split(" | ") for line in settings.splitlines() if line.startswith("| `")]
    for setting, paper, _, value, relation, why in lines:
        assert relation in ("as printed", "ours", "not stated"), setting
        assert bool(paper.strip()) == (relation != "not stated"), setting
        assert value or "dataset_config" in setting, setting
        assert relation == "as printed" or len(why) > 8, setting
    assert {line[0].strip("| ") for line in lines if line[4] == "ours"} == {
        "`text_trained`", "`audio_trained`", "`items_of_a_batch`"
    }  # fmt: skip


def test_the_values_that_follow_from_settings_are_right():
    """`value` in paper_settings.yaml: numbers that no option contains."""
    stated: dict[str, list] = {}
    parts = yaml.safe_load((pages.STUDIES / "paper_settings.yaml").read_text(encoding="utf-8"))["parts"]
    for part in parts:
        for entry in part["settings"]:
            if "value" in entry:
                stated.setdefault(entry["key"], []).append(entry["value"])
    with torch.device("meta"):
        towers = {"audio_config": CNN14Config(), "text_config": BertConfig()}
        model = SupCLAPModel(SupCLAPConfig(**towers, projection_dim=1024, projection_type="residual"))
    choose_parameters(LastPartArguments(), model)
    counts = count_trained(model)
    clips = [PUBLISHED_CLIPS[name]["train"] for name in ("audiocaps", "clotho", "wavcaps")]
    assert stated == {
        "train_clips": clips,
        "steps": [clips[0] // 24 * 10, 5 * clips[1] // 24 * 10],
        "similarity": ["cosine"],
        "hard_negatives_pool": [POOL_SIZE],
        "text_trained": [counts["text_trained"]],
        "audio_trained": [counts["audio_trained"]],
        "split_recordings": [0.7 * PUBLISHED_CLIPS["esc50"]["all"]],
        "train_recordings": [50],
        "pairs_of_stage_a": [50 * 49],
        "items_of_stage_b": [3 * 50 * 49],
        "items_of_a_batch": [3 * 85],
    }
