"""Filters of positions alone: windows, memory, blocks, and the Sparse Transformer's patterns."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .base import Causal, Filter, Index, Span
from .entry import Entry
from .places import Places

# Places are compared in 64 bits.
FARTHEST = 2**62


@dataclass(frozen=True)
class Window(Filter):
    """i - left <= j <= i + right; -1 is open."""

    entry = Entry(
        numbers={"left": None, "right": 0},
        examples={
            "window": lambda: Window(3, 1),
            "window-left": lambda: Window(2, 0),
            "window-open": lambda: Window(-1, 2),
        },
    )

    left: int
    right: int

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < -1:
                raise ValueError(
                    f"{name} must be a whole number >= 0, or -1 for open, got {getattr(self, name)}"
                )
            if getattr(self, name) > FARTHEST:
                raise ValueError(f"{name} must be at most 2^62, got {getattr(self, name)}")

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        left = j >= i - self.left if self.left >= 0 else True
        right = j <= i + self.right if self.right >= 0 else True
        return left & right

    def by_rows(self, places: Places) -> Filter | None:
        if places.shift is None:
            return None
        # -1 is open.
        left = self.left - places.shift if self.left >= 0 else -1
        right = self.right + places.shift if self.right >= 0 else -1
        beyond = left < 0 <= self.left or right < 0 <= self.right
        return None if beyond else Window(left, right)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        left, right = self.left, self.right
        if (left >= 0 and j.last < i.first - left) or (right >= 0 and j.first > i.last + right):
            return False
        all_left = left < 0 or j.first >= i.last - left
        all_right = right < 0 or j.last <= i.first + right
        return True if all_left and all_right else None

    @property
    def causal(self) -> bool:
        return self.right == 0

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        if self.right == 0 and (self.left < 0 or self.left >= num_keys - 1):
            return Causal().simplify(num_queries, num_keys)
        return super().simplify(num_queries, num_keys)


@dataclass(frozen=True)
class Earlier(Filter):
    """j <= i - gap: causal, without the nearest keys."""

    gap: int

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j <= i - self.gap

    def by_rows(self, places: Places) -> Filter | None:
        if places.shift is None:
            return None
        gap = self.gap - places.shift
        return Earlier(gap) if gap >= 0 else Window(-1, -gap)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        gap = self.gap
        return True if j.last <= i.first - gap else False if j.first > i.last - gap else None

    @property
    def causal(self) -> bool:
        return self.gap >= 0


@dataclass(frozen=True)
class Memory(Filter):
    """Causal, and keys more than `length` before the segment's first query are hidden.

    The segment starts with the first query of the call, or at `start` where one is given.
    """

    entry = Entry(numbers={"length": None}, examples={"memory": lambda: Memory(2)})

    length: int
    start: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 0:
            raise ValueError(f"length must be a whole number >= 0, got {self.length}")

    def oldest(self, start: int) -> int:
        return (start if self.start is None else self.start) - self.length

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return (j <= i) & (j >= self.oldest(start))

    def by_rows(self, places: Places) -> Filter | None:
        if places.shift != 0 or isinstance(places.k, Tensor):
            return None
        return self if self.start is None else Memory(self.length, self.start - places.k)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if j.first > i.last or j.last < self.oldest(start):
            return False
        return True if j.last <= i.first and j.first >= self.oldest(start) else None

    @property
    def causal(self) -> bool:
        return True

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        if self.oldest(num_keys - num_queries) <= 0:
            return Causal().simplify(num_queries, num_keys)
        return super().simplify(num_queries, num_keys)

    def until(self, num_keys: int, start: int) -> Filter:
        return Memory(self.length, start if self.start is None else self.start)


@dataclass(frozen=True)
class Strided(Filter):
    """Causal and (i - j < stride or (i - j) mod stride = 0): Sparse Transformer's first pattern."""

    entry = Entry(numbers={"stride": None}, examples={"strided": lambda: Strided(3)})

    stride: int

    def __post_init__(self) -> None:
        _check_stride(self.stride)

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return (j <= i) & ((i - j < self.stride) | ((i - j) % self.stride == 0))

    def by_rows(self, places: Places) -> Filter | None:
        return self if places.shift == 0 else None

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        near, far = i.first - j.last, i.last - j.first
        if far < 0:
            return False
        if near >= 0 and far < self.stride:
            return True
        multiple = near >= 0 and far // self.stride > (near - 1) // self.stride
        return None if near < self.stride or multiple else False

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Fixed(Filter):
    """Causal and (same block of `stride`, or j mod stride >= stride - summary)."""

    entry = Entry(numbers={"stride": None, "summary": 1}, examples={"fixed": lambda: Fixed(4, 2)})

    stride: int
    summary: int = 1

    def __post_init__(self) -> None:
        _check_stride(self.stride)
        if not isinstance(self.summary, int) or not 1 <= self.summary <= self.stride:
            raise ValueError(f"summary must be from 1 to {self.stride}, got {self.summary}")

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        same = i // self.stride == j // self.stride
        return (j <= i) & (same | (j % self.stride >= self.stride - self.summary))

    def by_rows(self, places: Places) -> Filter | None:
        return self if _whole_blocks(places, self.stride) else None

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if j.first > i.last:
            return False
        n = self.stride
        if j.last <= i.first and i.last // n == j.first // n:
            return True
        summary = self._summaries(j.last) > self._summaries(j.first - 1)
        same = j.last // n >= i.first // n and j.first // n <= i.last // n
        return None if summary or same else False

    def _summaries(self, last: int) -> int:
        """How many of the places 0..last are summaries."""
        # torch.compile knows no divmod of a symbolic place.
        blocks, rest = (last + 1) // self.stride, (last + 1) % self.stride
        return blocks * self.summary + max(0, rest - (self.stride - self.summary))

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Blocks(Filter):
    """Causal and j >= n length - memory, with n = i // length the block of the query.

    Queries of one block share one stretch of keys: those of the block, and `memory` before it
    (Image Transformer).
    """

    entry = Entry(numbers={"length": None, "memory": 0}, examples={"blocks": lambda: Blocks(4, 2)})

    length: int
    memory: int = 0

    def __post_init__(self) -> None:
        _check_stride(self.length, "length")
        if not isinstance(self.memory, int) or self.memory < 0:
            raise ValueError(f"memory must be a whole number >= 0, got {self.memory}")

    def oldest(self, i: Index) -> Index:
        return i // self.length * self.length - self.memory

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return (j <= i) & (j >= self.oldest(i))

    def by_rows(self, places: Places) -> Filter | None:
        return self if _whole_blocks(places, self.length) else None

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if j.first > i.last or j.last < self.oldest(i.first):
            return False
        return True if j.last <= i.first and j.first >= self.oldest(i.last) else None

    @property
    def causal(self) -> bool:
        return True

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        first, last = num_keys - num_queries, num_keys - 1
        if self.oldest(last) <= 0:
            return Causal().simplify(num_queries, num_keys)
        if first // self.length == last // self.length:
            return Memory(self.memory, first // self.length * self.length)
        return super().simplify(num_queries, num_keys)


@dataclass(frozen=True)
class Diagonals(Filter):
    """Causal and (i - j) mod stride = 0: what a head of `Strided` sees besides the nearest keys."""

    stride: int

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return (j <= i) & ((i - j) % self.stride == 0)

    def by_rows(self, places: Places) -> Filter | None:
        return self if places.shift == 0 else None

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        near, far = max(i.first - j.last, 0), i.last - j.first
        return None if far >= 0 and far // self.stride > (near - 1) // self.stride else False

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Columns(Filter):
    """Causal and first <= j mod stride < first + count."""

    stride: int
    first: int
    count: int

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        place = j % self.stride
        return (j <= i) & (place >= self.first) & (place < self.first + self.count)

    def by_rows(self, places: Places) -> Filter | None:
        return self if _whole_blocks(places, self.stride) else None

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        if j.first > i.last:
            return False
        # The next column from j.first on.
        place = j.first % self.stride
        wait = 0 if place < self.first + self.count else self.stride
        return None if j.first + max(wait + self.first - place, 0) <= j.last else False

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class CausalAcross(Filter):
    """j <= n + |K - Q| for query number n: the mask of the future of the Multimodal Transformer.

    It is causal up to Q = K; with more queries than keys a query sees some later keys.
    """

    def sees(self, b: Index, i: Index, j: Index, start: int) -> Index:
        return j <= i + max(-2 * start, 0)

    def covers(self, i: Span, j: Span, start: int) -> bool | None:
        reach = max(-2 * start, 0)
        return True if j.last <= i.first + reach else False if j.first > i.last + reach else None

    def simplify(self, num_queries: int, num_keys: int) -> Filter:
        fewer = num_queries - num_keys
        same = Causal() if fewer <= 0 else Window(-1, 2 * fewer)
        return same.simplify(num_queries, num_keys)


def _whole_blocks(places: Places, length: int) -> bool:
    """Whether blocks that are counted from the first key are those of the places."""
    return places.shift == 0 and not isinstance(places.k, Tensor) and places.k % length == 0


def _check_stride(stride: object, name: str = "stride") -> None:
    if not isinstance(stride, int) or stride < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {stride}")
