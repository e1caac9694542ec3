"""The feature space: named parts of the queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from torch import Tensor

from ..filters.places import Said
from .layout import repeat


class Features:
    """X = F x T x …: named parts, each [B or 1, H, T, D_part]; a plain tensor means `content`.

    `places` is where they stand: the place of the first, or [B or 1, T]; None: the last query
    stands beside the last key. A kernel of i - j reads it.
    """

    places: Said | None

    def __init__(self, **parts: Tensor) -> None:
        if not parts:
            raise ValueError("Features needs at least one part, for example content=tensor")
        for name, part in parts.items():
            _check_part(name, part)
        lengths = [part.shape[2] for part in parts.values()]
        # Not a set: torch.compile makes constants of numbers in a set.
        if len(lengths) > 1 and any(length != lengths[0] for length in lengths):
            found = dict(zip(parts, lengths, strict=True))
            raise ValueError(f"the parts of Features must have one length, got {found}")
        self._parts, self.places = parts, None
        self.length = lengths[0]
        self.heads = max([part.shape[1] for part in parts.values()])

    @staticmethod
    def of(x: Features | Tensor) -> Features:
        return x if isinstance(x, Features) else Features(content=x)

    def part(self, name: str) -> Tensor:
        if name not in self._parts:
            raise ValueError(
                f"the kernel reads part {name!r}, but the features have only: {', '.join(self)}"
            )
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def tensors(self) -> list[Tensor]:
        return list(self._parts.values())

    def items(self) -> list[tuple[str, Tensor]]:
        return list(self._parts.items())

    def at(self, places: Said | None) -> Features:
        """The same features at these places."""
        other = Features(**self._parts)
        other.places = places
        return other

    def each(self, change: Callable[[Tensor], Tensor]) -> Features:
        """Every part changed, at the same places."""
        return Features(**{n: change(x) for n, x in self._parts.items()}).at(self.places)

    def rows(self, first: int, stop: int) -> Features:
        """Those from first to stop, at their places."""
        places = self.places
        if places is not None:
            places = places[:, first:stop] if isinstance(places, Tensor) else places + first
        return Features(**{n: x[:, :, first:stop] for n, x in self._parts.items()}).at(places)

    def repeat_heads(self, heads: int) -> Features:
        """All heads, with grouped ones repeated."""
        return self.each(lambda x: repeat(x, x.shape[0], heads))

    def to(self, *args: object, **kwargs: object) -> Features:
        return self.each(lambda x: x.to(*args, **kwargs))  # type: ignore[call-overload]

    def __repr__(self) -> str:
        return f"Features({', '.join(f'{n}={list(x.shape)}' for n, x in self._parts.items())})"


Input: TypeAlias = Features | Tensor


def _check_part(name: str, part: object) -> None:
    if not isinstance(part, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(part).__name__}")
    if part.dim() != 4:
        raise ValueError(f"{name} must be [B, H, T, D], got {list(part.shape)}")
    if not part.is_floating_point():
        raise ValueError(f"{name} must be a floating point tensor, got {part.dtype}")
