"""The contract of every backend: shapes, dropout, bits, NaN, memory, compilation."""

import math

import pytest
import torch
from catalogue import COMPOSED, DIM, FILTERS, HEADS, KERNELS

import mercer as mc
from mercer.backends.chunked import blocks
from mercer.backends.sdpa import flash_with_mass
from mercer.testing import Shape, check_accuracy, inputs

BACKENDS = ("reference", "chunked", "sdpa")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("batch", "queries", "keys"),
    [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (1, 1, 1), (2, 5, 3)],
    ids=str,
)
def test_empty_and_tiny_inputs(backend, batch, queries, keys):
    q = random(batch, 2, queries, 4).requires_grad_()
    k, v = random(batch, 2, keys, 4), random(batch, 2, keys, 3)
    if backend == "sdpa" and 0 in (batch, queries, keys):
        with pytest.raises(ValueError, match="the batch or the sequence is empty"):
            mc.smooth(mc.RBF(), q, k, v, backend=backend)
        backend = "auto"
    kernel = mc.RBF().to(DEVICE)
    out, mass = mc.smooth(kernel, q, k, v, backend=backend, return_log_mass=True)
    assert out.shape == (batch, 2, queries, 3)
    assert mass.shape == (batch, 2, queries)
    out.sum().backward()
    if keys == 0:
        assert (out == 0).all()
        assert (mass == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("filter", ["padding", "either", "packed"])
def test_rows_that_see_nothing_are_zero(backend, filter):
    filter = FILTERS[filter]()
    q, k, v = (random(2, 2, 11, 4) for _ in range(3))
    blind = ~filter.mask(11, 11, DEVICE).expand(2, 2, 11, 11).any(-1)
    out, mass = mc.smooth(
        mc.Exponential(), q, k, v, filter=filter, backend=backend, return_log_mass=True
    )
    assert (out[blind] == 0).all()
    assert (mass[blind] == -math.inf).all()
    assert mass[~blind].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("filter", ["full", "causal", "window", "padding"])
def test_nan_reaches_the_rows_that_see_it_and_no_other(backend, bad, which, filter):
    tensors = {name: random(2, 2, 11, 4) for name in "qkv"}
    tensors[which][0, 1, 6, 2] = bad
    kernel = mc.RBF().to(DEVICE)
    mask = FILTERS[filter]().mask(11, 11, DEVICE).expand(2, 2, 11, 11)
    want = torch.zeros(2, 2, 11, dtype=torch.bool, device=DEVICE)
    if which == "q":
        want[0, 1, 6] = True
    else:
        want[0, 1] = mask[0, 1, :, 6]
    out, mass = mc.smooth(
        kernel,
        *tensors.values(),
        filter=FILTERS[filter](),
        backend=backend,
        return_log_mass=True,
    )
    assert torch.equal(out.isnan().all(-1), want)
    assert torch.equal(out.isnan().any(-1), want)
    assert torch.equal(mass.isnan(), want)


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_hidden_nan_spoils_no_gradient(backend):
    q, k, v = (random(2, 2, 11, 4) for _ in range(3))
    k[:, :, 9:], v[:, :, 9:] = math.nan, math.inf
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    filter = mc.Padding([9, 4])
    out = mc.smooth(mc.Exponential(), q, k, v, filter=filter, backend=backend)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_in_later_places_spoils_no_gradient_of_earlier_ones(backend, which):
    """A loss over rows that see nothing broken has finite gradients, bandwidth included."""
    tensors = {name: random(1, 2, 9, 4) for name in "qkv"}
    clean = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    tensors[which][:, :, 6] = math.nan
    broken = {name: x.requires_grad_() for name, x in tensors.items()}
    kernel = mc.RBF().to(DEVICE)
    grads = []
    for given in (clean, broken):
        out = mc.smooth(kernel, *given.values(), filter=mc.Causal(), backend=backend)
        wanted = (*given.values(), kernel.log_bandwidth)
        grads.append(torch.autograd.grad(out[:, :, :6].square().sum(), wanted))
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-5 * (1 + a.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_large_norms_stay_finite(backend, kernel):
    kernel = KERNELS[kernel]().to(DEVICE)
    q, k, v = inputs(kernel, Shape(heads=HEADS, queries=17, keys=17), DIM)
    q, k = (mc.Features(**{n: x * 1e3 for n, x in f.items()}) for f in (q, k))
    q, k, v = (x.to(torch.bfloat16).to(DEVICE) for x in (q, k, v))
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_()
    try:
        out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend=backend)
    except ValueError as refusal:
        assert backend == "sdpa" and "cannot run this" in str(refusal)  # noqa: PT017, PT018
        return
    assert out.isfinite().all()
    if kernel.positive:
        assert out.abs().max() <= v.abs().max() * 1.02
    grads = torch.autograd.grad(out.sum(), (*q.tensors(), *k.tensors(), v), allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("name", ["rbf-fixed", "alibi", "eq-9", "transformer-xl", "polynomial"])
def test_the_error_budget_at_width_64(name):
    """Inputs for which a number per key rounded to bfloat16 gives an error of 1e-2."""
    kernel = (KERNELS | COMPOSED)[name]()
    if name == "alibi":
        kernel = mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(HEADS))
    check_accuracy(kernel, heads=HEADS, dim=64, device=DEVICE)


def test_a_number_per_key_is_not_rounded():
    """Keys that differ in their norm alone, by less than bfloat16 tells apart."""
    q = torch.zeros(1, 1, 1, 2, dtype=torch.bfloat16)
    k = torch.tensor([[16.0, 0.0], [16.0, 1.0]], dtype=torch.bfloat16)[None, None]
    v = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)[None, None]
    with torch.no_grad():
        out = mc.smooth(mc.RBF(1.0), q, k, v, backend="sdpa")
    # weights exp(-128) and exp(-128.5); in bfloat16 both would be exp(-128)
    assert abs(out[0, 0, 0, 0].item() - 1 / (1 + math.exp(0.5))) < 2e-3


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("kernel", ["rbf", "rbf+polynomial"])
def test_dropout_drops_weights_and_is_unbiased(backend, kernel):
    kernel = (KERNELS | COMPOSED)[kernel]()
    q, k = torch.randn(1, 1, 6, DIM), torch.randn(1, 1, 6, DIM)
    weights = torch.eye(6)[None, None]
    full = mc.smooth(kernel, q, k, weights, backend=backend)
    draws = torch.stack(
        [
            mc.smooth(kernel, q, k, weights, backend=backend, dropout_p=0.25).detach()
            for _ in range(400)
        ]
    )
    kept = (draws - full / 0.75).abs() < 1e-5
    assert (kept | (draws == 0)).all()
    assert abs((draws == 0).float().mean().item() - 0.25) < 0.02
    assert (draws.mean(0) - full).abs().max() < 0.1


