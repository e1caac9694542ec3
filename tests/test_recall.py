"""Calls that are kept: what tells them apart, what they hold, and that they give the same."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import mercer as mc
from mercer import nn as mn
from mercer import smoother
from mercer.backends.runtime import replay as tapes
from mercer.backends.runtime.launch import INTERPRETED
from mercer.backends.triton.backend import INSTALLED
from mercer.bench.workload import Workload
from mercer.dispatch import recall
from mercer.term.derived import Again, Formed, Repeatable

pytestmark = [
    # The interpreter computes with numpy, which warns of its own.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CUDA = torch.cuda.is_available()
fused = pytest.mark.skipif(
    not (CUDA or (INSTALLED and INTERPRETED)), reason="needs a CUDA GPU or Triton's interpreter"
)


@pytest.fixture(autouse=True)
def _none_known(monkeypatch):
    monkeypatch.setattr(recall, "_known", {})
    monkeypatch.setattr(recall, "INTERPRETED", True)


def given(dtype=torch.float32, **options):
    return tuple(torch.zeros(1, 2, 3, 4, dtype=dtype, **options) for _ in range(3))


CAUSAL = mc.Causal()


def key(kernel, q, k, v, filter=CAUSAL, *options, more=()):
    call = recall.look(kernel, q, k, v, filter, *options, more=more)
    return None if call is None else call.key


def test_calls_that_differ_in_anything_but_numbers_are_told_apart():
    kernel, (q, k, v) = mc.RBF([1.0, 2.0]), given()
    wide = torch.zeros(1, 3, 2, 4).transpose(1, 2)
    alone = (kernel, q, k, v)
    calls = {
        "itself": alone,
        "filter": (*alone, mc.Full()),
        "window": (*alone, mc.Window(2, 0)),
        "longer window": (*alone, mc.Window(3, 0)),
        "backend": (*alone, mc.Causal(), "triton"),
        "log_mass": (*alone, mc.Causal(), "triton", True),
        "log_mass by number": (*alone, mc.Causal(), "triton", 1),
        "length": (kernel, q[:, :, :2], k, v),
        "layout": (kernel, wide, k, v),
        "dtype": (kernel, q.half(), k.half(), v.half()),
        "learned queries": (kernel, q.clone().requires_grad_(), k, v),
        "queries are keys": (kernel, q, q, v),
        "all are one": (kernel, q, q, q),
        "parts": (kernel, mc.Features(content=q), mc.Features(content=k), v),
        "more parts": (kernel, mc.Features(content=q, place=q), mc.Features(content=k), v),
        "other kernel": (mc.Laplace([1.0, 2.0]), q, k, v),
        "fixed bandwidth": (mc.RBF([1.0, 2.0], trainable=False), q, k, v),
        "one bandwidth": (mc.RBF(1.0), q, k, v),
        "default bandwidth": (mc.RBF(heads=2), q, k, v),
        "product": (mc.Exponential() * mc.ALiBi([1.0, 2.0]), q, k, v),
        "sum": (mc.Exponential() + mc.ALiBi([1.0, 2.0]), q, k, v),
        "product of others": (mc.Exponential(scale=0.3) * mc.ALiBi([1.0, 2.0]), q, k, v),
    }
    keys = {name: key(*call) for name, call in calls.items()}
    assert None not in keys.values()
    assert len(set(keys.values())) == len(keys)
    with torch.no_grad():
        assert key(*alone) != keys["itself"]
    assert key(kernel, *given()) == keys["itself"]
    more = {key(*alone, more=taps) for taps in ((None, v), (v, None), (v, k), (None, None))}
    assert len(more) == 4


def test_a_kernel_that_was_changed_is_another():
    kernel, tensors = mc.Exponential(scale=0.5) * mc.RBF([1.0, 2.0]), given()
    seen = {key(kernel, *tensors)}
    for change in (
        lambda: setattr(kernel.kernels[0], "scale", 0.25),
        lambda: setattr(kernel.kernels[0], "on", "place"),
        lambda: kernel.kernels[1].log_bandwidth.requires_grad_(False),
        lambda: kernel.double(),
        lambda: kernel.kernels.append(mc.Exponential()),
        lambda: setattr(kernel.kernels[1], "log_bandwidth", nn.Parameter(torch.zeros(1))),
    ):
        change()
        found = key(kernel, *tensors)
        assert found not in seen
        seen.add(found)


class Own(mc.RBF):
    """A user's kernel, of which nothing is known."""


class Subclass(torch.Tensor):
    """So is its lowering of such tensors."""


