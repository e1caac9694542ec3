"""Bands of tables: how they are formed, and the gradients of what they were formed from.

A table has a number for every query and distance. A band has the same numbers by query and key, to
the base 2, so that the fused kernels read blocks of pairs as blocks of memory (bands.py says where a
line begins). Here a distance is `after` = j - i. It grows along a line as memory does, but distance 0
moves by one column from each query to the next. So a program takes every eighth query: what it reads
or writes then begins at a multiple of 16 bytes in all lines. Sums over queries are taken part by
part, without atomics.
"""

import triton
import triton.language as tl

from .. import codes
from .bands import _band_start
from .primitives import LOG2E, _row_of, _rows, _settle

EVERY = tl.constexpr(codes.EVERY)


@triton.jit
def halves(X, OUT, count, BM: tl.constexpr):
    """float32 numbers as sums of two half precision numbers, [2, count]."""
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    x = tl.load(X + n, mask=n < count, other=0.0)
    high = x.to(OUT.dtype.element_ty)
    tl.store(OUT + n, high, mask=n < count)
    tl.store(OUT + count + n, (x - high.to(tl.float32)).to(OUT.dtype.element_ty), mask=n < count)


@triton.jit
def _row(after, CLIP: tl.constexpr, HALF: tl.constexpr):
    """The row, or column, of a distance in a table; HALF: it has none for keys after the query."""
    if HALF:
        return tl.minimum(tl.maximum(-after, 0), CLIP)
    return tl.minimum(tl.maximum(CLIP - after, 0), 2 * CLIP)


@triton.constexpr_function
def _count(clip, half):
    """How many rows a table has."""
    return clip + 1 if half else 2 * clip + 1


@triton.jit
def _late_first():
    """The block and the residue of a program: late blocks have the most to do, and start first."""
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // EVERY
    return block, tl.program_id(0) % EVERY


@triton.jit
def _places(block, residue, BM: tl.constexpr):
    """BM queries, of which each is EVERY after the one before."""
    return (block * BM + tl.arange(0, BM)) * EVERY + residue


@triton.jit
def _aligned(first, residue, place):
    """The last distance up to `first` at which the lines of such queries are aligned."""
    return first - ((first + residue + place) & (EVERY - 1))


