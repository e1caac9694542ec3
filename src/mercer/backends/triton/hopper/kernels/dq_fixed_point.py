"""The kernels before and after a pass over keys that also sums dq.

Programs that own keys add to the same queries in an unknown order. Integer sums are the same in any
order, so dq is summed in fixed point: each block of queries has a power of two that scales its largest
possible gradient below 2^30. The weights of a query add up to 1, so with delta as in gradients.py

    |sum_j P_ij (<dO_i, v_j> - delta_i) k_j| <= max_j |k_j| (|dO_i| max_j |v_j| + |delta_i|)

with maxima over finite keys that some query sees. A query that sees a key that is not finite has a delta
and a gradient that are not finite anyway. The sums are laid out [features, queries]. Numbers per key that
are norms, relative to one of them, are at most |k|^2 / 2. So their sums, for a scale of each query, have
the same bound times max_j |k_j|.
"""

import triton
import triton.language as tl

from ...kernels.backward_queries import _store_queries
from ...kernels.gradients import _reference
from ...kernels.norms import _form_deltas, _of_head, _store_scale
from ...kernels.primitives import _row_of, _rows
from ...kernels.scores import _scale
from ...kernels.visibility import _query_range

# Places of a program, and places with a common bound.
PLACES = tl.constexpr(64)
# Numbers that the program that sums over a head takes at a time.
AT_ONCE = tl.constexpr(1024)


@triton.jit
def _blocks(length):
    return (length + PLACES - 1) // PLACES


@triton.jit
def _most(squares, counts, other):
    """The largest norm where the mask is set; `other` replaces norms that are not finite."""
    squares = tl.where(squares < float("inf"), squares, other)
    return tl.sqrt(tl.max(tl.where(counts, squares, 0.0), 0))


