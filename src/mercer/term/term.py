"""The waist: every kernel lowers to terms, every backend runs a term.

    log w_ij = sum_f link_f(scale_f (<q^f_i, k^f_j> + col^f_j) + row^f_i) + bias(i, j)

What this must meet: N kernels and M backends, never N x M; a number per key is never rounded to the
features' dtype; feature parts stay apart until a backend wants them side by side, so that one which
reads them in place can; a bias is data that a backend can read, not an opaque function.

Letters: B batch, H heads, Q queries, K keys, E features, V values. Key tensors may have fewer heads
that divide H, and any tensor may have batch 1. Query i sits at position i + K - Q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..memory.constants import constant
from ..opaque.spec import Spec


class Formed(NamedTuple):
    """A tensor as a function of others, which depends on nothing else."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | Formed, ...]


class Smoothed(NamedTuple):
    """What a backend returns for a term, and what mixes terms, splits of the keys and caches."""

    out: Tensor  # [B, H, Q, V]
    log_mass: Tensor | None  # [B, H, Q], the log of the absolute denominator
    sign: Tensor | None = None  # [B, H, Q], its sign where weights may be negative


class Again(NamedTuple):
    """How a call ran, if that was one function: function(options, *tensors)."""

    function: Callable[..., Any]
    options: Any
    tensors: tuple[Tensor | Formed | None, ...]


class Repeatable(Smoothed):
    """The same, with how it was run."""

    again: Again

    @staticmethod
    def of(out: Tensor, log_mass: Tensor | None, again: Again) -> Repeatable:
        found = Repeatable(out, log_mass)
        found.again = again
        return found


