"""Gradients of queries from stored pairs, in Triton's interpreter.

What stores them is worked out by torch: it is in Gluon, which the interpreter does not run. On a
GPU test_hopper.py has both.
"""

import math

import pytest
import torch

import mercer as mc
from mercer.backends.triton import plan
from mercer.backends.triton.backend import INSTALLED, INTERPRETED
from mercer.backends.triton.hopper import eligible, launch, tier

pytestmark = [
    pytest.mark.skipif(not (INSTALLED and INTERPRETED), reason="needs Triton's interpreter"),
    # The interpreter computes with numpy, which warns of its own.
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
BATCH, HEADS, LENGTH, DIM = 2, 2, 300, 128
BANDWIDTHS = (8.0, 11.0)
FILTERS = {"causal": mc.Causal(), "window": mc.Window(70, 0), "full": mc.Full()}


class Pass:
    """The pass over keys, of one kernel and filter; it counts how often it runs."""

    def __init__(self, scale, seen):
        self.scale, self.seen, self.runs, self.flags = scale[None, :, None, None], seen, 0, set()

    def __call__(self, p, part, heads, *, store, by_keys):
        self.flags.add(by_keys)

        def launch(tensors, numbers):
            (
                q, k, _, _, v, _, _, col, _, _, grad, lse2, delta, pairs, dk, _, dv, *_, ds,
            ) = tensors  # fmt: skip
            self.runs += 1
            *_, offset = numbers
            col = col[:, :, None] if col.numel() else torch.zeros(())
            e = (q @ k.mT + col) * self.scale / math.log(2) - lse2[..., None]
            weights = torch.where(self.seen, e.exp2(), 0.0)
            u = weights * (grad @ v.mT - delta[..., None])
            own, share = slice(offset, offset + heads), u.mT @ q
            sums = u.sum(-2)
            want = share * self.scale
            if p.static.slots[0].norm:
                want = want - (sums[..., None] * self.scale) * k
            dk.flatten(0, 1)[own] = want.flatten(0, 1)[own]
            dv.flatten(0, 1)[own] = (weights.mT @ grad).flatten(0, 1)[own]
            if ds.numel():
                given = (col[:, :, 0] - col[:, :, 0, :1]) * sums
                given = given + (share * k).sum(-1) * by_keys
                # What queries have is another's to write.
                ds.flatten(0, 1)[own, : q.shape[2]] = math.nan
                ds.flatten(0, 1)[own, q.shape[2] :] = given.flatten(0, 1)[own]
            assert store
            self.store(pairs[0], u.flatten(0, 1)[own].mT)

        return launch

    def store(self, pairs, u):
        """From the first queries on that see one of 128 keys; what none sees is anything."""
        pairs.fill_(math.nan)
        step = 128
        for low in range(0, LENGTH, 128):
            rows = self.seen[:, low : low + 128].any(1).nonzero()
            origin = int(rows[0]) // step * step
            for key in range(low, min(low + 128, LENGTH), step):
                for query in range(origin, LENGTH, step):
                    at = slice(key, key + step), slice(query, query + step)
                    if self.seen.T[at].any():
                        block = u.new_zeros(u.shape[0], step, step)
                        found = u[:, *at]
                        block[:, : found.shape[1], : found.shape[2]] = found
                        place = slice(query - origin, query - origin + step)
                        pairs[:, key : key + step, place] = block


def gradients(kernel, filter, backend, given, of_mass):
    out, mass = mc.smooth(kernel, *given[:3], filter=filter, backend=backend, return_log_mass=True)
    loss = (out * given[3].to(out)).sum()
    if of_mass:
        loss = loss + (mass * given[4].to(mass)).sum()
    return torch.autograd.grad(loss, [*given[:3], *kernel.parameters()])


@pytest.mark.parametrize("of_mass", [False, True], ids=["", "log-mass"])
@pytest.mark.parametrize(
    "share", [1, 3, BATCH * HEADS], ids=["head-by-head", "in-turns", "all-heads"]
)
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("name", ["rbf", "softmax"])
def test_queries_get_what_is_stored(name, filter, share, of_mass, monkeypatch):
    kernel, scale = mc.Exponential(), torch.full((HEADS,), DIM**-0.5)
    if name == "rbf":
        kernel = mc.RBF(torch.nn.Parameter(torch.tensor(BANDWIDTHS)))
        scale = 1.0 / torch.tensor(BANDWIDTHS).square()
    draw = torch.Generator().manual_seed(0)
    rows = (BATCH, HEADS, LENGTH)
    given = [torch.randn(*rows, DIM, generator=draw).requires_grad_() for _ in range(4)]
    given.append(torch.randn(rows, generator=draw))
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = {"causal": i >= j, "window": (i >= j) & (i - j <= 70), "full": i + j >= 0}[filter]
    other = Pass(scale, seen)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(tier, "allows", lambda way, *_: way == "stores")
    monkeypatch.setattr(tier, "completed", lambda way, p, start, *given: [start(*given)])
    monkeypatch.setattr(eligible, "stores", lambda p, grad: True)
    monkeypatch.setattr(launch, "share", lambda p: share)
    monkeypatch.setattr(launch, "_of", lambda x, *_, **__: x)
    monkeypatch.setattr(launch, "_keys", other)
    got = gradients(kernel, FILTERS[filter], "triton", given, of_mass)
    assert other.runs == -(-BATCH * HEADS // share)
    # A gradient of log_mass has shares of queries that keys do not know.
    assert other.flags == {name == "rbf" and not of_mass}
    wide = [x.detach().double().requires_grad_() for x in given]
    want = gradients(kernel.double(), FILTERS[filter], "reference", wide, of_mass)
    for mine, exact in zip(got, want, strict=True):
        assert torch.allclose(mine.double(), exact, rtol=1e-4, atol=1e-4 * exact.abs().max().item())
