"""The forward of the fused kernels, for one lowered term.

    log w_ij = sum_f link_f(scale_f,i (<q^f_i, k^f_j> + col^f_j) + row^f_i) + table[i, clip(j - i)]

No [Q, K] tensor is stored. Each sum belongs to one program, so that the same input gives the same
bits. All but the operands of matrix products is float32. Only blocks with a visible pair are
visited, and only blocks with a hidden pair are masked.

One program owns a block of queries of one head. A term has one or two slots of features (E0, E1);
logarithms are to the base 2.
"""

import triton
import triton.language as tl

from .bands import BLOCKS, PAIRS, _band_at, _band_block, _band_start, _empty_span, _form, _of_keys
from .primitives import (
    LN2,
    LOG2E,
    _below,
    _block,
    _column,
    _exactly,
    _head,
    _held,
    _kept,
    _numbers_of,
    _row_of,
    _rows,
    _store_exactly,
)
from .scores import (
    BY_LENGTHS,
    FLAT,
    PLAIN,
    POLY,
    _by_keys,
    _down,
    _inverse_length,
    _link,
    _mode,
    _power,
    _scale,
    _scaled,
)
from .visibility import _cut, _key_range, _visible


@triton.jit
def _spared(values, t):
    """Values with 0 in place of what is not finite, and scores with NaN for the keys of those.

    A hidden key has weight 0, and 0 times NaN is NaN.
    """
    finite = tl.abs(values) < float("inf")
    bad = tl.max(tl.where(finite, 0, 1), 1) > 0
    return tl.where(finite, values, 0.0), tl.where(bad[None, :], float("nan"), t)


@triton.jit
def _finished(acc, mass, peak):
    """(out, log_mass) of sums; the peak is a logarithm to the base 2."""
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    lse = tl.where(empty, float("-inf"), LN2 * (tl.where(empty, 0.0, peak) + tl.log2(safe)))
    return acc / safe[:, None], lse


