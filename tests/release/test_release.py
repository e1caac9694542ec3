"""The wheel, the source archive, and the README's first minute in an empty environment.

The packages that the wheel asks for are linked from this environment, and no others, so nothing is
downloaded. `make release-check` lets pip install them.
"""

import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml
from release.check import IMPORT
from release.environment import ROOT, Environment, first_minute

import mercer

pytest.importorskip("hatchling", reason="hatchling builds the wheel: pip install hatchling")


def build(source, folder, *options):
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder that `make dist` makes."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("dist-info/METADATA"))
        return archive.read(name).decode()


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    package = ROOT / "src" / "mercer"
    files = {
        f"mercer/{path.relative_to(package).as_posix()}"
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = names(wheel)
    assert {"mercer/py.typed", "mercer/dispatch/rules.json"} <= files
    assert {name for name in found if ".dist-info/" not in name} == files
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_the_version_stands_once(wheel):
    assert f"\nVersion: {mercer.__version__}\n" in metadata(wheel)
    assert wheel.name.startswith(f"mercer-{mercer.__version__}-")
    assert "version = " not in (ROOT / "pyproject.toml").read_text().split("[project]")[1][:300]
    assert f"\n## {mercer.__version__} - " in (ROOT / "CHANGELOG.md").read_text()
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text()


def test_the_citation_names_the_papers_of_the_readme():
    papers = (ROOT / "README.md").read_text().split("## The papers")[1]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(cited)
    named = re.findall(r"(\d{4})\. \*(.+?)\*", " ".join(papers.split()))
    assert len(named) == 3
    assert {(str(r["year"]), r["title"] + ".") for r in cited["references"]} == set(named)
    for reference in cited["references"]:
        for author in reference["authors"]:
            assert author["family-names"] in papers


def test_the_wheel_names_its_extras(wheel):
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata(wheel), re.M))
    assert {"cli", "train", "data", "hf", "timm", "inspect", "docs"} <= extras
    required = re.findall(r"^Requires-Dist: ([^;]+)$", metadata(wheel), re.M)
    assert [re.match(r"[\w-]+", name)[0] for name in required] == ["torch"]


def test_the_source_archive_builds_the_same_wheel(dist, wheel, tmp_path):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    present = {path.name for path in folder.iterdir()}
    assert {"README.md", "LICENSE", "CITATION.cff", "SECURITY.md", "tests", "docs"} <= present
    assert not {".venv", ".git", ".ci", "runs", "site"} & present
    build(folder, tmp_path / "again", "-t", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {i.filename: i.CRC for i in one.infolist()} == {
            i.filename: i.CRC for i in other.infolist()
        }


@pytest.fixture
def environment(tmp_path, wheel):
    def make(extra):
        made = Environment(tmp_path / "environment")
        packages = made.borrow(wheel, extra)
        made.pip("install", "--no-deps", "--no-index", str(wheel))
        return made, packages

    return make


def test_the_library_needs_torch_alone(environment):
    bare, packages = environment("")
    assert "torch" in packages
    assert not {"numpy", "transformers", "rich", "typer"} & packages
    assert bare.run("python", "-c", IMPORT).startswith(mercer.__version__)


def test_the_command_needs_its_extra_alone(environment):
    command, packages = environment("cli")
    assert {"rich", "typer"} <= packages
    assert not {"numpy", "transformers"} & packages
    assert "vaswani2017" in command.run("mercer", "systems", "--plain")


# The commands of the README, made small: two steps in place of a hundred, one small shape.
SMALL = {
    "train": "--set d_model=16 --length 32 --batch 2 --eval-items 200 --tokenizer bytes",
    "generate": "--tokens 5",
    "bench": "--shapes 1x2x64x16 --repeats 3",
}
# All in one process, which imports torch and transformers once.
COMMANDS = """
import sys
from mercer.cli.main import main
for command in {commands}:
    sys.argv = command
    try:
        main()
    except SystemExit as end:
        assert not end.code, (command, end.code)
"""


def test_the_first_minute_needs_its_extra_alone(environment):
    trained, packages = environment("train")
    assert {"torch", "transformers"} <= packages
    assert not {"pytest", "datasets", "pandas"} & packages
    snippets, commands = first_minute()
    assert len(snippets) >= 3
    assert {command[1] for command in commands} >= {"train", "generate", "explain", "bench"}
    small = [
        [{"100": "2"}.get(word, word) for word in command] + SMALL.get(command[1], "").split()
        for command in commands
    ]
    printed = trained.run("python", "-c", "\n".join(snippets) + COMMANDS.format(commands=small))
    assert "done: 2 steps" in printed
    assert "vaswani2017" in printed
