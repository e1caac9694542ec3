"""Read files in place, plain or packed: .xz, .gz, .bz2, .zip, .tar and .tar.*.

Nothing is unpacked to disk or loaded as a whole: a file is a stream of members, a member a stream
of bytes, and text is decoded block by block. Line ends become "\n", as in Python's text files.
Errors name the file and, for text, the line.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import json
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from .errors import DataError, spell

BLOCK = 1 << 20
# characters of a line of a table, which is held in memory as a whole
LONGEST = 1 << 26
# part of a text's fingerprint: how bytes become characters. 2: every line end is "\n"
READING = 2
PACKED = (".xz", ".gz", ".bz2")
ARCHIVES = (".zip", ".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".txz", ".tbz2")


class Member(NamedTuple):
    """A file, or one of an archive; read `stream` before asking for the next member."""

    name: str
    where: str
    stream: IO[bytes]
    # the share of the file that has been read, from 0 to 1
    done: Callable[[], float]


@dataclass(frozen=True)
class Chosen:
    """Some members of an archive, read one after the other."""

    archive: Path
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the first member; its ending says how the members are read."""
        return self.names[0]

    def __str__(self) -> str:
        if len(self.names) == 1:
            return f"{self.archive}, member {spell(self.name)}"
        return f"{self.archive}, {len(self.names)} members"


Source = Path | Chosen


def is_archive(path: Source) -> bool:
    """Whether all members are to be read."""
    return isinstance(path, Path) and path.name.lower().endswith(ARCHIVES)


def strip_packing(name: str) -> str:
    """The name without the suffix of its packing: a.txt.xz becomes a.txt."""
    for suffix in (*ARCHIVES, *PACKED):
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def hash_files(paths: Iterable[Source]) -> str:
    """A hash of the content of the files, in order, and of the names of chosen members."""
    total = hashlib.sha256()
    for source in paths:
        path = source if isinstance(source, Path) else source.archive
        with explain(path), path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
        if isinstance(source, Chosen):
            total.update(json.dumps(source.names).encode())
    return total.hexdigest()


def list_members(path: Path) -> list[str]:
    """The names of the files in an archive, sorted; a link counts as a file."""
    with explain(path), path.open("rb") as raw:
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(raw) as archive:
                return sorted(e.filename for e in archive.infolist() if not e.is_dir())
        with tarfile.open(fileobj=raw, mode="r|*") as archive:
            return sorted(e.name for e in archive if e.isfile() or e.islnk() or e.issym())


def read_members(source: Source) -> Iterator[Member]:
    """The files in an archive, or the file itself; members of a .zip in order of their names."""
    path = source if isinstance(source, Path) else source.archive
    names = frozenset(source.names) if isinstance(source, Chosen) else None
    with explain(path):
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty")
        with path.open("rb") as raw:
            if path.name.lower().endswith(".zip"):
                yield from _read_zip(path, raw, names)
            elif is_archive(path):
                # a stream mode never seeks, so a packed archive is unpacked once
                with tarfile.open(fileobj=raw, mode="r|*") as archive:
                    while (entry := archive.next()) is not None:
                        # tarfile keeps every entry it has read, and an archive may have millions
                        archive.members.clear()  # type: ignore[attr-defined]
                        if names is not None and entry.name not in names:
                            continue
                        where = f"{path}, member {spell(entry.name)}"
                        if entry.islnk() or entry.issym():
                            raise DataError(f"{where}: a link; pack the file itself")
                        stream = archive.extractfile(entry) if entry.isfile() else None
                        if stream is not None:
                            yield Member(entry.name, where, stream, lambda: raw.tell() / size)
            else:
                yield Member(path.name, str(path), _unpack(path, raw), lambda: raw.tell() / size)


def read_blocks(path: Source, suffixes: tuple[str, ...] = ()) -> Iterator[tuple[Member, str]]:
    """Blocks of UTF-8 text; of an archive, only members with one of these `suffixes`."""
    for member in read_members(path):
        if is_archive(path) and suffixes:
            if strip_packing(member.name) != member.name:
                packed = member.name.lower().endswith(ARCHIVES)
                if packed or strip_packing(member.name).lower().endswith(suffixes):
                    raise DataError(f"{member.where}: packed inside an archive; unpack it first")
            if not member.name.lower().endswith(suffixes):
                continue
        for text in decode(member.stream, member.where):
            yield member, text


