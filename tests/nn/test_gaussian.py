"""GaussianAttention: its formula, its bandwidths, its cache, its report and its errors."""

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
from mercer.nn.gaussian import spread

BATCH, LENGTH, WIDTH, HEADS = 2, 11, 24, 3
DIM = WIDTH // HEADS
TOLERANCE = 1e-10
IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3], [5] * 11])

FILTERS = {
    "causal": mc.Causal(),
    "full": mc.Full(),
    "window": mc.Window(3, 0),
    "two-sided window": mc.Window(2, 1),
    "memory": mc.Memory(2),
    "strided": mc.Strided(3),
    "fixed": mc.Fixed(4, 2),
    "padding": mc.Padding([LENGTH, 4]),
    "causal, padding": mc.Causal() & mc.Padding([LENGTH, 5]),
    "causal, documents": mc.Causal() & mc.Documents(IDS),
    "either": mc.Strided(4) | mc.Window(1, 0),
    "a row that sees nothing": mc.Causal() & mc.Padding([7, 0]),
}
# Of these, one place after another gives what all at once give.
CAUSAL = [name for name, filter in FILTERS.items() if filter.causal]
OPTIONS = {
    "plain": {},
    "rotary": {"rotary": True},
    "adaptive": {"adaptive": True},
    "rotary, adaptive": {"rotary": mn.Rotary(100.0), "adaptive": True},
    "fixed": {"bandwidth": 2.0, "trainable": False},
    "a bandwidth per head": {"bandwidth": [1.0, 2.0, 9.0]},
    "normalize": {"normalize": True},
}
CHUNKS = {"steps": (1,) * LENGTH, "prefill": (4, 1, 5, 1), "growing": (1, 2, 8)}


def make(options="plain", dtype=torch.float64, **more):
    a = mn.GaussianAttention(WIDTH, HEADS, **(OPTIONS[options] | more)).to(dtype)
    if a.adaptive:
        torch.nn.init.normal_(a.steering, std=0.5)
    return a


def draw(length=LENGTH, batch=BATCH, dtype=torch.float64):
    return torch.randn(batch, length, WIDTH, dtype=dtype)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def rotate(f, base):
    """Feature p and feature p + D/2 of place i, as a complex number, times exp(i w_p sqrt(-1))."""
    pairs = torch.complex(*f.chunk(2, -1))
    w = torch.tensor([base ** (-2 * p / DIM) for p in range(DIM // 2)], dtype=torch.float64)
    angle = torch.arange(f.shape[2], dtype=torch.float64)[:, None] * w
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], -1)


def shares(a, x, visible, options="plain"):
    """Every row of weights, written out, [B, H, T, T]; and the values."""
    if a.normalize:
        x = x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()
    f = torch.stack([x[..., h * DIM : (h + 1) * DIM] for h in range(HEADS)], 1)
    g = f
    if a.rotary is not None:
        g = rotate(f, 10000.0 if options == "rotary" else 100.0)
    apart = (g[:, :, :, None] - g[:, :, None]).square().sum(-1)
    log_s = a.log_bandwidth[:, None, None]
    if a.adaptive:
        steer = (f * a.steering[:, None]).sum(-1, keepdim=True)
        log_s = log_s + 2 * torch.tanh(steer / 2)
    weight = torch.exp(-apart / (2 * torch.exp(log_s) ** 2)) * visible
    mass = weight.sum(-1, keepdim=True)
    return torch.where(mass > 0, weight / torch.where(mass > 0, mass, 1.0), 0.0), f


def formula(a, x, visible, options="plain"):
    share, f = shares(a, x, visible, options)
    return torch.cat([(share @ f)[:, h] for h in range(HEADS)], -1) @ a.out.weight.T


def seen(filter, length=LENGTH):
    return filter.mask(length, length)


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_its_formula_with_all_gradients(options, filter):
    a, x = make(options, filter=filter), draw().requires_grad_()
    got, want = a(x), formula(a, x, seen(filter), options)
    close(got, want)
    inputs = [x, *a.parameters()]
    steer = torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad((got * steer).sum(), inputs),
        torch.autograd.grad((want * steer).sum(), inputs),
        strict=True,
    ):
        close(one, other)


