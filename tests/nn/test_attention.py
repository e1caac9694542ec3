"""KernelAttention: its formula, its kernels on every backend, its properties and its errors."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F

import mercer as mc
from mercer import nn as mn
from mercer.dispatch.choose import BACKENDS
from mercer.dispatch.problem import prepare

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 24, 4
DIM = WIDTH // HEADS
TOLERANCE = 1e-10


def squared(q, k):
    return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


def inner(q, k):
    return torch.einsum("bhid,bhjd->bhij", q, k)


def bandwidth(kernel):
    """s [H or 1, 1, 1]; without one given it counts from s^2 = sqrt(D) / 2."""
    base = math.sqrt(math.sqrt(DIM) / 2) if kernel.relative_to_default else 1.0
    return base * kernel.log_bandwidth.exp().reshape(-1, 1, 1)


def adaptive(kernel, q, k):
    steer = (q * kernel.weight[:, None]).sum(-1, keepdim=True)
    s = bandwidth(kernel) * torch.exp(kernel.reach * torch.tanh(steer / kernel.reach))
    return torch.exp(-squared(q, k) / (2 * s**2))


def matern52(kernel, q, k):
    a = math.sqrt(5) * squared(q, k).sqrt() / bandwidth(kernel)
    return (1 + a + a**2 / 3) * torch.exp(-a)


def cosine(q, k):
    return inner(q, k) / (q.norm(dim=-1)[..., :, None] * k.norm(dim=-1)[..., None, :])


# The kernel, and its weight written out from the table of kernels.
KERNELS = {
    "exponential": (
        lambda: mc.Exponential(),
        lambda n, q, k: torch.exp(inner(q, k) / math.sqrt(DIM)),
    ),
    "RBF": (
        lambda: mc.RBF(trainable=False),
        lambda n, q, k: torch.exp(-squared(q, k) / math.sqrt(DIM)),
    ),
    "RBF per head": (
        lambda: mc.RBF(heads=HEADS),
        lambda n, q, k: torch.exp(-squared(q, k) / (2 * bandwidth(n) ** 2)),
    ),
    "adaptive RBF": (lambda: mc.AdaptiveRBF(DIM, heads=HEADS), adaptive),
    "polynomial": (lambda: mc.Polynomial(2), lambda n, q, k: inner(q, k) ** 2),
    "polynomial 4": (lambda: mc.Polynomial(4), lambda n, q, k: inner(q, k) ** 4),
    "Laplace": (
        lambda: mc.Laplace(1.5),
        lambda n, q, k: torch.exp(-squared(q, k).sqrt() / bandwidth(n)),
    ),
    "rational quadratic": (
        lambda: mc.RationalQuadratic(alpha=0.7),
        lambda n, q, k: (1 + squared(q, k) / (1.4 * bandwidth(n) ** 2)) ** -0.7,
    ),
    "Matern 5/2": (lambda: mc.Matern(2.5, heads=HEADS), matern52),
    "cosine": (lambda: mc.Cosine(3.0), lambda n, q, k: torch.exp(3 * cosine(q, k))),
    "sum": (
        lambda: mc.RBF(heads=HEADS) + mc.Exponential(),
        lambda n, q, k: (
            torch.exp(-squared(q, k) / (2 * bandwidth(n.kernels[0]) ** 2))
            + torch.exp(inner(q, k) / math.sqrt(DIM))
        ),
    ),
    "product": (
        lambda: mc.RationalQuadratic() * mc.Exponential(),
        lambda n, q, k: (
            torch.exp(inner(q, k) / math.sqrt(DIM))
            / (1 + squared(q, k) / (2 * bandwidth(n.kernels[0]) ** 2))
        ),
    ),
}
POSITIONS = {
    "none": lambda: mn.NoPosition(),
    "direct sum": lambda: mn.DirectSum(),
    "learned": lambda: mn.DirectSum(mn.Learned(LENGTH)),
    "lookup": lambda: mn.LookupTable(3, per_head=True),
    "relative sinusoid": lambda: mn.RelativeSinusoid(),
    "product": lambda: mn.ProductKernel(),
    "rotary": lambda: mn.Rotary(),
    "alibi": lambda: mn.ALiBi(),
    "grid": lambda: mn.Grid2D(2, 3, prefix=1),
}


def make(*, dtype=torch.float64, **options):
    attention = mn.KernelAttention(WIDTH, HEADS, **options).to(dtype)
    # Some start at zero, where a wrong formula could hide.
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def draw(length=LENGTH, width=WIDTH, dtype=torch.float64):
    return torch.randn(BATCH, length, width, dtype=dtype)


def in_heads(x, linear, heads):
    return linear(x).unflatten(-1, (heads, -1)).transpose(1, 2)


def projected(attention, out):
    return attention.out(out.transpose(1, 2).flatten(2))


def gradients(attention, out):
    steer = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    parameters = list(attention.parameters())
    grads = torch.autograd.grad((out * steer).sum(), parameters, allow_unused=True)
    pairs = zip(parameters, grads, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def taking(attention, x, filter):
    """The backends that run this call, by asking each."""
    q, k, v, _ = attention.parts(x)
    tasks = prepare(attention.joined_kernel, q, k, v, filter, 0.0, False, "auto").tasks()
    return [name for name, b in BACKENDS.items() if all(b.refuses(task) is None for task in tasks)]


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("head_dim", [None, 5], ids=["D = d_model / H", "D = 5"])
def test_the_plain_case_is_scaled_dot_product_attention(causal, bias, head_dim):
    filter = mc.Causal() if causal else mc.Full()
    a, x = make(bias=bias, head_dim=head_dim, filter=filter), draw()
    q, k, v = (in_heads(x, linear, HEADS) for linear in (a.query, a.key, a.value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    close(a(x), projected(a, out))


def test_the_plain_case_is_multihead_attention_of_torch():
    theirs = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    ours, x, context = make(bias=True), draw(), draw(9)
    linears = (ours.query, ours.key, ours.value)
    with torch.no_grad():
        for n, linear in enumerate(linears):
            linear.weight.copy_(theirs.in_proj_weight.chunk(3)[n])
            linear.bias.copy_(theirs.in_proj_bias.chunk(3)[n])
    ours.out.load_state_dict(theirs.out_proj.state_dict())
    close(ours(x, context), theirs(x, context, context, need_weights=False)[0])


@pytest.mark.parametrize("context_dim", [None, 10], ids=["one width", "context_dim"])
def test_cross_attention_reads_keys_and_values_from_the_context(context_dim):
    a = make(context_dim=context_dim)
    x, context = draw(5), draw(9, context_dim or WIDTH)
    q = in_heads(x, a.query, HEADS)
    k, v = in_heads(context, a.key, HEADS), in_heads(context, a.value, HEADS)
    got = a(x, context)
    assert got.shape == (BATCH, 5, WIDTH)
    close(got, projected(a, F.scaled_dot_product_attention(q, k, v)))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("kernel", ["exponential", "RBF per head", "Laplace", "polynomial", "sum"])
def test_grouped_heads_share_keys_and_values_with_their_neighbours(kernel, kv_heads):
    build, weight = KERNELS[kernel]
    a, x = make(kernel=build(), num_kv_heads=kv_heads), draw()
    assert a.key.weight.shape == a.value.weight.shape == (kv_heads * DIM, WIDTH)
    q = in_heads(x, a.query, HEADS)
    k, v = in_heads(x, a.key, kv_heads), in_heads(x, a.value, kv_heads)
    group = HEADS // kv_heads
    k = torch.stack([k[:, head // group] for head in range(HEADS)], 1)
    v = torch.stack([v[:, head // group] for head in range(HEADS)], 1)
    w = weight(a.kernel, q, k)
    close(a(x), projected(a, w / w.sum(-1, keepdim=True) @ v))


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_its_formula(kernel):
    build, weight = KERNELS[kernel]
    a, x = make(kernel=build()), draw()
    q, k, v = (in_heads(x, linear, HEADS) for linear in (a.query, a.key, a.value))
    w = weight(a.kernel, q, k).tril()
    want = projected(a, w / w.sum(-1, keepdim=True) @ v)
    got = a(x, filter=mc.Causal())
    close(got, want)
    for got_grad, want_grad in zip(gradients(a, got), gradients(a, want), strict=True):
        close(got_grad, want_grad)


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Window(2, 1)], ids=repr)
@pytest.mark.parametrize("position", ["none", "lookup", "relative sinusoid", "alibi"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_backend_gives_the_output_and_gradients_of_the_reference(kernel, position, filter):
    a, x = make(kernel=KERNELS[kernel][0](), position=POSITIONS[position]()), draw()
    names = taking(a, x, filter)
    assert "chunked" in names
    assert ("sdpa" in names) == (
        kernel in ("exponential", "RBF", "RBF per head", "adaptive RBF", "cosine", "sum")
        and position != "lookup"
        and (position != "alibi" or filter.causal)
    )
    a.backend = "reference"
    want = a(x, filter=filter)
    want_grads = gradients(a, want)
    for name in (*names, "auto"):
        a.backend = name
        got = a(x, filter=filter)
        close(got, want)
        for got_grad, want_grad in zip(gradients(a, got), want_grads, strict=True):
            close(got_grad, want_grad)


@pytest.mark.parametrize("kernel", ["Laplace", "Matern 5/2", "RBF per head", "polynomial"])
def test_tied_projections_have_finite_equal_gradients_where_query_and_key_coincide(kernel):
    a, x = make(kernel=KERNELS[kernel][0](), symmetric=True), draw()
    results = []
    for name in ("reference", "chunked"):
        a.backend = name
        out = a(x)
        results.append([out, *gradients(a, out)])
    for want, got in zip(*results, strict=True):
        assert want.isfinite().all()
        close(got, want)


def test_a_backend_that_cannot_run_the_kernel_says_why():
    attention = make(kernel=mc.Polynomial(2), backend="sdpa")
    with pytest.raises(ValueError, match=r"'sdpa' cannot run this.*s\^2"):
        attention(draw())


def test_explain_says_what_forward_runs():
    plain, table = make().explain(draw()), make(position="lookup").explain(draw())
    assert (plain.backend, table.backend) == ("sdpa", "chunked")
    assert "table" in table.refusals["sdpa"]


def test_the_filter_of_a_call_goes_before_that_of_the_module():
    a, x = make(filter=mc.Causal()), draw()
    state, free = a.state_dict(), make()
    free.load_state_dict(state)
    close(a(x, filter=mc.Full()), free(x))
    close(free(x, filter=mc.Causal()), a(x))
    assert (a(x) - free(x)).abs().max() > 1e-3


@pytest.mark.parametrize("position", POSITIONS)
def test_the_future_changes_nothing(position):
    a, x = make(position=POSITIONS[position](), filter=mc.Causal()), draw()
    later = x.clone()
    later[:, 4:] += 3.0
    before, after = a(x), a(later)
    close(after[:, :4], before[:, :4])
    assert (after[:, 4:] - before[:, 4:]).abs().max() > 1e-3


@pytest.mark.parametrize("position", POSITIONS)
def test_one_token_gives_its_own_value(position):
    a, x = make(position=POSITIONS[position]()), draw(1)
    close(a(x), a.out(a.value(x)))


@pytest.mark.parametrize(
    ("options", "symmetric", "valid"),
    [
        ({}, False, False),
        ({"symmetric": True}, True, True),
        ({"symmetric": True, "position": mn.DirectSum()}, True, True),
        ({"symmetric": True, "position": mn.ProductKernel()}, True, True),
        ({"symmetric": True, "position": mn.Rotary()}, True, True),
        ({"symmetric": True, "position": mn.ALiBi()}, True, True),
        ({"symmetric": True, "position": mn.Grid2D(2, 4)}, True, True),
        ({"symmetric": True, "kernel": mc.RBF()}, True, True),
        ({"symmetric": True, "kernel": mc.Laplace() + mc.Polynomial()}, True, True),
        ({"symmetric": True, "kernel": mc.Exponential(-1.0)}, True, False),
        ({"symmetric": True, "kernel": mc.AdaptiveRBF(DIM)}, False, False),
        ({"symmetric": True, "position": mn.RelativeSinusoid()}, False, False),
        ({"symmetric": True, "position": mn.LookupTable(3)}, False, False),
        ({"symmetric": True, "position": mn.ProductKernel(symmetric=False)}, False, False),
        ({"position": mn.ProductKernel()}, False, False),
    ],
    ids=[
        "free", "tied", "tied, sum", "tied, product", "tied, rotary", "tied, alibi", "tied, grid",
        "tied, RBF", "tied, Laplace + polynomial", "tied, negative scale", "tied, adaptive",
        "tied, relative sinusoid", "tied, lookup", "tied, two W_T", "free, product",
    ],
)  # fmt: skip
def test_symmetric_and_valid_include_the_projections(options, symmetric, valid):
    a = make(**options)
    assert (a.symmetric, a.valid) == (symmetric, valid)
    q, k, _, _ = a.parts(draw(8))
    gram = a.joined_kernel(q, k)
    gap = (gram - gram.mT).abs().max() / gram.abs().max()
    assert (gap < 1e-12) == symmetric
    if symmetric:
        values = torch.linalg.eigvalsh(gram)
        assert (values.min() > -1e-12 * values.max()) == valid


@pytest.mark.parametrize("kernel", ["exponential", "RBF per head", "adaptive RBF", "sum"])
@pytest.mark.parametrize("position", POSITIONS)
def test_the_state_has_no_tensor_twice_and_survives_save_and_load(position, kernel):
    options = {"position": POSITIONS[position], "kernel": KERNELS[kernel][0]}
    one, two = (make(**{name: part() for name, part in options.items()}) for _ in range(2))
    x, state = draw(), one.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    named = one.named_parameters(remove_duplicate=False)
    assert sorted(n for n, _ in named) == sorted(n for n, _ in one.named_parameters())
    assert (one(x) - two(x)).abs().max() > 1e-3
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    two.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(one(x), two(x))


def test_a_kernel_given_to_two_modules_is_copied():
    kernel = mc.RBF(heads=HEADS).double()
    one, two = make(kernel=kernel), make(kernel=kernel)
    assert not torch.equal(one.kernel.log_bandwidth, two.kernel.log_bandwidth)
    assert torch.equal(kernel.log_bandwidth, torch.zeros(HEADS, dtype=torch.float64))


@pytest.mark.parametrize("position", ["relative sinusoid", "lookup", "product"])
def test_a_deep_copy_is_independent(position):
    one, x = make(kernel=mc.RBF(heads=HEADS), position=POSITIONS[position]()), draw()
    two, before = copy.deepcopy(one), one(x)
    close(two(x), before)
    for name in ("kernel.log_bandwidth", "position"):
        changed = copy.deepcopy(two)
        with torch.no_grad():
            for key, parameter in changed.named_parameters():
                if key.startswith(name):
                    parameter += torch.randn_like(parameter)
        assert (changed(x) - before).abs().max() > 1e-3, name
    assert torch.equal(one(x), before)


@pytest.mark.parametrize("kernel", ["exponential", "polynomial", "sum"])
def test_dropout_acts_in_training_only_and_keeps_the_mean(kernel):
    a = make(kernel=KERNELS[kernel][0](), dropout=0.3)
    x = draw()[:1].expand(4000, -1, -1)
    a.eval()
    with torch.no_grad():
        want = a(x)[0]
        assert torch.equal(a(x)[0], want)
        a.train()
        got = a(x)
    deviation = got.std(0) / math.sqrt(got.shape[0])
    assert (deviation > 0).all()
    # The largest of 168 correlated numbers is rarely beyond 4 standard errors.
    assert ((got.mean(0) - want).abs() / deviation).max() < 5


def test_without_dropout_training_is_evaluation():
    a, x = make(), draw()
    assert torch.equal(a.train()(x), a.eval()(x))


def errors(a, x, exact, **autocast):
    """The error of the module's own choice of backend, and of the reference, in this dtype."""
    found = []
    for backend in ("auto", "reference"):
        a.backend = backend
        with torch.autocast("cpu", torch.bfloat16, **autocast):
            out = a(x)
        assert out.dtype == torch.bfloat16
        found.append((out.double() - exact).square().mean().sqrt())
    return found


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "module"])
@pytest.mark.parametrize("kernel", ["exponential", "RBF per head", "Laplace", "sum"])
@pytest.mark.parametrize("position", POSITIONS)
def test_bfloat16_is_as_accurate_as_the_reference_in_bfloat16(position, kernel, autocast):
    dtype = torch.float32 if autocast else torch.bfloat16
    options = {"position": POSITIONS[position], "kernel": KERNELS[kernel][0]}
    options = {name: part() for name, part in options.items()}
    a = make(dtype=dtype, filter=mc.Causal(), **options)
    with torch.no_grad():
        for parameter in a.parameters():
            parameter.copy_(parameter.bfloat16())
    x = draw(dtype=torch.bfloat16).to(dtype)
    exact = copy.deepcopy(a).double()(x.double()).detach()
    got, reference = errors(a, x, exact, enabled=autocast)
    assert got <= 2 * reference + torch.finfo(torch.bfloat16).eps * exact.square().mean().sqrt()
    a.backend = "auto"
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = a(x).float().square().sum()
    loss.backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in a.parameters())


