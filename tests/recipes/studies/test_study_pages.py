"""The generated pages are those of the committed files."""

import pytest
import yaml

from modeling_supclap.recipes.arguments import CONFIGS
from modeling_supclap.recipes.studies import pages


def test_a_claim_about_a_table_with_several_datasets_names_one(tmp_path, monkeypatch):
    claim = "{claim: c, table: supclap_table1, row: table1_infonce, baseline: 0.5, columns: [], change: up}"
    (tmp_path / "claims.yaml").write_text(f"- {claim}\n")
    monkeypatch.setattr(pages, "CLAIMS", tmp_path / "claims.yaml")
    with pytest.raises(ValueError, match="esc10"):
        pages.render_claims()


def test_the_page_of_results_is_that_of_the_committed_files():
    page = pages.RESULTS_PAGE.read_text(encoding="utf-8")
    assert pages.render_results(page) == page
    assert pages.MARK in page
    verdicts = page.partition("### Verdicts of the studies")[2].partition("### Verdicts of single tables")[0].strip()
    studies = sorted(pages.RESULTS.glob("evidence/*.json"))
    assert len(verdicts.splitlines()) == 2 + len(studies)
    assert all(f"`evidence/{path.stem.removeprefix('evidence_')}`" in verdicts for path in studies)


def test_the_page_of_settings_is_that_of_the_configurations():
    page = pages.SETTINGS_PAGE.read_text()
    assert pages.render_settings() == page
    known = yaml.safe_load(pages.SETTINGS.read_text())
    full = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.glob("*/full_*.yaml")}
    assert full - known.keys() == {"supclap/full_multilingual_clotho.yaml"}  # a combination of two other files
    different = {line.split(" | ")[0].strip("| ") for line in page.splitlines() if line.endswith("| no |")}
    assert different == {
        "checkpoint", "gradient clipping", "translator", "start", "model", "audio-text pairs a batch in stage B",
    }  # fmt: skip