@dataclass(frozen=True)
class Link(Spec):
    """log |w| as a function of s, elementwise. A subclass defines `log` and its derivative."""

    signed: ClassVar[bool] = False
    cusp: ClassVar[bool] = False
    formula: ClassVar[str] = "link(s)"

    def log(self, s: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define log(s)")

    def sign(self, s: Tensor) -> Tensor:
        return torch.ones_like(s)

    def slope(self, s: Tensor) -> Tensor:
        """d log |w| / ds."""
        raise NotImplementedError(f"{type(self).__name__} must define slope(s)")

    def pull(self, s: Tensor, weight: Tensor, log_rest: Tensor) -> Tensor:
        """dw / ds, where weight = w(s) exp(log_rest); its own method for links with zeros."""
        return weight * self.slope(s)


class Learned(NamedTuple):
    """Which parts of a factor need a gradient. To ask forms no tensor."""

    q: bool
    k: bool
    scale: bool
    row: bool
    col: bool


def needs_gradient(*parts: object) -> bool:
    """Whether one of them is a tensor that needs a gradient, and gradients are on."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in parts)


# Not frozen, like Relative below: torch 2.11 cannot compile subclasses of frozen dataclasses.
@dataclass(kw_only=True, eq=False)
class Factor:
    """link(scale_i (<q_i, k_j> + col_j) + row_i)."""

    q: Tensor  # [B, H, Q, E]
    k: Tensor  # [B, H, K, E]
    scale: Tensor | float = 1.0  # a number, [H, 1, 1] or [B, H, Q, 1]
    row: Tensor | None = None  # [B, H, Q]
    col: Tensor | None = None  # [B, H, K]
    link: Link | None = None

    @property
    def width(self) -> int:
        """How many features it has."""
        return self.q.shape[-1]

    @property
    def keyed(self) -> bool:
        """Whether it has a number per key."""
        return self.col is not None

    @property
    def has_row(self) -> bool:
        """Whether it has a number per query."""
        return self.row is not None

    @property
    def per_query(self) -> bool:
        """Whether every query has a scale of its own."""
        return isinstance(self.scale, Tensor) and self.scale.dim() == 4

    @property
    def learned(self) -> Learned:
        """Which of its parts need a gradient. A part formed on demand answers by its sources."""
        return Learned(*map(needs_gradient, (self.q, self.k, self.scale, self.row, self.col)))


# How far, in the logarithm, a bounded bandwidth bends before it stands still.
BEND = math.log(2.0)


@dataclass(kw_only=True, eq=False)
class LogScale:
    """exp(-2 log s), log s = log + offset; with bounds, log bends over the last factor of two."""

    log: Tensor  # [1 or H], in the accumulator's dtype
    offset: float = 0.0
    bounds: tuple[float, float] | None = None

    def bent(self) -> Tensor:
        """log s, [1 or H]."""
        log = self.log
        if self.bounds is not None:
            free = log.clamp(self.bounds[0] + BEND, self.bounds[1] - BEND)
            log = free + BEND * torch.tanh((log - free) / BEND)
        return log + self.offset if self.offset else log

    def formed(self) -> Tensor:
        """[1 or H, 1, 1]."""
        return (-2.0 * self.bent()).exp()[:, None, None]


class Apart(Factor):
    """link(-scale_i |q_i - k_j|^2 / 2).

    Its numbers per query and per key are norms. They, and a scale that is given by its logarithm,
    are formed when somebody asks for them: a backend that can form them on its way does not.
    """

    given: Tensor | float | LogScale
    _col: Tensor | None
    _row: Tensor | None
    _scale: Tensor | None

    def __init__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        scale: Tensor | float | LogScale = 1.0,
        link: Link | None = None,
    ) -> None:
        self.q, self.k, self.given, self.link = q, k, scale, link
        self._col = self._row = self._scale = None

    @property
    def scale(self) -> Tensor | float:  # type: ignore[override]
        if not isinstance(self.given, LogScale):
            return self.given
        if self._scale is None:
            self._scale = self.given.formed()
        return self._scale

    @property
    def per_query(self) -> bool:
        return isinstance(self.given, Tensor) and self.given.dim() == 4

    @property
    def keyed(self) -> bool:
        return True

    @property
    def has_row(self) -> bool:
        return True

    @property
    def learned(self) -> Learned:
        q, k, scale = needs_gradient(self.q), needs_gradient(self.k), self._learns_scale()
        return Learned(q, k, scale, row=q or scale, col=k)

    def _learns_scale(self) -> bool:
        return needs_gradient(self.given.log if isinstance(self.given, LogScale) else self.given)

    @property
    def col(self) -> Tensor:  # type: ignore[override]
        if self._col is None:
            self._col = half_norm(self.k)
        return self._col

    @property
    def row(self) -> Tensor:  # type: ignore[override]
        if self._row is None:
            scale = self.scale[..., 0] if isinstance(self.scale, Tensor) else self.scale
            self._row = scale * half_norm(self.q)
        return self._row


class Steered(Apart):
    """Apart where every query steers its own scale, by features x and a row w of its head.

    scale_i = exp(-2 (log s + reach tanh(<x_i, w> / reach))), formed when somebody asks for it.
    """

    x: Tensor  # [B, H, Q, E]
    w: Tensor  # [1 or H, E], in the accumulator's dtype
    base: LogScale
    reach: float

    def __init__(
        self, *, q: Tensor, k: Tensor, x: Tensor, w: Tensor, base: LogScale, reach: float
    ) -> None:
        super().__init__(q=q, k=k)
        self.x, self.w, self.base, self.reach = x, w, base, reach

    @property
    def per_query(self) -> bool:
        return True

    def _learns_scale(self) -> bool:
        return needs_gradient(self.x, self.w, self.base.log)

    def log_scale(self) -> Tensor:
        """log s_i, [B, H, Q, 1]."""
        steer = self.x.to(self.w.dtype) @ self.w[..., None]
        return self.base.bent()[:, None, None] + self.reach * torch.tanh(steer / self.reach)

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        if self._scale is None:
            self._scale = torch.exp(-2.0 * self.log_scale())
        return self._scale


# What is shorter has no direction, and does not come to length 1.
LEAST_LENGTH = 1e-12


class Unit(Factor):
    """scale <q_i, k_j> / |q_i||k_j|: features of length 1, formed when somebody asks for them."""

    queries: Tensor
    keys: Tensor
    _q: Tensor | None
    _k: Tensor | None

    def __init__(self, *, q: Tensor, k: Tensor, scale: float) -> None:
        self.queries, self.keys, self.scale = q, k, scale
        self.row = self.col = self.link = self._q = self._k = None

    @property
    def width(self) -> int:
        return self.queries.shape[-1]

    @property
    def learned(self) -> Learned:
        q, k = needs_gradient(self.queries), needs_gradient(self.keys)
        return Learned(q, k, scale=False, row=False, col=False)

    @property
    def q(self) -> Tensor:  # type: ignore[override]
        if self._q is None:
            self._q = unit(self.queries)
        return self._q

    @property
    def k(self) -> Tensor:  # type: ignore[override]
        if self._k is None:
            self._k = unit(self.keys)
        return self._k


def unit(x: Tensor) -> Tensor:
    """x / |x| in the accumulator's dtype; zeros stay zeros."""
    return F.normalize(x.to(accumulator(x.dtype)), dim=-1, eps=LEAST_LENGTH)


class Sloped(Factor):
    """-m (i - j) = m j - m i where j <= i; counted from the last key, so numbers stay small.

    What depends on the query is formed when somebody asks for it.
    """

    slope: Tensor  # [H]
    _row: Tensor | None

    def __init__(self, slope: Tensor, num_queries: int, num_keys: int) -> None:
        self.q = slope.new_empty(1, slope.shape[0], num_queries, 0)
        self.k = slope.new_empty(1, 1, num_keys, 0)
        self.slope, self.scale, self.link = slope, slope.view(-1, 1, 1), None
        self.col = late(num_keys, slope.device, slope.dtype)
        self._row = None

    @property
    def has_row(self) -> bool:
        return True

    @property
    def learned(self) -> Learned:
        slope = needs_gradient(self.slope)
        return Learned(q=False, k=False, scale=slope, row=slope, col=False)

    @property
    def row(self) -> Tensor:  # type: ignore[override]
        if self._row is None:
            places = late(self.q.shape[2], self.q.device, self.q.dtype)
            self._row = -(self.slope.view(1, -1, 1) * places)
        return self._row


def late(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Places, counted from the last, [1, 1, T]."""

    def make() -> Tensor:
        return torch.arange(1 - length, 1, device=device, dtype=dtype)[None, None]

    return constant(("late", length, dtype), device, make)


def half_norm(x: Tensor) -> Tensor:
    """-|x|^2 / 2 in the accumulator's dtype, [B, H, T]."""
    # The norm reads half precision and sums in float32, without a copy of x in float32.
    return -0.5 * torch.linalg.vector_norm(x, dim=-1, dtype=accumulator(x.dtype)).square()


@dataclass(kw_only=True, eq=False)
class Relative:
    """bias(i, j) = table[..., i, clip(i - j, -c, c) + c]."""

    table: Tensor  # [B or 1, H, Q or 1, 2c + 1]
    formed: Formed | None = None  # how the table was, if that is known

    @property
    def clip(self) -> int:
        return (self.table.shape[-1] - 1) // 2

    @property
    def per_query(self) -> bool:
        """Whether every query has a table of its own."""
        return self.table.shape[2] > 1

    @property
    def learned(self) -> bool:
        """Whether it needs a gradient. To ask forms no table."""
        return needs_gradient(self.table)

    def widen(self, clip: int) -> Tensor:
        """The same bias as a table of at least that many distances."""
        grow = clip - self.clip
        if grow <= 0:
            return self.table
        left, right = self.table[..., :1], self.table[..., -1:]
        ends = (*left.shape[:-1], grow)
        return torch.cat([left.expand(ends), self.table, right.expand(ends)], -1)


class Scored(Relative):
    """bias(i, j) = <q_i, rows[clip(i - j, -c, c) + c]>: a table that is formed when asked for.

    Rows come as they are, or from a function of the first distance i - j: who sees no later keys
    needs those from 0 on.
    """

    q: Tensor  # [B, H, Q, D]

    def __init__(
        self, *, q: Tensor, rows: Tensor | None = None, clip: int = 0,
        form: Callable[[int], Tensor] | None = None, source: Tensor | None = None,
        rows_formed: Formed | None = None,
    ) -> None:  # fmt: skip
        self.q, self._rows, self._form, self.rows_formed = q, rows, form, rows_formed
        self._table: Tensor | None = None
        self._clip = clip if rows is None else (rows.shape[-2] - 1) // 2
        # What the rows are learned by.
        self.source = rows if source is None else source

    @property
    def rows(self) -> Tensor:
        """[1 or H, 2c + 1, D]."""
        if self._rows is None:
            assert self._form is not None
            self._rows = self._form(-self._clip)
        return self._rows

    def past(self) -> Tensor:
        """[1 or H, c + 1, D], of distances from 0 on, where only these are formed; or all rows."""
        return self.rows if self._form is None else self._form(0)

    @property
    def table(self) -> Tensor:  # type: ignore[override]
        if self._table is None:
            wide = accumulator(self.rows.dtype)
            self._table = self.q.to(wide) @ self.rows.to(wide).mT
        return self._table

    @property
    def clip(self) -> int:
        return self._clip

    @property
    def per_query(self) -> bool:
        return self.q.shape[2] > 1

    @property
    def learned(self) -> bool:
        return needs_gradient(self.q, self.source)


@dataclass(frozen=True, kw_only=True)
class Slope:
    """bias(i, j) = -slope |i - j|."""

    slope: Tensor  # [H]


@dataclass(frozen=True, kw_only=True)
class Lifted:
    """link(<q_i, k_j> + row_i): a factor, or all identity factors, as one dot product."""

    q: Tensor  # [B, H, Q, E]
    k: Tensor  # [B, H, K, E]
    row: Tensor | None  # [B, H, Q]
    link: Link | None


@dataclass(frozen=True, kw_only=True)
class Term:
    """One product of factors, with its biases."""

    factors: tuple[Factor, ...] = ()
    biases: tuple[Relative | Slope, ...] = ()

    def __mul__(self, other: Term) -> Term:
        return Term(factors=self.factors + other.factors, biases=self.biases + other.biases)

    @property
    def links(self) -> tuple[Link, ...]:
        return tuple(f.link for f in self.factors if f.link is not None)

    @property
    def signed(self) -> bool:
        return any(link.signed for link in self.links)

    @property
    def learned(self) -> bool:
        """Whether any part of a resolved term needs a gradient. To ask forms no tensor."""
        bias = self.relative
        return any(any(f.learned) for f in self.factors) or (bias is not None and bias.learned)

    @property
    def relative(self) -> Relative | None:
        """The one bias of a resolved term."""
        if not self.biases:
            return None
        (bias,) = self.biases
        assert isinstance(bias, Relative)
        return bias

    @property
    def table(self) -> Tensor | None:
        """The relative table of a resolved term."""
        return None if self.relative is None else self.relative.table

    def resolve(self, num_queries: int, num_keys: int, *, causal: bool) -> Term:
        """The same weights with at most one bias: slopes become columns or join one table."""
        factors = list(self.factors)
        tables: list[Relative] = []
        for bias in self.biases:
            if isinstance(bias, Relative):
                tables.append(bias)
            elif causal:
                factors.append(Sloped(bias.slope, num_queries, num_keys))
            else:
                clip = max(num_queries, num_keys, 1) - 1
                far = torch.arange(-clip, clip + 1, device=bias.slope.device).abs()
                tables.append(Relative(table=-(bias.slope[:, None] * far)[None, :, None]))
        if len(tables) > 1:
            widest = max(bias.clip for bias in tables)
            first, *others = (bias.widen(widest) for bias in tables)
            tables = [Relative(table=sum(others, first))]
        return Term(factors=tuple(factors), biases=tuple(tables))

    def lift(self, dtype: torch.dtype) -> tuple[Lifted, ...]:
        """All identity factors side by side as one dot product, then each factor with a link."""
        plain = [f for f in self.factors if f.link is None]
        linked = [f for f in self.factors if f.link is not None]
        groups = ([plain] if plain else []) + [[f] for f in linked]
        return tuple(_side_by_side(group, dtype) for group in groups)


def _side_by_side(factors: list[Factor], dtype: torch.dtype) -> Lifted:
    """q' = [scale q, scale], k' = [k, col]; rows add up."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    rows: list[Tensor] = []
    for f in factors:
        q = f.q.to(dtype)
        if isinstance(f.scale, Tensor) or f.scale != 1.0:
            q = q * f.scale
        queries.append(q)
        keys.append(f.k.to(dtype))
        if f.col is not None:
            queries.append(as_column(f.scale, f.q, dtype))
            keys.append(f.col.to(dtype)[..., None])
        if f.row is not None:
            rows.append(f.row.to(dtype))
    row = sum(rows[1:], rows[0]) if rows else None
    return Lifted(q=join(queries), k=join(keys), row=row, link=factors[0].link)


def as_column(scale: Tensor | float, q: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale as one more query feature, [B, H, Q, 1]."""
    if isinstance(scale, Tensor):
        heads = max(scale.shape[-3], q.shape[1])
        batch = scale.shape[0] if scale.dim() == 4 else 1
        return scale.to(dtype).expand(batch, heads, q.shape[2], 1)
    return q.new_full((1, q.shape[1], q.shape[2], 1), scale, dtype=dtype)


def join(parts: list[Tensor]) -> Tensor:
    """Feature parts side by side; batches of 1 and smaller head counts are repeated."""
    parts = [p for p in parts if p.shape[-1] > 0] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    sizes = [p.shape[0] for p in parts]
    batch = 0 if 0 in sizes else max(sizes)
    heads = math.lcm(*(p.shape[1] for p in parts))
    return torch.cat([repeat(p, batch, heads) for p in parts], -1)


def repeat(x: Tensor, batch: int, heads: int) -> Tensor:
    """[B or 1, h, …] -> [B, H, …], every head repeated H / h times in place (grouped queries)."""
    if x.shape[1] != heads:
        group = heads // x.shape[1]
        x = x[:, :, None].expand(*x.shape[:2], group, *x.shape[2:]).flatten(1, 2)
    return x.expand(batch, *x.shape[1:]) if x.shape[0] != batch else x


def at_least(x: Tensor, width: int) -> Tensor:
    """With zeros for features up to a width; torch would copy x where there are none to add."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are kept: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def mix(parts: list[Smoothed]) -> Smoothed:
    """The smoother of the union: outputs weighted by their masses."""
    if len(parts) == 1:
        return parts[0]
    logs = torch.stack([_require(p.log_mass) for p in parts])  # [terms, B, H, Q]
    peak = logs.amax(0).detach()
    peak = torch.where(peak.isneginf(), torch.zeros_like(peak), peak)
    mass = (logs - peak).exp()
    signed = any(p.sign is not None for p in parts)
    if signed:
        ones = torch.ones_like(mass[0])
        mass = mass * torch.stack([ones if p.sign is None else p.sign for p in parts])
    total = mass.sum(0)
    seen = total != 0
    share = torch.where(seen, mass / torch.where(seen, total, torch.ones_like(total)), 0.0)
    out = sum(
        (share[n, ..., None] * p.out for n, p in enumerate(parts)), torch.zeros_like(parts[0].out)
    )
    safe = torch.where(seen, total.abs(), torch.ones_like(total))
    log_mass = torch.where(seen, safe.log() + peak, -math.inf)
    return Smoothed(out.to(parts[0].out.dtype), log_mass, total.sign() if signed else None)


def _require(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
