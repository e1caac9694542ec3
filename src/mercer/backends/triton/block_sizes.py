"""Block sizes of the fused kernels: measured ones, and smaller ones where those do not fit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .codes import GRANULE, POLY, SPLIT_QUERIES
from .plan import Plan


class Sizes(NamedTuple):
    """The blocks of a kernel, and its registers."""

    queries: int
    keys: int
    warps: int
    stages: int
    # The most registers of a thread, so that more programs share an SM; 0 for no bound.
    registers: int = 0
    # Which operands that a loop does not change stay in registers: of the scores (1), of dP (2), of
    # the second slot's scores (4).
    held: int = 0


# By kernel, width and what the weights need, measured on an H200. With two stages, the ptxas of Triton
# 3.6 fails on the pass over queries.
SIZES: dict[tuple[str, int, str], Sizes] = {
    ("forward", 64, "plain"): Sizes(64, 64, 4, 3, 128, held=1),
    ("forward", 64, "link"): Sizes(64, 64, 4, 3),
    ("forward", 64, "long"): Sizes(64, 64, 4, 3, 168),
    ("forward", 64, "near"): Sizes(64, 64, 4, 2, 168),
    ("forward", 128, "plain"): Sizes(128, 128, 8, 3),
    ("forward", 128, "keyed"): Sizes(64, 64, 4, 3),
    ("forward", 128, "parts"): Sizes(64, 64, 4, 3, held=5),
    ("forward", 128, "link"): Sizes(128, 64, 8, 3),
    ("forward", 128, "table"): Sizes(64, 64, 4, 2),
    ("forward", 128, "near"): Sizes(64, 32, 4, 2, 168),
    ("forward", 256, "plain"): Sizes(128, 64, 8, 3),
    ("forward", 256, "link"): Sizes(64, 32, 8, 3),
    ("forward", 512, "plain"): Sizes(64, 32, 8, 2),
    ("forward", 512, "link"): Sizes(32, 32, 8, 1),
    ("keys", 64, "plain"): Sizes(64, 64, 4, 2, 168),
    ("keys", 64, "each"): Sizes(32, 64, 4, 3, 168),
    ("keys", 64, "link"): Sizes(64, 64, 4, 3),
    ("keys", 64, "long"): Sizes(32, 64, 4, 3, 168),
    ("keys", 64, "near"): Sizes(64, 64, 4, 1, 168),
    ("keys", 128, "plain"): Sizes(32, 64, 4, 3, held=1),
    ("keys", 128, "keyed"): Sizes(64, 64, 4, 2),
    ("keys", 128, "parts"): Sizes(64, 64, 4, 2),
    ("keys", 128, "link"): Sizes(32, 64, 4, 3),
    ("keys", 128, "near"): Sizes(32, 32, 4, 2),
    ("keys", 256, "parts"): Sizes(64, 64, 8, 2, held=1),
    ("keys", 256, "plain"): Sizes(32, 64, 8, 2),
    ("keys", 256, "link"): Sizes(32, 32, 8, 1),
    ("keys", 512, "plain"): Sizes(32, 32, 8, 1),
    ("keys", 512, "link"): Sizes(16, 32, 8, 1),
    ("queries", 64, "plain"): Sizes(64, 64, 4, 3, 168),
    ("queries", 64, "link"): Sizes(64, 64, 4, 3),
    ("queries", 64, "long"): Sizes(64, 64, 4, 3, 168),
    ("queries", 64, "table"): Sizes(64, 32, 4, 3),
    ("queries", 64, "near"): Sizes(64, 64, 4, 1, 168),
    ("queries", 128, "plain"): Sizes(64, 64, 4, 3, held=3),
    ("queries", 128, "parts"): Sizes(64, 64, 4, 3, held=7),
    ("queries", 128, "table"): Sizes(64, 32, 4, 3),
    ("queries", 128, "near"): Sizes(64, 32, 4, 3),
    ("queries", 128, "link"): Sizes(128, 64, 8, 3),
    ("queries", 256, "parts"): Sizes(128, 32, 8, 3, held=5),
    ("queries", 256, "plain"): Sizes(64, 32, 8, 3),
    ("queries", 256, "link"): Sizes(32, 32, 8, 1),
    ("queries", 512, "plain"): Sizes(32, 32, 8, 1),
    ("queries", 512, "link"): Sizes(32, 16, 8, 1),
}
# A table that reaches this far has blocks enough for pipelining to pay.
LONG = 256
# What needs more is tried in this order.
FALLBACKS = {
    "each": ("keyed", "plain", "link"),
    "keyed": ("plain", "link"),
    "parts": ("plain", "link"),
    "near": ("table", "link"),
    "long": ("table", "link"),
}
# For few queries, by parts of the keys. Wide features leave no room for larger blocks.
SPLITS = {64: Sizes(16, 64, 4, 3), 128: Sizes(16, 128, 8, 2), 256: Sizes(16, 64, 4, 3)}
# With two slots; and with a table, whose blocks are no larger than a granule.
PART_SPLITS = SPLITS | {128: Sizes(16, 128, 8, 3)}
TABLE_SPLITS = SPLITS | {128: Sizes(16, 64, 4, 2)}


def bucket_of(p: Plan) -> int:
    """The width that decides on block sizes."""
    c = p.constants
    width: int = max(c["E0"] + c["E1"], c["V"])
    # float32 operands take twice the room.
    width *= 2 if p.dtype == torch.float32 else 1
    return next(size for size in (64, 128, 256, 512, width) if width <= size)


def sizes_of(kind: str, p: Plan) -> Sizes:
    """Block sizes for a kernel."""
    c = p.constants
    linked = (c["LINK0"] or c["LINK1"]) and c["FORM"] != POLY
    needs = "table" if c["CLIP"] >= 0 else "link" if linked else "parts" if c["E1"] else "plain"
    if needs == "table" and all(0 <= clause.left < c["CLIP"] for clause in p.static.filter):
        needs = "near" if c["CLIP"] < LONG else "long"
    if needs == "plain" and c["HAS_COL0"]:
        needs = "each" if c["MODE0"] == 2 else "keyed"
    bucket = bucket_of(p)
    if kind == "split":
        splits = TABLE_SPLITS if c["CLIP"] >= 0 else PART_SPLITS if c["E1"] else SPLITS
        sizes = splits.get(bucket, Sizes(SPLIT_QUERIES, 32, 4, 2))
    else:
        names = (needs, *FALLBACKS.get(needs, ("link",)))
        found = (SIZES[kind, bucket, name] for name in names if (kind, bucket, name) in SIZES)
        sizes = next(found, Sizes(16, 16, 4, 1))
    if c["CLIP"] >= 0:
        most = (min(sizes.queries, GRANULE), min(sizes.keys, GRANULE))
        sizes = sizes._replace(queries=most[0], keys=most[1])
    return sizes


def bytes_of(kind: str, sizes: Sizes, p: Plan) -> int:
    """The shared memory of blocks of these sizes, in bytes."""
    c, size = p.constants, p.dtype.itemsize
    width, wide = c["E0"] + c["E1"], c["V"]
    own, streamed = sizes.queries, sizes.keys
    if kind == "keys":
        own, streamed = streamed, own
    kept = own * (width if kind == "forward" else width + wide) * size
    bias = size * own * streamed if c["CLIP"] >= 0 else 0
    # And barriers, and numbers per key or query.
    return kept + sizes.stages * (streamed * (width + wide) * size + bias) + 2048


def fitted(kind: str, sizes: Sizes, p: Plan, most: int) -> Sizes:
    """The same, or smaller if the device has less shared memory than the one they were measured on."""
    loop, own = ("queries", "keys") if kind == "keys" else ("keys", "queries")
    while bytes_of(kind, sizes, p) > most:
        if sizes.stages > 1:
            sizes = sizes._replace(stages=1 if kind == "queries" else sizes.stages - 1)
        elif getattr(sizes, loop) > 16:
            sizes = sizes._replace(**{loop: getattr(sizes, loop) // 2})
        elif getattr(sizes, own) > 16:
            sizes = sizes._replace(**{own: getattr(sizes, own) // 2, "warps": 4})
        else:
            break
    return sizes
