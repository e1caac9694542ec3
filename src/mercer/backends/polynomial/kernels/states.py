"""Padded copies, and the states of sum_j <q_i, k_j>^2 [v_j, 1] in linear time; readers.py reads them.

    S_ab = sum_j x_ja x_jb y_j        z_ab = sum_j x_ja x_jb        over the chunks before (or after)
    sum_j <q, k_j>^2 v_j = sum_a q_a (q S_a) + the weights of the own chunk, which are formed

Each sum is owned by one program, so the same input gives the same bits. No row depends on keys that
it does not see. All sums are in float32.

Operands are bfloat16, TF32 (for float16, whose range is too small for squares) or three times TF32
(for float32). A state is rounded once, so it is kept without its mean: S - z mu, where mu is the
mean value of the keys that it sums, weighted by |k|^2. z stays in float32.

The weights of the own chunk are formed first, and the states are read after them. If something else
wrote an accumulator before a matrix product, the compiler would wait for each product.

Letters: l counts the key heads at hand, n chunks, t places of the padded copies that `prepare`
makes, in which what is padded, hidden or not finite is zero.
"""

import triton
import triton.language as tl

from ...triton.kernels.primitives import _settle

NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _operand(x, KIND: tl.constexpr):
    """x as a matrix product takes it, rounded to nearest."""
    if KIND == "bf16":
        out = x.to(tl.bfloat16)
    elif KIND == "tf32":
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        out = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    else:
        out = x.to(tl.float32)
    return out


@triton.jit
def _wide(x, KIND: tl.constexpr):
    """What was loaded, as an operand: it needs no rounding."""
    if KIND == "bf16":
        out = x
    else:
        out = x.to(tl.float32)
    return out


@triton.jit
def _columns(base, e, t, stride, KIND: tl.constexpr):
    """Features e at places t of a padded copy, [E, T], as an operand."""
    return _wide(tl.load(base + e[:, None] * stride + t[None, :]), KIND)


@triton.jit
def _rows(base, e, t, stride, KIND: tl.constexpr):
    """The same, [T, E]."""
    return _wide(tl.trans(tl.load(base + e[:, None] * stride + t[None, :])), KIND)


@triton.jit
def _heads_of(bj, heads, first, second):
    """The heads that head bj reads of two tensors with `first` and `second` heads per sequence."""
    b, j = (bj // heads).to(tl.int64), bj % heads
    return b * first + j * first // heads, b * second + j * second // heads


@triton.jit
def _dot(a, b, KIND: tl.constexpr):
    return tl.dot(a, b, input_precision="tf32x3" if KIND == "float32" else "tf32")


@triton.jit
def _more(a, b, acc, KIND: tl.constexpr):
    return tl.dot(a, b, acc, input_precision="tf32x3" if KIND == "float32" else "tf32")


@triton.jit
def _exact(a, b, KIND: tl.constexpr):
    """a @ b for b in float32, of which bfloat16 takes two parts."""
    high = _operand(b, KIND)
    out = _dot(a, high, KIND)
    if KIND == "bf16":
        out = _more(a, (b - high.to(tl.float32)).to(tl.bfloat16), out, KIND)
    return out


@triton.jit(do_not_specialize=["heads", "length", "offset"])
def prepare(
    X, COPY, SIZE, BAD, LENGTHS, sb, sh, st, heads, length, offset, width, padded,
    W: tl.constexpr, BT: tl.constexpr, QUERIES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """A padded, finite copy [W, T]; each query is divided by its own size.

    SIZE is NaN for a query that is not finite; BAD is the first place of a block that is not.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), bh % heads
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, W)
    i = t - offset
    inside = (i >= 0) & (i < length)
    if LIMITED:
        inside = inside & (i < tl.load(LENGTHS + b))
    pointers = X + b * sb + h * sh + i[:, None].to(tl.int64) * st + e[None, :]
    x = tl.load(pointers, mask=inside[:, None] & (e[None, :] < width), other=0.0).to(tl.float32)
    finite = tl.abs(x) < float("inf")
    bad = tl.max(tl.where(finite, 0, 1), 1) > 0
    x = tl.where(finite, x, 0.0)
    base = bh.to(tl.int64) * padded * W
    if QUERIES:
        # The power of two at or below the largest entry: to divide by it is exact.
        power = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        size = tl.where(power == 0, 1.0, power.to(tl.float32, bitcast=True))
        x = x / size[:, None]
        tl.store(SIZE + bh.to(tl.int64) * padded + t, tl.where(bad, float("nan"), size))
    else:
        first = tl.min(tl.where(bad, i, NOWHERE), 0)
        tl.store(BAD + bh * tl.num_programs(0) + tl.program_id(0), first)
    pointers = COPY + base + e[:, None].to(tl.int64) * padded + t[None, :]
    tl.store(pointers, tl.trans(x).to(COPY.dtype.element_ty))


@triton.jit(do_not_specialize=["heads", "length", "offset"])
def prepare_backward(
    GRAD, OUT, GRAD_LOG, MASS, COPY, SHARE, SHIFT, RATE, sb, sh, st, heads, length, offset, width, padded,
    W: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Padded copies of dO and dO / m, [W, T], rate = 1 / m, and shift = dlog m - <dO, out>.

    All are zero for rows without mass.
    """
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), bh % heads
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, W)
    i = t - offset
    inside = (i >= 0) & (i < length)
    line = bh.to(tl.int64) * length + i
    mass = tl.load(MASS + line, mask=inside, other=0.0)
    alive = mass > 0.0
    keep = alive[:, None] & (e[None, :] < width)
    g = tl.load(
        GRAD + b * sb + h * sh + i[:, None].to(tl.int64) * st + e[None, :], mask=keep, other=0.0
    )
    out = tl.load(OUT + line[:, None] * width + e[None, :], mask=keep, other=0.0)
    shift = tl.load(GRAD_LOG + line, mask=alive, other=0.0)
    shift -= tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    place = bh.to(tl.int64) * padded + t
    tl.store(SHIFT + place, shift)
    rate = tl.where(alive, 1.0 / tl.where(alive, mass, 1.0), 0.0)
    tl.store(RATE + place, rate)
    where = bh.to(tl.int64) * padded * W + e[:, None].to(tl.int64) * padded + t[None, :]
    tl.store(COPY + where, tl.trans(g))
    tl.store(SHARE + where, tl.trans(g.to(tl.float32) * rate[:, None]).to(SHARE.dtype.element_ty))


