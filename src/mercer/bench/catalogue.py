"""The kernels and filters that `mercer bench` knows by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..filters import Causal, Filter, Fixed, Full, Memory, Strided, Window
from ..kernels import (
    RBF,
    AdaptiveRBF,
    ALiBi,
    Buckets,
    Cosine,
    Exponential,
    Kernel,
    Laplace,
    Lookup,
    Matern,
    Polynomial,
    RationalQuadratic,
    RelativeSinusoid,
)


@dataclass(frozen=True)
class Entry:
    """A kernel by name; `kind` says what a backend has to compute for it, as in rules.py."""

    kind: str
    build: Callable[[int, int], Kernel]  # from heads and features of a head


def _normal(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(*shape, generator=generator))


def _adaptive(heads: int, dim: int) -> Kernel:
    kernel = AdaptiveRBF(dim, dim**0.5, heads=heads)
    # Away from its start, where it is a plain RBF.
    kernel.weight.data = _normal(heads, dim).data * dim**-0.5
    return kernel


# Bandwidths are near sqrt(D), where normal features lie about sqrt(2 D) apart.
KERNELS: dict[str, Entry] = {
    "softmax": Entry("plain", lambda h, d: Exponential()),
    "cosine": Entry("plain", lambda h, d: Cosine()),
    "rbf": Entry("keyed", lambda h, d: RBF(d**0.5, heads=h)),
    "alibi": Entry("keyed", lambda h, d: Exponential() * ALiBi(ALiBi.standard(h))),
    "adaptive": Entry("adaptive", _adaptive),
    "product": Entry("several", lambda h, d: Exponential() * Exponential(on="position")),
    "relative-sinusoid": Entry("several", lambda h, d: Exponential() * RelativeSinusoid()),
    "lookup": Entry("table", lambda h, d: Exponential() * Lookup(_normal(129, d))),
    "buckets": Entry("table", lambda h, d: Exponential() * Buckets(_normal(32, h))),
    "polynomial": Entry("power", lambda h, d: Polynomial(2)),
    "rational": Entry("link", lambda h, d: RationalQuadratic(d**0.5, heads=h)),
    "laplace": Entry("link", lambda h, d: Laplace(d**0.5, heads=h)),
    "matern": Entry("link", lambda h, d: Matern(1.5, d**0.5, heads=h)),
    "sum": Entry("mixed", lambda h, d: RBF(d**0.5, heads=h) + Exponential()),
}

# The least and the most numbers that each filter takes.
FILTERS: dict[str, tuple[int, int, Callable[..., Filter]]] = {
    "full": (0, 0, Full),
    "causal": (0, 0, Causal),
    "window": (1, 2, lambda left, right=0: Window(left, right)),
    "memory": (1, 1, Memory),
    "strided": (1, 1, Strided),
    "fixed": (1, 2, Fixed),
}


def one_of_each_kind() -> list[str]:
    """The first kernel of every kind."""
    firsts: dict[str, str] = {}
    for name, entry in KERNELS.items():
        firsts.setdefault(entry.kind, name)
    return list(firsts.values())


def build_kernel(name: str, heads: int, dim: int) -> Kernel:
    return KERNELS[name].build(heads, dim)


def build_filter(text: str, shrink: float = 1.0) -> Filter:
    """A filter from its name and numbers, such as window:1024; `shrink` divides the numbers."""
    name, *numbers = text.split(":")
    least, most, build = FILTERS.get(name, (0, -1, Full))
    if not least <= len(numbers) <= most:
        raise ValueError(
            "--filter must be full, causal, window:LEFT[:RIGHT], memory:LENGTH, strided:STRIDE or "
            f"fixed:STRIDE[:SUMMARY], but came as {text!r}"
        )
    try:
        given = [int(number) for number in numbers]
    except ValueError:
        raise ValueError(f"--filter {text!r} must have whole numbers after {name}") from None
    return build(*(max(1, round(n / shrink)) if n > 0 else n for n in given))
