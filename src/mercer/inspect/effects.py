"""Is it the part of speech or the frequency of a word? Rank correlations and shares of variance.

All numbers are of ranks, so they do not depend on the scale of the values. p-values come from
permutations by Freedman and Lane (1983): the residuals of the smaller model are permuted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..nn import TokenKernels
from .tags import Row, Tagger, Weighing, by_tag, tag_words

Numbers = Tensor | Sequence[float]
# permutations that are held in memory at once
PART = 100


@dataclass(frozen=True)
class Cell:
    """The means by part of speech of one layer, target ("k" or "v") and head."""

    layer: int
    target: str
    head: int
    rows: list[Row]


def by_layer_and_head(
    tokens: TokenKernels,
    words: Mapping[int, str],
    tagger: Tagger | Mapping[str, str],
    *,
    weighing: Weighing = "most-frequent",
    minimum: int = 5,
    merge: Mapping[str, str] | None = None,
) -> list[Cell]:
    """`by_tag` of the deviations of each layer, target and head that has its own kernels."""
    values = tokens.deviations()  # [vocab, layers, targets, heads]
    return [
        Cell(layer, target, head, by_tag(
            values[:, layer, n, head], words, tagger,
            weighing=weighing, minimum=minimum, merge=merge,
        ))
        for layer in range(values.shape[1])
        for n, target in enumerate(tokens.on)
        for head in range(values.shape[3])
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TagEffect:
    """How far parts of speech and frequencies explain the ranks of values, over tokens.

    Attributes:
        tokens: how many tokens are counted.
        correlation: Spearman's, of value and frequency.
        r2_frequency, r2_tags, r2_both: shares of the variance of ranks.
        tags_beyond: of the variance that frequency leaves, the share that tags explain.
        frequency_beyond: of the variance that tags leave, the share that frequency explains.
        p_tags, p_frequency: the permutation p-values of the two.
        partial: for each tag, the rank correlation of value and tag, given frequency.
    """

    tokens: int
    correlation: float
    r2_frequency: float
    r2_tags: float
    r2_both: float
    tags_beyond: float
    frequency_beyond: float
    p_tags: float
    p_frequency: float
    partial: dict[str, float]


def tag_effect(
    values: Tensor,
    counts: Numbers,
    words: Mapping[int, str],
    tagger: Tagger | Mapping[str, str],
    *,
    weighing: Weighing = "most-frequent",
    minimum: int = 5,
    merge: Mapping[str, str] | None = None,
    permutations: int = 999,
    seed: int = 0,
) -> TagEffect:
    """Whether parts of speech explain values beyond the frequency of words, and the reverse.

    Args:
        values: one number for each token, such as `TokenKernels.deviation()`.
        counts: how often each token is in the text, as `count_ids` gives it; tokens that never
            occur are left out.
        words, tagger, weighing, merge: as in `by_tag`. With "shares" a word belongs to all its
            tags in part.
        minimum: tags of fewer tokens are left out, with their tokens.
        permutations: the least p-value is 1 / (permutations + 1).
        seed: of the permutations.
    """
    if len(values) != len(counts):
        raise ValueError(f"there are {len(values)} values, but {len(counts)} counts")
    if permutations < 1:
        raise ValueError(f"permutations must be at least 1, got {permutations}")
    seen = torch.as_tensor(counts, dtype=torch.float64).cpu()
    found = tag_words(words, tagger, weighing=weighing, merge=merge)
    outside = next((id for id in found if not 0 <= id < len(values)), None)
    if outside is not None:
        raise ValueError(f"{words[outside]!r} has the id {outside}, of {len(values)} values")
    tagged = {id: tags for id, tags in sorted(found.items()) if tags and seen[id] > 0}
    sizes: dict[str, int] = {}
    for tags in tagged.values():
        for tag in tags:
            sizes[tag] = sizes.get(tag, 0) + 1
    names = sorted(tag for tag, size in sizes.items() if size >= minimum)
    ids = [id for id, tags in tagged.items() if set(tags) <= set(names)]
    if len(names) < 2 or len(ids) < len(names) + 3:
        raise ValueError(
            f"two tags of {minimum} tokens or more are needed, and more tokens than tags, but "
            f"there are {len(ids)} tokens with the tags {', '.join(names) or 'none'}"
        )
    y = rank(values.detach().double().cpu()[ids])
    # Ranks of frequencies are those of their logarithms.
    frequency = _centred(rank(seen[ids])[:, None])
    shares = [[tagged[id].get(name, 0.0) for name in names] for id in ids]
    kinds = _centred(torch.tensor(shares, dtype=torch.float64))
    y = y - y.mean()
    if not y.any():
        raise ValueError("all values are equal, so there is nothing to explain")
    both = torch.cat([frequency, kinds], 1)
    left_frequency, left_tags, left_both = (_left(y, x) for x in (frequency, kinds, both))
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(ids), generator=generator) for _ in range(permutations)]
    return TagEffect(
        tokens=len(ids),
        correlation=_correlate(y, frequency[:, 0]),
        r2_frequency=1 - left_frequency,
        r2_tags=1 - left_tags,
        r2_both=1 - left_both,
        tags_beyond=_share(left_frequency, left_both),
        frequency_beyond=_share(left_tags, left_both),
        p_tags=_permute(y, frequency, both, orders),
        p_frequency=_permute(y, kinds, both, orders),
        partial={
            name: _correlate(
                _residual(y, frequency), _residual(_centred(rank(kinds[:, n])), frequency)
            )
            for n, name in enumerate(names)
        },
    )


def partial_rank_correlation(a: Numbers, b: Numbers, *given: Numbers) -> float:
    """Spearman's correlation of a and b, given others: that of the residuals of their ranks."""
    x, y, *rest = (rank(torch.as_tensor(v, dtype=torch.float64).cpu()) for v in (a, b, *given))
    if len({len(v) for v in (x, y, *rest)}) > 1:
        raise ValueError(f"all must have one length, got {[len(v) for v in (x, y, *rest)]}")
    if len(x) < len(rest) + 3:
        raise ValueError(f"{len(rest) + 3} numbers or more are needed, got {len(x)}")
    z = _centred(torch.stack(rest, 1)) if rest else x.new_zeros(len(x), 0)
    return _correlate(_residual(_centred(x), z), _residual(_centred(y), z))


