"""The links: log |w| of a factor as a function of s, each with its slope.

Distance links take s = -r^2 / 2, where r is the distance in units of the bandwidth. They are here
and not in kernels/ because fused backends have their own code for each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..opaque.spec import Spec


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


@dataclass(frozen=True)
class Power(Link):
    """s^degree: it has zeros, and odd degrees are signed."""

    degree: int = 2

    @property
    def signed(self) -> bool:  # type: ignore[override]
        return self.degree % 2 == 1

    @property
    def formula(self) -> str:  # type: ignore[override]
        return "s" if self.degree == 1 else f"s^{self.degree}"

    def log(self, s: Tensor) -> Tensor:
        return self.degree * s.abs().log()

    def sign(self, s: Tensor) -> Tensor:
        return s.sign() if self.signed else torch.ones_like(s)

    def slope(self, s: Tensor) -> Tensor:
        return torch.where(s == 0, 0.0, self.degree / torch.where(s == 0, 1.0, s))

    def pull(self, s: Tensor, weight: Tensor, log_rest: Tensor) -> Tensor:
        # degree s^(degree - 1) exp(log_rest): finite where s = 0, unlike weight times slope
        if self.degree == 1:
            return log_rest.exp()
        size = (log_rest + (self.degree - 1) * s.abs().log()).exp()
        return self.degree * size * (1.0 if self.signed else s.sign())


@dataclass(frozen=True)
class Rational(Link):
    """(1 + r^2 / 2 alpha)^-alpha."""

    alpha: float = 1.0
    formula: ClassVar[str] = "(1 - s/alpha)^-alpha"

    def log(self, s: Tensor) -> Tensor:
        return -self.alpha * torch.log1p(s.clamp(max=0.0) / -self.alpha)

    def slope(self, s: Tensor) -> Tensor:
        return 1 / (1 - s.clamp(max=0.0) / self.alpha)


@dataclass(frozen=True)
class Radial(Link):
    """A function of the distance r itself."""

    def radius(self, s: Tensor) -> Tensor:
        # The square root has no derivative at 0, so zeros are cut out of the autograd graph.
        apart = s < 0
        return torch.where(apart, torch.sqrt(torch.where(apart, -2 * s, 1.0)), 0.0)


@dataclass(frozen=True)
class Matern12(Radial):
    """exp(-r): the Laplace kernel."""

    cusp: ClassVar[bool] = True
    formula: ClassVar[str] = "exp(-r)"

    def log(self, s: Tensor) -> Tensor:
        return -self.radius(s)

    def slope(self, s: Tensor) -> Tensor:
        r = self.radius(s)
        return torch.where(r > 0, 1 / torch.where(r > 0, r, 1.0), 0.0)


@dataclass(frozen=True)
class Matern32(Radial):
    """(1 + sqrt(3) r) exp(-sqrt(3) r)."""

    formula: ClassVar[str] = "(1 + sqrt(3) r) exp(-sqrt(3) r)"

    def log(self, s: Tensor) -> Tensor:
        a = math.sqrt(3) * self.radius(s)
        return torch.log1p(a) - a

    def slope(self, s: Tensor) -> Tensor:
        return 3 / (1 + math.sqrt(3) * self.radius(s))


@dataclass(frozen=True)
class Matern52(Radial):
    """(1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)."""

    formula: ClassVar[str] = "(1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)"

    def log(self, s: Tensor) -> Tensor:
        a = math.sqrt(5) * self.radius(s)
        return torch.log1p(a + a.square() / 3) - a

    def slope(self, s: Tensor) -> Tensor:
        a = math.sqrt(5) * self.radius(s)
        return (5 / 3) * (1 + a) / (1 + a + a.square() / 3)
