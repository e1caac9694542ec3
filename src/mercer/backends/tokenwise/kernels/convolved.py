"""The kernels of attention to convolved keys and values: what flash attention does not do.

    k~_j = sum_d w_j[0, d] k_{j+d}              of all keys but the nearest: for flash attention
    k~_ij = sum_d w_j[1 + a, d] k_{j+d}         of key j = i - a, for a from 0 to P - 1: here

and the same for values. W holds the kernels of a key, [B, T, H or 1, 1 + P, S], tap d in column
R + d: with all taps, and with those that a query `a` places later sees.

Nothing is read that a query must not see. A key or value that is not finite gives NaN in the rows
that see it and in no others: flash attention gets zeros there, and `merge` writes NaN from the first
such place on. Each sum is owned by one program, in float32 and in a fixed order.

Letters: i queries, j keys, a how far a key is before the query, d offsets of taps. N = T - P keys
are seen by flash attention; its query n is query n + P here.
"""

import triton
import triton.language as tl

NONE, LEFT, TRUNCATE, SHRINK = (tl.constexpr(n) for n in range(4))
# The place where all keys are finite: after the last.
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _rows(X, sb, sh, st, b, h, t, ok, e, width):
    """Rows t of a head in float32, zero where not ok."""
    p = X + b * sb + h * sh + t[:, None].to(tl.int64) * st + e[None, :]
    return tl.load(p, mask=ok[:, None] & (e[None, :] < width), other=0.0).to(tl.float32)


@triton.jit
def _put(X, sb, sh, st, b, h, t, ok, e, width, x):
    p = X + b * sb + h * sh + t[:, None].to(tl.int64) * st + e[None, :]
    tl.store(p, x.to(X.dtype.element_ty), mask=ok[:, None] & (e[None, :] < width))


@triton.jit
def _fine(x):
    """Which numbers are finite."""
    return tl.abs(x) < float("inf")


