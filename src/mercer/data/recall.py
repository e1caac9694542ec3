"""Associative recall of several queries: synthetic sequences of keys and values, then of queries.

A sequence begins with pairs, key and value side by side. After them some keys come again, each
once, and its value follows: that value is the label. A model can only know it by finding the key
among the pairs. The task is that of Arora et al., "Zoology" (2023); the generator is our own.

Tokens 0 to vocabulary / 2 - 1 are keys, the rest are values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .errors import LARGEST_SEED, check_whole, shorten

IGNORE = -100
# Sequences of one pass over the training data; each pass draws new ones.
PASS = 4096
# Sequences of each number of pairs in the other splits.
HELD_OUT = 512
# The first number of each split's seed: equal seeds of two splits draw different sequences.
SPLITS = {"train": 0, "valid": 1, "test": 2}
# Tokens, unless the option says otherwise.
VOCABULARY = 64
MOST_PAIRS, LONGEST, LARGEST_VOCABULARY = 1024, 8192, 2**20


class Recalls(Dataset[dict[str, Tensor]]):
    """Sequences as `input_ids`; `labels` are the values of the queries, and -100 elsewhere."""

    def __init__(self, data: RecallData, split: str, pairs: Sequence[int], length: int) -> None:
        self.data, self.split, self.pairs, self.length = data, split, tuple(pairs), length
        self.count = PASS if split == "train" else HELD_OUT * len(self.pairs)
        self.epoch = 0
        self._drawn: tuple[Tensor, Tensor] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the pass; only the training data differs between passes."""
        if self.split == "train" and epoch != self.epoch:
            self.epoch, self._drawn = epoch, None

    @property
    def ids(self) -> Tensor:
        """[len, length]"""
        return self._arrays()[0]

    @property
    def labels(self) -> Tensor:
        """[len, length]"""
        return self._arrays()[1]

    def _arrays(self) -> tuple[Tensor, Tensor]:
        # Drawn when they are needed first: a plan needs none.
        if self._drawn is None:
            self._drawn = self._draw(self.epoch)
        return self._drawn

    def _draw(self, epoch: int) -> tuple[Tensor, Tensor]:
        data = self.data
        # Only the order and content of the training data depend on the seed.
        seed = data.seed if self.split == "train" else 0
        random = np.random.default_rng((SPLITS[self.split], seed, epoch))
        numbers = np.arange(self.count) % len(self.pairs)
        parts = [
            draw(
                random, int((numbers == n).sum()), pairs=pairs, length=self.length,
                vocabulary=data.vocabulary, power=data.power,
            )
            for n, pairs in enumerate(self.pairs)
        ]  # fmt: skip
        ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index].long(), "labels": self.labels[index].long()}


