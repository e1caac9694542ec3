"""Gaussian Kernel Attention (Kundu et al. 2026): attention without projections.

What this must meet: d_model^2 + H parameters and nothing else; x [B, T, d_model] is read as query,
key and value through one strided view, without copies; a bandwidth cannot leave its bounds; the
cache holds x once. Value embeddings are the exception that a user asks for: then values differ from
keys, and the cache holds both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..dispatch.problem import check_options
from ..explain import Explanation, explain
from ..filters import Causal, Filter
from ..kernels import Kernel
from ..kernels.distance import Bandwidth, read_bandwidth, squared_distance
from ..smoother import smooth
from ..term.factors import BEND, DistanceFactor, LogScale, QueryBandwidthFactor
from ..term.features import Features, Input
from ..term.layout import accumulator
from ..term.term import Term
from .cache import Cache, SegmentMemory
from .checks import check_ids, check_inputs, check_sizes
from .embeddings import embed_values
from .positions import Rotary, place
from .report import Report, measure

# Bandwidths start from sqrt(D) / SPREAD to sqrt(D) * SPREAD, evenly in the logarithm.
SPREAD = 2.0
# A trained bandwidth stays within a factor of BOUND of where it could start. It is free up to half
# of that, and bends over the last factor of two.
BOUND = 16.0
# How far, in the logarithm, a query may move its own bandwidth from that of its head.
ADAPTIVE_REACH = 2.0


class GaussianAttention(nn.Module):
    """out_i = sum_j w_ij x_j / sum_j w_ij, w_ij = exp(-|x_i - x_j|^2 / 2 s_h^2), then projected.

    The heads are slices of x. x should be normalised, as it is in a pre-norm block. Parameters:
    `log_bandwidth` [H] and `out.weight`.

    Args:
        d_model, num_heads: the width of x and the number of heads, which divides it.
        bandwidth: where s starts, one number or one per head; by default spread over the heads
            around sqrt(D).
        filter: which keys are visible, unless `forward` is given another filter.
        rotary: rotate the features before the distance is taken; True, or a `Rotary(base)`.
        adaptive: every query moves the bandwidth, log s_i = log s_h + 2 tanh(<x_i, w_h> / 2). It
            adds w, the parameter `steering` [H, D], d_model numbers.
        trainable: whether the bandwidths are learned; else they are a buffer.
        normalize: divide x by its root mean square first, without weights.
        value_vocab: the number of value embeddings; a learned vector of the token is added to the
            values, v_j = x_j + e(token j). It adds value_vocab d_model numbers.
        dropout: the share of weights dropped in training.
        backend: as in `smooth`.
    """

    log_bandwidth: Tensor

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        bandwidth: Bandwidth = None,
        filter: Filter = Causal(),
        rotary: bool | Rotary = False,
        adaptive: bool = False,
        trainable: bool = True,
        normalize: bool = False,
        value_vocab: int | None = None,
        dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_heads, num_heads, None, d_model)
        check_options(filter, backend, dropout)
        self.d_model, self.num_heads, self.head_dim = d_model, num_heads, d_model // num_heads
        self.filter, self.dropout, self.backend = filter, dropout, backend
        self.adaptive, self.trainable, self.normalize = adaptive, trainable, normalize

        if bandwidth is None:
            bandwidth = spread(self.head_dim, num_heads)
        start = read_bandwidth(bandwidth, num_heads)
        self._start: tuple[float, ...] = tuple(start.tolist())
        self.bounds = _bounds(self.head_dim, self._start)
        if trainable:
            self.log_bandwidth = nn.Parameter(start)
        else:
            self.register_buffer("log_bandwidth", start)
        self.rotary: Rotary | None = None
        if rotary:
            template = Rotary() if rotary is True else rotary
            if not isinstance(template, Rotary):
                raise ValueError(f"rotary must be True, False or a Rotary, got {rotary!r}")
            position = place(template, d_model, num_heads, self.head_dim)
            assert isinstance(position, Rotary)
            self.rotary = position
        if adaptive:
            self.steering = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.value_embedding = embed_values(value_vocab, d_model)
        # In a tuple, so that nn.Module does not register the kernel: it refers to this layer.
        self._kernel = (_LayerRBF(self),)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("kernel", "position", "joined_kernel"):
            raise ValueError(
                f"{name} cannot be assigned: a GaussianAttention is the Gaussian kernel of its "
                "log_bandwidth; take a KernelAttention for another kernel or position"
            )
        super().__setattr__(name, value)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial values."""
        self.log_bandwidth.copy_(torch.tensor(self._start))
        if self.adaptive:
            self.steering.zero_()
        self.out.reset_parameters()
        if self.value_embedding is not None:
            self.value_embedding.reset_parameters()

    @property
    def bandwidth(self) -> Tensor:
        """s, one per head; with `adaptive`, the base value that queries change."""
        return self._log_bandwidth(self.log_bandwidth.dtype).bent().exp()

    @property
    def joined_kernel(self) -> Kernel:
        """The kernel of all heads."""
        return self._kernel[0]

    @property
    def symmetric(self) -> bool:
        """Whether k(x, y) = k(y, x), projections included."""
        return self.joined_kernel.symmetric

    @property
    def valid(self) -> bool:
        """Whether it is a symmetric positive semi-definite kernel, projections included."""
        return self.joined_kernel.valid

    def forward(
        self,
        x: Tensor,
        *,
        filter: Filter | None = None,
        cache: Cache | SegmentMemory | None = None,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """[B, T, d_model] -> [B, T, d_model].

        With a `Cache`, x continues the cached sequence, and the filter is that of the whole
        sequence. With a `SegmentMemory`, x also sees the states of earlier segments. Value
        embeddings need the ids of the tokens, [B, T].
        """
        if self.value_embedding is not None:
            token_ids = check_ids(token_ids, x, None, self.value_embedding)
            if isinstance(cache, SegmentMemory):
                token_ids = cache.extend_ids(token_ids)
        q, k, v, seen = self.parts(x, filter=filter, cache=cache, token_ids=token_ids)
        out = smooth(
            self.joined_kernel,
            q,
            k,
            v,
            filter=seen,
            backend=self.backend,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.out(out.transpose(1, 2).flatten(2))

    def explain(self, x: Tensor, *, filter: Filter | None = None) -> Explanation:
        """How `forward` would run."""
        q, k, v, seen = self.parts(x, filter=filter)
        dropout_p = self.dropout if self.training else 0.0
        return explain(
            self.joined_kernel, q, k, v, filter=seen, backend=self.backend, dropout_p=dropout_p
        )

    @torch.no_grad()
    def report(self, x: Tensor, *, filter: Filter | None = None) -> Report:
        """For every head on this input: bandwidth, effective neighbourhood, weight on self.

        It takes one pass of `smooth` in float32 or wider, and memory linear in T.
        """
        with torch.autocast(x.device.type, enabled=False):
            q, k, _, seen = self.parts(x.to(accumulator(x.dtype)), filter=filter)
            log_s = self.log_scale(q)
            return measure(self.joined_kernel, q, k, log_s, seen, self._at_bound())

    def parts(
        self,
        x: Tensor,
        *,
        filter: Filter | None = None,
        cache: Cache | SegmentMemory | None = None,
        token_ids: Tensor | None = None,
        places: Tensor | None = None,
    ) -> tuple[Features, Features, Tensor, Filter]:
        """The arguments of `smooth`: queries, keys, values and the filter.

        With a `SegmentMemory`, `token_ids` are those of the memory and of x. Without them, nothing
        is added to the values. `places` [T] are those of x, if x is a part of a sequence.
        """
        check_inputs(x, None, cache, self.d_model, self.d_model)
        filter = self.filter if filter is None else filter
        check_options(filter, self.backend, self.dropout)
        if self.normalize:
            x = F.rms_norm(x, (self.d_model,))
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            # Checked once here, not for each of query, key and value.
            x = x.to(torch.get_autocast_dtype(x.device.type))
        new, first = x.shape[1], 0
        if isinstance(cache, SegmentMemory):
            x = cache.extend(x)
            first = cache.seen - x.shape[1]
            filter = cache.visible(filter, x, new)
        f = v = self._heads(x)
        if self.value_embedding is not None and token_ids is not None:
            v = f + self._heads(self.value_embedding(token_ids).to(x.dtype))
        if isinstance(cache, Cache):
            # A copy, so that later changes of x do not reach the cache.
            kept = f if cache.length else f.clone()
            if self.value_embedding is None:
                cache.append(None, kept)
            else:
                cache.append(Features(content=kept), v)
            f, v = cache.keys.part("content"), cache.values
            filter = filter.until(v.shape[2], cache.start)
        k = f
        if self.rotary is not None:
            # The cache holds x unrotated: to rotate again costs less than to store rotated keys.
            if places is None:
                places = torch.arange(first, first + f.shape[2], device=f.device)
            k = self.rotary.turn(f, places)
        q = Features(content=k[:, :, k.shape[2] - new :])
        if self.rotary is not None and self.adaptive:
            # The bandwidth depends on the token, not on its position: x is taken before rotation.
            q = Features(content=q.part("content"), bare=f[:, :, f.shape[2] - new :])
        return q, Features(content=k), v, filter

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)  # [B, H, T, D]

    def log_scale(self, q: Features) -> Tensor:
        """log s, [H, 1, 1]; with `adaptive` one for each query, [B, H, Q, 1]."""
        factor = self.factor(q, q.part("content"))
        if isinstance(factor, QueryBandwidthFactor):
            return factor.log_scale()
        assert isinstance(factor.given, LogScale)
        return factor.given.bent()[:, None, None]

    def factor(self, q: Features, k: Tensor) -> DistanceFactor:
        """The distance of queries and keys, in bandwidths."""
        x = q.part("content")
        wide = accumulator(x.dtype)
        base = self._log_bandwidth(wide)
        if not self.adaptive:
            return DistanceFactor(q=x, k=k, scale=base)
        by, w = q.part("bare") if "bare" in q else x, self.steering.to(wide)
        return QueryBandwidthFactor(q=x, k=k, x=by, w=w, base=base, reach=ADAPTIVE_REACH)

    def _log_bandwidth(self, dtype: torch.dtype) -> LogScale:
        """log s, [H]: the parameter itself up to half of the bounds, then bent towards them."""
        bounds = self.bounds if self.trainable else None
        return LogScale(log=self.log_bandwidth.to(dtype), bounds=bounds)

    def _at_bound(self) -> list[bool]:
        low, high = self.bounds[0] + BEND, self.bounds[1] - BEND
        return [self.trainable and not low <= log <= high for log in self.log_bandwidth.tolist()]

    def extra_repr(self) -> str:
        return (
            f"{self.d_model}, {self.num_heads}, filter={self.filter}, adaptive={self.adaptive}, "
            f"trainable={self.trainable}, normalize={self.normalize}"
        )


class _LayerRBF(Kernel):
    """exp(-|q - k|^2 / 2 s^2), with the bandwidths of a layer."""

    def __init__(self, layer: GaussianAttention) -> None:
        super().__init__()
        self._layer = (layer,)

    @property
    def symmetric(self) -> bool:  # type: ignore[override]
        return not self._layer[0].adaptive

    @property
    def valid(self) -> bool:  # type: ignore[override]
        return self.symmetric

    @property
    def query_parts(self) -> frozenset[str]:
        layer = self._layer[0]
        steered = layer.adaptive and layer.rotary is not None
        return frozenset({"content", "bare"} if steered else {"content"})

    @property
    def key_parts(self) -> frozenset[str]:
        return frozenset({"content"})

    def log_weight(self, q: Input, k: Input) -> Tensor:
        scale = self._layer[0].factor(Features.of(q), Features.of(k).part("content")).scale
        return -0.5 * scale * squared_distance(*self.select(q, k))

    def terms(self, q: Input, k: Input) -> tuple[Term, ...]:
        _, y = self.select(q, k)
        return (Term(factors=(self._layer[0].factor(Features.of(q), y),)),)

    @property
    def formula(self) -> str:
        return "exp(-|q - k|^2 / 2 s_h^2)" if self.symmetric else "exp(-|q - k|^2 / 2 s_h(q)^2)"


def spread(head_dim: int, num_heads: int) -> list[float]:
    """Where bandwidths start: sqrt(D) / 2 to 2 sqrt(D), evenly in the logarithm."""
    centre = math.sqrt(head_dim)
    if num_heads == 1:
        return [centre]
    return [centre * SPREAD ** (2 * h / (num_heads - 1) - 1) for h in range(num_heads)]


def _bounds(head_dim: int, start: tuple[float, ...]) -> tuple[float, float]:
    """The logarithms between which bandwidths stay."""
    centre, reach = 0.5 * math.log(head_dim), math.log(BOUND)
    return min(centre, *start) - reach, max(centre, *start) + reach
