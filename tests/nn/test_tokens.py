"""TokenKernels: the start, where kernels act, causality, decoding, reading weights, errors."""

import copy
import io
import sys
import warnings

import pytest
import torch

import mercer as mc
from mercer import nn as mn
from mercer.tokenwise.taps import BOUNDARIES, convolve

BATCH, LENGTH, WIDTH, HEADS, VOCAB = 2, 9, 16, 2, 11
CHUNKS = {"steps": (1,) * 9, "prefill": (4, 1, 3, 1), "growing": (1, 2, 6)}
FILTERS = {
    "causal": mc.Causal(),
    "window": mc.Window(3, 0),
    "strided": mc.Strided(3),
    "memory": mc.Memory(2),
    "padding": mc.Causal() & mc.Padding([LENGTH, 5]),
    "documents": mc.Causal()
    & mc.Documents([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2, 2, 2]]),
}


def make(tokens, **options):
    options = {"filter": mc.Causal()} | options
    layer = mn.KernelAttention(WIDTH, HEADS, tokens=tokens, **options).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def draw(length=LENGTH, batch=BATCH):
    x = torch.randn(batch, length, WIDTH, dtype=torch.float64)
    return x, torch.randint(0, VOCAB, (batch, length))


def close(got, want, tolerance=1e-10):
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def plain(layer, x, **options):
    """The layer without its token kernels."""
    bare = copy.deepcopy(layer)
    bare.tokens = None
    return bare(x, **options)