@triton.jit
def _fixed(bound):
    """A power of two that scales `bound` below 2^30."""
    exponent = tl.maximum(bound.to(tl.int32, bitcast=True) >> 23, 29)
    return ((283 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _bound(bounds, blocks, most_k, most_v):
    """The largest possible dq of a block of queries."""
    return most_k * (tl.load(bounds) * most_v + tl.load(bounds + blocks))


@triton.jit
def _reference_within(base, most_k):
    """The reference of norms: -|k|^2 / 2 of the first key; half of the least if no visible key reaches it."""
    ref = _reference(base, True)
    least = -0.5 * most_k * most_k
    return tl.where(ref < least, 0.5 * least, ref)


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def before_sums(
    K0, V_, C0, LENGTHS, GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, COUNTERS, BOUNDS, MOST, SHARES,
    SUMS, sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    E0: tl.constexpr, HAS_LSE: tl.constexpr, TOKENS: tl.constexpr, V: tl.constexpr,
    FILTER: tl.constexpr, HAS_LOW: tl.constexpr, NORMS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """delta, log_mass to the base 2, zeros for the sums, and the maxima for their bounds.

    The maxima are |dO| and |delta| for blocks of queries, then |k| and |v| for blocks of keys. NORMS:
    numbers per key are -|k|^2 / 2. EACH: each query has a scale, whose gradient is summed, too.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    query_blocks, key_blocks = _blocks(num_queries), _blocks(num_keys)
    block = tl.program_id(0)
    if block < query_blocks:
        n = block * PLACES + tl.arange(0, PLACES)
        f = tl.arange(0, E0)[:, None]
        sums = SUMS + (bh.to(tl.int64) * E0 + f) * (query_blocks * PLACES) + n[None, :]
        tl.store(sums, tl.zeros((E0, PLACES), tl.int32))
        if EACH:
            tl.store(
                SHARES + bh.to(tl.int64) * query_blocks * PLACES + n, tl.zeros((PLACES,), tl.int32)
            )
        grad, delta = _form_deltas(
            GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, COUNTERS, bh, n, num_heads, num_queries, dv, V, HAS_LSE,
            HAS_LOW, TOKENS,
        )  # fmt: skip
        bounds = BOUNDS + bh.to(tl.int64) * 2 * query_blocks + block
        inside = n < num_queries
        tl.store(bounds, _most(tl.sum(grad * grad, 1), inside, float("inf")))
        tl.store(bounds + query_blocks, _most(delta * delta, inside, float("inf")))
    else:
        block -= query_blocks
        n = block * PLACES + tl.arange(0, PLACES)
        if NORMS:
            col = C0 + b * scb0 + (h // gc0) * sch0
            squares = -2.0 * tl.load(col + n, mask=n < num_keys, other=0.0)
        else:
            k = _rows(K0 + b * skb0 + (h // group0) * skh0, skt0, n, e0, E0, num_keys, True)
            squares = tl.sum(k.to(tl.float32) * k.to(tl.float32), 1)
        start, stop, _, _ = _query_range(
            n, n, b, first, LENGTHS, num_keys - num_queries, num_queries, FILTER
        )
        seen = (n < num_keys) & (tl.maximum(start, 0) < tl.minimum(stop, num_queries))
        most = MOST + bh.to(tl.int64) * 2 * key_blocks + block
        tl.store(most, _most(squares, seen, 0.0))
        v = _rows(V_ + b * svb + (h // group_v) * svh, svt, n, dv, V, num_keys, True)
        tl.store(
            most + key_blocks, _most(tl.sum(v.to(tl.float32) * v.to(tl.float32), 1), seen, 0.0)
        )


@triton.jit
def _scale_of(
    C0, GRAD_LSE, LSE2, DS0, h, scb0, sch0, gc0, num_heads, num_queries, num_keys,
    HAS_LSE: tl.constexpr, COMMON: tl.constexpr,
):  # fmt: skip
    """dscale of a head: the parts of all keys, and that of dlog_mass. COMMON: there are numbers per key."""
    batch = tl.num_programs(1) // num_heads
    total = _of_head(
        DS0, h, batch, num_heads, num_queries + num_keys, num_queries, num_keys, AT_ONCE
    )
    if HAS_LSE and COMMON:
        for b in range(batch):
            line = (b * num_heads + h) * num_queries
            moved = tl.zeros((AT_ONCE,), tl.float32)
            for start in range(0, num_queries, AT_ONCE):
                n = start + tl.arange(0, AT_ONCE)
                lse2 = tl.load(LSE2 + line + n, mask=n < num_queries, other=float("inf"))
                moved += tl.load(GRAD_LSE + line + n, mask=lse2 < float("inf"), other=0.0)
            ref0 = _reference(C0 + b * scb0 + (h // gc0) * sch0, True)
            total += ref0 * tl.sum(moved, 0)
    return total


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def after_sums(
    SUMS, SHARES, Q0, S0, C0, GRAD_LSE, LSE2, BOUNDS, MOST, DS0, DSCALE, DQ0,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    E0: tl.constexpr, HAS_LSE: tl.constexpr, TOKENS: tl.constexpr, MODE0: tl.constexpr,
    LOG0: tl.constexpr, HAS_COL0: tl.constexpr, EACH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries; the program after a head's last block, if there is one, forms dscale.

    The keys' part of dscale is in DS0 (see `_multiply`). EACH: DS0 is for the scale of each query.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block, blocks = tl.program_id(0), _blocks(num_queries)
    if block < blocks:
        n = block * PLACES + tl.arange(0, PLACES)
        line = bh.to(tl.int64) * num_queries
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
        scale0 = _scale(S0, number0, ss0, h, line, n, n < num_queries, MODE0, LOG0)
        rows = _row_of(b, h, n.to(tl.int64), line, num_heads, num_queries, TOKENS)
        none = tl.zeros((PLACES,), tl.float32)
        q0, ds0, common = dq0, none, none
        if EACH:
            inside = n < num_queries
            q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, E0, num_queries, True)
            shares = tl.load(SHARES + bh.to(tl.int64) * blocks * PLACES + n)
            ds0 = shares.to(tl.float32) * (1.0 / _fixed(bound * most_k))
            if HAS_LSE:
                lse2 = tl.load(LSE2 + line + n, mask=inside, other=float("inf"))
                moved = tl.load(GRAD_LSE + line + n, mask=inside & (lse2 < float("inf")), other=0.0)
                common = moved * _reference_within(C0 + b * scb0 + (h // gc0) * sch0, most_k)
        sums = line + bh.to(tl.int64) * num_keys
        _store_queries(
            dq0, ds0, none, q0, none, scale0, common, DQ0, DS0, DS0, line, sums, rows, n, num_queries, e0, E0,
            MODE0, 0, False, False, EACH, False, False,
        )  # fmt: skip
    elif bh < num_heads:
        total = _scale_of(
            C0, GRAD_LSE, LSE2, DS0, h, scb0, sch0, gc0, num_heads, num_queries, num_keys, HAS_LSE, HAS_COL0
        )  # fmt: skip
        _store_scale(total, S0, DSCALE, h, ss0, LOG0)
