"""Environments for a wheel: empty ones, and what the README's first minute does in one."""

from __future__ import annotations

import email
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent


class Environment:
    """A virtual environment in `folder` that sees no other packages, and runs in `folder`/work."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
        self.work = folder / "work"
        shutil.copytree(ROOT / "examples", self.work / "examples")

    def pip(self, *arguments: str) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), *arguments]
        subprocess.run([*pip, "--disable-pip-version-check", "--quiet"], check=True)

    def run(self, *command: str, timeout: float = 300) -> str:
        """What a command prints; it must end with exit code 0."""
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        env = {name: value for name, value in os.environ.items() if name not in hidden}
        env["PATH"] = f"{self.bin}{os.pathsep}{env['PATH']}"
        # Caches of tokens, and thereby the whole run, stay in the folder.
        env["XDG_CACHE_HOME"] = str(self.work / "cache")
        name, *rest = command
        done = subprocess.run(
            [str(self.bin / name), *rest],
            cwd=self.work,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def borrow(self, wheel: Path, extra: str) -> set[str]:
        """Link the installed packages that the wheel with this extra asks for, and no others.

        A requirement that is not installed here, or in another version, is an error.
        """
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
        todo, found = [(Requirement(text), extra) for text in asked], set()
        while todo:
            wanted, extra = todo.pop()
            extras = wanted.extras or {""}
            if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
                continue
            package = metadata.distribution(wanted.name)
            assert wanted.specifier.contains(package.version, prereleases=True), str(wanted)
            if new := {(wanted.name.lower(), e) for e in extras} - found:
                found |= new
                todo += [(Requirement(r), e) for r in package.requires or () for _, e in new]
                self._link(package)
        return {name for name, _ in found}

    def _link(self, package: metadata.Distribution) -> None:
        for top in {Path(str(file)).parts[0] for file in package.files or ()}:
            if top not in ("..", "__pycache__") and not (self.site / top).exists():
                (self.site / top).symlink_to(Path(str(package.locate_file(top))).resolve())


def first_minute() -> tuple[list[str], list[list[str]]]:
    """The Python snippets and the commands of the README's first minute."""
    text = (ROOT / "README.md").read_text().split("## The first minute")[1].split("\n## ")[0]
    snippets = re.findall(r"```python\n(.*?)```", text, re.S)
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.S)
    return snippets, [shlex.split(line, comments=True) for line in block.splitlines()]
