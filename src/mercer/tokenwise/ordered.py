"""Keys whose places are said: the neighbours of a key are those at the next places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..filters import Filter
from ..filters.base import can_read
from ..term.layout import accumulator


@dataclass(frozen=True)
class Ordered:
    """The places of the queries and keys of a call; those of the keys differ."""

    queries: Tensor  # [B or 1, Q]
    keys: Tensor  # [B or 1, K]
    rising: Tensor  # the places of the keys in their order
    order: Tensor  # the numbers that these keys have in the call

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor) -> Ordered:
        rising, order = keys.sort(dim=-1)
        # Reading the data would synchronise with the GPU.
        if keys.is_cpu and can_read(keys) and bool((rising.diff(dim=-1) == 0).any()):
            raise ValueError(
                "two keys of a sequence stand at one place, so it is not known which of them is a "
                "neighbour: give each key a place of its own, and say with Documents(ids) which "
                "keys belong together"
            )
        return cls(queries, keys, rising, order)

    def find(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the key at each of these places, and whether there is one, [B or 1, n]."""
        batch = max(places.shape[0], self.keys.shape[0])
        rising, order = (x.expand(batch, -1).contiguous() for x in (self.rising, self.order))
        places = places.expand(batch, -1).contiguous()
        n = torch.searchsorted(rising, places).clamp(max=rising.shape[1] - 1)
        return order.gather(1, n), rising.gather(1, n) == places

    def convolve(self, x: Tensor, first: int, kernel: Tensor, filter: Filter) -> Tensor:
        """sum_d kernel[j, d] x[the key at the place of j + d], as `taps.convolve`."""
        if not x.shape[2]:
            return x
        wide, device = accumulator(x.dtype), x.device
        b = torch.arange(filter.batch or 1, device=device)[:, None]
        j = torch.arange(x.shape[2], device=device)
        out = torch.zeros_like(x, dtype=wide)
        for n in range(kernel.shape[-1]):
            numbers, found = self.find(self.keys + first + n)
            found = found & torch.as_tensor(filter.joins(b, j, numbers), device=device)
            y = torch.where(found[:, None, :, None], take(x, numbers), 0.0)
            out = out + kernel[..., n].transpose(1, 2)[..., None].to(wide) * y
        return out.to(x.dtype)

    def before(self, away: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
        """Takes the key `away` places before each query; its number, and whether there is one."""
        numbers, found = self.find(self.queries - away)
        return (lambda x: take(x, numbers)), numbers, found


def take(x: Tensor, numbers: Tensor) -> Tensor:
    """The keys with these numbers, [B or 1, n], of [B or 1, H, K, …]."""
    batch = max(x.shape[0], numbers.shape[0])
    index = numbers.view(len(numbers), 1, -1, *[1] * (x.dim() - 3))
    index = index.expand(batch, x.shape[1], -1, *x.shape[3:])
    return x.expand(batch, *x.shape[1:]).gather(2, index)
