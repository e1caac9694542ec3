"""A corpus is splits of documents, read as a stream of blocks of text.

A split can be far larger than memory: it is a function that starts a new stream at every call.
Without a valid split, the end of the train split becomes it: the last 5 % of the text, at most 16
Mi characters, cut between documents if there are 20 or more, otherwise between lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

from .errors import DataError
from .files import READING, Source, hash_files, is_archive, read_blocks, read_members
from .layout import Found, read_split
from .tables import is_table, read_rows

TEXT = (".txt", ".text", ".raw", ".tokens")
HELD_OUT = 0.05
MOST_HELD_OUT = 1 << 24
MANY_DOCUMENTS = 20


class Block(NamedTuple):
    """A piece of text of a document; `first` marks its beginning."""

    text: str
    first: bool
    # how much of the split has been read, from 0 to 1
    done: float


@dataclass(frozen=True, kw_only=True)
class Documents:
    """One split: its blocks, read anew at every call, and a fingerprint of its content."""

    read: Callable[[], Iterator[Block]]
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The documents of a source, before they are tokenised."""

    source: str
    splits: dict[str, Documents]


def read_text(found: Found, column: str | None = None) -> Corpus:
    """The corpus of text files, or of a column of tables."""
    files = dict(found.files)
    whole = files.pop("all", None)
    splits = {name: _open(paths, column) for name, paths in files.items()}
    if whole is not None:
        splits |= _open_whole(whole, column)
    if "train" not in splits:
        raise DataError(f"{found.where} has no file with train in its name")
    if "valid" not in splits:
        splits["train"], splits["valid"] = hold_out(splits["train"], str(found.where))
    return Corpus(source=str(found.where), splits=splits)


def read_whole(found: Found, column: str | None = None) -> Corpus:
    """All files as one split, `train`, undivided."""
    paths = [path for part in found.files.values() for path in part]
    return Corpus(source=str(found.where), splits={"train": _open(paths, column)})


def hold_out(documents: Documents, where: str) -> tuple[Documents, Documents]:
    """A split without its end, and the end."""

    @cache
    def locate() -> int:
        return _find_cut(documents, where)

    def read_train() -> Iterator[Block]:
        at, end = 0, locate()
        for block in documents.read():
            if at + len(block.text) >= end:
                yield block._replace(text=block.text[: end - at])
                return
            yield block
            at += len(block.text)

    def read_valid() -> Iterator[Block]:
        at, start = 0, locate()
        for block in documents.read():
            if at >= start:
                yield block
            elif at + len(block.text) > start:
                yield block._replace(text=block.text[start - at :], first=True)
            at += len(block.text)

    name = f"{documents.fingerprint} {HELD_OUT} {MOST_HELD_OUT} {MANY_DOCUMENTS}"
    train = Documents(read=read_train, fingerprint=f"{name} train")
    return train, Documents(read=read_valid, fingerprint=f"{name} valid")


def _find_cut(documents: Documents, where: str) -> int:
    """How many characters stay in the train split."""
    total, starts = 0, []
    for block in documents.read():
        if block.first:
            starts.append(total)
        total += len(block.text)
    if total < 2:
        raise DataError(f"{where} is too short to hold out a part of it for validation")
    keep = total - max(1, min(int(total * HELD_OUT), MOST_HELD_OUT))
    if len(starts) >= MANY_DOCUMENTS:
        return next((start for start in starts if start >= keep), starts[-1])
    at, before = 0, keep
    for block in documents.read():
        if here := block.text.find("\n", max(0, keep - at - 1)) + 1:
            # nothing follows the last line: hold out the line before it
            return at + here if at + here < total else before
        if last := block.text.rfind("\n", 0, max(0, keep - at)) + 1:
            before = at + last
        at += len(block.text)
    return before


def _open_whole(paths: Sequence[Source], column: str | None) -> dict[str, Documents]:
    """Files whose names have no split; names of members in an archive may have one."""
    if len(paths) == 1 and is_archive(paths[0]):
        names = [member.name for member in read_members(paths[0])]
        named = {_split_of(name) for name in names if name.lower().endswith(TEXT)}
        if "train" in named:
            return {split: _open(paths, column, split) for split in named if split is not None}
    return {"train": _open(paths, column)}


def _open(paths: Sequence[Source], column: str | None, split: str | None = None) -> Documents:
    """Files, the text files of archives, or the rows of tables, as documents in their order."""

    def read() -> Iterator[Block]:
        for n, path in enumerate(paths):
            number, blank = 0, True
            for text, first, done in _read(path, column, split):
                yield Block(text, first, (n + done) / len(paths))
                number += 1
                blank = blank and text.isspace()
            if number == 0:
                what = "holds no text files" if is_archive(path) else "is empty"
                raise DataError(f"{path} {what}")
            if blank:
                raise DataError(f"{path} holds only white space")

    return Documents(read=read, fingerprint=f"{hash_files(paths)} {column} {split} {READING}")


def _read(path: Source, column: str | None, split: str | None) -> Iterator[Block]:
    if is_table(path):
        for (text,) in read_rows(path, [column or "text"], 1):
            yield Block(text, True, 0.0)
        return
    before = None
    for member, text in read_blocks(path, TEXT):
        if split is None or _split_of(member.name) == split:
            yield Block(text, member is not before, member.done())
            before = member


def _split_of(name: str) -> str | None:
    return read_split(PurePosixPath(name).name)[1]
