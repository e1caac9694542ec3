"""The systems of the papers, each as its four parts.

A system is one entry: its row in the table, and its builder. Options of `build` override any
argument of the layer: `nn.KernelAttention`, or `nn.GaussianAttention` for kundu2026.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .explain import Explanation, explain
from .filters import Blocks, Causal, CausalAcross, Full, Memory, sparse
from .kernels import Exponential
from .names import suggest
from .nn import (
    DirectSum,
    GaussianAttention,
    Grid2D,
    KernelAttention,
    Learned,
    LookupTable,
    NoPosition,
    ProductKernel,
    RelativeSinusoid,
    TokenKernels,
)  # fmt: skip
from .nn.positions import POSITIONS
from .table import Table
from .term.features import Features

Attention = KernelAttention | GaussianAttention
Builder = Callable[..., Attention]


@dataclass(frozen=True, kw_only=True)
class System:
    """The table's row of a system, and its builder."""

    name: str
    title: str
    features: str
    kernel: str
    value: str
    filter: str
    builder: Builder
    # The layer is a GaussianAttention: no projections, no cross-attention, rotary positions.
    gaussian: bool = False
    # It has token kernels, on a base system.
    token_kernels: bool = False


SYSTEMS: dict[str, System] = {}


def system(**parts: Any) -> Callable[[Builder], Builder]:
    """Enter a builder into the table under its own name."""

    def enter(builder: Builder) -> Builder:
        name = builder.__name__
        SYSTEMS[name] = System(
            name=name, title=(builder.__doc__ or name).rstrip("."), builder=builder, **parts
        )
        return builder

    return enter


@system(
    features="F x T",
    kernel="k_exp(f_q + t_q, f_k + t_k)",
    value="(f_k + t_k) W_v",
    filter="all; causal in the decoder",
)
def vaswani2017(d_model: int, num_heads: int, **options: Any) -> KernelAttention:
    """Attention Is All You Need."""
    return _attention(
        d_model, num_heads, options, position=DirectSum(), value="content+position", filter=Full()
    )


@system(
    features="F x T",
    kernel="L(t_q - t_k, f_q) k_exp(f_q, f_k)",
    value="f_k W_v",
    filter="all; causal in the decoder",
)
def shaw2018(
    d_model: int, num_heads: int, *, max_distance: int = 16, **options: Any
) -> KernelAttention:
    """Self-Attention with Relative Position Representations."""
    return _attention(d_model, num_heads, options, position=LookupTable(max_distance))


@system(
    features="F x T",
    kernel="L_h(t_q - t_k, f_q) k_exp(f_q, f_k)",
    value="f_k W_v",
    filter="causal",
)
def huang2018(
    d_model: int,
    num_heads: int,
    *,
    max_distance: int = 512,
    causal: bool | None = None,
    **options: Any,
) -> KernelAttention:
    """Music Transformer."""
    # Its table has no rows for later keys; under another filter they are needed.
    causal = getattr(options.get("filter"), "causal", True) if causal is None else causal
    position = LookupTable(max_distance, per_head=True, causal=causal)
    return _attention(d_model, num_heads, options, position=position, filter=Causal())


@system(
    features="F x T",
    kernel="k_exp(f_q, f_k) k_fq(t_q, t_k)",
    value="f_k W_v",
    filter="causal, with memory",
)
def dai2019(
    d_model: int,
    num_heads: int,
    *,
    memory: int = 150,
    max_distance: int | None = None,
    **options: Any,
) -> KernelAttention:
    """Transformer-XL."""
    position = RelativeSinusoid(max_distance=max_distance)
    return _attention(d_model, num_heads, options, position=position, filter=Memory(memory))


@system(
    features="F x T",
    kernel="k_exp(f_q + t_q, f_k + t_k)",
    value="(f_k + t_k) W_v",
    filter="a sparse causal subset, of each head its own",
)
def child2019(
    d_model: int,
    num_heads: int,
    *,
    pattern: Literal["strided", "fixed"] = "strided",
    stride: int = 32,
    summary: int = 8,
    merged: bool = False,
    max_length: int = 4096,
    **options: Any,
) -> KernelAttention:
    """Sparse Transformer."""
    if pattern not in ("strided", "fixed"):
        raise ValueError(f"pattern must be 'strided' or 'fixed', got {pattern!r}")
    filter = sparse(pattern, 1 if merged else num_heads, stride, summary)
    position = DirectSum(Learned(max_length))
    return _attention(
        d_model, num_heads, options, position=position, value="content+position", filter=filter
    )


@system(
    features="F x H x W",
    kernel="k_exp(f_q + h_q + w_q, f_k + h_k + w_k)",
    value="(f_k + h_k + w_k) W_v",
    filter="causal, the block of the query and some keys before it",
)
def parmar2018(
    d_model: int,
    num_heads: int,
    *,
    height: int = 32,
    width: int = 32,
    block: int = 256,
    memory: int = 256,
    **options: Any,
) -> KernelAttention:
    """Image Transformer, with its one-dimensional blocks."""
    position, filter = Grid2D(height, width, combine="sum"), Blocks(block, memory)
    return _attention(
        d_model, num_heads, options, position=position, value="content+position", filter=filter
    )


@system(
    features="F", kernel="exp(<f_q W_q, f_k W_k> / sqrt(d_model))", value="f_k W_v", filter="all"
)
def lee2018(d_model: int, num_heads: int, **options: Any) -> KernelAttention:
    """Set Transformer."""
    kernel = Exponential(scale=d_model**-0.5)
    return _attention(d_model, num_heads, options, kernel=kernel, position=NoPosition())


