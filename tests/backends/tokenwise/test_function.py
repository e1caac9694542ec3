"""Convolved keys and values around flash attention: one function, its gradients, its kernels.

On a CPU the passes are plain PyTorch; on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1),
the same tests run the Triton kernels.
"""

import math

import pytest
import torch

import mercer as mc
from mercer import nn as mn
from mercer.backends.tokenwise import function, launch, lookup, operators, plain
from mercer.backends.tokenwise.plain import Call
from mercer.backends.tokenwise.taps import BOUNDARIES, sum_by_id
from mercer.backends.triton.backend import INSTALLED, INTERPRETED

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNELS = CUDA or (INSTALLED and INTERPRETED)
# Where the whole function runs in float64, its gradients are the reference's to the last digits.
EXACT = not KERNELS
DTYPE = torch.float64 if EXACT else torch.bfloat16 if CUDA else torch.float32
needs_triton = pytest.mark.skipif(not KERNELS, reason="needs a CUDA GPU or Triton's interpreter")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
# The interpreter is slow.
BATCH = 1 if INTERPRETED else 2
TEMPERATURES = {"softmax": 0.4} if INTERPRETED else {"free": None, "softmax": 0.4}
TARGETS = {"keys": (True, False), "values": (False, True), "both": (True, True)}


def draw(length, size, target, *, batch=BATCH, heads=2, kv_heads=2, dim=8, values=8, tap_heads=1):
    generator = torch.Generator().manual_seed(length + size)

    def normal(*shape):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(DEVICE, DTYPE)

    given = {
        "q": normal(batch, heads, length, dim),
        "k": normal(batch, kv_heads, length, dim),
        "v": normal(batch, kv_heads, length, values),
    }
    wide = torch.float64 if EXACT else torch.float32
    for name, wanted in zip(("key_taps", "value_taps"), TARGETS[target], strict=True):
        if wanted:
            given[name] = normal(batch, length, tap_heads, size).to(wide) / 2
    return given


def solve(given, dtype=None, **options):
    """The output and every gradient."""
    given = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in given.items()}
    out = mc.vicinity(**given, **options)
    generator = torch.Generator().manual_seed(5)
    steer = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad(out, list(given.values()), steer.to(out))
    return {"out": out.detach()} | dict(zip(given, grads, strict=True))


class Count:
    """Counts the calls of the fused function."""

    def __init__(self, monkeypatch):
        self.calls = 0
        run = function.Fused.apply

        def counted(*args):
            self.calls += 1
            return run(*args)

        monkeypatch.setattr(function.Fused, "apply", counted)


@pytest.fixture
def count(monkeypatch):
    return Count(monkeypatch)


def compare(given, what="", **options):
    """Compare all results of `solve`: to 1e-10 in float64, else within the budget."""
    got = solve(given, **options)
    want = solve(given, torch.float64, backend="reference", **options)
    if EXACT:
        for name, x in want.items():
            message = lambda m, n=name: f"{what} {n}: {m}"  # noqa: E731
            torch.testing.assert_close(got[name], x, rtol=1e-10, atol=1e-10, msg=message)
        return
    usual = solve(given, backend="reference", **options)
    for name, x in want.items():
        error = (got[name].double() - x).norm().item()
        plain = (usual[name].double() - x).norm().item()
        # Flash attention rounds its output and its gradients before the rest is added to them; a
        # gradient that is zero is a difference of numbers of size one.
        eps = torch.finfo(DTYPE).eps
        budget = 2 * plain + eps * (2 * x.norm().item() + 4 * x.numel() ** 0.5)
        assert error <= budget, f"{what} {name}: off by {error:.1e}, above {budget:.1e}"


