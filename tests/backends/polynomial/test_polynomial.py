"""The square in linear time: exact, with a state of one size, whatever the chunks.

On a GPU, and in Triton's interpreter (TRITON_INTERPRET=1), all but float64 runs in fused kernels.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from catalogue import DIM, FILTERS, HEADS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import mercer as mc
from mercer.backends.polynomial import (
    backend as linear,
)
from mercer.backends.polynomial import (
    chunked_sums,
    fused,
    plan,
)
from mercer.backends.polynomial.backend import PolynomialState
from mercer.backends.triton.backend import INTERPRETED
from mercer.term.layout import accumulator
from mercer.term.links import Power
from mercer.testing import Shape, check_accuracy
from mercer.testing.cases import Case, assert_close, rounding_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = plan.runs(torch.device(DEVICE), torch.float32, DIM, DIM)
needs_fused = pytest.mark.skipif(not FUSED, reason="needs a CUDA GPU or Triton's interpreter")
# The interpreter multiplies no matrices of bfloat16.
DTYPES = (
    (torch.float32, torch.float16)
    if INTERPRETED
    else (torch.float32, torch.float16, torch.bfloat16)
)
# The interpreter computes with numpy, which warns of its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]
LENGTHS = mc.Padding([19, 0])
FITTING = {
    "full": mc.Full(),
    "causal": mc.Causal(),
    "padding": LENGTHS,
    "both": mc.Causal() & LENGTHS & mc.Padding([8, 11]),
    "simplified": mc.Window(-1, 0) & mc.Window(40, -1),
}
SHAPES = {
    "square": Shape(queries=19, keys=19),
    "one": Shape(queries=1, keys=19),
    "memory": Shape(queries=9, keys=19, values=3),
    "more queries": Shape(queries=23, keys=19, values=8),
    "few keys for many": Shape(heads=4, kv_heads=2, queries=19, keys=19, values=1),
    "one key head": Shape(heads=3, kv_heads=1, queries=14, keys=19),
}


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@pytest.fixture(params=["chunk by chunk", "many chunks"])
def small_chunks(request, monkeypatch):
    """Chunks of 4 places (16 if fused), one or one head at a time or as many as there are."""
    monkeypatch.setattr(chunked_sums, "chunk_size", lambda dim: 4)
    monkeypatch.setattr(plan, "chunk_size", lambda dim, values: 16)
    if request.param == "chunk by chunk":
        monkeypatch.setattr(chunked_sums, "ELEMENTS_ON_CPU", 1)
        monkeypatch.setattr(chunked_sums, "ELEMENTS", 1)
        monkeypatch.setattr(plan, "WORKSPACE", 1)


def compare(kernel, filter, shape, dim=DIM, seed=0):
    """float64, outputs, log_mass and all gradients, against the reference."""
    case = Case(copy.deepcopy(kernel).double().to(DEVICE), filter, shape, dim, seed, device=DEVICE)
    got, want = (case.run(backend, log_mass=True) for backend in ("linear", "reference"))
    for name in want:
        assert_close(got[name], want[name], f"{filter!r}, {shape}, {dim}: {name}")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("filter", FITTING)
def test_it_is_the_reference_in_chunks(filter, shape):
    for dim in (1, 8, 21):
        compare(mc.Polynomial(2), FITTING[filter], SHAPES[shape], dim)


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 385])
@pytest.mark.parametrize("filter", [mc.Full(), mc.Causal()], ids=repr)
def test_it_is_the_reference_at_the_edges_of_real_chunks(filter, length):
    shape = Shape(batch=1, heads=2, kv_heads=1, queries=length, keys=length, values=3)
    compare(mc.Polynomial(2), filter, shape)


@pytest.mark.usefixtures("small_chunks")
def test_key_heads_may_differ_from_value_heads_and_batches_be_one():
    q, k, v = (random(2, 4, 11, 6), random(1, 2, 11, 6), random(2, 4, 11, 3))
    for filter in (mc.Full(), mc.Causal()):
        got, want = (
            mc.smooth(mc.Polynomial(), q, k, v, filter=filter, backend=backend)
            for backend in ("linear", "reference")
        )
        assert (got - want).abs().max() < 1e-4


class Scaled(mc.Kernel):
    """(a <q, k>)^2, a per head or per query."""

    def __init__(self, each):
        super().__init__()
        self.rate = nn.Parameter(torch.randn(HEADS, 1, 1) if each == "head" else torch.randn(DIM))
        self.each = each

    def scale(self, q):
        return self.rate if self.each == "head" else (q.part("content") @ self.rate)[..., None]

    def factored(self, q, k):
        q, k = self.query(q), self.query(k)
        s = self.scale(q) * q.part("content") @ k.part("content").mT
        return torch.zeros_like(s), s**2

    def log_weight(self, q, k):
        return self.factored(q, k)[1].log()

    def query(self, x):
        return mc.Features.of(x)

    def terms(self, q, k):
        q, k = self.query(q), self.query(k)
        factor = mc.Factor(
            q=q.part("content"), k=k.part("content"), scale=self.scale(q), link=Power(2)
        )
        return (mc.Term(factors=(factor,)),)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("each", ["head", "query"])
def test_a_learned_scale_has_its_gradient(each):
    torch.manual_seed(3)
    compare(Scaled(each), mc.Causal(), SHAPES["square"])


@pytest.mark.usefixtures("small_chunks")
def test_sums_of_squares_are_mixed():
    compare(mc.Polynomial() + mc.Polynomial(on="position"), mc.Causal(), SHAPES["square"])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dim", [8] if INTERPRETED else [8, 64])
@pytest.mark.parametrize("filter", [mc.Full(), mc.Causal()], ids=repr)
def test_the_error_budget(filter, dim):
    check_accuracy(
        mc.Polynomial(2), heads=HEADS, dim=dim, filter=filter, device=DEVICE, dtypes=DTYPES
    )


def within_budget(filter, shape, dim, dtype, change=lambda q, k, v: (q, k, v)):
    """Twice the error of the reference in the same dtype, plus rounding; -inf in its places."""
    case = Changed(mc.Polynomial(2), filter, shape, dim, 0, dtype, DEVICE, change=change)
    got, plain = (case.run(backend, log_mass=True) for backend in ("linear", "reference"))
    for name, want in case.run("reference", log_mass=True, wide=True).items():
        assert torch.equal(got[name].isneginf(), want.isneginf()), name
        finite = want.isfinite()
        error, usual = ((x[name].double() - want)[finite].norm().item() for x in (got, plain))
        budget = 2 * usual + rounding_of(case) * want[finite].norm().item()
        assert error <= budget, f"{name}: off by {error:.1e}, more than {budget:.1e}"


@dataclass(frozen=True)
class Changed(Case):
    """A random call whose inputs are changed."""

    change: Callable = None

    def inputs(self, *, wide=False):
        q, k, v = super().inputs()
        q, k, v = self.change(q.part("content"), k.part("content"), v)
        q, k, v = ((x.double() if wide else x).clone() for x in (q, k, v))
        return mc.Features.of(q), mc.Features.of(k), v


FUSED_SHAPES = {
    "square": Shape(batch=1, queries=50, keys=50, values=16),
    "memory": Shape(batch=1, queries=35, keys=77, values=3),
    "few queries": Shape(batch=1, queries=3, keys=50, values=3),
    "more queries": Shape(batch=1, queries=67, keys=37, values=8),
    "few keys for many": Shape(batch=2, heads=4, kv_heads=2, queries=37, keys=37, values=1),
}


@needs_fused
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", FUSED_SHAPES)
@pytest.mark.parametrize("filter", ["full", "causal", "padding", "both"])
def test_the_fused_kernels_keep_the_budget(filter, shape, dtype):
    shape = FUSED_SHAPES[shape]
    lengths = mc.Padding([shape.keys - 9, 0][: shape.batch])
    filters = {"padding": lengths, "both": mc.Causal() & lengths}
    within_budget(filters.get(filter, FITTING[filter]), shape, 8, dtype)


@needs_fused
@pytest.mark.parametrize("dim", [1, 33, 64, 80, 128])
@pytest.mark.parametrize("values", [1, 40, 128])
def test_the_fused_kernels_take_any_width(dim, values, monkeypatch):
    monkeypatch.setattr(plan, "chunk_size", lambda dim, values: 64)
    shape = Shape(batch=1, heads=1, kv_heads=1, queries=100, keys=100, values=values)
    for dtype in DTYPES:
        if plan.runs(torch.device(DEVICE), dtype, dim, values):
            within_budget(mc.Causal(), shape, dim, dtype)


@needs_fused
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_keys_far_from_zero_keep_the_budget(dtype, monkeypatch):
    """A rounded state would lose what is left of a large mean; it is kept without it."""
    monkeypatch.setattr(plan, "chunk_size", lambda dim, values: 64)
    shape = Shape(batch=1, heads=1, kv_heads=1, queries=200, keys=200, values=16)
    for filter in (mc.Causal(), mc.Full()):
        within_budget(filter, shape, 16, dtype, lambda q, k, v: (q + 0.5, k + 1, v + 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
def test_the_real_sizes_keep_the_budget_and_their_bits(dim, dtype):
    shape = Shape(batch=2, heads=2, kv_heads=1, queries=4500, keys=4500, values=dim)
    for filter in (mc.Causal(), mc.Full()):
        within_budget(filter, shape, dim, dtype)
        case = Case(mc.Polynomial(2), filter, shape, dim, 0, dtype, DEVICE)
        first, *others = (case.run("linear", log_mass=True) for _ in range(4))
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_small_norms_stay_finite(dtype):
    # The gradient grows as the norms shrink, and float16 ends at 65504.
    for size in (1e3, 1e-2 if dtype == torch.float16 else 1e-4):
        q, k, v = (random(2, 2, 19, DIM) for _ in range(3))
        given = [x.to(dtype).requires_grad_() for x in (q * size, k * size, v)]
        out, mass = mc.smooth(
            mc.Polynomial(), *given, filter=mc.Causal(), backend="linear", return_log_mass=True
        )
        assert out.isfinite().all()
        assert mass.isfinite().all()
        assert out.abs().max() <= v.abs().max() * 1.02
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum() + mass.sum(), given))


def test_the_future_changes_nothing_to_the_last_bit(small_chunks):
    q, k, v = (random(1, 2, 19, DIM) for _ in range(3))
    before = mc.smooth(mc.Polynomial(), q, k, v, filter=mc.Causal(), backend="linear")
    k[:, :, 10:], v[:, :, 10:] = 1e9, -1e9
    after = mc.smooth(mc.Polynomial(), q, k, v, filter=mc.Causal(), backend="linear")
    assert torch.equal(before[:, :, :10], after[:, :, :10])


@pytest.mark.usefixtures("small_chunks")
def test_the_same_input_gives_the_same_bits():
    given = [random(2, HEADS, 19, DIM).requires_grad_() for _ in range(3)]
    runs = []
    for _ in range(2):
        out = mc.smooth(mc.Polynomial(), *given, filter=mc.Causal(), backend="linear")
        runs.append((out, *torch.autograd.grad(out.square().sum(), given)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("filter", FITTING)
@pytest.mark.parametrize("queries", [12, 19, 23])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(which, queries, filter):
    filter = FITTING[filter].to(torch.device(DEVICE))
    clean = {"q": random(2, 2, queries, 4), "k": random(2, 2, 19, 4), "v": random(2, 2, 19, 4)}
    broken = {name: x.clone() for name, x in clean.items()}
    broken[which][0, 1, 6, 2] = math.nan
    want = torch.zeros(2, 2, queries, dtype=torch.bool, device=DEVICE)
    mask = filter.mask(queries, 19, DEVICE).expand(2, 2, queries, 19)
    want[0, 1] = (torch.arange(queries, device=DEVICE) == 6) if which == "q" else mask[0, 1, :, 6]
    outs, grads = [], []
    for given in (clean, broken):
        given = [x.requires_grad_() for x in given.values()]
        out, mass = mc.smooth(
            mc.Polynomial(), *given, filter=filter, backend="linear", return_log_mass=True
        )
        outs.append((out, mass))
        grads.append(torch.autograd.grad(out[~want].square().sum(), given))
    out, mass = outs[1]
    assert torch.equal(out.isnan().all(-1), want)
    assert torch.equal(out.isnan().any(-1), want)
    assert torch.equal(mass.isnan(), want)
    # What the other rows give back is as if all had been finite.
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-4 * (1 + a.abs().max())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("filter", [mc.Full(), mc.Causal()], ids=repr)
@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 9, 9), (2, 0, 9), (2, 9, 0), (2, 0, 0)], ids=str
)
def test_empty_inputs(batch, queries, keys, filter):
    given = [random(batch, 2, n, 4).requires_grad_() for n in (queries, keys, keys)]
    out, mass = mc.smooth(
        mc.Polynomial(), *given, filter=filter, backend="linear", return_log_mass=True
    )
    assert out.shape == (batch, 2, queries, 4)
    assert (out == 0).all()
    assert (mass == -math.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), given))


@pytest.mark.usefixtures("small_chunks")
def test_rows_without_mass_are_zero():
    q, k, v = (random(1, 1, 19, 4) for _ in range(3))
    q[..., :2], q[..., 2:], k[..., :2] = 1.0, 0.0, 0.0
    q[:, :, 7] = 0.0
    k[:, :, 15] = 1.0
    given = [x.requires_grad_() for x in (q, k, v)]
    out, mass = mc.smooth(
        mc.Polynomial(), *given, filter=mc.Causal(), backend="linear", return_log_mass=True
    )
    assert (out[:, :, :15] == 0).all()
    assert (mass[:, :, :15] == -math.inf).all()
    assert torch.allclose(out[:, :, 15:], v[:, :, 15:16].expand(1, 1, 4, 4), atol=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), given))


@pytest.mark.parametrize(
    ("kernel", "filter", "dropout", "reason"),
    [
        (mc.Exponential(), mc.Full(), 0.0, "the link exp\\(s\\) is not s\\^2"),
        (mc.Polynomial(4), mc.Full(), 0.0, "the link s\\^4 is not s\\^2"),
        (mc.Linear(signed=True), mc.Full(), 0.0, "the link s is not s\\^2"),
        (mc.Polynomial() * mc.RBF(), mc.Full(), 0.0, "one factor, but the term has 2"),
        (mc.Polynomial() * mc.ALiBi([1.0] * HEADS), mc.Full(), 0.0, "a table of distances"),
        (mc.Polynomial() + mc.RBF(), mc.Full(), 0.0, "is not s\\^2"),
        (mc.Polynomial(), mc.Full(), 0.1, "dropout"),
        (mc.Polynomial(), mc.Window(2, 0), 0.0, "cannot serve Window"),
        (mc.Polynomial(), mc.Causal() & mc.Strided(3), 0.0, "only Full, Causal and Padding"),
        (mc.Polynomial(), mc.Causal() | LENGTHS, 0.0, "only Full, Causal and Padding"),
    ],
    ids=lambda x: str(x),
)
def test_every_refusal_has_its_reason(kernel, filter, dropout, reason):
    x = random(2, HEADS, 19, DIM)
    kernel = copy.deepcopy(kernel).to(DEVICE)
    with pytest.raises(ValueError, match=f"'linear' cannot run this: .*{reason}"):
        mc.smooth(kernel, x, x, x, filter=filter, dropout_p=dropout, backend="linear")


@pytest.mark.parametrize("number", ["col", "row"])
def test_numbers_inside_the_square_are_refused(number):
    class Shifted(mc.Kernel):
        def terms(self, q, k):
            q, k = mc.Features.of(q).part("content"), mc.Features.of(k).part("content")
            factor = mc.Factor(q=q, k=k, link=Power(2), **{number: q[..., 0]})
            return (mc.Term(factors=(factor,)),)

    x = random(1, 1, 5, 4)
    with pytest.raises(ValueError, match="inside the square"):
        mc.smooth(Shifted(), x, x, x, backend="linear")


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("filter", ["full", "causal", "padding"])
def test_it_compiles_as_one_graph_forward_and_backward(filter):
    torch._dynamo.reset()
    q, k, v = (random(2, 2, 19, DIM).requires_grad_() for _ in range(3))
    filter = FILTERS[filter]()

    def run(q, k, v):
        return mc.smooth(
            mc.Polynomial(), q, k, v, filter=filter, backend="linear", return_log_mass=True
        )

    grads = []
    eager = run(q, k, v)
    for out, mass in (eager, torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)):
        loss = out.square().sum() + torch.where(mass.isfinite(), mass, 0.0).square().sum()
        grads.append(torch.autograd.grad(loss, (q, k, v)))
        assert (out - eager[0]).abs().max() < 1e-5
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-4 * (1 + a.abs().max())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("causal", [True, False])
def test_the_operator_passes_opcheck(causal):
    """Shapes, strides and gradients, for queries whose memory is laid out otherwise, too."""
    q = random(2, 11, 4, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
    k, v = (random(2, 2, 11, n, dtype=torch.float64).requires_grad_() for n in (6, 3))
    torch.library.opcheck(linear.sum_squares, (q, k, v, causal))
    assert torch.autograd.gradcheck(
        lambda *x: linear.sum_squares(*x, causal), (q, k, v), fast_mode=True
    )


@needs_fused
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("causal", [True, False])
def test_the_fused_operator_passes_opcheck(causal):
    q = random(2, 20, 4, 6).transpose(1, 2).requires_grad_()
    k, v = (random(2, 2, 20, n).requires_grad_() for n in (6, 3))
    lengths = torch.tensor([20, 7], device=DEVICE)
    torch.library.opcheck(fused.smooth_squares, (q, k, v, lengths, causal))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies no matrices of bfloat16")
def test_autocast_lowers_the_inputs_and_keeps_the_sums():
    q, k, v = (random(1, 2, 300, 16) for _ in range(3))
    lowered = [x.bfloat16() for x in (q, k, v)]
    with torch.autocast(DEVICE, torch.bfloat16):
        out, mass = mc.smooth(
            mc.Polynomial(), q, k, v, filter=mc.Causal(), backend="linear", return_log_mass=True
        )
    assert mass.dtype == torch.float32
    want = mc.smooth(mc.Polynomial(), *lowered, filter=mc.Causal(), backend="linear")
    assert torch.equal(out, want)


class Largest(TorchDispatchMode):
    """The most numbers that any one tensor had."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.most = max(self.most, result.untyped_storage().nbytes())
        return result


