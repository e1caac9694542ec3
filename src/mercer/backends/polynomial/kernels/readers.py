"""The passes that read states and compute the weights of the own chunk; states.py says what a state is."""

import triton
import triton.language as tl

from .states import NOWHERE, _columns, _dot, _exact, _heads_of, _more, _operand, _rows

# What changes with the length or the batch, and needs no kernel of its own.
COUNTS = ("first_head", "heads", "k_heads", "v_heads", "chunks")
QUERIES = (*COUNTS, "offset", "num_queries")


@triton.jit
def _masses(z, width, D: tl.constexpr):
    """z, [D, D]; rows beyond the width are zero."""
    d = tl.arange(0, D)
    return tl.load(z + d[:, None] * D + d[None, :], mask=d[:, None] < width, other=0.0)


@triton.jit
def _halves(x, W: tl.constexpr):
    """The first and the last W columns of [T, 2 W]."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, W)), (0, 2, 1)))


@triton.jit
def _read(acc, x, column, t, tx, state, width, SLOPES: tl.constexpr, D: tl.constexpr,
          V: tl.constexpr, KIND: tl.constexpr, PAIR: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """acc + sum_ab x_a x_b S_ab, [T, V], for x [T, D].

    SLOPES: acc + sum_a x_a <y, S_ab>, [T, D], for y [T, V] in place of x: half the slope of that
    along y.
    """
    K: tl.constexpr = V if SLOPES else D
    N: tl.constexpr = D if SLOPES else V
    # How far apart the two axes are in memory.
    INNER: tl.constexpr = 1 if SLOPES else V
    OUTER: tl.constexpr = V if SLOPES else 1
    k = tl.arange(0, K)
    if PAIR:
        n = tl.arange(0, 2 * N)
        where = state + k[:, None] * INNER + (n // N)[None, :] * (D * V) + (n % N)[None, :] * OUTER
        for a in tl.range(0, width, 2, num_stages=STAGES):
            even = tl.load(column + a * tx + t).to(tl.float32)
            odd = tl.load(column + (a + 1) * tx + t).to(tl.float32)
            left, right = _halves(_dot(x, tl.load(where + a * (D * V)), KIND), N)
            acc += even[:, None] * left
            acc += odd[:, None] * right
    else:
        n = tl.arange(0, N)
        where = state + k[:, None] * INNER + n[None, :] * OUTER
        for a in tl.range(0, width, num_stages=STAGES):
            xa = tl.load(column + a * tx + t).to(tl.float32)
            acc += xa[:, None] * _dot(x, tl.load(where + a * (D * V)), KIND)
    return acc


@triton.jit
def _put(OUT, line, e, x, inside, width):
    """Store rows [T, E] of an output [lines, width]."""
    mask = inside[:, None] & (e[None, :] < width)
    tl.store(OUT + line[:, None] * width + e[None, :], x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _near(acc, mass, q, k, values, start, stop, place, tk, D: tl.constexpr, V: tl.constexpr,
          MASK: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The keys from start to stop, whose weights are formed."""
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    for first in tl.range(start, stop, BN):
        j = first + tl.arange(0, BN)
        s = _dot(q, _columns(k, d, j, tk, KIND), KIND)
        if MASK:
            s = tl.where(j[None, :] <= place[:, None], s, 0.0)
        w = s * s
        mass += tl.sum(w, 1)
        x = _columns(values, v, j, tk, KIND)
        acc = _more(_operand(w, KIND), tl.trans(x), acc, KIND)
    return acc, mass


