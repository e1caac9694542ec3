"""The backward by blocks of keys: dk, dv, dcol and the keys' share of dscale. See gradients.py.

It runs after the pass over queries, which forms delta for both.
"""

import triton
import triton.language as tl

from .bands import (
    BLOCKS,
    FAR,
    PAIRS,
    _band_at,
    _band_block,
    _band_start,
    _empty_span,
    _form,
    _of_queries,
    _strict,
)
from .gradients import _grad, _reference, _store, _weights
from .primitives import _block, _finite, _head, _held, _kept, _row_of, _rows
from .scores import FLAT, IDENTITY, POLY, _scale
from .visibility import _query_range, _visible


@triton.jit
def _keys_span(
    dk0, dk1, dv_, dc0, dc1, start, stop, k0, k1, v, c0, c1, head0, head1, q0_base, q1_base,
    grad_base, S0, S1, R0, R1, LSE2, DELTA, band, tiles, dband, lengths, ids, line, j, first_key, b, bh,
    first, place, num_queries, num_keys, seed, dropout, h, sqb0, sqt0, sqb1, sqt1, sgt, stride_ids,
    stb, width, e0, e1, dv,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, V: tl.constexpr, TABLE: tl.constexpr,
    BIAS: tl.constexpr, FILTER: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr,
    MASK: tl.constexpr, EVEN: tl.constexpr, DCOL0: tl.constexpr, DCOL1: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TMA: tl.constexpr, STORE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The queries from start to stop. Blocks are [keys, queries]."""
    CHECK: tl.constexpr = MASK or not EVEN
    # For two products at once, wider features and tables leave too few registers.
    EARLY: tl.constexpr = SLOT0.width + SLOT1.width <= 64 and TABLE.clip < 0
    for first_query in tl.range(start, stop, BM):
        n = first_query + tl.arange(0, BM)
        i = n + place
        inside = n < num_queries
        q0 = _block(
            q0_base, b, h, sqb0, sqt0, first_query, e0, num_queries, BM, SLOT0.width, CHECK, TMA
        )
        lse2 = tl.load(LSE2 + line + n, mask=inside, other=float("inf"))
        scale0 = head0
        if SLOT0.mode == 2:
            scale0 = tl.load(S0 + line + n, mask=inside, other=0.0)[None, :]
        row0 = tl.load(R0 + line + n, mask=inside, other=0.0)[None, :] if SLOT0.row else 0.0
        t0 = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
        scale1, row1, t1 = head1, 0.0, t0
        if SLOT1.width > 0:
            q1 = _block(
                q1_base, b, h, sqb1, sqt1, first_query, e1, num_queries, BM, SLOT1.width, CHECK, TMA
            )
            if SLOT1.mode == 2:
                scale1 = tl.load(S1 + line + n, mask=inside, other=0.0)[None, :]
            row1 = tl.load(R1 + line + n, mask=inside, other=0.0)[None, :] if SLOT1.row else 0.0
            if SAME:
                t0 = tl.dot(k1, tl.trans(q1), t0, input_precision=PRECISION)
            else:
                t1 = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
                if SLOT1.col:
                    t1 += c1[:, None]
        if EARLY:
            # Started before the weights are formed, to overlap with them.
            grad = _block(grad_base, b, h, 1, sgt, first_query, dv, num_queries, BM, V, CHECK, TMA)
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        if SLOT0.col:
            t0 += c0[:, None]
        bias = 0.0
        if BIAS == FAR:
            far = tl.load(band + n.to(tl.int64) * width, mask=inside, other=0.0)
            lse2 = lse2 - far.to(tl.float32)
        elif BIAS == BLOCKS:
            begin = _band_start(first_query, place, num_keys, width, TABLE.clip)
            bias = _band_block(
                band, tiles, b, h, stb, n, first_query, first_key - begin, num_queries, width, BM, BN,
                TABLE.tiled,
            )  # fmt: skip
            # Transposed in half precision, which is faster.
            bias = tl.trans(bias).to(tl.float32)
        elif BIAS == PAIRS:
            begin = _band_start(first_query, place, num_keys, width, TABLE.clip)
            bias = _band_at(band, n[None, :], j[:, None], num_queries, width, begin)
        seen = j[:, None] >= 0
        if MASK:
            seen = _visible(
                i[None, :], j[:, None], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
        rate = 1.0
        if FORM == POLY:
            rate = scale0 * tl.exp2(-lse2 / SLOT0.param)[None, :]
        elif FORM == FLAT:
            rate = tl.exp2(-lse2)[None, :]
        p, pull0, pull1 = _weights(
            t0, t1, scale0, scale1, row0, row1, bias, lse2[None, :], rate, seen, SLOT0, SLOT1,
            BIAS, MASK, FORM, SAME,
        )  # fmt: skip
        if not EARLY:
            grad = _block(grad_base, b, h, 1, sgt, first_query, dv, num_queries, BM, V, CHECK, TMA)
            dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        # Read late, when the registers of log_mass are free.
        delta = tl.load(DELTA + line + n, mask=inside, other=0.0)[None, :]
        dropped = p
        if DROPOUT:
            kept = _kept(seed, bh, n[None, :], j[:, None], num_queries, num_keys, dropout)
            dropped = tl.where(kept, p, 0.0) / (1.0 - dropout)
            dp = tl.where(kept, dp, 0.0) / (1.0 - dropout)
        if PART != 2:
            dv_ = tl.dot(dropped.to(grad.dtype), grad, dv_, input_precision=PRECISION)
        # A scale of all queries is applied at the end of the block. A scale of each query is applied
        # here, in the same instruction as the difference. That rounds only one of the two products, so
        # equal ones do not cancel exactly. float32 needs that they do.
        ALONG: tl.constexpr = (
            SLOT0.mode == 2 and SLOT1.width == 0 and FORM != POLY and PRECISION != "ieee"
        )
        if ALONG:
            g = dp * scale0 - delta * scale0
        else:
            g = dp - delta
        if MASK:
            g = tl.where(seen, g, 0.0)
        u0 = g * pull0
        if FORM == POLY:
            u0 = u0 * (SLOT0.param * rate)
        elif SLOT0.mode == 2 and not ALONG:
            u0 = u0 * scale0
        if STORE and BIAS == BLOCKS:
            at = [b.to(tl.int32), h.to(tl.int32), first_query, first_key - begin]
            dband.store(at, tl.trans(u0.to(q0.dtype)).reshape(1, 1, BM, BN))
        if PART != 2:
            dk0 = tl.dot(u0.to(q0.dtype), q0, dk0, input_precision=PRECISION)
        if DCOL0 and PART != 2:
            dc0 += tl.sum(u0, 1)
        if SLOT1.width > 0 and PART != 1:
            u1 = u0
            if not SAME:
                u1 = g * pull1
                if SLOT1.mode == 2:
                    u1 = u1 * scale1
            dk1 = tl.dot(u1.to(q1.dtype), q1, dk1, input_precision=PRECISION)
            if DCOL1:
                dc1 += tl.sum(u1, 1)
    return dk0, dk1, dv_, dc0, dc1


@triton.jit
def _store_keys(
    dk, dc, k, c, ref, scale, DK, DC, DS, keys, sums, rows, j, num_keys, width,
    WIDTH: tl.constexpr, MODE: tl.constexpr, NORM: tl.constexpr, SUM: tl.constexpr,
    SAVE_COL: tl.constexpr, WANT: tl.constexpr, SCALED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store dk, dcol and the keys' share of dscale. The sums come without the scale of a head."""
    inside = j < num_keys
    if WANT and MODE == 1:
        _store(DS + sums + j, _finite(c - ref) * dc if SUM else tl.zeros_like(c), inside, ADD)
    if MODE != 2 and not SCALED:
        dk = dk * scale
        dc = dc * scale
    if NORM:
        dk -= dc[:, None] * _finite(k.to(tl.float32))
    e = tl.arange(0, WIDTH)
    target = DK + rows[:, None] * width + e[None, :]
    _store(target, dk, inside[:, None] & (e[None, :] < width), ADD)
    if SAVE_COL:
        _store(DC + keys + j, dc, inside, ADD)


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def backward_keys(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, BAND, TILES, LENGTHS, IDS, GRAD, LSE2, DELTA,
    DBAND, DK0, DK1, DV, DC0, DC1, DS0, DS1,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, V: tl.constexpr, TABLE: tl.constexpr,
    FILTER: tl.constexpr, SIMPLE: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, TMA: tl.constexpr, STORE: tl.constexpr, TOKENS: tl.constexpr,
    PART: tl.constexpr, ADD: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """dk, dv and dcol of one block of keys, for one query head.

    PART 1: without the second slot. PART 2: only the second slot. Wide slots take a launch each.
    ADD: another pass has stored its share before. STORE: all pairs lie in a band, and so do their
    gradients, from here on.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block = tl.program_id(0)
    j = block * BN + tl.arange(0, BN)
    place = num_keys - num_queries
    line = bh.to(tl.int64) * num_queries
    k0 = _rows(K0 + b * skb0 + (h // group0) * skh0, skt0, j, e0, SLOT0.width, num_keys, True)
    v = _rows(V_ + b * svb + (h // group_v) * svh, svt, j, dv, V, num_keys, True)
    if HELD & 1:
        k0 = _held(k0, SLOT0.width, PRECISION)
    if HELD & 2:
        v = _held(v, V, PRECISION)
    SUM0: tl.constexpr = SLOT0.wants and SLOT0.col and SLOT0.mode == 1 and SLOT0.link == IDENTITY
    SUM1: tl.constexpr = SLOT1.wants and SLOT1.col and SLOT1.mode == 1 and SLOT1.link == IDENTITY
    DCOL0: tl.constexpr = SLOT0.norm or SLOT0.saves or SUM0
    DCOL1: tl.constexpr = SLOT1.norm or SLOT1.saves or SUM1
    c0 = tl.zeros((BN,), tl.float32)
    c1 = tl.zeros((BN,), tl.float32)
    if SLOT0.col:
        c0 = tl.load(C0 + b * scb0 + (h // gc0) * sch0 + j, mask=j < num_keys, other=0.0)
    head0 = 1.0
    if SLOT0.mode < 2:
        head0 = _scale(S0, number0, ss0, h, line, j, j < num_keys, SLOT0.mode, SLOT0.log)
    head1 = head0
    k1 = k0
    dk1 = tl.zeros((BN, 16), tl.float32)
    if SLOT1.width > 0:
        k1 = _rows(K1 + b * skb1 + (h // group1) * skh1, skt1, j, e1, SLOT1.width, num_keys, True)
        if HELD & 4:
            k1 = _held(k1, SLOT1.width, PRECISION)
        dk1 = tl.zeros((BN, SLOT1.width), tl.float32)
        head1 = 1.0
        if SLOT1.mode < 2:
            head1 = _scale(S1, number1, ss1, h, line, j, j < num_keys, SLOT1.mode, SLOT1.log)
        if SLOT1.col:
            c1 = tl.load(C1 + b * scb1 + (h // gc1) * sch1 + j, mask=j < num_keys, other=0.0)
    band = BAND
    if TABLE.clip >= 0:
        band = BAND + b * stb + h * sth
    dk0 = tl.zeros((BN, SLOT0.width), tl.float32)
    dv_ = tl.zeros((BN, V), tl.float32)
    dc0 = tl.zeros((BN,), tl.float32)
    dc1 = tl.zeros((BN,), tl.float32)
    low = block * BN
    high = tl.minimum(block * BN + BN, num_keys) - 1
    start, stop, sure_start, sure_stop = _query_range(
        low, high, b, first, LENGTHS, place, num_queries, FILTER
    )
    start = tl.maximum(start, 0) // BM * BM
    stop = tl.maximum(stop, start)
    if SIMPLE and EVEN:
        sure_start = tl.minimum(tl.maximum((sure_start + BM - 1) // BM * BM, start), stop)
        sure_stop = tl.maximum(tl.minimum(sure_stop, stop) // BM * BM, sure_start)
        if high - low < BN - 1:
            # The last block of keys is not full, and needs a mask everywhere.
            sure_start = stop
            sure_stop = stop
    else:
        sure_start = stop
        sure_stop = stop
    grad_head, sgt = _grad(GRAD, b, h, line, num_heads, num_queries, dv, TMA, TOKENS)
    beyond = sure_start
    if TABLE.clip >= 0 and _strict(FILTER, TABLE.clip):
        beyond = sure_stop
    elif TABLE.clip >= 0:
        beyond = (high + TABLE.clip - place + BM - 1) // BM * BM
        beyond = tl.minimum(tl.maximum(beyond, sure_start), sure_stop)
    # The spans: masked, within the table's reach, beyond it, masked.
    bounds = (start, sure_start, beyond, sure_stop, stop)
    for span in tl.static_range(4):
        if ((SIMPLE and EVEN) or span == 0) and not _empty_span(span, 1, 2, FILTER, TABLE.clip):
            dk0, dk1, dv_, dc0, dc1 = _keys_span(
                dk0, dk1, dv_, dc0, dc1, bounds[span], bounds[span + 1], k0, k1, v, c0, c1, head0, head1,
                _head(Q0, b, h, sqb0, sqh0, TMA), _head(Q1, b, h, sqb1, sqh1, TMA and SLOT1.width > 0),
                grad_head, S0, S1, R0, R1, LSE2, DELTA, band, TILES, DBAND, LENGTHS, IDS, line, j, low, b, bh,
                first, place, num_queries, num_keys, seed, dropout, h, sqb0, sqt0, sqb1, sqt1, sgt,
                stride_ids, stb, width, e0, e1, dv, SLOT0, SLOT1, V, TABLE,
                _of_queries(span, FILTER, TABLE.clip, TABLE.sided, SIMPLE and EVEN), FILTER,
                _form(FORM, _of_queries(span, FILTER, TABLE.clip, TABLE.sided, SIMPLE and EVEN)), SAME,
                span == 0 or span == 3, EVEN, DCOL0, DCOL1, DROPOUT, PRECISION, BM, BN, TMA, STORE, PART,
            )  # fmt: skip
    keys = bh.to(tl.int64) * num_keys
    sums = line + keys + num_queries
    rows = _row_of(b, h, j.to(tl.int64), keys, num_heads, num_keys, TOKENS)
    ref0 = _reference(C0 + b * scb0 + (h // gc0) * sch0, SUM0)
    ref1 = _reference(C1 + b * scb1 + (h // gc1) * sch1, SUM1)
    if PART != 2:
        _store_keys(
            dk0, dc0, k0, c0, ref0, head0, DK0, DC0, DS0, keys, sums, rows, j, num_keys, e0, SLOT0.width, SLOT0.mode, SLOT0.norm,
            SUM0, SLOT0.saves, SLOT0.wants, FORM == POLY, ADD,
        )  # fmt: skip
        e = tl.arange(0, V)
        target = DV + rows[:, None] * dv + e[None, :]
        mask = (j < num_keys)[:, None] & (e[None, :] < dv)
        _store(target, dv_, mask, ADD)
    if SLOT1.width > 0 and PART != 1:
        _store_keys(
            dk1, dc1, k1, c1, ref1, head1, DK1, DC1, DS1, keys, sums, rows, j, num_keys, e1, SLOT1.width, SLOT1.mode, SLOT1.norm,
            SUM1, SLOT1.saves, SLOT1.wants, False, ADD,
        )  # fmt: skip
