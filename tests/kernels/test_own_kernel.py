"""A kernel in 15 lines gets every backend, gradients, explain and all checks."""

import math
from dataclasses import dataclass

import pytest
import torch
from catalogue import HEADS

import mercer as mc
from mercer.term.links import Radial, Rational
from mercer.testing import Shape, check_filter, check_kernel, check_lowering


@dataclass(frozen=True)
class Cosh(Radial):
    """1 / cosh(r), where s = -r^2 / 2."""

    formula = "1 / cosh(r)"

    def log(self, s):
        r = self.radius(s)
        return math.log(2) - r - torch.log1p(torch.exp(-2 * r))

    def slope(self, s):
        r = self.radius(s)
        return torch.where(r > 0, torch.tanh(r) / r, 1.0)


class Sech(mc.Distance):
    """1 / cosh(|q - k| / s)."""

    link = Cosh()


def test_a_new_distance_kernel_passes_all_checks():
    check_kernel(Sech(2.0), heads=HEADS)
    check_kernel(Sech(heads=HEADS) * mc.Exponential(on="position") + mc.Polynomial(), heads=HEADS)


def test_a_new_kernel_is_explained():
    q = torch.randn(1, 2, 8, 4)
    said = mc.explain(Sech(), q, q, q)
    assert said.backend == "chunked"
    assert "1 / cosh(r)" in said.terms[0]
    assert "not the identity" in said.refusals["sdpa"]


class Tempered(mc.Kernel):
    """exp(<q, k>^3 / D), without a lowering: the reference runs it."""

    valid = False

    def log_weight(self, q, k):
        q, k = self.select(q, k)
        return (q @ k.mT) ** 3 / q.shape[-1]


def test_a_kernel_without_terms_runs_on_the_reference_and_says_so():
    check_kernel(Tempered(), dim=3)
    q = torch.randn(1, 2, 8, 4)
    said = mc.explain(Tempered(), q, q, q)
    assert said.backend == "reference"
    assert "no lowering" in said.refusals["chunked"]
    with pytest.raises(ValueError, match="no lowering"):
        mc.smooth(Tempered(), q, q, q, backend="chunked")
    both = mc.explain(Tempered() + mc.RBF(), q, q, q)
    assert both.backend == "reference"


class WrongTerms(mc.RBF):
    """Its lowering forgets the norm of the keys."""

    def terms(self, q, k):
        (term,) = super().terms(q, k)
        (factor,) = term.factors
        factor = mc.Factor(q=factor.q, k=factor.k, scale=factor.scale, row=factor.row)
        return (mc.Term(factors=(factor,)),)


class WrongSymmetry(mc.AdaptiveRBF):
    symmetric = True


class WrongValidity(mc.Exponential):
    """With a negative scale it is not positive semi-definite."""

    valid = True


class WrongSlope(mc.Distance):
    """Its gradient is off by a factor."""

    @dataclass(frozen=True)
    class Off(Rational):
        def slope(self, s):
            return 1.01 * super().slope(s)

    link = Off()


def test_the_checks_find_what_is_wrong():
    with pytest.raises(AssertionError, match=r"(chunked|sdpa): out"):
        check_lowering(WrongTerms(), mc.Full(), Shape())
    kernel = WrongSymmetry(8)
    kernel.weight.data.normal_()
    with pytest.raises(AssertionError, match="says symmetric"):
        check_kernel(kernel)
    with pytest.raises(AssertionError, match="says valid"):
        check_kernel(WrongValidity(-1.0))
    with pytest.raises(AssertionError, match=r"gradient of q\.content"):
        check_kernel(WrongSlope())


@dataclass(frozen=True)
class WrongBlocks(mc.Filter):
    """Its blocks hide what its rule shows."""

    def sees(self, b, i, j, start):
        return j <= i + 1

    def covers(self, i, j, start):
        return False if j.first > i.last else None


def test_the_checks_find_a_wrong_filter():
    with pytest.raises(AssertionError, match="covers"):
        check_filter(WrongBlocks())
