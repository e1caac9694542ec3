"""Bad input: a ValueError that says what was expected and what was given."""

import math

import pytest
import torch

import mercer as mc

X = torch.randn(2, 4, 6, 8)


def smooth(kernel=None, q=X, k=X, v=X, **options):
    return mc.smooth(mc.RBF() if kernel is None else kernel, q, k, v, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smooth("rbf"), "kernel must be a Kernel, got str"),
        (lambda: smooth(filter=None), "filter must be a Filter, got NoneType"),
        (lambda: smooth(backend="cuda"), "backend must be one of auto, .*got 'cuda'"),
        (lambda: smooth(dropout_p=1.0), "dropout_p must be .* got 1.0"),
        (lambda: smooth(dropout_p=math.nan), "dropout_p must be .* got nan"),
        (lambda: smooth(q=X[0]), r"q: .*\[B, H, T, D\], got \[4, 6, 8\]"),
        (lambda: smooth(v=X[0]), r"v: .*\[B, H, T, D\], got \[4, 6, 8\]"),
        (lambda: smooth(k=X.long()), "k: .*floating point tensor, got torch.int64"),
        (lambda: smooth(q=[1.0]), "q: .*must be a tensor, got list"),
        (lambda: smooth(k=X[..., :5]), "part 'content' has 8 in q and 5 in k"),
        (lambda: smooth(k=X[:, :, :5]), "k and v must have one length, but k has 5 and v 6"),
        (lambda: smooth(k=X[:, :3]), "k has 3 heads, which does not divide the 4 heads of q"),
        (lambda: smooth(v=X[:, :3]), "v has 3 heads, which does not divide the 4 heads of q"),
        (lambda: smooth(v=torch.cat([X, X])), "one batch size, or 1, got"),
        (lambda: smooth(v=X.double()), "one dtype, got .*float64"),
        (lambda: smooth(v=X.to("meta")), "one device, but are on .*meta"),
        (lambda: smooth(mc.RBF().to("meta")), "one device, but are on .*kernel.log_bandwidth"),
        (lambda: smooth(mc.ALiBi([0.1, 0.2]).to("meta")), "one device, but are on .*kernel.slopes"),
        (lambda: smooth(mc.RBF(heads=3)), "bandwidths for 3 heads, but the queries have 4"),
        (lambda: smooth(mc.ALiBi([1.0])), "slopes for 1 heads, but the queries have 4"),
        (lambda: smooth(mc.Buckets(torch.zeros(8, 2))), "table for 2 heads, but .* have 4"),
        (lambda: smooth(mc.Lookup(torch.zeros(3, 5))), "5 features a row, but .* have 8"),
        (lambda: smooth(mc.Lookup(torch.zeros(2, 3, 8))), "2 heads, but the queries have 4"),
        (lambda: smooth(mc.AdaptiveRBF(5)), "made for 5 features, but the queries have 8"),
        (lambda: smooth(mc.RBF(on="time")), "reads part 'time', but .* have only: content"),
        (lambda: smooth(mc.RelativeSinusoid()), "reads part 'relative', but .* only: content"),
        (
            lambda: smooth(mc.RelativeSinusoid(), q=mc.Features(content=X, relative=X[..., :3])),
            "part 'relative' must have an even width, but has 3",
        ),
        (lambda: smooth(filter=mc.Padding([7, 2])), "from 0 to the 6 keys .* from 2 to 7"),
        (lambda: smooth(filter=mc.Padding([-1, 2])), "from 0 to the 6 keys .* from -1 to 2"),
        (lambda: smooth(filter=mc.Padding([2])), "made for 1 sequences, but the batch has 2"),
        (lambda: smooth(filter=mc.Documents([[0] * 5] * 2)), "ids for 5 keys, but there are 6"),
        (lambda: smooth(filter=mc.Documents([[0] * 6] * 3)), "made for 3 sequences"),
        (lambda: smooth(mc.Polynomial(), backend="sdpa"), "backend 'sdpa' cannot run this"),
        (lambda: mc.RBF(0.0), "bandwidth must be positive and finite.* got 0.0"),
        (lambda: mc.RBF(-1.0), "bandwidth must be positive and finite.* got -1.0"),
        (lambda: mc.RBF(math.nan), "bandwidth must be positive and finite.* got nan"),
        (lambda: mc.RBF([1.0, math.inf]), "bandwidth must be positive and finite"),
        (lambda: mc.RBF([1.0, 2.0], heads=3), "bandwidth has 2 numbers for 3 heads"),
        (lambda: mc.RBF(heads=0), "heads must be at least 1, got 0"),
        (lambda: mc.Polynomial(3), "degree must be an even number >= 2, got 3"),
        (lambda: mc.Polynomial(0), "degree must be an even number >= 2, got 0"),
        (lambda: mc.Polynomial(2.0), "degree must be an even number >= 2, got 2.0"),
        (lambda: mc.Linear(), "negative weights.*signed=True"),
        (lambda: mc.Matern(2.0), "nu must be 0.5, 1.5 or 2.5, got 2.0"),
        (lambda: mc.RationalQuadratic(alpha=0), "alpha must be .* got 0"),
        (lambda: mc.Cosine(-1.0), "scale must be a positive finite number, got -1.0"),
        (lambda: mc.Exponential(math.inf), "scale must be a finite number, got inf"),
        (lambda: mc.AdaptiveRBF(4, reach=0.0), "reach must be .* got 0.0"),
        (lambda: mc.RelativeSinusoid(base=0.0), "base must be .* got 0.0"),
        (lambda: mc.RelativeSinusoid(max_distance=0), "max_distance must be .* got 0"),
        (
            lambda: mc.RelativeSinusoid(weight=torch.zeros(2, 4)),
            r"weight must be \[H, D, P\] .*got \[2, 4\]",
        ),
        (
            lambda: mc.RelativeSinusoid(weight=torch.zeros(2, 4, 3)),
            r"with an even P, got \[2, 4, 3\]",
        ),
        (
            lambda: smooth(
                mc.RelativeSinusoid(on="content", weight=torch.zeros(7, X.shape[-1], 6))
            ),
            r"the weight is for 7 heads of \d+ features, but part 'content' has \d+ of",
        ),
        (lambda: mc.Lookup(torch.zeros(4, 8)), r"\[2c \+ 1, D\].* got \[4, 8\]"),
        (lambda: mc.Lookup(torch.zeros(0, 8), causal=True), r"\[c \+ 1, D\].* got \[0, 8\]"),
        (lambda: mc.Lookup(torch.zeros(3, 8), math.nan), "scale must be a finite number"),
        (lambda: mc.ALiBi([math.nan]), "slopes must be finite"),
        (lambda: mc.Buckets(torch.zeros(7, 2)), "even number of buckets"),
        (lambda: mc.Buckets(torch.zeros(32, 2), max_distance=8), "must be more than 8"),
        (lambda: mc.Window(-2, 0), "left must be .* got -2"),
        (lambda: mc.Window(1.5, 0), "left must be .* got 1.5"),
        (lambda: mc.Memory(-1), "length must be .* got -1"),
        (lambda: mc.Strided(0), "stride must be .* got 0"),
        (lambda: mc.Fixed(4, 5), "summary must be from 1 to 4, got 5"),
        (lambda: mc.Padding([[1]]), "lengths must be whole numbers, one per sequence"),
        (lambda: mc.Padding([1.5]), "lengths must be whole numbers"),
        (lambda: mc.Documents(torch.zeros(2, 3)), "ids must be whole numbers"),
        (lambda: mc.Features(), "at least one part"),
        (lambda: mc.Features(content=X, position=X[:, :, :2]), "one length, got"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected_and_given(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_kernels_do_not_add_to_numbers():
    with pytest.raises(ValueError, match="1 is not a kernel, so it cannot be added to one"):
        mc.RBF() + 1
    with pytest.raises(TypeError):
        "2" * mc.RBF()