def decode(stream: IO[bytes], where: str) -> Iterator[str]:
    """The text of a stream, block by block, with "\\n" for every line end.

    A byte order mark at the start is dropped.
    """
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=True)
    line, begun = 1, False
    while True:
        try:
            data = stream.read(BLOCK)
        except (*BROKEN, OSError) as error:
            raise DataError(f"{where}, after line {line}: damaged ({_say(error)})") from error
        try:
            text = decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            bad = bytes(error.object)
            # the decoder holds back a "\r" at the end of a block, in case a "\n" follows
            held = b"\r" if decoder.getstate()[1] & 1 else b""
            at = line + unify_ends((held + bad[: error.start]).decode()).count("\n")
            raise DataError(
                f"{where}, line {at}: byte 0x{bad[error.start]:02x} is not UTF-8 "
                f"({error.reason}); save the file as UTF-8"
            ) from None
        if not begun and text:
            text, begun = text.removeprefix("\ufeff"), True
        if (at := text.find("\0")) >= 0:
            line += text.count("\n", 0, at)
            raise DataError(f"{where}, line {line}: a zero byte; this is not UTF-8 text")
        line += text.count("\n")
        if text:
            yield text
        if not data:
            return


def unify_ends(text: str) -> str:
    """The text with "\\n" for each line end, "\\r\\n" or "\\r"."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_lines(path: Source) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file, without their ends."""
    number, left = 0, ""
    for _, text in read_blocks(path):
        lines = (left + text).split("\n")
        left = lines.pop()
        if len(left) > LONGEST:
            raise DataError(
                f"{path}, line {number + len(lines) + 1}: longer than {LONGEST} characters"
            )
        for line in lines:
            number += 1
            yield number, line
    if left:
        yield number + 1, left


# what the standard library raises for truncated or damaged files
BROKEN = (
    EOFError,
    lzma.LZMAError,
    zlib.error,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    tarfile.TarError,
    # zipfile raises it for unknown compression methods
    NotImplementedError,
)


@contextmanager
def explain(where: Path | str) -> Iterator[None]:
    """Turn errors of the standard library into DataErrors that name the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{where} does not exist") from error
    except BROKEN as error:
        raise DataError(f"{where} is damaged ({_say(error)})") from error
    except OSError as error:
        raise DataError(f"{where} cannot be read ({_say(error)})") from error


def _read_zip(path: Path, raw: IO[bytes], names: frozenset[str] | None) -> Iterator[Member]:
    with zipfile.ZipFile(raw) as archive:
        wanted = (e for e in archive.infolist() if names is None or e.filename in names)
        entries = sorted(wanted, key=lambda entry: entry.filename)
        total = sum(entry.file_size for entry in entries) or 1
        read = 0
        for entry in entries:
            if not entry.is_dir():
                where = f"{path}, member {spell(entry.filename)}"
                if entry.flag_bits & 1:
                    raise DataError(f"{where} is encrypted")
                with archive.open(entry) as stream:
                    done = partial(_fraction, stream, read, total)
                    yield Member(entry.filename, where, stream, done)
                read += entry.file_size


def _fraction(stream: IO[bytes], before: int, total: int) -> float:
    return (before + stream.tell()) / total


def _unpack(path: Path, raw: IO[bytes]) -> IO[bytes]:
    match path.suffix.lower():
        case ".xz":
            return cast(IO[bytes], Streams(raw, lzma.LZMADecompressor))
        case ".gz":
            return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
        case ".bz2":
            return cast(IO[bytes], Streams(raw, bz2.BZ2Decompressor))
        case _:
            return raw


class Streams:
    """The content of packed streams, one after the other, to be read block by block.

    Junk between them is an error. The standard library's files end there in silence, and the text
    behind a damaged header would be missing.
    """

    def __init__(self, raw: IO[bytes], make: Callable[[], Any]) -> None:
        self.raw = raw
        self.make = make
        self.current = make()

    def read(self, size: int) -> bytes:
        while True:
            packed = b""
            if self.current.eof:
                # zeros may pad a stream
                packed = self.current.unused_data.lstrip(b"\0")
                while not packed:
                    if not (more := self.raw.read(BLOCK)):
                        return b""
                    packed = more.lstrip(b"\0")
                self.current = self.make()
            elif self.current.needs_input and not (packed := self.raw.read(BLOCK)):
                raise EOFError("the file ends before its content does")
            if unpacked := self.current.decompress(packed, size):
                return bytes(unpacked)


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__
