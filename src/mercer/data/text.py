"""Text for language models: token files, blocks for training, windows for evaluation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import cache, encode, hub, tokens
from .corpus import TEXT, Corpus, Documents, read_text, read_whole
from .embedded import read_documentation
from .errors import LARGEST_SEED, check_whole, shorten
from .layout import WHOLE, check_divided, check_split, find_files, pick

Progress = Callable[[str, float], None]
Item = dict[str, Tensor]
IGNORE = -100


@dataclass(frozen=True)
class TokenFile:
    """The ids of one split, memory-mapped, and how many UTF-8 bytes of text they stand for."""

    stored: cache.Stored

    @property
    def ids(self) -> np.ndarray[Any, Any]:
        return self.stored.array

    @property
    def num_bytes(self) -> int:
        return int(self.stored.notes["num_bytes"])

    @property
    def fingerprint(self) -> str:
        return str(self.stored.notes["fingerprint"])

    def __len__(self) -> int:
        return len(self.stored.array)

    def slice(self, start: int, end: int) -> Tensor:
        return torch.from_numpy(self.ids[start:end].astype(np.int64))


@dataclass(frozen=True, kw_only=True)
class TextData:
    """A tokenised corpus. Each document begins with the tokenizer's end-of-text token."""

    train: TokenFile
    valid: TokenFile
    test: TokenFile | None = None
    tokenizer: Any
    source: str
    seed: int = 0

    def split(self, name: str) -> TokenFile:
        found = getattr(self, name, None) if name in ("train", "valid", "test") else None
        if found is None:
            has = [n for n in ("train", "valid", "test") if getattr(self, n) is not None]
            raise ValueError(f"split must be one of {', '.join(has)}, got {name!r}")
        assert isinstance(found, TokenFile)
        return found

    def blocks(self, split: str, length: int) -> Blocks:
        """Consecutive blocks, `labels` equal to `input_ids`; a shorter last block is left out."""
        return Blocks(self.split(split), length)

    def windows(self, split: str, length: int, stride: int | None = None) -> Windows:
        """Overlapping windows; every token but the first of the split is a label exactly once."""
        return Windows(self.split(split), length, length // 2 if stride is None else stride)

    def batches(self, split: str, length: int, size: int, *, epoch: int = 0) -> Iterator[Item]:
        """Full batches of one epoch, shuffled by the seed and the epoch."""
        blocks = self.blocks(split, length)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(blocks))
        for start in range(0, len(order) - size + 1, size):
            items = [blocks[int(i)] for i in order[start : start + size]]
            yield {name: torch.stack([item[name] for item in items]) for name in items[0]}


class Blocks(Dataset[Item]):
    """Item n is the ids from n * length to (n + 1) * length."""

    def __init__(self, file: TokenFile, length: int) -> None:
        if not 1 < length <= len(file):
            raise ValueError(
                f"length must be between 2 and the {len(file)} tokens of the split, got {length}"
            )
        self.file = file
        self.length = length

    def __len__(self) -> int:
        return len(self.file) // self.length

    def __getitem__(self, index: int) -> Item:
        index = _place(index, len(self))
        ids = self.file.slice(index * self.length, (index + 1) * self.length)  # [length]
        return {"input_ids": ids, "labels": ids.clone()}


