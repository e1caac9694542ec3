"""Mercer in nanochat, which calls attention in two places, by `flash_attn_func` and, with a cache,
by `flash_attn_with_kvcache`.

For a kernel that learns nothing, give nanochat these functions in place of its own:

    flash_attn = nanochat.fixed("RBF(11.3, trainable=False)", device="cuda")

For one that learns, every layer has an `Attention` of its own, as `self.mercer`, and calls its
methods of the same names:

    self.mercer = nanochat.Attention("RBF(heads=10)", config.n_head, self.head_dim)
    y = self.mercer.flash_attn_func(q, k, v, causal=True, window_size=window_size)

`init_weights` calls `block.attn.mercer.init_weights()`, and `split` keeps the numbers of kernels
from Muon, which takes matrices only.

Tensors are [B, T, H, D] here, as in FlashAttention.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ..filters import Causal, Filter, Full, Padding, Window
from ..filters.places import Where
from ..kernels import Exponential, Kernel
from ..own import Trust
from ..smoother import smooth
from .host import KernelHost, own_kernel

Span = tuple[int, int]
OPEN: Span = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    window_size: Span = OPEN,
    *,
    kernel: Kernel = Exponential(),
) -> Tensor:
    """Attention [B, T, H, D]; window_size is (left, right), -1 for open."""
    return _attend(kernel, q, k, v, _filter(causal, window_size))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    causal: bool = False,
    window_size: Span = OPEN,
    *,
    kernel: Kernel = Exponential(),
) -> Tensor:
    """Attention to the cache [B, T, H, D], after k and v are written behind its first keys.

    `cache_seqlens`, one number or one for each sequence, is how many keys the cache holds before.
    """
    held = _held(cache_seqlens, k_cache)
    added = 0
    if k is not None and v is not None:
        added = k.shape[1]
        _write(k_cache, k, held)
        _write(v_cache, v, held)
    elif k is not None or v is not None:
        raise ValueError("k and v are written to the cache together, but one of them is missing")
    ends = [n + added for n in held]
    filter, places = _filter(causal, window_size), None
    if len(set(held)) > 1:
        # Sequences of several lengths: each query stands at its own place.
        last = torch.tensor(ends, device=q.device)
        steps = torch.arange(-q.shape[1], 0, device=q.device)
        places = last[:, None] + steps, torch.arange(max(ends), device=q.device)[None]
        filter = filter & Padding(last)
    return _attend(kernel, q, k_cache[:, : max(ends)], v_cache[:, : max(ends)], filter, places)


def fixed(
    kernel: str | Kernel,
    *,
    device: torch.device | str | None = None,
    trust_kernels: Trust = None,
) -> SimpleNamespace:
    """The two functions with this kernel, as nanochat's `flash_attn`; `device` of the model."""
    own = own_kernel(kernel, None, None, "the model", trust_kernels).to(device)
    if any(p.requires_grad for p in own.parameters()):
        raise ValueError(
            f"{own!r} has numbers that learn, which no optimizer would find here: give each layer "
            "an Attention, or make the kernel with trainable=False"
        )
    return SimpleNamespace(
        flash_attn_func=partial(flash_attn_func, kernel=own),
        flash_attn_with_kvcache=partial(flash_attn_with_kvcache, kernel=own),
    )


class Attention(KernelHost):
    """The two functions with a kernel that learns: a submodule of each attention layer.

    It may be made on the meta device; `init_weights` sets the numbers that the kernel starts with.
    """

    def __init__(
        self, kernel: str | Kernel, num_heads: int, head_dim: int, *, trust_kernels: Trust = None
    ) -> None:
        super().__init__(own_kernel(kernel, num_heads, head_dim, "the layer", trust_kernels))

    def flash_attn_func(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Span = OPEN
    ) -> Tensor:
        return flash_attn_func(q, k, v, causal, window_size, kernel=self.kernel)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: Tensor | int | None = None,
        causal: bool = False,
        window_size: Span = OPEN,
    ) -> Tensor:
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens, causal, window_size, kernel=self.kernel
        )


def split(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of nanochat's `transformer.h`: those for Muon, and the numbers of kernels."""
    hosts = [m for m in module.modules() if isinstance(m, Attention)]
    kernels = {id(p): p for host in hosts for p in host.parameters()}
    return [p for p in module.parameters() if id(p) not in kernels], list(kernels.values())


def _attend(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, filter: Filter, places: Where | None = None
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return smooth(kernel, q, k, v, filter=filter, places=places).transpose(1, 2)


def _filter(causal: bool, window: Span) -> Filter:
    left, right = window[0], 0 if causal else window[1]
    if left < 0 and right <= 0:
        return Causal() if right == 0 else Full()
    return Window(max(left, -1), max(right, -1))


def _held(lengths: Tensor | int | None, cache: Tensor) -> list[int]:
    """How many keys each sequence of the cache holds."""
    if lengths is None:
        return [cache.shape[1]] * cache.shape[0]
    if isinstance(lengths, int):
        return [lengths] * cache.shape[0]
    return [int(n) for n in lengths.tolist()]


def _write(cache: Tensor, x: Tensor, held: list[int]) -> None:
    """Put x behind what the cache holds, in place."""
    length, end = x.shape[1], max(held) + x.shape[1]
    if end > cache.shape[1]:
        raise ValueError(
            f"the cache has {cache.shape[1]} places, but holds {max(held)} keys and gets {length}"
        )
    if len(set(held)) == 1:
        cache[:, held[0] : end] = x
        return
    for n, start in enumerate(held):
        cache[n, start : start + length] = x[n]
