"""A corpus is splits of documents, read as a stream of blocks of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


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
