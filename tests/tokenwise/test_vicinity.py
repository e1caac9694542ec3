"""Token-wise kernels as a function: the definition by loops, the fast form, causality, errors."""

import copy
import math

import numpy as np
import pytest
import torch
from catalogue import COMPOSED, KERNELS

import mercer as mc
from mercer.backends.tokenwise.taps import BOUNDARIES, sum_by_id
from mercer.dispatch.tokens import gather
from mercer.filters import Earlier
from mercer.testing import Shape, check_filter, inputs

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
    visible = filter.mask(queries, keys).expand(batch, 1, queries, keys).tolist()
    b, j = torch.arange(batch)[:, None, None], torch.arange(keys)
    joins = filter.joins(b, j[:, None], j)
    joins = torch.as_tensor(joins).expand(batch, keys, keys).tolist()
    # Numbers of numpy: many times as fast as those of torch, one by one.
    q, k, v = (x.numpy() for x in (q, k, v))
    out = np.zeros((batch, heads, queries, v.shape[-1]))

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
        kernel = {d: float(taps[b, j, h % taps.shape[2], reach + d]) for d in seen}
        if normalize is not None:
            total = sum(math.exp(u / normalize) for u in kernel.values())
            kernel = {d: math.exp(u / normalize) / total for d, u in kernel.items()}
        mixed = np.zeros(x.shape[-1])
        for d, tap in kernel.items():
            inside = 0 <= j + d < keys and (not filter.causal or j + d <= i)
            if inside and joins[b][j][j + d]:
                mixed = mixed + tap * x[b, h, j + d]
        return mixed

    taps = [None if t is None else t.numpy() for t in (key_taps, value_taps)]
    for b in range(batch):
        for h in range(heads):
            for n in range(queries):
                i, total = n + keys - queries, 0.0
                for j in range(keys):
                    if visible[b][0][n][j]:
                        key = neighbours(k, taps[0], b, h, i, j)
                        weight = math.exp(float(q[b, h, n] @ key) / math.sqrt(dim))
                        total += weight
                        out[b, h, n] += weight * neighbours(v, taps[1], b, h, i, j)
                out[b, h, n] /= total or 1.0
    return torch.from_numpy(out)


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
        want = loops(q.part("content"), k.part("content"), v, *taps, normalize, boundary, filter)
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