@triton.jit
def _columns(i, start, begin, width, BR: tl.constexpr):
    """Columns of a band from distance `start` on, [queries, BR], and which exist, by eights."""
    first = (i + start - begin) // EVERY * EVERY
    e = tl.arange(0, BR)
    eights = first[:, None] + (e // EVERY * EVERY)[None, :]
    return first[:, None] + e[None, :], (eights >= 0) & (eights < width)


@triton.jit
def _stored(DBAND, line, n, i, first, num_queries, width, BR: tl.constexpr):
    """The gradients of pairs from key `first` on, a multiple of eight, [queries, BR].

    For a causal filter and a band of all pairs. The pass over keys has stored all groups of eight
    keys whose first key the query sees, with zeros for hidden keys.
    """
    e = tl.arange(0, BR)
    eights = first + (e // EVERY * EVERY)[None, :]
    at = DBAND + line * width + (n[:, None] * width + first + e[None, :])
    there = (n < num_queries)[:, None] & (eights >= 0) & (eights <= i[:, None])
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def spread(
    X, ROWS, TABLE, BAND, num_heads, num_queries, num_keys, width, size, rest_of, sxb, sxh, sxt, srh,
    stb, sth, stt,
    CLIP: tl.constexpr, SIDED: tl.constexpr, SCORED: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The bands of some queries: <x_i, row>, or what a table has, for every key.

    REST: what rounding took from the rows lies `rest_of` numbers after them.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block, residue = _late_first()
    if block * BM * EVERY + residue >= num_queries:
        return
    n = _places(block, residue, BM)
    place = num_keys - num_queries
    i = n + place
    inside = n < num_queries
    begin = _band_start(n, place, num_keys, width, CLIP)
    band = BAND + bh.to(tl.int64) * num_queries * width
    x = n
    if SCORED:
        x = _rows(X + b * sxb + h * sxh, sxt, n, size, WIDTH, num_queries, True)
    early = block * BM * EVERY + place
    late = tl.minimum(early + BM * EVERY, num_keys) - 1
    first = _aligned(tl.maximum(1 - width, -late), residue, place)
    last = 1 if SIDED else tl.minimum(width - tl.minimum(early, CLIP), num_keys - early)
    # Blocks of distances that are all beyond the reach.
    near = first + tl.maximum(-CLIP + 1 - first, 0) // BR * BR
    if near > first:
        if SCORED:
            e = tl.arange(0, WIDTH)
            end = ROWS + h * srh + _row(-CLIP, CLIP, HALF) * size + e
            row = tl.load(end, mask=e < size, other=0.0).to(tl.float32)
            if REST:
                row += tl.load(end + rest_of, mask=e < size, other=0.0).to(tl.float32)
            far = tl.sum(x.to(tl.float32) * row[None, :], 1)
        else:
            at = TABLE + b * stb + h * sth + n.to(tl.int64) * stt + _row(-CLIP, CLIP, HALF)
            far = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        out = _as_band(tl.broadcast_to(far[:, None], (BM, BR)), BAND)
        for start in tl.range(first, near, BR):
            _store_band(band, out, n, i, start, begin, width, inside, BR)
    for start in tl.range(near, last, BR):
        of = _row(start + tl.arange(0, BR), CLIP, HALF)
        if SCORED:
            rows = _rows(ROWS + h * srh, size, of, size, WIDTH, _count(CLIP, HALF), True)
            out = tl.dot(x, tl.trans(rows), input_precision=PRECISION)
            if REST:
                rest = _rows(
                    ROWS + rest_of + h * srh, size, of, size, WIDTH, _count(CLIP, HALF), True
                )
                out = tl.dot(x, tl.trans(rest), out, input_precision=PRECISION)
        else:
            at = TABLE + b * stb + h * sth + n[:, None].to(tl.int64) * stt + of[None, :]
            out = tl.load(at, mask=inside[:, None], other=0.0)
        _store_band(band, _as_band(out, BAND), n, i, start, begin, width, inside, BR)


@triton.jit
def _as_band(out, BAND):
    """Logarithms to the base 2, clamped to what the band's dtype holds."""
    out = (out * LOG2E).to(BAND.dtype.element_ty)
    if BAND.dtype.element_ty == tl.float16:
        # After rounding, since half precision instructions take two numbers at a time.
        most = tl.full((1, 1), 65504.0, tl.float16)
        out = tl.maximum(out, -most, propagate_nan=tl.PropagateNan.ALL)
        out = tl.minimum(out, most, propagate_nan=tl.PropagateNan.ALL)
    return out


@triton.jit
def _store_band(band, out, n, i, start, begin, width, inside, BR: tl.constexpr):
    c, there = _columns(i, start, begin, width, BR)
    # Counted from a head's first query, 32 bits are enough.
    at = band + (n[:, None] * width + c)
    tl.store(at, out, mask=there & inside[:, None])


@triton.jit
def _pulled(
    DBAND, ENDS, line, other, n, start, place, num_queries, num_keys, width, CLIP: tl.constexpr,
    SIDED: tl.constexpr, BR: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The gradients of a table's numbers from distance `start` on.

    The number at an end of the table has the gradients of all pairs beyond it, too. Without MASK all
    of these pairs are visible, and none is at an end.
    """
    i = n + place
    inside = n < num_queries
    c, there = _columns(i, start, _band_start(n, place, num_keys, width, CLIP), width, BR)
    at = DBAND + line * width + (n[:, None] * width + c)
    if not MASK:
        return tl.load(at, mask=inside[:, None], other=0.0)
    out = tl.load(at, mask=there & inside[:, None], other=0.0).to(tl.float32)
    after = start + tl.arange(0, BR)
    j = i[:, None] + after[None, :]
    seen = (j >= 0) & (j < num_keys) & (after > -CLIP)[None, :]
    seen = seen & (after <= 0 if SIDED else after < CLIP)[None, :]
    out = tl.where(seen, out, 0.0)
    end = tl.load(ENDS + line + n, mask=inside, other=0.0)
    out = tl.where((after == -CLIP)[None, :], end[:, None], out)
    if not SIDED:
        end = tl.load(ENDS + other + line + n, mask=inside, other=0.0)
        out = tl.where((after == CLIP)[None, :], end[:, None], out)
    return out.to(DBAND.dtype.element_ty)


@triton.jit
def band_to_queries(
    DBAND, ENDS, ROWS, K, DQ, DX, num_heads, group, num_queries, num_keys, width, size, wide, srh,
    skb, skh, skt, scale,
    CLIP: tl.constexpr, SIDED: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr,
    TOKENS: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """dx_i = sum over distances of dscore_i row.

    KEYS > 0: the band has all pairs of a causal filter, and this forms dq_i = scale sum_j ds_ij k_j,
    too, from keys of KEYS features. A block of pairs is read by keys shortly before it is read by
    distance, so that it is still in the cache.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    block, residue = _late_first()
    if block * BM * EVERY + residue >= num_queries:
        return
    n = _places(block, residue, BM)
    inside = n < num_queries
    place = num_keys - num_queries
    i = n + place
    line = bh.to(tl.int64) * num_queries
    other = tl.num_programs(1).to(tl.int64) * num_queries
    acc = tl.zeros((BM, WIDTH), tl.float32)
    dq = tl.zeros((BM, KEYS if KEYS > 0 else 16), tl.float32)
    early = block * BM * EVERY + place
    late = tl.minimum(early + BM * EVERY, num_keys) - 1
    # There are no keys before key 0.
    first = _aligned(tl.maximum(-CLIP, -late), residue, place)
    turns = tl.cdiv((1 if SIDED else CLIP + 1) - first, BR)
    # From `sure` to `sure_stop` all pairs are visible, and none is at an end of the table.
    sure = tl.maximum(tl.cdiv(tl.maximum(1 - CLIP, -early) - first, BR), 0)
    limit = 1 if SIDED else tl.minimum(CLIP, num_keys - late)
    sure_stop = sure + tl.maximum(limit - first - sure * BR, 0) // BR
    for span in tl.static_range(1 if KEYS > 0 else 3):
        if KEYS > 0:
            begin, end = 0, turns
        elif span == 0:
            begin, end = 0, tl.minimum(sure, turns)
        elif span == 1:
            begin, end = sure, sure_stop
        else:
            begin, end = sure_stop, turns
        for turn in tl.range(begin, end):
            start = first + turn * BR
            if KEYS > 0:
                j = turn * BR + tl.arange(0, BR)
                pull = _stored(DBAND, line, n, i, turn * BR, num_queries, width, BR)
                k = _rows(K + b * skb + (h // group) * skh, skt, j, wide, KEYS, num_keys, True)
                dq = tl.dot(pull, k, dq, input_precision=PRECISION)
                key = ((i + start) // EVERY * EVERY)[:, None]
                grad = _stored(DBAND, line, n, i, key, num_queries, width, BR)
            else:
                grad = _pulled(
                    DBAND, ENDS, line, other, n, start, place, num_queries, num_keys, width, CLIP, SIDED,
                    BR, span != 1,
                )  # fmt: skip
            of = _row(start + tl.arange(0, BR), CLIP, HALF)
            rows = _rows(ROWS + h * srh, size, of, size, WIDTH, _count(CLIP, HALF), True)
            acc = tl.dot(grad, rows, acc, input_precision=PRECISION)
            _settle(turn, SETTLE and KEYS == 0)
    e = tl.arange(0, WIDTH)
    target = DX + (line + n[:, None]) * size + e[None, :]
    tl.store(target, acc.to(DX.dtype.element_ty), mask=inside[:, None] & (e < size)[None, :])
    if KEYS > 0:
        e = tl.arange(0, KEYS)
        row = _row_of(b, h, n.to(tl.int64), line, num_heads, num_queries, TOKENS)
        target = DQ + row[:, None] * wide + e[None, :]
        mask = inside[:, None] & (e < wide)[None, :]
        tl.store(target, (dq * scale).to(DQ.dtype.element_ty), mask=mask)


@triton.jit
def band_to_rows(
    X, DBAND, ENDS, DROWS, batch, num_heads, num_queries, num_keys, width, size, count, parts, sxb,
    sxh, sxt,
    CLIP: tl.constexpr, SIDED: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """sum_i dscore_i x_i over every eighth query of a part, [H, 8 parts, count, size], of the last
    `count` rows.

    STORED: gradients of pairs come from `_stored`.
    """
    # Head by head: what all distances of a head read stays in the L2 cache.
    h = tl.program_id(2).to(tl.int64)
    residue, part = tl.program_id(0) % EVERY, tl.program_id(0) // EVERY
    place = num_keys - num_queries
    # Near distances have the most to do, and start first.
    start = _aligned(-CLIP, residue, place) + (tl.num_programs(1) - 1 - tl.program_id(1)) * BR
    other = batch * tl.num_programs(2).to(tl.int64) * num_queries
    acc = tl.zeros((BR, WIDTH), tl.float32)
    span_of: tl.constexpr = BM * EVERY
    turns = tl.cdiv(tl.cdiv(num_queries, span_of), parts)
    # Early queries see no key that far before them. Where a query sees all of these keys, no mask is
    # needed.
    unseen = tl.maximum(-(start + BR - 1) - place, 0) // span_of
    sure = tl.cdiv(tl.maximum(-start - place, 0), span_of)
    first = tl.minimum(tl.cdiv(tl.maximum(unseen - part, 0), parts), turns)
    sure = tl.minimum(tl.cdiv(tl.maximum(sure - part, 0), parts), turns)
    if SIDED:
        edge = (start <= -CLIP) | (start + BR - 1 > 0)
    else:
        # For the last queries, keys that far after them do not exist.
        edge = (start <= -CLIP) | (start + BR - 1 > 0) | (start + BR > CLIP)
    sure = tl.where(edge, turns, sure)
    bounds = (first, turns) if STORED else (first, sure, turns)
    for span in tl.static_range(1 if STORED else 2):
        for turn in tl.range(batch * bounds[span], batch * bounds[span + 1]):
            b, block = (turn % batch).to(tl.int64), turn // batch * parts + part
            line = (b * num_heads + h) * num_queries
            n = _places(block, residue, BM)
            if STORED:
                key = ((n + place + start) // EVERY * EVERY)[:, None]
                grad = _stored(DBAND, line, n, n + place, key, num_queries, width, BR)
            else:
                grad = _pulled(
                    DBAND, ENDS, line, other, n, start, place, num_queries, num_keys, width, CLIP, SIDED,
                    BR, span == 0,
                )  # fmt: skip
            x = _rows(X + b * sxb + h * sxh, sxt, n, size, WIDTH, num_queries, True)
            acc = tl.dot(tl.trans(grad), x, acc, input_precision=PRECISION)
    e = tl.arange(0, WIDTH)
    row = count - 1 - (start + CLIP + tl.arange(0, BR))
    target = (h * tl.num_programs(0) + tl.program_id(0)) * count + row[:, None]
    mask = ((row >= 0) & (row < count))[:, None] & (e < size)[None, :]
    tl.store(DROWS + target * size + e[None, :], acc, mask=mask)


@triton.jit
def sum_rows(
    SUMS, DROWS, heads, parts, count, total, size,
    BR: tl.constexpr, BP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of the rows from its parts, [heads, parts, count, size]: zero but for the last
    `count` rows."""
    first = tl.program_id(1).to(tl.int64) * heads * parts
    e = tl.arange(0, WIDTH)
    # BP parts of the same BR rows at a time, so that their loads overlap.
    both = tl.arange(0, BP * BR)
    row = tl.program_id(0) * BR + both % BR
    there = (row >= total - count) & (row < total)
    acc = tl.zeros((BP * BR, WIDTH), tl.float32)
    for start in tl.range(0, heads * parts, BP):
        part = start + both // BR
        line = (first + part) * count + row - (total - count)
        mask = (there & (part < heads * parts))[:, None] & (e < size)[None, :]
        acc += tl.load(SUMS + line[:, None] * size + e[None, :], mask=mask, other=0.0)
    acc = tl.sum(acc.reshape(BP, BR, WIDTH), 0)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    target = DROWS + (tl.program_id(1).to(tl.int64) * total + row[:, None]) * size + e[None, :]
    mask = (row < total)[:, None] & (e < size)[None, :]
    tl.store(target, acc.to(DROWS.dtype.element_ty), mask=mask)


@triton.jit
def band_to_table(
    DBAND, ENDS, DTABLE, num_queries, num_keys, width,
    CLIP: tl.constexpr, SIDED: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradient of a table, [B H, Q, 2c + 1]."""
    bh = tl.program_id(1)
    residue = tl.program_id(0) % EVERY
    n = _places(tl.program_id(0) // EVERY, residue, BM)
    place = num_keys - num_queries
    line = bh.to(tl.int64) * num_queries
    other = tl.num_programs(1).to(tl.int64) * num_queries
    start = _aligned(-CLIP, residue, place) + tl.program_id(2) * BR
    out = _pulled(
        DBAND, ENDS, line, other, n, start, place, num_queries, num_keys, width, CLIP, SIDED, BR, True
    )  # fmt: skip
    column = CLIP - (start + tl.arange(0, BR))
    target = DTABLE + (line + n[:, None]) * (2 * CLIP + 1) + column[None, :]
    there = (column >= 0) & (column <= 2 * CLIP)
    tl.store(target, out, mask=(n < num_queries)[:, None] & there[None, :])
