"""Pages of the site whose text lies outside `docs/`: notebooks, cards of the metrics, changelog, contributing."""

from pathlib import Path

from nbconvert import MarkdownExporter
from nbconvert.preprocessors import ExtractOutputPreprocessor

ROOT = Path(__file__).parents[1]
COPIES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
for card in ROOT.glob("metrics/*/README.md"):
    COPIES[f"metrics/{card.parent.name}.md"] = f"metrics/{card.parent.name}/README.md"


def on_files(files, config):
    """Adds the pages; a link of the repository into `docs/` becomes one of the site."""
    from mkdocs.structure.files import File

    for page, source in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text.replace("](../../docs/", "](../").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))

    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        exporter = MarkdownExporter(preprocessors=[ExtractOutputPreprocessor])
        text, resources = exporter.from_filename(str(notebook), {"unique_key": notebook.stem})
        text = text.replace("](../docs/", "](../")
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, picture in resources["outputs"].items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files
