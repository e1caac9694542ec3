"""A sequence split among processes, against one process: outputs and every gradient, in float64."""

from dataclasses import dataclass

import pytest
import torch
from catalogue import COMPOSED, DIM, HEADS, KERNELS
from parallel.workers import run

import mercer as mc
from mercer.parallel import Split, smooth
from mercer.testing.cases import Shape, assert_close, double, inputs

T = 16
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 0, 4, 4], [5] * 16])
MASK = torch.arange(2 * T * T).view(2, 1, T, T) * 7 % 11 < 6


@dataclass(frozen=True)
class Own(mc.Filter):
    """Even keys, and of the later half of the sequence those that are not later than the query."""

    def sees(self, b, i, j, start):
        return (j % 2 == 0) & ((i - start < T // 2) | (j <= i))


FILTERS = {
    "full": mc.Full(),
    "own": Own(),
    "causal": mc.Causal(),
    "window": mc.Window(5, 1),
    "window-left": mc.Window(3, 0),
    "memory": mc.Memory(2),
    "memory-from": mc.Memory(3, 6),
    "strided": mc.Strided(3),
    "heads": mc.filters.Heads([mc.Documents(DOCUMENTS) & mc.Causal(), mc.Memory(1)]),
    "blocks": mc.filters.Blocks(4, 2),
    "fixed": mc.Fixed(4, 2),
    "padding": mc.Padding([7, 0]),
    "documents": mc.Documents(DOCUMENTS),
    "of-others": mc.Documents(DOCUMENTS, DOCUMENTS.flip(1)),
    "mask": mc.Mask(MASK),
    "one-row": mc.Mask(MASK[:, :, :1]),
    "packed": mc.Causal() & mc.Documents(DOCUMENTS) & mc.Window(6, 0),
    "either": mc.Strided(4) | mc.Window(0, 2) & mc.Padding([16, 5]),
}
OF_FILTERS = {
    "rbf": lambda: mc.RBF(1.5),
    "polynomial": mc.Polynomial,
    "joined": lambda: COMPOSED["lookup*buckets*alibi"](),
}


def results(kernel, q, k, v, attend, rows):
    """Output, log_mass, and the gradients of one loss: that of these rows of a fixed steering."""
    named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()} | {"v": v}
    named = {n: x.detach().requires_grad_() for n, x in named.items()}
    q = mc.Features(**{n[2:]: x for n, x in named.items() if n.startswith("q.")})
    k = mc.Features(**{n[2:]: x for n, x in named.items() if n.startswith("k.")})
    out, mass = attend(q, k, named["v"])
    steer = torch.randn(2, HEADS, T, 6, generator=torch.Generator().manual_seed(1)).double()
    steer = rows(steer)
    loss = (out * steer[..., :5]).sum()
    loss = loss + (torch.where(mass.isfinite(), mass, 0.0) * steer[..., 5]).sum()
    loss.backward()
    found = {"out": out.detach(), "log_mass": mass.detach()}
    found |= {
        f"gradient of {n}": torch.zeros_like(x) if x.grad is None else x.grad
        for n, x in named.items()
    }
    for name, x in kernel.named_parameters():
        found[name] = torch.zeros_like(x) if x.grad is None else x.grad
    return found


def check(build, filter, split, kv_heads=HEADS):
    """None, or what differs."""
    whole, own = double(build()), double(build())
    q, k, v = inputs(whole, Shape(kv_heads=kv_heads, queries=T, keys=T), DIM)

    def alone(q, k, v):
        return mc.smooth(whole, q, k, v, filter=filter, return_log_mass=True)

    def together(q, k, v):
        return smooth(own, q, k, v, split=split, filter=filter, return_log_mass=True)

    def cut(x):
        return split.cut(x, 2)

    want = results(whole, q, k, v, alone, lambda x: x)
    got = results(own, q.each(cut), k.each(cut), cut(v), together, cut)
    split.reduce_gradients(own)
    parameters = dict(own.named_parameters())
    got |= {name: x.grad for name, x in parameters.items()}
    try:
        for name, x in want.items():
            assert_close(got[name], x if name in parameters else cut(x), name)
    except AssertionError as error:
        return str(error)
    return None


def cases(size):
    """Two processes take all kernels, four all filters."""
    if size == 2:
        for name, build in (KERNELS | COMPOSED).items():
            yield f"{name}, causal", build, mc.Causal(), {}
        yield "grouped heads", OF_FILTERS["rbf"], mc.Causal(), {"kv_heads": 1}
        return
    for n, (name, filter) in enumerate(FILTERS.items()):
        kernel = list(OF_FILTERS)[n % len(OF_FILTERS)]
        yield f"{kernel}, {name}", OF_FILTERS[kernel], filter, {}


def work():
    from torch.distributed.device_mesh import init_device_mesh

    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("context",))
    failures = {}
    for n, (name, build, filter, more) in enumerate(cases(size)):
        for exchange in ("gather", "ring"):
            split = Split(mesh, T, balanced=n % 4 > 0, exchange=exchange)
            failures[f"{name}, {exchange}"] = check(build, filter, split, **more)
    return {name: failure for name, failure in failures.items() if failure is not None}


