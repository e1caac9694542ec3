"""Caches and segment memories: decoding equals the full pass; memory has no gradient."""

import math

import pytest
import torch

import mercer as mc
from mercer import nn as mn

BATCH, LENGTH, WIDTH, HEADS = 2, 9, 16, 2
DIM = WIDTH // HEADS
TOLERANCE = 1e-10

POSITIONS = {
    "none": lambda: mn.NoPosition(),
    "direct sum": lambda: mn.DirectSum(),
    "learned": lambda: mn.DirectSum(mn.Learned(LENGTH)),
    "lookup": lambda: mn.LookupTable(2),
    "lookup per head": lambda: mn.LookupTable(3, per_head=True),
    "relative sinusoid": lambda: mn.RelativeSinusoid(),
    "product": lambda: mn.ProductKernel(),
    "product, two W_T": lambda: mn.ProductKernel(symmetric=False),
    "rotary": lambda: mn.Rotary(),
    "alibi": lambda: mn.ALiBi(),
    "grid product": lambda: mn.Grid2D(2, 4, prefix=1),
    "grid sum": lambda: mn.Grid2D(3, 3, combine="sum"),
}
# With Exponential they are tested in pieces of any size.
KERNELS = {
    "RBF": lambda: mc.RBF(heads=HEADS),
    "polynomial": lambda: mc.Polynomial(2),
    "Laplace": lambda: mc.Laplace(2.0),
    "sum": lambda: mc.RBF(heads=HEADS) + mc.Exponential(),
}
FILTERS = {
    "causal": mc.Causal(),
    "window": mc.Window(3, 0),
    "strided": mc.Strided(3),
    "fixed": mc.Fixed(3, 1),
    "memory": mc.Memory(2),
    "causal, padding": mc.Causal() & mc.Padding([LENGTH, 5]),
    "causal, documents": mc.Causal()
    & mc.Documents([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2]]),
}
# One by one; a prompt and then pieces; a piece that is larger than what came before it.
CHUNKS = {"steps": (1,) * 9, "prefill": (4, 1, 3, 1), "growing": (1, 2, 6)}
ABSOLUTE = ["none", "direct sum", "learned", "product", "product, two W_T"]
KINDS = [
    "none", "direct sum", "lookup", "relative sinusoid", "product", "rotary", "alibi",
    "grid product",
]  # fmt: skip
RELATIVE = ["lookup", "lookup per head", "relative sinusoid", "alibi"]


def make(position="none", **options):
    attention = mn.KernelAttention(WIDTH, HEADS, position=POSITIONS[position](), **options)
    for parameter in attention.double().parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return attention


def draw(length=LENGTH, batch=BATCH):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def decode(attention, x, chunks, cache, *context, **options):
    pieces = x.split(list(chunks), 1)
    return torch.cat([attention(p, *context, cache=cache, **options) for p in pieces], 1)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("position", KINDS)
def test_decoding_in_pieces_equals_the_full_pass(position, kernel, filter):
    a, x = make(position, kernel=KERNELS[kernel](), filter=filter), draw()
    close(decode(a, x, CHUNKS["prefill"], mn.Cache()), a(x))


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("position", POSITIONS)
def test_the_pieces_may_be_of_any_size(position, filter, chunks):
    a, x = make(position), draw()
    cache = mn.Cache()
    close(decode(a, x, chunks, cache, filter=filter), a(x, filter=filter))
    assert cache.length == LENGTH


@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
@pytest.mark.parametrize("position", ["direct sum", "relative sinusoid", "product", "alibi"])
def test_decoding_equals_the_full_pass_on_every_backend(position, backend):
    a, x = make(position, filter=mc.Causal(), backend=backend), draw()
    close(decode(a, x, CHUNKS["prefill"], mn.Cache()), a(x))


