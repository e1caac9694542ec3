"""Attention to keys that speak for their vicinity: TWiKers as a function.

    out_i = sum_j w(q_i, k~_ij) v~_ij / sum_j w(q_i, k~_ij)
    k~_ij = sum_d a_j[d] k_{j+d},  v~_ij = sum_d b_j[d] v_{j+d}

over the taps d of key j that query i sees. Under a causal filter the boundary rule says which:

    "none"      all; what lies beyond the query reads as zero
    "left"      d <= 0
    "truncate"  j + d <= i
    "shrink"    |d| <= i - j

Invisible taps are removed before the softmax. Taps beyond the ends of the sequence, of a document
or of what is not padding contribute zero. Without a causal filter there is no future to hide, and
only "left" leaves taps out.

`reference` is this, query by query, and the specification. The fast form needs memory linear in the
length: only the p keys nearest to a query are cut, so all others are one call of `smooth` on keys
and values that are convolved once; the nearest p are one block of p columns; both are mixed by
their masses. Where the kernel is exponential and the filter causal or full, all of it is one
function around flash attention, see backends/fused_taps.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends.tokenwise import function as fused_taps
from ..backends.tokenwise.plain import Call
from ..backends.tokenwise.taps import (
    Boundary,
    check_boundary,
    check_size,
    check_temperature,
    convolve,
    cut,
    joined,
    visible,
)
from ..dispatch.choose import choose
from ..dispatch.problem import Problem, prepare
from ..filters import And, Causal, Earlier, Filter, Full, Memory, Padding, Window
from ..kernels import Exponential, Kernel
from ..memory.growing import Growing
from ..smoother import reference as smooth_densely
from ..smoother import solve
from ..term.features import Features, Input
from ..term.layout import at_least, repeat
from ..term.mix import Smoothed, mix
from .nearest import Column, average, rows


@overload
def vicinity(
    q: Input, k: Input, v: Tensor, *, key_taps: Tensor | None = ...,
    value_taps: Tensor | None = ..., normalize: float | None = ..., boundary: Boundary = ...,
    kernel: Kernel = ..., filter: Filter = ..., backend: str = ..., dropout_p: float = ...,
    return_log_mass: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def vicinity(
    q: Input, k: Input, v: Tensor, *, key_taps: Tensor | None = ...,
    value_taps: Tensor | None = ..., normalize: float | None = ..., boundary: Boundary = ...,
    kernel: Kernel = ..., filter: Filter = ..., backend: str = ..., dropout_p: float = ...,
    return_log_mass: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def vicinity(
    q: Input,
    k: Input,
    v: Tensor,
    *,
    key_taps: Tensor | None = None,
    value_taps: Tensor | None = None,
    normalize: float | None = None,
    boundary: Boundary = "shrink",
    kernel: Kernel = Exponential(),
    filter: Filter = Causal(),
    backend: str = "auto",
    dropout_p: float = 0.0,
    return_log_mass: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Smooth over keys and values that are small convolutions of their neighbours.

    Args:
        q, k, v: as in `smooth`; of the keys, the part `content` is convolved.
        key_taps, value_taps: the kernel of each key, [B, K, H or 1, S], tap d in column p + d.
        normalize: None uses taps as they are; a number T means softmax(taps / T) over what is seen.
        boundary: which taps a query sees near itself: none, left, truncate or shrink.
        kernel, filter, backend, dropout_p, return_log_mass: as in `smooth`.
    """
    problem = prepare(kernel, q, k, v, filter, dropout_p, return_log_mass, backend)
    check_boundary(boundary)
    check_temperature("normalize", normalize)
    for name, given in (("key_taps", key_taps), ("value_taps", value_taps)):
        _check_taps(name, given, problem)
    checked = Vicinity(problem, key_taps, value_taps, normalize, boundary)
    if not torch.is_autocast_enabled(problem.v.device.type):
        result = checked.solve(backend)
    else:
        with torch.autocast(problem.v.device.type, enabled=False):
            result = checked.solve(backend)
    if not return_log_mass:
        return result.out
    assert result.log_mass is not None
    return result.out, result.log_mass


