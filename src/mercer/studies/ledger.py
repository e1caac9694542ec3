"""The results of a study: one line of JSON for each finished job.

Requirements: several processes and machines write at once, into one folder or into folders that are
merged later; any of them may be killed at any moment; no finished result is lost, and no
half-written line is used.

So files are append-only, by whole lines under a lock, and each line is synced before the next job
starts. A shard has its own file, `results-1-of-4.jsonl`. Readers read all files, and `gather`
copies to `results.jsonl` what it lacks. A line that cannot be read is ignored, and its job runs
again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..storage import stored
from ..storage.lock import Lock

MAIN = "results.jsonl"
# The folder of a study in which its trials are.
TUNING = "tuning"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The result of a finished job."""

    key: str
    study: str
    variant: str
    seed: int
    # "done", "not converged at step N", or "not converged (unigram)"
    status: str
    metrics: dict[str, float | str | None]
    parameters: int
    flops_per_token: float
    tokens_per_second: float | None
    steps: int
    seconds: float
    finished: str
    # All settings that decide the result.
    settings: dict[str, Any]
    # What may change it slightly: versions, device, threads.
    environment: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, float | str | None]] = field(default_factory=list)

    @property
    def converged(self) -> bool:
        return self.status == "done"


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, from 1 on."""

    index: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise ValueError(
                f"--shard must be i/n with i from 1 to n, got {self.index}/{self.count}"
            )

    @property
    def file(self) -> str:
        return MAIN if self.count == 1 else f"results-{self.index}-of-{self.count}.jsonl"

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


class Ledger:
    """The results in a folder; `append` writes to the file of this shard."""

    def __init__(self, folder: Path, shard: Shard | None = None) -> None:
        self.folder = folder
        self.path = folder / (shard or Shard()).file
        self.main = folder / MAIN

    def read(self) -> dict[str, Record]:
        """All results by key; of two with the same key, the earlier one."""
        return self.scan()[0]

    def scan(self) -> tuple[dict[str, Record], list[str]]:
        """All results, and the places of lines that cannot be read."""
        found: dict[str, Record] = {}
        torn = []
        for path in sorted(self.folder.glob("results*.jsonl")):
            for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
                if not line.strip():
                    continue
                record = _parse(line)
                if record is None:
                    torn.append(f"{path.name} line {number}")
                elif record.key not in found or record.finished < found[record.key].finished:
                    found[record.key] = record
        return found, torn

    def borrow(self, wanted: Mapping[str, tuple[str, str]]) -> list[Record]:
        """Copy results that stand in another study beside this folder, by key.

        `wanted` has the study and the variant that a key has here.
        """
        found: dict[str, Record] = {}
        base = self.folder.parent.parent if self.folder.parent.name == TUNING else self.folder
        for folder in (*base.parent.glob("*"), *base.parent.glob(f"*/{TUNING}/*")):
            if folder != self.folder and folder.is_dir():
                for key, record in Ledger(folder).read().items():
                    if key in wanted and key not in found:
                        study, variant = wanted[key]
                        found[key] = replace(record, study=study, variant=variant)
        if found:
            _append(self.path, list(found.values()))
        return list(found.values())

    def append(self, record: Record) -> None:
        """Add a line and sync it to disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _append(self.path, [record])

    def gather(self) -> None:
        """Copy to results.jsonl what only other files of the folder have."""
        files = list(self.folder.glob("results*.jsonl"))
        if files in ([], [self.main]):
            return
        with _opened(self.main) as file:
            file.seek(0)
            there = {r.key for line in file.read().split(b"\n") if (r := _parse(line))}
            missing = [r for key, r in self.read().items() if key not in there]
            _write(file, sorted(missing, key=lambda record: record.finished))


@contextmanager
def claim(folder: Path) -> Iterator[bool]:
    """Lock a folder until the block ends; False if another process has it. A crash unlocks it."""
    lock = Lock(folder.with_name(folder.name + ".lock"))
    taken = lock.take()
    try:
        yield taken
    finally:
        lock.release()


def _append(path: Path, records: list[Record]) -> None:
    with _opened(path) as file:
        _write(file, records)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    # A file of its own: on Windows a locked file cannot be read.
    lock = Lock(path.with_name(f".{path.name}.lock"))
    lock.take(wait=True)
    try:
        with path.open("a+b") as file:
            yield file
    finally:
        lock.release()


def _write(file: BinaryIO, records: list[Record]) -> None:
    if not records:
        return
    text = lines_of(records)
    end = file.seek(0, os.SEEK_END)
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            # A process was killed while writing: end its torn line.
            text = b"\n" + text
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def lines_of(records: list[Record]) -> bytes:
    """The lines of results, as they stand in a file."""
    lines = (json.dumps(_plain(asdict(record)), allow_nan=False) for record in records)
    return "".join(f"{line}\n" for line in lines).encode()


def _plain(value: Any) -> Any:
    """The value in JSON's types; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _parse(line: bytes) -> Record | None:
    """The record of a line, or None if any part of it has another type than a record's."""
    try:
        values = stored.parse(line)
        record = stored.make(Record, values)
    except ValueError:
        return None
    # Every measure is a number; the signature of BLEU is the only text.
    measures = [pair for group in (record.metrics, *record.history) for pair in group.items()]
    sound = (
        _plain(values) == values
        and record.seed >= 0
        and all(not isinstance(x, str) or name == "signature" for name, x in measures)
        and isinstance(record.environment.get("versions", {}), dict)
    )
    return record if sound else None
