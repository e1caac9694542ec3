"""Mercer in timm's vision transformers: with timm where it is installed, and with a stub of it.

The stub has the signatures of timm 1.0.31: `Attention(dim, num_heads, …)`, and a block that makes
its attention by `issubclass(attn_layer, DiffAttention)` and keyword arguments.
"""

import copy
import functools
import importlib.util
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mercer as mc
from mercer.integrations import timm as mercer_timm

WIDTH, HEADS, DEPTH = 24, 3, 2


class Attention(nn.Module):
    """What timm.layers.Attention computes where it is fused."""

    def __init__(
        self, dim, num_heads=8, attn_head_dim=None, dim_out=None, qkv_bias=False, qk_norm=False,
        scale_norm=False, proj_bias=True, attn_drop=0.0, proj_drop=0.0, norm_layer=None,
        device=None, dtype=None,
    ):  # fmt: skip
        super().__init__()
        where = {"device": device, "dtype": dtype}
        self.num_heads, self.head_dim = num_heads, attn_head_dim or dim // num_heads
        inner = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * inner, bias=qkv_bias, **where)
        self.q_norm = norm_layer(self.head_dim, **where) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **where) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(inner, **where) if scale_norm else nn.Identity()
        self.proj = nn.Linear(inner, dim_out or dim, bias=proj_bias, **where)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, attn_mask=None, is_causal=False):
        shape = (*x.shape[:2], 3, self.num_heads, self.head_dim)
        q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4)
        p = self.attn_drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask, p, is_causal
        )
        return self.proj_drop(self.proj(self.norm(y.transpose(1, 2).flatten(2))))


class DiffAttention(nn.Module):
    pass


class ViT(nn.Module):
    def __init__(self, attn_layer=Attention, qk_norm=False, device=None):
        super().__init__()
        if issubclass(attn_layer, DiffAttention):
            raise NotImplementedError
        self.embed = nn.Linear(12, WIDTH, device=device)
        self.attn = nn.ModuleList(
            attn_layer(
                WIDTH, num_heads=HEADS, qkv_bias=True, qk_norm=qk_norm, scale_norm=False,
                proj_bias=True, attn_drop=0.0, proj_drop=0.0, norm_layer=nn.LayerNorm,
                device=device, dtype=None,
            )
            for _ in range(DEPTH)
        )  # fmt: skip
        self.head = nn.Linear(WIDTH, 5, device=device)

    def forward(self, x, attn_mask=None):
        # A square image of 12 x 12 as patches of 2 x 2.
        x = self.embed(F.unfold(x, 2, stride=2).mT)
        for layer in self.attn:
            x = x + layer(x, attn_mask=attn_mask)
        return self.head(x.mean(1))


def stub(attn_layer=None, **options):
    return ViT(attn_layer or sys.modules["timm.layers"].Attention, **options)


def real(attn_layer=None, **options):
    import timm

    if attn_layer is not None:
        options["attn_layer"] = attn_layer
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=12, patch_size=2, embed_dim=WIDTH, num_heads=HEADS,
        depth=DEPTH, num_classes=5, **options,
    )  # fmt: skip


@pytest.fixture(params=["stub", "timm"])
def make(request, monkeypatch):
    if request.param == "timm":
        if importlib.util.find_spec("timm") is None:
            pytest.skip("timm is not installed")
        return real
    layers = types.ModuleType("timm.layers")
    layers.Attention, layers.DiffAttention = Attention, DiffAttention
    package = types.ModuleType("timm")
    package.layers = layers
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.layers", layers)
    return stub


def images():
    return torch.randn(2, 3, 12, 12)


def hosts(model):
    return [m.mercer for m in model.modules() if hasattr(m, "mercer")]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_softmax_is_timms_own_and_its_weights_load_strictly(make, qk_norm):
    came = make(qk_norm=qk_norm).eval()
    ours = make(mercer_timm.attention("Exponential()"), qk_norm=qk_norm).eval()
    ours.load_state_dict(came.state_dict())
    x = images()
    assert torch.equal(ours(x), came(x))
    assert came(x).std() > 1e-3
    patched = mercer_timm.patch(copy.deepcopy(came), mc.Exponential())
    assert torch.equal(patched(x), came(x))
    assert patched.state_dict().keys() == came.state_dict().keys()


def test_gradients_of_softmax_are_timms(make):
    came = make()
    ours = mercer_timm.patch(copy.deepcopy(came), "Exponential()")
    x = images()
    for model in (came, ours):
        model(x).square().sum().backward()
    for (name, p), q in zip(came.named_parameters(), ours.parameters(), strict=True):
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), name


