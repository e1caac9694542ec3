"""A workload: shape, dtype, device and filter, and the random inputs of a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters import Filter
from ..kernels import Kernel
from ..term.features import Features
from .catalogue import build_filter, build_kernel

# The backward of softmax attention does five products of the size of the forward's two.
BACKWARD = 2.5


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call of `smooth`."""

    kernel: Kernel
    q: Features
    k: Features
    v: Tensor
    filter: Filter

    def named(self, *, parameters: bool) -> dict[str, Tensor]:
        """Everything that has a gradient."""
        named = {f"q.{n}": x for n, x in self.q.items()}
        named |= {f"k.{n}": x for n, x in self.k.items()}
        named["v"] = self.v
        if parameters:
            named |= {f"kernel.{n}": p for n, p in self.kernel.named_parameters()}
        return named

    @property
    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v without named parts."""
        return self.q.part("content"), self.k.part("content"), self.v


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Attention over B x H x T x D; in a decoding step, one query against T keys.

    `group` query heads share each key head.
    """

    batch: int
    heads: int
    length: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    filter: str = "causal"
    decode: bool = False
    group: int = 1

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}" if self.group > 1 else f"{self.heads}"
        return f"{self.batch}x{heads}x{self.length}x{self.dim}"

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    @property
    def queries(self) -> int:
        return 1 if self.decode else self.length

    def build_filter(self, length: int | None = None) -> Filter:
        """The filter; for a shorter length, one that hides about the same share of pairs."""
        shrink = 1.0 if length is None else max(1.0, self.length / length)
        return build_filter(self.filter, shrink).to(self.device)

    def pairs(self) -> int:
        """Visible pairs of a query and a key, over batch and heads."""
        filter = self.build_filter()
        start = self.length - self.queries
        j = torch.arange(self.length, device=self.device)
        seen = 0
        # By rows, since a mask of all pairs may not fit.
        for i in torch.arange(start, self.length, device=self.device).split(1024):
            visible = torch.as_tensor(filter.sees(0, i[:, None], j, start), device=self.device)
            seen += int(visible.expand(len(i), self.length).sum())
        return self.batch * self.heads * seen

    def flops(self) -> float:
        """Floating-point operations of the forward of softmax attention: 2 (D + V) a pair."""
        return 4.0 * self.dim * self.pairs()

    def inputs(self, kernel_name: str, seed: int = 0) -> Inputs:
        """Normal queries, keys and values, with the parts that the kernel reads."""
        kernel = build_kernel(kernel_name, self.heads, self.dim).to(self.device)
        generator = torch.Generator(self.device).manual_seed(seed)

        def draw(name: str, length: int, heads: int) -> Tensor:
            # Positions are the same for the whole batch.
            batch = 1 if name == "position" else self.batch
            shape = (batch, heads, length, self.dim)
            x = torch.randn(shape, generator=generator, device=self.device, dtype=torch.float32)
            return x.to(self.dtype).requires_grad_()

        queries = sorted(kernel.query_parts | {"content"})
        keys = sorted(kernel.key_parts | {"content"})
        return Inputs(
            kernel=kernel,
            q=Features(**{name: draw(name, self.queries, self.heads) for name in queries}),
            k=Features(**{name: draw(name, self.length, self.kv_heads) for name in keys}),
            v=draw("v", self.length, self.kv_heads),
            filter=self.build_filter(),
        )
