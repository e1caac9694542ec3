"""The documentation site: python dev/site/build.py [--output site]

The pages of docs/, those of the repository that belong to them, and those that are made from the
code go to a new folder. Zensical builds them there. A dead link, a page without a place in the
navigation, or a request to another host ends with exit code 1, and the site of before stays.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from check import check
from notebook import notebook_page
from pages import CODE, convert, escape, outside
from reference import ROOT, command_page, pages, table_page

# Pages that stand elsewhere in the repository, and what they are called here.
ELSEWHERE = {
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "README.md": "start.md",
    "dev/LOG.md": "log.md",
    "examples/tour.ipynb": "tour.md",
}


EXAMPLES = "examples.md"


def stage(root: Path, folder: Path) -> None:
    """All pages and pictures of the site, in `folder`."""
    known = {f"docs/{path.name}": path.name for path in sorted((root / "docs").iterdir())}
    known |= {source: page for source, page in ELSEWHERE.items() if (root / source).exists()}
    examples = sorted((root / "examples").glob("*.py"))
    # The anchor is that of its heading.
    known |= {f"examples/{path.name}": f"{EXAMPLES}#{path.stem}py" for path in examples}
    places = ("studies/*/*.png", "token-kernels/*.png")
    results = [path for place in places for path in sorted((root / "results").glob(place))]
    known |= {path.relative_to(root).as_posix(): picture(path) for path in results}
    for name in ("reference", "studies"):
        (folder / name).mkdir(parents=True)
    for source, page in known.items():
        path = root / source
        if path.suffix == ".md" and source != "README.md":
            (folder / page).write_text(with_drawings(convert(source, known, root), path.parent))
        elif path.suffix == ".ipynb":
            text = notebook_page(path, folder)
            (folder / page).write_text(convert(source, known, root, text))
        elif path.suffix not in (".md", ".py"):
            shutil.copy(path, folder / page)
    shutil.copy(root / "dev/site/style.css", folder / "style.css")
    made = pages() | {
        "reference/table.md": outside(CODE, table_page(), escape),
        "reference/command.md": command_page(),
        EXAMPLES: examples_page(examples),
    }
    for page, text in made.items():
        (folder / page).write_text(text)


def picture(path: Path) -> str:
    """Where a committed picture stands in the site."""
    return f"studies/{path.parent.name}-{path.name}"


def examples_page(files: list[Path]) -> str:
    """Every example: its first lines as text, then all of it."""
    text = ["# Examples", "Each is one file in `examples/`, and runs as it is."]
    for path in files:
        code = path.read_text()
        about = (ast.get_docstring(ast.parse(code)) or "").partition("\n\n")[0]
        text += [f"## {path.name}", outside(CODE, about, escape), f"```python\n{code}```"]
    return "\n\n".join(text) + "\n"


def with_drawings(text: str, folder: Path) -> str:
    """SVG pictures stand in the page itself, so that they take its colours."""

    def drawing(found: re.Match[str]) -> str:
        svg = (folder / found[2]).read_text()
        svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|\n\s*", "", svg, flags=re.S)
        label = f'<svg role="img" aria-label="{found[1]}"'
        return f"<figure>{svg.replace('<svg', label, 1)}</figure>"

    return re.sub(r"^!\[([^\]]*)\]\(([\w-]+\.svg)\)$", drawing, text, flags=re.M)


def missing(config: str, folder: Path) -> list[str]:
    """Pages that the navigation does not name."""
    named = set(re.findall(r": ([\w/-]+\.md)$", config, re.M))
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    return [f"{page}: no place in the nav of mkdocs.yml" for page in sorted(there - named)] + [
        f"{page}: in the nav of mkdocs.yml, but it does not exist" for page in sorted(named - there)
    ]


def make(folder: Path) -> list[str]:
    """Build the site of a folder with mkdocs.yml and docs/; what is wrong, as sentences."""
    if wrong := missing((folder / "mkdocs.yml").read_text(), folder / "docs"):
        return wrong
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    env = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        told = (done.stdout + done.stderr).partition("Traceback")[0]
        return [re.sub(r"\x1b\[[\d;]*m", "", told).strip()]
    return check(folder / "site")


def build(root: Path, output: Path) -> list[str]:
    """Build the site of a checkout, and replace `output` if nothing is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        stage(root, folder / "docs")
        shutil.copy(root / "mkdocs.yml", folder)
        for name in ("src", "dev"):
            (folder / name).symlink_to(root / name)
        if wrong := make(folder):
            return wrong
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(folder / "site", output)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site", help="the folder of the site")
    output = parser.parse_args().output
    wrong = build(ROOT, output)
    print(
        "\n".join(wrong)
        or f"the site is in {output}; to read it: python -m http.server -d {output}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
