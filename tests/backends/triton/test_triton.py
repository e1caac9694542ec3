"""The fused kernels: the same promises as every backend.

They need a GPU, or Triton's interpreter (TRITON_INTERPRET=1), which is slow but runs on a CPU.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from catalogue import COMPOSED, DIM, FILTERS, HEADS, KERNELS, UNFUSED
from torch.autograd import forward_ad

import mercer as mc
from mercer.backends.runtime import device
from mercer.backends.runtime import launch as launches
from mercer.backends.triton import backend as triton_backend
from mercer.backends.triton import (
    block_sizes,
    numbers,
    select,
    tables,
)
from mercer.backends.triton import (
    plan as triton_plan,
)
from mercer.backends.triton import (
    run as triton_launch,
)
from mercer.backends.triton.backend import INSTALLED, INTERPRETED
from mercer.backends.triton.sinusoids import queries, with_table
from mercer.filters import Earlier
from mercer.term import sinusoids
from mercer.testing import Shape, check_accuracy, inputs
from mercer.testing.cases import Case, double, rounding_of

RUNS = torch.cuda.is_available() or (INSTALLED and INTERPRETED)
# The interpreter knows no bfloat16.
DTYPES = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16, torch.float16)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.skipif(not RUNS, reason="needs a CUDA GPU or Triton's interpreter"),
    # The interpreter computes with numpy, which warns of its own.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
ALL = KERNELS | COMPOSED
# A table or slopes alone have no dot product, and signed weights no fused kernel.
FUSED = sorted(
    set(ALL)
    - {"linear", "exponential+linear", "lookup", "lookup-per-head", "lookup-causal"}
    - {"buckets", "buckets-one-way"}
    - {"alibi"}
)


@pytest.fixture(autouse=True)
def _tma_stores_touch_their_tensor(monkeypatch):
    """On a GPU, a TMA store wholly outside of its tensor is an illegal instruction.

    The interpreter would drop such a store without a word.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_descriptor_store

    def checked(self, desc, value, indices):
        _, mask = desc.materialize_pointers(indices)
        assert mask.data.any(), f"a store at {[int(x.data.item()) for x in indices]}"
        return store(self, desc, value, indices)

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_store", checked)


@pytest.mark.parametrize("name", FUSED)
def test_the_error_budget(name):
    check_accuracy(ALL[name](), heads=HEADS, dim=DIM, device=DEVICE, dtypes=DTYPES)


def compare(kernel, filter, shape, dim=DIM):
    """float32: the error of everything within the budget, and -inf in the same places.

    A gradient that is one number may come out near zero by accident, the difference of large sums.
    So where one draw is over its budget, four are judged together.
    """
    sums = {}
    for seed in range(4):
        case = Case(kernel.to(DEVICE), filter, shape, dim, seed, torch.float32, DEVICE)
        got, plain = (case.run(backend, log_mass=True) for backend in ("triton", "reference"))
        for name, want in case.run("reference", log_mass=True, wide=True).items():
            assert torch.equal(got[name].isneginf(), want.isneginf()), name
            finite = want.isfinite()
            new = ((got[name] - want)[finite], (plain[name] - want)[finite], want[finite])
            old = sums.get(name, (0.0, 0.0, 0.0))
            sums[name] = tuple(a + x.square().sum().item() for a, x in zip(old, new, strict=True))
        over = {}
        for name, squares in sums.items():
            error, usual, size = (math.sqrt(x) for x in squares)
            budget = 2 * usual + rounding_of(case) * size
            if error > budget:
                over[name] = f"off by {error:.1e}, more than {budget:.1e}"
        if not over:
            return
    assert not over


@pytest.mark.parametrize("filter", [name for name in FILTERS if name not in UNFUSED])
@pytest.mark.parametrize("kernel", ["rbf", "polynomial", "lookup*buckets*alibi"])
def test_every_filter_visits_what_it_shows(kernel, filter):
    compare(ALL[kernel](), FILTERS[filter](), Shape(queries=11, keys=11))


