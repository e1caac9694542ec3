"""Mercer in nanochat, by a small re-creation of the two places where it calls attention.

As of 2026-07: the model is made on the meta device and filled by `init_weights`; `setup_optimizer`
gives all of `transformer.h` to Muon and asserts that its groups hold every parameter.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mercer as mc
from mercer.integrations import nanochat

VOCAB, WIDTH, HEADS, GROUPS, LAYERS, LENGTH = 17, 32, 4, 2, 2, 12
DIM = WIDTH // HEADS
WINDOWS = [(5, 0), (LENGTH, 0)]


def sdpa(q, k, v, causal=False, window_size=(-1, -1)):
    """What nanochat computes without FlashAttention, [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if causal and q.shape[2] == k.shape[2] <= window_size[0]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)
    i = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2])
    left, right = window_size
    seen = torch.ones(q.shape[2], k.shape[2]).bool()
    seen = seen & (j <= i) if causal else seen
    seen = seen & (j >= i - left) if left >= 0 else seen
    seen = seen & (j <= i + right) if right >= 0 else seen
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)


def sdpa_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, window_size=(-1, -1)
):
    start = cache_seqlens[0].item()
    end = start + q.shape[1]
    k_cache[:, start:end], v_cache[:, start:end] = k, v
    return sdpa(q, k_cache[:, :end], v_cache[:, :end], causal, window_size)


OWN = SimpleNamespace(flash_attn_func=sdpa, flash_attn_with_kvcache=sdpa_with_kvcache)


def norm(x):
    return F.rms_norm(x, (x.shape[-1],))


class CausalSelfAttention(nn.Module):
    def __init__(self, layer, flash_attn, kernel):
        super().__init__()
        self.layer, self.flash_attn = layer, flash_attn
        self.c_q = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.c_k = nn.Linear(WIDTH, GROUPS * DIM, bias=False)
        self.c_v = nn.Linear(WIDTH, GROUPS * DIM, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        if kernel is not None:
            self.mercer = nanochat.Attention(kernel, HEADS, DIM)

    def forward(self, x, cos_sin, window_size, kv_cache):
        flash_attn = self.mercer if hasattr(self, "mercer") else self.flash_attn
        q, k, v = (f(x).unflatten(-1, (-1, DIM)) for f in (self.c_q, self.c_k, self.c_v))
        q, k = (norm(turn(y, *cos_sin)) for y in (q, k))
        if kv_cache is None:
            y = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window_size)
        else:
            k_cache, v_cache = kv_cache.get_layer_cache(self.layer)
            y = flash_attn.flash_attn_with_kvcache(
                q, k_cache, v_cache, k=k, v=v, cache_seqlens=kv_cache.cache_seqlens, causal=True,
                window_size=window_size,
            )  # fmt: skip
            if self.layer == LAYERS - 1:
                kv_cache.cache_seqlens += x.shape[1]
        return self.c_proj(y.contiguous().flatten(2))


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


class GPT(nn.Module):
    def __init__(self, flash_attn=OWN, kernel=None):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.h = nn.ModuleList(CausalSelfAttention(n, flash_attn, kernel) for n in range(LAYERS))

    @torch.no_grad()
    def init_weights(self):
        generator = torch.Generator().manual_seed(0)
        for name, p in self.named_parameters():
            if "mercer" not in name:
                p.copy_(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5)
        for layer in self.h:
            if hasattr(layer, "mercer"):
                layer.mercer.init_weights()

    def forward(self, ids, kv_cache=None):
        start = 0 if kv_cache is None else int(kv_cache.cache_seqlens[0])
        places = torch.arange(start, start + ids.shape[1], dtype=torch.float32)
        angles = places[:, None, None] / 100 ** (torch.arange(0.0, DIM, 2) / DIM)
        x = norm(self.wte(ids))
        for layer, window in zip(self.h, WINDOWS, strict=True):
            x = x + layer(norm(x), (angles.cos(), angles.sin()), window, kv_cache)
        return self.lm_head(norm(x))

    def setup_optimizer(self):
        matrices, kernels = nanochat.split(self.h)
        rest = [self.wte.weight, self.lm_head.weight]
        assert len(list(self.parameters())) == len(matrices) + len(kernels) + len(rest)
        adam = [{"params": rest, "lr": 0.01}]
        if kernels:
            adam.append({"params": kernels, "lr": 0.05, "weight_decay": 0.0})
        return torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(adam)


class KVCache:
    def __init__(self, batch):
        self.keys = torch.full((LAYERS, batch, LENGTH + 3, GROUPS, DIM), torch.nan)
        self.values = self.keys.clone()
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32)

    def get_layer_cache(self, layer):
        return self.keys[layer], self.values[layer]


def make(**options):
    with torch.device("meta"):
        model = GPT(**options)
    model.to_empty(device="cpu")
    model.init_weights()
    return model


def ids():
    return torch.randint(VOCAB, (2, LENGTH))


@torch.no_grad()
def cached(model, x, steps):
    cache = KVCache(len(x))
    return torch.cat([model(part, cache) for part in x.split(steps, 1)], 1)


