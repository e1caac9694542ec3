"""Where the queries and the keys of a call stand, if that is said."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

# The place of the first one, if they are consecutive, else of each, [B, T].
Said: TypeAlias = int | Tensor
# Of queries and of keys, as users give them.
Where: TypeAlias = tuple[Said, Said]
# Places are compared in 64 bits.
FARTHEST = 2**61


@dataclass(frozen=True, eq=False)
class Places:
    """The places of queries and keys: both as numbers, or both as tensors."""

    q: Said  # or [B or 1, Q]
    k: Said  # or [B or 1, K]
    num_queries: int
    num_keys: int
    left_out: int = 0  # keys at the end of the call that no query sees, and that are left out

    @property
    def shift(self) -> int | None:
        """How much later queries are than with the last one beside the last key; None: unknown."""
        if isinstance(self.q, Tensor) or isinstance(self.k, Tensor):
            return None
        return self.q - self.k - (self.num_keys - self.num_queries)

    @property
    def own(self) -> bool:
        """Whether the queries and the keys are the same places, given as one tensor."""
        return isinstance(self.q, Tensor) and self.q is self.k

    @property
    def usual(self) -> bool:
        """Whether the first key is at 0 and the last query beside the last key."""
        return self.shift == 0 and isinstance(self.k, int) and self.k == 0

    def without_later_keys(self) -> Places:
        """Without the keys behind the last query, unless that are all."""
        later = -(self.shift or 0)
        if not 0 < later < self.num_keys:
            return self
        return replace(self, num_keys=self.num_keys - later, left_out=later)

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """[B or 1, Q] and [B or 1, K]."""
        lengths = self.num_queries, self.num_keys
        q, k = (_each(x, n, device) for x, n in zip((self.q, self.k), lengths, strict=True))
        return q, k

    def __str__(self) -> str:
        if isinstance(self.q, Tensor) or isinstance(self.k, Tensor):
            return "of each query and key"
        return f"queries from {self.q}, keys from {self.k}"


def read_places(
    given: object, batch: int, num_queries: int, num_keys: int, device: torch.device
) -> Places | None:
    """The places of a call, checked; None if they are the usual ones."""
    if given is None:
        return None
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(
            "places must be a pair (of the queries, of the keys): whole numbers, those of the "
            f"first ones, or tensors [B, Q] and [B, K], got {given!r}"
        )
    q = _read("queries", given[0], batch, num_queries, device)
    same = given[1] is given[0] and num_queries == num_keys
    k = q if same else _read("keys", given[1], batch, num_keys, device)
    if isinstance(q, Tensor) or isinstance(k, Tensor):
        q, k = _each(q, num_queries, device), _each(k, num_keys, device)
    places = Places(q, k, num_queries, num_keys)
    return None if places.usual else places


def _read(name: str, x: object, batch: int, length: int, device: torch.device) -> Said:
    if isinstance(x, int) and not isinstance(x, bool):
        if abs(x) > FARTHEST:
            raise ValueError(f"the place of the first of the {name} must be below 2^61, got {x}")
        return x
    if not isinstance(x, Tensor):
        raise ValueError(
            f"the places of the {name} must be a whole number or a tensor [B, {length}], got {x!r}"
        )
    whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    x = x[None] if x.dim() == 1 else x
    # Compared one by one: torch.compile cannot test a symbolic size with `in`.
    fits = x.dim() == 2 and x.shape[1] == length and (x.shape[0] == 1 or x.shape[0] == batch)
    if not (whole and fits):
        raise ValueError(
            f"the places of the {name} must be whole numbers [{batch}, {length}], "
            f"got {x.dtype} {list(x.shape)}"
        )
    return x.to(device, torch.int64)


def _each(x: Said, length: int, device: torch.device) -> Tensor:
    return x if isinstance(x, Tensor) else torch.arange(x, x + length, device=device)[None]