@pytest.mark.parametrize("options", [{"num_kv_heads": 1}, {"symmetric": True}], ids=str)
@pytest.mark.parametrize("value", ["content", "content+position"])
@pytest.mark.parametrize("position", [name for name in POSITIONS if name != "none"])
def test_decoding_with_grouped_or_tied_heads_and_both_value_functions(position, value, options):
    a, x = make(position, value=value, filter=mc.Causal(), **options), draw()
    cache = mn.Cache()
    close(decode(a, x, CHUNKS["prefill"], cache), a(x))
    assert cache.values.shape == (BATCH, options.get("num_kv_heads", HEADS), LENGTH, DIM)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("filter", [mc.Full(), mc.Padding([6, 2])], ids=["all", "padding"])
@pytest.mark.parametrize("position", ABSOLUTE)
def test_cross_attention_in_pieces_equals_the_full_pass(position, filter, chunks):
    a, x, context = make(position, filter=filter), draw(), draw(6)
    cache = mn.Cache()
    close(decode(a, x, chunks, cache, context), a(x, context))
    assert cache.length == 6


def test_cached_cross_attention_projects_the_context_once():
    a, x, context = make("direct sum"), draw(), draw(6)
    cache = mn.Cache()
    calls = []
    a.value.register_forward_hook(lambda *_: calls.append(1))
    decode(a, x, (4, 1, 3, 1), cache, context)
    assert len(calls) == 1


@pytest.mark.parametrize("position", RELATIVE)
def test_relative_positions_in_cached_cross_attention_raise(position):
    a, x, context = make(position), draw(), draw(6)
    assert a(x, context).shape == x.shape
    with pytest.raises(ValueError, match=r"step by step.*NoPosition, DirectSum or ProductKernel"):
        a(x, context, cache=mn.Cache())


def test_a_relative_kernel_in_cached_cross_attention_raises_too():
    """Also if the kernel of i - j is in `kernel`: pieces would not equal the full pass."""
    a = make(kernel=mc.Exponential() * mc.ALiBi([0.5, 0.25]))
    with pytest.raises(ValueError, match="step by step"):
        a(draw(1), draw(6), cache=mn.Cache())


@pytest.mark.parametrize("position", POSITIONS)
def test_crop_forgets_rejected_guesses(position):
    a, x, guess = make(position, filter=mc.Causal()), draw(), draw()
    cache = mn.Cache()
    a(x[:, :4], cache=cache)
    a(guess[:, 4:7], cache=cache)
    cache.crop(4)
    assert cache.length == 4
    close(a(x[:, 4:], cache=cache), a(x)[:, 4:])


def test_crop_to_nothing_starts_anew():
    a, x = make("direct sum", filter=mc.Causal()), draw()
    cache = mn.Cache()
    a(draw(5), cache=cache)
    cache.crop(0)
    close(decode(a, x, (4, 5), cache), a(x))


def test_crop_in_cross_attention_forgets_queries_and_keeps_the_context():
    a, x, guess, context = make("direct sum"), draw(), draw(), draw(6)
    cache = mn.Cache()
    a(x[:, :3], context, cache=cache)
    a(guess[:, 3:5], context, cache=cache)
    cache.crop(3)
    close(a(x[:, 3:], context, cache=cache), a(x, context)[:, 3:])


@pytest.mark.parametrize("length", [-1, 5])
def test_crop_beyond_what_is_there_raises(length):
    cache = mn.Cache()
    make()(draw(4), cache=cache)
    with pytest.raises(ValueError, match=f"length must be from 0 to 4, got {length}"):
        cache.crop(length)


def test_a_crop_before_the_segment_leaves_no_segment_in_the_future():
    """Memory shows a query at least itself, wherever its segment starts."""
    a, x = make(filter=mc.Memory(0)), draw()
    cache = mn.Cache()
    a(x[:, :6], cache=cache)
    cache.new_segment()
    cache.crop(3)
    assert a(x[:, 3:4], cache=cache).abs().min() > 0


