"""Numbers per key and per query that the fused kernels read, each formed in one pass.

Norms of distances, numbers as columns of a product, and the bandwidths that queries steer, with their
gradients. Sums over places are taken part by part, without atomics.
"""

import triton
import triton.language as tl

from .primitives import COLUMNS, _columns, _delta, _exactly, _no_tickets, _row_of, _rows
from .scores import _bent, _scale, _tanh


@triton.jit
def _split(x, target, n, inside, MODE: tl.constexpr):
    """Store numbers as COLUMNS columns of half precision that add up to them."""
    e = tl.arange(0, COLUMNS)[None, :]
    parts = _columns(x, e, target.dtype.element_ty, 1.0 if MODE == 2 else 0.0)
    tl.store(target + n[:, None] * COLUMNS + e, parts, mask=inside[:, None])


@triton.jit
def half_norms(
    X, S, OUT, SPLIT_OUT, number, stride, num_heads, length, width, sxb, sxh, sxt,
    WIDTH: tl.constexpr, MODE: tl.constexpr, LOG: tl.constexpr, BM: tl.constexpr,
    SPLIT: tl.constexpr, FOR: tl.constexpr,
):  # fmt: skip
    """-|x|^2 / 2 of every place, times a scale; NaN where x is not finite."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = n < length
    x = _rows(X + b * sxb + h * sxh, sxt, n, width, WIDTH, length, True).to(tl.float32)
    x = tl.where(tl.abs(x) < float("inf"), x, float("nan"))
    line = bh.to(tl.int64) * length
    norm = -0.5 * tl.sum(x * x, 1) * _scale(S, number, stride, h, line, n, inside, MODE, LOG)
    tl.store(OUT + line + n, norm, mask=inside)
    if SPLIT:
        _split(norm, SPLIT_OUT, line + n, inside, FOR)


@triton.jit
def split_columns(COL, OUT, count, BM: tl.constexpr, FOR: tl.constexpr):
    """Numbers as columns, [count, COLUMNS]; FOR: the mode of the scale."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    _split(tl.load(COL + n, mask=n < count, other=0.0), OUT, n, n < count, FOR)


