"""Sines and cosines of places, and coefficients turned by their angles."""

from __future__ import annotations

import torch
from torch import Tensor

from ..memory.constants import constant
from ..opaque.operators import fake, operator
from .biases import QueryTable, reach
from .factors import Factor
from .layout import accumulator
from .learned import Learned, needs_gradient


def frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """w_p = base^(-2p / P), [P / 2]; in float64, for angles of long sequences."""
    p = torch.arange(0, width, 2, device=device, dtype=torch.float64)
    return torch.pow(base, -p / width)


def sinusoid(places: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    """Sines and cosines of every place at P / 2 frequencies, interleaved, [..., P]."""
    # An opaque operator: inlined, a compiler would recompute them for each tensor they are added
    # to.
    form = form_sinusoid if torch.compiler.is_compiling() else _form_sinusoid
    return form(places, width, base, dtype)


def _form_sinusoid(
    places: Tensor, width: int, base: float, dtype: torch.dtype, wide: bool = True
) -> Tensor:
    """Angles are in float64; float32 is enough for bfloat16 up to some ten thousand places."""
    step = frequencies(width, base, places.device)
    angle = places[..., None] * (step if wide else step.float())
    out = places.new_empty(*places.shape, width, dtype=dtype)
    torch.sin(angle, out=out[..., 0::2])
    torch.cos(angle, out=out[..., 1::2])
    return out


@operator
def form_sinusoid(places: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    return _form_sinusoid(places, width, base, dtype)


@fake(form_sinusoid)
def _(places: Tensor, width: int, base: float, dtype: torch.dtype) -> Tensor:
    return places.new_empty(*places.shape, width, dtype=dtype)


def run_of_sinusoids(
    first: int, stop: int, width: int, base: float, like: Tensor, *, wide: bool = True
) -> Tensor:
    """Sinusoids of the places from first to stop, in the dtype of `like`, cached."""
    if torch.compiler.is_compiling():
        return copy_sinusoids(first, stop, width, base, like.detach(), wide)
    return _kept_sinusoids(first, stop, width, base, like, wide)


def _kept_sinusoids(
    first: int, stop: int, width: int, base: float, like: Tensor, wide: bool
) -> Tensor:
    def make() -> Tensor:
        return _form_run(first, stop, width, base, like, wide)

    key = ("run of sinusoids", first, stop, width, base, like.dtype, wide)
    return constant(key, like.device, make)


def _form_run(first: int, stop: int, width: int, base: float, like: Tensor, wide: bool) -> Tensor:
    places = torch.arange(first, stop, device=like.device)
    return _form_sinusoid(places, width, base, like.dtype, wide)


@operator
def copy_sinusoids(
    first: int, stop: int, width: int, base: float, like: Tensor, wide: bool
) -> Tensor:
    # A captured graph of compiled code has its own memory pool, so the cache must not hold it.
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        return _form_run(first, stop, width, base, like, wide)
    # Compiled code may write to the output of an operator.
    return _kept_sinusoids(first, stop, width, base, like, wide).clone()


@fake(copy_sinusoids)
def _(first: int, stop: int, width: int, base: float, like: Tensor, wide: bool) -> Tensor:
    return like.new_empty(stop - first, width)


def waves(places: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The sines and the cosines alone, [..., P / 2] each."""
    sin, cos = sinusoid(places, width, base, dtype).unflatten(-1, (-1, 2)).unbind(-1)
    return sin, cos


def coefficients(asking: Tensor, weight: Tensor | None) -> Tensor:
    """[B, H, Q, P]: the queries' part itself, or its product with a weight [H, D, P]."""
    return asking if weight is None else asking @ weight.to(asking.dtype)


class SinusoidFactor(Factor):
    """<c_i turned by its place, sinusoids of j>: sin(i - j) and cos(i - j) by the angle sums.

    Places are counted from the last key: only differences matter, and recent ones matter most. The
    coefficients c and the features are formed lazily. With a weight, a backend may take the same
    numbers as a table of distances instead.
    """

    asking: Tensor  # [B, H, Q, P], or with a weight [B, H, Q, D]
    weight: Tensor | None  # [H, D, P]
    base: float
    _c: Tensor | None
    _q: Tensor | None

    def __init__(
        self, *, asking: Tensor, weight: Tensor | None, base: float, num_keys: int
    ) -> None:
        self.asking, self.weight, self.base, self.num_keys = asking, weight, base, num_keys
        self.scale, self.row, self.col, self.link = 1.0, None, None, None
        self._c = self._q = None

    def raised(self, exponent: float) -> Factor:
        asking, weight = self.asking, self.weight
        if weight is None:
            asking = exponent * asking
        else:
            weight = exponent * weight
        return SinusoidFactor(asking=asking, weight=weight, base=self.base, num_keys=self.num_keys)

    @property
    def width(self) -> int:
        return (self.asking if self.weight is None else self.weight).shape[-1]

    @property
    def learned(self) -> Learned:
        q = needs_gradient(self.asking, self.weight)
        return Learned(q, k=False, scale=False, row=False, col=False)

    @property
    def c(self) -> Tensor:
        """[B, H, Q, P]."""
        if self._c is None:
            self._c = coefficients(self.asking, self.weight)
        return self._c

    @property
    def q(self) -> Tensor:  # type: ignore[override]
        if self._q is None:
            self._q = turned(self.c, self.base)
        return self._q

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        return self.keys_in(accumulator(self.asking.dtype))

    def as_table(self) -> QueryTable | None:
        """The same weights as <x_i, weight sinusoid(d)> of every distance d; None without a weight.

        It reaches at least one place further than the keys, so that no distance is clipped.
        """
        if self.weight is None:
            return None
        x, weight, last = self.asking, self.weight, reach(self.num_keys)
        wide = x.dtype != torch.bfloat16

        def form(first: int) -> Tensor:
            rows = run_of_sinusoids(first, last + 1, weight.shape[-1], self.base, x, wide=wide)
            return rows @ weight.to(x.dtype).mT

        return QueryTable(q=x, form=form, clip=last, source=weight)

    def keys_in(self, dtype: torch.dtype) -> Tensor:
        """`k`, computed in the accumulator's dtype and rounded to this one."""
        wide, device = accumulator(self.asking.dtype), self.asking.device
        return waves_of_keys(self.num_keys, self.width, self.base, wide, dtype, device)


def turned_at(c: Tensor, i: Tensor, j: Tensor, base: float) -> Factor:
    """The factor of coefficients [B, H, Q, P] for queries at i and keys at j, [B or 1, T] each."""
    wide, width = accumulator(c.dtype), c.shape[-1]
    sin, cos = waves(i[:, None], width, base, wide)
    s, o = (x.to(wide) for x in (c[..., 0::2], c[..., 1::2]))
    q = torch.stack([s * sin + o * cos, o * sin - s * cos], -1).flatten(-2)
    sin, cos = waves(j[:, None], width, base, wide)
    return Factor(q=q, k=torch.stack([cos, sin], -1).flatten(-2))


def waves_of_keys(
    num_keys: int, width: int, base: float, wide: torch.dtype, dtype: torch.dtype,
    device: torch.device,
) -> Tensor:  # fmt: skip
    """Cosines and sines of the places of keys, [1, 1, K, P], formed in one dtype for another."""

    def make() -> Tensor:
        sin, cos = waves(torch.arange(1 - num_keys, 1, device=device), width, base, wide)
        return torch.stack([cos, sin], -1).flatten(-2)[None, None].to(dtype)

    return constant(("waves of keys", num_keys, width, base, wide, dtype), device, make)


def waves_of_queries(c: Tensor, base: float, scale: float = 1.0) -> Tensor:
    """Sines and cosines of the places of coefficients [B, H, T, P], times a scale, [T, P]."""
    length, width, dtype = c.shape[2], c.shape[-1], accumulator(c.dtype)

    def make() -> Tensor:
        both = sinusoid(torch.arange(1 - length, 1, device=c.device), width, base, dtype)
        return both if scale == 1.0 else scale * both

    return constant(("waves of queries", length, width, base, dtype, scale), c.device, make)


def turned(c: Tensor, base: float, scale: float = 1.0) -> Tensor:
    """scale (s sin + o cos, o sin - s cos) of every pair (s, o) of coefficients, side by side.

    c are [B, H, T, P]; places are counted from the last.
    """
    both = waves_of_queries(c, base, scale)
    c = c.to(both.dtype)
    sin, cos = both.unflatten(-1, (-1, 2)).unbind(-1)
    if torch.compiler.is_compiling():
        # A compiler fuses this, but not operations on complex numbers.
        s, o = c[..., 0::2], c[..., 1::2]
        return torch.stack([s * sin + o * cos, o * sin - s * cos], -1).flatten(-2)
    # (s + io) (sin - i cos): one pass over c instead of eight.
    pairs = c.unflatten(-1, (-1, 2))
    *others, last = pairs.stride()
    if last != 1 or pairs.storage_offset() % 2 or any(stride % 2 for stride in others):
        pairs = pairs.contiguous()
    out = torch.view_as_complex(pairs) * torch.complex(sin, -cos)
    return torch.view_as_real(out).flatten(-2)
