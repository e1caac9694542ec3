"""Token kernels over a split sequence, against one process, in float64."""

from itertools import product

import pytest
import torch
from catalogue import COMPOSED, DIM, HEADS
from parallel.workers import run

import mercer as mc
from mercer.parallel import Split, vicinity
from mercer.testing.cases import Shape, assert_close, double, inputs

T = 24
IDS = torch.arange(T)[None] // 5 + torch.tensor([[0], [1]]) * torch.arange(T) // 7
FILTERS = {
    "causal": mc.Causal(),
    "full": mc.Full(),
    "packed": mc.Causal() & mc.Documents(IDS),
    "window": mc.Window(5, 0),
    "padding": mc.Causal() & mc.Padding([24, 13]),
    "memory": mc.Memory(1),
}
KERNELS = {
    "exponential": mc.Exponential,
    "rbf": lambda: mc.RBF(1.5),
    "joined": COMPOSED["lookup*buckets*alibi"],
    "signed": COMPOSED["exponential+linear"],
}


def results(attend, kernel, rows):
    """Outputs, and the gradients of one loss: that of these rows of a fixed steering."""
    q, k, v = inputs(kernel, Shape(queries=T, keys=T, kv_heads=1), DIM)
    generator = torch.Generator().manual_seed(3)
    named = {"q": q.part("content"), "k": k.part("content"), "v": v}
    named = {name: rows(x) for name, x in named.items()}
    for name in ("key_taps", "value_taps"):
        named[name] = torch.randn(2, T, 2, 5, generator=generator, dtype=torch.float64)
    for x in named.values():
        x.requires_grad_()
    out = attend(**named)
    steer = torch.randn(2, HEADS, T, 5, generator=generator, dtype=torch.float64)
    (out * rows(steer)).sum().backward()
    found = {"out": out.detach()} | {f"gradient of {n}": x.grad for n, x in named.items()}
    return found | {n: x.grad for n, x in kernel.named_parameters()}


def check(build, split, **options):
    own, whole = double(build()), double(build())
    got = results(
        lambda **x: vicinity(**x, split=split, kernel=own, **options),
        own,
        lambda x: split.cut(x.detach(), 2),
    )
    want = results(lambda **x: mc.vicinity(**x, kernel=whole, **options), whole, lambda x: x)
    try:
        for name, x in want.items():
            if x is None:
                continue
            if name in ("out", "gradient of q", "gradient of k", "gradient of v"):
                assert_close(got[name], split.cut(x, 2), name)
            else:
                # A process has the gradient of its own loss.
                torch.distributed.all_reduce(got[name])
                assert_close(got[name], x, name)
    except AssertionError as error:
        return str(error)
    return None


def work():
    mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (torch.distributed.get_world_size(),)
    )
    failures = {}
    boundaries = ("shrink", "none", "left", "truncate")
    for n, (kernel, filter) in enumerate(product(KERNELS, FILTERS)):
        split = Split(mesh, T, balanced=n % 5 > 0, exchange=("ring", "gather")[n % 2])
        options = {"boundary": boundaries[n // 2 % 4], "normalize": (None, 0.4)[n // 3 % 2]}
        name = f"{kernel}, {filter}, {options}, {split}"
        failures[name] = check(KERNELS[kernel], split, filter=FILTERS[filter], **options)
    return {name: failure for name, failure in failures.items() if failure is not None}


def everything():
    return work(), wrong()


@pytest.fixture(scope="module")
def answers():
    return run(everything, 2)


def test_token_kernels_as_in_one_process(answers):
    assert [failures for failures, _ in answers] == [{}] * 2


def test_three_processes_have_chunks_in_the_middle():
    assert run(work, 3) == [{}] * 3


def wrong():
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    x, said = torch.randn(1, 2, 4, 8), []
    split, taps = Split(mesh, 8), torch.randn(1, 8, 1, 3)
    calls = [
        {"value_taps": taps[:, :4]},
        {"value_taps": torch.randn(1, 8, 1, 5)},
        {"value_taps": taps, "filter": mc.Mask(torch.ones(1, 2, 8, 8).bool().tril().cumsum(1) > 1)},
        {"value_taps": taps, "kernel": mc.Linear(signed=True), "backend": "reference"},
        {"value_taps": taps, "normalize": 0.0},
        {"value_taps": torch.randn(1, 8, 1, 4)},
        {"key_taps": torch.randn(1, 8, 5, 3)},
        {"value_taps": torch.randn(3, 8, 1, 3)},
        {"value_taps": "taps"},
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"taps|heads|sum|kernels|normalize") as error:
            vicinity(x, x, x, split=split, **call)
        said.append(str(error.value))
    return said


def test_misuse_is_named(answers):
    for _, said in answers:
        assert "value_taps must be those of all 8 tokens" in said[0]
        assert "token kernels of size 5 read 3 tokens beside a chunk, but Split(8 tokens" in said[1]
        assert "token kernels need a filter that is the same for all heads" in said[2]
        assert "backend 'reference' gives no sign of their sum" in said[3]
        assert "normalize must be None or a positive finite number" in said[4]
        assert "value_taps must have an odd number of taps, got 4" in said[5]
        assert "key_taps must be [1, 8, 1 or 2, S], got [1, 8, 5, 3]" in said[6]
        assert "value_taps must be [1, 8, 1 or 2, S], got [3, 8, 1, 3]" in said[7]
        assert "value_taps must be numbers [B, K, H or 1, S], got str" in said[8]
