"""Positions on a grid, as of the patches of an image."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from ..kernels import Exponential
from .embeddings import Sinusoid, check_whole, in_heads, last_place
from .positions import Position


class Grid2D(Position):
    """Places on a grid, row by row: k_F times a kernel of the height and one of the width.

    combine="sum" adds the two embeddings to the features instead, half of the width each. The
    first `prefix` places (a class token) are not on the grid; their position is 0.
    """

    def __init__(
        self,
        height: int,
        width: int,
        *,
        prefix: int = 0,
        combine: Literal["product", "sum"] = "product",
    ) -> None:
        super().__init__()
        check_whole(height=height, width=width, prefix=prefix)
        if height < 1 or width < 1 or prefix < 0:
            raise ValueError(
                "height and width must be at least 1 and prefix at least 0, "
                f"got {height}, {width} and {prefix}"
            )
        if combine not in ("product", "sum"):
            raise ValueError(f"combine must be 'product' or 'sum', got {combine!r}")
        self.height, self.width, self.prefix, self.combine = height, width, prefix, combine
        if combine == "product":
            self.kernel = Exponential(on="height") * Exponential(on="width")

    def setup(self, d_model: int, num_heads: int, head_dim: int) -> None:
        if d_model % 4:
            raise ValueError(f"Grid2D needs a d_model divisible by 4, got {d_model}")
        self.axis = Sinusoid()
        self.axis.setup(d_model // 2)
        self.num_heads = num_heads
        if self.combine == "product":
            self.rows = nn.Linear(d_model // 2, num_heads * head_dim, bias=False)
            self.columns = nn.Linear(d_model // 2, num_heads * head_dim, bias=False)

    def axes(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The embeddings of row and column, each [T or B, T, d_model / 2]."""
        cell = places - self.prefix
        size = self.height * self.width
        last = last_place(places)
        if last is not None and last >= self.prefix + size:
            raise ValueError(f"Grid2D has {self.prefix} + {size} places, got place {last}")
        on = (cell >= 0)[..., None]
        cell = cell.clamp(min=0)
        row, column = self.axis(cell // self.width), self.axis(cell % self.width)
        return torch.where(on, row, 0.0), torch.where(on, column, 0.0)

    def embed(self, places: Tensor) -> Tensor:
        return torch.cat(self.axes(places), -1)

    @property
    def adds(self) -> bool:
        return self.combine == "sum"

    def query_parts(self, q: Tensor, places: Tensor) -> dict[str, Tensor]:
        if self.combine == "sum":
            return {"content": q}
        row, column = self.axes(places)
        return {
            "content": q,
            "height": in_heads(row, self.rows, self.num_heads, q.dtype),
            "width": in_heads(column, self.columns, self.num_heads, q.dtype),
        }

    def key_parts(self, k: Tensor, places: Tensor) -> dict[str, Tensor]:
        return self.query_parts(k, places)
