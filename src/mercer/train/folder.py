"""The folder of a run: its settings, its journal, its machine, its result, its checkpoints.

config.json        the settings, with nothing left open
environment.json   device, versions, commit, command
metrics.jsonl      one line a log or an evaluation
checkpoints/       the last few, each complete and signed by its manifest
model/             the trained model, for `from_pretrained`
result.json        how it ended
result-1000.json   how it had ended, of a run of 1000 steps that was extended
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..bench import machine
from ..storage.journal import read_journal
from ..storage.lock import Lock
from .checkpoints import full_disk
from .settings import Settings


class Folder:
    """Files of a run; with `path` None every call does nothing."""

    def __init__(self, path: Path | None, *, main: bool = True) -> None:
        self.path = path
        self.writes = path is not None and main
        self.history: list[dict[str, Any]] = []
        # The number of steps before this process extends the run.
        self.extends: int | None = None
        self._lock = None if path is None else Lock(path / ".lock")

    @property
    def checkpoints(self) -> Path | None:
        return None if self.path is None else self.path / "checkpoints"

    def open(self, settings: Settings) -> Settings:
        """Lock the folder for this run, ValueError if it is in use; settings with what it knows."""
        if self.path is None:
            return settings
        assert self._lock is not None
        try:
            if not self._lock.take():
                raise ValueError(f"another process is training in {self.path}")
        except OSError as error:
            if full_disk(error):
                raise
            raise ValueError(f"cannot write to {self.path}: {error.strerror or error}") from None
        try:
            return self._check(settings)
        except ValueError:
            self.close()
            raise

    def begin(self, settings: Settings, about: dict[str, Any]) -> None:
        """Write the settings, after the first step: from here on the folder holds a run."""
        if self.writes:
            assert self.path is not None
            if self.extends is not None:
                # First, so that a crash here leaves a run that ends again as it had.
                with contextlib.suppress(FileNotFoundError):
                    old = self.path / f"result-{self.extends}.json"
                    os.replace(self.path / "result.json", old)
            write(self.path / "config.json", settings.as_json())
            write(self.path / "environment.json", json.dumps(about, indent=2) + "\n")

    def _check(self, settings: Settings) -> Settings:
        assert self.path is not None
        config = self.path / "config.json"
        if not config.exists():
            # A start that failed before its first step may leave hidden files.
            if not all(p.name.startswith(".") for p in self.path.iterdir()):
                raise ValueError(
                    f"{self.path} is not empty and holds no run: give another --output, one that "
                    "is empty or not there yet"
                )
            return replace(settings, grown_from=None)
        if not settings.resume:
            raise ValueError(
                f"{self.path} holds a run already: continue it with --resume, or give another "
                "--output"
            )
        stored = Settings.read(config)
        changed = settings.changes(stored)
        if set(changed) == {"steps"} and stored.time is None and settings.steps is not None:
            assert stored.steps is not None
            if settings.steps < stored.steps:
                raise ValueError(
                    f"the run in {self.path} has {stored.steps} steps: --steps may be more on "
                    f"--resume, but not fewer, got {settings.steps}"
                )
            self.extends = stored.steps
        elif changed:
            named = "; ".join(f"{n} was {old!r}, now {new!r}" for n, (new, old) in changed.items())
            raise ValueError(
                f"the run in {self.path} cannot go on with other settings: {named}. Leave them as "
                "they were, or start anew with another --output"
            )
        return replace(
            settings,
            grown_from=self.extends or stored.grown_from,
            threads=settings.threads or stored.threads,
        )

    def close(self) -> None:
        """Release the lock, and remove a folder in which nothing was written."""
        if self._lock is None or not self._lock.held:
            return
        assert self.path is not None
        # The folder itself may be gone.
        unused = [path.name for path in self.path.glob("*")] == [".lock"]
        self._lock.release(remove=unused)
        if unused:
            with contextlib.suppress(OSError):
                self.path.rmdir()

    def rewind(self, step: int, lines: int | None = None) -> None:
        """Cut the journal after a step, to its first `lines`: later ones are written again."""
        if self.path is None:
            return
        self.history = [r for r in read_journal(self.path) if r["step"] <= step][:lines]
        if self.writes and (self.path / "metrics.jsonl").exists():
            write(self.path / "metrics.jsonl", "".join(map(_line, self.history)))

    def note(self, record: dict[str, Any]) -> None:
        """Append a line to the journal."""
        self.history.append(record)
        if self.writes:
            assert self.path is not None
            path = self.path / "metrics.jsonl"
            with naming(path), open(path, "a", encoding="utf-8") as file:
                file.write(_line(record))

    def sync(self) -> None:
        """Bring the journal to disk, so that no checkpoint is ahead of it."""
        if self.writes:
            assert self.path is not None
            path = self.path / "metrics.jsonl"
            with naming(path), open(path, "a", encoding="utf-8") as file:
                os.fsync(file.fileno())

    def finish(self, result: dict[str, Any]) -> None:
        if self.writes:
            assert self.path is not None
            write(self.path / "result.json", json.dumps(result, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with naming(path), open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of the system, which does so for `open` alone."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def _line(record: dict[str, Any]) -> str:
    # JSON has no NaN: write null.
    tidy = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(tidy) + "\n"


def describe(device: torch.device) -> dict[str, Any]:
    """The machine and versions of a run."""
    return machine.describe(device) | {"command": _command()}


def _command() -> str:
    name = Path(sys.argv[0]).name if sys.argv else "python"
    return " ".join([name, *sys.argv[1:]])
