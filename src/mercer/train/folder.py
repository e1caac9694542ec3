"""The folder of a run: its settings, its journal, its machine, its result, its checkpoints.

config.json        the settings, with nothing left open
environment.json   device, versions, commit, command
metrics.jsonl      one line a log or an evaluation
checkpoints/       the last few, each complete and signed by its manifest
model/             the trained model, for `from_pretrained`
result.json        how it ended
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import IO, Any

import torch

from ..bench import machine
from .settings import Settings


class Folder:
    """Files of a run; with `path` None every call does nothing."""

    def __init__(self, path: Path | None, *, main: bool = True) -> None:
        self.path = path
        self.writes = path is not None and main
        self.history: list[dict[str, Any]] = []
        self._lock: IO[str] | None = None

    @property
    def checkpoints(self) -> Path | None:
        return None if self.path is None else self.path / "checkpoints"

    def open(self, settings: Settings) -> dict[str, Any] | None:
        """Lock the folder for this run; return a finished run's result. ValueError if in use."""
        if self.path is None:
            return None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim()
        except OSError as error:
            raise ValueError(f"cannot write to {self.path}: {error.strerror or error}") from None
        try:
            self._check(settings)
        except ValueError:
            self.close()
            raise
        return self.result()

    def begin(self, settings: Settings, about: dict[str, Any]) -> None:
        """Write the settings: from here on the folder holds a run."""
        if self.writes:
            assert self.path is not None
            write(self.path / "config.json", settings.as_json())
            write(self.path / "environment.json", json.dumps(about, indent=2) + "\n")

    def _check(self, settings: Settings) -> None:
        assert self.path is not None
        config = self.path / "config.json"
        if not config.exists():
            if any(p.name != ".lock" for p in self.path.iterdir()):
                raise ValueError(
                    f"{self.path} is not empty and holds no run: give another --output, one that "
                    "is empty or not there yet"
                )
        elif not settings.resume:
            raise ValueError(
                f"{self.path} holds a run already: continue it with --resume, or give another "
                "--output"
            )
        elif changed := settings.changes(Settings.read(config)):
            named = "; ".join(f"{n} was {old!r}, now {new!r}" for n, (new, old) in changed.items())
            raise ValueError(
                f"the run in {self.path} cannot go on with other settings: {named}. Leave them as "
                "they were, or start anew with another --output"
            )

    def _claim(self) -> None:
        """Lock out other processes; the system releases the lock when this process ends."""
        assert self.path is not None
        try:
            import fcntl
        except ModuleNotFoundError:
            return
        self._lock = open(self.path / ".lock", "w")  # noqa: SIM115
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise ValueError(f"another process is training in {self.path}") from None

    def close(self) -> None:
        """Release the lock, and remove a folder in which nothing was written."""
        if self._lock is None:
            return
        assert self.path is not None
        if [path.name for path in self.path.iterdir()] == [".lock"]:
            (self.path / ".lock").unlink()
            with contextlib.suppress(OSError):
                self.path.rmdir()
        self._lock.close()
        self._lock = None

    def rewind(self, step: int) -> None:
        """Cut the journal after a step: later lines are written again."""
        if self.path is None or not (self.path / "metrics.jsonl").exists():
            return
        self.history = [r for r in read_journal(self.path) if r["step"] <= step]
        if self.writes:
            write(self.path / "metrics.jsonl", "".join(map(_line, self.history)))

    def note(self, record: dict[str, Any]) -> None:
        """Append a line to the journal."""
        self.history.append(record)
        if self.writes:
            assert self.path is not None
            with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
                file.write(_line(record))

    def finish(self, result: dict[str, Any]) -> None:
        if self.writes:
            assert self.path is not None
            write(self.path / "result.json", json.dumps(result, indent=2) + "\n")

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run, or None."""
        if self.path is None or not (self.path / "result.json").exists():
            return None
        found: dict[str, Any] = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        return found


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a line that a crash cut short is left out."""
    found = []
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict) and "step" in record]


def write(path: Path, text: str) -> None:
    """Replace a file in one step: a reader never sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
