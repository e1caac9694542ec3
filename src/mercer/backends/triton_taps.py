"""The kernels of attention to convolved keys and values: what flash attention does not do.

    k~_j = sum_d w_j[0, d] k_{j+d}              of all keys but the nearest: for flash attention
    k~_ij = sum_d w_j[1 + a, d] k_{j+d}         of key j = i - a, for a from 0 to P - 1: here

and the same for values. W holds the kernels of a key, [B, T, H or 1, 1 + P, S], tap d in column
R + d: the whole one, and as a query sees it that is `a` places away.

What this must meet: nothing is read that a query must not see; a key or value that is not finite
spoils the rows that see it and no others (flash attention gets zeros there, and `merge` spoils the
rows from the first such place on); every sum is owned by one program, in float32, in a fixed order.

Letters: i queries, j keys, a how far a key is before the query, d offsets of taps. N = T - P keys
are seen by flash attention; its query n is query n + P here.
"""

import triton
import triton.language as tl

NONE, LEFT, TRUNCATE, SHRINK = (tl.constexpr(n) for n in range(4))
# The place of what is not there.
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _rows(X, sb, sh, st, b, h, t, ok, e, width):
    """Rows t of a head in float32, zero where not ok."""
    p = X + b * sb + h * sh + t[:, None].to(tl.int64) * st + e[None, :]
    return tl.load(p, mask=ok[:, None] & (e[None, :] < width), other=0.0).to(tl.float32)


@triton.jit
def _finite(x):
    """x, and zero where it is not finite."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _broken(x):
    """Which rows are not finite."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1) > 0


@triton.jit
def _put(X, sb, sh, st, b, h, t, ok, e, width, x):
    p = X + b * sb + h * sh + t[:, None].to(tl.int64) * st + e[None, :]
    tl.store(p, x.to(X.dtype.element_ty), mask=ok[:, None] & (e[None, :] < width))