@triton.jit(do_not_specialize=QUERIES)
def forward(
    QT, SIZE, KT, VALUES, STATES, Z, MU, BAD_K, BAD_V, OUT, LOG, MASS, first_head, heads, k_heads,
    v_heads, group, tq, tk, chunk, origin, chunks, offset, num_queries, width, dv,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    KIND: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, log_mass and the mass for queries divided by their sizes, of one block of queries."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = first_head * group + tl.program_id(1)
    k_head, v_head = _heads_of(bh // group, heads, k_heads, v_heads)
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    t = block * BM + tl.arange(0, BM)
    column = QT + bh.to(tl.int64) * (tq * D)
    q = _rows(column, d, t, tq, KIND)
    acc = tl.zeros((BM, V), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    n = (origin + block * BM) // chunk
    place = origin + t
    if NEAR:
        k, values = KT + k_head * (tk * D), VALUES + v_head * (tk * V)
        start, middle = 0, tk
        if CAUSAL:
            start, middle = n * chunk, origin + block * BM
        acc, mass = _near(acc, mass, q, k, values, start, middle, place, tk, D, V, False, KIND, BN)
        if CAUSAL:
            acc, mass = _near(
                acc, mass, q, k, values, middle, middle + BM, place, tk, D, V, True, KIND, BN
            )
    if FAR:
        if not CAUSAL or n > 0:
            slot = (tl.program_id(1) // group).to(tl.int64) * chunks + (n if CAUSAL else 0)
            state = STATES + slot * (D * D * V)
            acc = _read(acc, q, column, t, tq, state, width, False, D, V, KIND, PAIR, STAGES)
            z = _masses(Z + slot * (D * D), width, D)
            far = tl.sum(_exact(q, z, KIND) * q.to(tl.float32), 1)
            acc += far[:, None] * tl.load(MU + slot * V + v)[None, :]
            mass += far
    i = t - offset
    inside = (i >= 0) & (i < num_queries)
    size = tl.load(SIZE + bh.to(tl.int64) * tq + t)
    seen = place if CAUSAL else NOWHERE - 1
    bad = tl.minimum(tl.load(BAD_K + k_head), tl.load(BAD_V + v_head))
    spoiled = (size != size) | (bad <= seen)
    # A sum of squares below zero is rounding error.
    alive = mass > 0.0
    safe = tl.where(alive, mass, 1.0)
    out = tl.where(alive[:, None], acc / safe[:, None], 0.0)
    log = tl.where(alive, tl.log(safe) + 2.0 * tl.log(size), float("-inf"))
    line = bh.to(tl.int64) * num_queries + i
    nan = float("nan")
    tl.store(LOG + line, tl.where(spoiled, nan, log), mask=inside)
    tl.store(MASS + line, tl.where(spoiled, nan, tl.where(alive, mass, 0.0)), mask=inside)
    out = tl.where(spoiled[:, None], nan, out).to(OUT.dtype.element_ty)
    _put(OUT, line, v, out, inside, dv)


@triton.jit
def _near_queries(
    acc, whole, q, g, shift, k, values, start, stop, place, tk, D: tl.constexpr, V: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """sum_j s_ij (<dO_i, v_j> + shift_i) k_j and sum_j s_ij k_j."""
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    for first in tl.range(start, stop, BN):
        j = first + tl.arange(0, BN)
        kt = _columns(k, d, j, tk, KIND)
        s = _dot(q, kt, KIND)
        if MASK:
            s = tl.where(j[None, :] <= place[:, None], s, 0.0)
        dp = _dot(g, _columns(values, v, j, tk, KIND), KIND) + shift[:, None]
        acc = _more(_operand(s * dp, KIND), tl.trans(kt), acc, KIND)
        whole = _more(_operand(s, KIND), tl.trans(kt), whole, KIND)
    return acc, whole


@triton.jit(do_not_specialize=QUERIES)
def backward_queries(
    QT, SIZE, KT, VALUES, STATES, Z, MU, GRAD, GRAD_LOG, SHIFT, RATE, EXACT, DQ, first_head, heads,
    k_heads, v_heads, group, tq, tk, chunk, origin, chunks, offset, num_queries, width, dv,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    KIND: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries, and EXACT, the shift without the rounding of `out`.

    <q, dq> must be dlog m exactly, since the length of q changes nothing else: what it is off by is
    that rounding, and is taken out.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = first_head * group + tl.program_id(1)
    k_head, v_head = _heads_of(bh // group, heads, k_heads, v_heads)
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    t = block * BM + tl.arange(0, BM)
    column = QT + bh.to(tl.int64) * (tq * D)
    row = bh.to(tl.int64) * tq + t
    q = _rows(column, d, t, tq, KIND)
    g = _rows(GRAD + bh.to(tl.int64) * (tq * V), v, t, tq, KIND)
    shift = tl.load(SHIFT + row)
    acc = tl.zeros((BM, D), tl.float32)
    whole = tl.zeros((BM, D), tl.float32)
    n = (origin + block * BM) // chunk
    if NEAR:
        place = origin + t
        k, values = KT + k_head * (tk * D), VALUES + v_head * (tk * V)
        start, middle = 0, tk
        if CAUSAL:
            start, middle = n * chunk, origin + block * BM
        acc, whole = _near_queries(
            acc, whole, q, g, shift, k, values, start, middle, place, tk, D, V, False, KIND, BN
        )
        if CAUSAL:
            acc, whole = _near_queries(
                acc, whole, q, g, shift, k, values, middle, middle + BM, place, tk, D, V, True,
                KIND, BN,
            )  # fmt: skip
    if FAR:
        if not CAUSAL or n > 0:
            slot = (tl.program_id(1) // group).to(tl.int64) * chunks + (n if CAUSAL else 0)
            state = STATES + slot * (D * D * V)
            acc = _read(acc, g, column, t, tq, state, width, True, D, V, KIND, PAIR, STAGES)
            z = _masses(Z + slot * (D * D), width, D)
            far = _exact(q, z, KIND)
            mu = tl.load(MU + slot * V + v)
            acc += (shift + tl.sum(g.to(tl.float32) * mu[None, :], 1))[:, None] * far
            whole += far
    i = t - offset
    inside = (i >= 0) & (i < num_queries)
    line = bh.to(tl.int64) * num_queries + i
    rate = tl.load(RATE + row)
    want = tl.load(GRAD_LOG + line, mask=inside & (rate > 0.0), other=0.0)
    off = want - tl.sum(q.to(tl.float32) * acc, 1) * rate
    tl.store(EXACT + row, shift + off)
    size = tl.load(SIZE + row)
    scale = tl.where(rate > 0.0, 2.0 * rate / size, 0.0)
    dq = tl.where(rate[:, None] > 0.0, (acc + off[:, None] * whole) * scale[:, None], 0.0)
    _put(DQ, line, d, dq, inside, width)


@triton.jit
def _near_keys(
    dk, dv, kx, vx, columns, grad, shift, rate, start, stop, origin, place, tq,
    D: tl.constexpr, V: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The queries from start to stop, counted as in their copies."""
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    for first in tl.range(start, stop, BN):
        t = first + tl.arange(0, BN)
        qt = _columns(columns, d, t, tq, KIND)
        s = _dot(kx, qt, KIND)
        if MASK:
            s = tl.where(place[:, None] <= origin + t[None, :], s, 0.0)
        r = tl.load(rate + t)
        g = _columns(grad, v, t, tq, KIND)
        dv = _more(_operand(s * s * r[None, :], KIND), tl.trans(g), dv, KIND)
        dp = _dot(vx, g, KIND) + tl.load(shift + t)[None, :]
        dk = _more(_operand(s * dp * r[None, :], KIND), tl.trans(qt), dk, KIND)
    return dk, dv


@triton.jit(do_not_specialize=(*COUNTS, "num_keys"))
def backward_keys(
    QT, KT, VALUES, STATES, Z, GRAD, SHIFT, RATE, DK, DV, first_head, heads, k_heads, v_heads,
    group, tq, tk, chunk, origin, chunks, num_keys, width, width_v,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    KIND: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, from the states of the queries after it."""
    block = tl.program_id(0)
    bj = first_head + tl.program_id(1)
    k_head, v_head = _heads_of(bj, heads, k_heads, v_heads)
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    place = block * BM + tl.arange(0, BM)
    column = KT + k_head * (tk * D)
    kx = _rows(column, d, place, tk, KIND)
    values = VALUES + v_head * (tk * V)
    vx = _rows(values, v, place, tk, KIND)
    dk = tl.zeros((BM, D), tl.float32)
    dv = tl.zeros((BM, V), tl.float32)
    n = block * BM // chunk
    if NEAR:
        for g in range(group):
            bh = bj.to(tl.int64) * group + g
            columns, grad = QT + bh * (tq * D), GRAD + bh * (tq * V)
            shift, rate = SHIFT + bh * tq, RATE + bh * tq
            start, stop = 0, tq
            if CAUSAL:
                own = block * BM - origin
                if own >= 0:
                    dk, dv = _near_keys(
                        dk, dv, kx, vx, columns, grad, shift, rate, own, own + BM, origin, place,
                        tq, D, V, True, KIND, BN,
                    )  # fmt: skip
                start, stop = tl.maximum(own + BM, 0), (n + 1) * chunk - origin
            dk, dv = _near_keys(
                dk, dv, kx, vx, columns, grad, shift, rate, start, stop, origin, place, tq, D, V,
                False, KIND, BN,
            )  # fmt: skip
    if FAR:
        if not CAUSAL or n < chunks - 1:
            slot = tl.program_id(1).to(tl.int64) * chunks + (n if CAUSAL else 0)
            state = STATES + slot * (D * D * V)
            dv = _read(dv, kx, column, place, tk, state, width, False, D, V, KIND, PAIR, STAGES)
            dk = _read(dk, vx, column, place, tk, state, width, True, D, V, KIND, PAIR, STAGES)
            z = _masses(Z + slot * (D * D), width, D)
            dk += _exact(kx, z, KIND)
    inside = place < num_keys
    line = bj.to(tl.int64) * num_keys + place
    _put(DK, line, d, 2.0 * dk, inside, width)
    _put(DV, line, v, dv, inside, width_v)
