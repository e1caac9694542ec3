"""Few queries where the sequences of a batch have the keys of the second slot in common, such as places.

A program has some sequences at once, and what they share comes to it once from the cache: with two, the cache gives a
sixth less than to programs of one sequence each.
"""

import triton
import triton.language as tl

from .forward import (
    LOG2E,
    _below,
    _block,
    _column,
    _cut,
    _finished,
    _head,
    _key_range,
    _numbers_of,
    _rows,
    _spared,
    _visible,
)


@triton.jit
def _add(acc, mass, peak, t, values, seen, rate, MASK: tl.constexpr, PRECISION: tl.constexpr):
    """A block of keys: the running sums of values, mass and peak of one sequence."""
    if MASK:
        values, t = _spared(values, t)
        t = tl.where(seen, t, float("-inf"))
    higher = tl.maximum(peak, tl.max(t, 1) * rate)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(t * rate - base[:, None])
    shrink = tl.exp2(peak - base)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, mass * shrink + tl.sum(p, 1), higher


@triton.jit
def _span(
    acc, mass, peak, start, stop, q0, q1, k0, k1, v, col, sequence, i, h0, h1, hv, rate, lengths, ids, stride_ids, first,
    num_keys, skb0, skt0, skb1, skt1, svb, svt, e0, e1, dv,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, HAS_COL: tl.constexpr, FILTER: tl.constexpr,
    MASK: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop, of all sequences."""
    CHECK: tl.constexpr = MASK or not EVEN
    for first_key in tl.range(start, stop, BN):
        j = first_key + tl.arange(0, BN)
        other = _block(k1, 0, h1, skb1, skt1, first_key, e1, num_keys, BN, E1, CHECK, TMA)
        shared = tl.dot(q1, tl.trans(other), input_precision=PRECISION)
        accs, masses, peaks = (), (), ()
        for s in tl.static_range(COUNT):
            k = _block(
                k0[s], sequence[s], h0, skb0, skt0, first_key, e0, num_keys, BN, E0, CHECK, TMA
            )
            values = _block(
                v[s], sequence[s], hv, svb, svt, first_key, dv, num_keys, BN, V, CHECK, TMA
            )
            t = tl.dot(q0[s], tl.trans(k), shared, input_precision=PRECISION)
            if HAS_COL:
                t += _below(_numbers_of(col[s], first_key, num_keys, BN, HAS_COL), HAS_COL)
            seen = j[None, :] >= 0
            if MASK:
                seen = _visible(
                    i[:, None], j[None, :], sequence[s], first, lengths, ids, stride_ids, num_keys, FILTER
                )  # fmt: skip
            a, m, top = _add(acc[s], mass[s], peak[s], t, values, seen, rate, MASK, PRECISION)
            accs += (a,)
            masses += (m,)
            peaks += (top,)
        acc, mass, peak = accs, masses, peaks
    return acc, mass, peak


@triton.jit(do_not_specialize=["num_heads", "first", "seed", "batch"])
def forward_shared(
    Q0, K0, Q1, K1, V_, C0, LENGTHS, IDS, OUT, LSE,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, batch,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, HAS_COL0: tl.constexpr, FILTER: tl.constexpr,
    SIMPLE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    COUNT: tl.constexpr, SPLIT: tl.constexpr, TMA: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """out and log_mass of COUNT sequences over one part of the keys; the scores are one dot product.

    Where sequences do not come out even, the last is done again, and gives the same.
    """
    some, h = tl.program_id(0) // num_heads, (tl.program_id(0) % num_heads).to(tl.int64)
    n = tl.arange(0, BM)
    low, high = num_keys - num_queries, num_keys - 1
    if GROUPED:
        low = high
    i = tl.minimum(n + low, high)
    h0, h1, hv = h // group0, h // group1, h // group_v
    q1 = _rows(Q1 + h * sqh1, sqt1, n, e1, E1, num_queries, True)
    k1 = _head(K1, 0, h1, skb1, skh1, TMA)
    start, stop, sure_start, sure_stop = num_keys, 0, 0, num_keys
    heads = h * num_queries + tl.minimum(n, num_queries - 1)
    sequence, q0, k0, v, col, acc, mass, peak = (), (), (), (), (), (), (), ()
    for s in tl.static_range(COUNT):
        b = tl.minimum(some * COUNT + s, batch - 1).to(tl.int64)
        begin, end, sure_begin, sure_end = _key_range(
            low, high, b, first, LENGTHS, num_keys, FILTER
        )
        start, stop = tl.minimum(start, begin), tl.maximum(stop, end)
        sure_start, sure_stop = tl.maximum(sure_start, sure_begin), tl.minimum(sure_stop, sure_end)
        sequence += (b,)
        q0 += (_rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, E0, num_queries, True),)
        k0 += (_head(K0, b, h0, skb0, skh0, TMA),)
        v += (_head(V_, b, hv, svb, svh, TMA),)
        col += (_column(C0 + b * scb0, h, heads, gc0, sch0, HAS_COL0),)
        acc += (tl.zeros((BM, V), tl.float32),)
        mass += (tl.zeros((BM,), tl.float32),)
        peak += (tl.full((BM,), float("-inf"), tl.float32),)
    start, stop, sure_start, sure_stop = _cut(
        start, stop, sure_start, sure_stop, tl.program_id(1), tl.num_programs(1), num_keys, BN, SPLIT,
        SIMPLE,
    )  # fmt: skip
    rate = number0 * LOG2E
    for span in tl.static_range(3):
        # In turn: masked, seen by all, masked.
        if span == 0:
            first_key, last_key = start, sure_start
        elif span == 1:
            first_key, last_key = sure_start, sure_stop
        else:
            first_key, last_key = sure_stop, stop
        if SIMPLE or span == 0:
            acc, mass, peak = _span(
                acc, mass, peak, first_key, last_key, q0, q1, k0, k1, v, col, sequence, i, h0, h1, hv, rate,
                LENGTHS, IDS, stride_ids, first, num_keys, skb0, skt0, skb1, skt1, svb, svt, e0, e1, dv,
                E0, E1, V, HAS_COL0, FILTER, span != 1, EVEN, PRECISION, BN, COUNT, TMA,
            )  # fmt: skip
    e = tl.arange(0, V)
    inside = n < num_queries
    for s in tl.static_range(COUNT):
        out, lse = _finished(acc[s], mass[s], peak[s])
        line = ((tl.program_id(1) * batch + sequence[s]) * num_heads + h) * num_queries + n
        mask = inside[:, None] & (e < dv)[None, :]
        tl.store(OUT + line[:, None] * dv + e[None, :], out.to(OUT.dtype.element_ty), mask=mask)
        tl.store(LSE + line, lse, mask=inside)
