"""The base class of kernels, and their algebra: sums and products of kernels are kernels."""

from __future__ import annotations

import math
from functools import reduce
from operator import mul
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..term.features import Features, Input
from ..term.term import Term
from .entry import Entry

MAX_TERMS = 64


def is_finite(number: float) -> bool:
    """Whether a number is finite as a float; whole numbers may be larger than any float."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


class Kernel(nn.Module):
    """w(q, k) >= 0. `log_weight` defines it; `terms` is its lowering, () where it has none."""

    entry: ClassVar[Entry | None] = None
    symmetric: bool = True
    positive: bool = True
    valid: bool = True
    relative: bool = False  # whether it reads i - j
    on: str = "content"

    def log_weight(self, q: Input, k: Input) -> Tensor:
        """log w(q_i, k_j), [B, H, Q, K]."""
        raise NotImplementedError(f"{type(self).__name__} must define log_weight(q, k)")

    def factored(self, q: Input, k: Input) -> tuple[Tensor, Tensor | None]:
        """w = exp(first) * second. Kernels that can be zero or negative return a second factor."""
        return self.log_weight(q, k), None

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        return ()

    def forward(self, q: Input, k: Input) -> Tensor:
        """The weights themselves, [B, H, Q, K]: for two equal inputs, the Gram matrix."""
        log, factor = self.factored(q, k)
        return log.exp() if factor is None else log.exp() * factor

    @property
    def query_parts(self) -> frozenset[str]:
        """The parts of the queries that this kernel reads."""
        return frozenset({self.on})

    @property
    def key_parts(self) -> frozenset[str]:
        return self.query_parts

    def select(self, q: Input, k: Input) -> tuple[Tensor, Tensor]:
        """The parts of q and k that this kernel reads."""
        x, y = Features.of(q).part(self.on), Features.of(k).part(self.on)
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"q and k must have the same features, but part {self.on!r} "
                f"has {x.shape[-1]} in q and {y.shape[-1]} in k"
            )
        return x, y

    @property
    def formula(self) -> str:
        return f"{type(self).__name__}(q, k)"

    def __repr__(self) -> str:
        return self.formula

    def __mul__(self, other: Kernel) -> Kernel:
        return Product(self, other) if isinstance(other, Kernel) else NotImplemented

    def __add__(self, other: Kernel) -> Kernel:
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented


class Combination(Kernel):
    """Kernels joined by one operation; nested ones of the same kind are flattened."""

    def __init__(self, *kernels: Kernel) -> None:
        super().__init__()
        flat: list[Kernel] = []
        for kernel in kernels:
            same = isinstance(kernel, Combination) and type(kernel) is type(self)
            flat.extend(kernel.kernels if same else [kernel])  # type: ignore[arg-type]
        self.kernels = nn.ModuleList(flat)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.kernels)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return all(kernel.symmetric for kernel in self)

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return all(kernel.positive for kernel in self)

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return all(kernel.valid for kernel in self)

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return any(kernel.relative for kernel in self)

    @property
    def query_parts(self) -> frozenset[str]:
        return frozenset().union(*(kernel.query_parts for kernel in self))

    @property
    def key_parts(self) -> frozenset[str]:
        return frozenset().union(*(kernel.key_parts for kernel in self))

    def log_weight(self, q: Input, k: Input) -> Tensor:
        log, factor = self.factored(q, k)
        return log if factor is None else log + factor.abs().log()


class Product(Combination):
    """u(q, k) v(q, k)."""

    def factored(self, q: Input, k: Input) -> tuple[Tensor, Tensor | None]:
        logs, factors = zip(*(kernel.factored(q, k) for kernel in self), strict=True)
        given = [factor for factor in factors if factor is not None]
        return sum(logs[1:], logs[0]), reduce(mul, given) if given else None

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        product: tuple[Term, ...] = (Term(),)
        for kernel in self:
            terms = kernel.terms(q, k)
            _check_count(len(product) * len(terms))
            product = tuple(a * b for a in product for b in terms)
        return product

    @property
    def formula(self) -> str:
        return " * ".join(f"({k})" if isinstance(k, Sum) else repr(k) for k in self)


class Sum(Combination):
    """u(q, k) + v(q, k)."""

    def factored(self, q: Input, k: Input) -> tuple[Tensor, Tensor | None]:
        logs, factors = zip(*(kernel.factored(q, k) for kernel in self), strict=True)
        if all(factor is None for factor in factors):
            return reduce(torch.logaddexp, logs), None
        peak = reduce(torch.maximum, logs).detach()
        whole = sum(
            (log - peak).exp() if factor is None else (log - peak).exp() * factor
            for log, factor in zip(logs, factors, strict=True)
        )
        assert isinstance(whole, Tensor)
        return peak, whole

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        each = [kernel.terms(q, k) for kernel in self]
        if not all(each):
            return ()
        _check_count(sum(map(len, each)))
        return tuple(term for terms in each for term in terms)

    @property
    def formula(self) -> str:
        return " + ".join(map(repr, self))


def members(kernel: Kernel | None) -> tuple[Kernel, ...]:
    """The factors of a product, or the kernel itself."""
    if kernel is None:
        return ()
    return tuple(kernel) if isinstance(kernel, Product) else (kernel,)


def _check_count(count: int) -> None:
    if count > MAX_TERMS:
        raise ValueError(
            f"this kernel expands into {count} terms, more than the limit of {MAX_TERMS}: "
            "multiply out fewer sums, or use backend='reference'"
        )
