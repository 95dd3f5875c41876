"""Pages of the site whose text lies outside `docs/`: notebooks, cards of the metrics, changelog, contributing."""

import base64
import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
COPIES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
for card in ROOT.glob("metrics/*/README.md"):
    COPIES[f"metrics/{card.parent.name}.md"] = f"metrics/{card.parent.name}/README.md"


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages; a link of the repository becomes one of the site."""
    for page, source in COPIES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = text.replace("](../../docs/", "](../").replace("](docs/", "](")
        files.append(File.generated(config, page, content=text))

    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        text, pictures = read_notebook(notebook)
        text = text.replace("](../docs/", "](../").replace("/README.md)", ".md)").replace(".ipynb)", ".md)")
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def read_notebook(notebook: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, what it printed below each cell, and its pictures by name."""
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
                parts.append(f"![What the cell above draws]({name})")
    return "\n\n".join(parts), pictures