@pytest.mark.parametrize(
    "filter",
    [
        mc.Window(150, 0),
        mc.Window(150, 150),
        mc.Strided(32),
        mc.Documents(torch.arange(250)[None].expand(2, -1) // 180),
        mc.Causal() & mc.Window(150, 0) & mc.Strided(32),
    ],
    ids=repr,
)
def test_blocks_of_pairs_that_lie_before_or_after_their_band(filter):
    """A filter shows keys so far away that a whole block of pairs is outside the band."""
    table = mc.Lookup(torch.randn(9, DIM, generator=torch.Generator().manual_seed(3)))
    compare(mc.Exponential() * table, filter, Shape(queries=250, keys=250))


@pytest.mark.parametrize(
    "filter",
    [
        mc.Causal(),
        mc.Causal() & mc.Padding([37, 50]),
        mc.Causal() & mc.Window(30, 0),
        mc.Causal() & mc.Window(1, 0),
        mc.Memory(35),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kernel", [mc.Exponential, lambda: mc.RBF(heads=HEADS)], ids="er")
def test_keys_beyond_the_reach_of_a_table(kernel, filter, monkeypatch):
    """They get launches of their own, whose shares of everything are joined."""
    monkeypatch.setattr(triton_plan, "MANY_KEYS", 1)
    monkeypatch.setattr(triton_plan, "CUT", 8)
    table = mc.Lookup(torch.randn(5, DIM, generator=torch.Generator().manual_seed(3)))
    compare(kernel() * table, filter, Shape(queries=40, keys=50))


@pytest.mark.parametrize(
    "filter",
    [
        mc.Causal(),
        mc.Window(40, 7),
        mc.Memory(50),
        mc.Strided(60),
        mc.Fixed(64, 5),
        mc.Full(),
        Earlier(70),
    ],
    ids=repr,
)
@pytest.mark.parametrize("kernel", ["rbf-per-head", "eq-9", "matern-3/2"])
def test_many_blocks(kernel, filter):
    for shape in (Shape(queries=300, keys=300), Shape(queries=70, keys=333, kv_heads=1, values=3)):
        compare(ALL[kernel](), filter, shape)


@pytest.mark.parametrize("left", [511, 512])
def test_a_long_window_visits_no_block_too_few(left):
    shape = Shape(batch=1, queries=640, keys=640)
    compare(mc.RBF(DIM**0.5), mc.Window(left, 0), shape)


@pytest.mark.parametrize("dim", [8, 24, 80, 128, 256])
@pytest.mark.parametrize("values", [1, 40, 200])
def test_widths_that_are_no_powers_of_two(dim, values):
    compare(mc.RBF(dim**0.5), mc.Causal(), Shape(queries=65, keys=65, values=values), dim)


def test_the_same_input_gives_the_same_bits():
    kernel = (mc.RBF(3.0, heads=2) * mc.Lookup(torch.nn.Parameter(torch.randn(9, 32)))).to(DEVICE)
    q, k, v = (torch.randn(2, 2, 500, 32, device=DEVICE).requires_grad_() for _ in range(3))
    runs = []
    for _ in range(2):
        out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
        runs.append(
            (out, *torch.autograd.grad(out.square().sum(), (q, k, v, *kernel.parameters())))
        )
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_dropout_is_unbiased_and_has_the_gradient_of_what_it_kept():
    q, k = torch.randn(2, 1, 1, 64, 16, device=DEVICE)
    eye = torch.eye(64, device=DEVICE)[None, None].requires_grad_()
    full = mc.smooth(mc.Exponential(), q, k, eye, backend="triton")
    torch.manual_seed(1)
    out = mc.smooth(mc.Exponential(), q, k, eye, backend="triton", dropout_p=0.25)
    kept = out != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.03
    assert (out - torch.where(kept, full / 0.75, 0.0)).abs().max() < 1e-5
    # dv = P^T dO with the same weights dropped
    (grad,) = torch.autograd.grad(out, eye, torch.eye(64, device=DEVICE)[None, None])
    assert (grad - out.mT).abs().max() < 1e-5


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("filter", ["causal", "window", "padding"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(which, filter):
    tensors = {name: torch.randn(2, 2, 11, 4, device=DEVICE) for name in "qkv"}
    tensors[which][0, 1, 6, 2] = math.nan
    mask = FILTERS[filter]().mask(11, 11, DEVICE).expand(2, 2, 11, 11)
    want = torch.zeros(2, 2, 11, dtype=torch.bool, device=DEVICE)
    want[0, 1] = mask[0, 1, :, 6] if which != "q" else torch.arange(11, device=DEVICE) == 6
    want &= mask.any(-1)
    kernel = mc.RBF().to(DEVICE)
    out = mc.smooth(kernel, *tensors.values(), filter=FILTERS[filter](), backend="triton")
    assert torch.equal(out.isnan().all(-1), want)


@pytest.mark.parametrize("kernel", [mc.RBF, mc.RationalQuadratic, mc.Exponential])
def test_hidden_keys_that_are_not_finite_leave_gradients_of_keys_alone(kernel):
    q, k, v = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(3))
    spoiled = k.clone()
    spoiled[:, :, 35] = math.nan
    filter = mc.Causal() & mc.Padding([33])

    def gradients(k):
        of = (k.requires_grad_(), v.requires_grad_())
        out = mc.smooth(kernel().to(DEVICE), q, *of, filter=filter, backend="triton")
        return torch.autograd.grad(out.square().sum(), of)

    for got, want in zip(gradients(spoiled), gradients(k), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("filter", ["causal", "window", "padding"])
@pytest.mark.parametrize("name", ["rbf", "adaptive"])
def test_queries_that_are_far_from_all_keys(name, filter, dtype):
    """Beside a key at no distance all their weights vanish."""
    draw = torch.Generator().manual_seed(0)
    kernel, shown = KERNELS[name]().to(DEVICE), FILTERS[filter]()
    given = [torch.randn(2, HEADS, 11, DIM, generator=draw).to(DEVICE) for _ in range(3)]
    given, wide = far(given, dtype)
    out = mc.smooth(kernel, *given, filter=shown, backend="triton")
    # A copy: the backward still reads the kernel itself.
    want = mc.smooth(double(kernel), *wide, filter=shown, backend="reference")
    grads = (torch.autograd.grad(y.square().sum(), x) for y, x in ((out, given), (want, wide)))
    for n, (x, y) in enumerate(zip((out, *next(grads)), (want, *next(grads)), strict=True)):
        # Where queries steer bandwidths, rounding what the forward gives makes the gradients of
        # queries and keys here uncertain by a tenth, in any backward.
        if dtype == torch.float32 or name == "rbf" or n in (0, 3):
            assert (x - y).norm() < (1e-4 if dtype == torch.float32 else 0.03) * y.norm()


def far(given, dtype):
    """Some queries moved far from all keys, and the same in float64."""
    given = [x.to(dtype) for x in given]
    given[0][:, :, 4:6] += 10
    given[0][:, 0, 7] -= 40
    wide = [x.double().requires_grad_() for x in given]
    return [x.requires_grad_() for x in given], wide


@pytest.fixture
def equal_products(monkeypatch):
    """Both passes have equal products of a query and a key, as on a GPU.

    The interpreter multiplies with numpy, which adds up a product and its transpose in different
    orders. In float64 that does not show.
    """
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        def create_dot(self, a, b, acc, *options):
            product = np.matmul(a.data, b.data, dtype=np.float64).astype(acc.data.dtype)
            return TensorHandle(product + acc.data, acc.dtype.scalar)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("equal_products")
@pytest.mark.parametrize("filter", ["causal", "window", "padding"])
def test_far_queries_with_bandwidths_have_exact_gradients(filter):
    """Products and norms cancel here: some draws are off by 1e-3, in any backend that has them.

    Those of keys are as exact as the reference has them in float32: where a query sees but one, it
    has no gradient for it, and the kernels know that.
    """
    kernel, shown = KERNELS["adaptive"]().to(DEVICE), FILTERS[filter]()
    errors = {"reference": 0.0, "triton": 0.0, "chunked": 0.0}
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        given = [torch.randn(2, HEADS, 11, DIM, generator=draw).to(DEVICE) for _ in range(3)]
        given, wide = far(given, torch.float32)
        want = mc.smooth(double(kernel), *wide, filter=shown, backend="reference")
        wants = torch.autograd.grad(want.square().sum(), wide[:2])
        of_keys = []
        for backend in errors:
            out = mc.smooth(kernel, *given, filter=shown, backend=backend)
            got = torch.autograd.grad(out.square().sum(), given[:2])
            for x, y in zip(got, wants, strict=True):
                errors[backend] += ((x - y).norm() / y.norm()).square().item() / 20
            of_keys.append(((got[1] - wants[1]).norm() / wants[1].norm()).item())
        assert of_keys[1] < 2 * of_keys[0] + 1e-5
    assert errors["triton"] ** 0.5 < 2 * errors["chunked"] ** 0.5 + 1e-5


PARAMETERS = {
    "slopes": lambda: mc.Exponential() * mc.ALiBi(torch.nn.Parameter(torch.tensor([0.25, 0.004]))),
    "slopes-beside-a-link": lambda: (
        mc.Laplace(8.0) * mc.ALiBi(torch.nn.Parameter(torch.tensor([0.25, 0.004])))
    ),
    "second-link": lambda: mc.Polynomial() * mc.Laplace(8.0, on="position"),
}


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Fixed(32, 4)], ids=repr)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_learn_without_the_rounding_of_weights(name, filter):
    """Large sums cancel in their gradients: the weights, rounded for the output, would be seen."""
    kernel = PARAMETERS[name]().to(DEVICE)
    case = Case(kernel, filter, Shape(1, 2, 1, 200, 200, 64), 64, 0, torch.float16, DEVICE)
    got, want = case.run("triton"), case.run("chunked", wide=True)
    for parameter, _ in kernel.named_parameters():
        x, y = got[f"gradient of {parameter}"], want[f"gradient of {parameter}"]
        assert (x - y).norm() < 1e-4 * y.norm(), parameter


@pytest.mark.parametrize("wanted", ["q", "k", "weight", "log_bandwidth", "all", "by-tokens"])
@pytest.mark.parametrize("heads", [None, HEADS], ids=["shared", "per-head"])
def test_query_bandwidths_and_their_gradients(heads, wanted):
    torch.manual_seed(1)
    kernel = mc.AdaptiveRBF(DIM, 2.0, heads=heads).to(DEVICE)
    torch.nn.init.normal_(kernel.weight, std=0.2)
    shape = (2, 70, HEADS, DIM) if wanted == "by-tokens" else (2, HEADS, 70, DIM)
    given = [torch.randn(shape, device=DEVICE) for _ in range(3)]
    if wanted == "by-tokens":
        given = [x.transpose(1, 2) for x in given]
    results = []
    for backend, turn in (("triton", lambda x: x), ("reference", lambda x: x.double())):
        own = kernel if backend == "triton" else double(kernel)
        q, k, v = (turn(x).detach() for x in given)
        named = {"q": q, "k": k, "v": v, **dict(own.named_parameters())}
        chosen = [x for name, x in named.items() if wanted in (name, "all", "by-tokens")]
        for x in named.values():
            x.requires_grad_(any(x is y for y in chosen))
        out = mc.smooth(own, q, k, v, filter=mc.Causal(), backend=backend)
        results.append(torch.autograd.grad(out.square().sum(), chosen))
    for x, y in zip(*results, strict=True):
        assert (x - y).norm() < 1e-4 * y.norm()


def test_a_number_per_key_may_exceed_the_peak_of_a_distance(monkeypatch):
    kernel = (mc.RBF() * mc.ALiBi(torch.tensor([0.5, 0.25]))).to(DEVICE)
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    given = [torch.randn(1, 2, 40, DIM, device=DEVICE, dtype=dtype) for _ in range(3)]
    monkeypatch.setattr(triton_plan, "_plans", {})
    mc.smooth(kernel, *given, filter=mc.Causal(), backend="triton")
    assert [p.still for p in triton_plan._plans.values()] == [False]


def test_it_compiles_as_one_graph():
    kernel = mc.RBF(4.0, heads=2).to(DEVICE)
    q, k, v = inputs(kernel, Shape(queries=64, keys=64), 16, torch.float32, device=DEVICE)
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_()

    def run(q, k, v):
        return mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")

    wanted = (q.part("content"), k.part("content"), v, kernel.log_bandwidth)
    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out = call(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), wanted)))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + a.abs().max())


