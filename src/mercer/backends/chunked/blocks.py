"""The visible blocks of a call, and their scores, weights, biases and dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...filters import Filter, Span
from ...opaque.spec import decode
from ...term.layout import accumulator
from ...term.links import Link

# Elements of a block of all heads: what a CPU's cache holds, and few launches on a GPU.
BLOCK_ELEMENTS = 2**21
LARGE_ELEMENTS = 2**25
MOST_KEYS = 4096


def block_side(batch_heads: int, device: torch.device) -> int:
    """A block's side: a power of two from 64 to 1024, for so many elements in all heads."""
    elements = BLOCK_ELEMENTS if device.type == "cpu" else LARGE_ELEMENTS
    side = math.sqrt(elements / max(batch_heads, 1))
    return max(64, min(1024, 2 ** int(math.log2(max(side, 64)))))


def keys_of_block(side: int, num_queries: int) -> int:
    """The keys of a block: more for few queries, up to a limit, so that blocks can be skipped."""
    few = 2 ** max(num_queries - 1, 0).bit_length()
    return max(side, min(MOST_KEYS, side * side // few))


def by_distance(table: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A table of distances, [B, H, queries or 1, 2c + 1], for queries at i and keys at j."""
    index = rows_of_table(table, i, j)
    if index.dim() == 2 and table.shape[2] == 1:
        return table[:, :, 0][:, :, index]
    table = table.expand(-1, -1, index.shape[-2], -1)
    if index.dim() == 4:
        table = table.expand(max(len(table), len(index)), -1, -1, -1)
    return table.gather(-1, index.expand(*table.shape[:2], *index.shape[-2:]))


def rows_of_table(table: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """clip(i - j) as an index, [q, k], or [B or 1, 1, q, k] for places [B or 1, 1, T]."""
    clip = (table.shape[-1] - 1) // 2
    return (i[..., :, None] - j[..., None, :]).clamp(-clip, clip) + clip


class Blocks:
    """The visible blocks of one call, and their computations."""

    def __init__(
        self, q: Sequence[Tensor], k: Sequence[Tensor], row: Sequence[Tensor], v: Tensor,
        table: Tensor | None, seed: Tensor | None, tensors: Sequence[Tensor], links: str, rule: str,
        dropout_p: float, num_queries: int, bad_queries: Tensor | None, bad_keys: Tensor | None,
        shift: int, places: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.table = q, k, v, table
        self.row = [None if r.numel() == 0 else r for r in row]
        self.links: tuple[Link | None, ...] = decode(links)
        self.filter: Filter = decode(rule, tensors)
        self.signed = any(link is not None and link.signed for link in self.links)
        self.dropout_p = dropout_p
        self.seed = 0 if seed is None else int(seed)
        self.wide = accumulator(v.dtype)
        self.num_queries, self.num_keys = num_queries, v.shape[2]
        self.start = self.num_keys - num_queries
        # Where queries and keys stand, for the table: later than `start`, or at these places.
        self.shift, self.places = shift, places
        self.side = block_side(v.shape[0] * v.shape[1], v.device)
        self.wide_side = keys_of_block(self.side, num_queries)
        self.spoiled = self._spoiled(bad_queries, bad_keys)  # [B, H, Q]

    def _spoiled(self, bad_queries: Tensor | None, bad_keys: Tensor | None) -> Tensor | None:
        """The queries that are not finite or see a key that is not."""
        if bad_queries is None or bad_keys is None:
            return None
        spoiled = bad_queries.expand(*self.v.shape[:2], -1).clone()
        bad_keys = bad_keys.expand(*self.v.shape[:2], -1)
        for rows in self.queries():
            for cols, visible in self.keys(rows):
                seen = bad_keys[:, :, None, cols]
                spoiled[:, :, rows] |= (seen if visible is None else seen & visible).any(-1)
        return spoiled

    def queries(self) -> Iterator[slice]:
        for first in range(0, self.num_queries, self.side):
            yield slice(first, min(first + self.side, self.num_queries))

    def keys(self, rows: slice) -> Iterator[tuple[slice, Tensor | None]]:
        """The key blocks that these queries see, each with its mask if it needs one."""
        i = Span(rows.start + self.start, rows.stop - 1 + self.start)
        for first in range(0, self.num_keys, self.wide_side):
            cols = slice(first, min(first + self.wide_side, self.num_keys))
            covered = self.filter.covers(i, Span(cols.start, cols.stop - 1), self.start)
            if covered is not False:
                yield cols, None if covered else self.visible(rows, cols)

    def visible(self, rows: slice, cols: slice) -> Tensor:
        device = self.v.device
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.start
        j = torch.arange(cols.start, cols.stop, device=device)
        b = torch.arange(self.v.shape[0], device=device)[:, None, None, None]
        h = torch.arange(self.v.shape[1], device=device)[:, None, None]
        return torch.as_tensor(self.filter.shows(b, h, i, j, self.start), device=device)

    def scores(self, rows: slice, cols: slice) -> list[Tensor]:
        """s of every factor, [B, H, q, k]."""
        scores = []
        for q, k, row, link in zip(self.q, self.k, self.row, self.links, strict=True):
            s = q[:, :, rows] @ k[:, :, cols].mT
            if row is not None:
                s += row[:, :, rows, None]
            if link is not None and link.cusp and row is not None:
                # An infinite slope at 0 magnifies rounding: equal features must give exactly 0.
                noise = 32 * torch.finfo(s.dtype).eps * row[:, :, rows, None].abs()
                s = torch.where(s > -noise, 0.0, s)
            scores.append(s)
        return scores

    def logs(self, scores: list[Tensor]) -> list[Tensor]:
        pairs = zip(self.links, scores, strict=True)
        return [s if link is None else link.log(s) for link, s in pairs]

    def total(self, logs: list[Tensor], rows: slice, cols: slice, hidden: Tensor | None) -> Tensor:
        """log |w|, -inf where hidden."""
        if logs:
            log = sum(logs[1:], logs[0])
        else:
            batch, heads = self.v.shape[:2]
            shape = (batch, heads, rows.stop - rows.start, cols.stop - cols.start)
            log = self.v.new_zeros(shape, dtype=self.wide)
        if self.table is not None:
            log = log + self.bias(rows, cols)
        return log if hidden is None else log.masked_fill(hidden, -math.inf)

    def signs(self, scores: list[Tensor]) -> list[Tensor | None]:
        pairs = zip(self.links, scores, strict=True)
        return [link.sign(s) if link is not None and link.signed else None for link, s in pairs]

    def away(self, rows: slice, cols: slice) -> tuple[int, int]:
        """The smallest and largest i - j of a block."""
        first = self.start + self.shift
        return rows.start + first - (cols.stop - 1), rows.stop - 1 + first - cols.start

    def bias(self, rows: slice, cols: slice) -> Tensor:
        assert self.table is not None
        table = self.table if self.table.shape[2] == 1 else self.table[:, :, rows]
        return by_distance(table, *self.where(rows, cols))

    def where(self, rows: slice, cols: slice) -> tuple[Tensor, Tensor]:
        """The places of the queries and keys of a block, [T]; [B or 1, 1, T] if they are said."""
        if self.places:
            q, k = self.places
            return q[:, None, rows], k[:, None, cols]
        i = torch.arange(rows.start, rows.stop, device=self.v.device) + self.start + self.shift
        return i, torch.arange(cols.start, cols.stop, device=self.v.device)

    def scatter_to_table(self, grad: Tensor, ds: Tensor, rows: slice, cols: slice) -> None:
        """Sums by distance for places in any order; each row on its own, in a fixed order."""
        index = rows_of_table(grad, *self.where(rows, cols)).expand(ds.shape)
        count = grad.shape[-1]
        if ds.is_cuda:
            # Sorted by index, without atomics.
            sums = ds.new_zeros(*ds.shape[:-1], count)
            each = torch.arange(0, sums.numel(), count, device=ds.device).view(*ds.shape[:-1], 1)
            flat = (index + each).flatten()
            sums.view(-1).index_put_((flat,), ds.flatten(), accumulate=True)
        else:
            low, high = int(index.min()), int(index.max())
            sums = ds.new_zeros(*ds.shape[:-1], high - low + 1).scatter_add_(-1, index - low, ds)
            grad = grad[..., low : high + 1]
        if grad.shape[0] == 1:
            sums = sums.sum(0, keepdim=True)
        if grad.shape[2] == 1:
            grad += sums.sum(-2, keepdim=True)
        else:
            grad[:, :, rows] += sums

    def add_to_table(self, grad: Tensor, ds: Tensor, rows: slice, cols: slice) -> None:
        """Sums along the diagonals of a block: a shear, then slices; no scatter."""
        if self.places:
            self.scatter_to_table(grad, ds, rows, cols)
            return
        height, width = ds.shape[-2:]
        # Row r of the mirrored block, moved right by r, has distance (i - j) - low in its columns.
        sheared = F.pad(ds.flip(-1), (0, height)).flatten(-2)
        sheared = sheared[..., : height * (width + height - 1)]
        sheared = sheared.unflatten(-1, (height, width + height - 1))
        if grad.shape[0] == 1 and sheared.shape[0] > 1:
            sheared = sheared.sum(0, keepdim=True)
        if grad.shape[2] == 1:
            target, sheared = grad, sheared.sum(-2, keepdim=True)
        else:
            target = grad[:, :, rows]
        clip = (grad.shape[-1] - 1) // 2
        low, high = self.away(rows, cols)
        inner_low, inner_high = max(low, -clip), min(high, clip)
        if inner_low <= inner_high:
            inner = sheared[..., inner_low - low : inner_high - low + 1]
            target[..., inner_low + clip : inner_high + clip + 1] += inner
        if low < -clip:
            target[..., 0] += sheared[..., : min(-clip, high + 1) - low].sum(-1)
        if high > clip:
            target[..., -1] += sheared[..., max(clip + 1, low) - low :].sum(-1)

    def kept(self, rows: slice, cols: slice, shape: torch.Size) -> Tensor | None:
        """The dropout mask divided by 1 - p; the same in forward and backward."""
        if self.dropout_p == 0.0:
            return None
        generator = torch.Generator(self.v.device)
        generator.manual_seed(self.seed + rows.start * self.num_keys + cols.start)
        draw = torch.rand(shape, generator=generator, device=self.v.device, dtype=self.wide)
        return (draw >= self.dropout_p).to(self.wide) / (1 - self.dropout_p)
