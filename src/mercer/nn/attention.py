"""Attention from four parts: feature space, kernel, value function, set filter."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch.problem import check_options
from ..explain import Explanation, explain
from ..filters import Filter, Full
from ..kernels import Exponential, Kernel
from ..kernels.base import members
from ..smoother import smooth
from ..term.features import Features
from ..tokenwise.decoding import continue_vicinity
from ..tokenwise.taps import num_cut
from ..tokenwise.vicinity import refusal, vicinity
from .cache import Cache, SegmentMemory
from .checks import (
    check_assigned,
    check_ids,
    check_inputs,
    check_parts,
    check_sizes,
    check_steps,
    check_symmetric,
    check_tokens,
)
from .embeddings import embed_values
from .positions import Position, place
from .tokens import TokenKernels

ValueFunction = Literal["content", "content+position"]


class KernelAttention(nn.Module):
    """out_i = sum_j k(x_i, x_j) v(x_j) / sum_j k(x_i, x_j), in heads, then projected.

    Args:
        d_model, num_heads: the width of x and the number of heads; head_dim is their quotient
            unless given.
        kernel: the kernel of the content features f W_q and f W_k; it is copied.
        position: how positions enter: a template that is copied, or its name.
        value: "content" for v = f W_v (Eq. 8), "content+position" for v = (f + t) W_v (Eq. 7).
        num_kv_heads: fewer heads for keys and values (grouped queries); divides num_heads.
        symmetric: W_q = W_k, so that a valid kernel gives a valid kernel of the inputs.
        context_dim: the width of the context in cross-attention, d_model unless given.
        filter: which keys are visible, unless `forward` is given another filter.
        tokens: token kernels on keys or values. Not copied, so layers can share them.
        layer: the number of this layer, for token kernels that differ between layers.
        normalize: divide q and k by their root mean square per head, after a rotation.
        value_vocab: the number of value embeddings; a learned vector of the token is added to v.
        dropout: the share of weights dropped in training.
        backend: as in `smooth`.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        kernel: Kernel | None = None,
        position: Position | str | None = None,
        value: ValueFunction = "content",
        num_kv_heads: int | None = None,
        symmetric: bool = False,
        head_dim: int | None = None,
        context_dim: int | None = None,
        filter: Filter = Full(),
        tokens: TokenKernels | None = None,
        layer: int = 0,
        normalize: bool = False,
        value_vocab: int | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        context_dim = d_model if context_dim is None else context_dim
        check_sizes(d_model, num_heads, num_kv_heads, head_dim, context_dim)
        check_parts(value, kernel)
        if symmetric:
            check_symmetric(num_heads, num_kv_heads, d_model, context_dim)
        check_options(filter, backend, dropout)
        head_dim = d_model // num_heads if head_dim is None else head_dim
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, head_dim
        self.num_kv_heads, self.context_dim = num_kv_heads, context_dim
        self.tied, self.value_function = symmetric, value
        self.filter, self.dropout, self.backend = filter, dropout, backend
        check_tokens(tokens, num_heads, num_kv_heads)
        self.tokens, self.layer, self.normalize = tokens, layer, normalize

        self.position = place(position, d_model, num_heads, head_dim)
        self.kernel = Exponential() if kernel is None else copy.deepcopy(kernel)
        self._joined = self._join()
        self.query = nn.Linear(d_model, num_heads * head_dim, bias=bias)
        self.key: nn.Linear | None = None
        if not symmetric:
            self.key = nn.Linear(context_dim, num_kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(context_dim, num_kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(num_heads * head_dim, d_model, bias=bias)
        self.value_embedding = embed_values(value_vocab, num_kv_heads * head_dim)
        if value == "content+position":
            self.position.embed(torch.zeros(1, dtype=torch.long))
        added = self.position.adds or value == "content+position"
        if added and context_dim != d_model:
            raise ValueError(
                f"positions are added to the context, so context_dim must be d_model {d_model}, "
                f"got {context_dim}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        check_assigned(self, name, value)
        super().__setattr__(name, value)
        if name == "kernel" and "_joined" in self.__dict__:
            # Here and not in `forward`: a compiled graph cannot make a module.
            self._joined = self._join()

    @property
    def joined_kernel(self) -> Kernel:
        """The kernel of content and positions together."""
        if self._joined[1:] != (*members(self.kernel), *members(self.position.kernel)):
            self._joined = self._join()
        return self._joined[0]

    def _join(self) -> tuple[Kernel, ...]:
        """The kernel of content and positions, and the factors that it was made of."""
        content, factor = self.kernel, self.position.kernel
        joined = content if factor is None else content * factor
        # In a tuple, so that nn.Module does not register the parameters a second time.
        return joined, *members(content), *members(factor)

    @property
    def symmetric(self) -> bool:
        """Whether k(x, y) = k(y, x), projections included."""
        if self.tokens is not None and self.has_token_kernels and "k" in self.tokens.on:
            return False
        return self.tied and self.position.symmetric and self.joined_kernel.symmetric

    @property
    def valid(self) -> bool:
        """Whether it is a symmetric positive semi-definite kernel, projections included."""
        return self.symmetric and self.joined_kernel.valid

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        filter: Filter | None = None,
        cache: Cache | SegmentMemory | None = None,
        token_ids: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model]; with a context, cross-attention to it.

        With a `Cache`, x continues the cached sequence, and the filter is that of the whole
        sequence. With a `SegmentMemory`, x also sees the states of earlier segments. Token kernels
        and value embeddings need the ids of the tokens, [B, T]: the context's where there is one,
        else those of x. `offset` [B] is the number of padding places on the left of each sequence.
        Positions count from there. The filter must hide the padding.
        """
        tokens = self.tokens if self.has_token_kernels else None
        if tokens is not None or self.value_embedding is not None:
            keys = x if context is None else context
            token_ids = check_ids(token_ids, keys, tokens, self.value_embedding)
            if isinstance(cache, SegmentMemory) and context is None:
                token_ids = cache.extend_ids(token_ids, self.reach)
        q, k, v, seen = self.parts(
            x, context, filter=filter, cache=cache, token_ids=token_ids, offset=offset
        )
        dropout_p = self.dropout if self.training else 0.0
        if tokens is None or token_ids is None:
            out = smooth(
                self.joined_kernel, q, k, v, filter=seen, backend=self.backend, dropout_p=dropout_p
            )
        else:
            held = cache if isinstance(cache, Cache) and context is None else None
            if held is not None:
                token_ids = held.extend_ids(token_ids)
            out = self._vicinity(tokens, token_ids, q, k, v, seen, held)
        return self.out(out.transpose(1, 2).flatten(2))

    def _vicinity(
        self,
        tokens: TokenKernels,
        token_ids: Tensor,
        q: Features,
        k: Features,
        v: Tensor,
        filter: Filter,
        cache: Cache | None,
    ) -> Tensor:
        """Attention to keys and values after their convolution with the token kernels."""
        dropout_p = self.dropout if self.training else 0.0
        if cache is not None and q.length < k.length and not dropout_p:
            out = continue_vicinity(
                q, k, v, ready=cache.convolved,
                taps=lambda start: tokens.taps(token_ids[:, start:], self.layer),
                size=tokens.size, normalize=tokens.temperature, boundary=tokens.boundary,
                kernel=self.joined_kernel, filter=filter, backend=self.backend,
            )  # fmt: skip
            if out is not None:
                return out
        taps = tokens.taps(token_ids, self.layer)
        return vicinity(
            q, k, v, key_taps=taps.keys, value_taps=taps.values, normalize=tokens.temperature,
            boundary=tokens.boundary, kernel=self.joined_kernel, filter=filter,
            backend=self.backend, dropout_p=dropout_p,
        )  # fmt: skip

    @property
    def has_token_kernels(self) -> bool:
        """Whether keys or values of this layer are convolved, so that it needs token ids."""
        return self.tokens is not None and self.tokens.acts_on(self.layer)

    @property
    def reach(self) -> int:
        """How many neighbours on each side of a key its token kernel reads."""
        return self.tokens.size // 2 if self.tokens is not None and self.has_token_kernels else 0

    def explain(
        self, x: Tensor, context: Tensor | None = None, *, filter: Filter | None = None
    ) -> Explanation:
        """How `forward` would run, without computing anything."""
        return self.explain_parts(*self.parts(x, context, filter=filter))

    def explain_parts(self, q: Features, k: Features, v: Tensor, filter: Filter) -> Explanation:
        """How `smooth` would run with these arguments."""
        dropout_p = self.dropout if self.training else 0.0
        cut, fused = 0, False
        if self.tokens is not None and self.has_token_kernels:
            cut = num_cut(self.tokens.boundary, filter.causal, self.tokens.size)
            refused = refusal(self.joined_kernel, q, k, v, filter, dropout_p)
            fused = self.backend == "auto" and refused is None
        said = explain(
            self.joined_kernel, q, k, v, filter=filter, backend=self.backend, dropout_p=dropout_p,
            return_log_mass=cut > 0,
        )  # fmt: skip
        if self.tokens is None or not self.has_token_kernels:
            return said
        return replace(said, vicinity=self.tokens.describe(cut, fused))

    def parts(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        filter: Filter | None = None,
        cache: Cache | SegmentMemory | None = None,
        token_ids: Tensor | None = None,
        offset: Tensor | None = None,
        places: Tensor | None = None,
    ) -> tuple[Features, Features, Tensor, Filter]:
        """The arguments of `smooth`: queries, keys, values and the filter.

        With a `SegmentMemory`, `token_ids` are those of the memory and of x. `places` [T] are those
        of x, if x is a part of a sequence.
        """
        check_inputs(x, context, cache, self.d_model, self.context_dim)
        filter = self.filter if filter is None else filter
        check_options(filter, self.backend, self.dropout)
        if context is not None:
            if offset is not None:
                raise ValueError("offset is for self-attention, but a context was given")
            return (*self._cross(x, context, filter, cache, token_ids), filter)
        if isinstance(cache, SegmentMemory):
            if offset is not None:
                raise ValueError("a SegmentMemory takes no offset: segments must have no padding")
            whole = cache.extend(x, self.reach)
            filter = cache.visible(filter, whole, x.shape[1])
            places = torch.arange(cache.seen - whole.shape[1], cache.seen, device=x.device)
            q = self._queries(x, places[whole.shape[1] - x.shape[1] :])
            return q, *self._keys_and_values(whole, places, token_ids), filter
        if places is None:
            before = 0 if cache is None else cache.length
            places = torch.arange(before, before + x.shape[1], device=x.device)
        if offset is not None:
            places = (places - offset[:, None]).clamp(min=0)  # [B, T]
        q = self._queries(x, places)
        k, v = self._keys_and_values(x, places, token_ids)
        if cache is not None:
            cache.append(k, v)
            k, v = cache.keys, cache.values
            filter = filter.until(k.length, cache.start)
        return q, k, v, filter

    def _cross(
        self,
        x: Tensor,
        context: Tensor,
        filter: Filter,
        cache: Cache | SegmentMemory | None,
        token_ids: Tensor | None,
    ) -> tuple[Features, Features, Tensor]:
        if isinstance(cache, SegmentMemory):
            raise ValueError("a SegmentMemory is for self-attention, but a context was given")
        if cache is not None:
            check_steps(self.joined_kernel, filter)
        before = 0 if cache is None else cache.places
        q = self._queries(x, torch.arange(before, before + x.shape[1], device=x.device))
        if cache is None or cache.length == 0:
            places = torch.arange(context.shape[1], device=x.device)
            k, v = self._keys_and_values(context, places, token_ids)
            if cache is not None:
                cache.hold(k, v)
        else:
            k, v = cache.keys, cache.values
        if cache is not None:
            cache.asked = before + x.shape[1]
        return q, k, v

    def _queries(self, x: Tensor, places: Tensor) -> Features:
        q = self._heads(self.query(self.position.add(x, places)), self.num_heads)
        return self._features(self.position.query_parts(q, places))

    def _keys_and_values(
        self, x: Tensor, places: Tensor, token_ids: Tensor | None
    ) -> tuple[Features, Tensor]:
        summed = self.position.add(x, places)
        k = self._heads((self.key or self.query)(summed), self.num_kv_heads)
        if self.value_function == "content+position":
            x = x + self.position.embed(places).to(x.dtype)
        v = self.value(x)
        if self.value_embedding is not None and token_ids is not None:
            v = v + self.value_embedding(token_ids).to(v.dtype)
        v = self._heads(v, self.num_kv_heads)
        return self._features(self.position.key_parts(k, places)), v

    def _features(self, parts: dict[str, Tensor]) -> Features:
        if self.normalize:
            content = parts["content"]
            parts = parts | {"content": F.rms_norm(content, content.shape[-1:])}
        return Features(**parts)

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.head_dim)).transpose(1, 2)  # [B, H, T, D]

    def extra_repr(self) -> str:
        return f"value={self.value_function!r}, filter={self.filter}, symmetric={self.tied}"
