"""Whether our runs support a claim of a paper: paired differences over seeds, and how orders agree.

The rule: a claim that one variant is better is supported if the 95 % interval of the mean paired
difference lies on its side of 0, and contradicted if it lies on the other side. A claim that two
are alike within a margin is supported if the interval lies within the margin, and contradicted if
it lies outside. Everything else is undecided. Seeds pair the runs: equal seeds draw equal batches.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

LEVEL = 0.95
LEAST = 3
# Up to this many resamples all are enumerated, so that the interval is exact.
MOST_RESAMPLES = 50_000


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % bootstrap interval, from so many pairs."""

    mean: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}], {self.pairs} pairs"


def bootstrap(differences: Sequence[float]) -> Interval | None:
    """The interval of the mean; None for fewer than `LEAST` differences, which tell too little."""
    count = len(differences)
    if count < LEAST:
        return None
    if count**count <= MOST_RESAMPLES:
        drawn = itertools.product(differences, repeat=count)
        means = sorted(math.fsum(sample) / count for sample in drawn)
    else:
        choose = torch.Generator().manual_seed(0)
        chosen = torch.randint(count, (MOST_RESAMPLES, count), generator=choose)
        values = torch.tensor(differences, dtype=torch.float64)
        means = values[chosen].mean(1).sort().values.tolist()
    cut = (1 - LEVEL) / 2 * (len(means) - 1)
    low, high = means[math.floor(cut)], means[math.ceil(len(means) - 1 - cut)]
    return Interval(statistics.fmean(differences), low, high, count)


def paired(better: Mapping[int, float], worse: Mapping[int, float], lower: bool) -> list[float]:
    """By how much the first is better, for each seed that both have; `lower` is better or not."""
    seeds = sorted(set(better) & set(worse))
    sign = -1.0 if lower else 1.0
    return [sign * (better[seed] - worse[seed]) for seed in seeds]


def judge(found: Interval | None, margin: float | None = None) -> str:
    """`supported`, `contradicted` or `undecided`; with a margin the claim is that two are alike."""
    if found is None:
        return "undecided"
    if margin is None:
        if found.low > 0:
            return "supported"
        return "contradicted" if found.high < 0 else "undecided"
    if -margin <= found.low and found.high <= margin:
        return "supported"
    return "contradicted" if found.low > margin or found.high < -margin else "undecided"


def kendall(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Kendall's tau-b of two orders, from -1 to 1; None if one has no order at all."""
    agree = ties_ours = ties_theirs = count = 0
    for (a, x), (b, y) in itertools.combinations(zip(ours, theirs, strict=True), 2):
        first, second = (a > b) - (a < b), (x > y) - (x < y)
        agree += first * second
        ties_ours += first == 0
        ties_theirs += second == 0
        count += 1
    size = math.sqrt((count - ties_ours) * (count - ties_theirs))
    return agree / size if size else None