def test_what_is_not_known_to_be_safe_is_not_kept():
    q, k, v = given()
    for kernel in (Own(1.0), mc.RBF(1.0) + Own(1.0), mc.RBF(1.0) * Own(1.0), None):
        assert key(kernel, q, k, v) is None
    kernel = mc.RBF(1.0)
    assert key(kernel, q, k, v, mc.Padding([2])) is None
    assert key(kernel, q, k, v, mc.Causal() & mc.Window(1, 0)) is None
    assert key(kernel, q, k, v, mc.Causal(), ["triton"]) is None
    assert key(kernel, q, k, v, more=("taps",)) is None
    assert key(kernel, q.as_subclass(Subclass), k, v) is None
    assert key(kernel, "q", k, v) is None
    assert key(kernel, q, k, "v") is None
    assert key(kernel, q.to_sparse(), k, v) is None
    with torch.autocast("cpu"):
        assert key(kernel, q, k, v) is None


@pytest.fixture
def backend(monkeypatch):
    """A backend that says what it ran, in place of all others."""
    ran = []

    def function(options, *tensors):
        ran.append((options, tensors))
        return tensors[2] + len(ran), tensors[0][..., 0]

    def solve(problem, backend):
        ran.append("worked out")
        (rbf,) = (m for m in problem.kernel.modules() if isinstance(m, mc.RBF))
        log = rbf.log_bandwidth
        parts = [problem.q.part("content"), problem.k.part("content"), problem.v]
        formed = Formed(torch.exp, (log,))
        again = Again(function, "static", (*parts, None, formed, log))
        return Repeatable.of(problem.v * 1, None, again)

    monkeypatch.setattr(smoother, "solve", solve)
    return ran


def test_the_third_call_hands_over_its_own_tensors(backend):
    kernel = mc.RBF([1.0, 2.0])
    for _ in range(2):
        mc.smooth(kernel, *given())
    assert backend == ["worked out"] * 2
    q, k, v = (x + n for n, x in enumerate(given()))
    kernel.log_bandwidth = nn.Parameter(torch.tensor([3.0, 4.0]))
    out = mc.smooth(kernel, q, k, v)
    _, _, (options, tensors) = backend
    assert options == "static"
    assert all(x is y for x, y in zip(tensors[:3], (q, k, v), strict=True))
    assert tensors[3] is None
    assert torch.equal(tensors[4], torch.tensor([3.0, 4.0]).exp())
    assert tensors[5] is kernel.log_bandwidth
    assert torch.equal(out, v + 3)


def test_a_call_with_another_length_is_worked_out(backend):
    kernel = mc.RBF([1.0, 2.0])
    for length in (3, 3, 3, 2):
        mc.smooth(kernel, *(x[:, :, :length] for x in given()))
    assert [x for x in backend if x == "worked out"] == backend[:2] + backend[3:]
    with pytest.raises(ValueError, match="one length"):
        mc.smooth(kernel, *given()[:2], torch.zeros(1, 2, 2, 4))


def test_a_call_that_made_tensors_of_its_own_is_never_kept(monkeypatch):
    def solve(problem, backend):
        ran.append(1)
        return Repeatable.of(problem.v, None, Again(None, None, (problem.v * 2,)))

    ran = []
    monkeypatch.setattr(smoother, "solve", solve)
    for _ in range(4):
        mc.smooth(mc.Exponential(), *given())
    assert len(ran) == 4
    assert list(recall._known.values()) == [recall.Unkept.NEVER]


def test_no_tensor_of_a_call_is_held(backend):
    kernel, tensors = mc.RBF([1.0, 2.0]), given()
    for _ in range(3):
        mc.smooth(kernel, *tensors)
    backend.clear()
    dead = [weakref.ref(x) for x in (*tensors, kernel, kernel.log_bandwidth)]
    del kernel, tensors
    gc.collect()
    assert not any(x() is not None for x in dead)


def test_what_is_known_is_forgotten_before_it_is_too_much(backend, monkeypatch):
    monkeypatch.setattr(recall, "MOST", 3)
    for length in range(1, 8):
        mc.smooth(mc.RBF([1.0, 2.0]), *(torch.zeros(1, 2, length, 4) for _ in range(3)))
    assert len(recall._known) <= 3


KERNELS = [
    "softmax", "rbf", "alibi", "adaptive", "product", "relative-sinusoid", "lookup", "buckets",
    "laplace", "matern", "polynomial", "rational", "cosine",
]  # fmt: skip