@pytest.mark.parametrize("options", OPTIONS)
def test_every_backend_that_takes_it_gives_the_same(options):
    a, x = make(options), draw()
    q, k, v, filter = a.parts(x)
    tasks = prepare(a.joined_kernel, q, k, v, filter, 0.0, False, "auto").tasks()
    names = [name for name, b in BACKENDS.items() if all(b.refuses(t) is None for t in tasks)]
    assert {"sdpa", "chunked"} <= set(names)
    for a.backend in (*names, "reference"):
        close(a(x), formula(a, x, seen(mc.Causal()), options))


@pytest.mark.parametrize("length", [0, 1, 2, 65])
def test_any_length_will_do(length):
    a, x = make(), draw(length)
    close(a(x), formula(a, x, seen(mc.Causal(), length)) if length else x)


def test_a_filter_of_the_call_takes_the_place_of_its_own():
    a, x = make(), draw()
    filter = mc.Causal() & mc.Documents(IDS)
    close(a(x, filter=filter), formula(a, x, seen(filter)))


def test_it_has_as_many_parameters_as_it_says():
    def count(**options):
        return sum(p.numel() for p in mn.GaussianAttention(1280, 10, **options).parameters())

    assert count() == 1280**2 + 10
    assert count(rotary=True, normalize=True) == 1280**2 + 10
    assert count(trainable=False) == 1280**2
    assert count(adaptive=True) == 1280**2 + 10 + 1280
    named = {n: tuple(p.shape) for n, p in make().named_parameters()}
    assert named == {"log_bandwidth": (HEADS,), "out.weight": (WIDTH, WIDTH)}


def test_query_key_and_value_are_one_view_of_the_input():
    a, x = make(), draw()
    q, k, v, _ = a.parts(x)
    for part in (q.part("content"), k.part("content"), v):
        assert part.shape == (BATCH, HEADS, LENGTH, DIM)
        assert part.data_ptr() == x.data_ptr()
        assert part.stride() == (LENGTH * WIDTH, DIM, WIDTH, 1)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_future_changes_nothing_to_the_last_bit(options, name):
    a, x = make(options, torch.float32, filter=FILTERS[name]), draw(dtype=torch.float32)
    for a.backend in ("auto", "chunked", "reference"):
        before = a(x)
        for t in range(1, LENGTH):
            later = x.clone()
            later[:, t:] = 3 * torch.randn_like(later[:, t:])
            assert torch.equal(a(later)[:, :t], before[:, :t])


def test_adaptive_starts_as_one_bandwidth_a_head():
    x = draw()
    a, b = mn.GaussianAttention(WIDTH, HEADS), mn.GaussianAttention(WIDTH, HEADS, adaptive=True)
    b.load_state_dict(a.state_dict() | {"steering": torch.zeros(HEADS, DIM)})
    close(a.double()(x), b.double()(x))
    assert (a.valid, b.valid, b.symmetric) == (True, False, False)


def test_rotary_makes_equal_tokens_differ_by_how_far_apart_they_stand():
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64).expand(1, LENGTH, WIDTH)
    weights = make("rotary").joined_kernel(*make("rotary").parts(x)[:2])
    close(weights[..., 1:, 1:], weights[..., :-1, :-1])
    assert (weights[0, :, 3, 3] == 1).all()
    assert (weights[0, :, 3, 2] < 1).all()


def test_query_bandwidths_depend_on_the_token_and_not_its_place():
    a = make("rotary, adaptive")
    x = torch.randn(1, 1, WIDTH, dtype=torch.float64).expand(1, LENGTH, WIDTH)
    log_s = a.log_scale(a.parts(x)[0])
    close(log_s, log_s[:, :, :1].expand_as(log_s))


VALUED = ("plain", "rotary", "adaptive", "rotary, adaptive", "normalize")
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2]])


