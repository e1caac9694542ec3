"""From a term to the one or two slots of the fused kernels: dot products, each with its numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...term.factors import (
    CosineFactor,
    DistanceFactor,
    Factor,
    QueryBandwidthFactor,
    SlopeFactor,
    places_from_end,
    unit,
)
from ...term.layout import join, repeat
from ...term.sinusoids import SinusoidFactor
from ...term.term import Term
from .numbers import add
from .sinusoids import queries
from .static import are_few


class Joined(DistanceFactor):
    """A distance with one more number per key, in units of the distance's own."""

    def __init__(self, f: DistanceFactor, extra: Tensor) -> None:
        super().__init__(q=f.q, k=f.k, scale=f.given, link=f.link)
        self.extra = extra


class AsGiven(Factor):
    """A product of features that the kernel normalises to length 1."""


def _parts(term: Term) -> tuple[list[Factor], list[Factor], list[Factor]]:
    """Plain factors with features, plain ones with a number per key alone, and linked ones."""
    linked = [f for f in term.factors if f.link is not None]
    plain = [f for f in term.factors if f.link is None and f.width]
    bare = [f for f in term.factors if f.link is None and not f.width]
    return plain, bare, linked


def widths_of(term: Term) -> list[int] | str:
    """The features of each slot, or why there are too many slots."""
    plain, bare, linked = _parts(term)
    widths = [f.width for f in plain]
    if len(plain) + len(linked) > 2 and len(plain) > 1:
        if any(f.per_query and f.keyed for f in plain):
            return "a bandwidth of each query cannot join other factors"
        plain, widths = plain[:1], [sum(widths)]
    if bare and not any(_joinable(f) for f in plain):
        widths.append(16)
    widths += [f.width for f in linked]
    return widths if len(widths) <= 2 else "it supports two factors at most"


def slots_of(term: Term, dtype: torch.dtype, learns: bool) -> list[Factor]:
    """One or two factors with features; for few queries without gradients they may be unnormalised."""
    plain, bare, linked = _parts(term)
    alone = len(term.factors) == 1 and not learns
    plain = [_of_length_1(f, dtype, alone) if isinstance(f, CosineFactor) else f for f in plain]
    if len(plain) + len(linked) > 2 and len(plain) > 1:
        plain = [_merged([_rotated(f, dtype) for f in plain], dtype)]
    for f in bare:
        # A factor of numbers per key only joins one whose scale it can be divided by, or is separate.
        target = next((n for n, p in enumerate(plain) if _joinable(p)), None)
        if target is None:
            zeros = [x.new_zeros(*x.shape[:3], 16, dtype=dtype) for x in (f.q, f.k)]
            plain.append(Factor(q=zeros[0], k=zeros[1]))
            target = len(plain) - 1
        plain[target] = _joined(plain[target], f)
    if len(plain) == 2 and all(_mergeable(f) for f in plain):
        # Two plain products with numbers for scales are one, over two parts.
        first, second = plain
        assert not isinstance(first.scale, Tensor)
        assert not isinstance(second.scale, Tensor)
        ratio = second.scale / first.scale
        if isinstance(second, SinusoidFactor):
            q, k = queries(second, dtype, ratio), second.keys_in(dtype)
        else:
            q, k = second.q if ratio == 1.0 else (second.q.float() * ratio).to(dtype), second.k
        plain[1] = Factor(q=q, k=k, scale=first.scale)
    return [_rotated(f, dtype) for f in plain] + linked


def summands(first: Term, second: Term) -> list[Factor] | None:
    """The slots of two terms whose weights add up: one of each, of the same features, or None."""
    slots = []
    for term in (first, second):
        kinds = [type(f) for f in term.factors]
        if (
            term.biases
            or len(kinds) != 1
            or kinds[0] not in (Factor, DistanceFactor, QueryBandwidthFactor, CosineFactor)
        ):
            return None
        slots.append(_as_given(f) if isinstance(f := term.factors[0], CosineFactor) else f)
    one, other = slots
    return slots if one.q is other.q and one.k is other.k else None


def _rotated(f: Factor, dtype: torch.dtype) -> Factor:
    """Sinusoids as a factor with features of this dtype; other factors as they are."""
    if not isinstance(f, SinusoidFactor):
        return f
    return Factor(q=queries(f, dtype), k=f.keys_in(dtype))


def _as_given(f: CosineFactor) -> Factor:
    return AsGiven(q=f.queries, k=f.keys, scale=f.scale)


def _of_length_1(f: CosineFactor, dtype: torch.dtype, alone: bool) -> Factor:
    if alone and are_few(f.queries.shape[2], f.keys.shape[2]):
        return _as_given(f)
    q, k = (unit(x).to(dtype) for x in (f.queries, f.keys))
    return Factor(q=q, k=k, scale=f.scale)


def _joinable(f: Factor) -> bool:
    """Whether numbers can be divided by its scale."""
    return not f.per_query and (isinstance(f.scale, Tensor) or f.scale != 0.0)


def _mergeable(f: Factor) -> bool:
    return not f.keyed and not isinstance(f.scale, Tensor) and f.scale != 0.0


def _merged(factors: list[Factor], dtype: torch.dtype) -> Factor:
    """Plain factors side by side, scaled; their numbers per key add up."""
    q = join([(f.q.float() * f.scale).to(dtype) for f in factors])
    merged = Factor(q=q, k=join([f.k.to(dtype) for f in factors]))
    for f in factors:
        if f.col is not None:
            merged = _joined(merged, f)
    return merged


def _joined(target: Factor, f: Factor) -> Factor:
    """The number per key of f as one of the target: scale_f col_f / scale_target."""
    if isinstance(f, SlopeFactor) and not isinstance(target.scale, Tensor) and not target.keyed:
        col = _slopes(f.num_keys, target.scale, f.slope)
        return Factor(q=target.q, k=target.k, scale=target.scale, row=target.row, col=col)
    assert f.col is not None
    col = f.col.float()
    for scale, divide in ((f.scale, False), (target.scale, True)):
        if isinstance(scale, Tensor):
            factor = scale.reshape(1, -1, 1)
            if col.shape[1] > 1 and factor.shape[1] > 1:
                col = repeat(col, col.shape[0], max(col.shape[1], factor.shape[1]))
            col = col / factor if divide else col * factor
        else:
            col = col / scale if divide else col * scale
    if isinstance(target, DistanceFactor):
        return Joined(target, add(col, target.extra) if isinstance(target, Joined) else col)
    if target.col is not None:
        col = add(col, target.col.float())
    return Factor(q=target.q, k=target.k, scale=target.scale, row=target.row, col=col)


def _slopes(num_keys: int, scale: float, slope: Tensor) -> Tensor:
    """The numbers per key from slopes, in units of a scale, [1, H, K]."""
    slope = slope.float()
    return places_from_end(num_keys, slope.device, slope.dtype, scale) * slope.view(1, -1, 1)
