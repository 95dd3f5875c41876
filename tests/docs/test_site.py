"""The site is built with strict links, loads nothing from other servers, and its search answers common questions."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted(ROOT.glob("metrics/*/README.md"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return the folder of the built site. A bad link raises."""
    commands = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        commands.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.mark.process
def test_the_site_is_built_and_whole(site):
    api = (site / "api" / "losses.html").read_text(encoding="utf-8")
    assert 'id="modeling_supclap.losses.support_vector.support_vector_loss"' in api
    index = (site / "paper_index.html").read_text(encoding="utf-8")
    assert 'href="api/losses.html#modeling_supclap.losses.support_vector.support_vector_loss"' in index
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe|link[^>]*rel="stylesheet")[^>]*(?:src|href)="(\w+:)?//', text)
        assert not fetched, page


# Words that people type -> text of a section that answers them.
QUESTIONS = {
    "own negatives": "wrong on purpose",
    "LAION checkpoint": "--model laion/clap-htsat-unfused",
    "search in German": "--language deu",
    "resume training": "--resume_from_checkpoint last",
    "100 million clips": "supclap embed",
    "freeze text encoder": "--text_layers 0",
    "mp3": "m4a",
    "commercial license": "table of Licences",
    "learning rate small dataset": "--learning_rate",
    "zero-shot classification": "--tasks zero_shot",
    "own loss function": "--objective",
    "seeds": "supclap sweep",
    "webdataset": "webdataset",
    "onnx": "supclap export",
    "temporal order": "order",
    "field recordings": "selections",
    "export csv": "--format csv",
    "find duplicates": "supclap overlap",
    "raven selections": "--format raven",
    "similar sounds": "--audio",
    "version pinning": "requirements.txt",
    "cpu only install": "--torch-backend cpu",
    "confidence interval": "bootstrap",
    "latex table": "table.tex",
    "classify species": "--tasks zero_shot",
    "coming from LAION CLAP": "--freeze-text",
}


@pytest.fixture(scope="module")
def hits(site):
    """Return a function from words to the first two sections that the site's search ranks for them."""
    lunr = pytest.importorskip("lunr")
    content = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    sections = {section["location"]: section for section in content["docs"]}
    documents = [(section, {"boost": section.get("boost", 1)}) for section in sections.values()]
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]  # as in the theme
    index = lunr.lunr(ref="location", fields=fields, documents=documents)

    def search(words: str) -> list[dict]:
        query = " ".join(re.findall(r"\w+", words))
        return [sections[hit["ref"]] for hit in index.search(query)[:2]]

    return search


@pytest.mark.process
@pytest.mark.parametrize(("words", "answer"), QUESTIONS.items())
def test_the_search_leads_to_the_answer(hits, words, answer):
    found = hits(words)
    assert any(answer in section["text"] for section in found), [section["location"] for section in found]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith(("http://", "https://")) or (page.parent / target).exists(), target