@triton.jit
def _forward_span(
    acc, mass, peak, start, stop, q0, q1, scale0, scale1, row0, row1, far, k0, k1, v, col0, col1,
    band, tiles, begin, lengths, ids, i, n, b, bh, h, h0, h1, hv, first_query, first, num_queries, num_keys, seed, dropout, skb0, skt0, skb1, skt1, svb, svt, stride_ids, stb, width, e0, e1, dv,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, V: tl.constexpr, BIAS: tl.constexpr,
    FILTER: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr, MASK: tl.constexpr,
    EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SUMMED: tl.constexpr, TMA: tl.constexpr, TABLE: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop: the running peak, mass and sums of values.

    SUMMED: the second slot is another function of the same products, and weights add up.
    """
    CHECK: tl.constexpr = MASK or not EVEN
    MODE0: tl.constexpr = _mode(SLOT0.mode, GROUPED, SLOT0.inside)
    MODE1: tl.constexpr = _mode(SLOT1.mode, GROUPED, SLOT1.inside)
    # Numbers per key are read one block ahead, to hide their latency.
    c0, c1 = far, far
    if SLOT0.col:
        c0 = _numbers_of(col0, start, num_keys, BN, SLOT0.col)
    if SLOT1.col:
        c1 = _numbers_of(col1, start, num_keys, BN, SLOT1.col)
    for first_key in tl.range(start, stop, BN):
        j = first_key + tl.arange(0, BN)
        k = _block(k0, b, h0, skb0, skt0, first_key, e0, num_keys, BN, SLOT0.width, CHECK, TMA)
        t = tl.dot(q0, tl.trans(k), input_precision=PRECISION)
        if SLOT1.width > 0:
            other = _block(
                k1, b, h1, skb1, skt1, first_key, e1, num_keys, BN, SLOT1.width, CHECK, TMA
            )
            if SAME:
                t = tl.dot(q1, tl.trans(other), t, input_precision=PRECISION)
            else:
                t1 = tl.dot(q1, tl.trans(other), input_precision=PRECISION)
        if SUMMED:
            t1 = t
        if SLOT0.inside > 0 or SLOT1.inside > 0:
            wide = k.to(tl.float32)
            squares = tl.sum(wide * wide, 1)[None, :]
            t = _by_keys(t, squares, SLOT0.inside)
            if SUMMED:
                t1 = _by_keys(t1, squares, SLOT1.inside)
        if SLOT0.col:
            t += _below(c0, SLOT0.col)
            c0 = _numbers_of(col0, first_key + BN, num_keys, BN, SLOT0.col)
        values = _block(v, b, hv, svb, svt, first_key, dv, num_keys, BN, V, CHECK, TMA)
        seen = j[None, :] >= 0
        if MASK:
            seen = _visible(
                i[:, None], j[None, :], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
            values, t = _spared(values, t)
        if FORM == PLAIN:
            # One dot product: the positive scale is applied in the exponent, in one instruction.
            if MASK:
                t = tl.where(seen, t, float("-inf"))
            rate = scale0 * LOG2E
            higher = tl.maximum(peak, tl.max(t, 1) * rate + far)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp2(t * _down(rate, MODE0) - (base - far)[:, None])
            shrink = tl.exp2(peak - base)
        elif FORM == POLY:
            # The weight is s^p itself, without a logarithm. The row's scale is a power, too.
            if MASK:
                t = tl.where(seen, t, 0.0)
            higher = tl.maximum(peak, tl.max(tl.abs(t), 1))
            inverse = tl.where(higher > 0.0, 1.0 / tl.where(higher > 0.0, higher, 1.0), 0.0)
            p = _power(t * inverse[:, None], SLOT0.param)
            shrink = _power(peak * inverse, SLOT0.param)
        else:
            s = _scaled(t, _down(scale0, MODE0), row0[:, None], SLOT0.link, SLOT0.row)
            e, a, _ = _link(s, SLOT0.link, SLOT0.param, FORM == FLAT)
            if SUMMED or (SLOT1.width > 0 and not SAME):
                if SLOT1.col:
                    t1 += _below(c1, SLOT1.col)
                    c1 = _numbers_of(col1, first_key + BN, num_keys, BN, SLOT1.col)
                s1 = _scaled(t1, _down(scale1, MODE1), row1[:, None], SLOT1.link, SLOT1.row)
                exponent1, a1, _ = _link(s1, SLOT1.link, SLOT1.param, False)
                if not SUMMED:
                    e += exponent1
                    a = a * a1
            if BIAS == BLOCKS:
                e += _band_block(
                    band, tiles, b, h, stb, n, first_query, first_key - begin, num_queries, width,
                    BM, BN, TABLE.tiled,
                )  # fmt: skip
            elif BIAS == PAIRS:
                e += _band_at(band, n[:, None], j[None, :], num_queries, width, begin)
            if FORM == FLAT:
                # Weights from 0 to 1 as they are: they do not overflow, and they do not all vanish.
                p = tl.where(seen, a, 0.0) if MASK else a
                higher = peak
                shrink = peak
            else:
                if MASK:
                    e = tl.where(seen, e, float("-inf"))
                top = e
                if SUMMED:
                    if MASK:
                        exponent1 = tl.where(seen, exponent1, float("-inf"))
                    top = tl.maximum(e, exponent1)
                higher = tl.maximum(peak, tl.max(top, 1) + far)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                p = a * tl.exp2(e - (base - far)[:, None])
                if SUMMED:
                    p += a1 * tl.exp2(exponent1 - base[:, None])
                shrink = tl.exp2(peak - base)
        if FORM == FLAT:
            mass += tl.sum(p, 1)
        else:
            mass = mass * shrink + tl.sum(p, 1)
            acc = acc * shrink[:, None]
        if DROPOUT:
            kept = _kept(seed, bh, n[:, None], j[None, :], num_queries, num_keys, dropout)
            p = tl.where(kept, p, 0.0)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = higher
    return acc, mass, peak


@triton.jit(do_not_specialize=["num_heads", "num_keys", "first", "seed"])
def forward(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, BAND, TILES, LENGTHS, IDS, OUT, LOW, LSE,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, V: tl.constexpr, TABLE: tl.constexpr,
    FILTER: tl.constexpr, SIMPLE: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr,
    EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, HAS_LOW: tl.constexpr, SPLIT: tl.constexpr, SUMMED: tl.constexpr,
    TMA: tl.constexpr, TOKENS: tl.constexpr, HELD: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """out and log_mass of one block of queries; with SPLIT, over one part of the keys.

    GROUPED: queries, of one block, are heads that share their keys, all at the place of the last.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    # Late blocks of a causal filter have the most to do, and start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    i = n + place
    if GROUPED:
        place = num_keys - 1
        i = n * 0 + place
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, SLOT0.width, num_queries, True)
    none = tl.zeros((BM,), tl.float32)
    # The heads whose scales the queries have: one head, or all of a group.
    of = h * num_queries + tl.minimum(n, num_queries - 1) if GROUPED else h
    scale0 = _scale(S0, number0, ss0, of, line, n, inside, SLOT0.mode, SLOT0.log)
    q1, scale1, row1 = q0, scale0, none
    if SLOT1.width > 0 or SUMMED:
        scale1 = _scale(S1, number1, ss1, of, line, n, inside, SLOT1.mode, SLOT1.log)
    if SLOT0.inside == BY_LENGTHS or SLOT1.inside == BY_LENGTHS:
        inverse = _inverse_length(tl.sum(q0.to(tl.float32) * q0.to(tl.float32), 1))
        if SLOT0.inside == BY_LENGTHS:
            scale0 = scale0 * inverse
        if SLOT1.inside == BY_LENGTHS:
            scale1 = scale1 * inverse
    if HELD & 1:
        q0 = _held(q0, SLOT0.width, PRECISION)
    row0 = tl.load(R0 + line + n, mask=inside, other=0.0) if SLOT0.row else none
    if SLOT1.width > 0:
        q1 = _rows(Q1 + b * sqb1 + h * sqh1, sqt1, n, e1, SLOT1.width, num_queries, True)
        if HELD & 4:
            q1 = _held(q1, SLOT1.width, PRECISION)
    if SLOT1.width > 0 or SUMMED:
        row1 = tl.load(R1 + line + n, mask=inside, other=0.0) if SLOT1.row else none
    h0, h1, hv = h // group0, h // group1, h // group_v
    k0 = _head(K0, b, h0, skb0, skh0, TMA)
    k1 = _head(K1, b, h1, skb1, skh1, TMA and SLOT1.width > 0)
    v = _head(V_, b, hv, svb, svh, TMA)
    col0 = _column(C0 + b * scb0, h, of, gc0, sch0, SLOT0.col)
    col1 = _column(C1 + b * scb1, h, of, gc1, sch1, SLOT1.col)
    band, begin = BAND, 0
    far = none
    if TABLE.clip >= 0:
        band = BAND + b * stb + h * sth
        begin = _band_start(block * BM, place, num_keys, width, TABLE.clip)
        # Keys beyond the reach have the first number of the band.
        far = tl.load(band + n.to(tl.int64) * width, mask=inside, other=0.0).to(tl.float32)

    acc = tl.zeros((BM, V), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    peak = tl.zeros((BM,), tl.float32)
    if FORM < POLY:
        peak += float("-inf")
    low = block * BM + place
    high = low if GROUPED else tl.minimum(block * BM + BM, num_queries) - 1 + place
    start, stop, sure_start, sure_stop = _key_range(low, high, b, first, LENGTHS, num_keys, FILTER)
    start, stop, sure_start, sure_stop = _cut(
        start, stop, sure_start, sure_stop, tl.program_id(2), tl.num_programs(2), num_keys, BN, SPLIT,
        SIMPLE,
    )  # fmt: skip
    for span in tl.static_range(4):
        # The spans: masked, beyond the table's reach, within it, masked.
        near = sure_stop
        if TABLE.clip >= 0:
            near = tl.maximum(tl.minimum((low - TABLE.clip + 1) // BN * BN, sure_stop), sure_start)
        bounds = (start, sure_start, near, sure_stop, stop)
        if (SIMPLE or span == 0) and not _empty_span(span, 2, 1, FILTER, TABLE.clip):
            acc, mass, peak = _forward_span(
                acc, mass, peak, bounds[span], bounds[span + 1], q0, q1, scale0, scale1, row0, row1,
                far if span == 1 else none, k0, k1, v, col0, col1, band, TILES, begin, LENGTHS, IDS,
                i, n, b, bh, h, h0, h1, hv, block * BM, first, num_queries, num_keys, seed, dropout,
                skb0, skt0, skb1, skt1, svb, svt, stride_ids, stb, width, e0, e1, dv, SLOT0, SLOT1, V, _of_keys(span, FILTER, TABLE.clip, TABLE.sided), FILTER,
                _form(FORM, _of_keys(span, FILTER, TABLE.clip, TABLE.sided)), SAME, span == 0 or span == 3, EVEN,
                DROPOUT, PRECISION, BM, BN, SUMMED, TMA, TABLE, GROUPED,
            )  # fmt: skip
    empty = mass == 0.0
    if FORM == POLY:
        peak = SLOT0.param * tl.log2(tl.where(empty, 1.0, peak * tl.abs(scale0)))
    out, lse = _finished(acc, mass, peak)
    if DROPOUT:
        out = out / (1.0 - dropout)
    e = tl.arange(0, V)
    target = _row_of(b, h, n.to(tl.int64), line, num_heads, num_queries, TOKENS)
    if SPLIT:
        part = tl.program_id(2).to(tl.int64) * tl.num_programs(1) * num_queries
        line += part
        target += part
    target = target[:, None] * dv + e[None, :]
    mask = inside[:, None] & (e[None, :] < dv)
    _store_exactly(OUT, LOW, target, out, mask, HAS_LOW)
    tl.store(LSE + line + n, lse, mask=inside)


@triton.jit(do_not_specialize=["parts"])
def merge(OUTS, MASSES, OUT, LSE, rows, parts, dv, PARTS: tl.constexpr, V: tl.constexpr):
    """out and log_mass of a row from those of every part of the keys, PARTS at most."""
    n = tl.program_id(0).to(tl.int64)
    part, e = tl.arange(0, PARTS), tl.arange(0, V)
    there, inside = part < parts, e < dv
    log = tl.load(MASSES + part * rows + n, mask=there, other=float("-inf"))
    out = tl.load(
        OUTS + (part * rows + n)[:, None] * dv + e[None, :],
        mask=there[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    peak = tl.max(log, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    # A part that is NaN makes the row NaN.
    share = tl.exp(log - base)
    mass = tl.sum(share, 0)
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    out = tl.sum(out * share[:, None], 0) / safe
    tl.store(OUT + n * dv + e, out.to(OUT.dtype.element_ty), mask=inside)
    tl.store(LSE + n, tl.where(empty, float("-inf"), base + tl.log(safe)))


@triton.jit
def merge_far(
    OUT, LOW, LSE, FAR, FAR_LOW, FAR_LSE, BAND, num_heads, length, dv, stb, sth, stt,
    V: tl.constexpr, BM: tl.constexpr, HAS_LOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Adds the keys beyond a table's reach to the others. The table's end shifts their log_mass."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    e = tl.arange(0, V)
    inside = n < length
    line = bh.to(tl.int64) * length
    offset = _row_of(b, h, n, line, num_heads, length, TOKENS)[:, None] * dv + e[None, :]
    mask = inside[:, None] & (e[None, :] < dv)
    near = _exactly(OUT, LOW, offset, mask, HAS_LOW)
    far = _exactly(FAR, FAR_LOW, offset, mask, HAS_LOW)
    shift = LN2 * tl.load(BAND + b * stb + h * sth + n * stt, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(LSE + line + n, mask=inside, other=float("-inf"))
    c = tl.load(FAR_LSE + line + n, mask=inside, other=float("-inf")) + shift
    peak = tl.maximum(a, c, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    first, second = tl.exp(a - base), tl.exp(c - base)
    mass = first + second
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    out = (near * first[:, None] + far * second[:, None]) / safe[:, None]
    _store_exactly(OUT, LOW, offset, out, mask, HAS_LOW)
    tl.store(LSE + line + n, tl.where(empty, float("-inf"), base + tl.log(safe)), mask=inside)
