"""Which calls the Hopper kernels support, and for which of them they are faster.

They take dot products of half precision without links or dropout. A table is taken by the pass over
keys if it has all pairs. Whether a kernel works on this machine is for check.py to say.
"""

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor

from ...runtime.device import processors
from ..codes import PLAIN
from ..layout import tma_readable
from ..plan import Plan

# Keys that a warp group owns, and queries of a block.
GROUP = 64
# Features, and as many values, that the forward takes. The portable forward takes fewer.
FORWARDS = (128,)
# From so many features and values on, scores are stored for the gradients of queries; of at most so
# many pairs at a time. Half as many would be 2 % faster in a window, and five times the memory.
WIDE, PAIRS = 256, 2**30
# At least so many programs of a share of the heads for each multiprocessor: with 4 it was 2 % faster
# than not to store, with 8 10 %.
LEAST = 3
# With so many features and values there are registers for a warp group that sums up the gradients of
# queries. Where a query sees fewer keys than this, the kernels before and after cost more than that
# saves.
SUMMED, MANY_KEYS = 64, 1024
# Block sizes of the kernels that read stored scores, for queries and for the keys of a second part:
# (queries, keys, warps, stages).
TO_QUERIES, TO_KEYS = (128, 64, 8, 4), (64, 128, 8, 4)


def forwards(p: Plan) -> bool:
    """Whether the forward supports this call."""
    c, (q0, _, k0, columns, v, _) = p.constants, p.aligned
    # The rows of `low` are bytes, and TMA needs multiples of 16.
    alike = c["E0"] == c["V"] in FORWARDS and c["E1"] == 0 and p.widths[2] % 16 == 0
    plain = c["FORM"] == PLAIN and not (c["HAS_ROW0"] or c["DROPOUT"]) and c["CLIP"] < 0
    # Numbers per key are columns of a product.
    plain = plain and p.dtype.itemsize == 2 and (not c["HAS_COL0"] or (p.spread and columns))
    return bool(plain and alike and q0 and k0 and v)


def takes(p: Plan, grad: Tensor, banded: bool = False) -> bool:
    """Whether the pass over keys supports this call; `banded`: with a table of all pairs."""
    c, (q0, q1, k0, k1, v, _) = p.constants, p.aligned
    two = c["E1"] > 0
    plain = not (c["LINK0"] or c["HAS_ROW0"] or c["DROPOUT"]) and (c["CLIP"] < 0 or banded)
    plain = plain and p.dtype.itemsize == 2
    if two:
        plain = plain and c["SAME"] and not c["HAS_COL1"] and c["E1"] in (64, 128)
        plain = plain and q1 and k1
    sized = c["E0"] in (64, 128) and c["V"] in (64, 128)
    return bool(plain and sized and q0 and k0 and v and tma_readable(grad))


def stores(p: Plan, grad: Tensor) -> bool:
    """Whether the pass over keys can store scores, from which other kernels form dq."""
    c = p.constants
    wide = c["E0"] + c["E1"] + c["V"] >= WIDE and len(p.static.filter) == 1
    # A scale of each query needs numbers per key as columns of a product.
    steered = c["MODE0"] == 2 and c["HAS_COL0"] and not p.spread
    return wide and not steered and takes(p, grad) and share(p) > 0


@lru_cache(maxsize=1024)
def share(p: Plan) -> int:
    """How many heads are stored at a time; 0 if they would leave half of the GPU idle."""
    batch, heads, _ = p.static.shape
    blocks, total = aligned(p.num_keys) // (2 * GROUP), batch * heads
    most = PAIRS // (aligned(p.num_keys) * stored_queries(p))
    if most >= total:
        return total
    # Rounds of equal size.
    count = -(-total // -(-total // most)) if most else 0
    return count if count * blocks >= LEAST * processors(p.device) else 0


def sums(p: Plan, grad: Tensor) -> bool:
    """Whether the pass over keys can sum the gradients of queries, too."""
    c = p.constants
    sized = c["E0"] == c["V"] == SUMMED and c["E1"] == 0 and len(p.static.filter) == 1
    # A scale of each query needs numbers per key as columns of a product, and a bound for them.
    sized = sized and (c["MODE0"] < 2 or (p.spread and p.bounded))
    return sized and takes(p, grad) and can_add()


@lru_cache(maxsize=1)
def can_add() -> bool:
    """Whether this Triton lets TMA add to memory: not yet in 3.6."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    return hasattr(tma, "async_atomic_add")


def pays_to_sum(p: Plan) -> bool:
    """Whether queries see enough keys for that to pay."""
    causal = p.static.filter[0][0]
    seen = min(window(p), p.num_keys - causal * p.static.shape[2] / 2)
    return seen >= MANY_KEYS


def scale_by_keys(p: Plan, lse: bool) -> bool:
    """Whether keys alone give the gradient of a head's scale, so that no kernel reads queries for it.

    Not with a gradient of log_mass, of which each query has a share of its own.
    """
    slots = p.static.slots
    return len(slots) == 1 and slots[0].wants and p.constants["MODE0"] == 1 and not lse


@lru_cache(maxsize=1024)
def window(p: Plan) -> float:
    """How many keys a filter shows to a query, at most."""
    ((causal, left, right, *_),) = p.static.filter
    ahead = 0 if causal else right
    return left + 1 + ahead if min(left, ahead) >= 0 else math.inf


@lru_cache(maxsize=1024)
def stored_queries(p: Plan) -> int:
    """How many queries, in whole blocks, may see one of a program's keys."""
    whole = aligned(p.static.shape[2])
    # A window that is no multiple of a block may reach into one block more.
    seen = window(p) + 2 * GROUP
    return whole if math.isinf(seen) else min(whole, aligned(int(seen)) + 2 * GROUP)


def aligned(length: int) -> int:
    return -(-length // (2 * GROUP)) * 2 * GROUP