def walk(length, mode, causal):
    """A forward and a backward pass over one head of 32 features, seen by the mode."""
    x, v = random(1, 1, length, 32), random(1, 1, length, 33)
    out, grads = torch.empty_like(v), [torch.empty_like(y) for y in (x, x, v)]
    with mode:
        chunked_sums.Walk(x, x, v, causal).forward(out)
        chunked_sums.Walk(x, x, v, causal).backward(v, *grads)
    return mode


@pytest.mark.parametrize("causal", [True, False])
def test_time_is_linear_and_the_workspace_is_bounded(causal, monkeypatch):
    monkeypatch.setattr(chunked_sums, "ELEMENTS", chunked_sums.ELEMENTS_ON_CPU)
    flops = [
        walk(n, FlopCounterMode(display=False), causal).get_total_flops() for n in (4096, 8192)
    ]
    assert 1.9 < flops[1] / flops[0] < 2.1
    limit, _ = chunked_sums.workspace(32, 33, 1, torch.device(DEVICE))
    for length in (4096, 16384):
        # The inputs themselves are some of the storages that the mode sees.
        assert walk(length, Largest(), causal).most <= max(4 * limit, 4 * 33 * length)


def test_many_heads_are_taken_a_few_at_a_time(monkeypatch):
    seen = []
    forward = chunked_sums.Walk.forward
    monkeypatch.setattr(
        chunked_sums.Walk,
        "forward",
        lambda self, out: seen.append(len(self.k)) or forward(self, out),
    )
    monkeypatch.setattr(
        chunked_sums, "ELEMENTS_ON_CPU", 3 * chunked_sums.workspace(8, 9, 2, torch.device("cpu"))[1]
    )
    q, k = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (8, 4))
    got = mc.smooth(mc.Polynomial(), q, k, k, backend="linear")
    assert seen == [3, 3, 2]
    want = mc.smooth(mc.Polynomial(), q, k, k, backend="reference")
    assert (got - want).abs().max() < 1e-4


