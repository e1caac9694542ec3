"""Around a pass over keys that sums up gradients of queries, too: what it needs, and what it gives.

Programs that own keys add to the same queries, in an order that nobody knows. Sums of whole numbers
are the same in any order, so these gradients are summed in fixed point: each block of queries has a
power of two that takes whatever they can be below 2^30. Weights of a query add up to 1, so with delta
as in `triton_backward`

    |sum_j P_ij (<dO_i, v_j> - delta_i) k_j| <= max_j |k_j| (|dO_i| max_j |v_j| + |delta_i|)

with maxima over the keys that some query sees, and that are finite: a query that sees another has a
delta that is not, and a gradient, too. Sums lie [features, queries].
"""

import triton
import triton.language as tl

from .triton_backward import _reference, _store_queries
from .triton_kernels import _query_range, _row_of, _rows, _scale
from .triton_numbers import _form_deltas

# Places of a program, and of one bound.
PLACES = tl.constexpr(64)


@triton.jit
def _blocks(length):
    return (length + PLACES - 1) // PLACES


@triton.jit
def _most(squares, counts, other):
    """The largest norm of those that count; `other`: what one counts that is not finite."""
    squares = tl.where(squares < float("inf"), squares, other)
    return tl.sqrt(tl.max(tl.where(counts, squares, 0.0), 0))


@triton.jit
def _fixed(bound):
    """A power of two that takes what is at most `bound` below 2^30."""
    exponent = tl.maximum(bound.to(tl.int32, bitcast=True) >> 23, 29)
    return ((283 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bound(bounds, blocks, most_k, most_v):
    """What the gradients of a block of queries can be at most, of so many blocks."""
    return most_k * (tl.load(bounds) * most_v + tl.load(bounds + blocks))


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def before_sums(
    K0, V_, C0, LENGTHS, GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, BOUNDS, MOST, SUMS,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    E0: tl.constexpr, HAS_LSE: tl.constexpr, TOKENS: tl.constexpr, V: tl.constexpr,
    FILTER: tl.constexpr, HAS_LOW: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """delta, log_mass to the base 2, zeros for the sums, and what they can be at most.

    That is, for a block of queries the largest |dO| and |delta|, for one of keys the largest |k| and |v|.
    NORMS: numbers per key are -|k|^2 / 2.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block = tl.program_id(0)
    n = block * PLACES + tl.arange(0, PLACES)
    v = _rows(V_ + b * svb + (h // group_v) * svh, svt, n, dv, V, num_keys, True).to(tl.float32)
    if NORMS:
        col = C0 + b * scb0 + (h // gc0) * sch0
        squares = -2.0 * tl.load(col + n, mask=n < num_keys, other=0.0)
    else:
        k = _rows(K0 + b * skb0 + (h // group0) * skh0, skt0, n, e0, E0, num_keys, True)
        squares = tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
    grad, delta = _form_deltas(
        GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, bh, n, num_heads, num_queries, dv, V, HAS_LSE, HAS_LOW,
        TOKENS,
    )  # fmt: skip
    query_blocks, key_blocks = _blocks(num_queries), _blocks(num_keys)
    f = tl.arange(0, E0)[:, None]
    sums = SUMS + (bh.to(tl.int64) * E0 + f) * (query_blocks * PLACES) + n[None, :]
    tl.store(sums, tl.zeros((E0, PLACES), tl.int32), mask=n[None, :] < query_blocks * PLACES)
    bounds = BOUNDS + bh.to(tl.int64) * 2 * query_blocks + block
    inside, asked = n < num_queries, block < query_blocks
    tl.store(bounds, _most(tl.sum(grad * grad, 1), inside, float("inf")), mask=asked)
    tl.store(bounds + query_blocks, _most(delta * delta, inside, float("inf")), mask=asked)
    start, stop, _, _ = _query_range(
        n, n, b, first, LENGTHS, num_keys - num_queries, num_queries, FILTER
    )
    seen = (n < num_keys) & (tl.maximum(start, 0) < tl.minimum(stop, num_queries))
    most = MOST + bh.to(tl.int64) * 2 * key_blocks + block
    tl.store(most, _most(squares, seen, 0.0), mask=block < key_blocks)
    tl.store(most + key_blocks, _most(tl.sum(v * v, 1), seen, 0.0), mask=block < key_blocks)


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def after_sums(
    SUMS, S0, C0, GRAD_LSE, LSE2, BOUNDS, MOST, DQ0, DS0,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    E0: tl.constexpr, HAS_LSE: tl.constexpr, TOKENS: tl.constexpr, MODE0: tl.constexpr,
    LOG0: tl.constexpr, HAS_COL0: tl.constexpr, WANT0: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, and dscale, but for what the keys have of it: see `_multiply`."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block = tl.program_id(0)
    n = block * PLACES + tl.arange(0, PLACES)
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    blocks = _blocks(num_queries)
    f = tl.arange(0, E0)[:, None]
    whole = tl.load(SUMS + (bh.to(tl.int64) * E0 + f) * (blocks * PLACES) + n[None, :])
    bounds = BOUNDS + bh.to(tl.int64) * 2 * blocks + block
    tiles, part = _blocks(num_keys), tl.arange(0, ROOM)
    most = MOST + bh.to(tl.int64) * 2 * tiles + part
    most_k = tl.max(tl.load(most, mask=part < tiles, other=0.0), 0)
    most_v = tl.max(tl.load(most + tiles, mask=part < tiles, other=0.0), 0)
    bound = _bound(bounds, blocks, most_k, most_v)
    dq0 = tl.trans(whole.to(tl.float32) * (1.0 / _fixed(bound)))
    dq0 = tl.where(bound < float("inf"), dq0, float("nan"))
    scale0 = _scale(S0, number0, ss0, h, line, n, inside, MODE0, LOG0)
    ref0 = _reference(C0 + b * scb0 + (h // gc0) * sch0, WANT0 and HAS_COL0 and MODE0 > 0)
    none = tl.zeros((PLACES,), tl.float32)
    moved = none
    if HAS_LSE:
        lse2 = tl.load(LSE2 + line + n, mask=inside, other=float("inf"))
        moved = tl.load(GRAD_LSE + line + n, mask=inside & (lse2 < float("inf")), other=0.0)
    sums = line + bh.to(tl.int64) * num_keys
    rows = _row_of(b, h, n.to(tl.int64), line, num_heads, num_queries, TOKENS)
    if WANT0:
        tl.store(DS0 + sums + n, ref0 * moved, mask=inside)
    _store_queries(
        dq0, none, none, dq0, none, scale0, none, DQ0, DS0, DS0, line, sums, rows, n, num_queries, e0, E0, MODE0,
        0, False, False, False, False, False,
    )  # fmt: skip
