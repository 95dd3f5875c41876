"""Hooks of the site: add pages for notebooks, metric cards, changelog and CONTRIBUTING, and link the paper index."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
COPIES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
for card in ROOT.glob("metrics/*/README.md"):
    COPIES[f"metrics/{card.parent.name}.md"] = f"metrics/{card.parent.name}/README.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, with links to repository files replaced by links to pages."""
    for page, source in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text.replace("](../../docs/", "](../").replace("](docs/", "](")
        if not page.startswith("metrics/"):  # guides answer questions; changes and house rules do not
            text = f"---\nsearch:\n  exclude: true\n---\n\n{text}"
        files.append(File.generated(config, page, content=text))

    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        text, pictures = read_notebook(notebook)
        text = text.replace("](../docs/", "](../").replace("/README.md)", ".md)").replace(".ipynb)", ".md)")
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link the functions and metrics in the paper index to their pages, with the last part of the name as text.

    API pages rank below the guides in the search of the site.
    """
    if page.file.src_uri.startswith("api/"):
        page.meta.setdefault("search", {})["boost"] = 0.5
    if page.file.src_uri != "paper_index.md":
        return markdown

    package: Any = griffe.load("modeling_supclap", search_paths=[ROOT])
    pages = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/api/*.md"))
    described = set(re.findall(r"^::: (\S+)", pages, flags=re.M))

    def link(name: re.Match) -> str:
        path = package[name[1]].canonical_path
        module, _, short = path.rpartition(".")
        return f"[`{short}`][{path}]" if described & {module, path} else f"`{short}`"

    markdown = re.sub(r"`modeling_supclap\.([\w.]+)`", link, markdown)
    return re.sub(r"`metrics/(\w+)`", r"[`\1`](metrics/\1.md)", markdown)


def read_notebook(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """Convert a notebook to Markdown, with printed output below each cell; return it with its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")

        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            elif "image/png" in output.get("data", {}):
                name = f"{notebook.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
    return "\n\n".join(parts), pictures
