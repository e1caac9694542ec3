"""Bands: what a table says of the pairs within its reach, and where its gradient goes.

A table has a number for every query and distance; a band has the same by query and key, to the base
2, so that the fused kernels read blocks of pairs as blocks of memory (`_band_start` says where a line
begins). Here distances are `after` = j - i: they run as memory does. Sums over places are taken part
by part, without atomics.
"""

import triton
import triton.language as tl

from .triton_kernels import LOG2E, _band_start, _rows


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """x as the sum of two of this dtype; float32 as it is, and zero."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _row(after, CLIP: tl.constexpr):
    """Which row, or column, of a table belongs to a distance."""
    return tl.minimum(tl.maximum(CLIP - after, 0), 2 * CLIP)


@triton.jit
def spread(
    X, ROWS, TABLE, BAND, num_heads, num_queries, num_keys, width, size, sxb, sxh, sxt, srh, stb,
    sth, stt,
    CLIP: tl.constexpr, SIDED: tl.constexpr, SCORED: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The band of a granule of queries: <x_i, row>, or what a table has, for every key."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    # Late blocks have the most to do: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    i = n + place
    begin = _band_start(block * BM, place, num_keys, width, CLIP)
    line = BAND + (bh.to(tl.int64) * num_queries + n[:, None]) * width
    x = n
    if SCORED:
        x = _rows(X + b * sxb + h * sxh, sxt, n, size, WIDTH, num_queries, True)
    # From the last query's first key to the first query's last.
    first = begin - (block * BM + BM - 1 + place)
    last = tl.minimum(begin + width, num_keys) - (block * BM + place)
    if SIDED:
        last = tl.minimum(last, 1)
    for start in tl.range(first, last, BR):
        after = start + tl.arange(0, BR)
        of = _row(after, CLIP)
        if SCORED:
            rows = _rows(ROWS + h * srh, size, of, size, WIDTH, 2 * CLIP + 1, True)
            high, low = _halves(rows, x.dtype)
            out = tl.dot(x, tl.trans(high), input_precision=PRECISION)
            if x.dtype != tl.float32:
                out = tl.dot(x, tl.trans(low), out, input_precision=PRECISION)
        else:
            at = TABLE + b * stb + h * sth + n[:, None].to(tl.int64) * stt + of[None, :]
            out = tl.load(at, mask=(n < num_queries)[:, None], other=0.0)
        out = out * LOG2E
        if BAND.dtype.element_ty == tl.float16:
            out = tl.maximum(out, -65504.0, propagate_nan=tl.PropagateNan.ALL)
            out = tl.minimum(out, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        c = (i - begin)[:, None] + after[None, :]
        mask = (n < num_queries)[:, None] & (c >= 0) & (c < width)
        tl.store(line + c, out.to(BAND.dtype.element_ty), mask=mask)


@triton.jit
def _pulled(
    DBAND, ENDS, line, other, n, after, place, num_queries, num_keys, width, CLIP: tl.constexpr,
    SIDED: tl.constexpr,
):  # fmt: skip
    """The gradients of a table's numbers, [queries, distances], its ends with all beyond them."""
    i = n[:, None] + place
    j = i + after[None, :]
    inside = (n < num_queries)[:, None]
    seen = inside & (j >= 0) & (j < num_keys) & (after > -CLIP)[None, :]
    seen = seen & (after <= 0 if SIDED else after < CLIP)[None, :]
    begin = _band_start(n, place, num_keys, width, CLIP)
    at = DBAND + (line + n[:, None]) * width + (j - begin[:, None])
    out = tl.load(at, mask=seen, other=0.0).to(tl.float32)
    end = tl.load(ENDS + line + n, mask=n < num_queries, other=0.0)
    out = tl.where((after == -CLIP)[None, :], end[:, None], out)
    if not SIDED:
        end = tl.load(ENDS + other + line + n, mask=n < num_queries, other=0.0)
        out = tl.where((after == CLIP)[None, :], end[:, None], out)
    return out


