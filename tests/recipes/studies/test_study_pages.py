"""The generated pages are those of the committed files."""

import pytest

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
    different = {line.split(" | ")[0].strip("| ") for line in page.splitlines() if "| ours |" in line}
    assert different == {"`text_trained`", "`audio_trained`", "`items_of_a_batch`"}


def test_every_setting_of_our_choice_has_its_reason():
    settings, _, costs = pages.SETTINGS_PAGE.read_text().partition("## Cost")
    assert "`supclap/table1` | 60 |" in costs
    lines = [line.split(" | ") for line in settings.splitlines() if line.startswith("| `")]
    for setting, paper, _, value, relation, why in lines:
        assert relation in ("as printed", "ours", "not stated"), setting
        assert bool(paper.strip()) == (relation != "not stated"), setting
        assert value, setting
        assert relation == "as printed" or len(why) > 8, setting