def num_cut(boundary: Boundary, filter: Filter, size: int) -> int:
    """How many of the keys nearest to a query show it a kernel that is cut."""
    reach = size // 2
    return reach if filter.causal and visible(boundary, reach, None)[1] > 0 else 0


def refuses_fused(
    kernel: Kernel, q: Features, k: Features, v: Tensor, filter: Filter, dropout_p: float
) -> str | None:
    """Why a call is not one function around flash attention, or None."""
    if type(kernel) is not Exponential or kernel.on != "content":
        return "the kernel is not Exponential() alone"
    if kernel.scale is not None and kernel.scale <= 0:
        return "the scale is not positive"
    if dropout_p:
        return "weights are dropped"
    if not isinstance(filter.simplify(q.length, k.length), Causal | Full):
        return f"{filter} is neither causal nor full"
    return fused_taps.refuses(q.part("content"), k.part("content"), v)


class Convolved:
    """Keys and values of a cache by their whole kernels: those whose neighbours are all there."""

    def __init__(self) -> None:
        self._keys: Growing | None = None  # [B, H, n, D], None without kernels on keys
        self._values: Growing | None = None
        self.length = 0
        self.ahead = 0  # how far after a key its last tap reads

    def extend(self, recent: Vicinity, length: int) -> None:
        """Convolve as many as `length`; `recent` has the keys that are needed for the new ones."""
        self.ahead = recent.problem.k.length + recent.first - length
        if length <= self.length:
            return
        seen = recent.seen(None)
        new = slice(self.length - recent.first, length - recent.first)
        if recent.key_taps is not None:
            self._keys = _join(self._keys, seen.k.part("content")[:, :, new])
        if recent.value_taps is not None:
            self._values = _join(self._values, seen.v[:, :, new])
        self.length = length

    @property
    def keys(self) -> Tensor | None:
        return None if self._keys is None else self._keys.tensor

    @property
    def values(self) -> Tensor | None:
        return None if self._values is None else self._values.tensor

    def crop(self, length: int) -> None:
        """Forget those that read beyond the first keys."""
        self.length = max(0, min(self.length, length - self.ahead))
        for x in (self._keys, self._values):
            if x is not None:
                x.crop(self.length)

    def reorder(self, index: Tensor) -> None:
        for x in (self._keys, self._values):
            if x is not None:
                x.reorder(index)


def _join(before: Growing | None, x: Tensor) -> Growing:
    if before is None:
        return Growing(x, 2)
    before.append(x)
    return before