class Windows(Dataset[Item]):
    """Item n begins at n * stride; labels are -100 for tokens that an earlier window predicts.

    The last window begins earlier, so that all have one length.
    """

    def __init__(self, file: TokenFile, length: int, stride: int) -> None:
        if len(file) < 2:
            raise ValueError(f"a split must have 2 tokens to predict one, but it has {len(file)}")
        if length < 2 or not 0 < stride < length:
            raise ValueError(
                "length must be 2 or more and stride between 1 and length - 1 (the first token of "
                f"a window is not predicted), got {length} and {stride}"
            )
        self.file = file
        self.length = min(length, len(file))
        self.stride = stride

    def __len__(self) -> int:
        return 1 + -(-(len(self.file) - self.length) // self.stride)

    def __getitem__(self, index: int) -> Item:
        index = _place(index, len(self))
        start = min(index * self.stride, len(self.file) - self.length)
        # one past the last token that an earlier window predicts; the very first has no context
        known = 1 if index == 0 else (index - 1) * self.stride + self.length
        ids = self.file.slice(start, start + self.length)  # [length]
        labels = ids.clone()
        labels[: known - start] = IGNORE
        return {"input_ids": ids, "labels": labels}


def text(
    source: str | os.PathLike[str] = "embedded",
    *,
    tokenizer: Any = None,
    column: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    split: str | None = None,
    on_progress: Progress | None = None,
) -> TextData:
    """A corpus as token files.

    Args:
        source: "embedded" (Python's documentation), a file, a folder, members of an archive
            (`novels.zip::Dickens_Bleak_1853.txt`, `novels.zip::*Dickens*`), or a name on the hub.
        tokenizer: "bpe:N", "bytes", "gpt2", a path, a name on the hub, or a tokenizer.
        column: the column of a table or of a dataset on the hub; "text" by default.
        cache_dir: where tokens are kept; the platform's folder for caches by default.
        seed: the order of `batches`; the splits do not depend on it.
        split: read this split alone, which then stands for all; "all" is the files undivided.
        on_progress: called with the name of a task and its progress from 0 to 1.
    """
    check_split(split)
    if column is not None and not isinstance(column, str):
        raise ValueError(f"column must be a name, got {shorten(column)}")
    check_whole("seed", seed, 0, LARGEST_SEED)
    folder = cache.choose_folder(cache_dir)
    corpus = _find_corpus(source, column, folder, whole=split == WHOLE)
    train = corpus.splits["train"]
    spec = ("bpe:1024" if source == "embedded" else "bpe:8192") if tokenizer is None else tokenizer
    chosen = tokens.choose(
        spec,
        lambda: train.fingerprint,
        lambda: (block.text for block in train.read()),
        folder,
        source=source,
    )
    identity = encode.identify(chosen)
    if split is not None:
        name = "train" if split == WHOLE else split
        documents = pick(corpus.splits, name, corpus.source)
        file = _encode(split, documents, chosen, identity, folder, on_progress)
        return TextData(train=file, valid=file, tokenizer=chosen, source=corpus.source, seed=seed)
    files = {
        name: _encode(name, documents, chosen, identity, folder, on_progress)
        for name, documents in corpus.splits.items()
    }
    return TextData(**files, tokenizer=chosen, source=corpus.source, seed=seed)


def _find_corpus(
    source: str | os.PathLike[str], column: str | None, folder: Path, *, whole: bool
) -> Corpus:
    if source == "embedded":
        check_divided(whole, "embedded")
        return read_documentation()
    found = find_files(source, "lm", (*TEXT, ".csv", ".jsonl", hub.TABLE))
    if found is None:
        check_divided(whole, str(source))
        name = hub.find_name(hub.check_source(source), hub.TEXT, None)
        chosen = column or "".join(name.columns) or "text"
        return hub.make_corpus(hub.load(name), chosen, str(source), name.lines)
    if hub.is_table(found):
        check_divided(whole, str(source))
        tables = hub.load_files(found, folder)
        return hub.make_corpus(tables, column or "text", str(found.where), False)
    return read_whole(found, column) if whole else read_text(found, column)


def _encode(
    split: str,
    documents: Documents,
    tokenizer: Any,
    identity: str,
    folder: Path,
    on_progress: Progress | None,
) -> TokenFile:
    key = cache.digest("tokens", documents.fingerprint, identity)

    def write(writer: cache.Writer) -> None:
        def report(done: float) -> None:
            if on_progress is not None:
                on_progress(f"tokenising {split}", done)

        writer.notes["fingerprint"] = key
        encode.encode(documents.read(), tokenizer, writer, report)

    stored = cache.load(folder / f"tokens-{key}.arr", write, dtype=encode.width(tokenizer))
    return TokenFile(stored)


def _place(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"item {index} of {length}")
    return index % length
