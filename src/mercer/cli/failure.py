"""An error that nothing expected: one sentence, and a file with the details."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path

PACKAGES = ("mercer", "torch", "triton", "transformers", "tokenizers", "safetensors", "datasets")


def describe(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else f"{text[:190]}…"


def write_details(error: BaseException) -> Path | None:
    """Write the details to the current folder, or the one for temporary files; None: to neither."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = f"mercer-error-{stamp}-{os.getpid()}.txt"
    text = _details(error)
    for folder in (Path.cwd, tempfile.gettempdir):
        try:
            path = Path(folder()) / name
            part = path.with_suffix(".tmp")
            try:
                with part.open("x", encoding="utf-8", errors="backslashreplace") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except OSError:
            continue
        return path
    return None


def _details(error: BaseException) -> str:
    versions = [f"python {platform.python_version()} on {platform.platform()}"]
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} is not installed")
    command = shlex.join(["mercer", *sys.argv[1:]])
    trace = "".join(traceback.format_exception(error))
    return "\n".join([f"command: {command}", *versions, "", trace])
