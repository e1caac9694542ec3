"""What a kernel is made with: checks of its numbers, and the arguments of a call as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

# The longest list that is kept as text.
MAX_LISTED = 1024


def as_text(args: Sequence[Any], named: Mapping[str, Any]) -> str | None:
    """The arguments of a call as text; None if one is not a number, a string or a list of these."""
    texts = []
    for name, x in (*(("", x) for x in args), *named.items()):
        each = x if isinstance(x, list | tuple) else [x]
        if len(each) > MAX_LISTED or not all(_is_literal(one) for one in each):
            return None
        texts.append(f"{name}={x!r}" if name else repr(x))
    return ", ".join(texts)


def _is_literal(x: Any) -> bool:
    if type(x) is float:
        return math.isfinite(x)
    return x is None or type(x) in (bool, int, str)


def is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, int | float) and not isinstance(x, bool)


def is_finite(number: float) -> bool:
    """Whether a number is finite as a float; whole numbers may be larger than any float."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False