def test_a_compiled_graph_takes_other_lengths():
    kernel = mc.RBF(4.0, heads=2).to(DEVICE)
    compiled = torch.compile(
        lambda q, k, v: mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    for length in (40, 56, 72):
        q, k, v = torch.randn(3, 2, 2, length, 16, device=DEVICE)
        want = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
        assert torch.equal(compiled(q, k, v), want)


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Full()], ids=["causal", "full"])
def test_a_compiled_graph_forms_scores_of_distances(filter):
    table = torch.nn.Parameter(torch.randn(2, 7, 16, device=DEVICE))
    kernel = mc.Exponential() * mc.Lookup(table)
    given = [torch.randn(2, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def run(q, k, v):
        return mc.smooth(kernel, q, k, v, filter=filter, backend="triton")

    results = []
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        out = call(*given)
        results.append((out, *torch.autograd.grad(out.square().sum(), (*given, table))))
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + a.abs().max())


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Full(), mc.Window(9, 3)], ids=repr)
@pytest.mark.parametrize("clip", [1, 7, 60, 400])
def test_a_band_has_what_its_table_has(clip, filter):
    """Scores and tables of the same numbers, in a few granules, and their gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 2, 150, 16, generator=generator).to(DEVICE) for _ in range(4))
    rows = 0.3 * torch.randn(2, 2 * clip + 1, 16, generator=generator).to(DEVICE)
    given = [q, k, v, rows]
    for x in given:
        x.requires_grad_()
    results = []
    for scored in (True, False):
        bias = mc.Lookup(rows, scale=1.0)
        if not scored:
            # As a table, which a number for every distance makes of it.
            bias = bias * mc.Lookup(torch.zeros(3, 16, device=DEVICE))
        for backend in ("triton", "reference"):
            out, mass = mc.smooth(
                mc.Exponential() * bias,
                q,
                k,
                v,
                filter=filter,
                backend=backend,
                return_log_mass=True,
            )
            grads = torch.autograd.grad((out * g).sum() + mass.sum(), given)
            results.append((out, mass, *grads))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert (x - y).abs().max() <= 2e-5 * (1 + y.abs().max())


@pytest.mark.parametrize(
    "shape",
    [Shape(queries=90, keys=90), Shape(queries=40, keys=150, kv_heads=1), Shape(queries=9, keys=9)],
    ids=repr,
)
def test_pairs_that_are_stored_need_no_pass_over_queries(shape, monkeypatch):
    """Where a band has all pairs, the pass over keys stores their gradients in it."""
    monkeypatch.setattr(triton_plan, "STORED", 1)
    ran = []
    start = launches.Launch.__call__

    def call(self, *rest):
        ran.append(self.kernel.__name__)
        start(self, *rest)

    monkeypatch.setattr(launches.Launch, "__call__", call)
    rows = torch.randn(HEADS, 2 * 150 + 1, DIM, generator=torch.Generator().manual_seed(3))
    for filter in (mc.Causal(), mc.Memory(200)):
        compare(mc.Exponential() * mc.Lookup(rows), filter, shape)
    assert "deltas" in ran
    assert "backward_queries" not in ran


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_band_that_is_too_large_to_keep_is_formed_again(compiled, monkeypatch):
    table = torch.nn.Parameter(torch.randn(2, 15, 16, device=DEVICE))
    kernel = mc.Exponential() * mc.Lookup(table)
    given = [torch.randn(1, 2, 40, 16, device=DEVICE, requires_grad=True) for _ in range(3)]

    def run(*given):
        return mc.smooth(kernel, *given, filter=mc.Causal(), backend="triton")

    results = []
    for most in (tables.KEPT, 1):
        monkeypatch.setattr(tables, "KEPT", most)
        torch._dynamo.reset()
        call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
        out = call(*given)
        results.append((out, *torch.autograd.grad(out.square().sum(), (*given, table))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("clip", [5, 80])
def test_a_band_of_half_precision(clip, monkeypatch):
    """Scores are kept in float16, of rows in two halves; the stored pairs in the inputs' dtype."""
    monkeypatch.setattr(triton_plan, "STORED", 1)
    rows = torch.randn(2 * clip + 1, DIM, generator=torch.Generator().manual_seed(3))
    kernel = mc.Exponential() * mc.Lookup(rows)
    check_accuracy(kernel, heads=HEADS, dim=DIM, device=DEVICE, dtypes=(torch.float16,))