def test_memory_is_linear_in_the_length():
    def memory(length):
        x = torch.zeros(1, 2, length, 16)
        return mc.explain(mc.Polynomial(), x, x, x, filter=mc.Causal(), backend="linear").memory

    assert 1 < memory(2**18) / memory(2**17) <= 2
    assert memory(4) < memory(2**17)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decoding_step_by_step_is_the_causal_pass(heads, dtype):
    q = random(2, 4, 40, 6).to(dtype)
    k, v = random(2, heads, 40, 6).to(dtype), random(2, heads, 40, 3).to(dtype)
    want, want_mass = mc.smooth(
        mc.Polynomial(), q, k, v, filter=mc.Causal(), backend="chunked", return_log_mass=True
    )
    state = PolynomialState()
    state.update(k[:, :, :16], v[:, :, :16])
    size = state.sums.shape
    for t in range(16, 40):
        state.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        out, mass, sign = state.read(q[:, :, t : t + 1])
        # One rounding of the output, and those of a sum of squares.
        eps = torch.finfo(dtype).eps + 64 * torch.finfo(accumulator(dtype)).eps
        assert (out[:, :, 0] - want[:, :, t]).abs().max() <= eps * v.abs().max()
        assert (mass[:, :, 0] - want_mass[:, :, t]).abs().max() <= eps * 16
        assert out.dtype == dtype
        assert sign is None
    assert state.length == 40
    assert state.sums.shape == size
    assert state.sums.dtype == accumulator(dtype)