@dataclass(frozen=True, kw_only=True)
class RecallData:
    """Training data with several numbers of pairs, and held-out data for each number."""

    pairs: tuple[int, ...]
    held_out_pairs: tuple[int, ...]
    length: int
    vocabulary: int
    power: float
    seed: int
    source: str

    @property
    def train(self) -> Recalls:
        return Recalls(self, "train", self.pairs, self.length)

    def held_out(self, split: str, pairs: int) -> Recalls:
        """Sequences of `valid` or `test` with this number of pairs, longer if it needs more."""
        if split not in ("valid", "test"):
            raise ValueError(f"split must be valid or test, got {split!r}")
        return Recalls(self, split, (pairs,), max(self.length, 4 * pairs))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of any split."""
        return max(self.length, 4 * max(self.held_out_pairs))


def recall(
    *,
    pairs: Sequence[int] | int = (2, 4, 8),
    held_out_pairs: Sequence[int] | int | None = None,
    length: int = 32,
    vocabulary: int = VOCABULARY,
    power: float = 0.01,
    seed: int = 0,
) -> RecallData:
    """Associative recall of several queries.

    Args:
        pairs: the numbers of pairs of a sequence in training; each has the same share.
        held_out_pairs: those that a model is tested on; the same unless given.
        length: tokens of a sequence; at least four for each pair, two for the pair and two for its
            query.
        vocabulary: the number of tokens; half are keys, half are values.
        power: a query stands g steps after the pairs with a weight of g^(power - 1): near 0 most
            come soon, and 1 spreads them evenly.
        seed: of the training data; valid and test data are the same for all seeds.
    """
    pairs = _check_pairs("pairs", pairs)
    held_out = pairs if held_out_pairs is None else _check_pairs("held_out_pairs", held_out_pairs)
    most = max(*pairs, *held_out)
    check_whole("length", length, 4, LONGEST)
    check_whole("vocabulary", vocabulary, 4, LARGEST_VOCABULARY)
    check_whole("seed", seed, 0, LARGEST_SEED)
    if length < 4 * max(pairs):
        raise ValueError(
            f"length must be at least four times the pairs, {4 * max(pairs)} for {max(pairs)} "
            f"pairs, got {length}"
        )
    if vocabulary % 2 or vocabulary < 2 * most:
        raise ValueError(
            f"vocabulary must be even and at least twice the pairs, {2 * most} for {most} pairs, "
            f"got {vocabulary}"
        )
    whole = isinstance(power, int | float) and not isinstance(power, bool)
    if not whole or not 0 < power <= 10:
        raise ValueError(f"power must be above 0 and at most 10, got {shorten(power)}")
    tried = ", ".join(map(str, pairs))
    return RecallData(
        pairs=pairs, held_out_pairs=held_out, length=length, vocabulary=vocabulary, power=power,
        seed=seed, source=f"synthetic: recall of {tried} pairs among {vocabulary} tokens",
    )  # fmt: skip


def _check_pairs(name: str, value: Any) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not values or len({repr(number) for number in values}) < len(values):
        raise ValueError(
            f"{name} must be different numbers of pairs, such as (4, 8, 16), got {shorten(value)}"
        )
    for number in values:
        check_whole(name, number, 1, MOST_PAIRS)
    return values


def draw(
    random: np.random.Generator,
    count: int,
    *,
    pairs: int,
    length: int,
    vocabulary: int,
    power: float,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Token ids and labels, [count, length] each."""
    half = vocabulary // 2
    # Values where nothing else stands: no key occurs but the pairs' own.
    ids = random.integers(half, vocabulary, (count, length), dtype=np.int32)
    labels = np.full((count, length), IGNORE, np.int32)
    keys = _different(random, count, pairs, half)  # [count, pairs]
    ids[:, : 2 * pairs : 2] = keys
    values = ids[:, 1 : 2 * pairs : 2].copy()
    # Queries stand at every second place after the pairs, their values beside them.
    slots = (length - 2 * pairs) // 2
    chosen = _soon(random, count, pairs, slots, power)  # [count, pairs]
    places = 2 * pairs + 2 * chosen
    np.put_along_axis(ids, places, keys, 1)
    np.put_along_axis(ids, places + 1, values, 1)
    np.put_along_axis(labels, places + 1, values, 1)
    return ids, labels


def _different(
    random: np.random.Generator, count: int, number: int, below: int
) -> np.ndarray[Any, Any]:
    """Different numbers below `below`, in random order, [count, number], by Floyd's algorithm."""
    found = np.full((count, number), -1, np.int32)
    for n in range(number):
        last = below - number + n
        tried = random.integers(0, last + 1, count, dtype=np.int32)
        taken = (found[:, :n] == tried[:, None]).any(1)
        found[:, n] = np.where(taken, last, tried)
    return random.permuted(found, axis=1)


def _soon(
    random: np.random.Generator, count: int, number: int, slots: int, power: float
) -> np.ndarray[Any, Any]:
    """Different slots, the g-th with weight g^(power - 1), in random order, [count, number]."""
    weights = (power - 1) * np.log(np.arange(1, slots + 1))
    # The largest of log weights plus Gumbel noise are a draw without replacement.
    scores = weights - np.log(random.exponential(size=(count, slots)))
    if number < slots:
        found = np.argpartition(-scores, number - 1, axis=1)[:, :number]
    else:
        found = np.broadcast_to(np.arange(slots), (count, slots))
    assert math.prod(found.shape) == count * number
    return random.permuted(found, axis=1)