def test_softmax_is_nanochats_own():
    own, ours = make(), make(flash_attn=nanochat.fixed("Exponential()"))
    x = ids()
    assert own(x).std() > 0.1
    assert torch.equal(ours(x), own(x))
    steps = [5, 1, 1, 4, 1]
    assert torch.equal(cached(ours, x, steps), cached(own, x, steps))


@pytest.mark.parametrize(
    "options",
    [
        {"flash_attn": nanochat.fixed("RBF(1.5, trainable=False) * ALiBi([0.1, 0.2, 0.3, 0.4])")},
        {"kernel": f"RBF(1.5, heads={HEADS})"},
        {"kernel": f"RBF(heads={HEADS}) + Polynomial(2)"},
    ],
    ids=["fixed", "learned", "sum"],
)
def test_a_cache_changes_nothing(options):
    model, x = make(**options), ids()
    want = model(x).detach()
    assert (want - make()(x)).abs().max() > 1e-2
    for steps in (LENGTH, 1, [5, 1, 1, 4, 1]):
        torch.testing.assert_close(cached(model, x, steps), want, rtol=0, atol=1e-5)


def test_a_learned_kernel_learns_beside_muon():
    model, x = make(kernel=f"RBF(2.0, heads={HEADS})"), ids()
    with pytest.raises(ValueError, match="2D"):
        torch.optim.Muon(model.h.parameters())
    _, kernels = nanochat.split(model.h)
    assert [p.shape for p in kernels] == [(HEADS,)] * LAYERS
    optimizers, losses = model.setup_optimizer(), []
    start = [p.detach().clone() for p in kernels]
    for _ in range(8):
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    for before, after in zip(start, kernels, strict=True):
        assert (before - after).abs().min() > 1e-3


def test_a_model_from_the_meta_device_starts_with_its_bandwidths():
    model = make(kernel=f"RBF(2.0, heads={HEADS})")
    host = model.h[0].mercer
    torch.testing.assert_close(host.kernel.bandwidth(DIM), torch.full((HEADS,), 2.0))
    with torch.no_grad():
        host.kernel.log_bandwidth.normal_()
    host.init_weights()
    torch.testing.assert_close(host.kernel.bandwidth(DIM), torch.full((HEADS,), 2.0))
    assert model.bfloat16().h[0].mercer.kernel.log_bandwidth.dtype == torch.float32
    fresh = make(kernel=f"RBF(2.0, heads={HEADS})")
    fresh.load_state_dict(make().state_dict())
    assert torch.equal(fresh.h[0].mercer.kernel.log_bandwidth, host.kernel.log_bandwidth)


def test_it_compiles_to_one_graph():
    host = nanochat.Attention(f"RBF(2.0, heads={HEADS})", HEADS, DIM)
    given = torch.randn(3, 2, LENGTH, HEADS, DIM).unbind(0)
    compiled = torch.compile(host.flash_attn_func, backend="eager", fullgraph=True)
    want = host.flash_attn_func(*given, True, WINDOWS[0])
    torch.testing.assert_close(compiled(*given, True, WINDOWS[0]), want)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (-1, 2), (2, 2), (-1, 0)])
def test_the_function_has_the_windows_of_flash_attention(window, causal):
    q, k, v = torch.randn(2, 5, HEADS, DIM), *torch.randn(2, 2, 9, GROUPS, DIM)
    got = nanochat.flash_attn_func(q, k, v, causal, window)
    torch.testing.assert_close(got, sdpa(q, k, v, causal, window))


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_several_lengths(causal):
    """Each sees its own keys, and k and v are written behind them."""
    held = torch.tensor([2, 6, 0], dtype=torch.int32)
    k_cache, v_cache = torch.randn(2, 3, 10, GROUPS, DIM)
    q, k, v = torch.randn(3, 3, HEADS, DIM), *torch.randn(2, 3, 3, GROUPS, DIM)
    before = k_cache.clone()
    window = (4, -1)
    got = nanochat.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, held, causal, window)
    for n, start in enumerate(held.tolist()):
        end = start + 3
        assert torch.equal(k_cache[n, start:end], k[n])
        assert torch.equal(k_cache[n, :start], before[n, :start])
        assert torch.equal(k_cache[n, end:], before[n, end:])
        keys, values = k_cache[n : n + 1, :end], v_cache[n : n + 1, :end]
        torch.testing.assert_close(got[n : n + 1], sdpa(q[n : n + 1], keys, values, causal, window))
    # Without new keys it reads those that are there.
    again = nanochat.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=held + 3, causal=causal, window_size=window
    )
    assert torch.equal(again, got)


def test_misuse():
    with pytest.raises(ValueError, match="numbers that learn, which no optimizer would find"):
        nanochat.fixed("RBF(heads=4)")
    with pytest.raises(ValueError, match="does not fit the layer, which has 4 heads"):
        make(kernel="RBF(heads=3)")
    q, cache = torch.randn(1, 3, HEADS, DIM), torch.zeros(1, 4, HEADS, DIM)
    with pytest.raises(ValueError, match="the cache has 4 places, but holds 2 keys and gets 3"):
        nanochat.flash_attn_with_kvcache(q, cache, cache, q, q, 2)
    with pytest.raises(ValueError, match="one of them is missing"):
        nanochat.flash_attn_with_kvcache(q, cache, cache, q)
    assert isinstance(nanochat.Attention(mc.RBF(2.0), 4, 8).kernel, mc.RBF)
