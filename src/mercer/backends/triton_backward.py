"""The backward of the fused kernels, in two passes: by blocks of keys, and by blocks of queries.

With P the normalised weights and g_ij = dP_ij - delta_i, where delta = <dO, O> - dlog_mass,

    dv_j = sum_i P_ij dO_i        ds_ij = g_ij P_ij slope(s_ij)        dt_ij = scale_i ds_ij
    dk_j = sum_i dt_ij q_i        dcol_j = sum_i dt_ij
    dq_i = sum_j dt_ij k_j        dscale_i = sum_j ds_ij t_ij          drow_i = sum_j ds_ij
"""

import triton
import triton.language as tl

from .triton_kernels import (
    IDENTITY,
    LOG2E,
    _bias,
    _columns,
    _kept,
    _key_range,
    _log2_weight,
    _power,
    _product,
    _query_range,
    _reach,
    _rows,
    _scaled,
    _slope,
    _visible,
)


@triton.jit
def delta(OUT, GRAD, GRAD_LSE, DELTA, rows, dv, V: tl.constexpr, BM: tl.constexpr):
    """<dO_i, O_i> - dlog_mass_i."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    e = tl.arange(0, V)
    offset = n[:, None] * dv + e[None, :]
    mask = (n[:, None] < rows) & (e[None, :] < dv)
    out = tl.load(OUT + offset, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + offset, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(GRAD_LSE + n, mask=n < rows, other=0.0)
    tl.store(DELTA + n, tl.sum(out * grad, 1) - lse, mask=n < rows)


@triton.jit
def _weights(
    t0, t1, scale0, scale1, row0, row1, bias, lse2, rate, seen,
    E1: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr, PARAM0: tl.constexpr,
    PARAM1: tl.constexpr, HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr, HAS_BIAS: tl.constexpr,
    MASK: tl.constexpr, POLY: tl.constexpr,
):  # fmt: skip
    """(P, P slope0, P slope1): the weights again, and their derivatives by s0 and s1."""
    if POLY:
        x = t0 * rate
        if MASK:
            x = tl.where(seen, x, 0.0)
        lower = _power(x, PARAM0 - 1)
        p = lower * x
        pull0 = lower
        pull1 = p
    else:
        s0 = _scaled(t0, scale0, row0, LINK0, HAS_ROW0)
        log = _log2_weight(s0, LINK0, PARAM0)
        s1 = s0
        if E1 > 0:
            s1 = _scaled(t1, scale1, row1, LINK1, HAS_ROW1)
            log += _log2_weight(s1, LINK1, PARAM1)
        if HAS_BIAS:
            log += bias
        if MASK:
            log = tl.where(seen, log, float("-inf"))
        p = tl.exp2(log - lse2)
        pull0 = p
        pull1 = p
        if LINK0 != IDENTITY:
            pull0 = p * _slope(s0, LINK0, PARAM0)
        if E1 > 0:
            if LINK1 != IDENTITY:
                pull1 = p * _slope(s1, LINK1, PARAM1)
    return p, pull0, pull1


@triton.jit
def _keys_span(
    dk0, dk1, dv_, dc0, dc1, start, stop, k0, k1, v, c0, c1, q0_base, q1_base, grad_base, S0, S1,
    R0, R1, LSE, DELTA, table, lengths, ids, line, j, b, bh, first, place, num_queries, num_keys,
    seed, dropout, sqt0, sqt1, stride_ids, e0, e1, dv,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr,
    HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr, CLIP: tl.constexpr, BIAS: tl.constexpr,
    FILTER: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, POLY: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The queries from start to stop; all blocks lie transposed, [keys, queries]."""
    for first_query in tl.range(start, stop, BM):
        n = first_query + tl.arange(0, BM)
        i = n + place
        inside = n < num_queries
        qt0 = _columns(q0_base, sqt0, n, e0, E0, num_queries, MASK or not EVEN)
        scale0 = tl.load(S0 + line + n, mask=inside, other=0.0)[None, :]
        row0 = tl.load(R0 + line + n, mask=inside, other=0.0)[None, :] if HAS_ROW0 else scale0
        lse2 = LOG2E * tl.load(LSE + line + n, mask=inside, other=0.0)
        dead = lse2 == float("-inf")
        rate = scale0
        if POLY:
            rate = scale0 * tl.where(dead, 0.0, tl.exp2(-lse2 / PARAM0))[None, :]
        lse2 = tl.where(dead, 0.0, lse2)[None, :]
        t0 = _product(k0, qt0, c0[:, None], HAS_COL0, PRECISION)
        scale1, row1, t1 = scale0, scale0, t0
        if E1 > 0:
            qt1 = _columns(q1_base, sqt1, n, e1, E1, num_queries, MASK or not EVEN)
            scale1 = tl.load(S1 + line + n, mask=inside, other=0.0)[None, :]
            row1 = tl.load(R1 + line + n, mask=inside, other=0.0)[None, :] if HAS_ROW1 else scale1
            t1 = _product(k1, qt1, c1[:, None], HAS_COL1, PRECISION)
        bias = scale0
        if BIAS == 1:
            far = table + n.to(tl.int64) * (2 * CLIP + 1) + 2 * CLIP
            bias = LOG2E * tl.load(far, mask=inside, other=0.0)[None, :]
        elif BIAS == 2:
            bias = _bias(table, i[None, :], j[:, None], n[None, :], num_queries, CLIP)
        seen = t0 == t0
        if MASK:
            seen = _visible(
                i[None, :], j[:, None], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
            seen = seen & inside[None, :]
        p, pull0, pull1 = _weights(
            t0, t1, scale0, scale1, row0, row1, bias, lse2, rate, seen, E1, LINK0, LINK1, PARAM0,
            PARAM1, HAS_ROW0, HAS_ROW1, BIAS > 0, MASK, POLY,
        )  # fmt: skip
        grad = _rows(grad_base, dv, n, dv, V, num_queries, MASK or not EVEN)
        delta = tl.load(DELTA + line + n, mask=inside, other=0.0)[None, :]
        dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            kept = _kept(seed, bh, n[None, :], j[:, None], num_queries, num_keys, dropout)
            dropped = tl.where(kept, p, 0.0) / (1.0 - dropout)
            dp = tl.where(kept, dp, 0.0) / (1.0 - dropout)
        dv_ = tl.dot(dropped.to(grad.dtype), grad, dv_, input_precision=PRECISION)
        g = dp - delta
        if MASK:
            g = tl.where(seen, g, 0.0)
        if POLY:
            dt0 = g * pull0 * (PARAM0 * rate)
        else:
            dt0 = g * pull0 * scale0
        q0 = tl.trans(qt0)
        dk0 = tl.dot(dt0.to(q0.dtype), q0, dk0, input_precision=PRECISION)
        if HAS_COL0:
            dc0 += tl.sum(dt0, 1)
        if E1 > 0:
            dt1 = g * pull1 * scale1
            dk1 = tl.dot(dt1.to(qt1.dtype), tl.trans(qt1), dk1, input_precision=PRECISION)
            if HAS_COL1:
                dc1 += tl.sum(dt1, 1)
    return dk0, dk1, dv_, dc0, dc1


@triton.jit
def backward_keys(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, TABLE, LENGTHS, IDS, GRAD, LSE, DELTA,
    DK0, DK1, DV, DC0, DC1,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, dropout,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr,
    HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr, CLIP: tl.constexpr, FILTER: tl.constexpr,
    SIMPLE: tl.constexpr, EVEN: tl.constexpr, POLY: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk, dv and dcol of one block of keys, for one query head."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), bh % num_heads
    block = tl.program_id(0)
    j = block * BN + tl.arange(0, BN)
    place = num_keys - num_queries
    line = bh.to(tl.int64) * num_queries
    k0 = _rows(K0 + b * skb0 + (h // group0) * skh0, skt0, j, e0, E0, num_keys, True)
    v = _rows(V_ + b * svb + (h // group_v) * svh, svt, j, dv, V, num_keys, True)
    c0 = tl.zeros((BN,), tl.float32)
    c1 = tl.zeros((BN,), tl.float32)
    if HAS_COL0:
        c0 = tl.load(C0 + b * scb0 + (h // gc0) * sch0 + j, mask=j < num_keys, other=0.0)
    k1 = k0
    dk1 = tl.zeros((BN, 16), tl.float32)
    if E1 > 0:
        k1 = _rows(K1 + b * skb1 + (h // group1) * skh1, skt1, j, e1, E1, num_keys, True)
        dk1 = tl.zeros((BN, E1), tl.float32)
        if HAS_COL1:
            c1 = tl.load(C1 + b * scb1 + (h // gc1) * sch1 + j, mask=j < num_keys, other=0.0)
    table = TABLE
    if CLIP >= 0:
        table = TABLE + line * (2 * CLIP + 1)
    dk0 = tl.zeros((BN, E0), tl.float32)
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
            # The last block of keys is not whole: it needs its mask throughout.
            sure_start = stop
            sure_stop = stop
    else:
        sure_start = stop
        sure_stop = stop
    for span in tl.static_range(4):
        # In turn: masked, within the table's reach, beyond it, masked.
        beyond = sure_start
        if CLIP >= 0:
            beyond = (high + CLIP - place + BM - 1) // BM * BM
            beyond = tl.minimum(tl.maximum(beyond, sure_start), sure_stop)
        if span == 0:
            first_query, last_query = start, sure_start
        elif span == 1:
            first_query, last_query = sure_start, beyond
        elif span == 2:
            first_query, last_query = beyond, sure_stop
        else:
            first_query, last_query = sure_stop, stop
        if ((SIMPLE and EVEN) or span == 0) and (CLIP >= 0 or span != 1):
            dk0, dk1, dv_, dc0, dc1 = _keys_span(
                dk0, dk1, dv_, dc0, dc1, first_query, last_query, k0, k1, v, c0, c1,
                Q0 + b * sqb0 + h * sqh0, Q1 + b * sqb1 + h * sqh1, GRAD + line * dv, S0, S1, R0,
                R1, LSE, DELTA, table, LENGTHS, IDS, line, j, b, bh, first, place, num_queries,
                num_keys, seed, dropout, sqt0, sqt1, stride_ids, e0, e1, dv, E0, E1, V, LINK0,
                LINK1, PARAM0, PARAM1, HAS_COL0, HAS_COL1, HAS_ROW0, HAS_ROW1, CLIP, _reach(CLIP, span, 2), FILTER,
                span == 0 or span == 3, EVEN, POLY, DROPOUT, PRECISION, BM,
            )  # fmt: skip
    keys = bh.to(tl.int64) * num_keys
    inside = j < num_keys
    e = tl.arange(0, E0)
    target = DK0 + (keys + j[:, None].to(tl.int64)) * e0 + e[None, :]
    tl.store(target, dk0.to(DK0.dtype.element_ty), mask=inside[:, None] & (e[None, :] < e0))
    e = tl.arange(0, V)
    target = DV + (keys + j[:, None].to(tl.int64)) * dv + e[None, :]
    tl.store(target, dv_.to(DV.dtype.element_ty), mask=inside[:, None] & (e[None, :] < dv))
    if HAS_COL0:
        tl.store(DC0 + keys + j, dc0, mask=inside)
    if E1 > 0:
        e = tl.arange(0, E1)
        target = DK1 + (keys + j[:, None].to(tl.int64)) * e1 + e[None, :]
        tl.store(target, dk1.to(DK1.dtype.element_ty), mask=inside[:, None] & (e[None, :] < e1))
        if HAS_COL1:
            tl.store(DC1 + keys + j, dc1, mask=inside)


@triton.jit
def _queries_span(
    dq0, dq1, ds0, ds1, dr0, dr1, total, mean0, mean1, later, earlier, start, stop, q0, q1, grad,
    scale0, scale1, row0, row1, far, rate, lse2, delta, k0, k1, v, col0, col1, table, dtable,
    lengths, ids, i, n, b, bh, first, num_queries, num_keys, seed, dropout, skt0, skt1, svt,
    stride_ids, e0, e1, dv,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr,
    HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr, CLIP: tl.constexpr, BIAS: tl.constexpr,
    FILTER: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, POLY: tl.constexpr,
    WANT0: tl.constexpr, WANT1: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop, for dq and what belongs to a query."""
    for first_key in tl.range(start, stop, BN):
        j = first_key + tl.arange(0, BN)
        c0 = tl.load(col0 + j, mask=j < num_keys, other=0.0)[None, :] if HAS_COL0 else 0.0
        kt0 = _columns(k0, skt0, j, e0, E0, num_keys, MASK or not EVEN)
        t0 = _product(q0, kt0, c0, HAS_COL0, PRECISION)
        t1 = t0
        if E1 > 0:
            c1 = tl.load(col1 + j, mask=j < num_keys, other=0.0)[None, :] if HAS_COL1 else 0.0
            kt1 = _columns(k1, skt1, j, e1, E1, num_keys, MASK or not EVEN)
            t1 = _product(q1, kt1, c1, HAS_COL1, PRECISION)
        bias = far[:, None]
        if BIAS == 2:
            bias = _bias(table, i[:, None], j[None, :], n[:, None], num_queries, CLIP)
        seen = t0 == t0
        if MASK:
            seen = _visible(
                i[:, None], j[None, :], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
        p, pull0, pull1 = _weights(
            t0, t1, scale0[:, None], scale1[:, None], row0[:, None], row1[:, None], bias,
            lse2[:, None], rate[:, None], seen, E1, LINK0, LINK1, PARAM0, PARAM1, HAS_ROW0,
            HAS_ROW1, BIAS > 0, MASK, POLY,
        )  # fmt: skip
        vt = _columns(v, svt, j, dv, V, num_keys, MASK or not EVEN)
        dp = tl.dot(grad, vt, input_precision=PRECISION)
        if DROPOUT:
            kept = _kept(seed, bh, n[:, None], j[None, :], num_queries, num_keys, dropout)
            dp = tl.where(kept, dp, 0.0) / (1.0 - dropout)
        g = dp - delta[:, None]
        if MASK:
            g = tl.where(seen, g, 0.0)
        u0 = g * pull0
        dq0 = tl.dot(u0.to(kt0.dtype), tl.trans(kt0), dq0, input_precision=PRECISION)
        if HAS_ROW0:
            dr0 += tl.sum(u0, 1)
        if WANT0:
            # Rounding in delta leaves sum_j P g a little off; what it does to dscale is known.
            total += tl.sum(g * p, 1)
            mean0 += tl.sum(pull0 * t0, 1)
            ds0 += tl.sum(u0 * t0, 1)
        if E1 > 0:
            u1 = g * pull1
            dq1 = tl.dot(u1.to(kt1.dtype), tl.trans(kt1), dq1, input_precision=PRECISION)
            if HAS_ROW1:
                dr1 += tl.sum(u1, 1)
            if WANT1:
                if not WANT0:
                    total += tl.sum(g * p, 1)
                mean1 += tl.sum(pull1 * t1, 1)
                ds1 += tl.sum(u1 * t1, 1)
        if BIAS == 1:
            later += tl.sum(g * p, 1)
        elif BIAS == 2:
            away = i[:, None] - j[None, :]
            dlog = g * p
            later += tl.sum(tl.where(away >= CLIP, dlog, 0.0), 1)
            earlier += tl.sum(tl.where(away <= -CLIP, dlog, 0.0), 1)
            # Inside the table every (query, distance) has one key: a store, no sum.
            owned = (tl.abs(away) < CLIP) & (n[:, None] < num_queries) & (j[None, :] < num_keys)
            place = dtable + n[:, None].to(tl.int64) * (2 * CLIP + 1) + away + CLIP
            tl.store(place, dlog, mask=owned)
    return dq0, dq1, ds0, ds1, dr0, dr1, total, mean0, mean1, later, earlier


@triton.jit
def backward_queries(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, TABLE, LENGTHS, IDS, GRAD, LSE, DELTA, GRAD_LSE,
    DQ0, DQ1, DS0, DS1, DR0, DR1, DTABLE,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, dropout,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr,
    HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr, CLIP: tl.constexpr, FILTER: tl.constexpr,
    SIMPLE: tl.constexpr, EVEN: tl.constexpr, POLY: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, WANT0: tl.constexpr, WANT1: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dq, dscale, drow and dtable of one block of queries."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), bh % num_heads
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    i = n + place
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, E0, num_queries, True)
    grad = _rows(GRAD + line * dv, dv, n, dv, V, num_queries, True)
    scale0 = tl.load(S0 + line + n, mask=inside, other=0.0)
    row0 = tl.load(R0 + line + n, mask=inside, other=0.0) if HAS_ROW0 else scale0
    lse2 = LOG2E * tl.load(LSE + line + n, mask=inside, other=0.0)
    dead = lse2 == float("-inf")
    rate = scale0
    if POLY:
        rate = scale0 * tl.where(dead, 0.0, tl.exp2(-lse2 / PARAM0))
    lse2 = tl.where(dead, 0.0, lse2)
    delta = tl.load(DELTA + line + n, mask=inside, other=0.0)
    q1, scale1, row1 = q0, scale0, scale0
    dq1 = tl.zeros((BM, 16), tl.float32)
    if E1 > 0:
        q1 = _rows(Q1 + b * sqb1 + h * sqh1, sqt1, n, e1, E1, num_queries, True)
        scale1 = tl.load(S1 + line + n, mask=inside, other=0.0)
        row1 = tl.load(R1 + line + n, mask=inside, other=0.0) if HAS_ROW1 else scale1
        dq1 = tl.zeros((BM, E1), tl.float32)
    k0 = K0 + b * skb0 + (h // group0) * skh0
    k1 = K1 + b * skb1 + (h // group1) * skh1
    v = V_ + b * svb + (h // group_v) * svh
    col0 = C0 + b * scb0 + (h // gc0) * sch0
    col1 = C1 + b * scb1 + (h // gc1) * sch1
    table, dtable = TABLE, DTABLE
    far = scale0
    if CLIP >= 0:
        table = TABLE + line * (2 * CLIP + 1)
        dtable = DTABLE + line * (2 * CLIP + 1)
        last = table + n.to(tl.int64) * (2 * CLIP + 1) + 2 * CLIP
        far = LOG2E * tl.load(last, mask=inside, other=0.0)
    dq0 = tl.zeros((BM, E0), tl.float32)
    ds0 = tl.zeros((BM,), tl.float32)
    ds1 = tl.zeros((BM,), tl.float32)
    dr0 = tl.zeros((BM,), tl.float32)
    dr1 = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    mean0 = tl.zeros((BM,), tl.float32)
    mean1 = tl.zeros((BM,), tl.float32)
    later = tl.zeros((BM,), tl.float32)
    earlier = tl.zeros((BM,), tl.float32)
    low = block * BM + place
    high = tl.minimum(block * BM + BM, num_queries) - 1 + place
    start, stop, sure_start, sure_stop = _key_range(low, high, b, first, LENGTHS, num_keys, FILTER)
    start = tl.maximum(start, 0) // BN * BN
    stop = tl.maximum(stop, start)
    if SIMPLE:
        sure_start = tl.minimum(tl.maximum((sure_start + BN - 1) // BN * BN, start), stop)
        sure_stop = tl.maximum(sure_stop // BN * BN, sure_start)
    else:
        sure_start = stop
        sure_stop = stop
    for span in tl.static_range(4):
        near = sure_stop
        if CLIP >= 0:
            near = tl.maximum(tl.minimum((low - CLIP + 1) // BN * BN, sure_stop), sure_start)
        if span == 0:
            first_key, last_key = start, sure_start
        elif span == 1:
            first_key, last_key = sure_start, near
        elif span == 2:
            first_key, last_key = near, sure_stop
        else:
            first_key, last_key = sure_stop, stop
        if (SIMPLE or span == 0) and (CLIP >= 0 or span != 2):
            dq0, dq1, ds0, ds1, dr0, dr1, total, mean0, mean1, later, earlier = _queries_span(
                dq0, dq1, ds0, ds1, dr0, dr1, total, mean0, mean1, later, earlier, first_key,
                last_key, q0, q1, grad, scale0, scale1, row0, row1, far, rate, lse2, delta, k0, k1,
                v, col0, col1, table, dtable, LENGTHS, IDS, i, n, b, bh, first, num_queries,
                num_keys, seed, dropout, skt0, skt1, svt, stride_ids, e0, e1, dv, E0, E1, V, LINK0,
                LINK1, PARAM0, PARAM1, HAS_COL0, HAS_COL1, HAS_ROW0, HAS_ROW1, CLIP, _reach(CLIP, span, 1), FILTER,
                span == 0 or span == 3, EVEN, POLY, WANT0, WANT1, DROPOUT, PRECISION, BN,
            )  # fmt: skip
    if POLY:
        dq0 = dq0 * (PARAM0 * rate)[:, None]
    else:
        dq0 = dq0 * scale0[:, None]
    e = tl.arange(0, E0)
    target = DQ0 + (line + n[:, None].to(tl.int64)) * e0 + e[None, :]
    tl.store(target, dq0.to(DQ0.dtype.element_ty), mask=inside[:, None] & (e[None, :] < e0))
    grad_lse = tl.load(GRAD_LSE + line + n, mask=inside, other=0.0)
    if WANT0:
        tl.store(DS0 + line + n, ds0 - (total - grad_lse) * mean0, mask=inside)
    if HAS_ROW0:
        tl.store(DR0 + line + n, dr0, mask=inside)
    if E1 > 0:
        e = tl.arange(0, E1)
        target = DQ1 + (line + n[:, None].to(tl.int64)) * e1 + e[None, :]
        dq1 = dq1 * scale1[:, None]
        tl.store(target, dq1.to(DQ1.dtype.element_ty), mask=inside[:, None] & (e[None, :] < e1))
        if WANT1:
            tl.store(DS1 + line + n, ds1 - (total - grad_lse) * mean1, mask=inside)
        if HAS_ROW1:
            tl.store(DR1 + line + n, dr1, mask=inside)
    if CLIP >= 0:
        ends = dtable + n.to(tl.int64) * (2 * CLIP + 1)
        tl.store(ends, earlier, mask=inside)
        tl.store(ends + 2 * CLIP, later, mask=inside)