@pytest.mark.parametrize("options", VALUED)
def test_value_embeddings_are_added_to_the_values_alone(options):
    """As its formula, with all gradients: a share of another value, and the same weights."""
    a, x = make(options, value_vocab=10), draw().requires_grad_()
    got = a(x, token_ids=TOKENS)
    share, f = shares(a, x, seen(mc.Causal()), options)
    added = a.value_embedding(TOKENS).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
    want = (share @ (f + added)).transpose(1, 2).flatten(2) @ a.out.weight.T
    close(got, want)
    inputs, steer = [x, *a.parameters()], torch.randn_like(got)
    for one, other in zip(
        torch.autograd.grad((got * steer).sum(), inputs),
        torch.autograd.grad((want * steer).sum(), inputs),
        strict=True,
    ):
        close(one, other)
    with torch.no_grad():
        weights = mn.attention_weights(a, x, token_ids=TOKENS)
    close(weights, share)
    assert sum(p.numel() for p in a.parameters()) - 10 * WIDTH == sum(
        p.numel() for p in make(options).parameters()
    )


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("options", VALUED)
def test_decoding_with_value_embeddings_equals_the_full_pass(options, chunks):
    """The cache then holds x and its values; a memory holds x and the ids."""
    a, x, cache, ids = make(options, value_vocab=10), draw(), mn.Cache(), TOKENS
    want = a(x, token_ids=ids)
    pieces = list(zip(x.split(chunks, 1), ids.split(chunks, 1), strict=True))
    close(torch.cat([a(y, cache=cache, token_ids=n) for y, n in pieces], 1), want)
    assert cache.size == 2 * x.numel()
    memory = mn.SegmentMemory(LENGTH)
    close(torch.cat([a(y, cache=memory, token_ids=n) for y, n in pieces], 1), want)
    cache.crop(4)
    cache.reorder(torch.tensor([1, 0]))
    rest = a(x.flip(0)[:, 4:], cache=cache, token_ids=ids.flip(0)[:, 4:])
    close(rest, want.flip(0)[:, 4:])


def test_value_embeddings_need_ids():
    a, x = make(value_vocab=10), draw()
    with pytest.raises(ValueError, match="value embeddings and needs token_ids"):
        a(x)
    with pytest.raises(ValueError, match="from 0 to 9 for the value embeddings"):
        a(x, token_ids=TOKENS + 9)
    with pytest.raises(ValueError, match="value_vocab must be at least 1, got 0"):
        make(value_vocab=0)
    assert [head.head for head in a.report(x)] == [0, 1, 2]
    before = a.value_embedding.weight.clone()
    a.reset_parameters()
    assert not torch.equal(before, a.value_embedding.weight)


def test_dropout_acts_in_training_only():
    a, x = make(dropout=0.5), draw()
    assert (a(x) - a.eval()(x)).abs().max() > 1e-3
    close(a(x), formula(a, x, seen(mc.Causal())))


# Bandwidths


def test_bandwidths_start_spread_around_the_root_of_the_head_dimension():
    s = mn.GaussianAttention(1280, 5).bandwidth
    root = math.sqrt(256)
    torch.testing.assert_close(s, root * 2 ** torch.linspace(-1, 1, 5))
    assert mn.GaussianAttention(64, 1).bandwidth.item() == pytest.approx(8.0)
    assert spread(64, 2) == pytest.approx([4.0, 16.0])


def test_no_head_starts_blind_or_frozen():
    """On normalised tokens of a random embedding, at lengths from 256 to 2048."""
    a = mn.GaussianAttention(1280, 10, normalize=True)
    for length in (256, 2048):
        report = a.report(torch.randn(1, length, 1280))
        assert max(h.self_weight for h in report) < 0.4
        assert min(h.neighbours for h in report) > 10
        sizes = [h.neighbours for h in report]
        assert sizes == sorted(sizes)


def test_a_bandwidth_is_its_parameter_until_it_nears_its_bounds():
    a = make()
    root = math.sqrt(DIM)
    with torch.no_grad():
        a.log_bandwidth.copy_(torch.tensor([root / 4, root, root * 8]).log())
    assert torch.equal(a.bandwidth, a.log_bandwidth.exp())


