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

Small letters are tuples: x = (tensor, its strides of batch, head and place), w = (W, how many heads
have kernels of their own, or 0), here = (batch, head, features, length, width). TAPS is (R, S, C, L):
the reach of a kernel, -1 if there are none; its taps; the columns of W; its last visible tap.
"""

import triton
import triton.language as tl

NONE, LEFT, TRUNCATE, SHRINK = (tl.constexpr(n) for n in range(4))
# The place where all keys are finite: after the last.
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _places(x, here, t, ok):
    """The addresses of rows t of a head, and which of them exist."""
    X, sb, sh, st = x
    b, h, e, _, width = here
    p = X + b * sb + h * sh + t[:, None].to(tl.int64) * st + e[None, :]
    return p, ok[:, None] & (e[None, :] < width)


@triton.jit
def _rows(x, here, t, ok):
    """Rows t of a head in float32, zero where not ok."""
    p, mask = _places(x, here, t, ok)
    return tl.load(p, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _put(x, here, t, ok, rows):
    p, mask = _places(x, here, t, ok)
    tl.store(p, rows.to(x[0].dtype.element_ty), mask=mask)


@triton.jit
def _fine(x):
    """Which numbers are finite."""
    return tl.abs(x) < float("inf")


@triton.jit
def _tap(w, here, t, ok, COLUMN: tl.constexpr, COLUMNS: tl.constexpr):
    """One column of the kernels of keys t."""
    W, per_head = w
    b, h, _, length, _ = here
    heads = tl.where(per_head > 0, per_head, 1)
    row = (b * length + t) * heads + tl.where(per_head > 0, h, 0)
    return tl.load(W + row * COLUMNS + COLUMN, mask=ok, other=0.0)


@triton.jit
def _whole(
    x, w, here, j, TAPS: tl.constexpr, CLEAN: tl.constexpr, D: tl.constexpr, BM: tl.constexpr
):
    """Keys j, convolved by their whole kernels; as they are without kernels.

    CLEAN: a neighbour that is not finite counts as zero.
    """
    length = here[3]
    inside = j < length
    out = tl.zeros((BM, D), tl.float32)
    if TAPS[0] < 0:
        out = _rows(x, here, j, inside)
        if CLEAN:
            out = tl.where(_fine(out), out, 0.0)
    else:
        for d in tl.static_range(-TAPS[0], TAPS[3] + 1):
            ok = inside & (j + d >= 0) & (j + d < length)
            tap = _tap(w, here, j, ok, TAPS[0] + d, TAPS[2])
            y = _rows(x, here, j + d, ok)
            if CLEAN:
                y = tl.where(_fine(y), y, 0.0)
            out += tap[:, None] * y
    return out


@triton.jit
def _seen(
    x, w, here, i, ok, A: tl.constexpr, TAPS: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Key i - A as query i sees it."""
    there = ok
    if A > 0:
        there = ok & (i >= A)
    if TAPS[0] < 0:
        out = _rows(x, here, i - A, there)
    else:
        out = tl.zeros((BM, D), tl.float32)
        for d in tl.static_range(-TAPS[0], TAPS[0] + 1):
            if _reads(d, A, RULE):
                reads = there
                if d < 0:
                    reads = there & (i - A + d >= 0)
                tap = _tap(w, here, i - A, reads, (1 + A) * TAPS[1] + TAPS[0] + d, TAPS[2])
                out += tap[:, None] * _rows(x, here, i - A + d, reads)
    return out


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
    KEYS: tl.constexpr, VALUES: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Keys and values, convolved by their whole kernels, contiguous [B, H, T, D], and finite.

    BAD is the first place of each block that is not: by itself, or as it was mixed.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    j = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = j < length
    e = tl.arange(0, D)
    here = (b, h, e, length, width)
    k, wk, v, wv = (K, kb, kh, kt), (WK, key_heads), (V, vb, vh, vt), (WV, value_heads)
    dtype: tl.constexpr = KT.dtype.element_ty
    line = bh.to(tl.int64)
    x = _whole(k, wk, here, j, KEYS, False, D, BM)
    y = _whole(v, wv, here, j, VALUES, False, D, BM)
    x, y = x.to(dtype), y.to(dtype)
    first = tl.full((), NOWHERE, tl.int32)
    # A neighbour that is not finite makes the mixture not finite; only then find out which.
    if tl.max(tl.where(_fine(x.to(tl.float32)) & _fine(y.to(tl.float32)), 0, 1)) > 0:
        own = _fine(_rows(k, here, j, ok))
        own = own & _fine(_rows(v, here, j, ok))
        x = _whole(k, wk, here, j, KEYS, True, D, BM)
        y = _whole(v, wv, here, j, VALUES, True, D, BM)
        x, y = x.to(dtype), y.to(dtype)
        fx, fy = _fine(x.to(tl.float32)), _fine(y.to(tl.float32))
        x, y = tl.where(fx, x, 0.0).to(dtype), tl.where(fy, y, 0.0).to(dtype)
        first = tl.min(tl.where(own & fx & fy, NOWHERE, j[:, None]))
    target = (b, line, e, length, width)
    _put((KT, 0, length * width, width), target, j, ok, x)
    _put((VT, 0, length * width, width), target, j, ok, y)
    tl.store(BAD + line * tl.num_programs(0) + tl.program_id(0), first)