@pytest.mark.parametrize("index", [[2, 0, 0], [1], [0, 1, 2, 2, 1]], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
def test_reorder_keeps_the_chosen_sequences(position, index):
    a, x, index = make(position, filter=mc.Causal()), draw(batch=3), torch.tensor(index)
    cache = mn.Cache()
    a(x[:, :4], cache=cache)
    cache.reorder(index)
    close(a(x[index, 4:], cache=cache), a(x)[index, 4:])


@pytest.mark.parametrize("position", ["none", "product"])
def test_reorder_makes_many_beams_of_one_prompt(position):
    a, x, index = make(position, filter=mc.Causal()), draw(batch=1), torch.tensor([0, 0, 0])
    cache = mn.Cache()
    a(x[:, :4], cache=cache)
    cache.reorder(index)
    close(a(x[index, 4:], cache=cache), a(x)[index, 4:])


def test_reorder_in_cross_attention():
    a, x, context = make("direct sum"), draw(batch=3), draw(6, batch=3)
    index, cache = torch.tensor([2, 0, 0]), mn.Cache()
    a(x[:, :4], context, cache=cache)
    cache.reorder(index)
    close(a(x[index, 4:], context[index], cache=cache), a(x, context)[index, 4:])


def test_an_empty_cache_has_no_keys_and_values():
    cache = mn.Cache()
    assert cache.length == 0
    cache.reorder(torch.tensor([0]))
    cache.crop(0)
    with pytest.raises(ValueError, match="empty"):
        _ = cache.values
    with pytest.raises(ValueError, match="at least one part"):
        _ = cache.keys


def test_a_cache_refuses_another_batch():
    a, cache = make(), mn.Cache()
    a(draw(batch=3), cache=cache)
    with pytest.raises(ValueError, match="holds 3 sequences, got 2"):
        a(draw(1), cache=cache)


def in_heads(x, weight):
    return torch.einsum("btc,hdc->bhtd", x, weight.unflatten(0, (HEADS, -1)))


def sinusoid(places, width=WIDTH):
    rows = []
    for i in places:
        angles = [i / 10000 ** (2 * p / width) for p in range(width // 2)]
        rows.append([f(angle) for angle in angles for f in (math.sin, math.cos)])
    return torch.tensor(rows, dtype=torch.float64)


def segment(a, memory, x, start, oldest=0):
    """Densely: queries of x, which is at `start`; keys and values of [memory, x] from `oldest`."""
    whole = torch.cat([memory.detach(), x], 1)
    i = range(start, start + x.shape[1])
    j = range(start - memory.shape[1], start + x.shape[1])
    f_q, f_k = x, whole
    if isinstance(a.position, mn.DirectSum):
        f_q, f_k = x + sinusoid(i), whole + sinusoid(j)
    q, k = in_heads(f_q, a.query.weight), in_heads(f_k, a.key.weight)
    v = in_heads(f_k if a.value_function == "content+position" else whole, a.value.weight)
    if isinstance(a.position, mn.RelativeSinusoid):
        rows = torch.stack([sinusoid([m - n for n in j]) for m in i])
        r = torch.einsum("hdp,ijp->hijd", a.position.weight, rows)
        log = torch.einsum("bhid,bhjd->bhij", q + a.position.content_bias, k)
        log = log + torch.einsum("bhid,hijd->bhij", q + a.position.position_bias, r)
    else:
        log = torch.einsum("bhid,bhjd->bhij", q, k)
    seen = torch.tensor([[oldest <= n <= m for n in j] for m in i])
    weight = torch.exp(log / math.sqrt(DIM)) * seen
    out = torch.einsum("bhij,bhjd->bihd", weight / weight.sum(-1, keepdim=True), v)
    return out.flatten(2) @ a.out.weight.T


SEGMENTS = [(0, 3), (3, 5), (5, 9)]
CASES = [
    ("none", "content"),
    ("direct sum", "content"),
    ("direct sum", "content+position"),
    ("relative sinusoid", "content"),
]


def by_segments(a, x, memory, **options):
    return [a(x[:, start:stop], cache=memory, **options) for start, stop in SEGMENTS]


@pytest.mark.parametrize("capacity", [0, 1, 4, 100])
@pytest.mark.parametrize(("position", "value"), CASES)
def test_a_segment_sees_the_states_of_the_memory_before_it(position, value, capacity):
    a, x = make(position, value=value, filter=mc.Causal()), draw()
    outs = by_segments(a, x, mn.SegmentMemory(capacity))
    for (start, stop), out in zip(SEGMENTS, outs, strict=True):
        memory = x[:, max(start - capacity, 0) : start]
        close(out, segment(a, memory, x[:, start:stop], start))


@pytest.mark.parametrize(("position", "value"), CASES)
def test_gradients_reach_the_weights_through_the_memory_but_not_its_states(position, value):
    a, x = make(position, value=value, filter=mc.Causal()), draw().requires_grad_()
    out = by_segments(a, x, mn.SegmentMemory(4))[-1]
    want = segment(a, x[:, 1:5], x[:, 5:], 5)
    blind = segment(a, x[:, 5:5], x[:, 5:], 5)
    inputs = [x, *a.parameters()]
    got, want, blind = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, want, blind))
    for one, other in zip(got, want, strict=True):
        close(one, other)
    assert got[0][:, :5].abs().max() == 0
    assert got[0][:, 5:].abs().min() > 0
    key = next(n for n, p in enumerate(inputs) if p is a.key.weight)
    assert (got[key] - blind[key]).abs().max() > 1e-3


@pytest.mark.parametrize("length", [0, 2, 7])
@pytest.mark.parametrize("capacity", [1, 4, 100])
@pytest.mark.parametrize("position", ["none", "relative sinusoid"])
def test_the_memory_filter_cuts_what_a_segment_memory_keeps(position, capacity, length):
    a, x = make(position, filter=mc.Memory(length)), draw()
    outs = by_segments(a, x, mn.SegmentMemory(capacity))
    for (start, stop), out in zip(SEGMENTS, outs, strict=True):
        memory = x[:, max(start - capacity, 0) : start]
        close(out, segment(a, memory, x[:, start:stop], start, start - length))


@pytest.mark.parametrize("position", POSITIONS)
def test_a_memory_longer_than_what_was_seen_gives_the_full_causal_pass(position):
    a, x = make(position, filter=mc.Causal()), draw()
    memory = mn.SegmentMemory(1000)
    close(torch.cat(by_segments(a, x, memory), 1), a(x))
    assert (memory.length, memory.seen) == (LENGTH, LENGTH)


@pytest.mark.parametrize("capacity", [2, 4])
@pytest.mark.parametrize("position", ["none", "rotary", *RELATIVE])
def test_where_only_distances_count_memory_and_segment_are_one_short_sequence(position, capacity):
    a, x = make(position, filter=mc.Causal()), draw()
    outs = by_segments(a, x, mn.SegmentMemory(capacity))
    for (start, stop), out in zip(SEGMENTS, outs, strict=True):
        alone = a(x[:, max(start - capacity, 0) : stop])
        close(out, alone[:, start - stop :])


@pytest.mark.parametrize("length", [0, 1, 3, 20])
@pytest.mark.parametrize("position", ["direct sum", "relative sinusoid"])
def test_a_cache_with_segments_shows_what_is_near_the_start_of_the_segment(position, length):
    a, x = make(position, filter=mc.Memory(length)), draw()
    cache = mn.Cache()
    for start, stop in SEGMENTS:
        cache.new_segment()
        want = segment(a, x[:, :start], x[:, start:stop], start, start - length)
        close(decode(a, x[:, start:stop], (1,) * (stop - start), cache), want)


def test_a_segment_memory_refuses_what_does_not_fit():
    for length in (-1, 1.5):
        with pytest.raises(ValueError, match=f"length must be a whole number >= 0, got {length}"):
            mn.SegmentMemory(length)
    a, memory = make(), mn.SegmentMemory(4)
    a(draw(batch=3), cache=memory)
    with pytest.raises(ValueError, match="holds 3 sequences, got 2"):
        a(draw(1), cache=memory)


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Window(2, 2), mc.Causal() & mc.Padding([6, 6])])
def test_a_filter_of_places_in_cached_cross_attention_raises(filter):
    a, x, context = make("direct sum"), draw(), draw(6)
    with pytest.raises(ValueError, match="the same for all queries"):
        a(x, context, filter=filter, cache=mn.Cache())