@triton.jit
def _tap(W, b, h, t, ok, length, per_head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """One column of the kernels of keys t."""
    heads = tl.where(per_head > 0, per_head, 1)
    row = (b * length + t) * heads + tl.where(per_head > 0, h, 0)
    return tl.load(W + row * COLUMNS + COLUMN, mask=ok, other=0.0)


@triton.jit
def _whole(
    X, W, sb, sh, st, b, h, j, e, length, width, per_head,
    R: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Keys j, convolved by their whole kernels; as they are if R is negative. And which are broken.

    A neighbour that is not finite counts as zero: it breaks its own place and later rows.
    """
    inside = j < length
    own = _rows(X, sb, sh, st, b, h, j, inside, e, width)
    broken = _broken(own)
    if R < 0:
        x = _finite(own)
    else:
        x = tl.zeros((BM, D), tl.float32)
        for d in tl.static_range(-R, LAST + 1):
            ok = inside & (j + d >= 0) & (j + d < length)
            tap = _tap(W, b, h, j, ok, length, per_head, R + d, COLUMNS)
            x += tap[:, None] * _finite(_rows(X, sb, sh, st, b, h, j + d, ok, e, width))
    return x, broken


@triton.jit
def _seen(
    X, W, sb, sh, st, b, h, i, ok, e, length, width, per_head,
    A: tl.constexpr, R: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Key i - A as query i sees it."""
    j = i - A
    there = ok & (j >= 0)
    if R < 0:
        x = _rows(X, sb, sh, st, b, h, j, there, e, width)
    else:
        x = tl.zeros((BM, D), tl.float32)
        for d in tl.static_range(-R, R + 1):
            # What lies beyond the query is not read; by "shrink" nor is as much on the left.
            if (d <= A) and (RULE != SHRINK or -d <= A):
                reads = there & (j + d >= 0)
                tap = _tap(W, b, h, j, reads, length, per_head, (1 + A) * S + R + d, COLUMNS)
                x += tap[:, None] * _rows(X, sb, sh, st, b, h, j + d, reads, e, width)
    return x


@triton.jit
def kernels(
    TAPS, W, count, rate,
    R: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    NORMAL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """W from the taps, [rows, S]: softmax(rate * taps) over what is visible, or the taps."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = tl.arange(0, SP)[None, :]
    ok = (row < count) & (column < S)
    u = tl.load(TAPS + row * S + column, mask=ok, other=0.0).to(tl.float32)
    d = column - R
    for g in tl.static_range(1 + P):
        seen = _visible(d, g, R, RULE) & (column < S)
        if NORMAL:
            x = tl.where(seen, u * rate, float("-inf"))
            x = tl.exp(x - tl.max(x, 1)[:, None])
            x = x / tl.sum(x, 1)[:, None]
        else:
            x = tl.where(seen, u, 0.0)
        tl.store(W + (row * (1 + P) + g) * S + column, x, mask=ok)


@triton.jit
def _visible(d, G: tl.constexpr, R: tl.constexpr, RULE: tl.constexpr):
    """Whether tap d is visible in group G: the whole kernel, or that of a key G - 1 places away."""
    NEAR: tl.constexpr = R if G == 0 or G - 1 > R else G - 1
    seen = (d >= -R) & (d <= R)
    if RULE == LEFT:
        seen = seen & (d <= 0)
    if RULE == TRUNCATE:
        seen = seen & (d <= NEAR)
    if RULE == SHRINK:
        seen = seen & (d <= NEAR) & (d >= -NEAR)
    return seen


@triton.jit
def kernels_backward(
    DW, W, DTAPS, count, heads, rate,
    R: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    NORMAL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gradient of the taps; `heads` rows of DW belong to each row of W."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = tl.arange(0, SP)[None, :]
    ok = (row < count) & (column < S)
    d = column - R
    du = tl.zeros((BM, SP), tl.float32)
    for g in tl.static_range(1 + P):
        seen = ok & _visible(d, g, R, RULE)
        # A tap beyond the query has its share and reads nothing.
        reads = seen
        if g > 0:
            reads = seen & (d <= g - 1)
        grad = tl.zeros((BM, SP), tl.float32)
        for h in range(heads):
            grad += tl.load(
                DW + ((row * heads + h) * (1 + P) + g) * S + column, mask=reads, other=0.0
            )
        if NORMAL:
            w = tl.load(W + (row * (1 + P) + g) * S + column, mask=seen, other=0.0)
            du += w * (grad - tl.sum(w * grad, 1)[:, None]) * rate
        else:
            du += grad
    tl.store(DTAPS + row * S + column, du.to(DTAPS.dtype.element_ty), mask=ok)


@triton.jit
def convolve(
    K, V, WK, WV, KT, VT, BAD,
    kb, kh, kt, vb, vh, vt, heads, length, width, wide, key_heads, value_heads,
    RK: tl.constexpr, CK: tl.constexpr, LK: tl.constexpr, RV: tl.constexpr, CV: tl.constexpr,
    LV: tl.constexpr, D: tl.constexpr, V_: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Keys and values, convolved by their whole kernels, contiguous [B, H, T, D], and finite.

    BAD is the first place of each block that is not.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    j = tl.program_id(0) * BM + tl.arange(0, BM)
    e, f = tl.arange(0, D), tl.arange(0, V_)
    y, spoiled = _whole(
        V, WV, vb, vh, vt, b, h, j, f, length, wide, value_heads, RV, CV, LV, V_, BM
    )
    y = y.to(VT.dtype.element_ty).to(tl.float32)
    spoiled = spoiled | _broken(y)
    line = bh.to(tl.int64)
    _put(VT, 0, length * wide, wide, b, line, j, j < length, f, wide, _finite(y))
    x, broken = _whole(K, WK, kb, kh, kt, b, h, j, e, length, width, key_heads, RK, CK, LK, D, BM)
    x = x.to(KT.dtype.element_ty).to(tl.float32)
    spoiled = spoiled | broken | _broken(x)
    _put(KT, 0, length * width, width, b, line, j, j < length, e, width, _finite(x))
    first = tl.min(tl.where(spoiled & (j < length), j, NOWHERE), 0)
    tl.store(BAD + line * tl.num_programs(0) + tl.program_id(0), first)


@triton.jit
def merge(
    Q, K, V, WK, WV, FAR, FAR_LSE, BAD, OUT, LSE, SCORES,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, ob, oh, ot,
    heads, length, width, wide, key_heads, value_heads, blocks, scale,
    RK: tl.constexpr, SK: tl.constexpr, CK: tl.constexpr,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr,
    P: tl.constexpr, RULE: tl.constexpr, HAS_FAR: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, D: tl.constexpr, V_: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The nearest P keys of each query, and what flash attention made of the others.

    FAR_LSE becomes that of the whole row, for flash attention's backward.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < length
    e, f = tl.arange(0, D), tl.arange(0, V_)
    q = _rows(Q, qb, qh, qt, b, h, i, ok, e, width)
    row = bh.to(tl.int64) * length + i
    far_row = bh.to(tl.int64) * (length - P) + i - P
    if HAS_FAR:
        before = ok & (i >= P)
        acc = _rows(FAR, fb, fh, ft, b, h, i - P, before, f, wide)
        peak = tl.load(FAR_LSE + far_row, mask=before, other=float("-inf"))
        mass = tl.where(before, 1.0, 0.0)
    else:
        acc = tl.zeros((BM, V_), tl.float32)
        peak = tl.full((BM,), float("-inf"), tl.float32)
        mass = tl.zeros((BM,), tl.float32)
    for a in tl.static_range(P):
        x = _seen(K, WK, kb, kh, kt, b, h, i, ok, e, length, width, key_heads,
                  a, RK, SK, CK, RULE, D, BM)  # fmt: skip
        s = tl.sum(q * x, 1) * scale
        s = tl.where(tl.abs(s) < float("inf"), s, float("nan"))
        there = ok & (i >= a)
        s = tl.where(there, s, float("-inf"))
        tl.store(SCORES + row * P + a, s, mask=ok)
        y = _seen(V, WV, vb, vh, vt, b, h, i, ok, f, length, wide, value_heads,
                  a, RV, SV, CV, RULE, V_, BM)  # fmt: skip
        # A key that is there makes the top finite; before the first, nothing has been summed.
        top = tl.where(there, tl.maximum(peak, s), 0.0)
        old = tl.where(mass == 0.0, 0.0, tl.exp(peak - top))
        new = tl.where(there, tl.exp(s - top), 0.0)
        old = tl.where(there, old, 1.0)
        acc = acc * old[:, None] + new[:, None] * y
        mass = mass * old + new
        peak = tl.where(there, top, peak)
    out = acc / tl.where(ok, mass, 1.0)[:, None]
    out = tl.where(tl.abs(out) < float("inf"), out, float("nan"))
    lse = peak + tl.log(tl.where(ok, mass, 1.0))
    if HAS_FAR:
        block = tl.arange(0, BLOCKS)
        bad = tl.load(BAD + bh.to(tl.int64) * blocks + block, mask=block < blocks, other=NOWHERE)
        place = tl.min(bad, 0)
        spoiled = (i >= place) if CAUSAL else (i < 0) | (place < NOWHERE)
        out = tl.where(spoiled[:, None], float("nan"), out)
        lse = tl.where(spoiled, float("nan"), lse)
    _put(OUT, ob, oh, ot, b, h, i, ok, f, wide, out)
    tl.store(LSE + row, lse, mask=ok)
    if HAS_FAR:
        tl.store(FAR_LSE + far_row, lse, mask=ok & (i >= P))


@triton.jit
def pulls(
    V, WV, GRAD, OUT, LSE, SCORES, PULLS,
    vb, vh, vt, gb, gh, gt, ob, oh, ot, heads, length, wide, value_heads,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    V_: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dS_ia = P_ia (<dO_i, v~_ia> - <dO_i, out_i>) of the nearest keys, [B, H, T, P]."""
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < length
    f = tl.arange(0, V_)
    grad = _rows(GRAD, gb, gh, gt, b, h, i, ok, f, wide)
    delta = tl.sum(grad * _rows(OUT, ob, oh, ot, b, h, i, ok, f, wide), 1)
    row = bh.to(tl.int64) * length + i
    lse = tl.load(LSE + row, mask=ok, other=0.0)
    for a in tl.static_range(P):
        y = _seen(V, WV, vb, vh, vt, b, h, i, ok, f, length, wide, value_heads,
                  a, RV, SV, CV, RULE, V_, BM)  # fmt: skip
        share = tl.exp(tl.load(SCORES + row * P + a, mask=ok, other=float("-inf")) - lse)
        tl.store(PULLS + row * P + a, share * (tl.sum(grad * y, 1) - delta), mask=ok)


@triton.jit
def _at(X, row, ok, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, other):
    return tl.load(X + row * COLUMNS + COLUMN, mask=ok, other=other)


@triton.jit
def backward(
    Q, K, V, WK, WV, GRAD, OUT, LSE, SCORES, PULLS, FAR_Q, FAR_K, FAR_V, DQ, DK, DV, DWK, DWV,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot,
    fqb, fqh, fqt, fkb, fkh, fkt, fvb, fvh, fvt,
    dqb, dqh, dqt, dkb, dkh, dkt, dvb, dvh, dvt,
    heads, length, width, wide, key_heads, value_heads, scale,
    RK: tl.constexpr, SK: tl.constexpr, CK: tl.constexpr, LK: tl.constexpr,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr, LV: tl.constexpr,
    P: tl.constexpr, RULE: tl.constexpr, HAS_FAR: tl.constexpr, ALONE: tl.constexpr,
    D: tl.constexpr, V_: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys, values and kernels from those that flash attention gave.

    ALONE: a query's nearest key shows it itself only, so that no row needs another's pull.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = m < length
    e, f = tl.arange(0, D), tl.arange(0, V_)
    row = bh.to(tl.int64) * length + m
    # The row of W and DW; kernels that all heads share have a gradient from each.
    dw_row = (b * length + m) * heads + h
    far = length - P
    own = tl.zeros((BM,), tl.float32)
    if ALONE:
        grad = _rows(GRAD, gb, gh, gt, b, h, m, ok, f, wide)
        delta = tl.sum(grad * _rows(OUT, ob, oh, ot, b, h, m, ok, f, wide), 1)
        y = _seen(V, WV, vb, vh, vt, b, h, m, ok, f, length, wide, value_heads,
                  0, RV, SV, CV, RULE, V_, BM)  # fmt: skip
        share = tl.exp(_at(SCORES, row, ok, 0, P, float("-inf")) - _at(LSE, row, ok, 0, 1, 0.0))
        own = share * (tl.sum(grad * y, 1) - delta)

    if P > 0:
        dq = tl.zeros((BM, D), tl.float32)
        if HAS_FAR:
            dq = _rows(FAR_Q, fqb, fqh, fqt, b, h, m - P, ok & (m >= P), e, width)
        for a in tl.static_range(P):
            x = _seen(K, WK, kb, kh, kt, b, h, m, ok, e, length, width, key_heads,
                      a, RK, SK, CK, RULE, D, BM)  # fmt: skip
            pull = own
            if not ALONE:
                pull = _at(PULLS, row, ok & (m >= a), a, P, 0.0)
            dq += (scale * pull)[:, None] * x
        _put(DQ, dqb, dqh, dqt, b, h, m, ok, e, width, dq)

    dk = tl.zeros((BM, D), tl.float32)
    if HAS_FAR:
        if RK < 0:
            dk = _rows(FAR_K, fkb, fkh, fkt, b, h, m, ok & (m < far), e, width)
        else:
            for d in tl.static_range(-RK, LK + 1):
                j = m - d
                there = ok & (j >= 0) & (j < far)
                tap = _tap(WK, b, h, j, there, length, key_heads, RK + d, CK)
                dk += tap[:, None] * _rows(FAR_K, fkb, fkh, fkt, b, h, j, there, e, width)
    for a in tl.static_range(P):
        if RK < 0:
            there = ok & (m + a < length)
            pull = own
            if not ALONE:
                pull = _at(PULLS, row + a, there, a, P, 0.0)
            dk += (scale * pull)[:, None] * _rows(Q, qb, qh, qt, b, h, m + a, there, e, width)
        else:
            for d in tl.static_range(-RK, RK + 1):
                if (d <= a) and (RULE != SHRINK or -d <= a):
                    j = m - d
                    there = ok & (j >= 0) & (j + a < length)
                    pull = own
                    if not ALONE:
                        pull = _at(PULLS, row - d + a, there, a, P, 0.0)
                    tap = _tap(WK, b, h, j, there, length, key_heads, (1 + a) * SK + RK + d, CK)
                    x = _rows(Q, qb, qh, qt, b, h, j + a, there, e, width)
                    dk += (scale * tap * pull)[:, None] * x
    _put(DK, dkb, dkh, dkt, b, h, m, ok, e, width, dk)

    dv = tl.zeros((BM, V_), tl.float32)
    if HAS_FAR:
        if RV < 0:
            dv = _rows(FAR_V, fvb, fvh, fvt, b, h, m, ok & (m < far), f, wide)
        else:
            for d in tl.static_range(-RV, LV + 1):
                j = m - d
                there = ok & (j >= 0) & (j < far)
                tap = _tap(WV, b, h, j, there, length, value_heads, RV + d, CV)
                dv += tap[:, None] * _rows(FAR_V, fvb, fvh, fvt, b, h, j, there, f, wide)
    for a in tl.static_range(P):
        if RV < 0:
            there = ok & (m + a < length)
            share = tl.exp(_at(SCORES, row + a, there, a, P, float("-inf"))
                           - _at(LSE, row + a, there, 0, 1, 0.0))  # fmt: skip
            dv += share[:, None] * _rows(GRAD, gb, gh, gt, b, h, m + a, there, f, wide)
        else:
            for d in tl.static_range(-RV, RV + 1):
                if (d <= a) and (RULE != SHRINK or -d <= a):
                    j = m - d
                    there = ok & (j >= 0) & (j + a < length)
                    share = tl.exp(_at(SCORES, row - d + a, there, a, P, float("-inf"))
                                   - _at(LSE, row - d + a, there, 0, 1, 0.0))  # fmt: skip
                    tap = _tap(WV, b, h, j, there, length, value_heads, (1 + a) * SV + RV + d, CV)
                    y = _rows(GRAD, gb, gh, gt, b, h, j + a, there, f, wide)
                    dv += (tap * share)[:, None] * y
    _put(DV, dvb, dvh, dvt, b, h, m, ok, f, wide, dv)

    if RK >= 0:
        if HAS_FAR:
            g = _rows(FAR_K, fkb, fkh, fkt, b, h, m, ok & (m < far), e, width)
        else:
            g = tl.zeros((BM, D), tl.float32)
        for d in tl.static_range(-RK, LK + 1):
            there = ok & (m + d >= 0) & (m + d < length)
            x = _rows(K, kb, kh, kt, b, h, m + d, there, e, width)
            tl.store(DWK + dw_row * CK + RK + d, tl.sum(g * x, 1), mask=ok)
        for a in tl.static_range(P):
            there = ok & (m + a < length)
            pull = own
            if not ALONE:
                pull = _at(PULLS, row + a, there, a, P, 0.0)
            g = (scale * pull)[:, None] * _rows(Q, qb, qh, qt, b, h, m + a, there, e, width)
            for d in tl.static_range(-RK, RK + 1):
                if (d <= a) and (RULE != SHRINK or -d <= a):
                    x = _rows(K, kb, kh, kt, b, h, m + d, there & (m + d >= 0), e, width)
                    tl.store(DWK + dw_row * CK + (1 + a) * SK + RK + d, tl.sum(g * x, 1), mask=ok)

    if RV >= 0:
        if HAS_FAR:
            g = _rows(FAR_V, fvb, fvh, fvt, b, h, m, ok & (m < far), f, wide)
        else:
            g = tl.zeros((BM, V_), tl.float32)
        for d in tl.static_range(-RV, LV + 1):
            there = ok & (m + d >= 0) & (m + d < length)
            y = _rows(V, vb, vh, vt, b, h, m + d, there, f, wide)
            tl.store(DWV + dw_row * CV + RV + d, tl.sum(g * y, 1), mask=ok)
        for a in tl.static_range(P):
            there = ok & (m + a < length)
            share = tl.exp(_at(SCORES, row + a, there, a, P, float("-inf"))
                           - _at(LSE, row + a, there, 0, 1, 0.0))  # fmt: skip
            g = share[:, None] * _rows(GRAD, gb, gh, gt, b, h, m + a, there, f, wide)
            for d in tl.static_range(-RV, RV + 1):
                if (d <= a) and (RULE != SHRINK or -d <= a):
                    y = _rows(V, vb, vh, vt, b, h, m + d, there & (m + d >= 0), f, wide)
                    tl.store(DWV + dw_row * CV + (1 + a) * SV + RV + d, tl.sum(g * y, 1), mask=ok)


@triton.jit
def _size(x):
    """|x|; not a number is the largest."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit
def clear(G0, G1, PEAKS, SUMS, count, cells, TARGETS: tl.constexpr, BM: tl.constexpr):
    """SUMS = 0, and the largest gradient of each program's share."""
    programs = tl.num_programs(0)
    peak = 0.0
    for start in range(tl.program_id(0) * BM, count, programs * BM):
        n = start + tl.arange(0, BM)
        x = _size(tl.load(G0 + n, mask=n < count, other=0.0).to(tl.float32))
        if TARGETS > 1:
            x = tl.maximum(x, _size(tl.load(G1 + n, mask=n < count, other=0.0).to(tl.float32)))
        peak = tl.maximum(peak, tl.max(x, 0))
    tl.store(PEAKS + tl.program_id(0), peak)
    for start in range(tl.program_id(0) * BM, cells, programs * BM):
        n = start + tl.arange(0, BM)
        tl.store(SUMS + n, tl.zeros((BM,), tl.int64), mask=n < cells)


@triton.jit
def _unit(PEAKS, PROGRAMS: tl.constexpr):
    """The power of two above all gradients, and whether all are finite."""
    peak = tl.max(tl.load(PEAKS + tl.arange(0, PROGRAMS)), 0)
    fine = peak < float("inf")
    bits = tl.where(fine & (peak > 0.0), peak, 1.0).to(tl.int32, bitcast=True)
    return (bits >> 23) - 126, fine


@triton.jit
def _scaled(x, exponent):
    """x 2^exponent for exponents beyond those of one float."""
    half = exponent // 2
    a = ((half + 127) << 23).to(tl.float32, bitcast=True)
    b = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return x * a * b


@triton.jit
def scatter(
    G0, G1, IDS, PEAKS, SUMS, count, width, bits,
    TARGETS: tl.constexpr, PROGRAMS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """SUMS[id] += G, as whole numbers below 2^bits: the same sum in any order."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = n < count
    exponent, fine = _unit(PEAKS, PROGRAMS)
    token = tl.load(IDS + n // width, mask=ok, other=0).to(tl.int64)
    place = token * (TARGETS * width) + n % width
    x = tl.load(G0 + n, mask=ok, other=0.0).to(tl.float32)
    x = tl.where(fine, x, 0.0)
    tl.atomic_add(SUMS + place, _whole_number(x, bits - exponent), mask=ok & (x != 0.0))
    if TARGETS > 1:
        x = tl.load(G1 + n, mask=ok, other=0.0).to(tl.float32)
        x = tl.where(fine, x, 0.0)
        tl.atomic_add(SUMS + place + width, _whole_number(x, bits - exponent), mask=ok & (x != 0.0))


@triton.jit
def _whole_number(x, exponent):
    """x 2^exponent: its 24 bits, moved."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits >> 23) & 255
    digits = ((bits & 0x7FFFFF) | tl.where(power > 0, 0x800000, 0)).to(tl.int64)
    move = tl.where(power > 0, power, 1) - 150 + exponent
    left = digits << tl.minimum(tl.maximum(move, 0), 40).to(tl.int64)
    right = digits >> tl.minimum(tl.maximum(-move, 0), 40).to(tl.int64)
    size = tl.where(move >= 0, left, right)
    return tl.where(bits < 0, -size, size)


@triton.jit
def gathered(
    PEAKS, SUMS, TABLE, cells, bits, PROGRAMS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Whole numbers back to a gradient."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = n < cells
    exponent, fine = _unit(PEAKS, PROGRAMS)
    x = tl.load(SUMS + n, mask=ok, other=0).to(tl.float32)
    x = tl.where(fine, _scaled(x, exponent - bits), float("nan"))
    tl.store(TABLE + n, x.to(TABLE.dtype.element_ty), mask=ok)