@pytest.mark.parametrize("far", [-1e9, -50.0, 50.0, 1e9])
def test_no_step_makes_a_bandwidth_collapse_or_explode(far):
    a, x = make(), draw()
    low, high = (math.exp(bound) for bound in a.bounds)
    with torch.no_grad():
        a.log_bandwidth.fill_(far)
    assert (a.bandwidth >= low * (1 - 1e-12)).all()
    assert (a.bandwidth <= high * (1 + 1e-12)).all()
    assert a(x).isfinite().all()
    assert all(h.at_bound and "at its bound" in h.note for h in a.report(x))


def test_the_bounds_include_given_bandwidths():
    root = math.sqrt(DIM)
    assert [math.exp(b) for b in make().bounds] == pytest.approx([root / 32, root * 32])
    a = make(bandwidth=1e-3)
    torch.testing.assert_close(a.bandwidth, torch.full((HEADS,), 1e-3, dtype=torch.float64))
    assert [math.exp(b) for b in a.bounds] == pytest.approx([1e-3 / 16, root * 16])


def test_the_gradient_past_a_bound_is_not_zero():
    a, x = make(), draw()
    for outside in (a.bounds[0] - 1.0, a.bounds[1] + 1.0):
        with torch.no_grad():
            a.log_bandwidth.fill_(outside)
        (grad,) = torch.autograd.grad(a.bandwidth.sum(), a.log_bandwidth)
        assert (grad > 0).all()
    with torch.no_grad():
        a.log_bandwidth.fill_(a.bounds[1] - math.log(2) + 0.5)
    (grad,) = torch.autograd.grad(a(x).square().sum(), a.log_bandwidth)
    assert (grad != 0).all()


def test_training_finds_the_bandwidth_that_made_the_data():
    teacher = make(bandwidth=[1.0, 2.0, 4.0])
    student = make(bandwidth=2.0)
    student.out.load_state_dict(teacher.out.state_dict())
    x = draw(32, 4)
    with torch.no_grad():
        y = teacher(x)
    adam = torch.optim.Adam([student.log_bandwidth], lr=0.05)
    for _ in range(150):
        adam.zero_grad()
        (student(x) - y).square().mean().backward()
        adam.step()
    torch.testing.assert_close(student.bandwidth, teacher.bandwidth, rtol=0.02, atol=0)


def test_reset_parameters_goes_back_to_the_start():
    a = make("adaptive", bandwidth=[1.0, 2.0, 3.0])
    with torch.no_grad():
        a.log_bandwidth += 1
    before = a.out.weight.clone()
    a.reset_parameters()
    torch.testing.assert_close(a.bandwidth.detach(), torch.tensor([1.0, 2.0, 3.0]).double())
    assert (a.steering == 0).all()
    assert not torch.equal(a.out.weight, before)


# Precision, compilation, state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS)
def test_half_precision_is_as_accurate_as_the_reference_in_it(options, dtype):
    a = make(options, dtype)
    x = draw(dtype=dtype)
    exact = copy.deepcopy(a).double()(x.double())

    def error(backend):
        a.backend = backend
        return (a(x).double() - exact).square().mean().sqrt()

    budget = 2 * error("reference") + torch.finfo(dtype).eps * exact.square().mean().sqrt()
    for backend in ("auto", "chunked"):
        assert error(backend) <= budget


