"""Which taps of a key a query sees, and which keys a tap reads.

Tap d of key j reads key j + d, for d from -p to p. An invisible tap is removed before the softmax;
it is not multiplied by zero after it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ...term.layout import accumulator

Boundary = Literal["none", "left", "truncate", "shrink"]
BOUNDARIES: tuple[Boundary, ...] = get_args(Boundary)


class Convolution(NamedTuple):
    """How keys and values are convolved: the arguments of `vicinity`."""

    key_taps: Tensor | None  # [B or 1, K, H or 1, S]
    value_taps: Tensor | None
    normalize: float | None
    boundary: Boundary

    @property
    def size(self) -> int:
        """How many taps the widest kernel has."""
        return max([1, *(x.shape[-1] for x in self[:2] if x is not None)])


def visible(boundary: Boundary, reach: int, away: int | None) -> tuple[int, int]:
    """The first and last visible tap of a key that lies `away` places before the query.

    Without `away` all taps are visible: the filter is not causal, or the key is far enough.
    """
    near = reach if away is None else min(reach, away)
    match boundary:
        case "none":
            return -reach, reach
        case "left":
            return -reach, 0
        case "truncate":
            return -reach, near
        case "shrink":
            return -near, near


def num_cut(boundary: Boundary, causal: bool, size: int) -> int:
    """The number P of nearest keys of which a query sees only some taps."""
    reach = size // 2
    return reach if causal and visible(boundary, reach, None)[1] > 0 else 0


def places(d: int, length: int) -> tuple[slice, slice]:
    """The keys that have a neighbour at offset d, and these neighbours."""
    low, high = min(max(-d, 0), length), max(length - max(d, 0), 0)
    high = max(low, high)
    return slice(low, high), slice(low + d, high + d) if high > low else slice(0, 0)


def sum_by_id(rows: Tensor, ids: Tensor, count: int) -> Tensor:
    """out[n] = the sum of the rows whose id is n. The order is fixed: no atomics."""
    ordered, order = ids.sort(stable=True)
    edges = torch.searchsorted(ordered, torch.arange(count + 1, device=ids.device))
    flat = rows.flatten(1)[order].to(accumulator(rows.dtype))
    sums = torch.segment_reduce(flat, "sum", lengths=edges.diff(), axis=0, unsafe=True, initial=0)
    return sums.to(rows.dtype).unflatten(1, rows.shape[1:])