@pytest.mark.parametrize(
    "shape",
    [
        Shape(queries=3, keys=LENGTH),
        Shape(queries=1, keys=LENGTH),
        Shape(queries=LENGTH, keys=4),
        Shape(queries=1, keys=1),
        Shape(queries=2, keys=2, kv_heads=1),
        Shape(heads=4, kv_heads=2, queries=LENGTH, keys=LENGTH),
        Shape(batch=1, queries=5, keys=LENGTH, values=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_other_shapes_are_the_reference_too(shape, boundary):
    """Q != K, one key, fewer keys than taps, grouped heads."""
    kernel = mc.Exponential()
    for size, heads in ((3, 1), (5, shape.kv_heads), (7, shape.heads)):
        given = draw(kernel, size, (True, True), shape=shape, heads=heads, batch=shape.batch)
        for filter in (mc.Causal(), mc.Window(2, 0), mc.Memory(1), mc.Full()):
            options = {"normalize": 0.4, "boundary": boundary, "filter": filter}
            want = grads_of(kernel, *given, backend="reference", **options)
            assert_same(grads_of(kernel, *given, **options), want, f"{size} {filter}")


@pytest.mark.parametrize("backend", ["chunked", "sdpa"])
def test_a_named_backend_runs_the_far_keys(backend):
    given = draw(mc.Exponential(), 3, (True, True))
    want = grads_of(mc.Exponential(), *given, backend="reference")
    assert_same(grads_of(mc.Exponential(), *given, backend=backend), want)


def test_keys_and_values_may_have_kernels_of_different_sizes():
    q, k, v, key_taps, _ = draw(mc.Exponential(), 3, (True, False))
    value_taps = torch.randn(BATCH, LENGTH, 1, 7, dtype=torch.float64)
    want = grads_of(mc.Exponential(), q, k, v, key_taps, value_taps, backend="reference")
    assert_same(grads_of(mc.Exponential(), q, k, v, key_taps, value_taps), want)


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_the_gap_before_a_query_is_a_filter_like_any_other(gap):
    check_filter(Earlier(gap))


def test_without_taps_it_is_smooth():
    q, k, v, *_ = draw(mc.Exponential(), 3, (False, False))
    want = mc.smooth(mc.Exponential(), q, k, v, filter=mc.Causal())
    assert torch.equal(mc.vicinity(q, k, v), want)


HIDING = ("causal", "window", "strided", "fixed", "memory", "documents")
# All pairs of a boundary, a size, a target, a rule of normalisation and a filter.
PAIRED = [
    (boundary, size, list(TARGETS)[(f + b + s) % 3], (None, 0.4)[(f // 3 + b // 2 + s) % 2], filter)
    for f, filter in enumerate(HIDING)
    for b, boundary in enumerate(BOUNDARIES)
    for s, size in enumerate(SIZES)
]


@pytest.mark.parametrize(("boundary", "size", "target", "normalize", "filter"), PAIRED)
def test_the_future_changes_no_bit(boundary, size, target, normalize, filter):
    kernel = mc.Exponential()
    q, k, v, *taps = draw(kernel, size, TARGETS[target])
    q, k, v, *taps = (
        None if x is None else x.float() for x in (q.part("content"), k.part("content"), v, *taps)
    )
    options = {"normalize": normalize, "boundary": boundary, "filter": FILTERS[filter]}
    for backend in ("auto", "chunked", "reference"):
        before = mc.vicinity(
            q, k, v, key_taps=taps[0], value_taps=taps[1], backend=backend, **options
        )
        for place in (1, 4, LENGTH - 1):
            changed = [x.clone() for x in (k, v)]
            others = [None if x is None else x.clone() for x in taps]
            for x in changed:
                x[:, :, place:] = torch.randn_like(x[:, :, place:]) * 10
            for x in others:
                if x is not None:
                    x[:, place:] = torch.randn_like(x[:, place:]) * 10
            after = mc.vicinity(
                q, *changed, key_taps=others[0], value_taps=others[1], backend=backend, **options
            )
            assert torch.equal(before[:, :, :place], after[:, :, :place])


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_nan_in_the_future_or_in_another_document_does_not_show(boundary):
    q, k, v, *taps = draw(mc.Exponential(), 3, (True, True))
    k = k.part("content")
    options = {"key_taps": taps[0], "value_taps": taps[1], "boundary": boundary, "normalize": 0.4}
    for filter in (FILTERS["causal"], FILTERS["documents"]):
        before = mc.vicinity(q, k, v, filter=filter, **options)
        broken_k, broken_v = k.clone(), v.clone()
        broken_k[:, :, 5:], broken_v[:, :, 5:] = math.nan, math.inf
        after = mc.vicinity(q, broken_k, broken_v, filter=filter, **options)
        assert torch.equal(before[:, :, :5], after[:, :, :5])
        assert after[:, :, 5:].isnan().any(-1).all()
    alone = mc.vicinity(q, k, v, filter=mc.Documents(IDS), **options)
    k, v = k.clone(), v.clone()
    k[0, :, :3], v[0, :, :3] = math.nan, math.nan
    got = mc.vicinity(q, k, v, filter=mc.Documents(IDS), **options)
    torch.testing.assert_close(got[0, :, 3:], alone[0, :, 3:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_document_and_a_padded_sequence_are_as_if_alone(boundary, causal):
    q, k, v, key_taps, value_taps = draw(mc.Exponential(), 5, (True, True))
    base = mc.Causal() if causal else mc.Full()
    q, k = q.part("content"), k.part("content")

    def run(places, filter):
        return mc.vicinity(
            q[:1, :, places], k[:1, :, places], v[:1, :, places], filter=filter, normalize=0.4,
            key_taps=key_taps[:1, places], value_taps=value_taps[:1, places], boundary=boundary,
        )  # fmt: skip

    whole = run(slice(None), base & mc.Documents(IDS[:1]))
    for document in (slice(0, 3), slice(3, 7)):
        torch.testing.assert_close(whole[:, :, document], run(document, base))
    padded = run(slice(None), base & mc.Padding([4]))
    torch.testing.assert_close(padded[:, :, :4], run(slice(0, 4), base))


def test_the_reference_is_differentiable_twice():
    q, k, v, *taps = draw(mc.Exponential(), 3, (True, True), shape=Shape(1, 1, 1, 3, 3, 2), batch=1)
    given = [x[..., :2].detach() for x in (q.part("content"), k.part("content"))]
    given = [x.requires_grad_() for x in (*given, v, *taps)]

    def run(q, k, v, a, b):
        return mc.vicinity(q, k, v, key_taps=a, value_taps=b, normalize=0.4, backend="reference")

    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_accurate_as_the_reference_in_it(dtype):
    """At most twice the error of the reference in the same dtype, plus rounding."""
    shape = Shape(queries=65, keys=65, values=8)
    given = draw(mc.Exponential(), 3, (True, True), shape=shape)
    low = [x.to(dtype) for x in (given[0].part("content"), given[1].part("content"), given[2])]
    options = {"key_taps": given[3].float(), "value_taps": given[4].float(), "normalize": 0.4}
    wide = {n: x.double() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    want = mc.vicinity(*(x.double() for x in low), backend="reference", **wide)
    error = {
        backend: (mc.vicinity(*low, backend=backend, **options).double() - want).square().mean()
        for backend in ("reference", "auto")
    }
    rounding = torch.finfo(dtype).eps * want.square().mean().sqrt()
    assert error["auto"].sqrt() <= 2 * error["reference"].sqrt() + rounding


def test_memory_is_linear_in_the_length():
    """Nothing as large as all pairs is made, forward or backward."""
    length, largest = 512, 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    q, k, v = (torch.randn(1, 1, length, 4).requires_grad_() for _ in range(3))
    taps = torch.randn(1, length, 1, 5).requires_grad_()
    with Watch():
        mc.vicinity(q, k, v, key_taps=taps, value_taps=taps, normalize=0.4).sum().backward()
    assert largest < length * 64


def smoothed(kernel, q, k, v, key_taps, value_taps, **options):
    taps = {"key_taps": key_taps, "value_taps": value_taps}
    return mc.vicinity(q, k, v, kernel=kernel, **taps, **options)


def test_dropout_keeps_the_mean_and_the_sum_of_a_kernel_drops_as_one():
    q, k, v, *taps = draw(mc.Exponential(), 3, (True, True))
    given = [q.part("content"), k.part("content"), v, *taps]
    # What is in a batch is dropped apart.
    many = [x.repeat(200, *[1] * (x.dim() - 1)) for x in given]
    for kernel in (mc.Exponential(), mc.Exponential() + mc.Exponential(0.3)):
        want = smoothed(kernel, *given)
        runs = torch.cat([smoothed(kernel, *many, dropout_p=0.3) for _ in range(10)])
        runs = runs.unflatten(0, (2000, -1))
        apart = (runs.mean(0) - want).abs()
        assert (apart <= 6 * runs.std(0) / 2000**0.5 + 1e-12).all()
        # The first query has one key, which is kept whole or dropped.
        scale = (runs[:, :, :, 0] / want[:, :, 0]).round(decimals=6).unique()
        assert scale.tolist() == [0.0, round(1 / 0.7, 6)]


def test_gathering_has_the_gradient_of_indexing_and_the_same_bits_each_time():
    ids = torch.randint(0, 5, (3, 200))
    table = torch.randn(7, 2, 3, dtype=torch.float64).requires_grad_()
    steer = torch.randn(3, 200, 2, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad((torch.stack(gather(table, ids), 2) * steer).sum(), table)
    (want,) = torch.autograd.grad((table[ids] * steer).sum(), table)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert not got[5:].any()
    rows = torch.randn(600, 3)
    first = sum_by_id(rows, ids.flatten(), 50257)
    assert all(torch.equal(first, sum_by_id(rows, ids.flatten(), 50257)) for _ in range(3))
    assert sum_by_id(rows[:0], ids.flatten()[:0], 4).tolist() == [[0.0] * 3] * 4


def test_autocast_gives_the_lower_dtype():
    q, k, v, *taps = draw(mc.Exponential(), 3, (True, True))
    q, k, v, *taps = (x.float() for x in (q.part("content"), k.part("content"), v, *taps))
    with torch.autocast("cpu", torch.bfloat16):
        out = mc.vicinity(q, k, v, key_taps=taps[0], value_taps=taps[1], normalize=0.4)
    assert out.dtype == torch.bfloat16
    want = mc.vicinity(q, k, v, key_taps=taps[0], value_taps=taps[1], normalize=0.4)
    torch.testing.assert_close(out.float(), want, rtol=0.05, atol=0.05)


class Distant(mc.Kernel):
    """Without a lowering."""

    def log_weight(self, q, k):
        q, k = self.select(q, k)
        return q.tanh() @ k.tanh().mT


def test_a_kernel_without_a_lowering_takes_the_definition():
    q, k, v, *taps = draw(Distant(), 3, (True, True))
    want = mc.vicinity(q, k, v, value_taps=taps[1], kernel=Distant(), backend="reference")
    assert torch.equal(mc.vicinity(q, k, v, value_taps=taps[1], kernel=Distant()), want)
    with pytest.raises(ValueError, match="cannot run this: the kernel has no lowering"):
        mc.vicinity(q, k, v, value_taps=taps[1], kernel=Distant(), backend="chunked")


X = torch.randn(2, 4, 6, 8)
TAPS = torch.randn(2, 6, 1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundary": "right"}, "one of none, left, truncate, shrink, got 'right'"),
        ({"normalize": 0.0}, "normalize must be None or a positive finite number.* 0.0"),
        ({"normalize": math.nan}, "normalize must be .* nan"),
        ({"value_taps": TAPS[..., :2]}, "value_taps must have an odd number of taps, got 2"),
        ({"key_taps": TAPS[..., :2]}, "key_taps must have an odd number of taps, got 2"),
        ({"value_taps": TAPS[:, :5]}, r"value_taps must be \[2, 6, 1 or 4, S\].* \[2, 5, 1, 3\]"),
        ({"value_taps": TAPS[0]}, r"value_taps must be numbers \[B, K, H or 1, S\].* \[6, 1, 3\]"),
        ({"value_taps": TAPS.long()}, r"value_taps must be numbers"),
        ({"key_taps": [1.0]}, "key_taps must be numbers .* got list"),
        ({"key_taps": TAPS.expand(2, 6, 3, 3)}, r"key_taps must be .* got \[2, 6, 3, 3\]"),
        ({"key_taps": torch.cat([TAPS, TAPS])}, r"key_taps must be .* got \[4, 6, 1, 3\]"),
        ({"key_taps": TAPS.to("meta")}, "key_taps must be on cpu, but is on meta"),
    ],
)
def test_errors_say_what_was_expected_and_given(options, message):
    with pytest.raises(ValueError, match=message):
        mc.vicinity(X, X, X, **options)
