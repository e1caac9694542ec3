"""Imports go one way, among folders and among files, and the bare package needs torch alone."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import mercer
from mercer.opaque.constant import is_constant

ROOT = Path(mercer.__file__).parent

# Folders and files of the package; each may import only what stands before it.
ORDER = [
    ("names", "interrupt", "table"),
    ("opaque", "memory", "storage"),
    ("filters",),
    ("term",),
    ("kernels", "backends"),
    ("dispatch",),
    ("smoother",),
    ("explain", "tokenwise"),
    ("nn",),
    ("systems",),
    ("inspect",),
    ("testing",),
    ("__init__",),
    ("own",),
    ("parse",),
    ("bench",),
    ("data",),
    ("parallel",),
    ("models",),
    ("integrations",),
    ("train",),
    ("use",),
    ("studies",),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: n for n, names in enumerate(ORDER) for name in names}


def name_of(path):
    """The dotted name of a file; a package is its `__init__`."""
    return ".".join(("mercer", *path.relative_to(ROOT).with_suffix("").parts))


FILES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def nodes_of(tree):
    """All nodes but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from nodes_of(node)


def imported(name):
    """The files that a file imports, in functions too."""
    for node in nodes_of(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            wanted = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            wanted = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for parts in wanted:
            found = next((file for file in map(".".join, files_of(parts)) if file in FILES), None)
            if found is not None:
                yield found


def files_of(parts):
    """A module, a package, or a name in one of these."""
    yield parts
    yield [*parts, "__init__"]
    yield parts[:-1]
    yield [*parts[:-1], "__init__"]


GRAPH = {name: set(imported(name)) for name in FILES}


def test_no_file_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(GRAPH).prepare()
    except CycleError as error:
        pytest.fail("files import each other: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way(name):
    own = name.split(".")[1]
    for file in GRAPH[name]:
        other = file.split(".")[1]
        assert other == own or LEVEL[other] < LEVEL[own], f"{name} imports {file}"


def test_kernels_and_backends_never_see_each_other():
    for name, files in GRAPH.items():
        for one, other in (("kernels", "backends"), ("backends", "kernels")):
            if name.split(".")[1] == one:
                assert other not in {file.split(".")[1] for file in files}, name


def test_the_package_needs_torch_alone():
    """numpy is torch's own optional dependency; everything else is imported where it is used."""
    code = (
        "import sys; sys.modules.update({n: None for n in "
        "('typer', 'rich', 'transformers', 'triton', 'matplotlib', 'scipy')}); "
        "import mercer, torch; x = torch.zeros(1, 1, 2, 2); mercer.smooth(mercer.RBF(), x, x, x)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_compiler_of_torch_is_not_imported():
    """It takes longer than all of the rest, in every command."""
    code = "import sys, mercer; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_constant_of_a_graph_has_the_mark_of_torch():
    def mine():
        return 1

    def theirs():
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(is_constant(mine)) == vars(theirs) != {}


def test_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from mercer.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'mercer[cli]'" in done.stderr
