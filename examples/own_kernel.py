"""Two ways to write a kernel of your own, and one call that checks it.

They train in one command, and are explained and measured like any other:

    mercer train lm --kernel 'examples/own_kernel.py:Secant(heads=2)' --steps 100
    mercer explain --kernel 'examples/own_kernel.py:Squashed()'
    mercer bench --kernels 'rbf,examples/own_kernel.py:Secant(heads=4)' --shapes 1x4x256x64
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import mercer as mc
from mercer.term.links import Radial
from mercer.testing import check_kernel


class Squashed(mc.Kernel):
    """exp(<tanh q, tanh k>): `log_weight` defines it, `terms` lets every backend run it."""

    formula = "exp(<tanh q, tanh k>)"

    def log_weight(self, q: mc.Features | Tensor, k: mc.Features | Tensor) -> Tensor:
        q, k = self.select(q, k)
        return q.tanh() @ k.tanh().mT

    def terms(self, q: mc.Features | Tensor, k: mc.Features | Tensor) -> tuple[mc.Term, ...]:
        q, k = self.select(q, k)
        return (mc.Term(factors=(mc.Factor(q=q.tanh(), k=k.tanh()),)),)


@dataclass(frozen=True)
class Sech(Radial):
    """1 / cosh(r)."""

    formula = "1 / cosh(r)"

    def log(self, s: Tensor) -> Tensor:
        r = self.radius(s)
        return math.log(2) - r - torch.log1p((-2 * r).exp())

    def slope(self, s: Tensor) -> Tensor:
        # r = sqrt(-2 s), so dr / ds = -1 / r
        r = self.radius(s)
        return torch.where(r > 0, r.tanh() / torch.where(r > 0, r, 1.0), 1.0)


class Secant(mc.Distance):
    """1 / cosh(|q - k| / s): a kernel of the distance is one link; the bandwidth comes with it."""

    link = Sech()

    def written_with(self, r: str, s: str) -> str:
        return f"1 / cosh({r} / {s})"


if __name__ == "__main__":
    x = torch.randn(2, 2, 64, 32)
    for kernel in (Squashed(), Secant(heads=2), Squashed() * Secant(2.0)):
        print(mc.explain(kernel, x, x, x, filter=mc.Causal()), "\n")
        check_kernel(kernel, heads=2, dim=4)
        print(f"{kernel} keeps its promises\n")
