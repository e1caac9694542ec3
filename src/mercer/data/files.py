"""Read files in place, plain or packed: .xz, .gz, .bz2, .zip, .tar and .tar.*.

Nothing is unpacked to disk or loaded as a whole: a file is a stream of members, a member a stream
of bytes, and text is decoded block by block. Errors name the file and, for text, the line.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from .errors import DataError

BLOCK = 1 << 20
# characters of a line of a table, which is held in memory as a whole
LONGEST = 1 << 26
PACKED = (".xz", ".gz", ".bz2")
ARCHIVES = (".zip", ".tar", ".tar.xz", ".tar.gz", ".tar.bz2", ".tgz", ".txz", ".tbz2")


class Member(NamedTuple):
    """A file, or one of an archive; read `stream` before asking for the next member."""

    name: str
    where: str
    stream: IO[bytes]
    # the share of the file that has been read, from 0 to 1
    done: Callable[[], float]


def is_archive(path: Path) -> bool:
    return path.name.lower().endswith(ARCHIVES)


def strip_packing(name: str) -> str:
    """The name without the suffix of its packing: a.txt.xz becomes a.txt."""
    for suffix in (*ARCHIVES, *PACKED):
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


def hash_files(paths: Iterable[Path]) -> str:
    """A hash of the content of the files, in order; their paths do not matter."""
    total = hashlib.sha256()
    for path in paths:
        with explain(path), path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def read_members(path: Path) -> Iterator[Member]:
    """The files inside `path`, or the file itself; members of a .zip in order of their names."""
    with explain(path):
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty")
        with path.open("rb") as raw:
            if path.name.lower().endswith(".zip"):
                yield from _read_zip(path, raw)
            elif is_archive(path):
                # a stream mode never seeks, so a packed archive is unpacked once
                with tarfile.open(fileobj=raw, mode="r|*") as archive:
                    while (entry := archive.next()) is not None:
                        # tarfile keeps every entry it has read, and an archive may have millions
                        archive.members.clear()  # type: ignore[attr-defined]
                        where = f"{path}, member {entry.name}"
                        if entry.islnk() or entry.issym():
                            raise DataError(f"{where}: a link; pack the file itself")
                        stream = archive.extractfile(entry) if entry.isfile() else None
                        if stream is not None:
                            yield Member(entry.name, where, stream, lambda: raw.tell() / size)
            else:
                yield Member(path.name, str(path), _unpack(path, raw), lambda: raw.tell() / size)


def read_blocks(path: Path, suffixes: tuple[str, ...] = ()) -> Iterator[tuple[Member, str]]:
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
    """The text of a stream, block by block; a byte order mark at its start is dropped."""
    decoder = codecs.getincrementaldecoder("utf-8")()
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
            at = line + bad.count(b"\n", 0, error.start)
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


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
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
            yield number, line.removesuffix("\r")
    if left:
        yield number + 1, left.removesuffix("\r")


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


def _read_zip(path: Path, raw: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(raw) as archive:
        entries = sorted(archive.infolist(), key=lambda entry: entry.filename)
        total = sum(entry.file_size for entry in entries) or 1
        read = 0
        for entry in entries:
            if not entry.is_dir():
                where = f"{path}, member {entry.filename}"
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
