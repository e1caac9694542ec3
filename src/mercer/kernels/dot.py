"""Kernels of the dot product <q, k>."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..term.factors import LEAST_LENGTH, CosineFactor, Factor
from ..term.features import Input
from ..term.layout import accumulator
from ..term.links import Power
from ..term.term import Term
from .arguments import is_finite
from .base import Kernel
from .entry import Entry


class Exponential(Kernel):
    """exp(scale <q, k>), scale 1/sqrt(D) by default."""

    entry = Entry(
        kind="plain",
        bench=("softmax", lambda h, d: Exponential()),
        examples={
            "exponential": lambda h, d: Exponential(),
            "exponential-scale": lambda h, d: Exponential(0.7),
        },
    )

    exponential = True

    def __init__(self, scale: float | None = None, on: str = "content") -> None:
        super().__init__()
        if scale is not None and not is_finite(scale):
            raise ValueError(f"scale must be a finite number, got {scale}")
        self.scale = scale
        self.on = on

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return self.scale is None or self.scale >= 0

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = self.select(q, k)
        return (q * self.scale_of(q)) @ k.mT

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        return (Term(factors=(Factor(q=q, k=k, scale=self.scale_of(q)),)),)

    def scale_of(self, q: Tensor) -> float:
        return default_scale(q.shape[-1]) if self.scale is None else self.scale

    @property
    def formula(self) -> str:
        product = inner(self.on)
        return (
            f"exp({product} / sqrt(D))" if self.scale is None else f"exp({self.scale:g} {product})"
        )


class Cosine(Kernel):
    """exp(scale <q, k> / |q||k|): the exponential kernel on the sphere."""

    entry = Entry(
        kind="plain",
        bench=("cosine", lambda h, d: Cosine()),
        examples={"cosine": lambda h, d: Cosine(3.0)},
    )

    exponential = True

    def __init__(self, scale: float = 10.0, on: str = "content") -> None:
        super().__init__()
        if not (is_finite(scale) and scale > 0):
            raise ValueError(f"scale must be a positive finite number, got {scale}")
        self.scale = scale
        self.on = on

    def log_weight(self, q: Input, k: Input) -> Tensor:
        q, k = self.select(q, k)
        q, k = q[..., :, None, :], k[..., None, :, :]
        return F.cosine_similarity(q, k, dim=-1, eps=LEAST_LENGTH) * self.scale

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        return (Term(factors=(CosineFactor(q=q, k=k, scale=self.scale),)),)

    @property
    def formula(self) -> str:
        return f"exp({self.scale:g} cos{angle(self.on)})"


class Polynomial(Kernel):
    """<q, k>^degree for an even degree: never negative, with zeros."""

    entry = Entry(
        kind="power",
        bench=("polynomial", lambda h, d: Polynomial(2)),
        examples={
            "polynomial": lambda h, d: Polynomial(2),
            "polynomial-4": lambda h, d: Polynomial(4),
        },
    )

    def __init__(self, degree: int = 2, on: str = "content") -> None:
        super().__init__()
        if not isinstance(degree, int) or degree < 2 or degree % 2:
            raise ValueError(
                f"degree must be an even number >= 2, got {degree}: an odd power can be negative"
            )
        self.degree = degree
        self.on = on

    def log_weight(self, q: Input, k: Input) -> Tensor:
        log, factor = self.factored(q, k)
        assert factor is not None
        return log + factor.abs().log()

    def factored(self, q: Input, k: Input) -> tuple[Tensor, Tensor | None]:
        q, k = self.select(q, k)
        q, k = q.to(accumulator(q.dtype)), k.to(accumulator(k.dtype))
        # Any positive factor per query may move into the log. This one keeps powers in range.
        size = q.detach().norm(dim=-1, keepdim=True)
        size = torch.where(size > 0, size, 1.0)
        s = (q / size) @ k.mT
        return (self.degree * size.log()).expand_as(s), s**self.degree

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        q, k = self.select(q, k)
        return (Term(factors=(Factor(q=q, k=k, link=Power(self.degree)),)),)

    @property
    def formula(self) -> str:
        return inner(self.on) + ("" if self.degree == 1 else f"^{self.degree}")


class Linear(Polynomial):
    """<q, k>. It can be negative, so the sum of weights can be zero."""

    entry = Entry(kind="power", examples={"linear": lambda h, d: Linear(signed=True)})

    positive = False

    def __init__(self, signed: bool = False, on: str = "content") -> None:
        if not signed:
            raise ValueError(
                "Linear gives negative weights, so their sum can be zero and the average infinite; "
                "pass signed=True to use it anyway, or take Polynomial(2)"
            )
        super().__init__(2, on)
        self.degree = 1


def default_scale(dim: int) -> float:
    """1 / sqrt(D)."""
    if dim < 1:
        raise ValueError(
            "the default scale 1 / sqrt(D) needs features, got a part of 0: give a scale"
        )
    return dim**-0.5


def inner(on: str) -> str:
    """<q, k> as text, for a part."""
    return "<q, k>" if on == "content" else f"<q.{on}, k.{on}>"


def angle(on: str) -> str:
    return "(q, k)" if on == "content" else f"(q.{on}, k.{on})"