# torch.compile itself instantiates autograd.Function while it traces one.
@pytest.mark.parametrize(
    ("position", "kernel"),
    [
        ("none", "exponential"),
        ("learned", "RBF per head"),
        ("lookup", "exponential"),
        ("relative sinusoid", "exponential"),
        ("product", "Laplace"),
        ("alibi", "sum"),
    ],
)
def test_compiled_forward_and_backward_equal_eager(position, kernel):
    options = {"position": POSITIONS[position], "kernel": KERNELS[kernel][0]}
    options = {name: part() for name, part in options.items()}
    a, x = make(filter=mc.Causal(), **options), draw()
    want = a(x)
    want_grads = gradients(a, want)
    torch._dynamo.reset()
    got = torch.compile(a, fullgraph=True, backend="aot_eager")(x)
    close(got, want)
    for got_grad, want_grad in zip(gradients(a, got), want_grads, strict=True):
        close(got_grad, want_grad)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 5}, ["d_model", "24", "5"]),
        ({"d_model": -4}, ["d_model", "-4", "at least 1"]),
        ({"num_heads": 0}, ["num_heads", "0", "at least 1"]),
        ({"num_heads": -2}, ["num_heads", "-2", "at least 1"]),
        ({"head_dim": 0}, ["head_dim", "0", "at least 1"]),
        ({"context_dim": -3}, ["context_dim", "-3", "at least 1"]),
        ({"context_dim": 0}, ["context_dim", "0", "at least 1"]),
        ({"num_kv_heads": 3}, ["num_kv_heads", "3", "num_heads 4"]),
        ({"num_kv_heads": 0}, ["num_kv_heads", "0", "num_heads 4"]),
        ({"num_kv_heads": -2}, ["num_kv_heads", "-2", "num_heads 4"]),
        ({"value": "position"}, ["value", "'position'", "'content'", "'content+position'"]),
        ({"position": "sine"}, ["position", "'sine'", *mn.positions.POSITIONS]),
        ({"position": mn.DirectSum}, ["position", "type", "Position"]),
        ({"kernel": "rbf"}, ["kernel", "str", "Kernel"]),
        ({"kernel": mc.RBF}, ["kernel", "type", "Kernel"]),
        ({"symmetric": True, "num_kv_heads": 2}, ["symmetric", "num_kv_heads", "2", "4"]),
        ({"symmetric": True, "context_dim": 10}, ["symmetric", "context_dim", "10", "24"]),
    ],
    ids=[
        "d_model / num_heads", "d_model < 0", "num_heads 0", "num_heads < 0", "head_dim 0",
        "context_dim < 0", "context_dim 0", "num_heads / num_kv_heads", "num_kv_heads 0",
        "num_kv_heads < 0", "value", "position name", "position class", "kernel name",
        "kernel class", "symmetric and num_kv_heads", "symmetric and context_dim",
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named_with_what_was_expected(options, words):
    options = {"d_model": WIDTH, "num_heads": HEADS} | options
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        mn.KernelAttention(options.pop("d_model"), options.pop("num_heads"), **options)
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout": 1.5}, ["dropout", "1.5", "below 1"]),
        ({"backend": "fast"}, ["backend", "'fast'", "auto", "chunked"]),
        ({"filter": "causal"}, ["filter", "str", "Filter"]),
        ({"position": mn.DirectSum(), "context_dim": 10}, ["context_dim", "10", "24"]),
    ],
    ids=["dropout", "backend", "filter", "context_dim of a sum"],
)
def test_other_arguments_are_named_by_the_first_call_at_the_latest(options, words):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        make(**options)(draw(), draw(9, options.get("context_dim", WIDTH)))
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("options", "call", "words"),
    [
        ({}, {"x": (2, 5, 20)}, ["x", "[2, 5, 20]", "24"]),
        ({}, {"x": (5, 24)}, ["x", "[5, 24]", "24"]),
        ({}, {"x": (2, 5, 24), "context": (2, 5, 10)}, ["context", "[2, 5, 10]", "24"]),
        ({}, {"x": (2, 5, 24), "context": (5, 24)}, ["context", "[5, 24]", "24"]),
        ({}, {"x": (2, 5, 24), "context": (3, 5, 24)}, ["batch", "2", "3"]),
        ({"context_dim": 10}, {"x": (2, 5, 24)}, ["context", "10", "none"]),
        (
            {"context_dim": 10},
            {"x": (2, 5, 24), "context": (2, 5, 24)},
            ["context", "[2, 5, 24]", "10"],
        ),
    ],
    ids=[
        "wide x", "flat x", "narrow context", "flat context", "other batch", "no context",
        "wide context",
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_named_with_what_was_expected(options, call, words):
    attention = make(**options)
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        attention(**{name: torch.zeros(shape).double() for name, shape in call.items()})
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize("cache", [{}, (), 3, torch.zeros(1)], ids=["dict", "tuple", "int", "x"])
def test_a_cache_of_another_type_raises(cache):
    name = type(cache).__name__
    with pytest.raises(ValueError, match=f"cache must be a Cache or a SegmentMemory.*{name}"):
        make()(draw(), cache=cache)


def test_a_segment_memory_is_refused_in_cross_attention():
    with pytest.raises(ValueError, match="SegmentMemory is for self-attention"):
        make()(draw(), draw(), cache=mn.SegmentMemory(4))


@pytest.mark.parametrize("cache", [None, mn.Cache], ids=["no cache", "cache"])
def test_a_filter_of_another_type_raises(cache):
    with pytest.raises(ValueError, match="filter must be a Filter, got str"):
        make()(draw(), filter="causal", cache=None if cache is None else cache())


@pytest.mark.parametrize("position", ["none", "rotary", "lookup", "grid"])
def test_normalized_queries_and_keys_have_root_mean_square_one(position):
    a, x = make(position=POSITIONS[position](), normalize=True), draw()
    q, k, v, _ = a.parts(x)
    for features in (q, k):
        square = features.part("content").square().mean(-1)
        torch.testing.assert_close(square, torch.ones_like(square), rtol=1e-5, atol=1e-5)
    plain = mn.KernelAttention(WIDTH, HEADS, position=POSITIONS[position]()).double()
    plain.load_state_dict(a.state_dict())
    torch.testing.assert_close(plain.parts(x)[2], v)
    content = plain.parts(x)[0].part("content")
    torch.testing.assert_close(F.rms_norm(content, (DIM,)), q.part("content"))


def test_value_embeddings_are_added_to_the_values():
    a, x, ids = make(value_vocab=11, filter=mc.Causal()), draw(), torch.randint(11, (BATCH, LENGTH))
    plain = a.parts(x)[2]
    with_tokens = a.parts(x, token_ids=ids)[2]
    added = a.value_embedding(ids).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
    torch.testing.assert_close(with_tokens, plain + added)
    whole = a(x, token_ids=ids)
    for cache in (mn.Cache(), mn.SegmentMemory(LENGTH)):
        steps = [
            a(x[:, t : t + 1], token_ids=ids[:, t : t + 1], cache=cache) for t in range(LENGTH)
        ]
        torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=TOLERANCE, atol=TOLERANCE)
    with pytest.raises(ValueError, match="has value embeddings and needs token_ids"):
        a(x)
    with pytest.raises(ValueError, match="value_vocab must be at least 1"):
        make(value_vocab=0)


