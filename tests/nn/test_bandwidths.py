"""The report of heads with a bandwidth, for any kernel, beside weights that are written out."""

import math

import pytest
import torch

import mercer as mc
from mercer import inspect, models
from mercer import nn as mn
from mercer.models import presets
from mercer.nn import bandwidths

HEADS, DIM, WIDTH = 2, 4, 8


def make(kernel=None, **options):
    torch.manual_seed(0)
    return mn.KernelAttention(
        WIDTH, HEADS, kernel=kernel, **({"filter": mc.Causal()} | options)
    ).double()


def draw(length=7, batch=2):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1)).double()


def check(report, layer, x, counted=None, **given):
    """Neighbourhood and weight on self, from the matrix of weights."""
    p = mn.attention_weights(layer, x, **given)
    keep = torch.ones(x.shape[:2], dtype=torch.bool) if counted is None else counted
    entropy = torch.special.entr(p).sum(-1).exp()
    for head in report:
        near = entropy[:, head.head][keep].mean().item()
        assert head.neighbours == pytest.approx(near, rel=1e-9)
        alone = p[:, head.head].diagonal(dim1=-2, dim2=-1)[keep].mean().item()
        assert head.self_weight == pytest.approx(alone, rel=1e-9)


def test_one_bandwidth_or_one_for_each_head():
    x, default = draw(), math.sqrt(math.sqrt(DIM) / 2)
    for kernel, want in (
        (mc.RBF(2.0), [2.0, 2.0]),
        (mc.Laplace([0.5, 3.0]), [0.5, 3.0]),
        (mc.Matern(2.5), [default, default]),
        (mc.RBF(1.5, trainable=False), [1.5, 1.5]),
    ):
        layer = make(kernel)
        report = mn.bandwidth_report(layer, x)
        assert [(h.layer, h.head, h.kernel) for h in report] == [
            ("KernelAttention", 0, ""), ("KernelAttention", 1, ""),
        ]  # fmt: skip
        assert [h.bandwidth for h in report] == pytest.approx(want)
        assert report[0].visible == pytest.approx(4.0)
        check(report, layer, x)


def test_heads_that_see_different_keys():
    layer, x = make(mc.RBF(2.0), filter=mc.Heads([mc.Causal(), mc.Window(1, 0)])), draw()
    report = mn.bandwidth_report(layer, x)
    assert [h.visible for h in report] == pytest.approx([4.0, 13 / 7])
    check(report, layer, x)
    found = inspect.heads(layer, x)
    assert [h.visible for h in found] == pytest.approx([4.0, 13 / 7])
    assert [h.self_weight for h in found] == pytest.approx([h.self_weight for h in report])


def test_every_bandwidth_in_a_product_and_a_sum():
    kernel = mc.RBF(2.0) * mc.Laplace(3.0, on="position") + mc.RBF([0.5, 4.0]) * mc.Exponential()
    layer, x = make(kernel, position=mn.ProductKernel(kernel=mc.RBF(5.0, on="position"))), draw()
    report = mn.bandwidth_report(layer, x)
    rows = [(h.head, h.kernel, round(h.bandwidth, 6)) for h in report]
    assert rows == [
        (0, "RBF 1", 2.0), (0, "Laplace on position", 3.0), (0, "RBF 2", 0.5),
        (0, "RBF on position", 5.0), (1, "RBF 1", 2.0), (1, "Laplace on position", 3.0),
        (1, "RBF 2", 4.0), (1, "RBF on position", 5.0),
    ]  # fmt: skip
    check(report, layer, x)
    lines = str(report).splitlines()
    assert lines[0].split()[:4] == ["layer", "head", "kernel", "bandwidth"]
    assert len(lines) == 9