@pytest.mark.parametrize("filter", [mc.Causal(), mc.Full()], ids=str)
@pytest.mark.parametrize("on", ["k", "v", "kv"])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_at_the_start_it_is_plain_attention(boundary, size, on, filter):
    x, ids = draw()
    for options, tolerance in (
        ({"temperature": None}, 1e-12),
        ({}, 1e-4 * (size // 2)),
        ({"start": 14.0}, 2e-6 * (size // 2)),
    ):
        tokens = mn.TokenKernels(VOCAB, size, on=on, boundary=boundary, **options)
        layer = mn.KernelAttention(WIDTH, HEADS, tokens=tokens, filter=filter).double()
        close(layer(x, token_ids=ids), plain(layer, x), tolerance)


def test_the_published_start_leaves_what_the_paper_says_on_a_neighbour():
    kernels = mn.TokenKernels(VOCAB).double().kernels()
    assert kernels.shape == (VOCAB, 1, 1, 1, 3)
    assert abs(kernels[0, 0, 0, 0, 0].item() - 4.5e-5) < 5e-7


@pytest.mark.parametrize("temperature", [0.4, 2.0])
@pytest.mark.parametrize("size", [3, 7])
def test_the_slope_at_the_start_is_the_derivative_of_a_central_tap(size, temperature):
    for start in (0.0, 3.0, 10.0, -3.0):
        tokens = mn.TokenKernels(1, size, temperature=temperature, start=start).double()
        centre = tokens.kernels()[0, 0, 0, 0, size // 2]
        (grad,) = torch.autograd.grad(centre, tokens.weight)
        slope = tokens.start_slope()
        assert slope == pytest.approx(grad[0, 0, 0, 0, size // 2].item(), rel=1e-6)
    assert mn.TokenKernels(1, size, temperature=None).start_slope() == 1.0


@pytest.mark.parametrize("start", [25.0, 16.0, 1e30, -25.0])
def test_a_start_that_cannot_learn_is_said_once(start):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            mn.TokenKernels(VOCAB, start=start)
    (warning,) = seen
    slope = {25.0: "6.9e-11", 16.0: "5.6e-07", 1e30: "0.0e+00", -25.0: "1.7e-11"}[start]
    text = str(warning.message)
    assert f"start={start:g} leaves token kernels that cannot learn" in text
    assert f"changes by {slope} with its logit, and below 1e-06" in text
    assert "temperature=None (free taps)" in text


def test_starts_that_learn_are_not_warned_of():
    # Warnings are errors in the tests.
    for options in ({}, {"start": 15.0}, {"temperature": None, "start": 25.0}, {"size": 1}):
        mn.TokenKernels(VOCAB, **options)


@pytest.mark.filterwarnings("ignore:start=25")
@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"temperature": None}, 0.05, 2.0),
        ({"start": 10.0}, 1e-4, 2.0),
        # 2e-11 at the start, and still
        ({"start": 25.0}, 0.0, 1e-10),
    ],
)
def test_free_taps_learn_and_a_high_start_does_not(options, least, most):
    torch.manual_seed(0)
    tokens = mn.TokenKernels(VOCAB, **options)
    layer = mn.KernelAttention(WIDTH, HEADS, tokens=tokens, filter=mc.Causal())
    before = tokens.deviation()
    x, ids = torch.randn(4, 12, WIDTH), torch.randint(0, VOCAB, (4, 12))
    target = torch.randn(4, 12, WIDTH)
    optimiser = torch.optim.Adam([tokens.weight], lr=5e-3)
    for _ in range(60):
        optimiser.zero_grad()
        (layer(x, token_ids=ids) - target).square().mean().backward()
        optimiser.step()
    moved = (tokens.deviation() - before).abs().max()
    assert least < moved + 1e-300 < most


def test_the_weight_has_the_shape_it_says():
    assert mn.TokenKernels(5).weight.shape == (5, 1, 1, 1, 3)
    tokens = mn.TokenKernels(5, 7, on="kv", heads=4, layers=3)
    assert tokens.weight.shape == (5, 3, 2, 4, 7)
    taps = tokens(torch.tensor([[0, 4, 2]]), layer=2)
    assert taps.keys.shape == taps.values.shape == (1, 3, 4, 7)
    assert mn.TokenKernels(5, on="k")(torch.tensor([[1]])).values is None


@pytest.mark.parametrize("heads", [None, 1, 2, 4])
def test_a_layer_is_vicinity_with_the_taps_of_its_tokens(heads):
    tokens = mn.TokenKernels(VOCAB, 5, on="kv", heads=heads, boundary="truncate")
    layer = mn.KernelAttention(
        WIDTH, 4, num_kv_heads=2, tokens=tokens, position="rotary", filter=mc.Causal()
    ).double()
    torch.nn.init.normal_(tokens.weight)
    x, ids = draw()
    q, k, v, filter = layer.parts(x)
    taps = tokens.weight[ids][:, :, 0]  # [B, T, targets, H, S]
    out = mc.vicinity(
        q, k, v, key_taps=taps[:, :, 0], value_taps=taps[:, :, 1], normalize=0.4,
        boundary="truncate", filter=filter, backend="reference",
    )  # fmt: skip
    close(layer(x, token_ids=ids), layer.out(out.transpose(1, 2).flatten(2)))


def test_kernels_are_shared_per_layer_or_of_the_first_layer_only():
    x, ids = draw()
    for layers, differ in ((None, False), (2, True)):
        tokens = mn.TokenKernels(VOCAB, layers=layers)
        first = make(tokens)
        second = copy.deepcopy(first)
        second.tokens, second.layer = first.tokens, 1
        same = torch.equal(first(x, token_ids=ids), second(x, token_ids=ids))
        assert same != differ
    first = make(mn.TokenKernels(VOCAB, layers=1))
    second = copy.deepcopy(first)
    second.layer = 1
    assert first.has_token_kernels
    assert not second.has_token_kernels
    close(second(x), plain(first, x))
    assert (first(x, token_ids=ids) - plain(first, x)).abs().max() > 1e-3


def test_kernels_on_keys_end_the_symmetry_and_those_on_values_do_not():
    for on, symmetric in (("v", True), ("k", False), ("kv", False)):
        tokens = mn.TokenKernels(VOCAB, on=on)
        assert mn.KernelAttention(WIDTH, HEADS, symmetric=True, tokens=tokens).valid == symmetric


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_ids_may_be_of_any_whole_type(dtype):
    layer, (x, ids) = make(mn.TokenKernels(VOCAB)), draw()
    (want,) = torch.autograd.grad(layer(x, token_ids=ids).sum(), layer.tokens.weight)
    (got,) = torch.autograd.grad(layer(x, token_ids=ids.to(dtype)).sum(), layer.tokens.weight)
    assert torch.equal(got, want)


def test_layers_share_one_table():
    tokens = mn.TokenKernels(VOCAB)
    layers = torch.nn.ModuleList(
        [mn.KernelAttention(WIDTH, HEADS, tokens=tokens, layer=n) for n in range(3)]
    )
    assert sum(p is tokens.weight for p in layers.parameters()) == 1


@pytest.mark.parametrize("on", ["k", "v", "kv"])
@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_future_token_changes_no_bit(boundary, size, on):
    for temperature in (0.4, None):
        tokens = mn.TokenKernels(VOCAB, size, on=on, boundary=boundary, temperature=temperature)
        layer, (x, ids) = make(tokens), draw()
        before = layer(x, token_ids=ids)
        for place in range(1, LENGTH):
            other, others = x.clone(), ids.clone()
            other[:, place:] += 3.0
            others[:, place:] = (others[:, place:] + 1) % VOCAB
            after = layer(other, token_ids=others)
            assert torch.equal(before[:, :place], after[:, :place])
            only_ids = layer(x, token_ids=others)
            assert torch.equal(before[:, :place], only_ids[:, :place])


def decode(layer, x, ids, chunks, cache, **options):
    pairs = zip(x.split(list(chunks), 1), ids.split(list(chunks), 1), strict=True)
    return torch.cat([layer(p, token_ids=i, cache=cache, **options) for p, i in pairs], 1)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_decoding_equals_the_full_pass(boundary, filter, chunks):
    for size, on, position in ((3, "v", "direct-sum"), (5, "kv", "rotary"), (7, "k", "alibi")):
        tokens = mn.TokenKernels(VOCAB, size, on=on, boundary=boundary)
        layer, (x, ids) = make(tokens, position=position, filter=filter), draw()
        cache = mn.Cache()
        close(decode(layer, x, ids, chunks, cache), layer(x, token_ids=ids))
        assert cache.length == LENGTH


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_cropped_or_reordered_cache_goes_on_as_if_it_had_always_been_so(boundary):
    layer = make(mn.TokenKernels(VOCAB, 5, on="kv", boundary=boundary))
    (x, ids), (y, others) = draw(), draw()
    cache = mn.Cache()
    decode(layer, x, ids, (4, 4, 1), cache)
    cache.crop(6)
    got = decode(layer, y[:, 6:], others[:, 6:], (1, 2), cache)
    mixed, tokens = torch.cat([x[:, :6], y[:, 6:]], 1), torch.cat([ids[:, :6], others[:, 6:]], 1)
    close(got, layer(mixed, token_ids=tokens)[:, 6:])
    order = torch.tensor([1, 1, 0])
    cache.crop(7)
    cache.reorder(order)
    mixed, tokens = mixed[order], tokens[order]
    got = decode(layer, mixed[:, 7:], tokens[:, 7:], (1, 1), cache)
    close(got, layer(mixed, token_ids=tokens)[:, 7:])


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_step_convolves_new_keys_only(boundary, monkeypatch):
    layer, lengths = make(mn.TokenKernels(VOCAB, 5, on="kv", boundary=boundary)), []

    def watched(x, *args):
        lengths.append(x.shape[2])
        return convolve(x, *args)

    monkeypatch.setattr(sys.modules["mercer.tokenwise.split"], "convolve", watched)
    x, ids = draw(60)
    cache = mn.Cache()
    layer(x[:, :50], token_ids=ids[:, :50], cache=cache)
    layer(x[:, 50:51], token_ids=ids[:, 50:51], cache=cache)
    lengths.clear()
    rest = decode(layer, x[:, 51:], ids[:, 51:], (1, 1, 3, 1, 1, 1, 1), cache)
    assert max(lengths) <= 2 * 4 + 3
    close(rest, layer(x, token_ids=ids)[:, 51:])


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_segment_memory_remembers_the_tokens_too(boundary):
    layer = make(mn.TokenKernels(VOCAB, 5, on="kv", boundary=boundary), position="alibi")
    x, ids = draw()
    close(decode(layer, x, ids, (3, 3, 3), mn.SegmentMemory(9)), layer(x, token_ids=ids))
    memory = mn.SegmentMemory(4)
    got = decode(layer, x, ids, (3, 3, 3), memory)
    # A key that is hidden can still be the neighbour of one that is seen.
    close(got, layer(x, filter=mc.Blocks(3, 4), token_ids=ids))


def test_in_cross_attention_the_ids_are_those_of_the_context():
    layer = make(mn.TokenKernels(VOCAB), filter=mc.Full())
    (x, _), (context, ids) = draw(), draw(6)
    whole = layer(x, context, token_ids=ids)
    cache = mn.Cache()
    steps = [layer(x[:, t : t + 1], context, token_ids=ids, cache=cache) for t in range(LENGTH)]
    close(torch.cat(steps, 1), whole)
    assert (whole - plain(layer, x, context=context)).abs().max() > 1e-3


def test_the_gradient_of_a_large_table_is_the_same_bits_each_time():
    tokens = mn.TokenKernels(50257, on="kv")
    layer = mn.KernelAttention(WIDTH, HEADS, tokens=tokens, filter=mc.Causal())
    x, ids = torch.randn(4, 64, WIDTH), torch.randint(0, 50257, (4, 64))
    ids[:, ::3] = 262
    grads = [
        torch.autograd.grad(layer(x, token_ids=ids).square().sum(), tokens.weight)[0]
        for _ in range(3)
    ]
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    used = grads[0].flatten(1).any(1).nonzero()[:, 0]
    assert set(used.tolist()) <= set(ids.flatten().tolist())
    assert 262 in used


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_equals_eager(dynamic):
    layer, (x, ids) = make(mn.TokenKernels(VOCAB, 5, on="kv")), draw()
    want = layer(x, token_ids=ids)
    want_grads = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    got = compiled(x, token_ids=ids)
    close(got, want)
    grads = torch.autograd.grad(got.square().sum(), list(layer.parameters()))
    for g, w in zip(grads, want_grads, strict=True):
        close(g, w)


def test_it_is_saved_loaded_and_copied():
    layer, (x, ids) = make(mn.TokenKernels(VOCAB)), draw()
    want = layer(x, token_ids=ids)
    close(copy.deepcopy(layer)(x, token_ids=ids), want)
    other = make(mn.TokenKernels(VOCAB))
    other.load_state_dict(layer.state_dict())
    close(other(x, token_ids=ids), want)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    close(torch.load(file, weights_only=False)(x, token_ids=ids), want)


def test_explain_says_what_the_tokens_do():
    layer = make(mn.TokenKernels(VOCAB, 5, on="kv"))
    x, _ = draw()
    assert "keys and values by 5 taps a token; a query sees the 2 nearest keys cut (shrink)" in str(
        layer.explain(x)
    )
    assert "sees no key cut" in str(layer.explain(x, filter=mc.Full()))
    assert "vicinity" not in str(make(None).explain(x))


def test_deviation_is_the_distance_from_the_dirac():
    tokens = mn.TokenKernels(4, temperature=None)
    with torch.no_grad():
        tokens.weight[2, 0, 0, 0] = torch.tensor([0.3, 0.6, 0.0])
    close(tokens.deviation(), torch.tensor([0.0, 0.0, 0.5, 0.0], dtype=torch.float64), 1e-6)
    several = mn.TokenKernels(4, layers=2, on="kv", heads=3)
    assert several.deviation().shape == (4,)
    assert several.deviations().shape == (4, 2, 2, 3)
    close(several.deviations().mean((1, 2, 3)), several.deviation())
    assert (several.deviation() < 1.2e-4).all()
    free = mn.TokenKernels(4, temperature=None).double()
    assert not free.deviation().any()
    assert torch.equal(free.weight, mn.TokenKernels(4, temperature=None).double().weight)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("heads", [1, 2])
def test_published_weights_are_read_in_their_order(tmp_path, heads, layers):
    table = torch.randn(6, layers * 2 * heads * 5)
    torch.save(table, tmp_path / "published.pt")
    given = {"layers": layers, "heads": heads}
    both = mn.TokenKernels.load_published(tmp_path / "published.pt", on="kv", **given)
    assert both.weight.shape == (6, layers, 2, heads, 5)
    assert both.layers == layers
    assert torch.equal(both.weight.flatten(1), table)
    values = mn.TokenKernels.load_published(tmp_path / "published.pt", **given)
    assert torch.equal(values.weight[:, :, 0], both.weight[:, :, 1])


def test_a_published_table_of_one_layer_is_shared_or_of_the_first_layer(tmp_path):
    torch.save(torch.randn(6, 6), tmp_path / "published.pt")
    shared = mn.TokenKernels.load_published(tmp_path / "published.pt")
    assert (shared.size, shared.layers, shared.heads) == (3, None, None)
    first = mn.TokenKernels.load_published(tmp_path / "published.pt", layers=1)
    assert torch.equal(first.weight, shared.weight)
    assert (first.acts_on(0), first.acts_on(1), shared.acts_on(1)) == (True, False, True)


def test_a_table_that_can_be_read_in_several_ways_is_refused(tmp_path):
    path = tmp_path / "published.pt"
    torch.save(torch.randn(6, 18), path)
    several = r"layers=1, heads=3 of size 3; layers=3, heads=1 of size 3; layers=1, heads=1 of size"
    with pytest.raises(ValueError, match=rf"\[6, 18\], which may be {several} 9: give layers and"):
        mn.TokenKernels.load_published(path)
    with pytest.raises(ValueError, match="layers=1, heads=3 of size 3; layers=1, heads=1 of size"):
        mn.TokenKernels.load_published(path, layers=1)
    shapes = [
        mn.TokenKernels.load_published(path, **given).weight.shape[1:]
        for given in ({"layers": 3}, {"heads": 3}, {"layers": 1, "heads": 1})
    ]
    assert shapes == [(3, 1, 1, 3), (1, 1, 3, 3), (1, 1, 1, 9)]
    torch.save(torch.randn(2, 2 * 12 * 12 * 3), path)
    with pytest.raises(ValueError, match=r"of size 3 or \d+ more ways: give layers and heads"):
        mn.TokenKernels.load_published(path)
    with pytest.raises(ValueError, match=r"\[vocab, 5 \* 2 \* heads \* size\].* holds"):
        mn.TokenKernels.load_published(path, layers=5)
    for given in ({"layers": 0}, {"heads": 0}):
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            mn.TokenKernels.load_published(path, **given)


def test_other_files_are_refused_and_nothing_in_them_runs(tmp_path):
    torch.save(torch.zeros(4, 3), tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"one tensor \[vocab, layers \* 2 \* heads .*\[4, 3\]"):
        mn.TokenKernels.load_published(tmp_path / "odd.pt")
    torch.save({"w": torch.zeros(4, 6)}, tmp_path / "dict.pt")
    with pytest.raises(ValueError, match="holds dict"):
        mn.TokenKernels.load_published(tmp_path / "dict.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        mn.TokenKernels.load_published(tmp_path / "module.pt")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mn.TokenKernels(5, 4), "size must be an odd number .* got 4"),
        (lambda: mn.TokenKernels(5, 0), "size must be an odd number .* got 0"),
        (lambda: mn.TokenKernels(0), "vocab_size must be at least 1, got 0"),
        (lambda: mn.TokenKernels(5, heads=0), "heads must be at least 1, got 0"),
        (lambda: mn.TokenKernels(5, layers=0), "layers must be at least 1, got 0"),
        (lambda: mn.TokenKernels(5, on="q"), "on must be 'k', 'v' or 'kv', got 'q'"),
        (lambda: mn.TokenKernels(5, temperature=0.0), "temperature must be .* got 0.0"),
        (lambda: mn.TokenKernels(5, boundary="right"), "one of none, left, truncate, shrink"),
        (lambda: mn.TokenKernels(5, start=float("nan")), "start must be a finite number"),
        (lambda: make("tokens"), "tokens must be TokenKernels, got str"),
        (lambda: make(mn.TokenKernels(5, heads=3)), "kernels for 3 heads, but the layer has 2"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, r"has token kernels and needs token_ids \[B, T\], got None"),
        (torch.tensor([[1, VOCAB, 2]]), f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
        (torch.tensor([[1, -1, 2]]), "token id -1 is outside the vocabulary"),
        (torch.tensor([1, 2, 3]), r"token_ids must be \[B, T\], got \[3\]"),
        (torch.tensor([[1.0, 2.0, 3.0]]), "token_ids must be whole numbers.*float32"),
        (torch.tensor([[1, 2]]), r"token_ids must be \[1, 3\], as the keys are.* \[1, 2\]"),
    ],
)
def test_ids_that_do_not_fit_are_named_and_the_cache_stays_as_it_was(ids, message):
    layer, cache = make(mn.TokenKernels(VOCAB)), mn.Cache()
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        layer(x, token_ids=ids, cache=cache)
    assert cache.length == 0


def test_ids_changed_in_place_are_checked_again():
    layer, (x, ids) = make(mn.TokenKernels(VOCAB)), draw()
    layer(x, token_ids=ids)
    ids[0, 0] = VOCAB
    with pytest.raises(ValueError, match="outside the vocabulary"):
        layer(x, token_ids=ids)


def test_a_cache_filled_without_ids_is_refused():
    layer, cache, (x, ids) = make(mn.TokenKernels(VOCAB)), mn.Cache(), draw()
    bare = copy.deepcopy(layer)
    bare.tokens = None
    bare(x[:, :4], cache=cache)
    with pytest.raises(ValueError, match="holds 6 keys, but the ids of 2 tokens"):
        layer(x[:, 4:6], token_ids=ids[:, 4:6], cache=cache)