@triton.jit
def band_to_queries(
    DBAND, ENDS, ROWS, DX, num_heads, num_queries, num_keys, width, size, srh,
    CLIP: tl.constexpr, SIDED: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx_i = sum over distances of dscore_i row."""
    bh = tl.program_id(1)
    h = (bh % num_heads).to(tl.int64)
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    line = bh.to(tl.int64) * num_queries
    other = tl.num_programs(1).to(tl.int64) * num_queries
    acc = tl.zeros((BM, WIDTH), tl.float32)
    # No key comes before the first.
    first = tl.maximum(-CLIP, -(block * BM + BM - 1 + place))
    for start in tl.range(first, 1 if SIDED else CLIP + 1, BR):
        after = start + tl.arange(0, BR)
        grad = _pulled(
            DBAND, ENDS, line, other, n, after, place, num_queries, num_keys, width, CLIP, SIDED
        )
        rows = _rows(ROWS + h * srh, size, _row(after, CLIP), size, WIDTH, 2 * CLIP + 1, True)
        high, low = _halves(rows, DX.dtype.element_ty)
        grad = grad.to(DX.dtype.element_ty)
        acc = tl.dot(grad, high, acc, input_precision=PRECISION)
        if DX.dtype.element_ty != tl.float32:
            acc = tl.dot(grad, low, acc, input_precision=PRECISION)
    e = tl.arange(0, WIDTH)
    mask = (n < num_queries)[:, None] & (e < size)[None, :]
    tl.store(DX + (line + n[:, None]) * size + e[None, :], acc.to(DX.dtype.element_ty), mask=mask)


@triton.jit
def band_to_rows(
    X, DBAND, ENDS, DROWS, num_heads, num_queries, num_keys, width, size, count, part, sxb, sxh, sxt,
    CLIP: tl.constexpr, SIDED: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum_i dscore_i x_i over a part of the places, [B H, parts, count, size], the last rows."""
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    place = num_keys - num_queries
    after = tl.program_id(2) * BR - CLIP + tl.arange(0, BR)
    latest = tl.program_id(2) * BR - CLIP + BR - 1
    line = bh.to(tl.int64) * num_queries
    other = tl.num_programs(1).to(tl.int64) * num_queries
    acc = tl.zeros((BR, WIDTH), tl.float32)
    first = tl.program_id(0) * part
    stop = tl.minimum(first + part, num_queries)
    # Queries before the first key that far away have no share.
    first = tl.maximum(first, (-latest - place) // BM * BM)
    for start in tl.range(first, stop, BM):
        n = start + tl.arange(0, BM)
        grad = _pulled(
            DBAND, ENDS, line, other, n, after, place, num_queries, num_keys, width, CLIP, SIDED
        )
        x = _rows(X + b * sxb + h * sxh, sxt, n, size, WIDTH, num_queries, True)
        acc = tl.dot(tl.trans(grad.to(x.dtype)), x, acc, input_precision=PRECISION)
    e = tl.arange(0, WIDTH)
    row = count - 1 - (tl.program_id(2) * BR + tl.arange(0, BR))
    parts = bh.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    target = DROWS + (parts * count + row[:, None]) * size + e[None, :]
    tl.store(target, acc, mask=(row >= 0)[:, None] & (e < size)[None, :])


@triton.jit
def band_to_table(
    DBAND, ENDS, DTABLE, num_queries, num_keys, width,
    CLIP: tl.constexpr, SIDED: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradient of a table, [B H, Q, 2c + 1]."""
    bh = tl.program_id(1)
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    after = tl.program_id(2) * BR - CLIP + tl.arange(0, BR)
    line = bh.to(tl.int64) * num_queries
    other = tl.num_programs(1).to(tl.int64) * num_queries
    out = _pulled(
        DBAND, ENDS, line, other, n, after, num_keys - num_queries, num_queries, num_keys, width,
        CLIP, SIDED,
    )  # fmt: skip
    if SIDED:
        out = tl.where((after <= 0)[None, :], out, 0.0)
    target = DTABLE + (line + n[:, None]) * (2 * CLIP + 1) + (CLIP - after)[None, :]
    tl.store(target, out, mask=(n < num_queries)[:, None] & (after <= CLIP)[None, :])
