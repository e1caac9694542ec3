"""Weights, powers, and kernels whose dimensions differ."""

import math

import pytest
import torch
from catalogue import DIM, HEADS
from torch import nn

import mercer as mc
from mercer.filters import Causal, Full, Padding
from mercer.kernels.entry import normal
from mercer.testing import Shape, check_lowering, inputs
from mercer.testing.cases import taking


def run(kernel, backend="reference", filter=Full()):
    q, k, v = inputs(kernel, Shape(), DIM)
    return mc.smooth(kernel.double(), q, k, v, filter=filter, backend=backend, return_log_mass=True)


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_a_weight_cancels_alone_and_is_in_the_mass(backend):
    out, mass = run(mc.RBF(2.0), backend, Causal() & Padding([7, 0]))
    more, greater = run(0.25 * mc.RBF(2.0), backend, Causal() & Padding([7, 0]))
    assert (out - more).abs().max() < 1e-12
    seen = mass.isfinite()
    assert seen.any()
    assert torch.equal(seen, greater.isfinite())
    assert (greater - mass - math.log(0.25))[seen].abs().max() < 1e-7


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_weights_are_the_shares_of_a_sum(backend):
    first, second = mc.RBF(2.0), mc.Exponential()
    (a, mass), (b, other) = run(first), run(second)
    share = 3 * mass.exp() / (3 * mass.exp() + 0.5 * other.exp())
    want = share[..., None] * a + (1 - share)[..., None] * b
    got, _ = run(3.0 * first + second * 0.5, backend)
    assert (got - want).abs().max() < 1e-6
    whole, _ = run(6.0 * (3.0 * first + second * 0.5), backend)
    assert (whole - got).abs().max() < 1e-12


def test_only_a_weight_in_a_sum_gets_a_gradient_from_the_output():
    alone, summed = mc.Scaled(mc.RBF()), mc.Scaled(mc.RBF(), heads=HEADS) + mc.Exponential()
    for kernel, backend in [(alone, "chunked"), (summed, "chunked"), (summed, "reference")]:
        run(kernel, backend)[0].square().sum().backward()
    assert alone.log_scale.grad is None or alone.log_scale.grad.abs().max() < 1e-12
    assert summed.kernels[0].log_scale.grad.abs().min() > 1e-6


def test_rows_that_see_nothing_give_a_weight_no_gradient():
    kernel = mc.Scaled(mc.RBF()).double()
    q, k, v = inputs(kernel, Shape(), DIM)
    for backend in ("reference", "chunked"):
        _, mass = mc.smooth(
            kernel, q, k, v, filter=Padding([0, 0]), backend=backend, return_log_mass=True
        )
        assert bool(mass.isneginf().all())
        (grad,) = torch.autograd.grad(mass.exp().sum(), kernel.log_scale)
        assert grad.item() == 0


