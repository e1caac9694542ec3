"""Heads, rows and positions as data, beside the weights that the reference writes out."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mercer as mc
from mercer import inspect
from mercer import nn as mn

WIDTH, HEADS, LENGTH = 16, 4, 13
ATTENTION = {
    "softmax": dict(kernel=mc.Exponential()),
    "rbf by head": dict(kernel=mc.RBF([0.5, 1.0, 2.0, 4.0])),
    "grouped": dict(kernel=mc.RBF(2.0), num_kv_heads=2),
    "adaptive": dict(kernel=mc.AdaptiveRBF._with_weight(1.0, 4, heads=HEADS)),
    "alibi": dict(position="alibi"),
    "lookup": dict(position=mn.LookupTable(3)),
    "sinusoid": dict(position="relative-sinusoid"),
    "product": dict(kernel=mc.Laplace(), position="product"),
    "sum": dict(kernel=mc.RBF(1.0) + 0.5 * mc.Exponential()),
    "window": dict(filter=mc.Window(4, 0)),
    "full": dict(filter=mc.Full(), position="rotary"),
    "linear": dict(kernel=mc.Polynomial(2)),
}


class Model(torch.nn.Module):
    """Two layers, and ids where there are token kernels."""

    def __init__(self, tokens=None, **options):
        super().__init__()
        options = {"filter": mc.Causal()} | options
        self.layers = torch.nn.ModuleList(
            mn.KernelAttention(WIDTH, HEADS, tokens=tokens, layer=n, **options) for n in range(2)
        )
        self.tokens = tokens

    def forward(self, x, token_ids=None):
        for layer in self.layers:
            given = {} if self.tokens is None else {"token_ids": token_ids}
            x = x + layer(x, **given)
        return x


def make(seed=0, tokens=None, **options):
    torch.manual_seed(seed)
    return Model(tokens, **options), torch.randn(2, LENGTH, WIDTH)


def reference(model, x, **given):
    """The matrices of all layers, by the reference in float64."""
    model, x = model.double(), x.double()
    found = []
    for layer in model.layers:
        layer.backend = "reference"
        found.append(mn.attention_weights(layer, x, **given))
        x = x + layer(x, **given)
    return found


@pytest.mark.parametrize("name", ATTENTION)
def test_rows_are_those_of_the_reference(name):
    model, x = make(**ATTENTION[name])
    places = [0, 5, LENGTH - 1]
    found = inspect.rows(model, x, places, sequence=1)
    assert [one.layer for one in found] == ["layers.0", "layers.1"]
    for one, want in zip(found, reference(model, x), strict=True):
        assert one.own
        assert one.first_key == 0
        assert one.places == tuple(places)
        assert (one.weights - want[1][:, places]).abs().max() < 1e-5


@pytest.mark.parametrize("boundary", ["shrink", "truncate"])
def test_rows_have_what_token_kernels_move(boundary):
    tokens = mn.TokenKernels(7, 3, temperature=None, boundary=boundary)
    torch.nn.init.normal_(tokens.weight)
    model, x = make(tokens=tokens)
    ids = torch.randint(0, 7, x.shape[:2])
    found = inspect.rows(model, (x, ids), [3, LENGTH - 1])
    for one, want in zip(found, reference(model, x, token_ids=ids), strict=True):
        assert (one.weights - want[0][:, [3, LENGTH - 1]]).abs().max() < 1e-5


def test_rows_of_gaussian_attention_and_of_many_places():
    torch.manual_seed(0)
    layer = mn.GaussianAttention(WIDTH, HEADS, rotary=True, adaptive=True)
    torch.nn.init.normal_(layer.steering)
    x = torch.randn(1, 150, WIDTH)
    (one,) = inspect.rows(layer, x, range(150))
    want = mn.attention_weights(layer.double(), x.double())[0].detach()
    assert (one.weights - want).abs().max() < 1e-5
    assert one.top(1, 149, 3)[0][1] == pytest.approx(float(want[1, 149].max()), abs=1e-5)


def test_rows_of_segments_count_their_places_from_the_beginning():
    layer = mn.KernelAttention(WIDTH, HEADS, filter=mc.Memory(4), position="relative-sinusoid")

    class Segments(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            memory = mn.SegmentMemory(4)
            return torch.cat([self.layer(part, cache=memory) for part in x.split(6, 1)], 1)

    torch.manual_seed(0)
    x = torch.randn(1, 12, WIDTH)
    (one,) = inspect.rows(Segments(), x, [7])
    assert one.places == (7,)
    assert one.first_key == 2
    assert one.weights.shape == (HEADS, 1, 10)
    assert one.weights[:, 0, 6:].abs().max() == 0
    assert one.weights.sum(-1) == pytest.approx(torch.ones(HEADS, 1), abs=1e-5)
    (head, *_) = inspect.heads(Segments(), x)
    assert head.visible > 3


def test_no_matrix_of_all_pairs_is_formed():
    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
            self.most = max([getattr(self, "most", 0), *sizes])
            return out

    torch.manual_seed(0)
    length = 4096
    layer = mn.KernelAttention(8, 1, kernel=mc.RBF(1.0), filter=mc.Causal())
    with Largest() as seen:
        inspect.rows(layer, torch.randn(1, length, 8), [7, length - 1])
    assert 0 < seen.most < length**2 / 8


def test_places_that_do_not_exist_are_refused():
    model, x = make()
    for places in ([LENGTH], [-1], []):
        with pytest.raises(ValueError, match=r"place|shorter"):
            inspect.rows(model, x, places)
    with pytest.raises(ValueError, match="the batch has 2 sequences"):
        inspect.rows(model, x, [0], sequence=2)
    with pytest.raises(ValueError, match=r"no layer of Mercer's attention in Linear"):
        inspect.heads(torch.nn.Linear(2, 2), x)


@pytest.mark.parametrize("name", ATTENTION)
def test_heads_summarise_the_matrix(name):
    model, x = make(**ATTENTION[name])
    model.train()
    found = inspect.heads(model, x)
    assert model.training
    assert model.layers[0].training
    away = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    for n, p in enumerate(reference(model, x)):
        for h in range(HEADS):
            head, one = found[n * HEADS + h], p[:, h]
            assert (head.layer, head.head) == (f"layers.{n}", h)
            entropy = torch.special.entr(one).sum(-1).exp().mean().item()
            assert head.neighbours == pytest.approx(entropy, rel=1e-4)
            alone = one.diagonal(dim1=-2, dim2=-1).mean().item()
            assert head.self_weight == pytest.approx(alone, abs=1e-5)
            assert head.first_weight == pytest.approx(one[..., 0].mean().item(), abs=1e-5)
            far = (one * away).sum(-1).mean().item()
            assert head.distance == pytest.approx(far, abs=1e-4)
            assert sum(head.shares) == pytest.approx(1, abs=1e-4)
            third = head.far.index(2)
            share = (one * (away == 2)).sum(-1).mean().item()
            assert head.shares[third] == pytest.approx(share, abs=1e-5)


def test_heads_of_cross_attention_have_no_distance():
    class Cross(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = mn.KernelAttention(WIDTH, 2)

        def forward(self, x, context):
            return self.layer(x, context)

    torch.manual_seed(0)
    head = inspect.heads(Cross(), (torch.randn(1, 3, WIDTH), torch.randn(1, 5, WIDTH)))[0]
    assert head.visible == 5
    assert head.distance is None
    assert head.self_weight is None
    assert head.shares == ()


def test_the_kernel_of_a_head_has_its_numbers():
    torch.manual_seed(0)
    want = {
        "rbf by head": ["exp(-|q - k|^2 / (2 * 0.5^2))", "exp(-|q - k|^2 / (2 * 4^2))"],
        "softmax": ["exp(<q, k> / sqrt(D))"] * 2,
        "alibi": ["exp(<q, k> / sqrt(D)) * exp(-0.25 |i-j|)",
                  "exp(<q, k> / sqrt(D)) * exp(-0.00391 |i-j|)"],
        "product": ["exp(-|q - k| / 1) * exp(<q.position, k.position> / sqrt(D))"] * 2,
        "sum": ["exp(-|q - k|^2 / (2 * 1^2)) + 0.5 * exp(<q, k> / sqrt(D))"] * 2,
    }  # fmt: skip
    for name, (first, last) in want.items():
        model, x = make(**ATTENTION[name])
        found = inspect.heads(model, x)
        assert (found[0].kernel, found[HEADS - 1].kernel) == (first, last)
    model, x = make(kernel=mc.Periodic([2.0, 3.0, 4.0, 5.0], 1.5))
    assert "/ 5)" in inspect.heads(model, x)[3].kernel
    layer = mn.GaussianAttention(WIDTH, 2, bandwidth=[1.0, 3.0])
    head = inspect.heads(layer, x)[1]
    assert head.kernel == "exp(-|q - k|^2 / (2 * 3^2))"
    assert head.bandwidth == pytest.approx(3.0)


def test_the_start_of_a_bandwidth_is_kept_beside_it():
    pytest.importorskip("transformers")
    from mercer import models
    from mercer.models import presets

    for kernel in ("RBF(2.0, heads=2)", "RBF(heads=2)"):
        model = models.KernelLM(presets.lm("tiny", kernel=kernel, vocab_size=50))
        with torch.no_grad():
            model.blocks[1].attention.kernel.log_bandwidth += math.log(2)
        found = inspect.heads(model, torch.randint(0, 50, (1, 9)))
        assert [head.layer for head in found] == ["blocks.0.attention"] * 2 + [
            "blocks.1.attention"
        ] * 2
        assert found[0].bandwidth == pytest.approx(found[0].start)
        assert found[2].bandwidth == pytest.approx(2 * found[2].start)
    model = models.KernelLM(presets.lm("tiny", system="kundu2026", vocab_size=50))
    head = inspect.heads(model, torch.randint(0, 50, (1, 9)))[0]
    assert head.bandwidth == pytest.approx(head.start, rel=1e-5)


@pytest.mark.parametrize("name", ["alibi", "lookup", "sinusoid", "product"])
def test_the_weight_of_positions_by_distance(name):
    model, x = make(**ATTENTION[name])
    found = inspect.by_distance(model, x, most=6)
    assert len(found) == 2 * HEADS
    one, layer = found[1], model.layers[0]
    assert one.distances == tuple(range(7))
    assert one.head == 1
    q, k, _, _ = layer.parts(x)
    factor = layer.position.kernel
    logs = factor.log_weight(q, k)[:, 1]  # [B, Q, K]
    for n, d in enumerate(one.distances):
        if name == "product":
            # Of the places that have all distances alone.
            want = logs[0].diagonal(-d)[6 - d :]
        else:
            want = logs.diagonal(-d, dim1=-2, dim2=-1)
        if name in ("alibi", "product"):
            assert one.log_weight[n] == pytest.approx(want.mean().item(), abs=1e-4)
    if name == "lookup":
        scores = factor.scores(q)[:, 1]
        assert one.log_weight[0] == pytest.approx(scores[..., 3].mean().item(), abs=1e-5)
        assert one.log_weight[6] == one.log_weight[3]
        assert one.spread[0] == pytest.approx(scores[..., 3].std(correction=0).item(), abs=1e-5)
    assert (max(one.spread) > 0) == (name != "alibi")


def test_positions_before_and_after_and_buckets():
    kernel = mc.Exponential() * mc.Buckets(torch.randn(8, HEADS), max_distance=6)
    model, x = make(kernel=kernel, filter=mc.Full())
    one = inspect.by_distance(model, x, most=3)[2]
    assert one.distances == (-3, -2, -1, 0, 1, 2, 3)
    table = kernel.kernels[1]
    want = table.table[table.bucket(torch.arange(-3, 4)), 2]
    assert one.log_weight == pytest.approx(want.tolist())
    assert not len(inspect.by_distance(*make()))


def test_bandwidths_of_queries_and_their_words():
    model, x = make(**ATTENTION["adaptive"])
    s = inspect.query_bandwidths(model, x)
    layer = model.layers[0]
    q = layer.parts(x)[0]
    want = layer.kernel.precision(q.part("content"))[..., 0] ** -0.5
    assert torch.allclose(s["layers.0"], want, atol=1e-6)
    ids = torch.arange(LENGTH).remainder(3).expand(2, -1)
    found = inspect.spreads(model, x, ids, ["a", "b", "c"])
    assert len(found) == 2 * HEADS
    means = {"abc"[n]: want[:, 0][ids == n].log().mean().exp().item() for n in range(3)}
    (word, width), *_ = found[0].widest
    assert means[word] == max(means.values()) == pytest.approx(width, rel=1e-5)
    assert found[0].narrowest[0][0] == min(means, key=means.__getitem__)
    assert found[0].quantiles[2] == pytest.approx(want[:, 0].median().item(), rel=0.1)
    with pytest.raises(ValueError, match=r"ids must be \[2, 13\], got \[1, 3\]"):
        inspect.spreads(model, x, ids[:1, :3])
    assert inspect.query_bandwidths(*make()) == {}


@pytest.mark.parametrize(
    "options",
    [
        dict(kernel=mc.RBF([0.5, 1.0, 2.0, 4.0])),
        dict(kernel=mc.RBF(heads=HEADS)),
        dict(kernel=mc.Laplace(3.0) * mc.Exponential()),
        dict(kernel=mc.ARD(WIDTH // HEADS, heads=HEADS)),
    ],
)
def test_stored_bandwidths_are_those_of_heads(options):
    model, x = make(**options)
    torch.nn.init.normal_(next(p for n, p in model.named_parameters() if "log_bandwidth" in n))
    stored = inspect.stored_bandwidths(model)
    want = {(one.layer, one.head): one.bandwidth for one in inspect.heads(model, x)}
    found = {(layer, h): s for layer, each in stored.items() for h, s in enumerate(each)}
    assert found == pytest.approx(want, rel=1e-4)


def test_stored_bandwidths_of_gaussian_attention_and_of_none():
    layer = mn.GaussianAttention(WIDTH, HEADS)
    want = [one.bandwidth for one in inspect.heads(layer, torch.randn(1, 5, WIDTH))]
    assert inspect.stored_bandwidths(layer)[""] == pytest.approx(want, rel=1e-4)
    assert inspect.stored_bandwidths(make(kernel=mc.Exponential())[0]) == {}


def test_heads_of_several_batches_are_means_over_all_rows():
    torch.manual_seed(0)
    options = dict(filter=mc.Causal(), kernel=mc.AdaptiveRBF._with_weight(1.0, 4, heads=HEADS))
    layer = mn.KernelAttention(WIDTH, HEADS, **options)
    x = torch.randn(2, LENGTH, WIDTH)
    both, apart = inspect.heads(layer, x), inspect.heads(layer, x[:1], x[1:])
    for one, other in zip(both, apart, strict=True):
        for name in ("neighbours", "distance", "self_weight", "bandwidth"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5)


def test_distances_are_between_the_places_that_are_given():
    torch.manual_seed(0)
    layer = mn.KernelAttention(WIDTH, HEADS, filter=mc.Full())
    x = torch.randn(1, 5, WIDTH)
    corners = torch.tensor([[torch.nan] * 2, [0, 0], [0, 3], [4, 0], [4, 3]])
    p = mn.attention_weights(layer, x)[0].detach()[:, 1:, 1:]
    distance = (p * torch.cdist(corners[1:], corners[1:])).sum((1, 2)) / p.sum((1, 2))
    for one, want in zip(inspect.heads(layer, x, places=corners), distance, strict=True):
        assert one.distance == pytest.approx(want.item(), rel=1e-5)
        assert sum(one.shares) == pytest.approx(p[one.head].sum().item() / 5, rel=1e-5)
        assert [d for d, share in zip(one.far, one.shares, strict=True) if share] == [0, 3, 4]
    with pytest.raises(ValueError, match="places must be of all tokens, got 4"):
        inspect.heads(layer, x, places=corners[:4])