@triton.jit
def _tap(W, b, h, t, ok, length, per_head, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """One column of the kernels of keys t."""
    heads = tl.where(per_head > 0, per_head, 1)
    row = (b * length + t) * heads + tl.where(per_head > 0, h, 0)
    return tl.load(W + row * COLUMNS + COLUMN, mask=ok, other=0.0)


@triton.jit
def _whole(
    X, W, sb, sh, st, b, h, j, e, length, width, per_head,
    R: tl.constexpr, COLUMNS: tl.constexpr, LAST: tl.constexpr, CLEAN: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Keys j, convolved by their whole kernels; as they are if R is negative.

    CLEAN: a neighbour that is not finite counts as zero.
    """
    inside = j < length
    x = tl.zeros((BM, D), tl.float32)
    if R < 0:
        x = _rows(X, sb, sh, st, b, h, j, inside, e, width)
        if CLEAN:
            x = tl.where(_fine(x), x, 0.0)
    else:
        for d in tl.static_range(-R, LAST + 1):
            ok = inside & (j + d >= 0) & (j + d < length)
            tap = _tap(W, b, h, j, ok, length, per_head, R + d, COLUMNS)
            y = _rows(X, sb, sh, st, b, h, j + d, ok, e, width)
            if CLEAN:
                y = tl.where(_fine(y), y, 0.0)
            x += tap[:, None] * y
    return x


@triton.jit
def _seen(
    X, W, sb, sh, st, b, h, i, ok, e, length, width, per_head,
    A: tl.constexpr, R: tl.constexpr, S: tl.constexpr, COLUMNS: tl.constexpr, RULE: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Key i - A as query i sees it."""
    there = ok
    if A > 0:
        there = ok & (i >= A)
    if R < 0:
        x = _rows(X, sb, sh, st, b, h, i - A, there, e, width)
    else:
        x = tl.zeros((BM, D), tl.float32)
        for d in tl.static_range(-R, R + 1):
            if _reads(d, A, RULE):
                reads = there
                if d < 0:
                    reads = there & (i - A + d >= 0)
                tap = _tap(W, b, h, i - A, reads, length, per_head, (1 + A) * S + R + d, COLUMNS)
                x += tap[:, None] * _rows(X, sb, sh, st, b, h, i - A + d, reads, e, width)
    return x


@triton.constexpr_function
def _reads(d, a, rule):
    """Whether tap d of a key that far away reads: not beyond the query; by "shrink", both ways."""
    return d <= a and (rule != SHRINK.value or -d <= a)


@triton.constexpr_function
def _learns(a, rule, normal):
    """Whether the kernel of a key that far away has a gradient: a softmax over one tap has none."""
    return not (a == 0 and rule == SHRINK.value and normal)


@triton.constexpr_function
def _number(d, a, reach, last, rule, normal):
    """Which of the sums that `_spread` gives is of tap d of a key that far away; -1: none of them.

    The first are those of the whole kernel: a = -1.
    """
    taps = range(-reach, reach + 1)
    given = [(-1, tap) for tap in taps if tap <= last]
    for away in range(a + 1):
        if _learns(away, rule, normal):
            given += [(away, tap) for tap in taps if _reads(tap, away, rule)]
    return given.index((a, d)) if (a, d) in given else -1


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
def kernels(
    TAPS, W, count, heads, by_token, by_head, rate,
    R: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    NORMAL: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """W from the taps, [rows, S]: softmax(rate * taps) over what is visible, or the taps."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)[:, None]
    column = tl.arange(0, SP)[None, :]
    ok = (row < count) & (column < S)
    place = row // heads * by_token + row % heads * by_head + column
    u = tl.load(TAPS + place, mask=ok, other=0.0).to(tl.float32)
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
def kernels_backward(
    DW, W, DTAPS, count, heads, tap_heads, length, rate,
    R: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    NORMAL: tl.constexpr, HP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gradient of the taps; `heads` rows of DW belong to each row of W."""
    row = (tl.program_id(0) * BM + tl.arange(0, BM)).to(tl.int64)
    column = tl.arange(0, SP)[None, :]
    ok = (row < count)[:, None] & (column < S)
    d = column - R
    # A tap beyond the sequence or the query has a share of the softmax and reads zero.
    there = (row // tap_heads % length)[:, None] + d
    inside = ok & (there >= 0) & (there < length)
    head = tl.arange(0, HP)[None, :, None]
    line = (row[:, None, None] * heads + head) * ((1 + P) * S) + column[:, None, :]
    du = tl.zeros((BM, SP), tl.float32)
    for g in tl.static_range(1 + P):
        if g == 0 or _learns(g - 1, RULE, NORMAL):
            seen = ok & _visible(d, g, R, RULE)
            reads = inside & _visible(d, g, R, RULE)
            if g > 0:
                reads = reads & (d <= g - 1)
            mask = reads[:, None, :] & (head < heads)
            grad = tl.sum(tl.load(DW + line + g * S, mask=mask, other=0.0), 1)
            if NORMAL:
                w = tl.load(W + (row[:, None] * (1 + P) + g) * S + column, mask=seen, other=0.0)
                du += w * (grad - tl.sum(w * grad, 1)[:, None]) * rate
            else:
                du += grad
    tl.store(DTAPS + row[:, None] * S + column, du.to(DTAPS.dtype.element_ty), mask=ok)


@triton.jit
def convolve(
    K, V, WK, WV, KT, VT, BAD,
    kb, kh, kt, vb, vh, vt, heads, length, width, key_heads, value_heads,
    RK: tl.constexpr, SK: tl.constexpr, CK: tl.constexpr, LK: tl.constexpr,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr, LV: tl.constexpr,
    P: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Keys and values, convolved by their whole kernels, contiguous [B, H, T, D], and finite.

    BAD is the first place of each block that is not: by itself, or as it was mixed.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    j = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = j < length
    e = tl.arange(0, D)
    dtype: tl.constexpr = KT.dtype.element_ty
    line = bh.to(tl.int64)
    x = _whole(K, WK, kb, kh, kt, b, h, j, e, length, width, key_heads, RK, CK, LK, False, D, BM)
    y = _whole(V, WV, vb, vh, vt, b, h, j, e, length, width, value_heads, RV, CV, LV, False, D, BM)
    x, y = x.to(dtype), y.to(dtype)
    first = tl.full((), NOWHERE, tl.int32)
    # A neighbour that is not finite makes the mixture not finite; only then find out which.
    if tl.max(tl.where(_fine(x.to(tl.float32)) & _fine(y.to(tl.float32)), 0, 1)) > 0:
        own = _fine(_rows(K, kb, kh, kt, b, h, j, ok, e, width))
        own = own & _fine(_rows(V, vb, vh, vt, b, h, j, ok, e, width))
        x = _whole(K, WK, kb, kh, kt, b, h, j, e, length, width, key_heads, RK, CK, LK, True, D, BM)
        y = _whole(
            V, WV, vb, vh, vt, b, h, j, e, length, width, value_heads, RV, CV, LV, True, D, BM
        )
        x, y = x.to(dtype), y.to(dtype)
        fx, fy = _fine(x.to(tl.float32)), _fine(y.to(tl.float32))
        x, y = tl.where(fx, x, 0.0).to(dtype), tl.where(fy, y, 0.0).to(dtype)
        first = tl.min(tl.where(own & fx & fy, NOWHERE, j[:, None]))
    _put(KT, 0, length * width, width, b, line, j, ok, e, width, x)
    _put(VT, 0, length * width, width, b, line, j, ok, e, width, y)
    tl.store(BAD + line * tl.num_programs(0) + tl.program_id(0), first)


@triton.jit
def merge(
    Q, K, V, WK, WV, FAR, FAR_LSE, BAD, OUT, LSE, SCORES,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, ob, oh, ot,
    heads, length, width, key_heads, value_heads, blocks, scale,
    RK: tl.constexpr, SK: tl.constexpr, CK: tl.constexpr,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr,
    P: tl.constexpr, RULE: tl.constexpr, HAS_FAR: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Merge the nearest P keys of each query with the output of flash attention.

    FAR_LSE becomes that of the whole row, for flash attention's backward.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < length
    e = tl.arange(0, D)
    row = bh.to(tl.int64) * length + i
    far_row = bh.to(tl.int64) * (length - P) + i - P
    spoiled = i < 0
    if HAS_FAR:
        before = ok & (i >= P)
        acc = _rows(FAR, fb, fh, ft, b, h, i - P, before, e, width)
        peak = tl.load(FAR_LSE + far_row, mask=before, other=float("-inf"))
        mass = tl.where(before, 1.0, 0.0)
        block = tl.arange(0, BLOCKS)
        bad = tl.load(BAD + bh.to(tl.int64) * blocks + block, mask=block < blocks, other=NOWHERE)
        place = tl.min(bad, 0)
        spoiled = (i >= place) if CAUSAL else spoiled | (place < NOWHERE)
    else:
        acc = tl.zeros((BM, D), tl.float32)
        peak = tl.full((BM,), float("-inf"), tl.float32)
        mass = tl.zeros((BM,), tl.float32)
    for a in tl.static_range(P):
        # No store between the loads: it would delay them.
        q = _rows(Q, qb, qh, qt, b, h, i, ok, e, width)
        x = _seen(K, WK, kb, kh, kt, b, h, i, ok, e, length, width, key_heads,
                  a, RK, SK, CK, RULE, D, BM)  # fmt: skip
        y = _seen(V, WV, vb, vh, vt, b, h, i, ok, e, length, width, value_heads,
                  a, RV, SV, CV, RULE, D, BM)  # fmt: skip
        s = tl.sum(q * x, 1) * scale
        s = tl.where(_fine(s), s, float("nan"))
        there = ok & (i >= a)
        s = tl.where(there, s, float("-inf"))
        tl.store(SCORES + row * P + a, s, mask=ok)
        # The first valid key makes the maximum finite; before it nothing has been summed.
        top = tl.where(there, tl.maximum(peak, s), 0.0)
        old = tl.where(mass == 0.0, 0.0, tl.exp(peak - top))
        new = tl.where(there, tl.exp(s - top), 0.0)
        old = tl.where(there, old, 1.0)
        acc = acc * old[:, None] + new[:, None] * y
        mass = mass * old + new
        peak = tl.where(there, top, peak)
    out = acc * (1.0 / tl.where(ok, mass, 1.0))[:, None]
    out = tl.where(_fine(out) & ~spoiled[:, None], out, float("nan"))
    lse = peak + tl.log(tl.where(ok, mass, 1.0))
    lse = tl.where(spoiled, float("nan"), lse)
    _put(OUT, ob, oh, ot, b, h, i, ok, e, width, out)
    tl.store(LSE + row, lse, mask=ok)
    if HAS_FAR:
        tl.store(FAR_LSE + far_row, lse, mask=ok & (i >= P))


@triton.jit
def pulls(
    V, WV, GRAD, OUT, LSE, SCORES, SHARES, PULLS,
    vb, vh, vt, gb, gh, gt, ob, oh, ot, heads, length, width, value_heads,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """P_ia, and dS_ia = P_ia (<dO_i, v~_ia> - <dO_i, out_i>), of the nearest keys, [B, H, T, P]."""
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < length
    e = tl.arange(0, D)
    grad = _rows(GRAD, gb, gh, gt, b, h, i, ok, e, width)
    out = _rows(OUT, ob, oh, ot, b, h, i, ok, e, width)
    row = bh.to(tl.int64) * length + i
    lse = tl.load(LSE + row, mask=ok, other=0.0)
    for a in tl.static_range(P):
        y = _seen(V, WV, vb, vh, vt, b, h, i, ok, e, length, width, value_heads,
                  a, RV, SV, CV, RULE, D, BM)  # fmt: skip
        share = tl.exp(_at(SCORES, row, ok, a, P, float("-inf")) - lse)
        tl.store(SHARES + row * P + a, share, mask=ok)
        tl.store(PULLS + row * P + a, share * tl.sum(grad * (y - out), 1), mask=ok)


@triton.jit
def _at(X, row, ok, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, other):
    return tl.load(X + row * COLUMNS + COLUMN, mask=ok, other=other)


@triton.jit
def _spread(
    FAR, SRC, COEF, W, x, src, own, fb, fh, ft, sb, sh, st, b, h, m, ok, row, e, length, width,
    per_head, factor, R: tl.constexpr, S: tl.constexpr, C: tl.constexpr, L: tl.constexpr,
    P: tl.constexpr, RULE: tl.constexpr, NORMAL: tl.constexpr, HAS_FAR: tl.constexpr,
    ALONE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gradient of keys m, and their part of the gradients of the kernels that read them.

    g_j, of key j as it was seen: FAR from flash attention, COEF times SRC of query j + a from near.
    Then dx_m = sum_d w_{m-d}[d] g_{m-d} and dw_{m-d}[d] = <g_{m-d}, x_m>.
    """
    far = length - P
    dx = tl.zeros((BM, D), tl.float32)
    dots = ()
    if R < 0:
        if HAS_FAR:
            dx = _rows(FAR, fb, fh, ft, b, h, m, ok & (m < far), e, width)
        for a in tl.static_range(P):
            if ALONE:
                dx += own[:, None] * src
            else:
                there = ok & (m + a < length)
                pull = factor * _at(COEF, row + a, there, a, P, 0.0)
                dx += pull[:, None] * _rows(SRC, sb, sh, st, b, h, m + a, there, e, width)
    else:
        for d in tl.static_range(-R, L + 1):
            if HAS_FAR:
                there = ok & (m - d >= 0) & (m - d < far)
                tap = _tap(W, b, h, m - d, there, length, per_head, R + d, C)
                g = _rows(FAR, fb, fh, ft, b, h, m - d, there, e, width)
                dx += tap[:, None] * g
                dots += (tl.where(there, tl.sum(g * x, 1), 0.0),)
            else:
                dots += (tl.zeros((BM,), tl.float32),)
        for a in tl.static_range(P):
            for d in tl.static_range(-R, R + 1):
                if _reads(d, a, RULE):
                    there = ok
                    if d > 0:
                        there = there & (m - d >= 0)
                    if a > d:
                        there = there & (m - d + a < length)
                    tap = _tap(W, b, h, m - d, there, length, per_head, (1 + a) * S + R + d, C)
                    if ALONE:
                        g = own[:, None] * src
                    else:
                        pull = factor * _at(COEF, row - d + a, there, a, P, 0.0)
                        g = _rows(SRC, sb, sh, st, b, h, m - d + a, there, e, width)
                        g = pull[:, None] * g
                    dx += tap[:, None] * g
                    if _learns(a, RULE, NORMAL):
                        dots += (tl.where(there, tl.sum(g * x, 1), 0.0),)
    return dx, dots


@triton.jit
def _put_dots(
    DW, dots, b, h, m, ok, length, heads, R: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    L: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr, NORMAL: tl.constexpr,
):  # fmt: skip
    """Store the gradients of kernels from `_spread`, per head."""
    for a in tl.static_range(-1, P):
        for d in tl.static_range(-R, R + 1):
            if _number(d, a, R, L, RULE, NORMAL) >= 0:
                line = (b * length + m - d) * heads + h
                there = ok & (m - d >= 0) & (m - d < length)
                dot = dots[_number(d, a, R, L, RULE, NORMAL)]
                tl.store(DW + line * C + (1 + a) * S + R + d, dot, mask=there)


@triton.jit
def backward(
    Q, K, V, WK, WV, GRAD, OUT, LSE, SCORES, SHARES, PULLS, FAR_Q, FAR_K, FAR_V,
    DQ, DK, DV, DWK, DWV,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot,
    fqb, fqh, fqt, fkb, fkh, fkt, fvb, fvh, fvt, db, dh, dt,
    heads, length, width, key_heads, value_heads, scale,
    RK: tl.constexpr, SK: tl.constexpr, CK: tl.constexpr, LK: tl.constexpr,
    RV: tl.constexpr, SV: tl.constexpr, CV: tl.constexpr, LV: tl.constexpr,
    P: tl.constexpr, RULE: tl.constexpr, NORMAL: tl.constexpr, HAS_FAR: tl.constexpr,
    ALONE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys, values and kernels from those that flash attention gave.

    ALONE: the nearest key has one visible tap, so no row needs the scores of another. All loads are
    before all stores: a store would delay later loads.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = m < length
    e = tl.arange(0, D)
    row = bh.to(tl.int64) * length + m
    v = _rows(V, vb, vh, vt, b, h, m, ok, e, width)
    k = _rows(K, kb, kh, kt, b, h, m, ok, e, width)
    q, grad = v, v
    share, pull = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    if ALONE:
        q = _rows(Q, qb, qh, qt, b, h, m, ok, e, width)
        grad = _rows(GRAD, gb, gh, gt, b, h, m, ok, e, width)
        out = _rows(OUT, ob, oh, ot, b, h, m, ok, e, width)
        y = _seen(V, WV, vb, vh, vt, b, h, m, ok, e, length, width, value_heads,
                  0, RV, SV, CV, RULE, D, BM)  # fmt: skip
        share = tl.exp(_at(SCORES, row, ok, 0, P, float("-inf")) - _at(LSE, row, ok, 0, 1, 0.0))
        pull = scale * share * tl.sum(grad * (y - out), 1)
    dq = tl.zeros((BM, D), tl.float32)
    if P > 0:
        if HAS_FAR:
            dq = _rows(FAR_Q, fqb, fqh, fqt, b, h, m - P, ok & (m >= P), e, width)
        for a in tl.static_range(P):
            x = _seen(K, WK, kb, kh, kt, b, h, m, ok, e, length, width, key_heads,
                      a, RK, SK, CK, RULE, D, BM)  # fmt: skip
            if ALONE:
                dq += pull[:, None] * x
            else:
                dq += (scale * _at(PULLS, row, ok & (m >= a), a, P, 0.0))[:, None] * x
    dk, key_dots = _spread(
        FAR_K, Q, PULLS, WK, k, q, pull, fkb, fkh, fkt, qb, qh, qt, b, h, m, ok, row, e, length,
        width, key_heads, scale, RK, SK, CK, LK, P, RULE, NORMAL, HAS_FAR, ALONE, D, BM,
    )  # fmt: skip
    dv, value_dots = _spread(
        FAR_V, GRAD, SHARES, WV, v, grad, share, fvb, fvh, fvt, gb, gh, gt, b, h, m, ok, row, e,
        length, width, value_heads, 1.0, RV, SV, CV, LV, P, RULE, NORMAL, HAS_FAR, ALONE, D, BM,
    )  # fmt: skip
    if P > 0:
        _put(DQ, db, dh, dt, b, h, m, ok, e, width, dq)
    _put(DK, db, dh, dt, b, h, m, ok, e, width, dk)
    _put(DV, db, dh, dt, b, h, m, ok, e, width, dv)
    if RK >= 0:
        _put_dots(DWK, key_dots, b, h, m, ok, length, heads, RK, SK, CK, LK, P, RULE, NORMAL)
    if RV >= 0:
        _put_dots(DWV, value_dots, b, h, m, ok, length, heads, RV, SV, CV, LV, P, RULE, NORMAL)
