"""Arrays on disk: memory-mapped, checked when they are opened, replaced as a whole.

Requirements: a reader never sees half a file; a killed process leaves the old file or none; two
processes may need the same array at once; a file that was cut or changed later is detected and
built again. So a writer fills a temporary file beside the target, syncs it, and renames it. Shape
and checksums are in the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

FORMAT = 1
MAGIC = b"mercer array"
HEADER = 64
BLOCK = 1 << 22

log = logging.getLogger("mercer.data")


def choose_folder(cache_dir: str | os.PathLike[str] | None) -> Path:
    """The given folder, or the platform's usual one for caches."""
    if cache_dir is not None:
        folder = Path(cache_dir).expanduser()
        for path in (folder, *folder.parents):
            if path.is_file():
                raise ValueError(f"the cache {folder} must be a folder, but {path} is a file")
        return folder
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "mercer"
    if sys.platform == "win32":
        return home / "AppData" / "Local" / "mercer" / "Cache"
    return home / ".cache" / "mercer"


def digest(*parts: object) -> str:
    """A hash of the parts in their order, and of the file format's version."""
    return hashlib.sha256(json.dumps([FORMAT, *map(str, parts)]).encode()).hexdigest()[:40]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A memory-mapped array [N, ...] and its notes."""

    path: Path
    array: np.ndarray[Any, Any]
    notes: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        # a worker process maps the file itself, so the array is not pickled
        return _reopen, (self.path,)


class Writer:
    """Appends rows to an array file; the notes follow the rows."""

    def __init__(self, file: IO[bytes], dtype: str) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self.item: tuple[int, ...] | None = None
        self.count = 0
        self.checksum = 0
        self.notes: dict[str, Any] = {}
        file.write(bytes(HEADER))

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        if self.item is None:
            self.item = rows.shape[1:]
        assert rows.shape[1:] == self.item
        data = np.ascontiguousarray(rows, dtype=self.dtype).tobytes()
        self.file.write(data)
        self.checksum = zlib.crc32(data, self.checksum)
        self.count += len(rows)

    def finish(self) -> None:
        said = {
            "dtype": self.dtype.name,
            "shape": [self.count, *(self.item or ())],
            "checksum": self.checksum,
            "notes": self.notes,
        }
        text = json.dumps(said).encode()
        self.file.write(text)
        self.file.seek(0)
        self.file.write(b"%s %d %08x %d\n" % (MAGIC, FORMAT, zlib.crc32(text), len(text)))


def load(path: Path, write: Callable[[Writer], None], *, dtype: str) -> Stored:
    """The array at `path`; `write` builds it if it is missing or damaged."""
    if (found := _find(path)) is not None:
        return found
    with replacing(path, lambda: _find(path) is not None) as file:
        if file is not None:
            writer = Writer(file, dtype)
            write(writer)
            writer.finish()
    return read(path)


@contextmanager
def replacing(path: Path, is_made: Callable[[], bool]) -> Iterator[IO[bytes] | None]:
    """A temporary file that replaces `path` if the block succeeds.

    None if another process built it while this one waited. Without locks, as on some network
    disks, both write the same content, and the last one stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path) as alone:
            if is_made():
                yield None
                return
            if alone:
                # we hold the lock, so an existing file was left by a killed process
                for left in path.parent.glob(f".{path.name}.*.tmp"):
                    left.unlink(missing_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    # mkstemp's mode is for the owner alone; the lock's follows the umask
                    if (lock := _lock_of(path)).exists():
                        shutil.copymode(lock, name)
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            finally:
                Path(name).unlink(missing_ok=True)
            _sync_folder(path.parent)
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else path
        if error.errno is None or (named.parent != path.parent and named not in path.parents):
            raise
        message = f"{error.strerror}; the cache {path} was not written; give another cache_dir"
        raise OSError(error.errno, message) from error


def read(path: Path, *, check: bool = True) -> Stored:
    """Map the array at `path`; ValueError if the file is damaged."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.readline(HEADER).split()
        if start[:-3] != MAGIC.split() or start[-3] != b"%d" % FORMAT:
            raise ValueError("it has another format version")
        length = int(start[-1])
        file.seek(max(0, size - length))
        text = file.read()
        if b"%08x" % zlib.crc32(text) != start[-2]:
            raise ValueError("its end is missing or damaged")
        said = json.loads(text)
        dtype, shape = np.dtype(said["dtype"]), tuple(said["shape"])
        due = HEADER + dtype.itemsize * math.prod(shape) + length
        if size != due:
            raise ValueError(f"it has {size} bytes, not {due}")
        if check:
            file.seek(HEADER)
            checksum, left = 0, due - HEADER - length
            while left and (block := file.read(min(BLOCK, left))):
                checksum = zlib.crc32(block, checksum)
                left -= len(block)
            if checksum != said["checksum"]:
                raise ValueError("its checksum is wrong")
    if shape[0] == 0:
        array = np.empty(shape, dtype)
    else:
        array = np.memmap(path, dtype, mode="r", offset=HEADER, shape=shape)
    return Stored(path=path, array=array, notes=said["notes"])


def _reopen(path: Path) -> Stored:
    return read(path, check=False)


def _find(path: Path) -> Stored | None:
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, IndexError, KeyError) as error:
        log.warning("the cache %s cannot be used (%s) and is rebuilt", path, error)
        return None


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Lock `path` against other writers; False if the disk has no locks."""
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    with _lock_of(path).open("wb") as file:
        try:
            # released by the system when the process ends, also by a kill
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that the rename survives a crash; not possible on Windows."""
    if sys.platform != "win32":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