@pytest.mark.parametrize("value", ["content", "content+position"])
@pytest.mark.parametrize("position", POSITIONS)
def test_an_offset_moves_the_places_of_a_sequence(position, value):
    """Two places of padding before a sequence, hidden, give what the sequence gives alone."""
    if position == "none" and value == "content+position":
        pytest.skip("it has nothing to add")
    a, x = make(position=POSITIONS[position](), value=value, filter=mc.Causal()), draw()
    padded = torch.cat([draw(2), x[:, : LENGTH - 2]], 1)
    ids = torch.ones(BATCH, LENGTH, dtype=torch.long)
    ids[:, :2] = 0
    filter, offset = mc.Causal() & mc.Documents(ids), torch.full((BATCH,), 2)
    alone = a(x[:, : LENGTH - 2])
    together = a(padded, filter=filter, offset=offset)[:, 2:]
    torch.testing.assert_close(together, alone, rtol=TOLERANCE, atol=TOLERANCE)
    cache = mn.Cache()
    steps = [
        a(padded[:, t : t + 1], filter=mc.Causal() & mc.Documents(ids[:, : t + 1]), offset=offset,
          cache=cache)
        for t in range(LENGTH)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(steps, 1)[:, 2:], alone, rtol=TOLERANCE, atol=TOLERANCE)


def test_an_offset_is_for_self_attention_without_memory():
    a, x, offset = make(), draw(), torch.zeros(BATCH, dtype=torch.long)
    with pytest.raises(ValueError, match="offset is for self-attention"):
        a(x, draw(5), offset=offset)
    with pytest.raises(ValueError, match="takes no offset"):
        a(x, cache=mn.SegmentMemory(4), offset=offset)