@fused
@pytest.mark.parametrize("name", KERNELS)
def test_kept_calls_give_the_same_bits(name, monkeypatch):
    device = torch.device("cuda" if CUDA else "cpu")
    dtype = torch.bfloat16 if CUDA else torch.float32
    length, dim = (300, 128) if CUDA else (40, 16)
    shape = Workload(batch=2, heads=2, length=length, dim=dim, dtype=dtype, device=device)
    given = shape.inputs(name)
    named = given.named(parameters=True)
    for x in named.values():
        x.requires_grad_()

    def run():
        out = mc.smooth(
            given.kernel, given.q, given.k, given.v, filter=given.filter, backend="triton"
        )
        loss = (out.float() * torch.linspace(-1, 1, out.shape[-1], device=device)).sum()
        return out, *torch.autograd.grad(loss, list(named.values()), allow_unused=True)

    for _ in range(4):
        with torch.no_grad():
            for x in named.values():
                x.add_(0.1 * torch.randn_like(x))
        found = run()
        with monkeypatch.context() as off:
            off.setattr(tapes, "enabled", False)
            wanted = run()
        for x, y in zip(found, wanted, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)
    assert [type(x) for x in recall._known.values()] == [recall.Recipe]


@fused
def test_steps_of_a_sum_are_kept():
    device = torch.device("cuda" if CUDA else "cpu")
    kernel = (mc.RBF([1.0, 2.0]) + mc.Exponential()).to(device)
    for step in range(4):
        q, k, v = (torch.randn(2, 2, n, 16, device=device) for n in (1, 600, 600))
        with torch.no_grad():
            kernel.kernels[0].log_bandwidth.add_(0.1 * step)
            found = mc.smooth(kernel, q, k, v, backend="triton", return_log_mass=True)
        wanted = mc.smooth(kernel, q, k, v, backend="reference", return_log_mass=True)
        assert all((x - y).abs().max() < 1e-5 for x, y in zip(found, wanted, strict=True))
    assert [type(x) for x in recall._known.values()] == [recall.Recipe, recall.Unkept]


@fused
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_gaussian_layer_is_kept(adaptive):
    device = torch.device("cuda" if CUDA else "cpu")
    layer = mn.GaussianAttention(128, 2, adaptive=adaptive, backend="triton").to(device)
    x = torch.randn(2, 40, 128, device=device, dtype=torch.bfloat16 if CUDA else torch.float32)
    layer.out.to(x.dtype)
    outs = [layer(x) for _ in range(4)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert [type(x) for x in recall._known.values()] == [recall.Recipe]
    with torch.no_grad():
        layer.log_bandwidth.add_(0.5)
    assert not torch.equal(layer(x), outs[0])
    layer.backend = "reference"
    wanted = layer(x)
    layer.backend = "triton"
    error = (layer(x) - wanted).float().norm() / wanted.float().norm()
    assert error < (2e-2 if CUDA else 1e-5)


@fused
@pytest.mark.parametrize("turns", [False, True])
def test_where_nothing_learns_other_derivatives_are_still_refused(turns):
    """Kernels run without autograd then; what has no rule must not come out as a constant."""
    device = torch.device("cuda" if CUDA else "cpu")
    dtype = torch.bfloat16 if CUDA else torch.float32
    kernel = mc.RBF([1.0, 2.0], trainable=False).to(device)
    q, k, v = (torch.randn(2, 2, 40, 16, device=device, dtype=dtype) for _ in range(3))
    if turns:
        kernel = mc.Exponential() * mc.RelativeSinusoid()
        # Features of their own: only coefficients have a derivative.
        content = torch.randn_like(q)

    def run(x):
        if turns:
            x = mc.Features(content=content, relative=x)
        return mc.smooth(kernel, x, k, v, backend="triton")

    for _ in range(4):
        assert run(q).grad_fn is None
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
            run(forward_ad.make_dual(q, torch.ones_like(q)))
        with pytest.raises(RuntimeError, match="vmap"):
            torch.func.vmap(run)(q[None])
    assert [type(x) for x in recall._known.values()] == [recall.Recipe]


@fused
@pytest.mark.parametrize("on", ["v", "kv"])
def test_a_vicinity_is_kept(on, monkeypatch):
    device = torch.device("cuda" if CUDA else "cpu")
    dtype = torch.bfloat16 if CUDA else torch.float32
    kernels = mn.TokenKernels(50, 3, on=on).to(device)
    ids = torch.randint(50, (2, 40), device=device)

    def run(x, **options):
        taps = kernels(ids)
        out = mc.vicinity(
            *x.unbind(), key_taps=taps.keys, value_taps=taps.values,
            normalize=kernels.temperature, **options,
        )  # fmt: skip
        return out, *torch.autograd.grad(out.float().square().sum(), [x, kernels.weight])

    for _ in range(4):
        with torch.no_grad():
            kernels.weight.normal_()
        x = torch.randn(3, 2, 2, 40, 16, device=device, dtype=dtype, requires_grad=True)
        found = run(x)
        with monkeypatch.context() as off:
            off.setattr(tapes, "enabled", False)
            wanted = run(x)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert [type(x) for x in recall._known.values()] == [recall.Recipe]
    other = run(x, boundary="left")[0]
    assert not torch.equal(other, found[0])
    with pytest.raises(ValueError, match="boundary"):
        run(x, boundary="right")
