"""Calls that are repeated from notes: the same bits as calls that are not, and when there are none.

The last tests run Triton's kernels: on a GPU, or by its interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

import mercer as mc
import mercer.nn as mn
from mercer.backends.runtime import replay as tapes
from mercer.backends.runtime.launch import INTERPRETED
from mercer.backends.triton.backend import INSTALLED
from mercer.bench.workload import Workload

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CUDA = torch.cuda.is_available()
fused = pytest.mark.skipif(
    not (INSTALLED and (CUDA or INTERPRETED)),
    reason="Triton's kernels run on a GPU, or by its interpreter (TRITON_INTERPRET=1)",
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(tapes, "_tapes", {})


def again(run, *calls, options=None):
    """Calls of which the second is noted, and others repeat it; all that they gave."""
    return [tapes.play("test", options, tensors, run) for tensors in calls]


def noted():
    return [x for x in tapes._tapes.values() if isinstance(x, tapes.Tape)]


def test_notes_are_repeated_with_other_tensors():
    count = []

    def run(x, y):
        count.append(1)
        rows = x.new_empty(4, 3).transpose(0, 1)
        rows.copy_(x)
        total = rows.sum(0, keepdim=True)
        total += y[:, :1].t().expand(1, 4)
        a, b, _ = rows.unbind(0)
        return [total, rows, a + b, None, 7]

    calls = [(torch.randn(3, 4), torch.randn(4, 2)) for _ in range(4)]
    found = again(run, *calls)
    assert len(count) == 2
    for (x, y), (total, rows, pair, nothing, number) in zip(calls, found, strict=True):
        assert torch.equal(total, x.sum(0, keepdim=True) + y[:, :1].t())
        assert torch.equal(rows, x)
        assert rows.stride() == (1, 3)
        assert torch.equal(pair, x[0] + x[1])
        assert (nothing, number) == (None, 7)


def test_a_view_of_an_allocation_is_allocated_itself():
    def run(x):
        laid = x.new_empty(2, 3).t()
        filled = x.new_empty(3, 2)
        filled.copy_(x)
        laid.copy_(filled)
        return [laid, filled.t()]

    calls = [(torch.randn(3, 2),) for _ in range(4)]
    for (x,), (laid, turned) in zip(calls, again(run, *calls), strict=True):
        assert torch.equal(laid, x)
        assert laid.stride() == (1, 3)
        assert torch.equal(turned, x.t())
    (tape,) = noted()
    # Two allocations, two copies and a view; that of the first allocation is not repeated.
    assert len(tape.laid) == 1
    assert sum("_forget" not in step.__qualname__ for step in tape.steps) == 5


def test_what_differs_gets_notes_of_its_own():
    count = []

    def run(x, y):
        count.append(1)
        return [x + (1 if y is None else y)]

    x = torch.randn(4, 4)
    kinds = ((x, None), (x, x), (x.t(), x), (x.double(), x), (x[1:], x[1:]))
    for tensors in kinds * 4:
        (found,) = tapes.play("test", None, tensors, run)
        assert torch.equal(found, tensors[0] + (1 if tensors[1] is None else tensors[1]))
    assert len(count) == 2 * len(kinds)
    tapes.play("test", "an option", (x, None), run)
    assert len(count) == 2 * len(kinds) + 1


def test_what_comes_once_is_not_noted(monkeypatch):
    monkeypatch.setattr(tapes, "MOST", 3)
    for length in range(1, 6):
        tapes.play("test", None, (torch.ones(length),), lambda x: [x + 1])
    assert not noted()
    assert len(tapes._tapes) <= 3


def test_one_tensor_for_two_arguments_may_be_two_later():
    x, y = torch.randn(5), torch.randn(5)
    *_, (first,), (second,) = again(lambda a, b: [a - b], (x, x), (x, x), (x, y))
    assert torch.equal(first, torch.zeros(5))
    assert torch.equal(second, x - y)
    assert len(noted()) == 1


def test_views_of_what_was_given_belong_to_it():
    whole = torch.randn(2, 6)
    both = (whole[0], whole[1])
    calls = [both, both, (torch.randn(6), torch.randn(6))]
    for (x, y), (found,) in zip(calls, again(lambda a, b: [a[2:] * b[:4]], *calls), strict=True):
        assert torch.equal(found, x[2:] * y[:4])


def test_numbers_that_are_read_are_not_repeated():
    def run(x):
        return [x * float(x.sum())]

    for n in (1.0, 2.0, 3.0):
        (found,) = tapes.play("test", None, (torch.full((2,), n),), run)
        assert torch.equal(found, torch.full((2,), 2 * n * n))
    assert list(tapes._tapes.values()) == [tapes.Untaped.NEVER]


def test_tensors_from_elsewhere_are_not_kept():
    others = [torch.randn(3), torch.randn(3)]
    x, now = torch.randn(3), others[0]

    def run(x):
        return [x + now]

    for _ in range(2):
        assert torch.equal(tapes.play("test", None, (x,), run)[0], x + others[0])
    now = others[1]
    assert torch.equal(tapes.play("test", None, (x,), run)[0], x + others[1])
    assert list(tapes._tapes.values()) == [tapes.Untaped.NEVER]


def test_an_error_leaves_no_notes():
    def run(x):
        if x[0] < 0:
            raise ValueError("negative")
        return [x + 1]

    tapes.play("test", None, (torch.ones(2),), run)
    with pytest.raises(ValueError, match="negative"):
        tapes.play("test", None, (-torch.ones(2),), run)
    assert not noted()


def test_a_tape_keeps_no_tensor():
    x = torch.randn(8, 8)
    for _ in range(3):
        (found,) = tapes.play("test", None, (x,), lambda x: [(x @ x).relu()])
    assert len(noted()) == 1
    gone = weakref.ref(x), weakref.ref(found)
    del x, found
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


KERNELS = [
    "softmax", "rbf", "alibi", "adaptive", "product", "relative-sinusoid", "lookup", "laplace",
    "polynomial", "rational",
]  # fmt: skip


@fused
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("filter", ["causal", "window"])
def test_calls_repeated_give_the_same_bits(name, filter, monkeypatch):
    device = torch.device("cuda" if CUDA else "cpu")
    dtype = torch.bfloat16 if CUDA else torch.float32
    length, dim = (700, 128) if CUDA else (48, 16)
    rule = mc.Causal() if filter == "causal" else mc.Window(left=20, right=0)

    def run(given):
        named = list(given.named(parameters=True).values())
        for x in named:
            x.requires_grad_()
        out, mass = mc.smooth(
            given.kernel, given.q, given.k, given.v, filter=rule, backend="triton",
            return_log_mass=True,
        )  # fmt: skip
        loss = (out.float() * torch.linspace(-1, 1, out.shape[-1], device=device)).sum()
        grads = torch.autograd.grad(loss + mass.tanh().sum(), named, allow_unused=True)
        return out, mass, *grads

    for seed in range(4):
        torch.manual_seed(seed)
        shape = Workload(batch=2, heads=2, length=length, dim=dim, dtype=dtype, device=device)
        given = shape.inputs(name)
        found = run(given)
        with monkeypatch.context() as off:
            off.setattr(tapes, "enabled", False)
            wanted = run(given)
        for x, y in zip(found, wanted, strict=True):
            assert (x is None and y is None) or torch.equal(x, y)
    played = noted()
    assert len(played) == len(tapes._tapes) >= 2


@fused
@pytest.mark.parametrize("boundary", ["shrink", "truncate"])
@pytest.mark.parametrize("on", ["v", "kv"])
def test_token_kernels_repeated_give_the_same_bits(on, boundary, monkeypatch):
    device = torch.device("cuda" if CUDA else "cpu")
    dtype = torch.bfloat16 if CUDA else torch.float32
    kernels = mn.TokenKernels(50, 3, on=on, boundary=boundary).to(device)
    with torch.no_grad():
        kernels.weight.normal_()
    length, dim = (300, 64) if CUDA else (20, 8)

    def run(x, ids):
        taps = kernels(ids)
        out = mc.vicinity(
            *x.unbind(), key_taps=taps.keys, value_taps=taps.values, boundary=boundary,
            normalize=kernels.temperature, filter=mc.Causal(),
        )  # fmt: skip
        return out, *torch.autograd.grad(out.float().square().sum(), [x, kernels.weight])

    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(3, 2, 2, length, dim, device=device, dtype=dtype, requires_grad=True)
        ids = torch.randint(50, (2, length), device=device)
        found = run(x, ids)
        with monkeypatch.context() as off:
            off.setattr(tapes, "enabled", False)
            wanted = run(x, ids)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(noted()) == len(tapes._tapes) == 4


@fused
def test_dropout_is_drawn_anew():
    device = torch.device("cuda" if CUDA else "cpu")
    q = torch.randn(1, 2, 32, 16, device=device)
    kernel = mc.RBF(1.0).to(device)
    outs = [mc.smooth(kernel, q, q, q, dropout_p=0.5, backend="triton") for _ in range(4)]
    for first, second in itertools.pairwise(outs):
        assert not torch.equal(first, second)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_calls_repeated_hold_no_more_memory():
    torch.manual_seed(0)
    shape = Workload(
        batch=2, heads=8, length=4096, dim=128, dtype=torch.bfloat16, device=torch.device("cuda")
    )
    given = shape.inputs("rbf")
    named = list(given.named(parameters=True).values())
    for x in named:
        x.requires_grad_()

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = mc.smooth(given.kernel, given.q, given.k, given.v, filter=mc.Causal())
        torch.autograd.grad(out, named, out.detach())
        return torch.cuda.max_memory_allocated() - before

    tapes.enabled = False
    try:
        alone = peak(), peak()
    finally:
        tapes.enabled = True
    # Not noted, noted, and repeated.
    assert max(peak() for _ in range(4)) <= 1.02 * alone[1] + 2**20
