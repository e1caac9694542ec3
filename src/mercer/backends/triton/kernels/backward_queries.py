"""The backward by blocks of queries: dq, dscale, drow and the gradient of a band. See gradients.py.

It runs first and forms delta, which the pass over keys reads.
"""

import triton
import triton.language as tl

from .bands import (
    BLOCKS,
    PAIRS,
    _band_at,
    _band_block,
    _band_start,
    _empty_span,
    _form,
    _of_keys,
    _strict,
)
from .gradients import _grad, _reference, _store, _weights
from .primitives import (
    _block,
    _delta,
    _exactly,
    _head,
    _held,
    _kept,
    _no_tickets,
    _numbers,
    _row_of,
    _rows,
)
from .scores import FLAT, IDENTITY, POLY, _down, _scale
from .visibility import _cut, _key_range, _visible


@triton.jit
def _queries_span(
    dq0, dq1, ds0, ds1, dr0, dr1, inner, later, earlier, start, stop, q0, q1, grad, scale0,
    scale1, row0, row1, half0, half1, ref0, ref1, rate, lse2, delta, k0, k1, v, col0, col1, band, tiles, dband, begin, lengths, ids,
    i, n, b, bh, h, h0, h1, hv, first_query, first, num_queries, num_keys, seed, dropout, skb0, skt0, skb1, skt1,
    svb, svt, stride_ids, stb, width, e0, e1, dv,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, V: tl.constexpr, TABLE: tl.constexpr,
    BIAS: tl.constexpr, FILTER: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr,
    MASK: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, TMA: tl.constexpr,
    STEADY0: tl.constexpr, STEADY1: tl.constexpr, EVENED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop, for dq and what belongs to a query.

    STEADY0, STEADY1: `inner` is sum_j P g, and `later` or `earlier` is sum_j dP/ds x of that slot,
    for x = s / scale. EVENED: dr0 (1) or dr1 (2) is sum_j P g, also without numbers per query.
    """
    CHECK: tl.constexpr = MASK or not EVEN
    # The gradient of a scale of each query needs the numbers per key.
    EACH: tl.constexpr = SLOT0.wants and SLOT0.mode == 2 and SLOT0.link == IDENTITY
    next0, next1 = lse2, lse2
    if SLOT0.col:
        next0 = _numbers(col0, start, num_keys, BN)
    if SLOT1.col:
        next1 = _numbers(col1, start, num_keys, BN)
    for first_key in tl.range(start, stop, BN):
        j = first_key + tl.arange(0, BN)
        kb0 = _block(k0, b, h0, skb0, skt0, first_key, e0, num_keys, BN, SLOT0.width, CHECK, TMA)
        t0 = tl.dot(q0, tl.trans(kb0), input_precision=PRECISION)
        t1 = t0
        if SLOT1.width > 0:
            kb1 = _block(
                k1, b, h1, skb1, skt1, first_key, e1, num_keys, BN, SLOT1.width, CHECK, TMA
            )
            if SAME:
                t0 = tl.dot(q1, tl.trans(kb1), t0, input_precision=PRECISION)
            else:
                t1 = tl.dot(q1, tl.trans(kb1), input_precision=PRECISION)
        values = _block(v, b, hv, svb, svt, first_key, dv, num_keys, BN, V, CHECK, TMA)
        if TABLE.clip < 0:
            # Started before the weights are formed, to overlap with them.
            dp = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        if SLOT0.col:
            c0 = next0[None, :]
            t0 += c0
            next0 = _numbers(col0, first_key + BN, num_keys, BN)
        if SLOT1.col:
            c1 = next1[None, :]
            t1 += c1
            next1 = _numbers(col1, first_key + BN, num_keys, BN)
        bias = 0.0
        if BIAS == BLOCKS:
            bias = _band_block(
                band, tiles, b, h, stb, n, first_query, first_key - begin, num_queries, width, BM, BN,
                TABLE.tiled,
            )  # fmt: skip
        elif BIAS == PAIRS:
            bias = _band_at(band, n[:, None], j[None, :], num_queries, width, begin)
        seen = j[None, :] >= 0
        if MASK:
            seen = _visible(
                i[:, None], j[None, :], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
        p, pull0, pull1 = _weights(
            t0, t1, _down(scale0, SLOT0.mode), _down(scale1, SLOT1.mode), row0[:, None], row1[:, None], bias,
            lse2[:, None], rate[:, None], seen, SLOT0, SLOT1, BIAS, MASK, FORM, SAME,
        )  # fmt: skip
        if TABLE.clip >= 0:
            dp = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
        if DROPOUT:
            kept = _kept(seed, bh, n[:, None], j[None, :], num_queries, num_keys, dropout)
            dp = tl.where(kept, dp, 0.0) / (1.0 - dropout)
        g = dp - delta[:, None]
        if MASK:
            g = tl.where(seen, g, 0.0)
        u0 = g * pull0
        dq0 = tl.dot(u0.to(kb0.dtype), kb0, dq0, input_precision=PRECISION)
        if SLOT0.row or EVENED == 1:
            dr0 += tl.sum(u0, 1)
        if STEADY0 or STEADY1:
            inner += tl.sum(g * p, 1)
        if STEADY0:
            x = t0 + half0[:, None]
            ds0 += tl.sum(u0 * x, 1)
            later += tl.sum(pull0 * x, 1)
        elif SLOT0.wants and SLOT0.link != IDENTITY:
            ds0 += tl.sum(u0 * t0, 1)
        elif EACH and SLOT0.col:
            ds0 += tl.sum(u0 * (c0 - ref0), 1)
        if SLOT1.width > 0:
            u1 = u0
            if not SAME:
                u1 = g * pull1
            dq1 = tl.dot(u1.to(kb1.dtype), kb1, dq1, input_precision=PRECISION)
            if SLOT1.row or EVENED == 2:
                dr1 += tl.sum(u1, 1)
            if STEADY1:
                x = t1 + half1[:, None]
                ds1 += tl.sum(u1 * x, 1)
                earlier += tl.sum(pull1 * x, 1)
            elif SLOT1.wants and SLOT1.link != IDENTITY:
                ds1 += tl.sum(u1 * t1, 1)
            elif SLOT1.wants and SLOT1.col and SLOT1.mode == 2:
                ds1 += tl.sum(u1 * (c1 - ref1), 1)
        if BIAS >= BLOCKS:
            after = j[None, :] - i[:, None]
            dlog = g * p
            if not _strict(FILTER, TABLE.clip):
                inner += tl.sum(tl.where(after > -TABLE.clip, dlog, 0.0), 1)
                if not CUT:
                    later += tl.sum(tl.where(after <= -TABLE.clip, dlog, 0.0), 1)
            elif CUT:
                inner += tl.sum(dlog, 1)
            # Every pair in a band has its own place: a store, no sum. Pairs out of reach are not read.
            if not TABLE.sided:
                earlier += tl.sum(tl.where(after >= TABLE.clip, dlog, 0.0), 1)
            dlog = dlog.to(kb0.dtype)
            if TABLE.tiled:
                column = first_key - begin
                at = [b.to(tl.int32), h.to(tl.int32), first_query, column]
                tile = dlog.reshape(1, 1, BM, BN)
                if BIAS == BLOCKS or (column >= 0) & (column < width):
                    dband.store(at, tile)
            else:
                c = j[None, :] - begin
                owned = (n[:, None] < num_queries) & (c >= 0) & (c < width)
                tl.store(dband + n[:, None].to(tl.int64) * width + c, dlog, mask=owned)
    return dq0, dq1, ds0, ds1, dr0, dr1, inner, later, earlier


@triton.jit
def _store_queries(
    dq, ds, dr, q, row, scale, common, DQ, DS, DR, line, sums, rows, n, num_queries, width,
    WIDTH: tl.constexpr, MODE: tl.constexpr, LINK: tl.constexpr, NORM: tl.constexpr,
    HAS_ROW: tl.constexpr, WANT: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store dq, dscale and drow. The sums come without the scale. WHOLE: ds is complete."""
    inside = n < num_queries
    wide = q.to(tl.float32)
    if WANT:
        if LINK == IDENTITY:
            ds += tl.sum(wide * dq, 1) + common
        if NORM and HAS_ROW and not WHOLE:
            ds += dr * row / scale
        _store(DS + sums + n, ds, inside, ADD)
    dq = dq * _down(scale, MODE)
    if HAS_ROW:
        if NORM:
            dq -= (dr * scale)[:, None] * wide
        else:
            _store(DR + line + n, dr, inside, ADD)
    e = tl.arange(0, WIDTH)
    target = DQ + rows[:, None] * width + e[None, :]
    _store(target, dq, inside[:, None] & (e[None, :] < width), ADD)


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def backward_queries(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, BAND, TILES, LENGTHS, IDS, GRAD, LSE2, DELTA, GRAD_LSE,
    COUNTERS, OUT, LOW, LSE, DQ0, DQ1, DS0, DS1, DR0, DR1, DBAND, ENDS,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, V: tl.constexpr, TABLE: tl.constexpr,
    FILTER: tl.constexpr, SIMPLE: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr, TOKENS: tl.constexpr,
    ADD: tl.constexpr, HELD: tl.constexpr, CUT: tl.constexpr, HAS_LSE: tl.constexpr,
    FIRST: tl.constexpr, HAS_LOW: tl.constexpr,
):  # fmt: skip
    """dq, dscale, drow and the gradient of a band, of one block of queries.

    CUT: keys beyond the table's reach are left to another pass, which ADDs its share. FIRST: no pass
    has formed delta and log_mass to the base 2 before.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    i = n + place
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    none = tl.zeros((BM,), tl.float32)
    q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, SLOT0.width, num_queries, True)
    grad_head, sgt = _grad(GRAD, b, h, line, num_heads, num_queries, dv, False, TOKENS)
    grad = _rows(grad_head, sgt, n, dv, V, num_queries, True)
    rows = _row_of(b, h, n.to(tl.int64), line, num_heads, num_queries, TOKENS)
    # All single loads are issued before the first is used.
    if FIRST:
        e = tl.arange(0, V)
        mask = inside[:, None] & (e[None, :] < dv)
        out = _exactly(OUT, LOW, rows[:, None] * dv + e[None, :], mask, HAS_LOW)
        _no_tickets(COUNTERS, bh)
        delta, lse2 = _delta(grad.to(tl.float32), out, GRAD_LSE, LSE, line + n, inside, HAS_LSE)
    if HELD & 1:
        q0 = _held(q0, SLOT0.width, PRECISION)
    if HELD & 2:
        grad = _held(grad, V, PRECISION)
    scale0 = _scale(S0, number0, ss0, h, line, n, inside, SLOT0.mode, SLOT0.log)
    row0 = tl.load(R0 + line + n, mask=inside, other=0.0) if SLOT0.row else none
    if FIRST:
        tl.store(DELTA + line + n, delta, mask=inside)
        tl.store(LSE2 + line + n, lse2, mask=inside)
    else:
        delta = tl.load(DELTA + line + n, mask=inside, other=0.0)
        lse2 = tl.load(LSE2 + line + n, mask=inside, other=float("inf"))
    rate = none
    if FORM == POLY:
        rate = scale0 * tl.exp2(-lse2 / SLOT0.param)
    elif FORM == FLAT:
        rate = tl.exp2(-lse2)
    q1, scale1, row1 = q0, scale0, none
    dq1 = tl.zeros((BM, 16), tl.float32)
    if SLOT1.width > 0:
        q1 = _rows(Q1 + b * sqb1 + h * sqh1, sqt1, n, e1, SLOT1.width, num_queries, True)
        if HELD & 4:
            q1 = _held(q1, SLOT1.width, PRECISION)
        scale1 = _scale(S1, number1, ss1, h, line, n, inside, SLOT1.mode, SLOT1.log)
        row1 = tl.load(R1 + line + n, mask=inside, other=0.0) if SLOT1.row else none
        dq1 = tl.zeros((BM, SLOT1.width), tl.float32)
    h0, h1, hv = h // group0, h // group1, h // group_v
    k0 = _head(K0, b, h0, skb0, skh0, TMA)
    k1 = _head(K1, b, h1, skb1, skh1, TMA and SLOT1.width > 0)
    v = _head(V_, b, hv, svb, svh, TMA)
    col0 = C0 + b * scb0 + (h // gc0) * sch0
    col1 = C1 + b * scb1 + (h // gc1) * sch1
    band, dband, begin = BAND, DBAND, 0
    far = none
    if TABLE.clip >= 0:
        band = BAND + b * stb + h * sth
        if not TABLE.tiled:
            dband = DBAND + line * width
        begin = tl.multiple_of(_band_start(block * BM, place, num_keys, width, TABLE.clip), 16)
        far = tl.load(band + n.to(tl.int64) * width, mask=inside, other=0.0).to(tl.float32)
    # Weights were rounded for O, so <dO, O> is not exactly sum_j P dP. In the gradient of a link's scale
    # large sums cancel, so the difference is subtracted.
    STEADY0: tl.constexpr = (
        SLOT0.wants and SLOT0.link != IDENTITY and FORM != POLY and TABLE.clip < 0
    )
    STEADY1: tl.constexpr = (
        SLOT1.width > 0 and SLOT1.wants and SLOT1.link != IDENTITY and TABLE.clip < 0
    )
    # Large sums cancel also in the gradient of numbers per key, as of places times a slope. So do those
    # of a far key, if each query has its own scale; in float32 that must be exact. Then the pass over
    # keys gets sum_j P dP itself.
    EACH: tl.constexpr = (
        SLOT0.wants and SLOT0.mode == 2 and SLOT0.link == IDENTITY and TABLE.clip < 0
    )
    FIRST_SUM: tl.constexpr = SLOT0.saves or (EACH and PRECISION == "ieee")
    SECOND_SUM: tl.constexpr = SLOT1.width > 0 and SLOT1.saves
    EVENED: tl.constexpr = (1 if FIRST_SUM else 2 if SECOND_SUM else 0) if FIRST else 0
    half0, half1 = none, none
    if STEADY0 and SLOT0.norm:
        half0 = -0.5 * tl.sum(q0.to(tl.float32) * q0.to(tl.float32), 1)
    if STEADY1 and SLOT1.norm:
        half1 = -0.5 * tl.sum(q1.to(tl.float32) * q1.to(tl.float32), 1)
    ref0 = _reference(col0, SLOT0.wants and SLOT0.col and SLOT0.link == IDENTITY and SLOT0.mode > 0)
    ref1 = _reference(col1, SLOT1.wants and SLOT1.col and SLOT1.link == IDENTITY and SLOT1.mode > 0)
    dq0 = tl.zeros((BM, SLOT0.width), tl.float32)
    ds0, ds1, dr0, dr1, inner, later, earlier = none, none, none, none, none, none, none
    low = block * BM + place
    high = tl.minimum(block * BM + BM, num_queries) - 1 + place
    start, stop, sure_start, sure_stop = _key_range(low, high, b, first, LENGTHS, num_keys, FILTER)
    start, stop, sure_start, sure_stop = _cut(
        start, stop, sure_start, sure_stop, 0, 1, num_keys, BN, False, SIMPLE
    )
    near = sure_stop
    if TABLE.clip >= 0:
        near = tl.maximum(tl.minimum((low - TABLE.clip + 1) // BN * BN, sure_stop), sure_start)
    # The spans: masked, beyond the table's reach, within it, masked.
    bounds = (start, sure_start, near, sure_stop, stop)
    for span in tl.static_range(4):
        if (SIMPLE or span == 0) and not _empty_span(span, 2, 1, FILTER, TABLE.clip):
            dq0, dq1, ds0, ds1, dr0, dr1, inner, later, earlier = _queries_span(
                dq0, dq1, ds0, ds1, dr0, dr1, inner, later, earlier, bounds[span], bounds[span + 1], q0, q1,
                grad, scale0, scale1, row0, row1, half0, half1, ref0, ref1, rate, lse2 - far if span == 1 else lse2, delta,
                k0, k1, v, col0, col1, band, TILES, dband, begin, LENGTHS, IDS, i, n, b, bh, h, h0, h1,
                hv, block * BM, first, num_queries, num_keys, seed, dropout, skb0, skt0, skb1, skt1,
                svb, svt, stride_ids, stb, width, e0, e1, dv, SLOT0, SLOT1, V, TABLE,
                _of_keys(span, FILTER, TABLE.clip, TABLE.sided), FILTER,
                _form(FORM, _of_keys(span, FILTER, TABLE.clip, TABLE.sided)), SAME, span == 0 or span == 3, EVEN,
                DROPOUT, PRECISION, BN, BM, TMA, STEADY0, STEADY1, EVENED, CUT,
            )  # fmt: skip
    # The common change of all weights of a row.
    moved = none
    if HAS_LSE:
        moved = tl.load(GRAD_LSE + line + n, mask=inside & (lse2 < float("inf")), other=0.0)
    if EVENED > 0:
        excess = (dr0 if EVENED == 1 else dr1) - moved
        tl.store(DELTA + line + n, delta + excess, mask=inside)
    sums = line + bh.to(tl.int64) * num_keys
    if FORM == POLY:
        # The scale changes all weights of a row by one factor, so it acts only through log_mass.
        grad_lse = tl.load(GRAD_LSE + line + n, mask=inside, other=0.0)
        if SLOT0.wants:
            tl.store(DS0 + sums + n, SLOT0.param * grad_lse / scale0, mask=inside)
        _store_queries(
            dq0, none, none, q0, none, SLOT0.param * rate, none, DQ0, DS0, DR0, line, sums, rows, n, num_queries,
            e0, SLOT0.width, 2, SLOT0.link, False, False, False, False, ADD,
        )  # fmt: skip
    else:
        if STEADY0:
            ds0 -= (inner - tl.load(GRAD_LSE + line + n, mask=inside, other=0.0)) * later
        _store_queries(
            dq0, ds0, dr0, q0, row0, scale0, ref0 * moved, DQ0, DS0, DR0, line, sums, rows, n, num_queries, e0, SLOT0.width,
            SLOT0.mode, SLOT0.link, SLOT0.norm, SLOT0.row, SLOT0.wants, STEADY0, ADD,
        )  # fmt: skip
    if SLOT1.width > 0:
        if STEADY1:
            ds1 -= (inner - tl.load(GRAD_LSE + line + n, mask=inside, other=0.0)) * earlier
        _store_queries(
            dq1, ds1, dr1, q1, row1, scale1, ref1 * moved, DQ1, DS1, DR1, line, sums, rows, n, num_queries, e1, SLOT1.width,
            SLOT1.mode, SLOT1.link, SLOT1.norm, SLOT1.row, SLOT1.wants, STEADY1, ADD,
        )  # fmt: skip
    if TABLE.clip >= 0:
        # The gradients of a row's scores sum up to dlog_mass, so the pairs beyond the reach have the rest.
        grad_lse = tl.load(GRAD_LSE + line + n, mask=inside, other=0.0)
        rest = tl.where(lse2 == float("inf"), 0.0, grad_lse) - inner
        beyond = (
            tl.where(i >= TABLE.clip, rest, 0.0)
            if CUT
            else tl.where(near > sure_start, rest, later)
        )
        tl.store(ENDS + line + n, beyond, mask=inside)
        if not TABLE.sided:
            other = tl.num_programs(1).to(tl.int64) * num_queries
            tl.store(ENDS + other + line + n, earlier, mask=inside)
