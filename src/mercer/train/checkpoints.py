"""Checkpoints, written to a temporary folder, signed by a manifest, then renamed into place.

Requirements: a process may die between any two lines, and the disk may be full. Earlier checkpoints
are then unchanged, and a half-written one is never used. Nothing is unpickled: tensors are
safetensors, the rest is JSON.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """There is no room for a file of the run. Earlier checkpoints are unchanged."""


class Checkpoints:
    """The checkpoints of a run, the last `keep` of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep
        self._damaged: list[Path] = []

    def save(self, step: int, fill: Callable[[Path], None]) -> Path:
        """Save the files that `fill` writes into a folder as the checkpoint of a step."""
        final = self.folder / f"step-{step:08d}"
        with told_if_full(self.folder, f"the checkpoint of step {step}"), replacing(final) as aside:
            fill(aside)
            _sign(aside)
        self._prune()
        return final

    def steps(self) -> list[Path]:
        """All folders named as checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if re.fullmatch(r"step-\d{8,}", p.name))

    def latest(self, say: Callable[[str], None]) -> Path | None:
        """The last valid checkpoint, or None; `say` names each damaged one after it."""
        found = self.steps()
        for path in reversed(found):
            problem = examine(path)
            if problem is None:
                return path
            self._damaged.append(path)
            say(f"checkpoint {path.name} is damaged ({problem}); trying the one before")
        if found:
            raise ValueError(
                f"all checkpoints in {self.folder} are damaged: start again with another --output"
            )
        return None

    def sweep(self) -> None:
        """Remove half-written checkpoints of killed processes."""
        for path in self.folder.glob(".writing-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self) -> None:
        for path in self._damaged:
            # It may have been written again since.
            if path.exists() and examine(path) is not None:
                shutil.rmtree(path, ignore_errors=True)
        self._damaged = []
        for path in self.steps()[: -self.keep]:
            shutil.rmtree(path, ignore_errors=True)


def examine(path: Path) -> str | None:
    """Why a checkpoint is damaged, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, Any] = manifest["files"]
        for name, signed in files.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            size = (path / name).stat().st_size
            if size != signed["bytes"]:
                return f"{name} has {size} bytes, not {signed['bytes']}"
            if _hash(path / name) != signed["sha256"]:
                return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return None


@contextlib.contextmanager
def replacing(final: Path) -> Iterator[Path]:
    """A new folder that takes the place of `final`, whole and on disk, if the block succeeds."""
    aside = final.with_name(f".writing-{final.name}-{os.getpid()}")
    try:
        for left in final.parent.glob(f".writing-{final.name}-*"):
            # Of a process that was killed.
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for path in (*(p for p in aside.rglob("*") if p.is_file()), aside):
            _sync(path)
        if final.exists():
            # os.rename would refuse to replace it.
            shutil.rmtree(final)
        os.rename(aside, final)
        _sync(final.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def told_if_full(folder: Path | None, what: str | None = None) -> Iterator[None]:
    """Raise `DiskFull` if the disk is full: what was not written, and which checkpoint is last."""
    try:
        yield
    except DiskFull:
        raise
    except Exception as error:
        if (number := full_disk(error)) is None:
            raise
        what = what or getattr(error, "filename", None)
        said = f"there is no room for {what}" if what else getattr(error, "strerror", str(error))
        if folder is not None:
            steps = Checkpoints(folder, 1).steps()
            last = (
                f"{steps[-1].name} is the last one" if steps else "there is no earlier checkpoint"
            )
            said += f"; {last}"
        raise DiskFull(number, said, None if folder is None else str(folder)) from None


def _sign(folder: Path) -> None:
    """Write the manifest: the size and the SHA-256 of each file."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": _hash(path)}
    text = json.dumps({"format": 1, "files": files}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    for name in files:
        # safetensors makes files for their owner alone; the manifest follows the umask.
        shutil.copymode(folder / MANIFEST, folder / name)


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    # Windows syncs no folder, and no file that is open to read.
    if sys.platform != "win32":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def full_disk(error: Exception) -> int | None:
    """The error number, if the error means a full disk."""
    if isinstance(error, OSError) and error.errno in FULL:
        return error.errno
    # safetensors raises its own error, with the number in the text.
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found and int(found[1]) in FULL else None