@triton.jit
def _build(
    xt, yt, sums, a, start, stop, tx, group, x_head, y_head,
    D: tl.constexpr, V: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr,
    SETTLE: tl.constexpr,
):  # fmt: skip
    """sum_t x_ta x_tb y_t for G features from a on, and for every b; stored as [a, b, v]."""
    b = tl.arange(0, D)
    v = tl.arange(0, V)
    own = a + tl.arange(0, G)
    acc = tl.zeros((G * V, D), tl.float32)
    for g in range(group):
        for first in tl.range(start, stop, BT):
            t = first + tl.arange(0, BT)
            y = tl.load(yt + g * y_head + v[:, None] * tx + t[None, :])
            x = _rows(xt + g * x_head, b, t, tx, KIND)
            xa = tl.load(xt + g * x_head + own[:, None] * tx + t[None, :])
            if KIND == "bf16":
                left = xa[:, None, :] * y[None, :, :]
            else:
                left = _operand(xa.to(tl.float32)[:, None, :] * y.to(tl.float32)[None, :, :], KIND)
            acc = _more(tl.reshape(left, (G * V, BT)), x, acc, KIND)
            _settle(g, SETTLE)
    r = tl.arange(0, G * V)
    pointers = sums + (a + r // V)[:, None] * (D * V) + b[None, :] * V + (r % V)[:, None]
    tl.store(pointers, acc, mask=(a + r // V)[:, None] < D)


@triton.jit
def _build_mass(
    xt, y, rate, shift, masses, means, traces, start, stop, tx, group, x_head, y_head,
    D: tl.constexpr, V: tl.constexpr, RATED: tl.constexpr, KIND: tl.constexpr, BT: tl.constexpr,
    SETTLE: tl.constexpr,
):  # fmt: skip
    """z, with the weights rate shift if RATED; else also sum_t |x_t|^2 y_t and sum_t |x_t|^2."""
    d = tl.arange(0, D)
    v = tl.arange(0, V)
    acc = tl.zeros((D, D), tl.float32)
    mean = tl.zeros((V,), tl.float32)
    trace = 0.0
    for g in range(group):
        for first in tl.range(start, stop, BT):
            t = first + tl.arange(0, BT)
            x = tl.load(xt + g * x_head + d[:, None] * tx + t[None, :])
            if RATED:
                weight = tl.load(rate + g * tx + t) * tl.load(shift + g * tx + t)
                left = _operand(x.to(tl.float32) * weight[None, :], KIND)
            else:
                left = _wide(x, KIND)
                norm = tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)
                values = tl.load(y + g * y_head + v[:, None] * tx + t[None, :]).to(tl.float32)
                mean += tl.sum(norm[None, :] * values, 1)
                trace += tl.sum(norm, 0)
            acc = _more(left, tl.trans(_wide(x, KIND)), acc, KIND)
            _settle(g, SETTLE)
    tl.store(masses + d[:, None] * D + d[None, :], acc)
    if not RATED:
        tl.store(means + v, mean)
        tl.store(traces, trace)


@triton.jit(
    do_not_specialize=["first_head", "heads", "x_heads", "y_heads", "first_chunk", "chunks"]
)
def build(
    XT, Y, RATE, SHIFT, SUMS, MASSES, MEANS, TRACES, first_head, heads, x_heads, y_heads, group,
    tx, chunk, first_chunk, chunks, origin, width,
    D: tl.constexpr, V: tl.constexpr, RATED: tl.constexpr, G: tl.constexpr, KIND: tl.constexpr,
    BT: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """The sums of one chunk: G features of S, or, in the last program, z."""
    part = tl.program_id(0)
    n = first_chunk + tl.program_id(1)
    low = tl.program_id(2)
    bj = first_head + low
    b, j = (bj // heads).to(tl.int64), bj % heads
    # Of queries there are `group` heads for each; keys and values may be shared by several.
    x_head = (b * x_heads + j * x_heads // heads) * (tx * D)
    y_head = (b * y_heads + j * y_heads // heads) * (tx * V)
    line = bj.to(tl.int64) * group * tx
    start = n * chunk - origin
    slot = low.to(tl.int64) * chunks + n
    if part * G >= width:
        if part == tl.num_programs(0) - 1:
            _build_mass(
                XT + x_head, Y + y_head, RATE + line, SHIFT + line, MASSES + slot * (D * D),
                MEANS + slot * V, TRACES + slot, start, start + chunk, tx, group, tx * D, tx * V,
                D, V, RATED, KIND, BT, SETTLE,
            )  # fmt: skip
    else:
        _build(
            XT + x_head, Y + y_head, SUMS + slot * (D * D * V), part * G, start, start + chunk, tx,
            group, tx * D, tx * V, D, V, G, KIND, BT, SETTLE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "low", "high", "keep_low", "keep_high"])
def scan(
    SUMS, MASSES, MEANS, TRACES, STATES, Z, MU, chunks, low, high, keep_low, keep_high, width,
    D: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, TOTAL: tl.constexpr,
    CENTRED: tl.constexpr, KIND: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """For every chunk the sum of those before it, or after it if REVERSE, or one of all if TOTAL."""
    a = tl.program_id(0)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    line = tl.program_id(2).to(tl.int64) * chunks
    v = tl.arange(0, V)
    # Rows beyond the width were not built. One comparison: the interpreter takes no mask that joins a
    # scalar with a block.
    stop = tl.where(a < width, width, 0)
    state = tl.zeros((BB, V), tl.float32)
    z = tl.zeros((BB,), tl.float32)
    mean = tl.zeros((V,), tl.float32)
    trace = 0.0
    count = chunks + 1 if TOTAL else chunks
    for step in range(count):
        n = chunks - 1 - step if REVERSE else step
        if TOTAL:
            wanted = step == chunks
            slot = line
        else:
            wanted = (n >= keep_low) & (n < keep_high)
            slot = line + n
        if wanted:
            out = state
            if CENTRED:
                mu = tl.where(trace > 0.0, mean / tl.where(trace > 0.0, trace, 1.0), 0.0)
                out = state - z[:, None] * mu[None, :]
                if a == 0 and tl.program_id(1) == 0:
                    tl.store(MU + slot * V + v, mu)
            out = _operand(out, KIND)
            base = STATES + slot * (D * D * V) + a * (D * V)
            tl.store(base + b[:, None] * V + v[None, :], out)
            tl.store(Z + slot * (D * D) + a * D + b, z)
        if (n >= low) & (n < high):
            chunk = line + n
            state += tl.load(
                SUMS + chunk * (D * D * V) + a * (D * V) + b[:, None] * V + v[None, :],
                mask=b[:, None] < stop, other=0.0,
            )  # fmt: skip
            z += tl.load(MASSES + chunk * (D * D) + a * D + b)
            if CENTRED:
                mean += tl.load(MEANS + chunk * V + v)
                trace += tl.load(TRACES + chunk)