@triton.jit
def merge(
    Q, K, V, WK, WV, FAR, FAR_LSE, BAD, OUT, LSE, SCORES,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, fb, fh, ft, ob, oh, ot,
    heads, length, width, key_heads, value_heads, blocks, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    HAS_FAR: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCKS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Merge the nearest P keys of each query with the output of flash attention.

    FAR_LSE becomes that of the whole row, for flash attention's backward.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < length
    here = (b, h, tl.arange(0, D), length, width)
    row = bh.to(tl.int64) * length + i
    far_row = bh.to(tl.int64) * (length - P) + i - P
    spoiled = i < 0
    if HAS_FAR:
        before = ok & (i >= P)
        acc = _rows((FAR, fb, fh, ft), here, i - P, before)
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
        q = _rows((Q, qb, qh, qt), here, i, ok)
        x = _seen((K, kb, kh, kt), (WK, key_heads), here, i, ok, a, KEYS, RULE, D, BM)
        y = _seen((V, vb, vh, vt), (WV, value_heads), here, i, ok, a, VALUES, RULE, D, BM)
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
    _put((OUT, ob, oh, ot), here, i, ok, out)
    tl.store(LSE + row, lse, mask=ok)
    if HAS_FAR:
        tl.store(FAR_LSE + far_row, lse, mask=ok & (i >= P))


@triton.jit
def pulls(
    V, WV, GRAD, OUT, LSE, SCORES, SHARES, PULLS,
    vb, vh, vt, gb, gh, gt, ob, oh, ot, heads, length, width, value_heads,
    VALUES: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """P_ia, and dS_ia = P_ia (<dO_i, v~_ia> - <dO_i, out_i>), of the nearest keys, [B, H, T, P]."""
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = i < length
    here = (b, h, tl.arange(0, D), length, width)
    grad = _rows((GRAD, gb, gh, gt), here, i, ok)
    out = _rows((OUT, ob, oh, ot), here, i, ok)
    row = bh.to(tl.int64) * length + i
    lse = tl.load(LSE + row, mask=ok, other=0.0)
    for a in tl.static_range(P):
        y = _seen((V, vb, vh, vt), (WV, value_heads), here, i, ok, a, VALUES, RULE, D, BM)
        share = tl.exp(_at(SCORES, row, ok, a, P, float("-inf")) - lse)
        tl.store(SHARES + row * P + a, share, mask=ok)
        tl.store(PULLS + row * P + a, share * tl.sum(grad * (y - out), 1), mask=ok)


@triton.jit
def _at(X, row, ok, COLUMN: tl.constexpr, COLUMNS: tl.constexpr, other):
    return tl.load(X + row * COLUMNS + COLUMN, mask=ok, other=other)


@triton.jit
def _spread(
    far, source, COEF, w, x, src, own, here, m, ok, row, factor,
    TAPS: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr, NORMAL: tl.constexpr,
    HAS_FAR: tl.constexpr, ALONE: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The gradient of keys m, and their part of the gradients of the kernels that read them.

    g_j, of key j as it was seen: `far` from flash attention, COEF times `source` of query j + a from
    near.
    Then dx_m = sum_d w_{m-d}[d] g_{m-d} and dw_{m-d}[d] = <g_{m-d}, x_m>.
    """
    length = here[3]
    dx = tl.zeros((BM, D), tl.float32)
    dots = ()
    if TAPS[0] < 0:
        if HAS_FAR:
            dx = _rows(far, here, m, ok & (m < length - P))
        for a in tl.static_range(P):
            if ALONE:
                dx += own[:, None] * src
            else:
                there = ok & (m + a < length)
                pull = factor * _at(COEF, row + a, there, a, P, 0.0)
                dx += pull[:, None] * _rows(source, here, m + a, there)
    else:
        for d in tl.static_range(-TAPS[0], TAPS[3] + 1):
            if HAS_FAR:
                there = ok & (m - d >= 0) & (m - d < length - P)
                tap = _tap(w, here, m - d, there, TAPS[0] + d, TAPS[2])
                g = _rows(far, here, m - d, there)
                dx += tap[:, None] * g
                dots += (tl.where(there, tl.sum(g * x, 1), 0.0),)
            else:
                dots += (tl.zeros((BM,), tl.float32),)
        for a in tl.static_range(P):
            for d in tl.static_range(-TAPS[0], TAPS[0] + 1):
                if _reads(d, a, RULE):
                    there = ok
                    if d > 0:
                        there = there & (m - d >= 0)
                    if a > d:
                        there = there & (m - d + a < length)
                    tap = _tap(w, here, m - d, there, (1 + a) * TAPS[1] + TAPS[0] + d, TAPS[2])
                    if ALONE:
                        g = own[:, None] * src
                    else:
                        pull = factor * _at(COEF, row - d + a, there, a, P, 0.0)
                        g = _rows(source, here, m - d + a, there)
                        g = pull[:, None] * g
                    dx += tap[:, None] * g
                    if _learns(a, RULE, NORMAL):
                        dots += (tl.where(there, tl.sum(g * x, 1), 0.0),)
    return dx, dots


@triton.jit
def _put_dots(
    DW, dots, here, m, ok, heads, TAPS: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    NORMAL: tl.constexpr,
):  # fmt: skip
    """Store the gradients of kernels from `_spread`, per head."""
    b, h, _, length, _ = here
    for a in tl.static_range(-1, P):
        for d in tl.static_range(-TAPS[0], TAPS[0] + 1):
            if _number(d, a, TAPS[0], TAPS[3], RULE, NORMAL) >= 0:
                line = (b * length + m - d) * heads + h
                there = ok & (m - d >= 0) & (m - d < length)
                dot = dots[_number(d, a, TAPS[0], TAPS[3], RULE, NORMAL)]
                column = (1 + a) * TAPS[1] + TAPS[0] + d
                tl.store(DW + line * TAPS[2] + column, dot, mask=there)


@triton.jit
def backward(
    Q, K, V, WK, WV, GRAD, OUT, LSE, SCORES, SHARES, PULLS, FAR_Q, FAR_K, FAR_V,
    DQ, DK, DV, DWK, DWV,
    qb, qh, qt, kb, kh, kt, vb, vh, vt, gb, gh, gt, ob, oh, ot,
    fqb, fqh, fqt, fkb, fkh, fkt, fvb, fvh, fvt, db, dh, dt,
    heads, length, width, key_heads, value_heads, scale,
    KEYS: tl.constexpr, VALUES: tl.constexpr, P: tl.constexpr, RULE: tl.constexpr,
    NORMAL: tl.constexpr, HAS_FAR: tl.constexpr, ALONE: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, keys, values and kernels from those that flash attention gave.

    ALONE: the nearest key has one visible tap, so no row needs the scores of another. All loads are
    before all stores: a store would delay later loads.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = m < length
    here = (b, h, tl.arange(0, D), length, width)
    qs, ks, vs = (Q, qb, qh, qt), (K, kb, kh, kt), (V, vb, vh, vt)
    grads, wk, wv = (GRAD, gb, gh, gt), (WK, key_heads), (WV, value_heads)
    row = bh.to(tl.int64) * length + m
    v = _rows(vs, here, m, ok)
    k = _rows(ks, here, m, ok)
    q, grad = v, v
    share, pull = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    if ALONE:
        q = _rows(qs, here, m, ok)
        grad = _rows(grads, here, m, ok)
        out = _rows((OUT, ob, oh, ot), here, m, ok)
        y = _seen(vs, wv, here, m, ok, 0, VALUES, RULE, D, BM)
        share = tl.exp(_at(SCORES, row, ok, 0, P, float("-inf")) - _at(LSE, row, ok, 0, 1, 0.0))
        pull = scale * share * tl.sum(grad * (y - out), 1)
    dq = tl.zeros((BM, D), tl.float32)
    if P > 0:
        if HAS_FAR:
            dq = _rows((FAR_Q, fqb, fqh, fqt), here, m - P, ok & (m >= P))
        for a in tl.static_range(P):
            x = _seen(ks, wk, here, m, ok, a, KEYS, RULE, D, BM)
            if ALONE:
                dq += pull[:, None] * x
            else:
                dq += (scale * _at(PULLS, row, ok & (m >= a), a, P, 0.0))[:, None] * x
    dk, key_dots = _spread(
        (FAR_K, fkb, fkh, fkt), qs, PULLS, wk, k, q, pull, here, m, ok, row, scale, KEYS, P, RULE,
        NORMAL, HAS_FAR, ALONE, D, BM,
    )  # fmt: skip
    dv, value_dots = _spread(
        (FAR_V, fvb, fvh, fvt), grads, SHARES, wv, v, grad, share, here, m, ok, row, 1.0, VALUES, P,
        RULE, NORMAL, HAS_FAR, ALONE, D, BM,
    )  # fmt: skip
    if P > 0:
        _put((DQ, db, dh, dt), here, m, ok, dq)
    _put((DK, db, dh, dt), here, m, ok, dk)
    _put((DV, db, dh, dt), here, m, ok, dv)
    if KEYS[0] >= 0:
        _put_dots(DWK, key_dots, here, m, ok, heads, KEYS, P, RULE, NORMAL)
    if VALUES[0] >= 0:
        _put_dots(DWV, value_dots, here, m, ok, heads, VALUES, P, RULE, NORMAL)
