"""What a filter shows: which keys a query sees, and which blocks of keys or queries have such pairs.

A filter comes as a tuple of clauses, ten numbers each, of which any may show a pair: (causal, left,
right, memory, stride, fixed, summary, padding, documents, gap). filters.py says what they mean.
"""

import triton
import triton.language as tl


@triton.jit
def _visible(i, j, b, first, lengths, ids, stride_ids, num_keys, FILTER: tl.constexpr):
    """Whether queries at places i see keys at places j, one a row, the other a column."""
    away = i - j
    seen = away != away
    for n in tl.static_range(len(FILTER)):
        clause = (away == away) & (j < num_keys)
        if FILTER[n][0]:
            clause = clause & (away >= 0)
        if FILTER[n][1] >= 0:
            clause = clause & (away <= FILTER[n][1])
        if FILTER[n][2] >= 0:
            clause = clause & (away >= -FILTER[n][2])
        if FILTER[n][3] >= 0:
            clause = clause & (j >= first - FILTER[n][3])
        if FILTER[n][4] > 0:
            clause = clause & ((away < FILTER[n][4]) | (away % FILTER[n][4] == 0))
        if FILTER[n][5] > 0:
            same = i // FILTER[n][5] == j // FILTER[n][5]
            clause = clause & (same | (j % FILTER[n][5] >= FILTER[n][5] - FILTER[n][6]))
        if FILTER[n][7]:
            clause = clause & (j < tl.load(lengths + b))
        if FILTER[n][8]:
            inside = (i >= 0) & (i < num_keys)
            mine = tl.load(ids + b * stride_ids + i, mask=inside, other=-1)
            theirs = tl.load(ids + b * stride_ids + j, mask=j < num_keys, other=-2)
            clause = clause & (mine == theirs) & inside
        if FILTER[n][9] > 0:
            clause = clause & (away >= FILTER[n][9])
        seen = seen | clause
    return seen


@triton.jit
def _key_range(low, high, b, first, lengths, num_keys, FILTER: tl.constexpr):
    """The keys that places low..high may see, [start, stop), and those that all of them see."""
    start = num_keys
    stop = 0
    sure_start = 0
    sure_stop = num_keys
    for n in tl.static_range(len(FILTER)):
        clause_start = 0
        clause_stop = num_keys
        if FILTER[n][0]:
            clause_stop = tl.minimum(clause_stop, high + 1)
            sure_stop = tl.minimum(sure_stop, low + 1)
        if FILTER[n][1] >= 0:
            clause_start = tl.maximum(clause_start, low - FILTER[n][1])
            sure_start = tl.maximum(sure_start, high - FILTER[n][1])
        if FILTER[n][2] >= 0:
            clause_stop = tl.minimum(clause_stop, high + FILTER[n][2] + 1)
            sure_stop = tl.minimum(sure_stop, low + FILTER[n][2] + 1)
        if FILTER[n][3] >= 0:
            clause_start = tl.maximum(clause_start, first - FILTER[n][3])
            sure_start = tl.maximum(sure_start, first - FILTER[n][3])
        if FILTER[n][7]:
            length = tl.load(lengths + b).to(tl.int32)
            clause_stop = tl.minimum(clause_stop, length)
            sure_stop = tl.minimum(sure_stop, length)
        if FILTER[n][9] > 0:
            clause_stop = tl.minimum(clause_stop, high - FILTER[n][9] + 1)
            sure_stop = tl.minimum(sure_stop, low - FILTER[n][9] + 1)
        start = tl.minimum(start, clause_start)
        stop = tl.maximum(stop, clause_stop)
    return start, stop, sure_start, sure_stop


@triton.constexpr_function
def _odd(count):
    """One more for a long window that is a multiple of 16. It costs one masked block at most.

    With a bound that is a multiple of 16, the ptxas of Triton 3.6 waits for every product of the loop.
    """
    return count + (count >= 512 and count % 16 == 0)


@triton.jit
def _query_range(low, high, b, first, lengths, start_place, num_queries, FILTER: tl.constexpr):
    """The queries (counted from 0) that may see places low..high, and those that see them all."""
    start = num_queries
    stop = 0
    sure_start = 0
    sure_stop = num_queries
    for n in tl.static_range(len(FILTER)):
        clause_start = 0
        clause_stop = num_queries
        if FILTER[n][0]:
            clause_start = tl.maximum(clause_start, low - start_place)
            sure_start = tl.maximum(sure_start, high - start_place)
        if FILTER[n][1] >= 0:
            clause_stop = tl.minimum(clause_stop, high + _odd(FILTER[n][1] + 1) - start_place)
            sure_stop = tl.minimum(sure_stop, low + FILTER[n][1] + 1 - start_place)
        if FILTER[n][2] >= 0:
            clause_start = tl.maximum(clause_start, low - FILTER[n][2] - start_place)
            sure_start = tl.maximum(sure_start, high - FILTER[n][2] - start_place)
        if FILTER[n][3] >= 0:
            oldest = first - FILTER[n][3]
            clause_stop = tl.where(high < oldest, 0, clause_stop)
            sure_stop = tl.where(low < oldest, 0, sure_stop)
        if FILTER[n][7]:
            length = tl.load(lengths + b).to(tl.int32)
            clause_stop = tl.where(low >= length, 0, clause_stop)
            sure_stop = tl.where(high >= length, 0, sure_stop)
        if FILTER[n][9] > 0:
            clause_start = tl.maximum(clause_start, low + FILTER[n][9] - start_place)
            sure_start = tl.maximum(sure_start, high + FILTER[n][9] - start_place)
        start = tl.minimum(start, clause_start)
        stop = tl.maximum(stop, clause_stop)
    return start, stop, sure_start, sure_stop


@triton.jit
def _query_blocks(
    low, b, first, lengths, num_queries, num_keys, OWN: tl.constexpr, BLOCK: tl.constexpr,
    FILTER: tl.constexpr,
):  # fmt: skip
    """The blocks of queries that may see one of OWN keys from `low` on: [start, stop)."""
    high = tl.minimum(low + OWN, num_keys) - 1
    start, stop, _, _ = _query_range(
        low, high, b, first, lengths, num_keys - num_queries, num_queries, FILTER
    )
    start = tl.maximum(start, 0) // BLOCK * BLOCK
    return start, tl.maximum((stop + BLOCK - 1) // BLOCK * BLOCK, start)


@triton.jit
def _cut(
    start, stop, sure_start, sure_stop, part, parts, num_keys,
    BN: tl.constexpr, SPLIT: tl.constexpr, SIMPLE: tl.constexpr,
):  # fmt: skip
    """The range of `_key_range` in whole blocks of keys, within one part of the keys.

    [start, sure_start) and [sure_stop, stop) need a mask, [sure_start, sure_stop) does not.
    """
    start = tl.maximum(start, 0) // BN * BN
    if SPLIT:
        blocks = (num_keys + BN - 1) // BN
        start = tl.maximum(start, part * blocks // parts * BN)
        stop = tl.minimum(stop, (part + 1) * blocks // parts * BN)
    stop = tl.maximum(stop, start)
    if SIMPLE:
        sure_start = tl.minimum(tl.maximum((sure_start + BN - 1) // BN * BN, start), stop)
        sure_stop = tl.maximum(tl.minimum(sure_stop, stop) // BN * BN, sure_start)
    else:
        sure_start = stop
        sure_stop = stop
    return start, stop, sure_start, sure_stop
