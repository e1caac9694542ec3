"""Gradients from the pairs that the pass over keys has stored: plain products, no weights.

Pairs are [keys, queries] in half precision, for the heads from an offset on, with queries counted from the
first block that sees one of TILE keys. Hidden pairs are zero, and blocks that are all hidden are not read.
"""

import triton
import triton.language as tl

from ...kernels.backward_queries import _store_queries
from ...kernels.gradients import _of_columns, _reference
from ...kernels.primitives import COLUMNS, _block, _row_of, _rows
from ...kernels.scores import _scale
from ...kernels.visibility import _key_range, _query_blocks

# Keys whose pairs are adjacent in memory: those of one program of the pass over keys. And queries that
# `stored_to_queries` takes at a time: a key's pairs begin and end with whole blocks of these.
TILE, TOGETHER = tl.constexpr(128), tl.constexpr(128)


@triton.jit
def _seen_keys(
    block, b, first, lengths, num_queries, num_keys, BM: tl.constexpr, FILTER: tl.constexpr
):
    """The keys that a block of queries may see; none if there is no such block."""
    low = block * BM
    place = num_keys - num_queries
    high = tl.minimum(low + BM, num_queries) - 1 + place
    start, stop, _, _ = _key_range(low + place, high, b, first, lengths, num_keys, FILTER)
    return tl.maximum(start, 0), tl.where(low < num_queries, stop, 0)


@triton.jit(do_not_specialize=["num_heads", "first", "seed", "offset"])
def stored_to_queries(
    PAIRS, K0, K1, Q0, S0, C0, LENGTHS, GRAD_LSE, LSE2, DQ0, DQ1, DS0,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, offset,
    E0: tl.constexpr, E1: tl.constexpr, MODE0: tl.constexpr, LOG0: tl.constexpr,
    HAS_COL0: tl.constexpr, FILTER: tl.constexpr, NORM0: tl.constexpr, WANT0: tl.constexpr,
    HAS_LSE: tl.constexpr, BY_KEYS: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq and dscale of one block of queries; BY_KEYS: dscale comes from keys, and queries are not read."""
    part = tl.program_id(1)
    bh = part + offset
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    none = tl.zeros((BM,), tl.float32)
    # The gradient of a query's scale needs the numbers per key.
    EACH: tl.constexpr = WANT0 and MODE0 == 2 and HAS_COL0
    dq0 = tl.zeros((BM, E0), tl.float32)
    dq1 = tl.zeros((BM, E1 if E1 > 0 else COLUMNS), tl.float32)
    start, stop = _seen_keys(block, b, first, LENGTHS, num_queries, num_keys, BM, FILTER)
    start = start // BN * BN
    h0, h1 = h // group0, h // group1
    for key in tl.range(start, stop, BN):
        tile = key // TILE * TILE
        origin, _ = _query_blocks(
            tile, b, first, LENGTHS, num_queries, num_keys, TILE, TOGETHER, FILTER
        )
        u = tl.trans(PAIRS.load([0, part, key, block * BM - origin]).reshape(BN, BM))
        k = _block(K0, b, h0, skb0, skt0, key, e0, num_keys, BN, E0, False, True)
        dq0 = tl.dot(u, k, dq0)
        if E1 > 0:
            k = _block(K1, b, h1, skb1, skt1, key, e1, num_keys, BN, E1, False, True)
            dq1 = tl.dot(u, k, dq1)
        elif EACH:
            k = _block(K1, b, h1, skb1, skt1, key, 16, num_keys, BN, COLUMNS, False, True)
            dq1 = tl.dot(u, k, dq1)
    scale0 = _scale(S0, number0, ss0, h, line, n, inside, MODE0, LOG0)
    ref0 = _reference(C0 + b * scb0 + (h // gc0) * sch0, WANT0 and HAS_COL0 and MODE0 > 0)
    moved = none
    if HAS_LSE:
        lse2 = tl.load(LSE2 + line + n, mask=inside, other=float("inf"))
        moved = tl.load(GRAD_LSE + line + n, mask=inside & (lse2 < float("inf")), other=0.0)
    ds0 = none
    if EACH:
        ds0 += _of_columns(dq1, ref0)
    sums = line + bh.to(tl.int64) * num_keys
    rows = _row_of(b, h, n.to(tl.int64), line, num_heads, num_queries, TOKENS)
    q0 = dq0
    if not BY_KEYS:
        q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, E0, num_queries, True)
    _store_queries(
        dq0, ds0, none, q0, none, scale0, ref0 * moved, DQ0, DS0, DS0, line, sums, rows, n, num_queries, e0,
        E0, MODE0, 0, NORM0, False, WANT0 and not BY_KEYS, False, False,
    )  # fmt: skip
    if E1 > 0:
        _store_queries(
            dq1, none, none, q0, none, scale0, none, DQ1, DS0, DS0, line, sums, rows, n, num_queries, e1, E1,
            MODE0, 0, False, False, False, False, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_heads", "first", "seed", "offset"])
def stored_to_keys(
    PAIRS, Q1, LENGTHS, DK1,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, offset,
    E1: tl.constexpr, FILTER: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk of the second slot, of one block of keys."""
    part = tl.program_id(1)
    bh = part + offset
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    low = tl.program_id(0) * BN
    origin, stop = _query_blocks(
        low, b, first, LENGTHS, num_queries, num_keys, BN, TOGETHER, FILTER
    )
    dk = tl.zeros((BN, E1), tl.float32)
    for query in tl.range(origin, stop, BM):
        u = PAIRS.load([0, part, low, query - origin]).reshape(BN, BM)
        q = _block(Q1, b, h, sqb1, sqt1, query, e1, num_queries, BM, E1, False, True)
        dk = tl.dot(u, q, dk)
    j = low + tl.arange(0, BN)
    rows = _row_of(b, h, j.to(tl.int64), bh.to(tl.int64) * num_keys, num_heads, num_keys, TOKENS)
    e = tl.arange(0, E1)
    mask = (j < num_keys)[:, None] & (e < e1)[None, :]
    dk = (dk * number0).to(DK1.dtype.element_ty)
    tl.store(DK1 + rows[:, None] * e1 + e[None, :], dk, mask=mask)
