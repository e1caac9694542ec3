"""Kernels of the difference q - k whose dimensions differ: bandwidths, periods and frequencies.

All lower exactly. With features divided by their bandwidths, ARD is RBF. With cosines and sines as
features, a wave of q - k is a dot product: cos(a - b) = cos a cos b + sin a sin b.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..term.factors import DistanceFactor, Factor
from ..term.features import Input
from ..term.layout import accumulator, repeat
from ..term.links import Power as Square
from ..term.term import Term
from .base import MAX_TERMS, Kernel, Scaled, Sum
from .distance import Bandwidth, Distance, default_bandwidth, squared_distance
from .entry import Entry, normal
from .positive import MOST, Positive, check_heads, check_size, hold, log_of


class ARD(Distance):
    """exp(-sum_d (q_d - k_d)^2 / 2 s_d^2): a bandwidth per dimension, or per head and dimension.

    With a bandwidth given, s = exp(log_bandwidth). Without one, s = exp(log_bandwidth) times the
    default of RBF, so that it starts as RBF.
    """

    entry = Entry(
        kind="keyed",
        bench=("ard", lambda h, d: ARD(d, d**0.5, heads=h)),
        examples={
            "ard": lambda h, d: ARD._spread(ARD(d)),
            "ard-per-head": lambda h, d: ARD._spread(ARD(d, 2.0, heads=h)),
        },
    )

    def __init__(
        self,
        dim: int,
        bandwidth: Positive | None = None,
        *,
        heads: int | None = None,
        trainable: bool = True,
        on: str = "content",
    ) -> None:
        check_size("dim", dim, MOST)
        super().__init__(None, trainable=trainable, on=on)
        self.relative_to_default = bandwidth is None
        given = 1.0 if bandwidth is None else bandwidth
        hold(self, "log_bandwidth", log_of("bandwidth", given, heads, dim), trainable)

    @staticmethod
    def _spread(kernel: ARD) -> ARD:
        """For tests: bandwidths that differ."""
        kernel.log_bandwidth.data += 0.5 * normal(*kernel.log_bandwidth.shape).data
        return kernel

    def precision(self, x: Tensor) -> Tensor:
        """1 / s_d^2, [H or 1, 1, D]."""
        return self._inverse(x).square()

    def log_weight(self, q: Input, k: Input) -> Tensor:
        return -0.5 * squared_distance(*self._divided(q, k)).to(self._wide(q))

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self._divided(q, k)
        return (Term(factors=(DistanceFactor(q=q, k=k),)),)

    def _wide(self, q: Input) -> torch.dtype:
        return accumulator(self.select(q, q)[0].dtype)

    def _divided(self, q: Input, k: Input) -> tuple[Tensor, Tensor]:
        """q / s and k / s."""
        q, k = self.select(q, k)
        inverse = self._inverse(q)
        return times(q, inverse), times(k, inverse)

    def _inverse(self, x: Tensor) -> Tensor:
        """1 / s_d, [H or 1, 1, D]."""
        dim = self.log_bandwidth.shape[-1]
        if x.shape[-1] != dim:
            raise ValueError(f"ARD was made for {dim} features, but the queries have {x.shape[-1]}")
        log = self.log_bandwidth.to(accumulator(x.dtype)).reshape(-1, dim)
        check_heads("bandwidths", log, x.shape[1])
        default = self.default(dim) if self.relative_to_default else 1.0
        return (-log).exp()[:, None] / default

    @property
    def formula(self) -> str:
        s = "s_hd" if self.log_bandwidth.dim() > 1 else "s_d"
        q, k = parts(self.on)
        return f"exp(-sum_d ({q}_d - {k}_d)^2 / 2 {s}^2)"


class Periodic(Distance):
    """exp(-2 sum_d sin^2(pi (q_d - k_d) / p) / s^2); p and s are one number or one per head.

    2 sin^2(a / 2) = 1 - cos a, so it is exp((sum_d cos(2 pi (q_d - k_d) / p) - D) / s^2).
    """

    entry = Entry(
        kind="keyed",
        bench=("periodic", lambda h, d: Periodic(8.0, d**0.5, heads=h)),
        examples={
            "periodic": lambda h, d: Periodic([2.0 + n for n in range(h)]),
        },
    )

    log_period: Tensor

    def __init__(
        self,
        period: Positive,
        bandwidth: Bandwidth = None,
        *,
        heads: int | None = None,
        trainable: bool = True,
        on: str = "content",
    ) -> None:
        super().__init__(bandwidth, heads=heads, trainable=trainable, on=on)
        hold(self, "log_period", log_of("period", period, heads), trainable)

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = self.select(q, k)
        turns = self._turns(q).to(q.dtype)
        away = (q * turns)[..., :, None, :] - (k * turns)[..., None, :, :]
        return -2 * self.precision(q) * (away / 2).sin().square().sum(-1)

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        turns, scale = self._turns(q), self.precision(q)
        row = (-q.shape[-1] * scale[..., 0]).expand(1, -1, q.shape[2])
        factor = Factor(q=waves(q, turns), k=waves(k, turns), scale=scale, row=row)
        return (Term(factors=(factor,)),)

    def _turns(self, x: Tensor) -> Tensor:
        """2 pi / p, [H or 1, 1, 1]."""
        log = self.log_period.to(accumulator(x.dtype)).reshape(-1)
        check_heads("periods", log, x.shape[1])
        return (2 * math.pi * (-log).exp())[:, None, None]

    def written_with(self, r: str, s: str) -> str:
        q, k = parts(self.on)
        log = self.log_period.detach()
        p = "p_h" if log.numel() > 1 else f"{log.exp().item():.4g}"
        return f"exp(-2 sum_d sin^2(pi ({q}_d - {k}_d) / {p}) / {s}^2)"


class Wave(Kernel):
    """cos^2(pi <m, q - k>) = (1 + cos(2 pi <m, q - k>)) / 2; m is one frequency, or one per head.

    It is <a, b>^2 of two features each, (cos, sin) of pi <m, q> and of pi <m, k>.
    """

    def __init__(self, dim: int, *, heads: int | None = None, on: str = "content") -> None:
        super().__init__()
        # The spectrum of RBF is normal, with standard deviation 1 / 2 pi s. Frequencies are drawn
        # from that of the default s.
        spread = 1 / (2 * math.pi * default_bandwidth(dim))
        self.frequency = nn.Parameter(torch.randn(heads or 1, dim) * spread)
        self.on = on

    def log_weight(self, q: Input, k: Input) -> Tensor:
        log, factor = self.factored(q, k)
        assert factor is not None
        return log + factor.abs().log()

    def factored(self, q: Input, k: Input) -> tuple[Tensor, Tensor | None]:
        q, k = self.select(q, k)
        turns = self._turns(q).to(q.dtype)
        wave = ((q * turns).sum(-1)[..., :, None] - (k * turns).sum(-1)[..., None, :]).cos()
        return torch.zeros_like(wave), wave.square()

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        turns = self._turns(q)
        q, k = waves(q, turns, summed=True), waves(k, turns, summed=True)
        return (Term(factors=(Factor(q=q, k=k, link=Square(2)),)),)

    def _turns(self, x: Tensor) -> Tensor:
        """pi m, [H or 1, 1, D]."""
        m = self.frequency.to(accumulator(x.dtype))
        if x.shape[-1] != m.shape[-1]:
            raise ValueError(
                f"the kernel has frequencies for {m.shape[-1]} features, "
                f"but the queries have {x.shape[-1]}"
            )
        check_heads("frequencies", m, x.shape[1])
        return math.pi * m[:, None]

    @property
    def formula(self) -> str:
        q, k = parts(self.on)
        return f"cos^2(pi <{'m_h' if self.frequency.shape[0] > 1 else 'm'}, {q} - {k}>)"


class SpectralMixture(Sum):
    """sum_c w_c exp(-sum_d (q_d - k_d)^2 / 2 s_cd^2) cos^2(pi <m_c, q - k>).

    Component c is Scaled(ARD(dim) * Wave(dim)). Wilson and Adams have cos(2 pi <m_c, q - k>), which
    can be negative. cos^2(pi x) = (1 + cos(2 pi x)) / 2 never is.
    """

    entry = Entry(
        kind="mixed",
        bench=("spectral", lambda h, d: SpectralMixture(2, d, heads=h)),
        examples={
            "spectral": lambda h, d: SpectralMixture._with_frequencies(2, d, heads=h),
        },
    )

    def __init__(
        self, components: int, dim: int, *, heads: int | None = None, on: str = "content"
    ) -> None:
        check_size("components", components, MAX_TERMS)
        each = (
            Scaled(
                ARD(dim, heads=heads, on=on) * Wave(dim, heads=heads, on=on),
                1 / components,
                heads=heads,
            )
            for _ in range(components)
        )
        super().__init__(*each)
        self.on = on

    @classmethod
    def _with_frequencies(
        cls, components: int, dim: int, heads: int | None = None
    ) -> SpectralMixture:
        """For tests: the same frequencies at every call, and weights that differ."""
        kernel = cls(components, dim, heads=heads)
        for n, component in enumerate(kernel):
            wave = component.kernel.kernels[1]
            wave.frequency.data = (0.1 + 0.05 * n) * normal(*wave.frequency.shape).data
            component.log_scale.data += 0.5 * n
        return kernel

    @property
    def formula(self) -> str:
        q, k = parts(self.on)
        return (
            f"sum_c w_c exp(-sum_d ({q}_d - {k}_d)^2 / 2 s_cd^2) cos^2(pi <m_c, {q} - {k}>), "
            f"c = 1 to {len(self.kernels)}"
        )


def parts(on: str) -> tuple[str, str]:
    """q and k as text, for a part."""
    return ("q", "k") if on == "content" else (f"q.{on}", f"k.{on}")


def times(x: Tensor, numbers: Tensor) -> Tensor:
    """x times numbers [H or 1, 1, D or 1], rounded once to the dtype of x; grouped heads repeat."""
    x = repeat(x, x.shape[0], max(numbers.shape[0], x.shape[1]))
    return (x.to(numbers.dtype) * numbers).to(x.dtype)


def waves(x: Tensor, turns: Tensor, *, summed: bool = False) -> Tensor:
    """The cosines and sines of x times `turns`, or of its sum over dimensions."""
    x = repeat(x, x.shape[0], max(turns.shape[0], x.shape[1]))
    angle = x.to(turns.dtype) * turns
    if summed:
        angle = angle.sum(-1, keepdim=True)
    return torch.cat([angle.cos(), angle.sin()], -1).to(x.dtype)