@needs_triton
def test_keys_are_read_where_they_lie():
    """Token by token in memory, and from places that are no multiples of 16 bytes."""
    given = draw(40, 3, "values", dim=16, values=16)
    for offset in (0, 1):
        moved = dict(given)
        for name in "qkv":
            x = given[name].transpose(1, 2)
            room = x.new_empty(x.numel() + offset)
            moved[name] = room[offset:].view(x.shape).copy_(x).transpose(1, 2)
        compare(moved, f"{offset} on", boundary="shrink", normalize=0.4)


@pytest.mark.parametrize("normalize", TEMPERATURES.values(), ids=TEMPERATURES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_it_is_the_reference(boundary, size, target, normalize, count):
    options = {"boundary": boundary, "normalize": normalize}
    compare(draw(13, size, target), **options)
    compare(draw(9, size, target, tap_heads=2), filter=mc.Full(), **options)
    assert count.calls == 2


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("length", [1, 2, 4, 33])
def test_short_and_odd_lengths(length, boundary, count):
    for size, target in ((3, "values"), (5, "both"), (7, "keys")):
        compare(draw(length, size, target), f"{size} {target}", boundary=boundary, normalize=0.7)
    assert count.calls == 3


@pytest.mark.parametrize("tap_heads", [1, 2, 4])
def test_grouped_heads_and_values_of_another_width(tap_heads, count):
    for dim, values in ((8, 8), (8, 5), (6, 11)):
        given = draw(
            11, 5, "both", heads=4, kv_heads=2, dim=dim, values=values, tap_heads=tap_heads
        )
        compare(given, f"{dim} {values}", boundary="truncate", normalize=0.4)
    assert count.calls == 3


def test_keys_and_values_may_have_kernels_of_different_sizes(count):
    for boundary in BOUNDARIES:
        given = draw(12, 3, "keys") | {"value_taps": draw(12, 7, "values")["value_taps"]}
        compare(given, boundary, boundary=boundary, normalize=0.4)
    assert count.calls == 4


def test_a_scale_and_taps_that_all_sequences_share():
    given = draw(10, 3, "both")
    given["value_taps"] = given["value_taps"][:1]
    compare(given, kernel=mc.Exponential(0.7), normalize=0.4)


def test_memory_that_lies_token_by_token(count):
    given = draw(14, 3, "both")
    for name in ("q", "k", "v"):
        given[name] = given[name].transpose(1, 2).contiguous().transpose(1, 2)
    compare(given, normalize=0.4)
    assert count.calls == 1


@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_the_future_changes_no_bit(boundary, size, count):
    given = draw(40, size, "both", dim=16, values=16)
    options = {"boundary": boundary, "normalize": 0.4}
    before = mc.vicinity(**given, **options)
    for place in (2, 17):
        other = {n: x.clone() for n, x in given.items()}
        for name in ("k", "v"):
            other[name][:, :, place:] += 5.0
        for name in ("key_taps", "value_taps"):
            other[name][:, place:] -= 3.0 * torch.randn_like(other[name][:, place:])
        after = mc.vicinity(**other, **options)
        assert torch.equal(before[:, :, :place], after[:, :, :place])
        assert not torch.equal(before[:, :, place:], after[:, :, place:])
    assert count.calls == 3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_inputs_not_finite_reach_only_the_rows_that_see_them(boundary, target):
    given = draw(40, 5, target, dim=16, values=16)
    options = {"boundary": boundary, "normalize": 0.4}
    before = mc.vicinity(**given, **options)
    for name, value in (("k", math.nan), ("k", -math.inf), ("v", math.inf), ("v", math.nan)):
        for place in (18,) if INTERPRETED else (0, 18, 39):
            other = {n: x.clone() for n, x in given.items()}
            other[name][:, :, place, 3] = value
            after = mc.vicinity(**other, **options)
            assert torch.equal(before[:, :, :place], after[:, :, :place])
            assert after[:, :, place:].isnan().any(-1).all()
    for name in {"key_taps", "value_taps"} & set(given):
        other = given | {name: given[name].clone()}
        other[name][:, 20] = math.nan
        after = mc.vicinity(**other, **options)
        assert torch.equal(before[:, :, :20], after[:, :, :20])
        assert after[:, :, 20:].isnan().any(-1).all()


def test_gradients_are_the_same_bits_each_time():
    given = draw(65, 5, "both")
    first, *others = (solve(given, normalize=0.4) for _ in range(3))
    for other in others:
        for name in ("out", "k", "v", "key_taps", "value_taps"):
            assert torch.equal(first[name], other[name]), name


def test_unsupported_calls_run_as_before(count):
    given = draw(12, 3, "both")
    mc.vicinity(**given, filter=mc.Window(4, 0))
    mc.vicinity(**given, filter=mc.Causal() & mc.Padding([9, 12][:BATCH]))
    mc.vicinity(**given, dropout_p=0.1)
    mc.vicinity(**given, kernel=mc.RBF().to(DEVICE))
    mc.vicinity(**given, return_log_mass=True)
    mc.vicinity(**given | {"q": given["q"][:, :, 5:]})
    mc.vicinity(**given, backend="reference")
    assert count.calls == 0
    mc.vicinity(**given, filter=mc.Window(-1, 0))
    assert count.calls == 1


@needs_triton
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("temperature", [None, 0.4])
def test_the_kernels_are_the_plain_passes(boundary, temperature):
    """Kernels of a key and their gradients, in float32."""
    for cut, size, heads in ((0, 5, 2), (1, 3, 1), (2, 5, 3), (3, 7, 1), (3, 3, 2)):
        call = Call(boundary, True, cut, temperature, 0.5)
        # Of both targets, as rows of one table hold them.
        pair = torch.randn(2, 70, 2, heads, size, device=DEVICE).unbind(2)
        got = launch.kernels(pair, call, torch.float32)
        want = plain.kernels(pair, call, torch.float32)
        assert all(map(torch.equal, got, launch.kernels(pair, call, torch.float32)))
        torch.testing.assert_close(got, want)
        # All heads have a gradient, three of them for each kernel if it is shared.
        grads = [
            torch.randn(2, 70, 3 if heads == 1 else heads, *x.shape[3:], device=DEVICE)
            for x in want
        ]
        for grad in grads:
            # A tap beyond the query, or the ends, reads nothing, so that it has no gradient.
            for a in range(cut):
                grad[..., 1 + a, size // 2 + a + 1 :] = 0.0
            for d in range(1, size // 2 + 1):
                grad[:, :d, ..., size // 2 - d] = 0.0
                grad[:, 70 - d :, ..., size // 2 + d] = 0.0
        sums = [x.sum(2, keepdim=True) if heads == 1 else x for x in grads]
        if temperature is None:
            sums = [torch.where(w == 0, 0.0, x) for w, x in zip(want, sums, strict=True)]
        same = plain.kernels_backward(sums, want, pair, call)
        for both in ((0, 1), (0,), (1,)):
            given = [
                [x if n in both else None for n, x in enumerate(xs)] for xs in (grads, want, pair)
            ]
            got = launch.kernels_backward(*given, call)
            for n in range(2):
                assert (got[n] is None) == (n not in both)
            torch.testing.assert_close([got[n] for n in both], [same[n] for n in both])


@needs_triton
@pytest.mark.parametrize("targets", [1, 2])
def test_the_gradient_of_a_table_is_the_sum_of_its_rows(targets):
    ids = torch.randint(0, 40, (3, 130), device=DEVICE)
    ids[:, ::3] = 7
    grads = [torch.randn(3, 130, 2, 3, device=DEVICE) for _ in range(targets)]
    # Numbers of very different sizes, and zeros.
    grads[0] *= torch.exp(4 * torch.randn(3, 130, 1, 1, device=DEVICE))
    grads[-1][0] = 0.0
    got = lookup.sum_exactly(grads, ids, 50)
    rows = torch.stack(grads, 2).flatten(0, 1).double()
    want = sum_by_id(rows, ids.flatten(), 50)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6 * want.abs().max().item())
    assert torch.equal(got, lookup.sum_exactly(grads, ids, 50))
    tiny = lookup.sum_exactly([g * 1e-30 for g in grads], ids, 50)
    torch.testing.assert_close(tiny.double() * 1e30, want, rtol=1e-5, atol=1e-5)
    assert not lookup.sum_exactly([g * 0.0 for g in grads], ids, 50).any()
    grads[0][0, 0] = math.nan
    assert lookup.sum_exactly(grads, ids, 50).isnan().all()


def test_token_kernels_learn_the_same_table_each_time():
    tokens = mn.TokenKernels(500, 3, on="kv").to(DEVICE)
    ids = torch.randint(0, 500, (BATCH, 90), device=DEVICE)
    ids[:, ::2] = 3
    given = draw(90, 3, "both")
    q, k, v = (given[n].to(torch.float32 if EXACT else DTYPE) for n in "qkv")

    def grad(backend="auto", gathered=True):
        table = tokens.weight.detach().requires_grad_()
        rows = torch.func.functional_call(tokens, {"weight": table}, (ids,)) if gathered else None
        keys, values = rows or (table[ids][:, :, 0, n] for n in range(2))
        out = mc.vicinity(q, k, v, key_taps=keys, value_taps=values, normalize=0.4, backend=backend)
        return torch.autograd.grad(out.float().square().sum(), table)[0]

    with torch.no_grad():
        tokens.weight.add_(torch.randn_like(tokens.weight))
    first = grad()
    assert torch.equal(first, grad())
    want = grad("reference", gathered=False)
    tolerance = 1e-4 if q.dtype == torch.float32 else 0.03
    assert (first - want).norm() <= tolerance * want.norm()


def same(name, want, got):
    """Equal bits; but for the queries, which flash attention on a GPU sums in any order."""
    if CUDA and name == "q":
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    else:
        assert torch.equal(want, got), name


def compare_compiled(calls, given):
    """Outputs and gradients of some calls, eager and as one compiled graph."""
    names = [f"out {n}" for n in range(len(calls))] + [name for one in given for name in one]
    wanted = [x.detach().requires_grad_() for one in given for x in one.values()]

    def run(*tensors):
        rest = list(tensors)
        return [
            mc.vicinity(**{name: rest.pop(0) for name in one}, **options)
            for one, options in zip(given, calls, strict=True)
        ]

    results, ran = [], []
    forward = function.forward
    torch._dynamo.reset()
    for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(function, "forward", lambda *x: ran.append(x[5]) or forward(*x))
            outs = call(*wanted)
        loss = sum(out.double().square().sum() for out in outs)
        results.append((*outs, *torch.autograd.grad(loss, wanted)))
    assert len(ran) == 2 * len(calls)
    for name, want, got in zip(names, *results, strict=True):
        same(name, want, got)


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_compiled_graph_gives_the_same(boundary):
    options = {"boundary": boundary, "normalize": 0.4}
    calls, given = [], []
    for target, size, length in (("keys", 3, 13), ("values", 5, 9), ("both", 3, 70)):
        calls += [options, options | {"filter": mc.Full()}]
        heads = 2 if target == "keys" else 1
        given += [draw(length, size, target, tap_heads=heads, dim=16, values=16)] * 2
    # Memory that lies token by token.
    turned = {name: given[-1][name].transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    # Shorter than a kernel reaches; grouped heads and values of another width; taps as they are.
    calls += [options, options, options | {"normalize": None}]
    given += [given[-1] | turned, draw(2, 7, "both"), draw(12, 5, "both", heads=4, values=5)]
    compare_compiled(calls, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_compiled_graph_takes_every_dtype(dtype):
    if not EXACT and (dtype == torch.float32) == CUDA:
        pytest.skip("not one function there")
    given = {n: x if CUDA and "taps" in n else x.to(dtype) for n, x in draw(33, 3, "both").items()}
    compare_compiled([{"normalize": 0.4}], [given])


def test_a_compiled_graph_takes_other_lengths():
    compiled = torch.compile(
        lambda **given: mc.vicinity(**given, normalize=0.4), fullgraph=True, dynamic=True
    )
    torch._dynamo.reset()
    for length in (24, 40, 56):
        given = {n: x.requires_grad_() for n, x in draw(length, 3, "both").items()}
        want, got = mc.vicinity(**given, normalize=0.4), compiled(**given)
        assert torch.equal(want, got)
        grads = [torch.autograd.grad(x.square().sum(), list(given.values())) for x in (want, got)]
        for name, *pair in zip(given, *grads, strict=True):
            same(name, *pair)


def test_a_compiled_graph_learns_the_same_table():
    tokens = mn.TokenKernels(50, 3, on="kv").to(DEVICE)
    ids = torch.randint(0, 50, (BATCH, 40), device=DEVICE)
    given = draw(40, 3, "both")
    q, k, v = (given[n].to(torch.float32 if EXACT else DTYPE) for n in "qkv")

    def run():
        keys, values = tokens(ids)
        return mc.vicinity(q, k, v, key_taps=keys, value_taps=values, normalize=0.4)

    torch._dynamo.reset()
    want, got = (
        torch.autograd.grad(call().float().square().sum(), tokens.weight)[0]
        for call in (run, torch.compile(run, fullgraph=True, backend="aot_eager"))
    )
    assert want.any()
    assert torch.equal(want, got)


@pytest.mark.parametrize("target", TARGETS)
def test_its_operators_pass_opcheck(target):
    for boundary, causal, length, tokens in (
        ("shrink", True, 20, False), ("none", True, 24, True), ("left", True, 20, False),
        ("truncate", False, 20, False), ("shrink", True, 1, False),
    ):  # fmt: skip
        given = draw(length, 3, target)
        q, k, v = (given[n] for n in "qkv")
        if tokens:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        taps = given.get("key_taps"), given.get("value_taps")
        cut = int(causal and boundary != "left")
        options = (boundary, causal, cut, 0.4, 0.5, tokens)
        wanted = [None if x is None else x.clone().requires_grad_() for x in (q, k, v, *taps)]
        torch.library.opcheck(operators.smooth_taps, (*wanted, *options))
        made = operators.smooth_taps(q, k, v, *taps, *options)
        arguments = (torch.randn_like(made[0]), q, k, v, *taps, made, *options)
        torch.library.opcheck(operators.smooth_taps_backward, arguments)
    ids = torch.randint(0, 7, (2, 9), device=DEVICE)
    targets = sum(TARGETS[target])
    table = torch.randn(7, targets, 2, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(lookup.gather_taps, (table, ids))
    grads = [torch.randn(2, 9, 2, 3, device=DEVICE) for _ in range(targets)]
    torch.library.opcheck(lookup.sum_taps, (grads, ids, 7))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node:UserWarning")
def test_a_graph_can_be_captured():
    tokens = mn.TokenKernels(500, 3).to(DEVICE)
    given = draw(64, 3, "values", dim=16, values=16)
    q, k, v = (given[n].requires_grad_() for n in "qkv")
    ids = torch.randint(0, 500, (2, 64), device=DEVICE)

    def step():
        out = mc.vicinity(q, k, v, value_taps=tokens(ids).values, normalize=0.4)
        return (out, *torch.autograd.grad(out.float().square().sum(), [q, k, v, tokens.weight]))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    # Other tokens in the same memory: a replay must not remember those it was captured with.
    ids.copy_(torch.randint(0, 500, (2, 64), device=DEVICE))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        torch.testing.assert_close(got, want)
