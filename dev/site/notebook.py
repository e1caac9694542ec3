"""A notebook as a page: its text, its code and what it printed and drew."""

from __future__ import annotations

import base64
import json
from pathlib import Path


def notebook_page(notebook: Path, folder: Path) -> str:
    """The page; pictures become files in `folder`, named after the notebook."""
    cells = json.loads(notebook.read_text())["cells"]
    text, pictures = [], 0
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text.append(source)
            continue
        text.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                pictures += 1
                name = f"{notebook.stem}-{pictures}.png"
                (folder / name).write_bytes(base64.b64decode(data["image/png"]))
                text.append(f"![drawn by the cell above]({name})")
            elif printed := "".join(output.get("text", data.get("text/plain", ""))):
                text.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(text) + "\n"