def everything():
    return work(), broken(), wrong()


@pytest.fixture(scope="module")
def answers():
    return run(everything, 2)


def test_every_kernel_as_in_one_process(answers):
    assert [failures for failures, *_ in answers] == [{}] * 2


def test_every_filter_as_in_one_process():
    assert run(work, 4) == [{}] * 4


def broken():
    """Whether a NaN is in the rows that see it, and in no other."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    x = torch.randn(1, HEADS, T, DIM, generator=torch.Generator().manual_seed(0))
    k = x.clone()
    k[:, 0, 6] = float("nan")
    want = mc.smooth(mc.RBF(), x, k, x, filter=mc.Window(3, 0)).isnan()
    assert want.any(-1).sum() == 4
    found = []
    for exchange in ("gather", "ring"):
        split = Split(mesh, T, exchange=exchange)
        parts = (split.cut(y, 2) for y in (x, k, x))
        out = smooth(mc.RBF(), *parts, split=split, filter=mc.Window(3, 0))
        found.append(torch.equal(out.isnan(), split.cut(want, 2)))
    return found


def test_nan_stays_in_the_rows_that_see_it(answers):
    assert [found for _, found, _ in answers] == [[True, True]] * 2


def wrong():
    """What is said about each misuse."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    split = Split(mesh["context"], T)
    x = torch.randn(1, HEADS, T // 2, DIM)

    def attend(kernel=None, x=x, split=split, **more):
        return smooth(kernel or mc.RBF(), x, x, x, split=split, **more)

    ring = Split(mesh["context"], T, exchange="ring")
    calls = [
        lambda: Split(mesh, T),
        lambda: Split(mesh["context"], 18),
        lambda: Split(mesh["context"], 17, balanced=False),
        lambda: Split(mesh["context"], 16.0),
        lambda: Split(None, T),
        lambda: Split(mesh["context"], T, exchange="star"),
        lambda: split.cut(x, 2),
        lambda: attend(x=x[:, :, 1:]),
        lambda: attend(split=None),
        lambda: attend(filter="causal"),
        lambda: attend(filter=mc.Documents(DOCUMENTS[:1, 1:])),
        lambda: attend(split=ring, dropout_p=0.1),
        lambda: attend(mc.Linear(signed=True), split=ring, backend="reference"),
    ]

    def under_torchs():
        with context_parallel(mesh["context"], buffers=[x.clone()], buffer_seq_dims=[2]):
            mc.smooth(mc.RBF(), x, x, x)

    calls.append(under_torchs)
    calls.append(lambda: mc.smooth(mc.RBF(), x, x, x).shape)
    said = []
    for call in calls:
        try:
            said.append(f"nothing, but {call()}")
        except ValueError as error:
            said.append(str(error))
    return said


SAID = [
    "mesh must have one dimension, got 2: give one of them, such as mesh['context']",
    "needs a length that is a multiple of 4, got 18",
    "needs a length that is a multiple of 2, got 17",
    "needs a length that is a multiple of 4, got 16.0",
    "mesh must be a DeviceMesh or a process group, got NoneType",
    "exchange must be 'gather' or 'ring', got 'star'",
    "the split sequence has 16 tokens in dimension 2, but x is [1, 2, 8, 8]",
    "each process must have 8 of the 16 tokens in dimension 2, got [1, 2, 7, 8]",
    "split must be a Split, got NoneType",
    "filter must be a Filter, got str",
    "Documents has ids for 15 keys, but there are 16",
    "a ring drops no weights, but dropout_p is 0.1: take exchange='gather'",
    "may have negative weights, and backend 'reference' gives no sign of their sum",
    "this call would see that part alone: use mercer.parallel.smooth",
    # And afterwards it works again.
    "nothing, but torch.Size([1, 2, 8, 8])",
]


def test_misuse_is_named(answers):
    for *_, said in answers:
        assert len(said) == len(SAID)
        for got, want in zip(said, SAID, strict=True):
            assert want in got
