"""The base class of kernels, and their algebra: sums and products of kernels are kernels."""

from __future__ import annotations

from functools import reduce
from operator import mul
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from ..term.features import Features, Input
from ..term.layout import accumulator
from ..term.term import Term
from .arguments import as_text, is_finite, is_number
from .entry import Entry
from .positive import Positive, check_heads, hold, log_of

MAX_TERMS = 64


class Kernel(nn.Module):
    """w(q, k) >= 0. `log_weight` defines it; `terms` is its lowering, () where it has none."""

    entry: ClassVar[Entry | None] = None
    symmetric: bool = True
    positive: bool = True
    valid: bool = True
    relative: bool = False  # whether it reads i - j
    placed: bool = False  # whether it reads i - j of `Features.places`, where they are said
    # Whether every w^p with p > 0 is of the same form, and valid where w is: all links of its
    # terms are the identity.
    exponential: bool = False
    on: str = "content"
    # The arguments that it was made with, as text; None if one of them has no text.
    arguments: str | None

    def __new__(cls, *args: Any, **named: Any) -> Self:
        kernel = super().__new__(cls)
        # nn.Module takes attributes after its own __init__ only.
        object.__setattr__(kernel, "arguments", as_text(args, named))
        return kernel

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

    def __mul__(self, other: Kernel | float) -> Kernel:
        if is_number(other):
            return Scaled(self, other, trainable=False)
        return Product(self, other) if isinstance(other, Kernel) else NotImplemented

    def __rmul__(self, other: float) -> Kernel:
        return self * other if is_number(other) else NotImplemented

    def __add__(self, other: Kernel | float) -> Kernel:
        if is_number(other):
            if other == 0:
                # The start of Python's sum().
                return self
            raise ValueError(
                f"{other!r} is not a kernel, so it cannot be added to one: for a weight that is "
                f"the same for all keys, write {other!r} * Exponential(0)"
            )
        return Sum(self, other) if isinstance(other, Kernel) else NotImplemented

    __radd__ = __add__

    def __pow__(self, exponent: float) -> Kernel:
        return Power(self, exponent) if is_number(exponent) else NotImplemented


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
    def placed(self) -> bool:  # type: ignore[override]
        return all(kernel.placed or not kernel.relative for kernel in self)

    @property
    def query_parts(self) -> frozenset[str]:
        return frozenset().union(*(kernel.query_parts for kernel in self))

    @property
    def key_parts(self) -> frozenset[str]:
        return frozenset().union(*(kernel.key_parts for kernel in self))

    def log_weight(self, q: Input, k: Input) -> Tensor:
        return _whole(*self.factored(q, k))


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
        return " * ".join(map(_inside_product, self))

    @property
    def exponential(self) -> bool:  # type: ignore[override]
        return all(kernel.exponential for kernel in self)


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


class Changed(Kernel):
    """A function of one kernel's weights."""

    def __new__(cls, *args: Any, **named: Any) -> Self:
        changed = super().__new__(cls)
        # The kernel itself has a text of its own.
        rest = {name: x for name, x in named.items() if name != "kernel"}
        own = args if "kernel" in named else args[1:]
        object.__setattr__(changed, "arguments", as_text(own, rest))
        return changed

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        if not isinstance(kernel, Kernel):
            raise ValueError(f"{type(self).__name__} needs a kernel such as RBF(), got {kernel!r}")
        self.kernel = kernel

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return self.kernel.symmetric

    @property
    def positive(self) -> bool:  # type: ignore[override]
        return self.kernel.positive

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return self.kernel.valid

    @property
    def relative(self) -> bool:  # type: ignore[override]
        return self.kernel.relative

    @property
    def placed(self) -> bool:  # type: ignore[override]
        return self.kernel.placed

    @property
    def exponential(self) -> bool:  # type: ignore[override]
        return self.kernel.exponential

    @property
    def query_parts(self) -> frozenset[str]:
        return self.kernel.query_parts

    @property
    def key_parts(self) -> frozenset[str]:
        return self.kernel.key_parts


class Scaled(Changed):
    """c w(q, k), c = exp(log_scale) > 0, one number or one per head.

    Alone, c cancels and only log_mass has it; in a sum it is the share of the kernel.
    """

    log_scale: Tensor

    def __init__(
        self,
        kernel: Kernel,
        weight: Positive = 1.0,
        *,
        heads: int | None = None,
        trainable: bool = True,
    ) -> None:
        super().__init__(kernel)
        hold(self, "log_scale", log_of("weight", weight, heads), trainable)

    def log_weight(self, q: Input, k: Input) -> Tensor:
        return _whole(*self.factored(q, k))

    def factored(self, q: Input, k: Input) -> tuple[Tensor, Tensor | None]:
        log, factor = self.kernel.factored(q, k)
        return log + self._log(q, k)[:, None, None], factor

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        log = self._log(q, k)
        return tuple(term.times(log) for term in self.kernel.terms(q, k))

    def _log(self, q: Input, k: Input) -> Tensor:
        """log c in the accumulator's dtype, [1 or H]."""
        q = Features.of(q)
        check_heads("weights", self.log_scale, q.heads)
        return self.log_scale.to(accumulator(q.tensors()[0].dtype)).reshape(-1)

    @property
    def formula(self) -> str:
        c = "c_h" if self.log_scale.numel() > 1 else f"{self.log_scale.detach().exp().item():.4g}"
        return f"{c} * {_inside_product(self.kernel)}"


class Power(Changed):
    """w(q, k)^exponent of an exponential kernel, exponent > 0: its exponents, multiplied."""

    def __init__(self, kernel: Kernel, exponent: float) -> None:
        super().__init__(kernel)
        if not (is_number(exponent) and is_finite(exponent) and exponent > 0):
            raise ValueError(f"exponent must be a positive finite number, got {exponent!r}")
        if not kernel.exponential:
            raise ValueError(
                f"{kernel!r} is no plain exponential, so it has no exact power {exponent:g}: "
                "powers are for Exponential, Cosine, RBF, AdaptiveRBF, ARD, Periodic, kernels of "
                "i - j, and products of these; for a whole power, multiply the kernel with itself"
            )
        self.exponent = float(exponent)

    def log_weight(self, q: Input, k: Input) -> Tensor:
        return self.exponent * self.kernel.log_weight(q, k)

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        return tuple(term**self.exponent for term in self.kernel.terms(q, k))

    @property
    def formula(self) -> str:
        return f"({self.kernel!r})^{self.exponent:g}"


def _whole(log: Tensor, factor: Tensor | None) -> Tensor:
    """log |exp(log) factor|."""
    return log if factor is None else log + factor.abs().log()


def _inside_product(kernel: Kernel) -> str:
    return f"({kernel})" if isinstance(kernel, Sum) else repr(kernel)


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
