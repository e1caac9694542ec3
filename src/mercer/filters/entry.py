"""How a filter is declared: its class has one `Entry`, and `filters.FILTERS` lists the classes.

Text (`parse`), the bench, the tests and the table in docs/kernels.md follow from this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Filter


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the rest of the package needs to know about a filter."""

    # Examples for the tests; filters with data are made for 2 sequences of 11 keys.
    examples: Mapping[str, Callable[[], Filter]]
    # The numbers that it takes in the bench, as in window:LEFT[:RIGHT]; None: must be given.
    numbers: Mapping[str, int | None] = field(default_factory=dict)
    text: bool = True  # whether its arguments can be written as text; the bench takes these alone
