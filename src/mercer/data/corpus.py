"""A corpus is splits of documents, read as a stream of blocks of text.

A split can be far larger than memory: it is a function that begins a new stream at every call. A
corpus without a valid split gives up its end: the last 5 % of the text and at most 16 MiB, from the
next document on where there are 20 documents or more, otherwise from the next line on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from .errors import DataError
from .files import hash_files, is_archive, read_blocks
from .layout import Found

TEXT = (".txt", ".text")
HELD_OUT = 0.05
MOST_HELD_OUT = 1 << 24
MANY_DOCUMENTS = 20


class Block(NamedTuple):
    """Some text of a document; `first` where the document begins."""

    text: str
    first: bool
    # how much of the split has been read, from 0 to 1
    done: float


@dataclass(frozen=True, kw_only=True)
class Documents:
    """One split: its blocks, read anew at every call, and a name for its content."""

    read: Callable[[], Iterator[Block]]
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What a source holds, before it is tokenised."""

    source: str
    splits: dict[str, Documents]


def read_text(found: Found) -> Corpus:
    """The corpus of text files."""
    splits = {name: _open(paths) for name, paths in found.files.items()}
    whole = splits.pop("all", None)
    if whole is not None:
        splits["train"] = whole
    if "train" not in splits:
        raise DataError(f"{found.where} has no file whose name says train")
    if "valid" not in splits:
        splits["train"], splits["valid"] = hold_out(splits["train"], str(found.where))
    return Corpus(source=str(found.where), splits=splits)


def hold_out(documents: Documents, where: str) -> tuple[Documents, Documents]:
    """All but the end of a split, and its end."""

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
        here = block.text.find("\n", max(0, keep - at - 1)) + 1
        if at + len(block.text) > keep and 0 < at + here < total and here:
            return at + here
        last = block.text.rfind("\n", 0, max(0, keep - at)) + 1
        before = at + last if last and at + last > 0 else before
        at += len(block.text)
    return before


def _open(paths: Sequence[Path]) -> Documents:
    """Files, or the text files of archives, as documents in the order of their names."""
    share = 1 / len(paths)

    def read() -> Iterator[Block]:
        for n, path in enumerate(paths):
            member = None
            for current, text in read_blocks(path, TEXT):
                yield Block(text, current is not member, (n + current.done()) * share)
                member = current
            if member is None:
                what = "holds no text files" if is_archive(path) else "is empty"
                raise DataError(f"{path} {what}")

    return Documents(read=read, fingerprint=hash_files(paths))
