"""A filter from a boolean tensor, which may differ between sequences, heads and queries."""

import pytest
import torch

import mercer as mc
from mercer import nn as mn
from mercer.filters import Full, Span
from mercer.testing import Shape, check_filter, check_lowering, inputs

B, H, Q, K = 2, 4, 5, 9


def draw(*shape, seed=0, share=0.6):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=generator) < share


def dense(visible, q, k, v):
    """Softmax attention, written out."""
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / q.shape[-1] ** 0.5
    weight = scores.exp() * visible
    return weight @ v.repeat_interleave(q.shape[1] // v.shape[1], 1) / weight.sum(-1, keepdim=True)


SHAPES = [
    (K,), (Q, K), (1, K), (1, Q, K), (H, Q, K), (H, 1, K), (B, 1, Q, K), (B, 1, 1, K), (B, H, Q, K),
    (B, H, 1, K),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("backend", ["reference", "chunked", "sdpa"])
def test_a_mask_hides_what_is_false(shape, kv_heads, backend):
    visible = draw(*shape)
    visible[..., 0] = True
    q, k, v = (torch.randn(B, h, t, 4, dtype=torch.float64)
               for h, t in ((H, Q), (kv_heads, K), (kv_heads, K)))  # fmt: skip
    got = mc.smooth(mc.Exponential(), q, k, v, filter=mc.Mask(visible), backend=backend)
    assert (got - dense(visible, q, k, v)).abs().max() < 1e-12


@pytest.mark.parametrize("joined", [
    lambda mask: mask, lambda mask: mask & mc.Causal(), lambda mask: mask | mc.Window(1, 0),
    lambda mask: mask & mc.Padding([9, 4]) & mc.Mask(draw(Q, K, seed=1)),
])  # fmt: skip
@pytest.mark.parametrize("heads", [1, H])
def test_every_backend_with_rows_that_see_nothing(joined, heads):
    visible = draw(B, heads, Q, K, share=0.3)
    visible[0, :, 2] = False
    shape = Shape(batch=B, heads=H, kv_heads=2, queries=Q, keys=K)
    check_lowering(mc.RBF([1.0, 2.0, 3.0, 4.0]), joined(mc.Mask(visible)), shape, dim=4)


@pytest.mark.parametrize("shape", [(B, 1, K, K), (K, K), (B, H, K, K), (H, K, K)], ids=str)
def test_all_forms_agree(shape):
    check_filter(mc.Mask(draw(*shape)), lengths=(1, 7, K))
    check_filter(mc.Mask(draw(*shape)) & mc.Causal() | mc.Mask(draw(*shape, seed=1)), lengths=(K,))


@pytest.mark.parametrize("shape", [(Q, K), (B, H, Q, K), (H, 1, K)], ids=str)
def test_the_block_mask_of_flex_attention_agrees(shape):
    from torch.nn.attention.flex_attention import create_mask

    mask = mc.Mask(draw(*shape))
    rule = mask.mask_mod(Q, K)
    found = create_mask(rule, mask.batch, mask.heads, Q, K, device="cpu")
    assert torch.equal(found, mask.mask(Q, K))
    assert mask.block_mask(Q, K).shape[1] == (mask.heads or 1)


def test_flex_attention_runs_masks_of_heads(monkeypatch):
    from mercer.backends.flex import compiled

    monkeypatch.setattr(compiled, "COMPILER", "aot_eager")
    monkeypatch.setattr(compiled, "unavailable", lambda device: None)
    monkeypatch.setattr(compiled, "structures", {})
    q, k, v = (torch.randn(B, h, t, 16) for h, t in ((H, Q), (2, K), (2, K)))
    k[1, 0, 3] = torch.nan
    for visible in (draw(B, H, Q, K), draw(H, Q, K)):
        for filter in (mc.Mask(visible), mc.Mask(visible) & mc.Causal()):
            with torch.no_grad():
                got, want = (
                    mc.smooth(mc.Exponential(), q, k, v, filter=filter, backend=name)
                    for name in ("flex", "reference")
                )
            assert torch.equal(got.isnan(), want.isnan())
            assert (got - want).nan_to_num().abs().max() < 1e-5


def test_backends_that_read_numbers_refuse_a_mask():
    q, k, v = inputs(mc.Polynomial(), Shape(), 4)
    mask = mc.Mask(draw(7, 7)) & mc.Causal()
    with pytest.raises(ValueError, match="'linear' cannot run this: one state cannot serve Mask"):
        mc.smooth(mc.Polynomial(), q, k, v, filter=mask, backend="linear")
    assert "Mask([1, 1, 7, 7])" in str(mc.explain(mc.Polynomial(), q, k, v, filter=mask))


def test_a_mask_is_a_copy_and_equal_by_contents():
    visible = draw(Q, K)
    mask, same = mc.Mask(visible), mc.Mask(visible[None, None])
    assert mask == same
    assert hash(mask) == hash(same)
    assert mask == mc.Mask(visible.tolist())
    visible[0, 0] = ~visible[0, 0]
    assert mask == same
    assert mask != mc.Mask(visible)
    assert repr(mask) == f"Mask([1, 1, {Q}, {K}])"


def test_what_a_mask_hides_is_found_by_blocks():
    visible = torch.zeros(2, 1, 8, 8, dtype=torch.bool)
    visible[:, :, :4, :4] = True
    visible[1, :, 4:, 4:] = True
    mask = mc.Mask(visible)
    first, second = Span(0, 3), Span(4, 7)
    assert mask.covers(first, first, 0) is True
    assert mask.covers(first, second, 0) is False
    assert mask.covers(second, second, 0) is None
    assert isinstance(mc.Mask(torch.ones(8, 8, dtype=torch.bool)).simplify(8, 8), Full)
    visible = mask.visible
    visible[0, :, 4:, 4:] = True
    assert mask.covers(second, second, 0) is True


def test_a_mask_is_causal_if_it_hides_the_future():
    lower = torch.ones(K, K).tril().bool()
    assert mc.Mask(lower).causal
    assert mc.Mask(lower[-Q:]).causal
    assert mc.Mask(lower[:Q]).causal
    assert not mc.Mask(torch.ones(K, K).tril(1).bool()[-Q:]).causal
    assert not mc.Mask(lower[-1:]).causal
    later = lower.repeat(1, H, 1, 1)
    assert mc.Mask(later).causal
    later[0, 1, 2, 3] = True
    assert not mc.Mask(later).causal
    assert (mc.Mask(later) & mc.Causal()).causal
    slopes = mc.Exponential() * mc.ALiBi([0.5, 0.25])
    for mask in (mc.Mask(lower), mc.Mask(lower | lower.T)):
        check_lowering(slopes, mask, Shape(queries=K, keys=K), dim=4)
    q, k, v = inputs(slopes, Shape(queries=K, keys=K), 4)
    causal, both = (
        mc.explain(slopes, q, k, v, filter=mask).terms
        for mask in (mc.Mask(lower), mc.Mask(lower | lower.T))
    )
    assert "one number per key" in causal[0]
    assert "table" in both[0]


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        (torch.zeros(3, 3), r"must be boolean, .* got torch.float32; .* it is numbers == 0"),
        (torch.ones(3, 3, dtype=torch.long), "must be boolean"),
        (torch.ones((), dtype=torch.bool), r"must be \[B, H, Q, K\], .* got \[\]"),
        (torch.ones(1, 1, 1, 1, 1, dtype=torch.bool), r"must be \[B, H, Q, K\]"),
    ],
)
def test_what_is_no_mask_is_refused(visible, said):
    with pytest.raises(ValueError, match=said):
        mc.Mask(visible)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((Q, K + 1), "made for 5 queries and 10 keys, but there are 5 queries and 9 keys"),
        ((Q - 1, K), "made for 4 queries"),
        ((Q + 1, K), "made for 6 queries"),
        ((3, 1, Q, K), "Mask was made for 3 sequences, but the batch has 2"),
        ((3, Q, K), r"Mask\(\[1, 3, 5, 9\]\) was made for 3 heads, but the queries have 4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_mask_that_does_not_fit_is_refused(shape, said, backend):
    q, k, v = inputs(mc.RBF(), Shape(heads=H, kv_heads=H, queries=Q, keys=K), 4)
    for filter in (mc.Mask(draw(*shape)), mc.Causal() & mc.Mask(draw(*shape))):
        with pytest.raises(ValueError, match=said):
            mc.smooth(mc.RBF().double(), q, k, v, filter=filter, backend=backend)


def test_decoding_with_a_cache_reads_the_rows_of_the_last_queries():
    torch.manual_seed(0)
    layer = mn.KernelAttention(16, 2, kernel=mc.RBF(), position="rotary").eval()
    visible = draw(2, 2, K, K) | torch.eye(K).bool()
    filter = mc.Mask(visible) & mc.Causal()
    x, cache = torch.randn(2, K, 16), mn.Cache()
    whole = layer(x, filter=filter)
    steps = [layer(x[:, :4], filter=filter, cache=cache)]
    steps += [layer(x[:, n : n + 1], filter=filter, cache=cache) for n in range(4, K)]
    assert (torch.cat(steps, 1) - whole).abs().max() < 1e-5


@pytest.mark.parametrize(
    "mask", [torch.ones(K, K).tril().bool(), draw(K, K) & ~torch.eye(K).bool()]
)
def test_token_kernels_under_a_mask(mask):
    q, k, v = inputs(mc.Exponential(), Shape(queries=K, keys=K), 4)
    taps = torch.randn(2, K, 1, 3, dtype=torch.float64)
    a, b, c = (
        mc.vicinity(q, k, v, value_taps=taps, filter=filter, backend=name)
        for filter, name in (
            (mc.Mask(mask), "reference"),
            (mc.Mask(mask), "chunked"),
            (mc.Causal() if bool(mask.triu(1).any()) is False else mc.Mask(mask), "reference"),
        )
    )
    assert (a - b).abs().max() < 1e-12
    assert (a - c).abs().max() < 1e-12


def test_token_kernels_refuse_masks_of_heads_and_what_a_graph_cannot_read(monkeypatch):
    q, k, v = inputs(mc.Exponential(), Shape(queries=K, keys=K), 4)
    taps = torch.randn(2, K, 1, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="the same for all heads"):
        mc.vicinity(q, k, v, value_taps=taps, filter=mc.Mask(draw(2, K, K)))
    lower = torch.ones(K, K).tril().bool()
    for name in ("filters.mask", "tokenwise.vicinity"):
        monkeypatch.setattr(f"mercer.{name}.can_read", lambda x: False)
    with pytest.raises(ValueError, match=r"Mask\(\[1, 1, 9, 9\]\) cannot be read"):
        mc.vicinity(q, k, v, value_taps=taps, filter=mc.Mask(lower))
    want = mc.vicinity(q, k, v, value_taps=taps, filter=mc.Causal())
    got = mc.vicinity(q, k, v, value_taps=taps, filter=mc.Mask(lower) & mc.Causal())
    assert (got - want).abs().max() < 1e-12


def test_a_compiled_graph_takes_a_mask():
    mask = mc.Mask(draw(B, H, Q, K) | torch.eye(Q, K).bool())
    q, k, v = (torch.randn(B, H, t, 4) for t in (Q, K, K))

    def call(q, k, v):
        return mc.smooth(mc.Exponential(), q, k, v, filter=mask)

    got = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    assert (got - call(q, k, v)).abs().max() < 1e-6


def test_a_report_takes_a_mask():
    layer = mn.GaussianAttention(16, 2)
    x = torch.randn(2, K, 16)
    causal = torch.ones(K, K).tril().bool()
    out, want = layer(x, filter=mc.Mask(causal)), layer(x, filter=mc.Causal())
    assert (out - want).abs().max() < 1e-6
    known, found = (layer.report(x, filter=f) for f in (mc.Causal(), mc.Mask(causal)))
    assert str(known) == str(found)
    assert str(layer.report(x, filter=mc.Mask(causal.expand(2, K, K)))) == str(known)
