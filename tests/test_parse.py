"""Kernels, positions and filters from text, which is never evaluated."""

import pytest
import torch

import mercer as mc
from mercer import nn as mn
from mercer import parse

KERNELS = {
    "RBF(2.0)": mc.RBF(2.0),
    'RBF(2.0)*Exponential(on="position")': mc.RBF(2.0) * mc.Exponential(on="position"),
    "RBF(2.0) + Polynomial(degree=4) * Cosine(3)": mc.RBF(2.0) + mc.Polynomial(4) * mc.Cosine(3),
    "(RBF(1.0) + Exponential()) * Laplace(2)": (mc.RBF(1.0) + mc.Exponential()) * mc.Laplace(2.0),
    "Matern(2.5, 1.5)": mc.Matern(2.5, 1.5),
    "RationalQuadratic(1.5, alpha=0.5)": mc.RationalQuadratic(1.5, alpha=0.5),
    "Exponential(scale=-0.5)": mc.Exponential(-0.5),
    "Linear(signed=True)": mc.Linear(signed=True),
    "RBF([1.0, 2.0])": mc.RBF([1.0, 2.0]),
    "ALiBi([0.5, 0.25])": mc.ALiBi([0.5, 0.25]),
    "0.5 * RBF(2.0) + Exponential() * 2": 0.5 * mc.RBF(2.0) + mc.Exponential() * 2,
    "Scaled(RBF(2.0) + Cosine(1), [0.5, 2])": mc.Scaled(mc.RBF(2.0) + mc.Cosine(1), [0.5, 2.0]),
    "ARD(4, [1, 2, 3, 4], heads=2)": mc.ARD(4, [1.0, 2.0, 3.0, 4.0], heads=2),
    "RBF(2.0) ** 0.5 * Periodic(3.0)": mc.RBF(2.0) ** 0.5 * mc.Periodic(3.0),
    "Power(RBF(2.0) * Exponential(), 2)": (mc.RBF(2.0) * mc.Exponential()) ** 2,
}
EVIL = [
    "__import__('os').system('echo no')",
    "RBF(__import__('os'))",
    "RBF(bandwidth=open('/etc/passwd'))",
    "RBF.__class__()",
    "RBF(2.0).parameters()",
    "[RBF(2.0) for x in (1,)]",
    "(lambda: RBF(2.0))()",
    "RBF(*[2.0])",
    "RBF(**{'bandwidth': 2.0})",
    "RBF(2.0) if True else RBF(1.0)",
    "RBF(f'{1}')",
    "RBF(x := 2.0)",
    "exec('1')",
    "RBF(2.0); RBF(1.0)",
    "RBF(1.0)[0]",
]


@pytest.mark.parametrize("text", KERNELS)
def test_a_kernel_reads_as_its_formula(text):
    read, meant = parse.kernel(text), KERNELS[text]
    assert repr(read) == repr(meant)
    q, k = torch.rand(2, 1, 2, 3, 4, dtype=torch.float64)
    names = read.query_parts | read.key_parts | {"content"}
    q, k = (mc.Features(**dict.fromkeys(sorted(names), x)) for x in (q, k))
    torch.testing.assert_close(read.double()(q, k), meant.double()(q, k))


def test_positions_by_name_and_by_call():
    assert isinstance(parse.position("rotary"), mn.Rotary)
    assert parse.position("Rotary(500.0)").base == 500.0
    assert parse.position("DirectSum(Learned(12))").embedding.max_length == 12
    assert parse.position("Grid2D(2, 3, prefix=1, combine='sum')").prefix == 1
    nested = parse.position('ProductKernel(kernel=RBF(2.0, on="position"), symmetric=False)')
    assert isinstance(nested.kernel, mc.RBF)
    both = parse.position('ProductKernel(kernel=RBF(2.0, on="position") * Laplace(on="position"))')
    assert isinstance(both.kernel, mc.Product)


def test_filters_join():
    assert parse.filter("Causal() & (Window(4, 0) | Strided(3))") == mc.Causal() & (
        mc.Window(4, 0) | mc.Strided(3)
    )
    assert parse.filter("Window(-1, 2)") == mc.Window(-1, 2)


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.parametrize("read", [parse.kernel, parse.position, parse.filter])
def test_what_is_not_in_the_grammar_is_refused(read, text, monkeypatch):
    import os

    def forbidden(*_):
        raise AssertionError("evaluated")

    monkeypatch.setattr(os, "system", forbidden)
    monkeypatch.setattr("builtins.open", forbidden)
    with pytest.raises(ValueError, match=r"kernel|position|filter"):
        read(text)


ERRORS = {
    "Lookup()": r"Lookup is made in Python and .* text; the position LookupTable",
    "Buckets(3)": r"Buckets is made in Python and cannot be written as text$",
    "RBX(2.0)": r"there is no kernel 'RBX'; did you mean 'RBF'\?",
    "RBF(2.0) - RBF(1.0)": r"operator that is not allowed; use \+ and \*",
    "RBF(2.0) & RBF(1.0)": r"operator that is not allowed; use \+ and \*",
    "RBF": r"must be called, as in RBF\(\)",
    "2.0 + RBF(1.0)": r"2.0 is not a kernel, .* write 2.0 \* Exponential\(0\)",
    "2 * 3 * RBF(1.0)": r"'2 \* 3' in .* joins two numbers",
    "9 ** 9 ** 9 * RBF(1.0)": r"'9 \*\* 9' in .* joins two numbers",
    "2.0 ** RBF(1.0)": r"needs a kernel before \*\* and a number after it",
    "-0.5 * RBF(1.0)": r"weight must be positive and finite, .* got -0.5",
    "Polynomial(2) ** 0.5": r"<q, k>\^2 is no plain exponential, .* no exact power 0.5",
    "Exponential(on=RBF(1.0))": r"'RBF\(1.0\)' in .* is not a number",
    "Scaled(2.0)": r"Scaled needs a kernel such as RBF\(\), got 2.0",
    "ARD(8, [1, 2])": r"bandwidth must fit \[8\] numbers, got \[2\]",
    "RBF(width=2)": r"has no argument 'width'; did you mean 'bandwidth'\?",
    "RBF(head=4)": r"has no argument 'head'; did you mean 'heads'\?",
    "RBF(1, 2, True, 'content', 5)": r"has wrong arguments: RBF takes from 1 to 2",
    "ALiBi(4)": r"slopes must be a list of numbers, one per head, such as \[0.5, 0.25\], got 4",
    "RBF(2.0": r"must be a formula, but 'RBF\(2.0' is not one",
    "RBF(sigma)": r"is not a number, a string",
    "RBF(-1.0)": r"bandwidth must be positive",
    "": r"must be text such as RBF\(2.0\)",
    "Polynomial(3)": r"even number",
    "RBF(" + "1" * 3000 + ")": r"at most 2000 characters",
    "(" * 900 + "RBF()" + ")" * 900: r"must be a formula",
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_say_what_is_wrong(text):
    with pytest.raises(ValueError, match=ERRORS[text]):
        parse.kernel(text)


def test_each_grammar_knows_its_own_names():
    with pytest.raises(ValueError, match=r"there is no filter 'RBF'; there are: Full, Causal"):
        parse.filter("RBF(2.0)")
    with pytest.raises(ValueError, match="there is no position 'Causal'; there are: NoPosition"):
        parse.position("Causal()")
    with pytest.raises(ValueError, match="no operator"):
        parse.position("Rotary() + ALiBi()")
    with pytest.raises(ValueError, match="must be text"):
        parse.filter(None)
