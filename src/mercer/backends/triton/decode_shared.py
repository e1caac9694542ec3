"""Launches for few queries of sequences that have the keys of the second slot in common.

That is how decoding reads places: they are the same for all of a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ..runtime.launch import RESERVED, Launch
from .block_sizes import EACH, PLAIN, SPLIT_QUERIES, shared_memory
from .plan import Inputs, Numbers, Plan, Static, describe, part_of_one

# Sequences of a program. With four, there is room for one program on a processor, and that waits.
COUNT = 2
# Programs that share a processor, by what they take of its shared memory.
AT_ONCE = 2
# What products of float32 take of it beside their operands.
EXACT = 2**14


def takes(p: Plan, x: Inputs) -> bool:
    """Whether there are such keys, and scores are one dot product, perhaps with numbers per key."""
    c, batch = p.constants, p.static.shape[0]
    plain = c["FORM"] == PLAIN and c["SAME"] and c["CLIP"] < 0 and not c["DROPOUT"]
    return plain and batch > 1 and x.q[1].shape[0] == x.k[1].shape[0] == 1 and _keys(p) > 0


def places_last(x: Inputs, static: Static) -> Inputs:
    """Parts of one dot product, with what all sequences share as the second, and only once."""
    if len(x.q) < 2 or not part_of_one(static):
        return x
    q, k = [_once(y) for y in x.q], [_once(y) for y in x.k]
    first, second = (a.shape[0] == b.shape[0] == 1 for a, b in zip(q, k, strict=True))
    if first and not second:
        # Numbers per key belong to both.
        q, k = q[::-1], k[::-1]
    return replace(x, q=q, k=k)


def _once(x: Tensor) -> Tensor:
    """Without what is there again for every sequence."""
    return x[:1] if x.shape[0] > 1 and x.stride(0) == 0 else x


def programs(p: Plan) -> int:
    """How many there are for one part of the keys."""
    batch, heads, _ = p.static.shape
    return -(-batch // COUNT) * heads


def forward(x: Inputs, p: Plan, ready: Numbers, out: Tensor, lse: Tensor, parts: int) -> None:
    """out and log_mass, of each part of the keys where there are several."""
    launch = p.launches.get(("shared", parts)) or _launch(p, parts)
    c = launch.constants
    tensors: list[Any] = [x.k[0], x.k[1], x.v]
    if c["TMA"]:
        widths = (c["E0"], c["E1"], c["V"])
        tensors = [describe(y, c["BN"], w) for y, w in zip(tensors, widths, strict=True)]
    k0, k1, v = tensors
    lengths, ids = (x.v if y is None else y for y in (x.lengths, x.ids))
    launch(
        (x.q[0], k0, x.q[1], k1, v, ready.col0, lengths, ids, out, lse),
        (*p.numbers(x.seed), p.static.shape[0]),
    )  # fmt: skip


def _launch(p: Plan, parts: int) -> Launch:
    from .kernels import decode_shared as triton_sharing

    c, (_, _, k0, k1, v, _) = p.constants, p.aligned
    names = ("E0", "E1", "V", "HAS_COL0", "FILTER", "SIMPLE", "EVEN", "PRECISION")
    constants = {name: c[name] for name in names}
    tma = k0 and k1 and v
    constants["EVEN"] = c["EVEN"] or tma
    constants |= {"BM": SPLIT_QUERIES, "BN": _keys(p), "COUNT": COUNT, "SPLIT": parts > 1}
    constants |= {"TMA": tma, "GROUPED": p.static.grouped}
    options = {"num_warps": 4, "num_stages": 2}
    grid = (programs(p), parts, 1)
    found = Launch(triton_sharing.forward_shared, grid, constants, options)
    p.launches["shared", parts] = found
    return found


def _keys(p: Plan) -> int:
    """Keys of a block: as many as leave room for another program, or 0 where even few do not."""
    c, size = p.constants, p.dtype.itemsize
    room = (shared_memory(p.device) + RESERVED) // AT_ONCE - RESERVED - (EXACT if size == 4 else 0)
    features = COUNT * c["E0"] + c["E1"]
    for keys in (128, 64, 32, 16):
        numbers = keys * (features + COUNT * c["V"]) + SPLIT_QUERIES * (features + keys)
        columns = COUNT * SPLIT_QUERIES * keys if c["HAS_COL0"] == EACH else 0
        if numbers * size + columns * 4 <= room:
            return keys
    return 0
