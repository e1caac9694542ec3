"""The passes that read states and compute the weights of the own chunk; states.py says what a state is."""

import triton
import triton.language as tl

from .states import NOWHERE, _dot, _exact, _more, _operand, _wide


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
def _read(acc, x, column, t, tx, state, width, inner, outer, STRIDE: tl.constexpr,
          K: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, PAIR: tl.constexpr,
          STAGES: tl.constexpr):  # fmt: skip
    """acc + sum_a x_a (x S_a), for S_a [K, N] with strides inner and outer."""
    k = tl.arange(0, K)
    if PAIR:
        n = tl.arange(0, 2 * N)
        where = state + k[:, None] * inner + (n // N)[None, :] * STRIDE + (n % N)[None, :] * outer
        for a in tl.range(0, width, 2, num_stages=STAGES):
            even = tl.load(column + a * tx + t).to(tl.float32)
            odd = tl.load(column + (a + 1) * tx + t).to(tl.float32)
            left, right = _halves(_dot(x, tl.load(where + a * STRIDE), KIND), N)
            acc += even[:, None] * left
            acc += odd[:, None] * right
    else:
        n = tl.arange(0, N)
        where = state + k[:, None] * inner + n[None, :] * outer
        for a in tl.range(0, width, num_stages=STAGES):
            xa = tl.load(column + a * tx + t).to(tl.float32)
            acc += xa[:, None] * _dot(x, tl.load(where + a * STRIDE), KIND)
    return acc


@triton.jit
def _values(acc, x, column, t, tx, state, width, D: tl.constexpr, V: tl.constexpr,
            KIND: tl.constexpr, PAIR: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """sum_ab x_a x_b S_ab, [T, V], for x [T, D]."""
    return _read(acc, x, column, t, tx, state, width, V, 1, D * V, D, V, KIND, PAIR, STAGES)


@triton.jit
def _slopes(acc, y, column, t, tx, state, width, D: tl.constexpr, V: tl.constexpr,
            KIND: tl.constexpr, PAIR: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """sum_a x_a <y, S_ab>, [T, D], for y [T, V]: half the slope of the sum above along y."""
    return _read(acc, y, column, t, tx, state, width, 1, V, D * V, V, D, KIND, PAIR, STAGES)


@triton.jit
def _near(acc, mass, q, k, values, start, stop, place, tk, D: tl.constexpr, V: tl.constexpr,
          MASK: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The keys from start to stop, whose weights are formed."""
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    for first in tl.range(start, stop, BN):
        j = first + tl.arange(0, BN)
        kt = _wide(tl.load(k + d[:, None] * tk + j[None, :]), KIND)
        s = _dot(q, kt, KIND)
        if MASK:
            s = tl.where(j[None, :] <= place[:, None], s, 0.0)
        w = s * s
        mass += tl.sum(w, 1)
        x = _wide(tl.load(values + v[:, None] * tk + j[None, :]), KIND)
        acc = _more(_operand(w, KIND), tl.trans(x), acc, KIND)
    return acc, mass


@triton.jit(
    do_not_specialize=[
        "first_head",
        "heads",
        "k_heads",
        "v_heads",
        "chunks",
        "offset",
        "num_queries",
    ]
)
def forward(
    QT, SIZE, KT, VALUES, STATES, Z, MU, BAD_K, BAD_V, OUT, LOG, MASS, first_head, heads, k_heads,
    v_heads, group, tq, tk, chunk, origin, chunks, offset, num_queries, width, dv,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    KIND: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out, log_mass and the mass for queries divided by their sizes, of one block of queries."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = first_head * group + tl.program_id(1)
    bj = bh // group
    b, j = (bj // heads).to(tl.int64), bj % heads
    k_head, v_head = b * k_heads + j * k_heads // heads, b * v_heads + j * v_heads // heads
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    t = block * BM + tl.arange(0, BM)
    column = QT + bh.to(tl.int64) * (tq * D)
    q = _wide(tl.trans(tl.load(column + d[:, None] * tq + t[None, :])), KIND)
    acc = tl.zeros((BM, V), tl.float32)
    mass = tl.zeros((BM,), tl.float32)
    n = (origin + block * BM) // chunk
    place = origin + t
    if NEAR:
        k, values = KT + k_head * (tk * D), VALUES + v_head * (tk * V)
        if CAUSAL:
            start = n * chunk
            middle = origin + block * BM
            acc, mass = _near(
                acc, mass, q, k, values, start, middle, place, tk, D, V, False, KIND, BN
            )
            acc, mass = _near(
                acc, mass, q, k, values, middle, middle + BM, place, tk, D, V, True, KIND, BN
            )
        else:
            acc, mass = _near(acc, mass, q, k, values, 0, tk, place, tk, D, V, False, KIND, BN)
    if FAR:
        if not CAUSAL or n > 0:
            slot = (tl.program_id(1) // group).to(tl.int64) * chunks + (n if CAUSAL else 0)
            acc = _values(
                acc, q, column, t, tq, STATES + slot * (D * D * V), width, D, V, KIND, PAIR, STAGES
            )
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
    tl.store(OUT + line[:, None] * dv + v[None, :], out, mask=inside[:, None] & (v[None, :] < dv))


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
        kt = _wide(tl.load(k + d[:, None] * tk + j[None, :]), KIND)
        s = _dot(q, kt, KIND)
        if MASK:
            s = tl.where(j[None, :] <= place[:, None], s, 0.0)
        x = _wide(tl.load(values + v[:, None] * tk + j[None, :]), KIND)
        dp = _dot(g, x, KIND) + shift[:, None]
        acc = _more(_operand(s * dp, KIND), tl.trans(kt), acc, KIND)
        whole = _more(_operand(s, KIND), tl.trans(kt), whole, KIND)
    return acc, whole


@triton.jit(
    do_not_specialize=[
        "first_head",
        "heads",
        "k_heads",
        "v_heads",
        "chunks",
        "offset",
        "num_queries",
    ]
)
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
    bj = bh // group
    b, j = (bj // heads).to(tl.int64), bj % heads
    k_head, v_head = b * k_heads + j * k_heads // heads, b * v_heads + j * v_heads // heads
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    t = block * BM + tl.arange(0, BM)
    column = QT + bh.to(tl.int64) * (tq * D)
    row = bh.to(tl.int64) * tq + t
    q = _wide(tl.trans(tl.load(column + d[:, None] * tq + t[None, :])), KIND)
    grad = GRAD + bh.to(tl.int64) * (tq * V)
    g = _wide(tl.trans(tl.load(grad + v[:, None] * tq + t[None, :])), KIND)
    shift = tl.load(SHIFT + row)
    acc = tl.zeros((BM, D), tl.float32)
    whole = tl.zeros((BM, D), tl.float32)
    n = (origin + block * BM) // chunk
    if NEAR:
        place = origin + t
        k, values = KT + k_head * (tk * D), VALUES + v_head * (tk * V)
        if CAUSAL:
            start = n * chunk
            middle = origin + block * BM
            acc, whole = _near_queries(
                acc, whole, q, g, shift, k, values, start, middle, place, tk, D, V, False, KIND, BN
            )
            acc, whole = _near_queries(
                acc, whole, q, g, shift, k, values, middle, middle + BM, place, tk, D, V, True,
                KIND, BN,
            )  # fmt: skip
        else:
            acc, whole = _near_queries(
                acc, whole, q, g, shift, k, values, 0, tk, place, tk, D, V, False, KIND, BN
            )
    if FAR:
        if not CAUSAL or n > 0:
            slot = (tl.program_id(1) // group).to(tl.int64) * chunks + (n if CAUSAL else 0)
            acc = _slopes(
                acc, g, column, t, tq, STATES + slot * (D * D * V), width, D, V, KIND, PAIR, STAGES
            )
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
    tl.store(
        DQ + line[:, None] * width + d[None, :], dq.to(DQ.dtype.element_ty),
        mask=inside[:, None] & (d[None, :] < width),
    )  # fmt: skip


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
        qt = _wide(tl.load(columns + d[:, None] * tq + t[None, :]), KIND)
        s = _dot(kx, qt, KIND)
        if MASK:
            s = tl.where(place[:, None] <= origin + t[None, :], s, 0.0)
        r = tl.load(rate + t)
        g = _wide(tl.load(grad + v[:, None] * tq + t[None, :]), KIND)
        dv = _more(_operand(s * s * r[None, :], KIND), tl.trans(g), dv, KIND)
        dp = _dot(vx, g, KIND) + tl.load(shift + t)[None, :]
        dk = _more(_operand(s * dp * r[None, :], KIND), tl.trans(qt), dk, KIND)
    return dk, dv


@triton.jit(do_not_specialize=["first_head", "heads", "k_heads", "v_heads", "chunks", "num_keys"])
def backward_keys(
    QT, KT, VALUES, STATES, Z, GRAD, SHIFT, RATE, DK, DV, first_head, heads, k_heads, v_heads,
    group, tq, tk, chunk, origin, chunks, num_keys, width, width_v,
    D: tl.constexpr, V: tl.constexpr, CAUSAL: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
    KIND: tl.constexpr, PAIR: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys, from the states of the queries after it."""
    block = tl.program_id(0)
    bj = first_head + tl.program_id(1)
    b, j = (bj // heads).to(tl.int64), bj % heads
    k_head, v_head = b * k_heads + j * k_heads // heads, b * v_heads + j * v_heads // heads
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    place = block * BM + tl.arange(0, BM)
    column = KT + k_head * (tk * D)
    kx = _wide(tl.trans(tl.load(column + d[:, None] * tk + place[None, :])), KIND)
    values = VALUES + v_head * (tk * V)
    vx = _wide(tl.trans(tl.load(values + v[:, None] * tk + place[None, :])), KIND)
    dk = tl.zeros((BM, D), tl.float32)
    dv = tl.zeros((BM, V), tl.float32)
    n = block * BM // chunk
    if NEAR:
        for g in range(group):
            bh = bj.to(tl.int64) * group + g
            columns, grad = QT + bh * (tq * D), GRAD + bh * (tq * V)
            shift, rate = SHIFT + bh * tq, RATE + bh * tq
            if CAUSAL:
                own = block * BM - origin
                if own >= 0:
                    dk, dv = _near_keys(
                        dk, dv, kx, vx, columns, grad, shift, rate, own, own + BM, origin, place,
                        tq, D, V, True, KIND, BN,
                    )  # fmt: skip
                dk, dv = _near_keys(
                    dk, dv, kx, vx, columns, grad, shift, rate, tl.maximum(own + BM, 0),
                    (n + 1) * chunk - origin, origin, place, tq, D, V, False, KIND, BN,
                )  # fmt: skip
            else:
                dk, dv = _near_keys(
                    dk, dv, kx, vx, columns, grad, shift, rate, 0, tq, origin, place, tq,
                    D, V, False, KIND, BN,
                )  # fmt: skip
    if FAR:
        if not CAUSAL or n < chunks - 1:
            slot = tl.program_id(1).to(tl.int64) * chunks + (n if CAUSAL else 0)
            state = STATES + slot * (D * D * V)
            dv = _values(dv, kx, column, place, tk, state, width, D, V, KIND, PAIR, STAGES)
            dk = _slopes(dk, vx, column, place, tk, state, width, D, V, KIND, PAIR, STAGES)
            z = _masses(Z + slot * (D * D), width, D)
            dk += _exact(kx, z, KIND)
    inside = place < num_keys
    line = bj.to(tl.int64) * num_keys + place
    tl.store(
        DK + line[:, None] * width + d[None, :], (2.0 * dk).to(DK.dtype.element_ty),
        mask=inside[:, None] & (d[None, :] < width),
    )  # fmt: skip
    tl.store(
        DV + line[:, None] * width_v + v[None, :], dv.to(DV.dtype.element_ty),
        mask=inside[:, None] & (v[None, :] < width_v),
    )  # fmt: skip
