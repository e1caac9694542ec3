"""Decoding with token kernels: keys and values of a cache are convolved once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from ..backends.tokenwise.taps import Convolution, num_cut
from ..dispatch.problem import prepare
from ..filters import Filter
from ..kernels import Kernel
from ..memory.growing import Growing
from ..smoother import finish, solve
from ..term.features import Features
from ..term.mix import Smoothed, mix
from .split import Vicinity, sliced, with_content
from .taps import Boundary, joined


class Convolved:
    """Keys and values of a cache after their whole kernels, up to the last with all neighbours."""

    def __init__(self) -> None:
        self._keys: Growing | None = None  # [B, H, n, D], None without kernels on keys
        self._values: Growing | None = None
        self.length = 0
        self.ahead = 0  # how far after a key its last tap reads

    def extend(self, recent: Vicinity, length: int) -> None:
        """Extend to `length` keys; `recent` has the keys that the new ones read."""
        self.ahead = recent.problem.k.length + recent.first - length
        if length <= self.length:
            return
        seen = recent.seen(None)
        new = slice(self.length - recent.first, length - recent.first)
        if recent.convolution.key_taps is not None:
            self._keys = _join(self._keys, seen.k.part("content")[:, :, new])
        if recent.convolution.value_taps is not None:
            self._values = _join(self._values, seen.v[:, :, new])
        self.length = length

    @property
    def keys(self) -> Tensor | None:
        return None if self._keys is None else self._keys.tensor

    @property
    def values(self) -> Tensor | None:
        return None if self._values is None else self._values.tensor

    def crop(self, length: int) -> None:
        """Remove those that read beyond the first `length` keys."""
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
    """`vicinity` for the last queries, without convolving the keys in `ready` again.

    `taps` gives the taps of all keys from a place on. None if the filter or the kernel needs all
    unmixed keys.
    """
    problem = prepare(kernel, q, k, v, filter, 0.0, False, backend)
    q, k, v, filter = problem.q, problem.k, problem.v, problem.filter
    count = num_cut(boundary, filter.causal, size)
    whole = Vicinity(problem, Convolution(None, None, normalize, boundary))
    if not filter.causal or backend == "reference" or whole.moved(count) is None:
        return None
    start = max(ready.length - size // 2, 0)
    recent = replace(problem, k=sliced(k, slice(start, None)), v=v[:, :, start:])
    part = Vicinity(recent, Convolution(*taps(start), normalize, boundary), start)
    lowers = bool(kernel.terms(sliced(q, slice(0, 1)), sliced(k, slice(0, 1))))
    if not lowers or joined(filter, start, recent.k.length, size // 2, v.device) is not None:
        return None
    out = finish(problem, lambda: _continued(whole, part, ready, count, backend))
    assert isinstance(out, Tensor)
    return out


def _continued(
    whole: Vicinity, recent: Vicinity, ready: Convolved, count: int, backend: str
) -> Smoothed:
    """The first keys from `ready`, the others from `recent`."""
    problem = whole.problem
    ready.extend(recent, problem.k.length - count)
    first = slice(None, ready.length)
    k = sliced(problem.k, first)
    if ready.keys is not None:
        k = with_content(k, ready.keys)
    v = problem.v[:, :, first] if ready.values is None else ready.values
    filter = whole.moved(count)
    assert filter is not None
    short = replace(problem, k=k, v=v, filter=filter, log_mass=count > 0)
    if not count:
        return solve(short, backend)
    near = recent.near(count)
    assert near is not None
    return mix([whole.before(short, backend), near])