def test_numbers_are_weights_that_do_not_train():
    kernel = 0.5 * mc.RBF() + mc.RBF() * 2
    assert [n for n, _ in kernel.named_parameters()] == [
        "kernels.0.kernel.log_bandwidth", "kernels.1.kernel.log_bandwidth",
    ]  # fmt: skip
    assert sorted(n for n, _ in kernel.named_buffers()) == [
        "kernels.0.log_scale", "kernels.1.log_scale",
    ]  # fmt: skip
    assert repr(sum([mc.RBF(), mc.Cosine(2.0)])) == repr(mc.RBF() + mc.Cosine(2.0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: 2 + mc.RBF(), r"2 is not a kernel, .* write 2 \* Exponential\(0\)"),
        (lambda: mc.RBF() + 1.5, r"1.5 is not a kernel"),
        (lambda: -1 * mc.RBF(), "weight must be positive and finite, one number or one per head"),
        (lambda: mc.Scaled(mc.RBF(), [1.0, 0.0]), "weight must be positive"),
        (lambda: mc.Scaled(mc.RBF(), "much"), "weight must be positive .* got 'much'"),
        (lambda: mc.Scaled(mc.RBF(), [1.0, 2.0], heads=3), r"weight must fit \[3\] .* got \[2\]"),
        (lambda: mc.Scaled(torch.exp), "Scaled needs a kernel such as"),
        (lambda: mc.RBF() ** -1, "exponent must be a positive finite number, got -1"),
        (lambda: mc.RBF() ** math.inf, "exponent must be a positive finite number"),
        (lambda: mc.Laplace() ** 0.5, "is no plain exponential, so it has no exact power 0.5"),
        (lambda: (mc.RBF() + mc.RBF()) ** 2, "multiply the kernel with itself"),
        (lambda: mc.ARD(4, [1.0, 2.0]), r"bandwidth must fit \[4\] numbers, got \[2\]"),
        (lambda: mc.ARD(4, 0.0), r"bandwidth must be .* one number, 4 of them or \[H, 4\]"),
        (lambda: mc.ARD(4.5), "dim must be a whole number, got 4.5"),
        (lambda: mc.ARD(2**20, heads=2), "heads must be at most 1, got 2"),
        (lambda: mc.Periodic(0.0), "period must be positive"),
        (lambda: mc.Periodic([1.0, 2.0], heads=3), r"period must fit \[3\]"),
        (lambda: mc.SpectralMixture(0, 4), "components must be at least 1, got 0"),
        (lambda: mc.SpectralMixture(65, 4), "components must be at most 64, got 65"),
    ],
)
def test_wrong_arguments_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("number", [True, "2", None, torch.ones(1)])
def test_other_things_do_not_join_a_kernel(number):
    for join in (lambda: mc.RBF() * number, lambda: mc.RBF() + number, lambda: mc.RBF() ** number):
        with pytest.raises(TypeError):
            join()


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (mc.Scaled(mc.RBF(), heads=3), "weights for 3 heads, but the queries have 2"),
        (mc.ARD(DIM, heads=3), "bandwidths for 3 heads, but the queries have 2"),
        (mc.ARD(DIM + 1), f"ARD was made for {DIM + 1} features, but the queries have {DIM}"),
        (mc.Periodic([1.0, 2.0, 3.0]), "periods for 3 heads, but the queries have 2"),
        (mc.SpectralMixture(1, DIM + 1), f"{DIM + 1} features, but the queries have {DIM}"),
        (mc.SpectralMixture(1, DIM, heads=3), "for 3 heads, but the queries have 2"),
    ],
)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_sizes_that_do_not_fit_are_named(kernel, said, backend):
    with pytest.raises(ValueError, match=said):
        run(kernel, backend)


def places():
    """Every kernel of places, and those whose factors are special."""
    return (
        mc.Lookup(normal(5, DIM))
        * mc.Buckets(normal(8, HEADS), max_distance=6)
        * mc.ALiBi(nn.Parameter(mc.ALiBi.standard(HEADS)))
        * mc.Cosine(2.0)
        * mc.RelativeSinusoid()
        * mc.RelativeSinusoid(on="content", weight=normal(HEADS, DIM, 6))
        * mc.AdaptiveRBF._with_weight(1.0, DIM, heads=HEADS)
        * mc.Exponential()
        * (0.5 * mc.RBF(2.0))
    )


@pytest.mark.parametrize("filter", [Full(), Causal()], ids=repr)
@pytest.mark.parametrize("exponent", [0.5, 3])
def test_a_power_of_each_kernel_lowers_exactly(filter, exponent):
    kernel = places() ** exponent
    check_lowering(kernel, filter, Shape(queries=3, keys=9, kv_heads=1), dim=DIM)
    q, k, _ = inputs(kernel, Shape(), DIM)
    inner = places().double()
    assert torch.allclose(kernel.double().log_weight(q, k), exponent * inner.log_weight(q, k))


def test_a_power_keeps_the_special_forms_of_factors():
    q, k, _ = inputs(places(), Shape(), DIM)
    before, after = (
        {type(f).__name__ for f in u.terms(q, k)[0].factors} for u in (places(), places() ** 0.5)
    )
    assert before == after
    assert repr(mc.RBF(2.0) ** 2) == "(exp(-|q - k|^2 / (2 * 2^2)))^2"


def test_ard_starts_as_rbf_and_learns_each_dimension():
    kernel = mc.ARD(DIM, heads=HEADS)
    want, _ = run(mc.RBF())
    for backend in ("reference", "chunked", "sdpa"):
        assert (run(kernel, backend)[0] - want).abs().max() < 1e-12
    run(kernel, "sdpa")[0].square().sum().backward()
    assert kernel.log_bandwidth.grad.shape == (HEADS, DIM)
    assert kernel.log_bandwidth.grad.unique().numel() == HEADS * DIM
    fixed = mc.ARD(DIM, [1.0 + n for n in range(DIM)], trainable=False)
    assert not list(fixed.parameters())
    assert fixed.bandwidth(DIM).tolist() == pytest.approx(list(range(1, DIM + 1)))


