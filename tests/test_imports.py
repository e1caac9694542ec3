"""Imports go one way, and the bare package needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mercer

ROOT = Path(mercer.__file__).parent

# Each may import only what stands before it.
ORDER = [
    ("opaque", "memory"),
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
    ("bench",),
    ("parse",),
    ("models", "data"),
    ("train",),
    ("studies",),
    ("cli",),
    ("__main__",),
]
LEVEL = {name: n for n, names in enumerate(ORDER) for name in names}


def imported(path):
    """The modules of the package that a file imports, by their first name."""
    package = ("mercer", *path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level] if node.level else ()
            module = (*base, *(node.module.split(".") if node.module else ()))
            if module[:1] == ("mercer",):
                names = module[1:2] or tuple(alias.name for alias in node.names)
                yield from (name if name in LEVEL else "__init__" for name in names)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for other in imported(path):
        assert other == own or LEVEL[other] < LEVEL[own], f"{own} imports {other}"


def test_kernels_and_backends_never_see_each_other():
    for one, other in (("kernels", "backends"), ("backends", "kernels")):
        for path in (ROOT / one).rglob("*.py"):
            assert other not in set(imported(path)), path


def test_the_package_needs_torch_alone():
    """numpy is torch's own optional dependency; everything else is imported where it is used."""
    code = (
        "import sys; sys.modules.update({n: None for n in "
        "('typer', 'rich', 'transformers', 'triton', 'matplotlib', 'scipy')}); "
        "import mercer, torch; x = torch.zeros(1, 1, 2, 2); mercer.smooth(mercer.RBF(), x, x, x)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; from mercer.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "pip install 'mercer[cli]'" in done.stderr
