"""What the portable kernels are compiled for, in groups: a slot of features, and a table.

plan.py and select.py decide on these constants one by one; a kernel takes them together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .codes import NOTHING


class SlotConstants(NamedTuple):
    """A slot of features."""

    width: int  # features of a block, a power of two; 0 for a second slot without features
    link: int
    param: float  # of the link
    mode: int  # the scale is a number (0), one of each head (1) or one of each query (2)
    log: tuple[int | float, ...]  # how the scale is formed from what is read
    col: int  # numbers per key: none (0), those of a head (1), or of every head of a group (EACH)
    row: bool  # there are numbers per query
    inside: int = NOTHING  # what the forward computes from keys itself
    norm: bool = False  # the numbers per key are -|k|^2 / 2
    wants: bool = False  # the scale has a gradient
    saves: bool = False  # the given numbers per key have a gradient


class TableConstants(NamedTuple):
    """A table of distances."""

    clip: int  # how far it reaches each way; -1 without one
    sided: bool  # no visible key comes after its query
    tiled: bool  # blocks of its band are read and written by TMA


NAMES = {
    "width": "E", "link": "LINK", "param": "PARAM", "mode": "MODE", "log": "LOG", "col": "HAS_COL",
    "row": "HAS_ROW", "inside": "INSIDE", "norm": "NORM", "wants": "WANT", "saves": "SAVE_COL",
}  # fmt: skip


def grouped(constants: dict[str, Any], *, interpreted: bool) -> dict[str, Any]:
    """The same constants, with those of each slot and those of a table together.

    The compiler passes a field on to another function only if it is a constexpr itself. The
    interpreter computes with plain numbers.
    """
    import triton.language as tl

    rest = dict(constants)

    def take(name: str) -> Any:
        found = rest.pop(name)
        return found if interpreted else tl.constexpr(found)

    slots = {
        f"SLOT{n}": SlotConstants(
            **{field: take(f"{name}{n}") for field, name in NAMES.items() if f"{name}{n}" in rest}
        )
        for n in (0, 1)
    }
    table = TableConstants(*(take(name) for name in ("CLIP", "SIDED", "TILED")))
    return slots | {"TABLE": table} | rest
