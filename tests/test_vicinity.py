"""Token-wise kernels as a function: the definition by loops, the fast form, causality, errors."""

import copy
import math

import pytest
import torch
from catalogue import COMPOSED, KERNELS

import mercer as mc
from mercer.taps import BOUNDARIES, gather, sum_by_id
from mercer.testing import Shape, inputs

BATCH, HEADS, LENGTH, DIM = 2, 2, 7, 8
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2]])
FILTERS = {
    "causal": mc.Causal(),
    "full": mc.Full(),
    "window": mc.Window(2, 0),
    "window ahead": mc.Window(3, 1),
    "strided": mc.Strided(3),
    "fixed": mc.Fixed(3, 1),
    "memory": mc.Memory(2),
    "padding": mc.Causal() & mc.Padding([7, 4]),
    "full, padding": mc.Padding([7, 4]),
    "documents": mc.Causal() & mc.Documents(IDS),
    "full, documents": mc.Documents(IDS),
    "either": mc.Strided(3) | mc.Window(1, 0),
}
TARGETS = {"keys": (True, False), "values": (False, True), "both": (True, True)}
SIZES = (3, 5, 7)


def double(make):
    return copy.deepcopy(make()).double()


def draw(kernel, size, targets, *, shape=None, heads=1, seed=0, batch=BATCH):
    shape = shape or Shape(queries=LENGTH, keys=LENGTH)
    q, k, v = inputs(kernel, shape, DIM, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    taps = [
        torch.randn(batch, shape.keys, heads, size, generator=generator, dtype=torch.float64) / 2
        if wanted
        else None
        for wanted in targets
    ]
    return q, k, v, *taps


def grads_of(kernel, q, k, v, key_taps, value_taps, **options):
    """Output, log_mass and every gradient."""
    named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()}
    named |= {"v": v, "key_taps": key_taps, "value_taps": value_taps}
    named = {n: x.detach().requires_grad_() for n, x in named.items() if x is not None}
    q = mc.Features(**{n: named[f"q.{n}"] for n in q})
    k = mc.Features(**{n: named[f"k.{n}"] for n in k})
    out, mass = mc.vicinity(
        q, k, named["v"], key_taps=named.get("key_taps"), value_taps=named.get("value_taps"),
        kernel=kernel, return_log_mass=True, **options,
    )  # fmt: skip
    named |= dict(kernel.named_parameters())
    generator = torch.Generator().manual_seed(9)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    finite = torch.where(mass.isfinite(), mass, 0.0)
    loss = loss + (finite * torch.randn(mass.shape, generator=generator, dtype=mass.dtype)).sum()
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs = zip(named.items(), grads, strict=True)
    found = {n: torch.zeros_like(x) if g is None else g for (n, x), g in pairs}
    return {"out": out.detach(), "log_mass": mass.detach()} | found


def assert_same(got, want, what=""):
    for name, x in want.items():
        size = 1 + x[x.isfinite()].abs().sum().item() / max(x.numel(), 1)
        torch.testing.assert_close(
            got[name], x, rtol=1e-10, atol=1e-10 * size, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def loops(q, k, v, key_taps, value_taps, normalize, boundary, filter):
    """The definition, number by number, for the exponential kernel."""
    batch, heads, queries, dim = q.shape
    keys = k.shape[2]
    visible = filter.mask(queries, keys).expand(batch, 1, queries, keys)
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=q.dtype)

    def neighbours(x, taps, b, h, i, j):
        if taps is None:
            return x[b, h, j]
        reach = taps.shape[-1] // 2
        seen = []
        for d in range(-reach, reach + 1):
            rule = {
                "none": True,
                "left": d <= 0,
                "truncate": not filter.causal or j + d <= i,
                "shrink": not filter.causal or abs(d) <= i - j,
            }[boundary]
            if rule:
                seen.append(d)
        kernel = {d: taps[b, j, h % taps.shape[2], reach + d].item() for d in seen}
        if normalize is not None:
            total = sum(math.exp(u / normalize) for u in kernel.values())
            kernel = {d: math.exp(u / normalize) / total for d, u in kernel.items()}
        mixed = torch.zeros_like(x[b, h, j])
        for d, tap in kernel.items():
            inside = 0 <= j + d < keys and (not filter.causal or j + d <= i)
            if inside and bool(filter.joins(torch.tensor(b), torch.tensor(j), torch.tensor(j + d))):
                mixed = mixed + tap * x[b, h, j + d]
        return mixed

    for b in range(batch):
        for h in range(heads):
            for n in range(queries):
                i, total = n + keys - queries, 0.0
                for j in range(keys):
                    if visible[b, 0, n, j]:
                        key = neighbours(k, key_taps, b, h, i, j)
                        weight = math.exp((q[b, h, n] @ key).item() / math.sqrt(dim))
                        total += weight
                        out[b, h, n] += weight * neighbours(v, value_taps, b, h, i, j)
                out[b, h, n] /= total or 1.0
    return out


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("normalize", [None, 0.4], ids=["free", "softmax"])
def test_the_reference_is_the_definition(filter, boundary, normalize):
    kernel = mc.Exponential()
    for size, target in ((3, "values"), (5, "both"), (7, "keys")):
        q, k, v, *taps = draw(kernel, size, TARGETS[target], heads=HEADS if size == 5 else 1)
        got = mc.vicinity(
            q, k, v, key_taps=taps[0], value_taps=taps[1], normalize=normalize, boundary=boundary,
            filter=filter, backend="reference",
        )  # fmt: skip
        want = loops(
            q.part("content"), k.part("content"), v, *taps, normalize, boundary, filter
        )
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_fast_form_is_the_reference(filter, target, size, boundary):
    kernel = double(lambda: mc.RBF(heads=HEADS))
    for normalize in (None, 0.4):
        given = draw(kernel, size, TARGETS[target])
        options = {"normalize": normalize, "boundary": boundary, "filter": filter}
        want = grads_of(kernel, *given, backend="reference", **options)
        assert_same(grads_of(kernel, *given, **options), want)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("name", [*KERNELS, *COMPOSED])
def test_every_kernel_has_its_fast_form(name, boundary):
    kernel = double((KERNELS | COMPOSED)[name])
    for target, size, filter in (
        ("both", 3, "causal"), ("values", 5, "documents"), ("keys", 3, "window"),
        ("both", 5, "full"),
    ):  # fmt: skip
        given = draw(kernel, size, TARGETS[target])
        options = {"normalize": 0.7, "boundary": boundary, "filter": FILTERS[filter]}
        want = grads_of(kernel, *given, backend="reference", **options)
        assert_same(grads_of(kernel, *given, **options), want, f"{target} {size} {filter}")