def test_a_state_passes_gradients_on():
    q, k, v = (random(1, 2, 9, 6, dtype=torch.float64).requires_grad_() for _ in range(3))
    state = PolynomialState()
    state.update(k[:, :, :4], v[:, :, :4])
    state.update(k[:, :, 4:], v[:, :, 4:])
    want = mc.smooth(mc.Polynomial(), q, k, v, backend="reference")
    grads = [
        torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (state.read(q).out, want)
    ]
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-9 * (1 + b.abs().max())


@pytest.mark.parametrize("which", ["k", "v"])
def test_a_state_with_nan_gives_nan_in_whole_rows(which):
    given = {"k": random(2, 1, 5, 4), "v": random(2, 1, 5, 4)}
    given[which][1, 0, 2, 3] = math.inf
    state = PolynomialState()
    state.update(**given)
    out, mass, _ = state.read(random(2, 1, 3, 4))
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert mass[1].isnan().all()


def test_a_state_names_what_does_not_fit():
    state, x = PolynomialState(), random(2, 2, 3, 4)
    with pytest.raises(ValueError, match="the state is empty"):
        state.read(x)
    with pytest.raises(ValueError, match=r"got \[2, 2, 3, 4\] and \[2, 2, 2, 4\]"):
        state.update(x, x[:, :, :2])
    state.update(x, x)
    with pytest.raises(ValueError, match=r"the state has shape \[2, 2, 16, 5\]"):
        state.update(x[:1], x[:1])
    with pytest.raises(ValueError, match="a multiple of 2 heads"):
        state.read(random(2, 3, 1, 4))