def test_scores_beyond_half_precision_are_its_largest():
    rows = torch.tensor([-300.0, 300.0, 200.0])[:, None].expand(3, 16).contiguous()
    kernel = (mc.Exponential() * mc.Lookup(rows)).to(DEVICE)
    given = [torch.full((1, 1, 3, 16), x, dtype=torch.float16, device=DEVICE) for x in (200.0, 0.0)]
    v = torch.arange(3.0, device=DEVICE).half()[None, None, :, None].expand(-1, -1, -1, 16)
    out = mc.smooth(kernel, *given, v, filter=mc.Causal(), backend="triton")
    # Those of distances 0 and 1 both are more than it has, so they come out alike, and finite.
    assert torch.equal(out[0, 0, :, 0].cpu(), torch.tensor([0.0, 0.5, 1.0]).half())


@pytest.mark.skipif(INTERPRETED, reason="float32, all that the interpreter has, holds nothing")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", ["exponential", "rbf-per-head", "eq-9"])
def test_what_stays_in_registers_changes_no_bit(name, dim, monkeypatch):
    kernel, shape = ALL[name]().to(DEVICE), Shape(queries=200, keys=200, values=dim)
    case = Case(kernel, mc.Causal(), shape, dim, 0, torch.bfloat16, DEVICE)
    held = case.run("triton")
    sizes = {key: size._replace(held=0) for key, size in block_sizes.SIZES.items()}
    assert sizes != block_sizes.SIZES
    monkeypatch.setattr(block_sizes, "SIZES", sizes)
    monkeypatch.setattr(triton_plan, "_plans", {})
    read = case.run("triton")
    assert all(torch.equal(held[name], read[name]) for name in held)


