"""Which calls the Hopper kernels get: those that compile and agree, or else none."""

import math
import os
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mercer
from mercer.backends.triton.backend import INSTALLED, INTERPRETED
from mercer.backends.triton.filters import Clause
from mercer.backends.triton.hopper import check, launch
from mercer.backends.triton.plan import Bias, Inputs
from mercer.backends.triton.static import Slot, Static

DEVICE = torch.device("cpu")
PLAN = SimpleNamespace(
    constants={"E0": 128, "E1": 0, "V": 128}, device=DEVICE, dtype=torch.bfloat16
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A machine with a Hopper GPU, before any kernel was checked."""
    monkeypatch.setattr(check, "there", lambda device: True)
    monkeypatch.setattr(check, "_answers", {})
    monkeypatch.setattr(check, "_warned", set())


def call(queries=1531, keys=1531, mode=1):
    """Inputs of 3 sequences, 4 heads and 2 of keys, and what goes with them."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=draw).bfloat16()

    slot = Slot(link=0, param=0.0, mode=mode, number=1.0, norm=True, wants=True, saves=False)
    scale = normal(*((4,) if mode == 1 else (3, 4, queries))).exp()
    empty = torch.zeros(0)
    x = Inputs(
        q=[normal(3, queries, 4, 128).transpose(1, 2)], k=[normal(1, 2, keys, 128)],
        v=normal(3, 2, keys, 128), scale=[scale], row=[empty], col=[normal(1, 4, keys)],
        bias=Bias(), lengths=torch.tensor([keys, keys // 2, 9]),
        ids=torch.arange(keys).div(100, rounding_mode="floor")[None], seed=None,
    )  # fmt: skip
    static = Static(
        slots=(slot,), filter=(Clause(causal=True, padding=True),), simple=True, dropout_p=0.0,
        trains=True, first=0, tokens=True, clip=-1, shape=(3, 4, queries),
    )  # fmt: skip
    return x, static


def allows(outcome, way="sums", **options):
    x, static = call(**options)
    plan = SimpleNamespace(**vars(PLAN), static=static)
    return check.allows(way, x, plan, outcome)


class Outcome:
    """The portable results; `change` makes the checked kernels differ from them."""

    def __init__(self, change=lambda results: results):
        self.change, self.calls = change, []

    def __call__(self, x, static, backward):
        self.calls.append((check.checking(), backward, x, static))
        draw = torch.Generator().manual_seed(1)
        results = [torch.randn(2, 4, 600, 128, generator=draw), torch.randn(4, generator=draw)]
        results[0][0, 0, 0] = -math.inf
        return self.change(results) if check.checking() else results


def test_a_kernel_that_agrees_is_used_and_checked_once():
    outcome = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(allows(outcome) for _ in range(3))
    assert [(way, backward) for way, backward, *_ in outcome.calls] == [("", True), ("sums", True)]
    assert allows(outcome, "forward")
    assert [backward for _, backward, *_ in outcome.calls[2:]] == [False, False]
    assert "agree with the portable ones" in check.reason(DEVICE)


def fails(error):
    def change(results):
        raise error

    return change


def of_other_size(results):
    return [results[0] * 1.1, results[1]]


def never_written(results):
    out = results[0].clone()
    out[0, 1, 5:9] = math.nan
    return [out, results[1]]


def of_other_scale(results):
    return [results[0], results[1] * 1.5]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (fails(AttributeError("_reinterpret\nand more")), "AttributeError: _reinterpret"),
        (fails(RuntimeError("ptxas died")), "RuntimeError: ptxas died"),
        (fails(ImportError("no name")), "ImportError: no name"),
        (of_other_size, "result 0 is 1.0e-01 from the portable kernel's"),
        (of_other_scale, "result 1 is 5.0e-01 from"),
        (never_written, "result 0 has other numbers that are not finite"),
    ],
)
def test_one_that_does_not_compile_or_agree_is_not_used(change, why):
    outcome = Outcome(change)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        # A second kind does not warn again.
        assert not any(allows(outcome, way) for way in ("sums", "sums", "forward"))
    assert why in str(heard[0].message)
    assert len(heard) == 1
    assert len(outcome.calls) == 4
    assert why in check.reason(DEVICE)


def test_a_kernel_within_rounding_error_is_used():
    assert allows(Outcome(lambda results: [x * (1 + 2**-7) for x in results]))


def test_a_variant_that_does_not_compile_is_caught_when_it_starts():
    def start(x):
        if x < 0:
            raise RuntimeError("out of shared memory")
        return x

    assert allows(Outcome())
    assert check.completed("sums", PLAN, start, 5) == [5]
    with pytest.warns(UserWarning, match="out of shared memory"):
        assert check.completed("sums", PLAN, start, -5) is None
    assert not allows(Outcome())


@pytest.mark.parametrize("mode", [1, 2])
def test_a_call_of_fewer_places_is_compared_with_as_many_of_its_numbers(mode):
    """Kernels read one number per place, so a shorter tensor was read beyond its end."""
    x, static = call(queries=200, keys=256, mode=mode)
    small, of = check._small_call(x, static)
    rows, columns = small.q[0].shape[2], small.k[0].shape[2]
    assert of.shape[2] == rows >= check.LENGTH
    assert small.col[0].shape[2] == small.ids.shape[1] == columns
    assert torch.equal(small.col[0][:, :, 256:512], x.col[0])
    if mode == 2:
        assert small.scale[0].shape[2] == rows


def test_the_call_that_is_compared_is_small_and_its_own():
    outcome = Outcome()
    state = torch.get_rng_state()
    assert allows(outcome, queries=1531, keys=2048, mode=2)
    assert torch.equal(torch.get_rng_state(), state)
    seen = [sizes_of(x, static) for *_, x, static in outcome.calls]
    assert seen[0] == seen[1]
    (shape, q, k, v, scale, col, lengths, ids), tokens = seen[0]
    assert shape == (2, 4, 587)
    assert (q, k, v) == ((2, 4, 587, 128), (1, 2, 704, 128), (2, 2, 704, 128))
    assert (scale, col, lengths, ids) == ((2, 4, 587), (1, 4, 704), (2,), (1, 704))
    assert tokens


def sizes_of(x, static):
    tensors = (x.q[0], x.k[0], x.v, x.scale[0], x.col[0], x.lengths, x.ids)
    return (static.shape, *(tuple(y.shape) for y in tensors)), x.q[0].stride(1) < x.q[0].stride(2)


def test_memory_is_poisoned_while_it_is_compared():
    def outcome(x, static, backward):
        made = (
            torch.empty(3),
            x.v.new_empty(2),
            torch.empty_like(x.v),
            torch.empty(3, dtype=torch.int32),
        )
        assert all(y.isnan().all() for y in made[:3])
        assert (made[3] == 2**30 - 1).all()
        return [x.v]

    assert allows(outcome)
    assert allows(lambda *given: [torch.zeros(())], "forward")


@pytest.mark.parametrize("when", ["is_compiling", "is_current_stream_capturing"])
def test_nothing_is_compared_while_a_graph_is_made(when, monkeypatch):
    if when == "is_compiling":
        monkeypatch.setattr(torch.compiler, when, lambda: True)
    else:
        monkeypatch.setattr(check, "_must_not_run", lambda device: True)
    outcome = Outcome()
    assert not allows(outcome)
    monkeypatch.undo()
    monkeypatch.setattr(check, "there", lambda device: True)
    assert not outcome.calls
    assert allows(outcome)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert allows(outcome)
    check._answers.clear()


def test_gradients_and_threads_are_left_alone():
    grad, outcome = [], Outcome()

    def slow(x, static, backward):
        grad.append(torch.is_grad_enabled())
        return outcome(x, static, backward)

    answers = []
    threads = [threading.Thread(target=lambda: answers.append(allows(slow))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
    assert len(outcome.calls) == 2
    assert not any(grad)
    assert torch.is_grad_enabled()


HIDDEN = """
import sys, warnings
import torch
import mercer as mc
from mercer.backends.triton import backend, run
assert run.TIER is None
assert not any(name.startswith("mercer") and "hopper" in name for name in sys.modules)
assert backend.kernels(torch.device("cpu")) == "portable Triton kernels"
q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
kernel = mc.RBF(torch.nn.Parameter(torch.tensor([3.0, 4.0])))
backends = ["triton", "reference"] if backend.INSTALLED and backend.INTERPRETED else ["reference"]
found = []
for name in backends:
    out = mc.smooth(kernel, q, k, v, filter=mc.Causal(), backend=name)
    found.append((out, *torch.autograd.grad(out.square().sum(), [q, k, v, *kernel.parameters()])))
for x, y in zip(found[0], found[-1]):
    assert torch.allclose(x, y, rtol=1e-3, atol=1e-4)
print(mc.explain(kernel, q, k, v, filter=mc.Causal(), backend=backends[0]))
"""


def test_the_portable_kernels_need_no_others(tmp_path):
    """The folder of the tier is deleted, and everything else works."""
    home = Path(mercer.__file__).parent
    away = shutil.ignore_patterns("hopper", "__pycache__", "models", "data", "train", "studies")
    shutil.copytree(home, tmp_path / "mercer", ignore=away)
    # What an interrupted deletion may leave.
    (tmp_path / "mercer" / "backends" / "triton" / "hopper" / "kernels").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def plain_forward(x, p, ready, out, low, lse):
    """Softmax without a filter by this forward kernel."""
    scores = x.q[0].float() @ x.k[0].float().mT * p.static.slots[0].number
    out.copy_(scores.softmax(-1) @ x.v.float())
    lse.copy_(scores.logsumexp(-1))


def doubled(x, p, ready, out, low, lse):
    plain_forward(x, p, ready, out, low, lse)
    out.mul_(2.0)


def incomplete(x, p, ready, out, low, lse):
    raise ImportError("no warpgroup_mma")


@pytest.mark.skipif(not (INSTALLED and INTERPRETED), reason="needs Triton's interpreter")
@pytest.mark.parametrize("forward", [plain_forward, doubled, incomplete], ids=lambda f: f.__name__)
def test_a_call_gets_the_kernel_that_works(forward, monkeypatch):
    monkeypatch.setattr(check, "LENGTH", 24)
    monkeypatch.setattr(launch, "forward", forward)
    q, k, v = (torch.randn(1, 2, 40, 128).half() for _ in range(3))
    with torch.no_grad(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = [mercer.smooth(mercer.Exponential(), q, k, v, backend="triton") for _ in range(2)]
    want = mercer.smooth(mercer.Exponential(), q, k, v, backend="reference")
    assert all(torch.allclose(out, want, rtol=1e-2, atol=1e-3) for out in found)
    said = [str(one.message) for one in heard if "Hopper" in str(one.message)]
    assert len(said) == (forward is not plain_forward)
    explained = str(mercer.explain(mercer.Exponential(), q, k, v, backend="triton"))
    assert ("not forward" in explained) == (forward is not plain_forward)