def test_dropout_has_the_gradient_of_what_it_kept():
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        torch.manual_seed(3)
        return mc.smooth(mc.Exponential(), q, k, v, backend="chunked", dropout_p=0.4)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["rbf-per-head", "lookup", "buckets", "rbf+polynomial"])
@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_the_same_input_gives_the_same_bits(name, backend):
    kernel = (KERNELS | COMPOSED)[name]().to(DEVICE)
    q, k, v = (random(2, HEADS, 19, DIM).requires_grad_() for _ in range(3))
    runs = []
    for _ in range(2):
        try:
            out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend=backend)
        except ValueError:
            assert backend == "sdpa"
            return
        wanted = (q, k, v, *kernel.parameters())
        grads = torch.autograd.grad(out.square().sum(), wanted, materialize_grads=True)
        runs.append((out, *grads))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


COMPILED = ["rbf", "polynomial", "lookup", "alibi", "eq-9", "rbf+polynomial", "linear"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COMPILED)
def test_it_compiles_as_one_graph_forward_and_backward(backend, name):
    torch._dynamo.reset()
    kernel = (KERNELS | COMPOSED)[name]()
    q, k, v = inputs(kernel, Shape(queries=9, keys=9), DIM, torch.float32)
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_()
    filter = mc.Causal() & mc.Padding([9, 5])

    def run(q, k, v):
        return mc.smooth(kernel, q, k, v, filter=filter, backend=backend, return_log_mass=True)

    try:
        eager = run(q, k, v)
    except ValueError:
        assert backend == "sdpa"
        return
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v)
    named = [*q.tensors(), *k.tensors(), v, *kernel.parameters()]
    grads = []
    for out, mass in (eager, got):
        loss = out.square().sum() + mass.square().sum()
        grads.append(torch.autograd.grad(loss, named, allow_unused=True))
        assert (out - eager[0]).abs().max() < 1e-5
    for a, b in zip(*grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a - b).abs().max() < 1e-4 * (1 + a.abs().max())