# Of GPUs: 99 KiB on most, 163 on an A100, 227 on Hopper.
@pytest.mark.parametrize("most", [101376, 166912, device.HOPPER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_fit_into_the_shared_memory(most, dtype):
    for (kind, bucket, needs), sizes in block_sizes.SIZES.items():
        # A bucket of widths counts float32 twice.
        width = bucket // 2 if dtype == torch.float32 else bucket
        second = width // 2 if needs == "parts" else 0
        constants = {"E0": width - second, "E1": second, "V": min(width, 128)}
        constants["CLIP"] = 64 if needs in ("table", "near") else -1
        plan = SimpleNamespace(constants=constants, dtype=dtype)
        found = block_sizes.fitted(kind, sizes, plan, most)
        assert block_sizes.bytes_of(kind, found, plan) <= most
        assert min(found.queries, found.keys) >= 16
        if most == device.HOPPER and dtype == torch.bfloat16:
            assert found == sizes


@pytest.mark.parametrize("name", ["rbf-per-head", "eq-9", "polynomial"])
def test_smaller_blocks_give_the_same(name, monkeypatch):
    monkeypatch.setattr(select, "shared_memory", lambda device: 12 * 1024)
    monkeypatch.setattr(triton_plan, "_plans", {})
    compare(ALL[name](), mc.Causal(), Shape(queries=70, keys=70, values=16))


def test_the_widest_heads():
    compare(mc.RBF(8.0), mc.Causal(), Shape(batch=1, queries=70, keys=70, values=256), 256)


def test_two_wide_parts_take_a_pass_each():
    kernel = mc.Exponential() * mc.Exponential(on="position")
    compare(kernel, mc.Causal(), Shape(queries=70, keys=70, values=16), 128)


def steps(kernel, filter, monkeypatch, parts=2, passes=1, **shape):
    """A few queries against 1500 keys, beside the reference; the kernels started."""
    found, started = [], []
    cut, start = triton_launch._parts, launches.Launch.__call__
    monkeypatch.setattr(
        triton_launch, "_parts", lambda *given: found.append(cut(*given)) or found[-1]
    )

    def call(self, *rest):
        started.append((self.kernel.__name__, self.constants))
        start(self, *rest)

    monkeypatch.setattr(launches.Launch, "__call__", call)
    kernel = kernel.to(DEVICE)
    shape = Shape(**{"batch": 2, "queries": 3, "keys": 1500} | shape)
    case = Case(kernel, filter, shape, DIM, 0, torch.float32, DEVICE)
    q, k, v = case.inputs()
    with torch.no_grad():
        got = mc.smooth(kernel, q, k, v, filter=filter, backend="triton", return_log_mass=True)
    want = case.run("reference", log_mass=True, wide=True)
    assert found == [parts] * passes
    assert (got[0] - want["out"]).abs().max() < 1e-5
    assert (got[1] - want["log_mass"]).abs().max() < 1e-4
    return started


@pytest.mark.parametrize("name", ["rbf-per-head", "adaptive", "polynomial", "eq-9"])
@pytest.mark.parametrize(
    "filter", [mc.Causal(), mc.Padding([300, 1500])], ids=["causal", "padding"]
)
def test_few_queries_cut_the_keys_into_parts(name, filter, monkeypatch):
    steps(ALL[name](), filter, monkeypatch)


@pytest.mark.parametrize(("keys", "parts"), [(1600, 3), (2700, 5), (3100, 6)])
def test_few_queries_cut_the_keys_into_any_number_of_parts(keys, parts, monkeypatch):
    steps(ALL["rbf-per-head"](), mc.Causal(), monkeypatch, parts, keys=keys)
    given = with_places(groups=2, keys=keys)
    got, want, started = beside_reference(EQ_9, *given, filter=mc.Causal())
    assert [n for n, _ in started] == ["forward", "merge"]
    assert (got[0] - want[0]).abs().max() < 1e-5
    assert (got[1] - want[1]).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["laplace", "rational", "matern-1/2", "matern-3/2", "matern-5/2"])
@pytest.mark.parametrize(
    "filter", [mc.Causal(), mc.Padding([300, 1500])], ids=["causal", "padding"]
)
def test_to_few_queries_keys_are_read_once(name, filter, monkeypatch):
    started = steps(ALL[name](), filter, monkeypatch)
    # The norms of queries alone have a kernel of their own: four heads of three.
    assert [name for name, _ in started] == ["half_norms", "forward", "merge"]
    assert dict(started)["forward"]["SLOT0"].inside


@pytest.mark.parametrize("name", ["rbf-per-head", "laplace", "cosine", "lookup"])
def test_few_queries_of_many_heads_have_all_keys_in_one_part(name, monkeypatch):
    monkeypatch.setattr(triton_launch, "processors", lambda device: 1)
    kernel = ALL[name]() * mc.Exponential() if name == "lookup" else ALL[name]()
    started = dict(steps(kernel, mc.Causal(), monkeypatch, parts=1))
    assert "merge" not in started
    assert not started["forward"]["SPLIT"]
    assert started["forward"]["BM"] == 16


def _per_head(heads):
    """Kernels with separate parameters for each head."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(heads, 121, DIM, generator=draw)
    adaptive = mc.AdaptiveRBF(DIM, heads=heads)
    adaptive.weight.data = torch.randn(heads, DIM, generator=draw) * DIM**-0.5
    widths = torch.linspace(1.0, 3.0, heads).tolist()
    slopes = torch.linspace(0.01, 0.1, heads).tolist()
    return {
        "exponential": mc.Exponential(),
        "rbf": mc.RBF(widths),
        "adaptive": adaptive,
        "polynomial": mc.Polynomial(2),
        "rational": mc.RationalQuadratic(widths),
        "laplace": mc.Laplace(widths),
        "cosine": mc.Cosine(),
        "lookup": mc.Exponential() * mc.Lookup(rows),
        "rbf*lookup": mc.RBF(widths) * mc.Lookup(rows),
        "laplace*rbf": mc.Laplace(widths) * mc.RBF(widths, on="position"),
        "eq-9": mc.Exponential() * mc.Exponential(on="position"),
        "alibi": mc.Exponential() * mc.ALiBi(slopes),
        "rbf*alibi": mc.RBF(widths) * mc.ALiBi(slopes),
        "laplace*alibi": mc.Laplace(widths) * mc.ALiBi(slopes),
        "eq-9*alibi": mc.Exponential() * mc.Exponential(on="position") * mc.ALiBi(slopes),
    }


@pytest.mark.parametrize(
    ("heads", "kv_heads", "parts"), [(4, 2, 2), (6, 1, 2), (17, 1, 1)], ids=["2", "6", "17"]
)
@pytest.mark.parametrize("name", _per_head(2))
def test_heads_that_share_keys_read_them_once_for_one_query(
    name, heads, kv_heads, parts, monkeypatch
):
    # As the interpreter has it: on a GPU there is room for more parts.
    monkeypatch.setattr(triton_launch, "processors", lambda device: 16)
    kernel, filter = _per_head(heads)[name], mc.Causal()
    shape = {"heads": heads, "kv_heads": kv_heads, "queries": 1}
    started = steps(kernel, filter, monkeypatch, parts, **shape)
    (forward,) = (constants for kernel, constants in started if kernel == "forward")
    assert forward["GROUPED"] == (heads // kv_heads <= 16)


@pytest.mark.parametrize(
    "filter",
    [mc.Full(), mc.Window(700, 0), mc.Window(3, 5), mc.Padding([300, 1500]), mc.Strided(60),
     mc.Causal() & mc.Documents(torch.arange(1500).expand(2, -1) // 400)],
    ids=["full", "window", "near", "padding", "strided", "documents"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["rbf", "lookup", "alibi"])
def test_a_group_of_heads_is_at_one_place(name, filter, monkeypatch):
    shape = {"heads": 6, "kv_heads": 2, "queries": 1}
    started = dict(steps(_per_head(6)[name], filter, monkeypatch, **shape))
    assert started["forward"]["GROUPED"]


@pytest.mark.parametrize("name", ["rbf", "lookup"])
def test_a_group_of_heads_in_a_compiled_graph(name):
    kernel = _per_head(6)[name].to(DEVICE)
    shape = Shape(batch=2, heads=6, kv_heads=2, queries=1, keys=600)
    case = Case(kernel, mc.Causal(), shape, DIM, 0, torch.float32, DEVICE)
    q, k, v = case.inputs()

    def call(*given):
        return mc.smooth(kernel, *given, filter=mc.Causal(), backend="triton")

    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
        # Scales are formed by torch in the one, and by the kernel in the other.
        assert (compiled - call(q, k, v)).abs().max() < 1e-6


@pytest.mark.parametrize("scale", [0.5, 10.0])
@pytest.mark.parametrize(
    "filter", [mc.Causal(), mc.Padding([300, 1500])], ids=["causal", "padding"]
)
def test_few_queries_take_features_of_any_norm_as_given(scale, filter, monkeypatch):
    started = steps(mc.Cosine(scale), filter, monkeypatch)
    assert [name for name, _ in started] == ["forward", "merge"]


@pytest.mark.parametrize("keys", [100, 1500], ids=["whole", "parts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_queries_and_keys_of_any_norm(keys, dtype):
    """Vectors of norm zero, very small and very large norms, and some that are not finite."""
    if INTERPRETED and dtype != torch.float32:
        pytest.skip("the interpreter has float32 alone")
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=draw) for n in (2, keys, keys))
    size = torch.logspace(-15, 15, keys)
    size[::7] = 0.0
    q = q * torch.tensor([3e-13, 3e4])[:, None]
    q, k, v = (x.to(DEVICE, dtype) for x in (q, k * size[:, None], v))
    k[:, 1, 5, 3] = float("nan")
    for kernel in (mc.Cosine(), mc.Cosine() * mc.ALiBi([0.1, 0.2]).to(DEVICE)):
        with torch.no_grad():
            out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
        want = mc.smooth(
            kernel, q.double(), k.double(), v.double(), filter=mc.Causal(), backend="reference"
        )
        assert out[:, 1].isnan().all()
        assert want[:, 1].isnan().all()
        assert (out - want)[:, 0].abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)
        q.requires_grad_()
        # With gradients, both are taken to length 1 before.
        taught = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
        assert taught.requires_grad
        assert (taught - want)[:, 0].abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)
        q.requires_grad_(False)


SUMMANDS = [
    "exponential", "rbf", "adaptive", "polynomial", "rational", "cosine", "laplace", "exponential"
]  # fmt: skip


@pytest.mark.parametrize("both", list(itertools.pairwise(SUMMANDS)), ids="+".join)
@pytest.mark.parametrize(
    ("filter", "queries"),
    [(mc.Causal(), 1), (mc.Full(), 3), (mc.Window(700, 0), 3), (mc.Padding([300, 1500]), 3)],
    ids=["causal", "full", "window", "padding"],
)
def test_few_queries_read_keys_once_for_two_terms(both, filter, queries, monkeypatch):
    kernels = [_per_head(4)[name] for name in both]
    for first, second in (kernels, kernels[::-1]):
        with monkeypatch.context() as patch:
            started = steps(first + second, filter, patch, heads=4, queries=queries)
        (forward,) = (constants for name, constants in started if name == "forward")
        assert forward["SUMMED"]
        # The others are about queries alone.
        assert {name for name, _ in started} <= {"half_norms", "steer", "forward", "merge"}


@pytest.mark.parametrize("both", [("rbf", "exponential"), ("cosine", "adaptive")], ids="+".join)
def test_heads_that_share_keys_read_them_once_for_two_terms(both, monkeypatch):
    first, second = (_per_head(6)[name] for name in both)
    shape = {"heads": 6, "kv_heads": 2, "queries": 1}
    started = dict(steps(first + second, mc.Causal(), monkeypatch, **shape))
    assert started["forward"]["GROUPED"]
    assert started["forward"]["SUMMED"]


@pytest.mark.parametrize(
    ("names", "passes"),
    [(("rbf", "rbf"), 1), (("adaptive", "adaptive"), 1), (("exponential", "eq-9"), 2),
     (("rbf", "rbf*alibi"), 2), (("lookup", "exponential"), 2),
     (("rbf", "laplace", "exponential"), 2), (("alibi", "rbf", "laplace"), 2)],
    ids=lambda x: "+".join(x) if isinstance(x, tuple) else "",
)  # fmt: skip
def test_few_queries_and_any_sum(names, passes, monkeypatch):
    """Two terms at a time, if they have one factor each and the same features."""
    first, *others = (_per_head(4)[name] for name in names)
    steps(sum(others, first), mc.Causal(), monkeypatch, passes=passes, heads=4)


def test_few_queries_of_a_sum_that_see_what_is_not_finite():
    kernel = mc.RBF(2.0).to(DEVICE) + mc.Exponential()
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 3, n, DIM, generator=draw).to(DEVICE) for n in (2, 600, 600))
    clean = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
    k[:, 0, 599, 2] = float("nan")
    v[:, 1, 599, 0] = float("inf")
    q[:, 2, 0, 1] = float("nan")
    with torch.no_grad():
        out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
    want = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="reference")
    assert torch.equal(out.isnan(), want.isnan())
    fine = ~want.isnan()
    assert 0 < fine.sum() < fine.numel()
    assert (out - clean)[fine].abs().max() < 1e-5


@pytest.mark.parametrize("clip", [1, 60, 400, 1000, 2000])
@pytest.mark.parametrize(
    "filter",
    [mc.Causal(), mc.Full(), mc.Window(900, 0), mc.Window(40, 2), mc.Padding([300, 1500])],
    ids=repr,
)
def test_few_queries_cut_the_keys_of_a_table_into_parts(clip, filter, monkeypatch):
    rows = torch.randn(2 * clip + 1, DIM, generator=torch.Generator().manual_seed(3))
    steps(mc.Exponential() * mc.Lookup(rows), filter, monkeypatch)


@pytest.mark.parametrize("name", ["rbf-per-head", "laplace", "eq-9", "alibi"])
def test_few_queries_cut_the_keys_of_a_table_and_another_kernel(name, monkeypatch):
    rows = torch.randn(HEADS, 121, DIM, generator=torch.Generator().manual_seed(3))
    steps(ALL[name]() * mc.Lookup(rows) * mc.Exponential(), mc.Causal(), monkeypatch)


def with_places(batches=(1, 1), groups=4, queries=1, keys=1500, batch=3, dim=DIM, places=DIM):
    """Queries, keys and values of a batch, with places that it may share; four heads."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=draw).to(DEVICE)

    q = mc.Features(
        content=normal(batch, 4, queries, dim), position=normal(batches[0], 4, queries, places)
    )
    k = mc.Features(
        content=normal(batch, groups, keys, dim), position=normal(batches[1], groups, keys, places)
    )
    return q, k, normal(batch, groups, keys, 16)


def beside_reference(kernel, q, k, v, **options):
    """(out, log_mass) of the fused kernels and of the reference, and the kernels started."""
    started, start = [], launches.Launch.__call__

    def call(self, *rest):
        started.append((self.kernel.__name__, self.constants))
        start(self, *rest)

    options["return_log_mass"] = True
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches.Launch, "__call__", call)
        got = mc.smooth(kernel, q, k, v, **options, backend="triton")
        exact = (q.to(torch.float64), k.to(torch.float64), v.double())
        want = mc.smooth(kernel, *exact, **options, backend="reference")
    return got, want, started


