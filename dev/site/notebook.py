"""A notebook: run again, or as a page with its text, its code and what it printed and drew.

python dev/site/notebook.py examples/tour.ipynb     # run it, and keep what it printed and drew
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path


def run(notebook: Path) -> None:
    """Run all cells in a new process, and write the notebook with their outputs."""
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.read(notebook, as_version=4)
    NotebookClient(found, timeout=120, resources={"metadata": {"path": "."}}).execute()
    found.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(found.cells):
        cell.id = f"cell-{number}"
        # Times of the run would change every time.
        cell.metadata = nbformat.from_dict({})
        # Warnings name folders of this machine.
        kept = [out for out in cell.get("outputs", []) if out.get("name") != "stderr"]
        if "outputs" in cell:
            cell.outputs = kept
    nbformat.write(found, notebook)


KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


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


if __name__ == "__main__":
    run(Path(sys.argv[1]))
