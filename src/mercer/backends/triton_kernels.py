"""The fused kernels: forward, and a backward in two passes, for one lowered term.

    log w_ij = sum_f link_f(scale_f,i (<q^f_i, k^f_j> + col^f_j) + row^f_i) + table[i, clip(i - j)]

What this must meet: no [Q, K] tensor in memory; every sum owned by one program, so that the same
input gives the same bits; float32 for all but the matrix products' operands; a filter visits only
blocks that see something, and masks only where a block is not wholly visible.

One program owns a block of queries (forward, dq) or of keys (dk, dv) of one head. A term has one or
two slots of features (E0, E1); logarithms are to the base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SQRT3 = tl.constexpr(1.7320508075688772)
SQRT5 = tl.constexpr(2.23606797749979)
IDENTITY = tl.constexpr(0)
POWER = tl.constexpr(1)
RATIONAL = tl.constexpr(2)
MATERN12 = tl.constexpr(3)
MATERN32 = tl.constexpr(4)
MATERN52 = tl.constexpr(5)


@triton.jit
def _log2_weight(s, LINK: tl.constexpr, PARAM: tl.constexpr):
    """log2 w(s); for the identity, s itself is already to the base 2."""
    if LINK == IDENTITY:
        out = s
    elif LINK == POWER:
        out = PARAM * tl.log2(tl.abs(s))
    elif LINK == RATIONAL:
        out = -PARAM * tl.log2(1.0 - tl.minimum(s, 0.0) / PARAM)
    elif LINK == MATERN12:
        out = -LOG2E * tl.sqrt(tl.maximum(-2.0 * s, 0.0))
    elif LINK == MATERN32:
        a = SQRT3 * tl.sqrt(tl.maximum(-2.0 * s, 0.0))
        out = tl.log2(1.0 + a) - LOG2E * a
    else:
        a = SQRT5 * tl.sqrt(tl.maximum(-2.0 * s, 0.0))
        out = tl.log2(1.0 + a + a * a / 3.0) - LOG2E * a
    return out


@triton.jit
def _slope(s, LINK: tl.constexpr, PARAM: tl.constexpr):
    """d ln w / ds."""
    if LINK == POWER:
        out = tl.where(s == 0.0, 0.0, PARAM / tl.where(s == 0.0, 1.0, s))
    elif LINK == RATIONAL:
        out = 1.0 / (1.0 - tl.minimum(s, 0.0) / PARAM)
    elif LINK == MATERN12:
        r = tl.sqrt(tl.maximum(-2.0 * s, 0.0))
        out = tl.where(r > 0.0, 1.0 / tl.where(r > 0.0, r, 1.0), 0.0)
    elif LINK == MATERN32:
        out = 3.0 / (1.0 + SQRT3 * tl.sqrt(tl.maximum(-2.0 * s, 0.0)))
    else:
        a = SQRT5 * tl.sqrt(tl.maximum(-2.0 * s, 0.0))
        out = (5.0 / 3.0) * (1.0 + a) / (1.0 + a + a * a / 3.0)
    return out


@triton.jit
def _product(a, b, col, HAS_COL: tl.constexpr, PRECISION: tl.constexpr):
    """<a, b> + col; the number per key starts the accumulator, so it costs nothing."""
    if HAS_COL:
        start = tl.broadcast_to(col, (a.shape[0], b.shape[1]))
        out = tl.dot(a, b, start, input_precision=PRECISION)
    else:
        out = tl.dot(a, b, input_precision=PRECISION)
    return out


@triton.jit
def _scaled(t, scale, row, LINK: tl.constexpr, HAS_ROW: tl.constexpr):
    """s = scale t + row, to the base 2 for the identity, and exactly 0 within rounding of a cusp."""
    if LINK == IDENTITY:
        s = t * (scale * LOG2E)
    else:
        s = t * scale
    if HAS_ROW:
        s += row
        if LINK == MATERN12:
            s = tl.where(s > -3.8e-6 * tl.abs(row), 0.0, s)
    return s


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
        start = tl.minimum(start, clause_start)
        stop = tl.maximum(stop, clause_stop)
    return start, stop, sure_start, sure_stop


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
            clause_stop = tl.minimum(clause_stop, high + FILTER[n][1] + 1 - start_place)
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
        start = tl.minimum(start, clause_start)
        stop = tl.maximum(stop, clause_stop)
    return start, stop, sure_start, sure_stop


@triton.jit
def _rows(base, stride, index, width, WIDTH: tl.constexpr, limit, CHECK: tl.constexpr):
    """Rows of features, [len(index), WIDTH], zero beyond the limit and the width."""
    e = tl.arange(0, WIDTH)
    pointers = base + index[:, None].to(tl.int64) * stride + e[None, :]
    if CHECK:
        out = tl.load(pointers, mask=(index[:, None] < limit) & (e[None, :] < width), other=0.0)
    else:
        out = tl.load(pointers)
    return out


@triton.jit
def _columns(base, stride, index, width, WIDTH: tl.constexpr, limit, CHECK: tl.constexpr):
    """The same, transposed: [WIDTH, len(index)]."""
    e = tl.arange(0, WIDTH)
    pointers = base + index[None, :].to(tl.int64) * stride + e[:, None]
    if CHECK:
        out = tl.load(pointers, mask=(index[None, :] < limit) & (e[:, None] < width), other=0.0)
    else:
        out = tl.load(pointers)
    return out


@triton.jit
def _bias(table, i, j, n, num_queries, CLIP: tl.constexpr):
    """table[n, clip(i - j) + c], to the base 2."""
    index = tl.minimum(tl.maximum(i - j, -CLIP), CLIP) + CLIP
    pointers = table + n.to(tl.int64) * (2 * CLIP + 1) + index
    return LOG2E * tl.load(pointers, mask=n < num_queries, other=0.0)


@triton.jit
def _kept(seed, bh, n, j, num_queries, num_keys, dropout):
    """Which weights dropout keeps: the same in forward and backward."""
    offset = (bh.to(tl.int64) * num_queries + n.to(tl.int64)) * num_keys + j.to(tl.int64)
    return tl.rand(seed, offset) >= dropout


@triton.constexpr_function
def _reach(clip, span, beyond):
    """How a span reads the table: not at all, its last column alone, or by distance."""
    return 0 if clip < 0 else 1 if span == beyond else 2


@triton.jit
def _power(x, DEGREE: tl.constexpr):
    out = x
    for _ in tl.static_range(DEGREE - 1):
        out = out * x
    return out


@triton.jit
def _forward_span(
    acc, mass, peak, start, stop, q0, q1, scale0, scale1, row0, row1, far, k0, k1, v, col0, col1,
    table, lengths, ids, i, n, b, bh, first, num_queries, num_keys, seed, dropout, skt0, skt1, svt,
    stride_ids, e0, e1, dv,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr,
    HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr, CLIP: tl.constexpr, BIAS: tl.constexpr,
    FILTER: tl.constexpr, PLAIN: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
    POLY: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop: the running peak, mass and sums of values."""
    for first_key in tl.range(start, stop, BN):
        j = first_key + tl.arange(0, BN)
        c0 = tl.load(col0 + j, mask=j < num_keys, other=0.0)[None, :] if HAS_COL0 else 0.0
        kt = _columns(k0, skt0, j, e0, E0, num_keys, MASK or not EVEN)
        s = _product(q0, kt, c0, HAS_COL0, PRECISION)
        if not POLY and not PLAIN:
            s = _log2_weight(
                _scaled(s, scale0[:, None], row0[:, None], LINK0, HAS_ROW0), LINK0, PARAM0
            )
        if E1 > 0:
            c1 = tl.load(col1 + j, mask=j < num_keys, other=0.0)[None, :] if HAS_COL1 else 0.0
            kt1 = _columns(k1, skt1, j, e1, E1, num_keys, MASK or not EVEN)
            t1 = _product(q1, kt1, c1, HAS_COL1, PRECISION)
            s += _log2_weight(
                _scaled(t1, scale1[:, None], row1[:, None], LINK1, HAS_ROW1), LINK1, PARAM1
            )
        if BIAS == 1:
            s += far[:, None]
        elif BIAS == 2:
            s += _bias(table, i[:, None], j[None, :], n[:, None], num_queries, CLIP)
        values = _rows(v, svt, j, dv, V, num_keys, MASK or not EVEN)
        if MASK:
            seen = _visible(
                i[:, None], j[None, :], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
            # A value that is not finite must not meet a weight of zero: 0 times NaN is NaN.
            finite = tl.abs(values) < float("inf")
            bad = tl.max(tl.where(finite, 0, 1), 1) > 0
            values = tl.where(finite, values, 0.0)
            s = tl.where(bad[None, :], float("nan"), s)
            s = tl.where(seen, s, 0.0 if POLY else float("-inf"))
        if PLAIN:
            # One plain dot product: the positive scale waits until the exponent, one operation.
            rate = scale0 * LOG2E
            higher = tl.maximum(peak, tl.max(s, 1) * rate)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s * rate[:, None] - base[:, None])
            shrink = tl.exp2(peak - base)
        elif POLY:
            # The weight is s^p itself: no logarithm, and the row's scale is a power too.
            higher = tl.maximum(peak, tl.max(tl.abs(s), 1))
            inverse = tl.where(higher > 0.0, 1.0 / tl.where(higher > 0.0, higher, 1.0), 0.0)
            p = _power(s * inverse[:, None], PARAM0)
            shrink = _power(peak * inverse, PARAM0)
        else:
            higher = tl.maximum(peak, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(s - base[:, None])
            shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(p, 1)
        if DROPOUT:
            kept = _kept(seed, bh, n[:, None], j[None, :], num_queries, num_keys, dropout)
            p = tl.where(kept, p, 0.0)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = higher
    return acc, mass, peak


@triton.jit
def forward(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, TABLE, LENGTHS, IDS, OUT, LSE,
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
    """out and log_mass of one block of queries."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), bh % num_heads
    # Late blocks of a causal filter have the most to do: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    i = n + place
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, E0, num_queries, True)
    scale0 = tl.load(S0 + line + n, mask=inside, other=0.0)
    row0 = tl.load(R0 + line + n, mask=inside, other=0.0) if HAS_ROW0 else scale0
    q1, scale1, row1 = q0, scale0, scale0
    if E1 > 0:
        q1 = _rows(Q1 + b * sqb1 + h * sqh1, sqt1, n, e1, E1, num_queries, True)
        scale1 = tl.load(S1 + line + n, mask=inside, other=0.0)
        row1 = tl.load(R1 + line + n, mask=inside, other=0.0) if HAS_ROW1 else scale1
    k0 = K0 + b * skb0 + (h // group0) * skh0
    k1 = K1 + b * skb1 + (h // group1) * skh1
    v = V_ + b * svb + (h // group_v) * svh
    col0 = C0 + b * scb0 + (h // gc0) * sch0
    col1 = C1 + b * scb1 + (h // gc1) * sch1
    table = TABLE
    far = scale0
    if CLIP >= 0:
        table = TABLE + line * (2 * CLIP + 1)
        last = table + n.to(tl.int64) * (2 * CLIP + 1) + 2 * CLIP
        far = LOG2E * tl.load(last, mask=inside, other=0.0)

    acc = tl.zeros((BM, V), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    peak = tl.zeros((BM,), tl.float32)
    if not POLY:
        peak += float("-inf")
    low = block * BM + place
    high = tl.minimum(block * BM + BM, num_queries) - 1 + place
    start, stop, sure_start, sure_stop = _key_range(low, high, b, first, LENGTHS, num_keys, FILTER)
    start = tl.maximum(start, 0) // BN * BN
    stop = tl.maximum(stop, start)
    if SIMPLE:
        # [start, sure_start) and [sure_stop, stop) need a mask; what lies between does not.
        sure_start = tl.minimum(tl.maximum((sure_start + BN - 1) // BN * BN, start), stop)
        sure_stop = tl.maximum(sure_stop // BN * BN, sure_start)
    else:
        sure_start = stop
        sure_stop = stop
    for span in tl.static_range(4):
        # In turn: masked, beyond the table's reach, within it, masked.
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
            acc, mass, peak = _forward_span(
                acc, mass, peak, first_key, last_key, q0, q1, scale0, scale1, row0, row1, far,
                k0, k1, v, col0, col1, table, LENGTHS, IDS, i, n, b, bh, first, num_queries,
                num_keys, seed, dropout, skt0, skt1, svt, stride_ids, e0, e1, dv, E0, E1, V, LINK0,
                LINK1, PARAM0, PARAM1, HAS_COL0, HAS_COL1, HAS_ROW0, HAS_ROW1, CLIP, _reach(CLIP, span, 1), FILTER,
                LINK0 == IDENTITY and E1 == 0 and CLIP < 0, span == 0 or span == 3, EVEN, POLY, DROPOUT, PRECISION, BN,
            )  # fmt: skip
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    out = acc / safe[:, None]
    if DROPOUT:
        out = out / (1.0 - dropout)
    if POLY:
        peak = PARAM0 * tl.log2(tl.where(empty, 1.0, peak * tl.abs(scale0)))
    lse = tl.where(empty, float("-inf"), LN2 * (tl.where(empty, 0.0, peak) + tl.log2(safe)))
    e = tl.arange(0, V)
    target = OUT + (line + n[:, None].to(tl.int64)) * dv + e[None, :]
    tl.store(target, out.to(OUT.dtype.element_ty), mask=inside[:, None] & (e[None, :] < dv))
    tl.store(LSE + line + n, lse, mask=inside)