EQ_9 = mc.Exponential() * mc.Exponential(on="position")


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize(
    "filter",
    [
        mc.Causal(),
        mc.Padding([300, 1500, 40]),
        mc.Causal() & mc.Padding([1500, 20, 0]),
        mc.Window(700, 0),
        mc.Strided(32),
        mc.Causal() & mc.Documents(torch.arange(3 * 1500).view(3, 1500) // 400),
    ],
    ids=["causal", "padding", "both", "window", "strided", "documents"],
)
@pytest.mark.parametrize(
    ("batches", "groups", "queries"),
    [((1, 1), 4, 1), ((1, 1), 2, 1), ((1, 1), 4, 2), ((1, 3), 4, 1), ((3, 1), 4, 1)],
    ids=["shared", "grouped", "two-queries", "own-keys", "own-query"],
)
def test_sequences_may_share_places(batches, groups, queries, filter, alibi):
    kernel = EQ_9 * mc.ALiBi([0.01, 0.02, 0.03, 0.04]) if alibi else EQ_9
    given = with_places(batches, groups, queries)
    got, want, started = beside_reference(kernel.to(DEVICE), *given, filter=filter)
    assert [name for name, _ in started][-2:] == ["forward", "merge"]
    assert (got[0] - want[0]).abs().max() < 1e-5
    empty = want[1] == -math.inf
    assert torch.equal(got[1] == -math.inf, empty)
    assert (got[1] - want[1])[~empty].abs().max() < 1e-4
    again, _, _ = beside_reference(kernel, *given, filter=filter)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@pytest.mark.parametrize("dim", [18, 128, 200])
@pytest.mark.parametrize("parts", [1, 2])
def test_sequences_that_share_places_have_features_of_any_width(dim, parts, monkeypatch):
    monkeypatch.setattr(triton_launch, "processors", lambda device: 6 * (parts - 1) + 1)
    kernel = mc.Exponential(scale=dim**-0.5) * mc.Exponential(scale=dim**-0.5, on="position")
    given = with_places(groups=2, keys=1030, dim=dim, places=24)
    got, want, started = beside_reference(kernel, *given, filter=mc.Causal())
    assert [n for n, _ in started] == ["forward", "merge"][:parts]
    assert (got[0] - want[0]).abs().max() < 1e-5
    assert (got[1] - want[1]).abs().max() < 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_sequences_that_share_places_share_nothing_else(value):
    q, k, v = with_places(groups=2)
    lengths = torch.tensor([1500, 700, 1500])
    want, _, _ = beside_reference(EQ_9, q, k, v, filter=mc.Padding(lengths))
    # Seen by the first sequence, and by nobody.
    v[0, 0, 1200, 3] = value
    v[1, 1, 1200, 3] = value
    got, _, _ = beside_reference(EQ_9, q, k, v, filter=mc.Padding(lengths))
    assert not got[0][0, :2, 0, 3].isfinite().any()
    assert torch.equal(got[0][1:], want[0][1:])
    assert torch.equal(got[0][0, 2:], want[0][0, 2:])


def _expanded(q, k, v):
    """Places that are there for every sequence, in one piece of memory."""
    q, k = (
        mc.Features(content=x.part("content"), position=x.part("position").expand(3, -1, -1, -1))
        for x in (q, k)
    )
    return q, k, v


def _first_sequence(q, k, v):
    return q, mc.Features(content=k.part("content")[:1], position=k.part("position")), v[:1]


def _odd_strides(q, k, v):
    """Keys and values that TMA cannot read."""
    k = mc.Features(content=_apart(k.part("content")), position=_apart(k.part("position")))
    return q, k, _apart(v)


def _apart(x):
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def _two_heads_of_places(q, k, v):
    return q, mc.Features(content=k.part("content"), position=k.part("position")[:, :2]), v


@pytest.mark.parametrize("turned", [False, True], ids=["places-last", "places-first"])
@pytest.mark.parametrize(
    "change",
    [lambda *given: given, _expanded, _first_sequence, _odd_strides, _two_heads_of_places],
    ids=["plain", "expanded", "first-sequence", "odd-strides", "two-heads"],
)
def test_places_are_shared_in_any_layout(change, turned):
    given = change(*with_places())
    kernel = mc.Exponential(on="position") * mc.Exponential() if turned else EQ_9
    # Two calls are as one: the second makes notes, and the third repeats them.
    for _ in range(3):
        got, want, _ = beside_reference(kernel, *given, filter=mc.Causal())
        assert (got[0] - want[0]).abs().max() < 1e-5
        assert (got[1] - want[1]).abs().max() < 1e-4


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("part", ["content", "position"])
@pytest.mark.parametrize(
    "kernel",
    [
        EQ_9,
        mc.Exponential(on="position") * mc.RBF(2.0),
        mc.Exponential(on="position") * mc.AdaptiveRBF(DIM),
        mc.Exponential(on="position") * mc.Laplace(2.0),
        EQ_9 * mc.Lookup(torch.randn(9, DIM, generator=torch.Generator().manual_seed(1))),
    ],
    ids=["eq-9", "rbf", "adaptive", "laplace", "lookup"],
)
@pytest.mark.parametrize("groups", [4, 2])
def test_queries_of_one_head_are_those_of_all(kernel, part, queries, groups):
    q, k, v = with_places((3, 3), groups, queries, keys=600)
    names = {"content": q.part("content"), "position": q.part("position")}
    names[part] = names[part][:, :1].contiguous()
    kernel = kernel.to(DEVICE)
    found = []
    for backend, wide in (("triton", False), ("reference", True)):
        leaves = [*names.values(), k.part("content"), k.part("position"), v]
        leaves = [(x.double() if wide else x).detach().requires_grad_() for x in leaves]
        content, position, *keys, values = leaves
        out = mc.smooth(
            kernel.double() if wide else kernel,
            mc.Features(content=content, position=position),
            mc.Features(content=keys[0], position=keys[1]),
            values, filter=mc.Causal(), backend=backend,
        )  # fmt: skip
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        kernel.float()
    for got, want in zip(*found, strict=True):
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-4 * (1 + want.abs().max())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["rbf-per-head", "eq-9", "polynomial"])
def test_token_major_tensors_give_the_same_in_that_layout(name, compiled):
    kernel = ALL[name]().to(DEVICE)
    shape = Shape(queries=40, keys=40, values=16)
    q, k, v = inputs(kernel, shape, DIM, torch.float32, device=DEVICE)

    def run(turn):
        given = [turn(x).requires_grad_() for x in (*q.tensors(), *k.tensors(), v)]
        n = len(q.tensors())
        parts = [
            mc.Features(**dict(zip((name for name, _ in x.items()), xs, strict=True)))
            for x, xs in ((q, given[:n]), (k, given[n : 2 * n]))
        ]

        def call(a, b, c):
            return mc.smooth(kernel, a, b, c, filter=mc.Causal(), backend="triton")

        if compiled:
            call = torch.compile(call, fullgraph=True, backend="aot_eager")
        out = call(*parts, given[-1])
        return out, *torch.autograd.grad(out.square().sum(), [*given, *kernel.parameters()])

    plain = run(lambda x: x.clone())
    turned = run(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert turned[0].transpose(1, 2).is_contiguous()
    for a, b in zip(plain, turned, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["eq-9", "rbf*rbf"])
@pytest.mark.parametrize("room", [triton_launch.ROOM, 1], ids=["at-once", "in-turn"])
def test_keys_without_a_gradient_change_no_other(name, room, monkeypatch):
    """Such as positions: a part of the pass over keys that has only such keys is left out."""
    monkeypatch.setattr(triton_launch, "ROOM", room)
    kernel = ALL[name]().to(DEVICE)
    q, k, v = inputs(kernel, Shape(queries=40, keys=40), DIM, torch.float32, device=DEVICE)

    def run(*learned):
        for x in (*q.tensors(), *k.tensors(), v):
            x.requires_grad_(False)
        for x in learned:
            x.requires_grad_()
        out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend="triton")
        return torch.autograd.grad(out.square().sum(), [*learned, *kernel.parameters()])

    parts = []
    start = launches.Launch.__call__

    def call(self, *rest):
        parts.append(self.constants.get("PART"))
        start(self, *rest)

    most = (*q.tensors(), k.part("content"), v)
    every = run(*most, k.part("position"))
    monkeypatch.setattr(launches.Launch, "__call__", call)
    few = run(*most)
    # Keys of a distance have a share in the gradient of its bandwidth.
    assert {part for part in parts if part is not None} == (
        {1} if name == "eq-9" else {1, 2} if room == 1 else {0}
    )
    both = zip(few, every[: len(most)] + every[len(most) + 1 :], strict=True)
    assert all(torch.equal(a, b) for a, b in both)


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Window(9, 0), mc.Full()], ids=str)
@pytest.mark.parametrize("shape", [Shape(queries=70, keys=70), Shape(queries=5, keys=40)], ids=str)
def test_scores_of_sinusoids_need_no_distances_that_are_not_seen(filter, shape, monkeypatch):
    monkeypatch.setattr(triton_backend, "with_table", lambda task, _: with_table(task, 5))
    counts, form = [], tables.form

    def noted(bias, static, v):
        counts.append((bias.rows.shape[1], static.clip))
        return form(bias, static, v)

    monkeypatch.setattr(tables, "form", noted)
    weight = torch.nn.Parameter(torch.randn(HEADS, DIM, 6) * 0.5)
    kernel = mc.Exponential() * mc.RelativeSinusoid("content", weight=weight)
    compare(kernel, filter, shape)
    count = shape.keys + 1 if isinstance(filter, mc.Causal) else 2 * shape.keys + 1
    assert set(counts) == {(count, shape.keys)}