def test_a_learned_kernel_is_the_smoother_and_learns(make):
    model = mercer_timm.patch(make(), f"RBF(2.0, heads={HEADS})")
    layer = next(m for m in model.modules() if hasattr(m, "mercer"))
    x = torch.randn(2, 7, WIDTH)
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    weight = (-torch.cdist(q, k).square() / (2 * 2.0**2)).softmax(-1)
    want = layer.proj((weight @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), want)
    model(images()).square().sum().backward()
    for host in hosts(model):
        assert host.kernel.log_bandwidth.grad.abs().min() > 0
    first, second = hosts(model)
    assert first.kernel is not second.kernel


def test_weights_of_timm_load_strictly_under_a_learned_kernel(make):
    """It starts with the bandwidths that it was given; a saved one keeps its own."""
    came, layer = make(), mercer_timm.attention(f"RBF(3.0, heads={HEADS})")
    ours = make(layer)
    ours.load_state_dict(came.state_dict())
    for host in hosts(ours):
        torch.testing.assert_close(host.kernel.bandwidth(8), torch.full((HEADS,), 3.0))
    with torch.no_grad():
        for host in hosts(ours):
            host.kernel.log_bandwidth.normal_()
    again = make(layer)
    again.load_state_dict(ours.state_dict())
    x = images()
    assert torch.equal(again.eval()(x), ours.eval()(x))
    damaged = ours.state_dict()
    damaged["unknown"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="unknown"):
        again.load_state_dict(damaged)
    with pytest.raises(RuntimeError, match=r"mercer\.kernel\.log_bandwidth"):
        came.load_state_dict(ours.state_dict())


def test_layers_are_chosen(make):
    model = mercer_timm.patch(make(), f"RBF(heads={HEADS})", layers=[1])
    assert len(hosts(model)) == 1
    mercer_timm.patch(model, "Laplace()")
    assert [type(h.kernel).__name__ for h in hosts(model)] == ["Laplace", "Laplace"]
    mercer_timm.patch(model, "Polynomial(2)", layers=0)
    assert [type(h.kernel).__name__ for h in hosts(model)] == ["Polynomial", "Laplace"]


def test_masks(make):
    came = make().eval()
    came = next(m for m in came.modules() if type(m) is sys.modules["timm.layers"].Attention)
    ours = mercer_timm.patch(nn.Sequential(copy.deepcopy(came)), "Exponential()")[0]
    x, seen = torch.randn(2, 7, WIDTH), torch.rand(2, 1, 7, 7) < 0.6
    seen |= torch.eye(7).bool()
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, added, added.masked_fill(~seen, -torch.inf)):
        torch.testing.assert_close(ours(x, attn_mask=mask), came(x, attn_mask=mask))
    torch.testing.assert_close(ours(x, is_causal=True), came(x, is_causal=True))
    assert not torch.allclose(ours(x), ours(x, attn_mask=seen))
    with pytest.raises(ValueError, match="numbers that are added to scores"):
        ours(x, attn_mask=torch.randn(7, 7))
    with pytest.raises(ValueError, match="exclude each other"):
        ours(x, attn_mask=seen, is_causal=True)


def test_bandwidths_survive_the_meta_device_and_casts(make):
    layer = mercer_timm.attention(f"RBF(3.0, heads={HEADS})")
    with torch.device("meta"):
        model = make(layer)
    model.to_empty(device="cpu")
    model.load_state_dict(make().state_dict())
    x = images()
    assert model.eval()(x).isfinite().all()
    model.bfloat16()
    for host in hosts(model):
        assert host.kernel.log_bandwidth.dtype == torch.float32
        assert (host.kernel.bandwidth(8) - 3).abs().max() < 1e-6
    assert model(x.bfloat16()).dtype == torch.bfloat16


def test_misuse(make):
    model = make()
    with pytest.raises(ValueError, match=r"does not fit layer 0, which has 3 heads of 8 features"):
        mercer_timm.patch(model, "RBF(heads=4)")
    with pytest.raises(ValueError, match="there is no layer 2: the model has 2 attention layers"):
        mercer_timm.patch(model, "RBF()", layers=[0, 2])
    with pytest.raises(ValueError, match="there is no layer None"):
        mercer_timm.patch(model, "RBF()", layers=None)
    with pytest.raises(ValueError, match=r"layers must be .* got \[\]"):
        mercer_timm.patch(model, "RBF()", layers=[])
    assert not hosts(model)
    with pytest.raises(ValueError, match="does not fit the layer, which has 3 heads"):
        make(mercer_timm.attention("RBF(heads=2)"))
    with pytest.raises(ValueError, match="reads the part 'position'"):
        mercer_timm.attention("RBF(on='position')")
    with pytest.raises(ValueError, match=r"Linear has no layer of the class timm\.layers"):
        mercer_timm.patch(nn.Linear(2, 2), "RBF()")
    with pytest.raises(TypeError):
        make(functools.partial(Attention, qkv_bias=True))


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "timm.layers", None)
    with pytest.raises(ImportError, match=r"pip install 'mercer\[timm\]'"):
        mercer_timm.attention("RBF()")