def rank(values: Tensor) -> Tensor:
    """Ranks from 0 on; equal numbers share the mean of their ranks."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() + 1) / 2)[inverse]


def count_ids(ids: object, vocab_size: int) -> Tensor:
    """How often each token occurs, [vocab_size]; ids as any array, such as `TokenFile.ids`."""
    import numpy as np

    total = torch.zeros(vocab_size, dtype=torch.int64)
    flat = np.asarray(ids).reshape(-1)
    if flat.size and not 0 <= int(flat.min()) <= int(flat.max()) < vocab_size:
        raise ValueError(
            f"ids must be from 0 to {vocab_size - 1}, got {int(flat.min())} to {int(flat.max())}"
        )
    for start in range(0, flat.size, 1 << 24):
        part = np.bincount(flat[start : start + (1 << 24)], minlength=vocab_size)
        total += torch.from_numpy(part.astype(np.int64))
    return total


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def _basis(x: Tensor) -> Tensor:
    """An orthonormal basis of the columns, which may depend on each other."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    return u[:, s > 1e-10 * s.max().clamp(min=1e-300)] if s.numel() else x


def _residual(y: Tensor, x: Tensor) -> Tensor:
    basis = _basis(x)
    return y - basis @ (basis.mT @ y)


def _left(y: Tensor, x: Tensor) -> float:
    """The share of the variance of y that a linear function of x leaves."""
    return float(_residual(y, x).square().sum() / y.square().sum())


def _share(before: float, after: float) -> float:
    return (before - after) / before if before > 1e-12 else 0.0


def _correlate(a: Tensor, b: Tensor) -> float:
    """0 if one of them does not vary."""
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 1e-9 * len(a) else 0.0


def _permute(y: Tensor, small: Tensor, large: Tensor, orders: Sequence[Tensor]) -> float:
    """The p-value of what the large model explains beyond the small one."""
    few, many = _basis(small), _basis(large)
    fit = few @ (few.mT @ y)
    residual = y - fit

    def strength(y: Tensor) -> Tensor:
        """Explained by the large model alone, over what it leaves: F up to a constant."""
        more = (many.mT @ y).square().sum(0) - (few.mT @ y).square().sum(0)
        left = y.square().sum(0) - (many.mT @ y).square().sum(0)
        return more / left.clamp(min=1e-12)

    # Equal up to rounding counts as reached.
    least = float(strength(y[:, None])) * (1 - 1e-9)
    reached = 0
    for start in range(0, len(orders), PART):
        part = [fit + residual[order] for order in orders[start : start + PART]]
        reached += int((strength(torch.stack(part, 1)) >= least).sum())
    return (1 + reached) / (1 + len(orders))
