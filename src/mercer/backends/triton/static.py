"""Everything of a call except its tensors: slots, filter and options."""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple

from .codes import PART, SPLIT_QUERIES
from .filters import Clause

# How a kernel computes a scale from what it reads: as it is (0), or exp(-2 (x + offset)), with x as
# it is (1) or bent beyond low and high (2): (kind, offset, low, high, bend).
Log = tuple[int, float, float, float, float]
NO_LOG: Log = (0, 0.0, 0.0, 0.0, 1.0)


class Slot(NamedTuple):
    """One factor with features."""

    link: int  # 0 for the identity
    param: float
    mode: int  # the scale is a number (0), a tensor of heads (1) or of queries (2)
    number: float
    norm: bool  # the numbers per key, and inside a link per query, are -|x|^2 / 2
    wants: bool  # the scale has a gradient
    saves: bool  # the given numbers per key have a gradient
    log: Log = NO_LOG
    keys: bool = True  # the keys have a gradient
    unit: bool = False  # the kernel for few queries divides queries and keys by their lengths


class Static(NamedTuple):
    """Everything of a call except its tensors. Calls with the same Static and shapes share a plan."""

    slots: tuple[Slot, ...]
    filter: tuple[Clause, ...]  # one of them must hold
    simple: bool  # each query sees one stretch of keys
    dropout_p: float
    trains: bool  # something has a gradient
    first: int  # where the memory of the filter starts
    tokens: bool  # outputs and gradients lie token by token, [B, T, H, D] in memory
    clip: int  # how far a table reaches each way; -1 without one
    shape: tuple[int, int, int]  # batch, heads, queries
    grouped: bool = False  # queries are heads of a group, all at the last place
    summed: bool = False  # slots are terms, of the same features, whose weights add up

    def text(self) -> str:
        """Everything but sizes, as text for custom operators."""
        slots = tuple(tuple(slot) for slot in self.slots)
        filter = tuple(tuple(clause) for clause in self.filter)
        return repr((slots, filter, self.simple, self.dropout_p, self.trains))

    def sizes(self) -> list[int]:
        """The sizes, which may be symbolic in a compiled graph."""
        return [self.first, int(self.tokens), self.clip, *self.shape]

    @property
    def precise(self) -> bool:
        """Whether a gradient needs <dO, O> more precisely than the stored output gives it.

        Gradients of scales do: they are small differences of large sums.
        """
        return self.trains and any(slot.wants for slot in self.slots)

    @property
    def sums_again(self) -> bool:
        """Whether a gradient needs <dO, O> without the rounding of the weights in O.

        Those of numbers per key do: a slope is multiplied with places up to the length. The pass over
        queries forms sum_j P dP anew, before the pass over keys.
        """
        return any(slot.saves for slot in self.slots)


def parse(text: str, sizes: list[int]) -> Static:
    """The Static of which these are `text` and `sizes`."""
    first, tokens, clip, batch, heads, num_queries = sizes
    slots, filter, simple, dropout_p, trains = _parsed(text)
    shape = (batch, heads, num_queries)
    return Static(slots, filter, simple, dropout_p, trains, first, bool(tokens), clip, shape)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    slots, filter, *rest = ast.literal_eval(text)
    return tuple(Slot(*slot) for slot in slots), tuple(Clause(*c) for c in filter), *rest


def one_sided(filter: tuple[Clause, ...]) -> bool:
    """Whether no query sees a key after itself."""
    return all(clause.causal for clause in filter)


def are_few(num_queries: int, num_keys: int) -> bool:
    """Whether queries need no gradient and are so few that keys are cut into parts."""
    return num_queries <= SPLIT_QUERIES and num_keys >= PART


def part_of_one(static: Static) -> bool:
    """Whether slots are parts of one dot product."""
    number = static.slots[0].number
    return not static.summed and all(
        s.link == 0 and s.mode == 0 and s.number == number and not s.norm for s in static.slots
    )
