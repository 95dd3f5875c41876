"""The site is built with strict links, and its pages load nothing from other servers."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("metrics/*/README.md"))


@pytest.mark.process
def test_the_site_is_built_and_whole(tmp_path, monkeypatch):
    commands = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    monkeypatch.chdir(ROOT)
    commands.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path)))  # a bad link raises

    api = (tmp_path / "api" / "losses.html").read_text(encoding="utf-8")
    assert 'id="modeling_supclap.losses.support_vector.support_vector_loss"' in api
    index = (tmp_path / "paper_index.html").read_text(encoding="utf-8")
    assert 'href="api/losses.html#modeling_supclap.losses.support_vector.support_vector_loss"' in index
    for page in tmp_path.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|link[^>]*rel="stylesheet")[^>]*(?:src|href)="(\w+:)?//', text)
        assert not fetched, page


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith(("http://", "https://")) or (page.parent / target).exists(), target