@pytest.mark.parametrize("mode", [1, 2])
def test_columns_add_up_to_their_numbers(mode):
    """The kernels for Hopper multiply three columns by ones, and need the fourth for sums."""
    features = torch.randn(2, 3, 40, 6, device=DEVICE).half()
    norms, both = numbers._norms(features, features, None, (2, 3, 40), mode)
    assert torch.allclose(norms, -features.float().square().sum(-1) / 2)
    for columns in (both, numbers._columns(norms, torch.float16, mode)):
        assert torch.allclose(columns[..., :3].float().sum(-1), norms)
        assert (columns[..., 3] == float(mode == 2)).all()
        assert (columns[..., 4:] == 0).all()


@pytest.mark.parametrize("shape", [(2, 3, 40, 6), (1, 2, 33, 128)], ids=str)
def test_sinusoids_are_turned_in_one_pass(shape):
    """The same as by complex numbers in float32, but for one rounding; and back."""
    *others, length, width = shape
    wide = torch.randn(*others, length, 2 * width, device=DEVICE).half()
    c = wide[..., :width].requires_grad_()
    factor = sinusoids.SinusoidFactor(asking=c, weight=None, base=1e4, num_keys=length)
    turned = queries(factor, torch.float16)
    assert turned.dtype == torch.float16
    exact = c.detach().float().requires_grad_()
    want = sinusoids.turned(exact, 1e4)
    steer = torch.randn(shape, device=DEVICE).half()
    (got_grad,) = torch.autograd.grad(turned, c, steer)
    (want_grad,) = torch.autograd.grad(want, exact, steer.float())
    for got, wanted in ((turned, want), (got_grad, want_grad)):
        assert (got.float() - wanted).abs().max() <= 5e-4 * (1 + wanted.abs().max())


def test_a_scale_of_zero_divides_nothing():
    slopes = mc.ALiBi([0.5, 0.25])
    for kernel in (
        mc.Exponential(0.0) * slopes,
        mc.Exponential(0.0) * mc.Exponential(on="position"),
    ):
        compare(kernel, mc.Causal(), Shape(queries=11, keys=11))


@pytest.mark.parametrize("turns", [False, True])
def test_forward_derivatives_and_vmap_are_refused_where_nothing_learns(turns):
    """Kernels then run without autograd: the derivative must not silently be zero."""
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    kernel = mc.RBF([1.0, 2.0], trainable=False).to(DEVICE)
    q, k, v = (torch.randn(2, 2, 40, 16, device=DEVICE, dtype=dtype) for _ in range(3))
    if turns:
        kernel = mc.Exponential() * mc.RelativeSinusoid()
        # Features of their own: only the coefficients have a derivative.
        content = torch.randn_like(q)

    def run(x):
        if turns:
            x = mc.Features(content=content, relative=x)
        return mc.smooth(kernel, x, k, v, backend="triton")

    assert run(q).grad_fn is None
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        run(forward_ad.make_dual(q, torch.ones_like(q)))
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(run)(q[None])