def test_bandwidths_of_queries_are_their_geometric_mean():
    layer, x = make(mc.AdaptiveRBF(DIM, 2.0, heads=HEADS)), draw()
    with torch.no_grad():
        layer.kernel.weight.normal_()
    report = mn.bandwidth_report(layer, x)
    q = layer.parts(x)[0].part("content")
    log = math.log(2.0) + 2 * torch.tanh((q * layer.kernel.weight[:, None]).sum(-1) / 2)
    want = log.mean((0, 2)).exp().tolist()
    assert [h.bandwidth for h in report] == pytest.approx(want)
    check(report, layer, x)


class PerFeature(mc.kernels.Kernel):
    """A kernel of one's own, with a bandwidth for each feature of each head."""

    def __init__(self):
        super().__init__()
        log = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
        self.log_bandwidth = torch.nn.Parameter(log)

    def log_weight(self, q, k):
        scale = (-self.log_bandwidth).exp()[:, None]
        q, k = (x * scale for x in self.select(q, k))
        return -0.5 * torch.cdist(q, k).square()


def test_a_kernel_of_ones_own_with_a_bandwidth_for_each_feature():
    layer, x = make(PerFeature()), draw()
    report = mn.bandwidth_report(layer, x)
    assert [h.bandwidth for h in report] == pytest.approx([math.exp(1.5), math.e])
    check(report, layer, x)


def test_many_keys_are_taken_some_at_a_time(monkeypatch):
    layer, x = make(mc.RBF(), position="rotary"), draw(11)
    whole = mn.bandwidth_report(layer, x)
    monkeypatch.setattr(bandwidths, "COLUMNS", 4)
    for a, b in zip(whole, mn.bandwidth_report(layer, x), strict=True):
        assert a.neighbours == pytest.approx(b.neighbours)
        assert a.self_weight == pytest.approx(b.self_weight)


def test_rows_of_padding_are_left_out_and_token_kernels_are_a_part():
    layer = make(mc.RBF(2.0), filter=mc.Full(), tokens=mn.TokenKernels(9, temperature=None))
    with torch.no_grad():
        layer.tokens.weight.uniform_(0.2, 0.6)
    x, ids, filter = draw(), torch.arange(14).view(2, 7) % 9, mc.Padding([4, 7])
    report = mn.bandwidth_report(layer, x, filter=filter, token_ids=ids)
    assert report[0].visible == pytest.approx((4 * 4 + 7 * 7) / 11)
    counted = torch.arange(7) < torch.tensor([[4], [7]])
    check(report, layer, x, counted, filter=filter, token_ids=ids)


def test_a_model_of_several_kinds_of_layers():
    config = presets.lm(
        "tiny", vocab_size=30, num_layers=3, system=["kundu2026", "lee2018", "lee2018"],
        kernel=[None, "RBF(2.0)", None],
    )  # fmt: skip
    model, ids = models.KernelLM(config).eval(), torch.arange(3, 17).view(2, 7)
    report = mn.bandwidth_report(model, ids)
    assert [h.layer for h in report] == [f"blocks.{n}.attention" for n in (0, 0, 1, 1)]
    assert mn.gaussian_report(model, ids) == report
    cache = model.new_cache()
    model(ids[:, :3], past_key_values=cache)
    with pytest.raises(ValueError, match="call the model without a cache"):
        mn.bandwidth_report(model, ids[:, 3:], past_key_values=cache)


def test_cross_attention_has_no_weight_on_self():
    layer = make(mc.RBF(1e4), filter=mc.Full())
    (first, _) = mn.bandwidth_report(layer, draw(3), draw(5))
    assert (first.self_weight, first.visible) == (None, pytest.approx(5.0))
    assert first.neighbours == pytest.approx(5.0, rel=1e-4)
    assert first.note == "a plain mean"
    assert "None" not in str(mn.bandwidth_report(layer, draw(3), draw(5)))


def test_errors():
    with pytest.raises(ValueError, match="no kernel with a bandwidth in KernelAttention"):
        mn.bandwidth_report(make(), draw())
    with pytest.raises(ValueError, match="no place sees a key"):
        mn.bandwidth_report(make(mc.RBF()), draw(), filter=mc.Padding([0, 0]))
