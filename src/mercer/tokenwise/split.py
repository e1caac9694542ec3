"""A call of `vicinity` as a few near keys and all others.

Only the P keys nearest to a query have taps that it must not see. All other keys are one call of
`smooth` on keys and values that are convolved once. The nearest P are one block of P columns. Both
are mixed by their masses, so memory is linear in the length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.tokenwise.taps import Convolution
from ..dispatch.problem import Problem
from ..filters import And, Causal, Earlier, Filter, Full, Memory, Padding, Window
from ..smoother import solve
from ..term.features import Features
from ..term.layout import repeat
from ..term.mix import Smoothed
from .nearest import Column, average, rows
from .taps import convolve, cut, joined


@dataclass(frozen=True)
class Vicinity:
    """A checked call."""

    problem: Problem
    convolution: Convolution
    first: int = 0  # the place of the first key

    def seen(self, away: int | None) -> Problem:
        """The problem with the keys and values that a query `away` places later sees."""
        key_taps, value_taps, *_ = self.convolution
        k, v = self.problem.k, self.problem.v
        if key_taps is not None:
            k = with_content(k, self._convolved(k.part("content"), key_taps, away))
        if value_taps is not None:
            v = self._convolved(v, value_taps, away)
        return replace(self.problem, k=k, v=v)

    def _convolved(self, x: Tensor, taps: Tensor, away: int | None) -> Tensor:
        _, _, normalize, boundary = self.convolution
        first, kernel = cut(taps, normalize, boundary, away)
        joins = joined(self.problem.filter, self.first, x.shape[2], taps.shape[-1] // 2, x.device)
        return convolve(in_heads(x, taps), first, kernel, joins)

    def far(self, count: int, backend: str) -> Smoothed:
        """All keys but the nearest; all their taps are visible."""
        whole = replace(self.seen(None), log_mass=True)
        moved = self.moved(count)
        if moved is None:
            return solve(replace(whole, filter=whole.filter & Earlier(count)), backend)
        first = slice(None, whole.k.length - count)
        short = replace(whole, k=sliced(whole.k, first), v=whole.v[:, :, first], filter=moved)
        return self.before(short, backend)

    def moved(self, count: int) -> Filter | None:
        """The filter without the nearest keys; queries align with the last key that they see."""
        whole = self.problem
        if whole.kernel.relative:
            return None
        num_queries, num_keys = whole.q.length, whole.k.length
        return _moved(whole.filter.simplify(num_queries, num_keys), count, num_queries, num_keys)

    def before(self, short: Problem, backend: str) -> Smoothed:
        """The smoother of all keys but the last; the first queries may see none of them."""
        # Without the last keys, queries align with the last key that they see. So the filter is
        # causal again, which more backends support than a gap.
        blind = max(0, short.q.length - short.k.length)
        out, log_mass, sign = solve(replace(short, q=sliced(short.q, slice(blind, None))), backend)
        assert log_mass is not None
        return Smoothed(
            F.pad(out, (0, 0, blind, 0)),
            F.pad(log_mass, (blind, 0), value=-math.inf),
            None if sign is None else F.pad(sign, (blind, 0), value=1.0),
        )

    def _last(self, count: int) -> Vicinity:
        """The same call with the last keys only."""
        first = max(self.problem.k.length - count, 0)
        kept = slice(first, None)
        problem = replace(
            self.problem, k=sliced(self.problem.k, kept), v=self.problem.v[:, :, kept]
        )
        key_taps, value_taps = (None if x is None else x[:, kept] for x in self.convolution[:2])
        convolution = self.convolution._replace(key_taps=key_taps, value_taps=value_taps)
        return Vicinity(problem, convolution, self.first + first)

    def near(self, count: int) -> Smoothed | None:
        """The `count` nearest keys of each query; None if the kernel has no lowering."""
        whole, call = self.problem, self._last(self.problem.q.length + 2 * count)
        num_queries = whole.q.length
        start = self.first + whole.k.length - num_queries
        filter, device = whole.filter, whole.v.device
        places = torch.arange(start, start + num_queries, device=device)
        b = torch.arange(filter.batch or 1, device=device)[:, None, None]
        columns: list[Column] = []
        for away in range(count):
            here = call.seen(away)
            seen = filter.sees(b, places, (places - away).clamp(min=0), start)
            seen = torch.as_tensor(seen, device=device) & (places >= away)
            terms = here.kernel.terms(here.q, here.k)
            if not terms:
                return None
            first, length = start - away - call.first, here.k.length
            resolved = [term.resolve(num_queries, length, causal=True) for term in terms]
            value = torch.where(seen[..., None], rows(here.v, first, num_queries), 0.0)
            columns += [Column(term, first, away, seen, value) for term in resolved]
        return average(columns, count, whole)


def _moved(filter: Filter, count: int, num_queries: int, num_keys: int) -> Filter | None:
    """The keys that a query sees without its `count` nearest, for queries moved back by `count`."""
    match filter:
        case Causal():
            return filter
        case Full() if num_queries <= 1:
            return filter
        case Window(left=left, right=0) if left < 0 or left >= count:
            return Causal() if left < 0 else Window(left - count, 0)
        case Memory(length=length, start=start):
            return Memory(length, num_keys - num_queries if start is None else start)
        case Padding():
            return filter.until(num_keys - count, 0)
        case And(filters=filters) if filter.causal:
            parts = [_moved(part, count, num_queries, num_keys) for part in filters]
            kept = [part for part in parts if part is not None]
            return And(tuple(kept)) if len(kept) == len(parts) else None
    return None


def with_content(k: Features, content: Tensor) -> Features:
    return Features(**dict(k.items()) | {"content": content})


def in_heads(x: Tensor, taps: Tensor) -> Tensor:
    """x, with heads repeated if the taps have more."""
    fits = taps.shape[2] == 1 or taps.shape[2] == x.shape[1]
    return x if fits else repeat(x, x.shape[0], taps.shape[2])


def sliced(x: Features, places: slice) -> Features:
    return Features(**{name: part[:, :, places] for name, part in x.items()})