@pytest.mark.parametrize("options", OPTIONS)
def test_under_autocast_query_key_and_value_are_cast_once(options):
    a, x = make(options, torch.float32), draw(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v, _ = a.parts(x)
        out = a(x)
    assert out.dtype == v.dtype == torch.bfloat16
    if a.rotary is None:
        assert q.part("content").data_ptr() == k.part("content").data_ptr() == v.data_ptr()
    assert (out - a(x)).abs().max() < 0.1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("options", OPTIONS)
def test_compiled_forward_and_backward_equal_eager(options):
    torch._dynamo.reset()
    a, x = make(options), draw().requires_grad_()
    inputs = [x, *a.parameters()]
    want = torch.autograd.grad(a(x).square().sum(), inputs)
    got = torch.compile(a, fullgraph=True, backend="aot_eager")(x)
    close(got, a(x))
    for one, other in zip(torch.autograd.grad(got.square().sum(), inputs), want, strict=True):
        close(one, other)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_same_input_gives_the_same_bits(options):
    a, x = make(options, torch.float32), draw(dtype=torch.float32).requires_grad_()
    inputs = [x, *a.parameters()]
    runs = [(a(x), *torch.autograd.grad(a(x).square().sum(), inputs)) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


@pytest.mark.parametrize("options", OPTIONS)
def test_its_state_is_saved_and_loaded(options):
    a, b, x = make(options), make(options), draw()
    with torch.no_grad():
        a.log_bandwidth += 0.3
    file = io.BytesIO()
    torch.save(a.state_dict(), file)
    file.seek(0)
    b.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(a(x), b(x))
    assert set(a.state_dict()) == {"log_bandwidth", "out.weight"} | (
        {"steering"} if a.adaptive else set()
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_a_copy_has_its_own_bandwidths(options):
    a, x = make(options), draw()
    file = io.BytesIO()
    torch.save(a, file)
    file.seek(0)
    want = a(x)
    for b in (copy.deepcopy(a), torch.load(file, weights_only=False)):
        with torch.no_grad():
            b.log_bandwidth += 0.5
        assert torch.equal(a(x), want)
        assert (b(x) - want).abs().max() > 1e-4


def test_parameters_can_be_given_from_outside():
    a, x = make(), draw()
    other = {"log_bandwidth": a.log_bandwidth + 0.5, "out.weight": a.out.weight}
    got = torch.func.functional_call(a, other, (x,))
    with torch.no_grad():
        a.log_bandwidth += 0.5
    close(got, a(x))


# Windows


def test_a_pattern_of_windows_repeats_and_ends_with_a_long_one():
    short, long = mc.Window(256, 0), mc.Causal()
    assert mn.layer_windows("SSSL", 6, short=256) == [short, short, short, long, short, long]
    assert mn.layer_windows("l", 2, short=256) == [long, long]
    assert mn.layer_windows("S", 1, short=256, long=512) == [mc.Window(512, 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("SXL", 4), "pattern must be made of S and L.*'SXL'"),
        (("", 4), "pattern must be made of S and L"),
        (("SL", 0), "num_layers must be at least 1, got 0"),
    ],
)
def test_a_bad_pattern_raises(arguments, message):
    with pytest.raises(ValueError, match=message):
        mn.layer_windows(*arguments, short=8)


# The cache


def decode(a, x, chunks, cache, **options):
    return torch.cat([a(piece, cache=cache, **options) for piece in x.split(list(chunks), 1)], 1)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("options", OPTIONS)
def test_decoding_equals_the_full_pass(options, name, chunks):
    a, x, cache = make(options, filter=FILTERS[name]), draw(), mn.Cache()
    close(decode(a, x, chunks, cache), a(x))
    assert cache.length == LENGTH


@pytest.mark.parametrize("options", OPTIONS)
def test_the_cache_holds_half_of_what_keys_and_values_would_be(options):
    a, x, cache, full = make(options), draw(), mn.Cache(), mn.Cache()
    decode(a, x, CHUNKS["prefill"], cache)
    decode(mn.KernelAttention(WIDTH, HEADS).double(), x, CHUNKS["prefill"], full)
    assert cache.size == x.numel()
    assert 2 * cache.size == full.size
    assert mn.Cache().size == 0


def test_a_cropped_cache_forgets_and_a_reordered_one_follows():
    a, x, cache = make("rotary"), draw(), mn.Cache()
    decode(a, x[:, :8], (5, 3), cache)
    cache.crop(6)
    assert cache.length == 6
    close(a(x[:, 6:], cache=cache), a(x)[:, 6:])
    cache.crop(6)
    cache.reorder(torch.tensor([1, 0, 1]))
    order = x[[1, 0, 1]]
    close(a(order[:, 6:], cache=cache), a(order)[:, 6:])


@pytest.mark.parametrize("length", [0, 1, 3])
def test_a_new_segment_sees_a_memory_of_the_one_before(length):
    a, x, cache = make("rotary", filter=mc.Memory(length)), draw(), mn.Cache()
    a(x[:, :6], cache=cache)
    cache.new_segment()
    got = decode(a, x[:, 6:], (1, 4), cache)
    visible = seen(mc.Causal()).clone()
    visible[..., 6:, : 6 - length] = False
    close(got, formula(a, x, visible, "rotary")[:, 6:])


@pytest.mark.parametrize("options", OPTIONS)
def test_a_segment_memory_shows_the_states_before(options):
    a, x, memory = make(options), draw(), mn.SegmentMemory(4)
    outs = [a(piece, cache=memory) for piece in x.split([6, 5], 1)]
    visible = seen(mc.Causal()).clone()
    visible[..., 6:, :2] = False
    close(torch.cat(outs, 1), formula(a, x, visible, options))


def test_later_changes_of_x_do_not_reach_the_cache():
    a, x, cache = make(), draw(), mn.Cache()
    want = a(x)[:, 5:]
    given = x[:, :5].clone()
    a(given, cache=cache)
    given.zero_()
    close(a(x[:, 5:], cache=cache), want)


def test_gradients_flow_through_the_cache():
    a, x = make("rotary, adaptive"), draw().requires_grad_()
    inputs = [x, *a.parameters()]
    got = torch.autograd.grad(decode(a, x, (4, 7), mn.Cache()).square().sum(), inputs)
    want = torch.autograd.grad(a(x).square().sum(), inputs)
    for one, other in zip(got, want, strict=True):
        close(one, other)


# The report


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_report_is_what_the_dense_rows_say(options, filter):
    a, x = make(options, filter=filter), draw()
    visible = seen(filter).expand(BATCH, 1, LENGTH, LENGTH)
    share, f = shares(a, x, visible, options)
    counted = visible.diagonal(dim1=-2, dim2=-1)[:, 0]  # [B, T]
    entropy = -(share * torch.where(share > 0, share, 1.0).log()).sum(-1)
    log_s = a.log_bandwidth[:, None, None]
    if a.adaptive:
        log_s = log_s + 2 * torch.tanh((f * a.steering[:, None]).sum(-1, keepdim=True) / 2)
    log_s = log_s.expand(BATCH, HEADS, LENGTH, 1)[..., 0]
    report = a.report(x)
    assert len(report) == HEADS
    for h, head in enumerate(report):
        assert head.head == h
        assert head.neighbours == pytest.approx(entropy.exp()[:, h][counted].mean().item())
        own = share.diagonal(dim1=-2, dim2=-1)[:, h][counted].mean().item()
        assert head.self_weight == pytest.approx(own)
        assert head.bandwidth == pytest.approx(log_s[:, h][counted].mean().exp().item())
        assert head.visible == pytest.approx(visible.sum(-1)[:, 0][counted].double().mean().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_report_of_half_precision_counts_in_float32(dtype):
    a, x = make("rotary, adaptive", dtype), draw(dtype=dtype)
    wide = copy.deepcopy(a).double().report(x.double())
    for got, want in zip(a.report(x), wide, strict=True):
        assert got.neighbours == pytest.approx(want.neighbours, rel=2e-2)
        assert got.self_weight == pytest.approx(want.self_weight, rel=2e-2)


def test_the_report_forms_no_matrix_of_all_pairs():
    """No tensor that grows faster than the length, by the largest that any operator returns."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, torch.Tensor):
                    # What is expanded takes no memory.
                    self.size = max(self.size, x.untyped_storage().nbytes())
            return out

    a = mn.GaussianAttention(8, 1)
    sizes = []
    for length in (2048, 4096):
        with Largest() as largest:
            a.report(torch.randn(1, length, 8))
        sizes.append(largest.size)
    assert sizes[1] <= 2.1 * sizes[0]


def test_a_report_prints_its_notes():
    a = make(bandwidth=[0.01, 2.0, 1000.0])
    notes = [head.note for head in a.report(draw(64))]
    assert notes == ["sees itself only", "", "a plain mean"]
    lines = str(a.report(draw(64))).splitlines()
    assert lines[0].split()[:3] == ["head", "bandwidth", "neighbours"]
    assert len(lines) == 1 + HEADS
    assert lines[1].endswith("sees itself only")


class Block(torch.nn.Module):
    def __init__(self, filter):
        super().__init__()
        self.attention = mn.GaussianAttention(WIDTH, HEADS)
        self.filter = filter

    def forward(self, x, cache=None):
        return x + self.attention(F.rms_norm(x, (WIDTH,)), filter=self.filter, cache=cache)


def test_the_report_of_a_model_has_every_layer_and_head():
    model = torch.nn.Sequential(Block(mc.Window(2, 0)), Block(None))
    x = draw(dtype=torch.float32)
    report = mn.gaussian_report(model, x)
    assert [(h.layer, h.head) for h in report] == [
        (f"{n}.attention", h) for n in range(2) for h in range(HEADS)
    ]
    first = model[0].attention.report(F.rms_norm(x, (WIDTH,)), filter=mc.Window(2, 0))
    assert report.heads[:HEADS] == first.named("0.attention").heads
    second = model[1].attention.report(F.rms_norm(model[0](x), (WIDTH,)))
    assert report.heads[HEADS:] == second.named("1.attention").heads
    lines = str(report).splitlines()
    assert lines[0].startswith("layer")
    assert lines[-1].startswith("1.attention")
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_report_of_a_model_needs_whole_sequences_and_gaussian_attention():
    with pytest.raises(ValueError, match="no kernel with a bandwidth in Linear"):
        mn.gaussian_report(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    model, x, cache = Block(None), draw(dtype=torch.float32), mn.Cache()
    model(x[:, :4], cache=cache)
    with pytest.raises(ValueError, match="call the model without a cache"):
        mn.gaussian_report(model, x[:, 4:], cache=cache)
    assert not model.attention._forward_pre_hooks
    (head,) = mn.gaussian_report(mn.GaussianAttention(WIDTH, 1), x=x)
    assert head.layer == "GaussianAttention"


def test_a_report_without_a_row_that_sees_itself_raises():
    with pytest.raises(ValueError, match="no place sees itself"):
        make().report(draw(), filter=mc.Padding([0, 0]))


# Errors


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((10, 3), {}, "d_model 10 does not divide into 3 heads"),
        ((0, 1), {}, "d_model must be at least 1, got 0"),
        ((8, 0), {}, "num_heads must be at least 1, got 0"),
        ((9, 3), {"rotary": True}, "Rotary needs an even head dimension, got 3"),
        ((8, 2), {"rotary": mn.ALiBi()}, "rotary must be True, False or a Rotary"),
        ((8, 2), {"rotary": 7}, "rotary must be True, False or a Rotary.*7"),
        ((8, 2), {"bandwidth": 0.0}, "bandwidth must be positive and finite.*0.0"),
        ((8, 2), {"bandwidth": -1.0}, "bandwidth must be positive and finite"),
        ((8, 2), {"bandwidth": math.nan}, "bandwidth must be positive and finite"),
        ((8, 2), {"bandwidth": [1.0, math.inf]}, "bandwidth must be positive and finite"),
        ((8, 2), {"bandwidth": [1.0, 2.0, 3.0]}, "bandwidth has 3 numbers for 2 heads"),
        ((8, 2), {"filter": "causal"}, "filter must be a Filter, got str"),
        ((8, 2), {"backend": "magic"}, "backend must be one of"),
        ((8, 2), {"dropout": 1.0}, "dropout_p must be at least 0 and below 1"),
    ],
    ids=str,
)
def test_wrong_arguments_raise(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        mn.GaussianAttention(*arguments, **options)


@pytest.mark.parametrize("shape", [(2, 5, 8), (5, 24), (1, 2, 5, 24)])
def test_an_input_of_another_width_raises(shape):
    with pytest.raises(ValueError, match=r"x must be \[B, T, 24\], got"):
        make()(torch.zeros(shape))


def test_a_bad_filter_or_cache_of_the_call_raises():
    a, x = make(), draw()
    with pytest.raises(ValueError, match="filter must be a Filter, got str"):
        a(x, filter="causal")
    with pytest.raises(ValueError, match="must be a Cache or a SegmentMemory, got dict"):
        a(x, cache={})
    with pytest.raises(ValueError, match="Padding was made for 3 sequences, but the batch has 2"):
        a(x, filter=mc.Padding([1, 2, 3]))
    cache = mn.Cache()
    a(x, cache=cache)
    with pytest.raises(ValueError, match="holds 2 sequences, got 1"):
        a(x[:1], cache=cache)