def test_it_compiles_with_inductor_and_dropout():
    torch._dynamo.reset()
    kernel = mc.Laplace()
    q = torch.randn(1, 2, 40, 8, requires_grad=True)

    @torch.compile(fullgraph=True)
    def run(q):
        return mc.smooth(kernel, q, q, q, filter=mc.Causal(), dropout_p=0.5)

    out = run(q)
    out.sum().backward()
    assert (out == 0).any(-1).any()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_lowers_the_inputs_and_keeps_numbers_per_key(backend):
    kernel = mc.RBF(trainable=False)
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out, mass = mc.smooth(
            kernel, q @ torch.eye(16), k, v, backend=backend, return_log_mass=True
        )
    lowered = [x.bfloat16() for x in (q, k, v)]
    want = mc.smooth(kernel, *lowered, backend=backend)
    assert out.dtype == torch.bfloat16
    assert mass.dtype == torch.float32
    assert torch.equal(out, want)


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_a_named_backend_never_falls_back(backend, monkeypatch):
    """The reference must not be reached, even where the backend cannot run."""
    from mercer import smoother

    def unreachable(*args, **kwargs):
        raise AssertionError("fell back")

    monkeypatch.setattr(smoother, "reference", unreachable)
    q = torch.randn(1, 2, 5, DIM)
    mc.smooth(mc.RBF(), q, q, q, backend=backend)
    if backend == "sdpa":
        with pytest.raises(ValueError, match="s\\^2 is not the identity"):
            mc.smooth(mc.Polynomial(), q, q, q, backend=backend)


def test_blocks_that_see_nothing_are_not_computed(small_blocks, monkeypatch):
    from mercer.backends.chunked.blocks import Blocks

    visited = []
    scores = Blocks.scores
    monkeypatch.setattr(
        Blocks, "scores", lambda self, r, c: visited.append((r, c)) or scores(self, r, c)
    )
    q = torch.randn(1, 1, 64, 4)
    mc.smooth(mc.Exponential(), q, q, q, filter=mc.Window(4, 0), backend="chunked")
    # 16 blocks on the diagonal and 15 beside it, of 256
    assert len(visited) == 31


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads_equal_repeated_heads(heads, backend):
    q = random(2, 4, 7, 6)
    k, v = random(2, heads, 7, 6), random(2, heads, 7, 5)
    kernel = mc.RBF([1.0, 2.0, 3.0, 4.0]).to(DEVICE)
    got = mc.smooth(kernel, q, k, v, backend=backend)
    k, v = (x.repeat_interleave(4 // heads, 1) for x in (k, v))
    assert (got - mc.smooth(kernel, q, k, v, backend=backend)).abs().max() < 1e-5


def test_key_heads_may_differ_from_value_heads_and_parts_from_each_other():
    kernel = mc.Exponential() * mc.Exponential(on="position")
    q = mc.Features(content=random(2, 4, 5, 6), position=random(1, 4, 5, 3))
    k = mc.Features(content=random(2, 2, 5, 6), position=random(1, 1, 5, 3))
    v = random(2, 4, 5, 2)
    outs = [mc.smooth(kernel, q, k, v, backend=b) for b in BACKENDS]
    assert all((out - outs[0]).abs().max() < 1e-5 for out in outs)


@pytest.mark.parametrize("tokens", [False, True], ids=["by heads", "by tokens"])
def test_flash_attention_with_its_mass_is_as_a_compiled_graph_expects_it(tokens):
    q, k, v = torch.randn(3, 2, 31, 4, 8).transpose(2, 3) if tokens else torch.randn(3, 2, 4, 31, 8)
    given = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(flash_with_mass, (*given, None, True, 0.3))


def test_few_queries_have_many_keys_in_a_block(monkeypatch):
    seen = []
    scores = blocks.Blocks.scores

    def spy(self, rows, cols):
        seen.append((rows.stop - rows.start, cols.stop - cols.start))
        return scores(self, rows, cols)

    monkeypatch.setattr(blocks.Blocks, "scores", spy)
    k, v = torch.randn(2, 1, 8, 5000, 4).unbind()
    for queries, keys in ((1, 4096), (3, 4096), (60, 4096), (300, 512), (700, 512)):
        seen.clear()
        q = torch.randn(1, 8, queries, 4)
        out = mc.smooth(mc.RBF(), q, k, v, filter=mc.Causal(), backend="chunked")
        assert (min(queries, 512), keys) in seen
        assert max(a * b for a, b in seen) <= 512 * 512
        want = mc.smooth(mc.RBF(), q.double(), k.double(), v.double(), filter=mc.Causal())
        assert (out - want).abs().max() < 1e-4
    # A block that nobody sees is skipped all the same.
    seen.clear()
    mc.smooth(mc.RBF(), q[:, :, :1], k, v, filter=mc.Window(9, 0), backend="chunked")
    assert seen == [(1, 5000 - 4096)]