def continue_vicinity(
    q: Features,
    k: Features,
    v: Tensor,
    *,
    ready: Convolved,
    taps: Callable[[int], tuple[Tensor | None, Tensor | None]],
    size: int,
    normalize: float | None,
    boundary: Boundary,
    kernel: Kernel,
    filter: Filter,
    backend: str,
) -> Tensor | None:
    """What `vicinity` gives for the last queries, without convolving again what `ready` holds.

    `taps` gives the taps of all keys from a place on. None where the filter or the kernel have to
    know all keys as they came.
    """
    problem = prepare(kernel, q, k, v, filter, 0.0, False, backend)
    q, k, v, filter = problem.q, problem.k, problem.v, problem.filter
    count = num_cut(boundary, filter, size)
    whole = Vicinity(problem, None, None, normalize, boundary)
    if not filter.causal or backend == "reference" or whole.moved(count) is None:
        return None
    start = max(ready.length - size // 2, 0)
    recent = replace(problem, k=_slice(k, slice(start, None)), v=v[:, :, start:])
    key_taps, value_taps = taps(start)
    part = Vicinity(recent, key_taps, value_taps, normalize, boundary, start)
    lowers = bool(kernel.terms(_slice(q, slice(0, 1)), _slice(k, slice(0, 1))))
    if not lowers or joined(filter, start, recent.k.length, size // 2, v.device) is not None:
        return None
    with torch.autocast(v.device.type, enabled=False):
        return whole.continued(ready, part, count, backend).out


@dataclass(frozen=True)
class Vicinity:
    """A checked call."""

    problem: Problem
    key_taps: Tensor | None  # [B, K, H or 1, S]
    value_taps: Tensor | None
    normalize: float | None
    boundary: Boundary
    first: int = 0  # the place of the first key

    def solve(self, backend: str) -> Smoothed:
        if backend == "reference":
            return self.reference()
        taps = [x for x in (self.key_taps, self.value_taps) if x is not None]
        size = max([1, *(x.shape[-1] for x in taps)])
        count = num_cut(self.boundary, self.problem.filter, size)
        if taps and backend == "auto" and (found := self.fused(count)) is not None:
            return found
        if not count:
            return Smoothed(*solve(self.seen(None), backend))
        near = self.near(count)
        if near is None:
            # Without a lowering there is only the definition; a backend by name refuses.
            choose((), backend)
            return self.reference()
        if self.problem.k.length <= count:
            return near
        return mix([self.far(count, backend), near])

    def fused(self, count: int) -> Smoothed | None:
        """All in one function around flash attention, or None where it does not apply."""
        whole = self.problem
        q, k, v = whole.q, whole.k, whole.v
        if refuses_fused(whole.kernel, q, k, v, whole.filter, whole.dropout_p) is not None:
            return None
        if whole.log_mass:
            return None
        if whole.v.device.type == "cpu":
            whole = whole.cleaned()
            q, k, v = whole.q, whole.k, whole.v
        assert isinstance(whole.kernel, Exponential)
        query, key = q.part("content"), k.part("content")
        call = Call(
            self.boundary,
            whole.filter.causal,
            count,
            self.normalize,
            whole.kernel.scale_of(query),
        )
        heads, batch = q.heads, whole.batch
        key_taps, value_taps = (
            None if x is None else _per_query_head(x, batch, heads)
            for x in (self.key_taps, self.value_taps)
        )
        wide = v.shape[-1]
        query, key, value = (repeat(x, batch, heads) for x in (query, key, v))
        most = max(query.shape[-1], wide)
        most += -most % 8 if value.is_cuda else 0
        query, key, value = (at_least(x, most) for x in (query, key, value))
        out = fused_taps.run(call, query, key, value, key_taps, value_taps)
        if out is None:
            return None
        out = out if most == wide else out[..., :wide]
        if whole.bad_queries is None or whole.bad_keys is None:
            return Smoothed(out, None)
        # Whatever its taps are, a key reads itself, so that a query sees all that is before it.
        seen = whole.bad_keys.cumsum(-1) > 0 if call.causal else whole.bad_keys.any(-1, True)
        return Smoothed(out.masked_fill((whole.bad_queries | seen)[..., None], math.nan), None)

    def seen(self, away: int | None) -> Problem:
        """The problem with keys and values as a query sees them that far away."""
        k, v = self.problem.k, self.problem.v
        if self.key_taps is not None:
            content = self.convolve(k.part("content"), self.key_taps, away)
            k = Features(**dict(k.items()) | {"content": content})
        if self.value_taps is not None:
            v = self.convolve(v, self.value_taps, away)
        return replace(self.problem, k=k, v=v)

    def convolve(self, x: Tensor, taps: Tensor, away: int | None) -> Tensor:
        first, kernel = cut(taps, self.normalize, self.boundary, away)
        joins = joined(self.problem.filter, self.first, x.shape[2], taps.shape[-1] // 2, x.device)
        return convolve(_in_heads(x, taps), first, kernel, joins)

    def far(self, count: int, backend: str) -> Smoothed:
        """All keys but the nearest, whose kernels are whole."""
        whole = replace(self.seen(None), log_mass=True)
        moved = self.moved(count)
        if moved is None:
            return solve(replace(whole, filter=whole.filter & Earlier(count)), backend)
        first = slice(None, whole.k.length - count)
        short = replace(whole, k=_slice(whole.k, first), v=whole.v[:, :, first], filter=moved)
        return self.before(short, count, backend)

    def moved(self, count: int) -> Filter | None:
        """The filter without the nearest keys, whose queries stand beside the last they see."""
        whole = self.problem
        if whole.kernel.relative:
            return None
        num_queries, num_keys = whole.q.length, whole.k.length
        return _moved(whole.filter.simplify(num_queries, num_keys), count, num_queries, num_keys)

    def before(self, short: Problem, count: int, backend: str) -> Smoothed:
        """The smoother of all keys but the last; the first queries may see none of them."""
        # Without the last keys, a query stands beside the last one that it sees: causal again,
        # which more backends know than a gap.
        blind = max(0, short.q.length - short.k.length)
        out, log_mass, sign = solve(replace(short, q=_slice(short.q, slice(blind, None))), backend)
        assert log_mass is not None
        return Smoothed(
            F.pad(out, (0, 0, blind, 0)),
            F.pad(log_mass, (blind, 0), value=-math.inf),
            None if sign is None else F.pad(sign, (blind, 0), value=1.0),
        )

    def continued(self, ready: Convolved, recent: Vicinity, count: int, backend: str) -> Smoothed:
        """The same, of which the first keys are convolved already, and `recent` has the others."""
        ready.extend(recent, self.problem.k.length - count)
        k, v = self.problem.k, self.problem.v
        first = slice(None, ready.length)
        k = _slice(k, first)
        if ready.keys is not None:
            k = Features(**dict(k.items()) | {"content": ready.keys})
        v = v[:, :, first] if ready.values is None else ready.values
        filter = self.moved(count)
        assert filter is not None
        short = replace(self.problem, k=k, v=v, filter=filter, log_mass=count > 0)
        if not count:
            return solve(short, backend)
        near = recent.near(count)
        assert near is not None
        return mix([self.before(short, count, backend), near])

    def last(self, count: int) -> Vicinity:
        """The same call with the last keys only."""
        first = max(self.problem.k.length - count, 0)
        kept = slice(first, None)
        return replace(
            self,
            problem=replace(
                self.problem, k=_slice(self.problem.k, kept), v=self.problem.v[:, :, kept]
            ),
            key_taps=None if self.key_taps is None else self.key_taps[:, kept],
            value_taps=None if self.value_taps is None else self.value_taps[:, kept],
            first=self.first + first,
        )

    def near(self, count: int) -> Smoothed | None:
        """The `count` nearest keys of each query; None if the kernel has no lowering."""
        whole, call = self.problem, self.last(self.problem.q.length + 2 * count)
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

    def reference(self) -> Smoothed:
        """The definition: every query with the kernels that it sees."""
        whole = self.problem
        num_queries, num_keys = whole.q.length, whole.k.length
        if not whole.filter.causal or not num_queries:
            return smooth_densely(self.densely(num_keys, None).cleaned())
        rows = []
        for n in range(num_queries):
            place = n + num_keys - num_queries
            row = replace(
                self.densely(max(place + 1, 0), place),
                q=_slice(whole.q, slice(n, n + 1)),
                filter=whole.filter.until(max(place + 1, 0), num_keys - num_queries),
            )
            rows.append(smooth_densely(row.cleaned()))
        masses = [row.log_mass for row in rows if row.log_mass is not None]
        return Smoothed(torch.cat([row.out for row in rows], 2), torch.cat(masses, 2))

    def densely(self, length: int, place: int | None) -> Problem:
        """The first keys and values, as the query at this place sees them."""
        k, v = _slice(self.problem.k, slice(0, length)), self.problem.v[:, :, :length]
        if self.key_taps is not None:
            content = self.convolve_densely(k.part("content"), self.key_taps, place)
            k = Features(**dict(k.items()) | {"content": content})
        if self.value_taps is not None:
            v = self.convolve_densely(v, self.value_taps, place)
        return replace(self.problem, k=k, v=v)

    def convolve_densely(self, x: Tensor, taps: Tensor, place: int | None) -> Tensor:
        length, reach = x.shape[2], taps.shape[-1] // 2
        if not length:
            return _in_heads(x, taps)
        j = torch.arange(length, device=x.device)[:, None]
        d = torch.arange(-reach, reach + 1, device=x.device)
        seen = (d <= 0).expand(length, -1) if self.boundary == "left" else (d == d) & (j == j)
        reads = (j + d >= 0) & (j + d < length)
        if place is not None:
            if self.boundary == "truncate":
                seen = j + d <= place
            elif self.boundary == "shrink":
                seen = d.abs() <= place - j
            reads = reads & (j + d <= place)
        joins = joined(self.problem.filter, 0, length, reach, x.device)
        if joins is not None:
            reads = reads & joins
        taps = taps[:, :length].transpose(1, 2)  # [B, H or 1, K, S]
        if self.normalize is None:
            taps = taps.masked_fill(~seen, 0.0)
        else:
            taps = (taps / self.normalize).masked_fill(~seen, -math.inf).softmax(-1)
        y = _in_heads(x, taps.transpose(1, 2))[:, :, (j + d).clamp(0, length - 1)]
        y = torch.where((reads & seen).view(-1, 1, length, 2 * reach + 1, 1), y, 0.0)
        return (taps[..., None] * y).sum(-2).to(x.dtype)


def _check_taps(name: str, taps: Tensor | None, problem: Problem) -> None:
    if taps is None:
        return
    if not isinstance(taps, Tensor) or taps.dim() != 4 or not taps.is_floating_point():
        came = list(taps.shape) if isinstance(taps, Tensor) else type(taps).__name__
        raise ValueError(f"{name} must be numbers [B, K, H or 1, S], but came as {came}")
    batch, length, heads, size = taps.shape
    k = problem.k.part("content") if name == "key_taps" else problem.v
    # One by one: a compiled graph does not look for a size that varies among others.
    fits = length == problem.k.length and (batch == 1 or batch == problem.batch)
    if not (fits and (heads == 1 or heads == k.shape[1] or heads == problem.q.heads)):
        allowed = sorted({1, k.shape[1], problem.q.heads})
        raise ValueError(
            f"{name} must be [{problem.batch}, {problem.k.length}, "
            f"{' or '.join(map(str, allowed))}, S], but came as {list(taps.shape)}"
        )
    if size % 2 == 0:
        raise ValueError(f"{name} must have an odd number of taps, but came with {size}")
    check_size(size)
    if taps.device != problem.v.device:
        raise ValueError(f"{name} must be on {problem.v.device}, but is on {taps.device}")


def _in_heads(x: Tensor, taps: Tensor) -> Tensor:
    """x in as many heads as the taps have, where they have more."""
    fits = taps.shape[2] == 1 or taps.shape[2] == x.shape[1]
    return x if fits else repeat(x, x.shape[0], taps.shape[2])


def _per_query_head(taps: Tensor, batch: int, heads: int) -> Tensor:
    """Taps of all sequences, shared by heads or of each: [B, K, H or 1, S]."""
    if taps.shape[2] != 1 and taps.shape[2] != heads:
        taps = taps.repeat_interleave(heads // taps.shape[2], 2)
    return taps if taps.shape[0] == batch else taps.expand(batch, -1, -1, -1)


def _moved(filter: Filter, count: int, num_queries: int, num_keys: int) -> Filter | None:
    """What a query sees but its `count` nearest keys, as seen from `count` places before it."""
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


def _slice(x: Features, places: slice) -> Features:
    return Features(**{name: part[:, :, places] for name, part in x.items()})
