"""Kernels of the distance |q - k|: a family in which a kernel is one link.

With r^2 = |q - k|^2 / s^2, every one is link(-r^2 / 2), and

    -r^2 / 2 = (<q, k> - |k|^2 / 2) / s^2 - |q|^2 / 2 s^2

so the number per key does not depend on the bandwidth, and the last part, which depends on the
query alone, cancels in the normaliser wherever the link is the identity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..term.factors import DistanceFactor, LogScale, QueryBandwidthFactor
from ..term.features import Input
from ..term.layout import accumulator
from ..term.links import Link, Matern12, Matern32, Matern52, Rational
from ..term.term import Term
from .arguments import is_finite
from .base import Kernel
from .entry import Entry, normal
from .positive import MOST, check_size

Bandwidth = float | Sequence[float] | Tensor | None


class Distance(Kernel):
    """link(-|q - k|^2 / 2 s^2); s is one number or one per head, s^2 = sqrt(D)/2 by default.

    With a bandwidth given, s = exp(log_bandwidth). Without one, s = exp(log_bandwidth) times the
    default. The default depends on D, so it is computed from the features of each call.
    """

    link: Link | None = None

    def __init__(
        self,
        bandwidth: Bandwidth = None,
        *,
        heads: int | None = None,
        trainable: bool = True,
        on: str = "content",
    ) -> None:
        super().__init__()
        self.on = on
        self.relative_to_default = bandwidth is None
        log = read_bandwidth(bandwidth, heads)
        if trainable:
            self.log_bandwidth = nn.Parameter(log)
        else:
            self.register_buffer("log_bandwidth", log)

    @property
    def exponential(self) -> bool:  # type: ignore[override]
        return self.link is None

    def bandwidth(self, dim: int) -> Tensor:
        """s for features of this width, one number or one per head."""
        return self.log_bandwidth.exp() * (self.default(dim) if self.relative_to_default else 1.0)

    def default(self, dim: int) -> float:
        """s for features of this width, where no bandwidth was given."""
        return default_bandwidth(dim)

    def precision(self, x: Tensor) -> Tensor:
        """1 / s^2, [H or 1, 1, 1]."""
        return self._log_scale(x).formed()

    def _log_scale(self, x: Tensor) -> LogScale:
        """The bandwidth for these features."""
        log = self.log_bandwidth.to(accumulator(x.dtype))
        if log.dim() and log.numel() != 1 and log.numel() != x.shape[1]:
            raise ValueError(
                f"the kernel has bandwidths for {log.numel()} heads, "
                f"but the queries have {x.shape[1]}"
            )
        offset = math.log(self.default(x.shape[-1])) if self.relative_to_default else 0.0
        return LogScale(log=log if log.dim() == 1 else log.reshape(-1), offset=offset)

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = self.select(q, k)
        s = -0.5 * self.precision(q) * squared_distance(q, k)
        return s if self.link is None else self.link.log(s)

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        factor = DistanceFactor(q=q, k=k, scale=self._log_scale(q), link=self.link)
        return (Term(factors=(factor,)),)

    @property
    def formula(self) -> str:
        return self.written_with(distance(self.on), self._bandwidth_name())

    def written_with(self, r: str, s: str) -> str:
        if self.link is not None:
            return f"{self.link.formula}, r = {r} / {s}"
        return f"exp(-{r}^2 / {times_square('2', s)})"

    def _bandwidth_name(self) -> str:
        if self.log_bandwidth.numel() > 1:
            return "s_h"
        return (
            "s" if self.relative_to_default else f"{self.log_bandwidth.detach().exp().item():.4g}"
        )


class RBF(Distance):
    """exp(-|q - k|^2 / 2 s^2)."""

    entry = Entry(
        kind="keyed",
        bench=("rbf", lambda h, d: RBF(d**0.5, heads=h)),
        examples={
            "rbf": lambda h, d: RBF(),
            "rbf-fixed": lambda h, d: RBF(1.5, trainable=False),
            "rbf-per-head": lambda h, d: RBF([1.0 + 1.5 * n for n in range(h)]),
        },
    )


class Laplace(Distance):
    """exp(-|q - k| / s)."""

    entry = Entry(
        kind="link",
        bench=("laplace", lambda h, d: Laplace(d**0.5, heads=h)),
        examples={"laplace": lambda h, d: Laplace(2.0)},
    )

    link = Matern12()

    def written_with(self, r: str, s: str) -> str:
        return f"exp(-{r} / {s})"


class RationalQuadratic(Distance):
    """(1 + |q - k|^2 / 2 alpha s^2)^-alpha."""

    entry = Entry(
        kind="link",
        bench=("rational", lambda h, d: RationalQuadratic(d**0.5, heads=h)),
        examples={"rational": lambda h, d: RationalQuadratic(alpha=0.5)},
    )

    link: Rational

    def __init__(
        self,
        bandwidth: Bandwidth = None,
        *,
        alpha: float = 1.0,
        heads: int | None = None,
        trainable: bool = True,
        on: str = "content",
    ) -> None:
        super().__init__(bandwidth, heads=heads, trainable=trainable, on=on)
        self.alpha = alpha

    @property
    def alpha(self) -> float:
        """The exponent."""
        return self.link.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        if not (is_finite(alpha) and alpha > 0):
            raise ValueError(f"alpha must be a positive finite number, got {alpha}")
        self.link = Rational(float(alpha))

    def written_with(self, r: str, s: str) -> str:
        square = times_square(f"{2 * self.alpha:g}", s)
        return f"(1 + {r}^2 / {square})^-{self.alpha:g}"


class Matern(Distance):
    """The Matern kernel of smoothness nu = 1/2, 3/2 or 5/2 at r = |q - k| / s."""

    entry = Entry(
        kind="link",
        bench=("matern", lambda h, d: Matern(1.5, d**0.5, heads=h)),
        examples={
            "matern-1/2": lambda h, d: Matern(0.5, heads=h),
            "matern-3/2": lambda h, d: Matern(1.5),
            "matern-5/2": lambda h, d: Matern(2.5, 3.0),
        },
    )

    def __init__(
        self,
        nu: float = 1.5,
        bandwidth: Bandwidth = None,
        *,
        heads: int | None = None,
        trainable: bool = True,
        on: str = "content",
    ) -> None:
        super().__init__(bandwidth, heads=heads, trainable=trainable, on=on)
        self.nu = nu

    @property
    def nu(self) -> float:
        """The smoothness."""
        return self._nu

    @nu.setter
    def nu(self, nu: float) -> None:
        links: dict[float, Link] = {0.5: Matern12(), 1.5: Matern32(), 2.5: Matern52()}
        if nu not in links:
            raise ValueError(f"nu must be 0.5, 1.5 or 2.5, got {nu}")
        self._nu, self.link = nu, links[nu]


class AdaptiveRBF(Distance):
    """exp(-|q - k|^2 / 2 s_i^2): every query computes its own bandwidth.

    log s_i = log_bandwidth + reach tanh(<q_i, w> / reach), with w zero at the start, so that it
    starts as RBF and no query leaves the base bandwidth by more than a factor exp(reach).
    """

    entry = Entry(
        kind="adaptive",
        bench=("adaptive", lambda h, d: AdaptiveRBF._with_weight(d**-0.5, d, d**0.5, heads=h)),
        examples={"adaptive": lambda h, d: AdaptiveRBF._with_weight(1.0, d, heads=h)},
    )

    symmetric = False
    valid = False

    def __init__(
        self,
        dim: int,
        bandwidth: Bandwidth = None,
        *,
        heads: int | None = None,
        trainable: bool = True,
        reach: float = 2.0,
        on: str = "content",
    ) -> None:
        super().__init__(bandwidth, heads=heads, trainable=trainable, on=on)
        if not (is_finite(reach) and reach > 0):
            raise ValueError(f"reach must be a positive finite number, got {reach}")
        check_size("dim", dim, MOST // (heads or 1))
        self.reach = reach
        self.weight = nn.Parameter(torch.zeros(heads or 1, dim))

    @classmethod
    def _with_weight(cls, size: float, dim: int, *bandwidth: float, heads: int) -> AdaptiveRBF:
        """For tests: a random w. With the initial w = 0 it is a plain RBF."""
        kernel = cls(dim, *bandwidth, heads=heads)
        kernel.weight.data = normal(heads, dim).data * size
        return kernel

    def precision(self, x: Tensor) -> Tensor:
        """1 / s_i^2, [B, H, Q, 1]."""
        return self._factor(x, x).scale

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        return (Term(factors=(self._factor(*self.select(q, k)),)),)

    def _factor(self, q: Tensor, k: Tensor) -> QueryBandwidthFactor:
        if q.shape[-1] != self.weight.shape[-1]:
            raise ValueError(
                f"AdaptiveRBF was made for {self.weight.shape[-1]} features, "
                f"but the queries have {q.shape[-1]}"
            )
        w = self.weight.to(accumulator(q.dtype))
        return QueryBandwidthFactor(q=q, k=k, x=q, w=w, base=self._log_scale(q), reach=self.reach)

    def written_with(self, r: str, s: str) -> str:
        return f"exp(-{r}^2 / 2 s(q)^2)"


def squared_distance(q: Tensor, k: Tensor) -> Tensor:
    """|q_i - k_j|^2 by differences, [B, H, Q, K]: exact, and as large as B H Q K D."""
    q, k = q[..., :, None, :], k[..., None, :, :]
    squares = (q - k).square().sum(-1)
    if q.dtype != torch.float16:
        return squares
    # float16 ends at 65504. Sums beyond it are taken in float32. The others keep their rounding,
    # which is the measure of other backends.
    return torch.where(squares.isinf(), (q.float() - k.float()).square().sum(-1), squares.float())


def times_square(number: str, s: str) -> str:
    return f"{number} {s}^2" if s.startswith("s") else f"({number} * {s}^2)"


def distance(on: str) -> str:
    return "|q - k|" if on == "content" else f"|q.{on} - k.{on}|"


def default_bandwidth(dim: int) -> float:
    if dim < 1:
        raise ValueError("the default bandwidth needs features, got a part of 0: set bandwidth")
    return math.sqrt(math.sqrt(dim) / 2)


def read_bandwidth(bandwidth: Bandwidth, heads: int | None) -> Tensor:
    """log s, checked: one number or one per head; zeros where none is given."""
    if heads is not None:
        check_size("heads", heads, MOST)
    if bandwidth is None:
        return torch.zeros(() if heads is None else (heads,))
    s = torch.as_tensor(bandwidth).detach()
    real = not s.is_complex() and s.dim() <= 1 and s.numel() > 0
    s = s.to(torch.get_default_dtype()).clone() if real else s
    if not real or not bool((s.isfinite() & (s > 0)).all()):
        raise ValueError(
            f"bandwidth must be positive and finite, one number or one per head, got {bandwidth}"
        )
    if heads is not None and s.dim() and s.numel() != heads:
        raise ValueError(f"bandwidth has {s.numel()} numbers for {heads} heads")
    return s.log().expand(heads).clone() if heads is not None and not s.dim() else s.log()