def test_a_dimension_of_infinite_bandwidth_does_not_count():
    kernel = mc.ARD(DIM, [2.0] * (DIM - 1) + [1e12])
    q, k, v = inputs(kernel, Shape(), DIM)
    short = [x.part("content")[..., :-1] for x in (q, k)]
    got = mc.smooth(kernel.double(), q, k, v)
    assert (got - mc.smooth(mc.RBF(2.0).double(), *short, v)).abs().max() < 1e-6


def test_periodic_repeats_and_is_rbf_of_waves():
    kernel = mc.Periodic(3.0, 1.5).double()
    q, k, _ = inputs(kernel, Shape(), DIM)
    q, k = q.part("content"), k.part("content")
    period = kernel.log_period.exp()
    assert (kernel(q + 2 * period, k - period) - kernel(q, k)).abs().max() < 1e-12
    turned = [torch.cat([f(2 * math.pi * x / period) for f in (torch.cos, torch.sin)], -1)
              for x in (q, k)]  # fmt: skip
    assert (mc.RBF(1.5).double()(*turned) - kernel(q, k)).abs().max() < 1e-6


def test_periodic_in_the_places_of_queries_and_keys():
    places = torch.arange(6.0, dtype=torch.float64).view(1, 1, 6, 1)
    x = mc.Features(content=torch.randn(1, 1, 6, 4, dtype=torch.float64), position=places)
    weight = mc.Periodic(3.0, on="position").double()(x, x)[0, 0]
    assert (weight[3:, :3] - weight[:3, :3]).abs().max() < 1e-6
    assert weight[0, 1] < 0.5


def test_a_spectral_mixture_of_frequency_zero_is_a_mixture_of_ard():
    kernel = mc.SpectralMixture(2, DIM, heads=HEADS)
    for component in kernel:
        component.kernel.kernels[1].frequency.data.zero_()
    for backend in ("reference", "chunked"):
        out, mass = run(kernel, backend)
        want, other = run(mc.RBF(), backend)
        assert (out - want).abs().max() < 1e-6
        assert (mass - other).abs().max() < 1e-6


def test_explain_shows_weights():
    q, k, v = inputs(mc.RBF(), Shape(), DIM)
    shown = mc.explain(
        (mc.Scaled(mc.RBF()) + mc.Scaled(mc.Exponential(), heads=2)).double(), q, k, v
    )
    assert shown.terms == (
        "a weight * exp(a dot product of 8 features + one number per key)",
        "a weight for each head * exp(a dot product of 8 features)",
    )
    alone = str(mc.explain((2 * mc.Exponential()).double(), q, k, v))
    assert "cancels   the weight of the term, in its normaliser\n" in alone
    assert "kernel    2 * exp(<q, k> / sqrt(D))" in alone


def test_terms_with_weights_run_one_by_one():
    """A backend that joins the terms of a sum does not see their weights."""
    from mercer.backends.chunked import backend

    calls = []
    q, k, v = inputs(mc.RBF(), Shape(), DIM)
    with pytest.MonkeyPatch.context() as patch:
        inner = backend.run
        patch.setattr(backend, "run", lambda tasks: calls.append(len(tasks)) or inner(tasks))
        mc.smooth((mc.RBF() + mc.Cosine(1.0)).double(), q, k, v, backend="chunked")
        mc.smooth((0.5 * mc.RBF() + mc.Cosine(1.0)).double(), q, k, v, backend="chunked")
    assert calls == [2, 1, 1]


def test_token_kernels_mix_weighted_terms():
    kernel = (0.2 * mc.RBF() + 3 * mc.Exponential()).double()
    q, k, v = inputs(kernel, Shape(), DIM)
    taps = torch.randn(2, 7, 1, 3, dtype=torch.float64)
    a, b = (
        mc.vicinity(q, k, v, key_taps=taps, kernel=kernel, backend=name)
        for name in ("reference", "chunked")
    )
    assert (a - b).abs().max() < 1e-10


def test_the_reference_takes_weights_of_a_kernel_without_terms():
    class Own(mc.Kernel):
        """exp(<q, k>), not lowered."""

        def log_weight(self, q, k):
            q, k = self.select(q, k)
            return q @ k.mT

    kernel = 0.5 * Own() + mc.Exponential()
    assert taking(kernel.double(), Full(), Shape(), DIM) == []
    assert run(kernel)[0].isfinite().all()
