"""Every Python snippet of the README and the docs runs as it is, and so does every example."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(block, path, id=f"{path.name}-{n}")
    for path in PAGES
    for n, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def write_files(page, folder):
    """The files that a page tells its reader to write; their names."""
    files = re.findall(r'```python title="([\w.]+)"\n(.*?)```', page.read_text(), re.S)
    for name, text in files:
        (folder / name).write_text(text)
    return [name for name, _ in files]


# peft 0.21 asks by the name that transformers had before 5.23.
OLD_NAME = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize(("snippet", "page"), SNIPPETS)
def test_a_snippet_runs(snippet, page, tmp_path, monkeypatch):
    if "import timm\n" in snippet:
        pytest.importorskip("timm", reason="timm is not installed")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in write_files(page, tmp_path):
        monkeypatch.delitem(sys.modules, Path(name).stem, raising=False)
    for package in ("transformers", "peft"):
        if f"from {package} import" in snippet:
            pytest.importorskip(package, reason=f"needs {package}")
    exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})


@pytest.mark.filterwarnings(OLD_NAME)
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if path.stem.startswith("hf_"):
        pytest.importorskip("peft" if path.stem == "hf_peft" else "transformers")
    # An example may take a model as its argument.
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")


def test_there_are_snippets_and_examples():
    assert len(SNIPPETS) >= 5
    assert EXAMPLES


def tree(text):
    """The paths that an indented file tree names, the words after a name left out."""
    folders = []
    for line in text.splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        folders[depth:] = [name]
        if not name.endswith("/"):
            yield "".join(folders)


def test_the_file_tree_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text().split("## The files")[1]
    named = set(tree(re.search(r"```text\n(.*?)```", text, re.S)[1]))
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "src" / "mercer").rglob("*.py")
        if path.name != "__init__.py"
    }
    assert not modules - named, "modules without a line in the file tree"
    assert not {name for name in named if not (ROOT / name).exists()}, "lines without a file"


def test_every_page_has_a_place_in_the_site():
    nav = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name in nav, f"docs/{path.name} has no line in the nav of mkdocs.yml"


def test_the_pages_have_their_lengths():
    """A first visit and a page of figures stay short."""
    for page, most in (("README.md", 180), ("docs/performance.md", 200)):
        assert len((ROOT / page).read_text().splitlines()) <= most, page


def test_the_commands_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?make ([a-z]+)", (ROOT / "README.md").read_text())):
        assert f"\n{target}:" in makefile, target


def test_no_text_has_paths_of_a_machine():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    forbidden = re.compile(r"/work/|/root/|/opt/pypi|shared/DESIGN")
    for name in files:
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml", ".txt"} and path.name != "test_docs.py":
            assert not forbidden.search(path.read_text()), name


def test_figures_in_pages_are_those_of_the_results():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    assert tables["main"](["--check"]) == 0