@triton.jit
def _form_deltas(
    GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, COUNTERS, bh, n, num_heads, length, width,
    WIDTH: tl.constexpr, HAS_LSE: tl.constexpr, HAS_LOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Stores delta and log_mass to the base 2 of rows; dO, and the first of the two."""
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    inside = n < length
    line = bh.to(tl.int64) * length
    rows = _row_of(b, h, n.to(tl.int64), line, num_heads, length, TOKENS)
    e = tl.arange(0, WIDTH)
    at = rows[:, None] * width + e[None, :]
    mask = inside[:, None] & (e < width)[None, :]
    grad = tl.load(GRAD + at, mask=mask, other=0.0).to(tl.float32)
    delta, lse2 = _delta(
        grad, _exactly(OUT, LOW, at, mask, HAS_LOW), GRAD_LSE, LSE, line + n, inside, HAS_LSE
    )
    tl.store(DELTA + line + n, delta, mask=inside)
    tl.store(LSE2 + line + n, lse2, mask=inside)
    _no_tickets(COUNTERS, bh)
    return grad, delta


@triton.jit
def deltas(
    GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, COUNTERS, num_heads, length, width,
    WIDTH: tl.constexpr, BM: tl.constexpr, HAS_LSE: tl.constexpr, HAS_LOW: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """<dO, O> - dlog_mass of every row, and log_mass to the base 2."""
    # The last heads first: their outputs may still be in the L2 cache.
    bh = tl.num_programs(1) - 1 - tl.program_id(1)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    _form_deltas(
        GRAD, GRAD_LSE, OUT, LOW, LSE, DELTA, LSE2, COUNTERS, bh, n, num_heads, length, width, WIDTH, HAS_LSE,
        HAS_LOW, TOKENS,
    )  # fmt: skip


@triton.jit
def turn(
    X, WAVES, OUT, num_heads, length, sxb, sxh, sxt, sign,
    PAIRS: tl.constexpr, ROOM: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """(s sin + o cos, o sin - s cos) of every pair (s, o) of a row; waves are (sin, sign cos)."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = n < length
    x = _rows(X + b * sxb + h * sxh, sxt, n, 2 * PAIRS, 2 * ROOM, length, True)
    s, o = tl.split(x.to(tl.float32).reshape(BM, ROOM, 2))
    waves = _rows(WAVES, 2 * PAIRS, n, 2 * PAIRS, 2 * ROOM, length, True)
    sin, cos = tl.split(waves.reshape(BM, ROOM, 2))
    cos *= sign
    out = tl.join(s * sin + o * cos, o * sin - s * cos).reshape(BM, 2 * ROOM)
    e = tl.arange(0, 2 * ROOM)
    target = OUT + (bh.to(tl.int64) * length + n[:, None]) * (2 * PAIRS) + e[None, :]
    mask = inside[:, None] & (e < 2 * PAIRS)[None, :]
    tl.store(target, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _of_head(SUMS, h, batch, heads, line, first, count, BLOCK: tl.constexpr):
    """The sum of `count` numbers from `first` on, of a head's lines in all sequences."""
    acc = tl.zeros((BLOCK,), tl.float32)
    per = (count + BLOCK - 1) // BLOCK
    # Unrolled, so that several loads are in flight.
    for step in tl.range(0, batch * per, loop_unroll_factor=4):
        n = step % per * BLOCK + tl.arange(0, BLOCK)
        at = SUMS + (step // per * heads + h) * line + first
        acc += tl.load(at + n, mask=n < count, other=0.0)
    return tl.sum(acc, 0)


@triton.jit
def _store_scale(total, GIVEN, OUT, h, stride, LOG: tl.constexpr):
    """Store the gradient of a head's scale, or of its parameter."""
    if LOG[0] > 0:
        log, slope = _bent(tl.load(GIVEN + h * stride), LOG)
        total *= -2.0 * tl.exp(-2.0 * log) * slope
    tl.store(OUT + h, total)


@triton.jit
def sum_to_scale(
    SUMS, GIVEN, OUT, batch, heads, line, first, count, stride, LOG: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradient of a head's scale, or of its parameter, from `count` of the sums [B, H, line]."""
    h = tl.program_id(0).to(tl.int64)
    total = _of_head(SUMS, h, batch, heads, line, first, count, BLOCK)
    _store_scale(total, GIVEN, OUT, h, stride, LOG)


@triton.jit
def _steered(
    X, W, LOG, b, h, n, length, width, sxb, sxh, sxt, swh, slh, reach,
    WIDTH: tl.constexpr, BEND: tl.constexpr,
):  # fmt: skip
    """x, w, tanh, the slope of log s, and 1 / s_i^2, log s_i = log s + reach tanh(<x_i, w> / reach)."""
    e = tl.arange(0, WIDTH)
    x = _rows(X + b * sxb + h * sxh, sxt, n, width, WIDTH, length, True).to(tl.float32)
    w = tl.load(W + h * swh + e, mask=e < width, other=0.0)
    bend = _tanh(tl.sum(x * w[None, :], 1) / reach)
    log, slope = _bent(tl.load(LOG + h * slh), BEND)
    return x, w, bend, slope, tl.exp(-2.0 * (log + reach * bend))


@triton.jit
def steer(
    X, W, LOG, OUT, num_heads, length, width, sxb, sxh, sxt, swh, slh, reach,
    WIDTH: tl.constexpr, BM: tl.constexpr, BEND: tl.constexpr,
):  # fmt: skip
    """The precision of every query, [B, H, T]."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    _, _, _, _, precision = _steered(
        X, W, LOG, b, h, n, length, width, sxb, sxh, sxt, swh, slh, reach, WIDTH, BEND
    )
    tl.store(OUT + bh.to(tl.int64) * length + n, precision, mask=n < length)


@triton.jit
def steer_backward(
    X, W, LOG, GRAD, DX, SUMS, num_heads, length, width, sxb, sxh, sxt, swh, slh, sgb, sgh, reach,
    WIDTH: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr, BEND: tl.constexpr,
):  # fmt: skip
    """dx, and over a part of the places dw and dlog: [B H, parts, width + 1]."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    e = tl.arange(0, WIDTH)
    dw = tl.zeros((WIDTH,), tl.float32)
    dlog = tl.zeros((BM,), tl.float32)
    first = tl.program_id(0) * PART
    for start in tl.range(first, tl.minimum(first + PART, length), BM):
        n = start + tl.arange(0, BM)
        x, w, bend, slope, precision = _steered(
            X, W, LOG, b, h, n, length, width, sxb, sxh, sxt, swh, slh, reach, WIDTH, BEND
        )
        moved = -2.0 * precision * tl.load(GRAD + b * sgb + h * sgh + n, mask=n < length, other=0.0)
        score = moved * (1.0 - bend * bend)
        dlog += moved * slope
        dw += tl.sum(score[:, None] * x, 0)
        target = DX + (bh.to(tl.int64) * length + n[:, None]) * width + e[None, :]
        mask = (n < length)[:, None] & (e < width)[None, :]
        tl.store(target, (score[:, None] * w[None, :]).to(DX.dtype.element_ty), mask=mask)
    part = SUMS + (bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * (width + 1)
    tl.store(part + e, dw, mask=e < width)
    tl.store(part + width, tl.sum(dlog, 0))
