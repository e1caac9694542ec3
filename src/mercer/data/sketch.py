"""What a corpus holds, without training a tokenizer or writing tokens: for a dry run.

A tokenizer that needs no training, or that was trained before, is used. For another `bpe:N` the
bytes of a token are a rule of thumb from English text. A text is read until a sample is full, and
scaled by how much of it was read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import cache, encode, tokens
from .corpus import Documents
from .errors import LARGEST_SEED, check_columns, check_whole
from .pairs import SPECIALS, _find_pairs
from .text import _find_corpus

# Bytes of text that are read, and of them those that are tokenised.
SAMPLE = 1 << 24
TOKENISED = 1 << 18
# Tokens of a BPE -> bytes of a token: of Python's documentation, and the last one GPT-2's.
BYTES = {256: 1.0, 512: 2.1, 1024: 2.9, 4096: 4.1, 8192: 4.4, 50257: 4.6}


@dataclass(frozen=True)
class Untrained:
    """The size and the special tokens of a BPE that is not trained."""

    size: int
    eos_token_id: int
    bos_token_id: int
    pad_token_id: int | None

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True, kw_only=True)
class TextSketch:
    """A corpus by its estimated number of tokens; `how` says where the estimate comes from."""

    tokenizer: Any
    source: str
    num_tokens: int
    how: str
    valid: None = None

    def blocks(self, split: str, length: int) -> Sequence[int]:
        return range(self.num_tokens // length)


@dataclass(frozen=True, kw_only=True)
class PairSketch:
    """A parallel corpus by its number of pairs, those that are too long included."""

    tokenizer: Any
    source: str
    sizes: dict[str, int]
    how: str

    def encoded(self, split: str, *, max_length: int | None = None) -> Sequence[int]:
        return range(self.sizes[split])


def sketch_text(
    source: str | os.PathLike[str] = "embedded",
    *,
    tokenizer: Any = None,
    column: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> TextSketch:
    """`text`, without tokens."""
    check_whole("seed", seed, 0, LARGEST_SEED)
    folder = cache.choose_folder(cache_dir)
    corpus = _find_corpus(source, column, folder, whole=False)
    train = corpus.splits["train"]
    spec = ("bpe:1024" if source == "embedded" else "bpe:8192") if tokenizer is None else tokenizer
    chosen, how = _find(spec, train.fingerprint, folder, source, tokens.SPECIALS)
    size, text = _read_sample(train)
    if isinstance(chosen, Untrained):
        each = _bytes_per_token(len(chosen))
    else:
        (ids,) = encode.choose_encoder(chosen)([text])
        each = len(text.encode()) / max(1, len(ids))
    how = f"{how}tokens are estimated at {each:.2g} bytes each"
    return TextSketch(tokenizer=chosen, source=corpus.source, num_tokens=int(size / each), how=how)


def sketch_pairs(
    source: str | os.PathLike[str] = "embedded",
    *,
    tokenizer: Any = None,
    reverse: bool = False,
    columns: tuple[str, str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    more: Sequence[str] = (),
) -> PairSketch:
    """`pairs`, without tokens."""
    check_columns(columns)
    folder = cache.choose_folder(cache_dir)
    splits, name = _find_pairs(source, columns, folder, seed, whole=False, more=more)
    if reverse:
        splits = {split: found.swap() for split, found in splits.items()}
    train = splits["train"]
    spec = ("bpe:1024" if source == "embedded" else "bpe:10000") if tokenizer is None else tokenizer
    chosen, how = _find(spec, train.fingerprint(), folder, source, SPECIALS)
    if not isinstance(chosen, Untrained) and chosen.pad_token_id is None:
        chosen.pad_token = chosen.eos_token
    return PairSketch(
        tokenizer=chosen,
        source=name,
        sizes={split: len(found) for split, found in splits.items()},
        how=f"{how}pairs of more than --length tokens are counted, too",
    )


def _bytes_per_token(vocab_size: int) -> float:
    """A rule of thumb for English text."""
    sizes, found = zip(*BYTES.items(), strict=True)
    return float(np.interp(math.log2(vocab_size), np.log2(sizes), found))


def _find(
    spec: Any,
    fingerprint: str,
    folder: Path,
    source: str | os.PathLike[str],
    specials: dict[str, str],
) -> tuple[Any, str]:
    """The tokenizer, and what to say of it."""
    found = tokens.find(spec, fingerprint, folder, source=source, specials=specials)
    if found is not None:
        return found, ""
    size = tokens.read_size(spec)
    # Special tokens come first.
    ids = {name: n for n, name in enumerate(dict.fromkeys(specials.values()))}
    place = {role: ids[name] for role, name in specials.items()}
    untrained = Untrained(size, place["eos_token"], place["bos_token"], place.get("pad_token"))
    return untrained, f"{spec} is not trained for this; "


def _read_sample(documents: Documents) -> tuple[float, str]:
    """The bytes of a split, estimated from a sample, and the beginning of its text."""
    size, kept, text = 0, 0, []
    for block in documents.read():
        size += len(block.text.encode())
        if kept < TOKENISED:
            text.append(block.text[:TOKENISED])
            kept += len(block.text)
        if size >= SAMPLE and 0 < block.done < 1:
            return size / block.done, "".join(text)
    return float(size), "".join(text)
