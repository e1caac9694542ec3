"""Launches for few queries of sequences that have the keys of the second slot in common.

That is how decoding reads places: they are the same for all of a batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .launches import Launch
from .triton_plan import Inputs, Numbers, Plan, describe
from .triton_sizes import PLAIN, SPLIT_QUERIES, shared_memory

# Sequences of a program. With four, there is room for one program on a processor, and that waits.
COUNT = 2
# Programs that share a processor, by what they take of its shared memory.
AT_ONCE = 2


def takes(p: Plan, x: Inputs) -> bool:
    """Whether there are such keys, and scores are one dot product, perhaps with numbers per key."""
    c, static = p.constants, p.static
    plain = c["FORM"] == PLAIN and c["SAME"] and c["CLIP"] < 0 and not static.trains
    plain = plain and not any(c[name] for name in ("HAS_COL1", "HAS_ROW0", "HAS_ROW1", "DROPOUT"))
    return plain and static.shape[0] > 1 and x.q[1].shape[0] == x.k[1].shape[0] == 1


def programs(p: Plan) -> int:
    """How many there are for one part of the keys."""
    batch, heads, _ = p.static.shape
    return -(-batch // COUNT) * heads


def forward(x: Inputs, p: Plan, ready: Numbers, out: Tensor, lse: Tensor, parts: int) -> None:
    """out and log_mass, of each part of the keys where there are several."""
    launch = p.launches.get(("shared", parts)) or _launch(p, parts)
    (batch, _, num_queries), c = p.static.shape, launch.constants
    tensors: list[Any] = [x.k[0], x.k[1], x.v]
    if c["TMA"]:
        widths = (c["E0"], c["E1"], c["V"])
        tensors = [describe(y, c["BN"], w) for y, w in zip(tensors, widths, strict=True)]
    k0, k1, v = tensors
    lengths, ids = (x.v if y is None else y for y in (x.lengths, x.ids))
    launch(
        (x.q[0], k0, x.q[1], k1, v, ready.col0, lengths, ids, out, lse),
        (*p.strides[:17], p.strides[19], *p.strides[25:30], batch, num_queries, p.num_keys,
         p.static.first, *p.widths, p.static.slots[0].number),
    )  # fmt: skip


def _launch(p: Plan, parts: int) -> Launch:
    from . import triton_sharing

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
    """Keys of a block: as many as leave room for another program."""
    c = p.constants
    features = COUNT * c["E0"] + c["E1"]
    for keys in (128, 64, 32):
        numbers = keys * (features + COUNT * c["V"]) + SPLIT_QUERIES * (features + keys)
        if numbers * p.dtype.itemsize <= shared_memory(p.device) // AT_ONCE:
            return keys
    return 16