@system(features="F", kernel="exp(<f_q W_q, f_k W_k>)", value="f_k W_v", filter="all")
def wang2018(d_model: int, num_heads: int, **options: Any) -> KernelAttention:
    """Non-Local Neural Networks, embedded Gaussian."""
    return _attention(
        d_model, num_heads, options, kernel=Exponential(scale=1.0), position=NoPosition()
    )


@system(
    features="F^l x F^v x F^a x T",
    kernel="k_exp(f_q + t_q, f_k + t_k), q and k of two modalities",
    value="(f_k + t_k) W_v",
    filter="causal, j <= i + |K - Q| across modalities",
)
def tsai2019multimodal(d_model: int, num_heads: int, **options: Any) -> KernelAttention:
    """Multimodal Transformer: queries of one modality, keys and values of another."""
    return _attention(
        d_model, num_heads, options, position=DirectSum(), value="content+position",
        filter=CausalAcross(),
    )  # fmt: skip


@system(
    features="F x T",
    kernel="k_F(f_q, f_k) k_T(t_q, t_k)",
    value="f_k W_v",
    filter="all; causal in the decoder",
)
def tsai2019(d_model: int, num_heads: int, **options: Any) -> KernelAttention:
    """Transformer Dissection, the product of symmetric kernels."""
    return _attention(d_model, num_heads, options, position=ProductKernel(), symmetric=True)


@system(
    features="F", kernel="exp(-|f_q - f_k|^2 / 2 s_h^2)", value="f_k", filter="causal",
    gaussian=True,
)  # fmt: skip
def kundu2026(d_model: int, num_heads: int, **options: Any) -> GaussianAttention:
    """Gaussian Kernel Attention, without projections."""
    return GaussianAttention(d_model, num_heads, **options)


@system(
    features="F x T",
    kernel="that of the base: k_exp(f_q + t_q, f_k + t_k)",
    value="(f_k + t_k) W_v, then a convolution by the kernel of the token",
    filter="that of the base: all; causal in the decoder",
    token_kernels=True,
)
def leng2026(
    d_model: int,
    num_heads: int,
    *,
    base: str = "vaswani2017",
    vocab_size: int = 50257,
    tokens: TokenKernels | None = None,
    **options: Any,
) -> KernelAttention:
    """Token-Wise Kernels, on a base system."""
    builder = find(base).builder
    if is_gaussian(base) or has_token_kernels(base):
        raise ValueError(
            f"the base of leng2026 must be another system with projections, not {base!r}"
        )
    tokens = TokenKernels(vocab_size) if tokens is None else tokens
    if base == "child2019":
        # Token kernels need one filter for all heads.
        options = {"merged": True} | options
    attention = builder(d_model, num_heads, tokens=tokens, **options)
    assert isinstance(attention, KernelAttention)
    return attention


def _attention(
    d_model: int, num_heads: int, options: dict[str, Any], **parts: Any
) -> KernelAttention:
    given = options.get("position", parts["position"])
    # A system adds to its values what it adds to its features: the embedding of its position.
    if not getattr(POSITIONS.get(given, lambda: given)(), "adds", True):
        parts["value"] = "content"
    return KernelAttention(d_model, num_heads, **(parts | options))


def build(name: str, d_model: int, num_heads: int, **options: Any) -> Attention:
    """The attention of a system; options override its parts, as in the layer's own arguments."""
    return find(name).builder(d_model, num_heads, **options)


def find(name: str) -> System:
    if name not in SYSTEMS:
        raise ValueError(f"there is no system {name!r}; {suggest(name, SYSTEMS)}")
    return SYSTEMS[name]


def is_gaussian(name: str | None) -> bool:
    """Whether the layer of this system is a GaussianAttention."""
    return name in SYSTEMS and SYSTEMS[name].gaussian


def has_token_kernels(name: str | None) -> bool:
    """Whether this system has token kernels."""
    return name in SYSTEMS and SYSTEMS[name].token_kernels


def table() -> Table:
    """Every system in its four parts, and what it lowers to with 8 heads of 64 features."""
    rows = []
    for entry in SYSTEMS.values():
        attention = entry.builder(512, 8)
        lowered = example(attention, 1, 16)
        rows.append((
            entry.name, entry.features, entry.kernel, entry.value, entry.filter,
            "yes" if attention.symmetric else "no", "yes" if attention.valid else "no",
            lowers_to(lowered),
        ))  # fmt: skip
    columns = (
        "system", "feature space", "kernel", "value", "filter", "symmetric", "valid", "lowers to",
    )  # fmt: skip
    return Table(columns, tuple(rows))


def example(
    attention: Attention,
    batch: int,
    length: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Explanation:
    """How the attention would run on an input of this shape, without computing it."""
    attention = attention.to(device=device, dtype=dtype)
    with torch.no_grad():
        # One place, expanded without copies: only shapes matter.
        one = torch.zeros(1, 1, attention.d_model, dtype=dtype, device=device)
        q, k, v, filter = attention.parts(one)
        q, k = (
            Features(**{n: x.expand(x.shape[0], -1, length, -1) for n, x in f.items()})
            for f in (q, k)
        )
        v = v.expand(batch, -1, length, -1)
        if isinstance(attention, KernelAttention):
            return attention.explain_parts(q, k, v, filter)
        return explain(attention.joined_kernel, q, k, v, filter=filter, backend=attention.backend)


def lowers_to(explanation: Explanation) -> str:
    """One phrase for the terms."""
    phrases = []
    for term, width in zip(explanation.terms, explanation.widths, strict=True):
        kind = "a dot product" if " of s" not in term else "a dot product with a link"
        phrases.append(f"{kind} of {width}" + (" + a table" if "table" in term else ""))
    return "; ".join(phrases)
