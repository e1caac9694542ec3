"""The Multimodal Transformer (Tsai et al. 2019): each modality reads the others, then itself.

With three modalities there are six streams: in each, the queries are of one modality, the keys and
values of another. The two streams of a modality are joined and attend to themselves, and the last
places of all modalities give the outputs. The future is hidden throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import parse, systems
from ..kernels import Kernel
from ..nn import NoPosition
from ..nn.embeddings import Sinusoid
from .block import FeedForward

# A modality attends to itself in this many layers at least.
LEAST = 3


class MultimodalTransformer(nn.Module):
    """[B, T_m, width_m] for each modality m -> [B, num_outputs].

    Args:
        widths: how many features each modality has: language, audio and vision, or any other two
            or more.
        num_outputs: how many numbers are predicted.
        d_model, num_heads, num_layers: the sizes of a stream.
        kernel: of all attention, as an object or as text; by default softmax attention.
        dropout, attention_dropout, activation_dropout: after each sub-layer, of attention weights,
            inside the feed-forward nets.
        input_dropout, output_dropout: of what each modality gives, and before the outputs.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_outputs: int,
        *,
        d_model: int = 30,
        num_heads: int = 5,
        num_layers: int = 5,
        kernel: Kernel | str | None = None,
        dropout: float = 0.1,
        attention_dropout: float = 0.1,
        activation_dropout: float = 0.1,
        input_dropout: float = 0.25,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        count = len(widths)
        if count < 2:
            raise ValueError(f"widths must have two modalities or more, got {list(widths)}")
        kernel = parse.kernel(kernel) if isinstance(kernel, str) else kernel
        drops = (dropout, attention_dropout, activation_dropout)
        self.widths = tuple(widths)
        self.input_dropout, self.output_dropout = input_dropout, output_dropout
        self.project = nn.ModuleList(
            nn.Identity() if width == d_model else nn.Linear(width, d_model, bias=False)
            for width in widths
        )
        self.across = nn.ModuleList(
            nn.ModuleList(Stream(d_model, num_heads, num_layers, kernel, drops) for _ in widths[1:])
            for _ in widths
        )
        joined, layers = (count - 1) * d_model, max(num_layers, LEAST)
        self.within = nn.ModuleList(
            Stream(joined, num_heads, layers, kernel, drops) for _ in widths
        )
        self.up = nn.Linear(count * joined, count * joined)
        self.down = nn.Linear(count * joined, count * joined)
        self.head = nn.Linear(count * joined, num_outputs)

    def forward(self, *inputs: Tensor) -> Tensor:
        found = tuple(x.shape[-1] for x in inputs)
        if found != self.widths:
            raise ValueError(
                f"the model is for modalities of {list(self.widths)} features, got {list(found)}"
            )
        x = [
            project(F.dropout(each, self.input_dropout, self.training))
            for project, each in zip(self.project, inputs, strict=True)
        ]
        last = []
        for m, (streams, within) in enumerate(zip(self.across, self.within, strict=True)):
            assert isinstance(streams, nn.ModuleList)
            others = [each for n, each in enumerate(x) if n != m]
            read = [stream(x[m], other) for stream, other in zip(streams, others, strict=True)]
            last.append(within(torch.cat(read, -1))[:, -1])
        y = torch.cat(last, -1)
        hidden = F.dropout(F.relu(self.up(y)), self.output_dropout, self.training)
        return self.head(y + self.down(hidden))


class Stream(nn.Module):
    """Layers of attention to another modality, or of a modality to itself."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_layers: int,
        kernel: Kernel | None,
        drops: tuple[float, float, float],
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Layer(d_model, num_heads, kernel, drops) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.places = Sinusoid()
        self.places.setup(d_model)
        self.dropout = nn.Dropout(drops[0])

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """[B, Q, d_model], and [B, K, d_model] of the other modality -> [B, Q, d_model]."""
        x = self._enter(x)
        context = None if context is None else self._enter(context)
        for layer in self.layers:
            x = layer(x, context)
        return self.norm(x)

    def _enter(self, x: Tensor) -> Tensor:
        t = self.places(torch.arange(x.shape[1], device=x.device)).to(x.dtype)
        return self.dropout(x * math.sqrt(x.shape[-1]) + t)


class Layer(nn.Module):
    """x + attention(norm x, norm context), then x + net(norm x)."""

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        kernel: Kernel | None,
        drops: tuple[float, float, float],
    ) -> None:
        super().__init__()
        dropout, attention_dropout, activation_dropout = drops
        self.attention = systems.build(
            "tsai2019multimodal", d_model, num_heads, kernel=kernel, position=NoPosition(),
            value="content", bias=True, dropout=attention_dropout,
        )  # fmt: skip
        self.attention_norm = nn.LayerNorm(d_model)
        self.feed_forward = FeedForward(d_model, 4 * d_model, "relu", True, activation_dropout)
        self.feed_forward_norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        seen = None if context is None else self.attention_norm(context)
        x = x + self.dropout(self.attention(self.attention_norm(x), seen))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
