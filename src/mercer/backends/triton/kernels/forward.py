"""The fused kernels: forward, and a backward in two passes, for one lowered term.

    log w_ij = sum_f link_f(scale_f,i (<q^f_i, k^f_j> + col^f_j) + row^f_i) + table[i, clip(j - i)]

What this must meet: no [Q, K] tensor in memory; every sum owned by one program, or of whole numbers, so
that the same input gives the same bits; float32 for all but the matrix products' operands; a filter visits only
blocks that see something, and masks only where a block is not wholly visible.

One program owns a block of queries (forward, dq) or of keys (dk, dv) of one head. A term has one or
two slots of features (E0, E1); logarithms are to the base 2.
"""

import triton
import triton.language as tl

from ....term import factors
from .. import block_sizes as triton_sizes

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SQRT3 = tl.constexpr(1.7320508075688772)
SQRT5 = tl.constexpr(2.23606797749979)
IDENTITY = tl.constexpr(0)
POWER = tl.constexpr(1)
RATIONAL = tl.constexpr(2)
MATERN12 = tl.constexpr(3)
MATERN32 = tl.constexpr(4)
MATERN52 = tl.constexpr(5)
# How a span forms its weights: by the general way, or by one of the shorter ones.
GENERAL = tl.constexpr(0)
PLAIN = tl.constexpr(1)
POLY = tl.constexpr(2)
FLAT = tl.constexpr(3)
# Numbers per key as columns of a product: three, filled up to the least that a product takes. Where
# every query has its own scale, the fourth is ones, for sums of gradients alone.
COLUMNS = tl.constexpr(16)
# How a span of keys reads a table.
NONE = tl.constexpr(0)
FAR = tl.constexpr(1)
BLOCKS = tl.constexpr(2)
PAIRS = tl.constexpr(3)
GRANULE = tl.constexpr(triton_sizes.GRANULE)
NOTHING = tl.constexpr(triton_sizes.NOTHING)
NORMS = tl.constexpr(triton_sizes.NORMS)
BY_LENGTHS = tl.constexpr(triton_sizes.LENGTHS)
EACH = tl.constexpr(triton_sizes.EACH)
LEAST_LENGTH = tl.constexpr(factors.LEAST_LENGTH)


@triton.jit
def _link(s, LINK: tl.constexpr, PARAM: tl.constexpr, FLAT: tl.constexpr):
    """(E, A, C): w = A 2^E and dw/ds = C 2^E, by as few slow functions as there are.

    For the identity, s is already to the base 2. FLAT: the weight needs no exponential at all.
    Comparisons are written so that NaN stays NaN.
    """
    exponent = s
    factor = 1.0
    pull = 1.0
    if LINK == POWER:
        exponent = PARAM * tl.log2(tl.abs(s))
        pull = tl.where(s == 0.0, 0.0, PARAM / tl.where(s == 0.0, 1.0, s))
    elif LINK == RATIONAL:
        base = 1.0 + tl.where(s > 0.0, 0.0, -s) * (1.0 / PARAM)
        root = tl.rsqrt(base)
        inverse = root * root
        if FLAT:
            factor = inverse
            pull = inverse * inverse
        else:
            exponent = -PARAM * tl.log2(base)
            pull = inverse
    elif LINK != IDENTITY:
        square = tl.where(s > 0.0, 0.0, -2.0 * s)
        inverse = tl.rsqrt(square + 1e-30)
        r = square * inverse
        if LINK == MATERN12:
            exponent = -LOG2E * r
            pull = tl.where(square > 0.0, inverse, 0.0)
        elif LINK == MATERN32:
            exponent = (-LOG2E * SQRT3) * r
            factor = 1.0 + SQRT3 * r
            pull = 3.0
        else:
            exponent = (-LOG2E * SQRT5) * r
            factor = 1.0 + SQRT5 * r + (5.0 / 3.0) * square
            pull = (5.0 / 3.0) * (1.0 + SQRT5 * r)
    return exponent, factor, pull


@triton.jit
def _tanh(x):
    """Odd, and without overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _bent(x, LOG: tl.constexpr):
    """log s of a parameter, and its slope; triton_plan.py says what LOG means."""
    slope = 1.0
    if LOG[0] == 2:
        free = tl.minimum(tl.maximum(x, LOG[2]), LOG[3])
        bend = _tanh((x - free) / LOG[4])
        x = free + LOG[4] * bend
        slope = 1.0 - bend * bend
    return x + LOG[1], slope


@triton.jit
def _grown(x, LOG: tl.constexpr):
    """A head's scale from its parameter, where it is one."""
    if LOG[0] > 0:
        log, _ = _bent(x, LOG)
        x = tl.exp(-2.0 * log)
    return x


@triton.jit
def _scale(tensor, number, stride, h, line, n, inside, MODE: tl.constexpr, LOG: tl.constexpr):
    """The scale of a slot: a number, a number of the head, or one for each query."""
    if MODE == 0:
        out = number
    elif MODE == 1:
        out = _grown(tl.load(tensor + h * stride), LOG)
    else:
        out = tl.load(tensor + line + n, mask=inside, other=0.0)
    return out


@triton.jit
def _inverse_length(squares):
    """1 / |x|; of what has no length, products are zeros."""
    return 1.0 / tl.maximum(tl.sqrt(squares), LEAST_LENGTH)


@triton.jit
def _by_keys(t, squares, INSIDE: tl.constexpr):
    """Products as a slot has them, from the squared lengths of keys."""
    if INSIDE == NORMS:
        t -= 0.5 * squares
    elif INSIDE == BY_LENGTHS:
        t = t * _inverse_length(squares)
    return t


@triton.constexpr_function
def _mode(mode, grouped, inside):
    """The mode of scales that queries have each their own of, as heads of a group or by their lengths."""
    return 2 if (mode == 1 and grouped) or inside == BY_LENGTHS.value else mode


@triton.jit
def _down(x, MODE: tl.constexpr):
    """A scale beside rows of queries."""
    return x[:, None] if MODE == 2 else x


@triton.jit
def _across(x, MODE: tl.constexpr):
    """A scale above columns of queries."""
    return x[None, :] if MODE == 2 else x


@triton.jit
def _scaled(t, scale, row, LINK: tl.constexpr, HAS_ROW: tl.constexpr):
    """s = scale t + row, to the base 2 for the identity, and exactly 0 within rounding of a cusp."""
    if LINK == IDENTITY:
        s = t * (scale * LOG2E)
    else:
        s = t * scale
    if HAS_ROW:
        s += row * LOG2E if LINK == IDENTITY else row
        if LINK == MATERN12:
            s = tl.where(s > -3.8e-6 * tl.abs(row), 0.0, s)
    return s


@triton.constexpr_function
def _stretch(filter):
    """Whether each key is seen from one stretch of places: how far before its own it begins, and its length.

    Without a limit, further than there are places; (0, -1) where nobody sees anything.
    """
    (causal, left, right, _, stride, fixed, _, _, documents, gap) = filter[0]
    if len(filter) > 1 or stride or fixed or documents:
        return ()
    before = min(right if right >= 0 else 2**29, 0 if causal else 2**29, -gap if gap else 2**29)
    after = left if left >= 0 else 2**30
    return (before, before + after) if before + after >= 0 else (0, -1)


@triton.jit
def _first_place(j, b, first, lengths, num_keys, FILTER: tl.constexpr, STRETCH: tl.constexpr):
    """The first places that see keys at places j, of a filter that shows them to a stretch of places."""
    there = j < num_keys
    if FILTER[0][7]:
        there = there & (j < tl.load(lengths + b))
    if FILTER[0][3] >= 0:
        there = there & (j >= first - FILTER[0][3])
    if STRETCH[1] < 0:
        there = there & (j < 0)
    return tl.where(there, j - STRETCH[0], 2**31 - 1)


@triton.jit
def _keys_seen(i, b, first, lengths, num_keys, FILTER: tl.constexpr, STRETCH: tl.constexpr):
    """The same from the other side: the first keys that queries at places i see, and the place after the last."""
    start = i + STRETCH[0] - max(STRETCH[1], 0)
    stop = tl.minimum(i + STRETCH[0] + 1, num_keys)
    if FILTER[0][3] >= 0:
        start = tl.maximum(start, first - FILTER[0][3])
    if FILTER[0][7]:
        stop = tl.minimum(stop, tl.load(lengths + b).to(tl.int32))
    return start, stop


@triton.jit
def _visible(i, j, b, first, lengths, ids, stride_ids, num_keys, FILTER: tl.constexpr):
    """Whether queries at places i see keys at places j, one a row, the other a column."""
    STRETCH: tl.constexpr = _stretch(FILTER)
    if len(STRETCH) > 0:
        # One comparison for each pair, of whole numbers without a sign.
        begin = _first_place(j, b, first, lengths, num_keys, FILTER, STRETCH)
        LAST: tl.constexpr = max(STRETCH[1], 0)
        seen = (i - begin).to(tl.uint32, bitcast=True) <= LAST
    else:
        seen = _by_clauses(i, j, b, first, lengths, ids, stride_ids, num_keys, FILTER)
    return seen


@triton.jit
def _by_clauses(i, j, b, first, lengths, ids, stride_ids, num_keys, FILTER: tl.constexpr):
    """The same for any filter."""
    away = i - j
    seen = away != away
    for n in tl.static_range(len(FILTER)):
        clause = (away == away) & (j < num_keys)
        if FILTER[n][0]:
            clause = clause & (away >= 0)
        if FILTER[n][1] >= 0:
            clause = clause & (away <= FILTER[n][1])
        if FILTER[n][2] >= 0:
            clause = clause & (away >= -FILTER[n][2])
        if FILTER[n][3] >= 0:
            clause = clause & (j >= first - FILTER[n][3])
        if FILTER[n][4] > 0:
            clause = clause & ((away < FILTER[n][4]) | (away % FILTER[n][4] == 0))
        if FILTER[n][5] > 0:
            same = i // FILTER[n][5] == j // FILTER[n][5]
            clause = clause & (same | (j % FILTER[n][5] >= FILTER[n][5] - FILTER[n][6]))
        if FILTER[n][7]:
            clause = clause & (j < tl.load(lengths + b))
        if FILTER[n][8]:
            inside = (i >= 0) & (i < num_keys)
            mine = tl.load(ids + b * stride_ids + i, mask=inside, other=-1)
            theirs = tl.load(ids + b * stride_ids + j, mask=j < num_keys, other=-2)
            clause = clause & (mine == theirs) & inside
        if FILTER[n][9] > 0:
            clause = clause & (away >= FILTER[n][9])
        seen = seen | clause
    return seen


@triton.jit
def _key_range(low, high, b, first, lengths, num_keys, FILTER: tl.constexpr):
    """The keys that places low..high may see, [start, stop), and those that all of them see."""
    start = num_keys
    stop = 0
    sure_start = 0
    sure_stop = num_keys
    for n in tl.static_range(len(FILTER)):
        clause_start = 0
        clause_stop = num_keys
        if FILTER[n][0]:
            clause_stop = tl.minimum(clause_stop, high + 1)
            sure_stop = tl.minimum(sure_stop, low + 1)
        if FILTER[n][1] >= 0:
            clause_start = tl.maximum(clause_start, low - FILTER[n][1])
            sure_start = tl.maximum(sure_start, high - FILTER[n][1])
        if FILTER[n][2] >= 0:
            clause_stop = tl.minimum(clause_stop, high + FILTER[n][2] + 1)
            sure_stop = tl.minimum(sure_stop, low + FILTER[n][2] + 1)
        if FILTER[n][3] >= 0:
            clause_start = tl.maximum(clause_start, first - FILTER[n][3])
            sure_start = tl.maximum(sure_start, first - FILTER[n][3])
        if FILTER[n][7]:
            length = tl.load(lengths + b).to(tl.int32)
            clause_stop = tl.minimum(clause_stop, length)
            sure_stop = tl.minimum(sure_stop, length)
        if FILTER[n][9] > 0:
            clause_stop = tl.minimum(clause_stop, high - FILTER[n][9] + 1)
            sure_stop = tl.minimum(sure_stop, low - FILTER[n][9] + 1)
        start = tl.minimum(start, clause_start)
        stop = tl.maximum(stop, clause_stop)
    return start, stop, sure_start, sure_stop


@triton.constexpr_function
def _odd(count):
    """One more for a long window that is a multiple of 16: a block that shows nothing, at most.

    With such a bound the ptxas of Triton 3.6 says that it waits for every product of the loop.
    """
    return count + (count >= 512 and count % 16 == 0)


@triton.jit
def _query_range(low, high, b, first, lengths, start_place, num_queries, FILTER: tl.constexpr):
    """The queries (counted from 0) that may see places low..high, and those that see them all."""
    start = num_queries
    stop = 0
    sure_start = 0
    sure_stop = num_queries
    for n in tl.static_range(len(FILTER)):
        clause_start = 0
        clause_stop = num_queries
        if FILTER[n][0]:
            clause_start = tl.maximum(clause_start, low - start_place)
            sure_start = tl.maximum(sure_start, high - start_place)
        if FILTER[n][1] >= 0:
            clause_stop = tl.minimum(clause_stop, high + _odd(FILTER[n][1] + 1) - start_place)
            sure_stop = tl.minimum(sure_stop, low + FILTER[n][1] + 1 - start_place)
        if FILTER[n][2] >= 0:
            clause_start = tl.maximum(clause_start, low - FILTER[n][2] - start_place)
            sure_start = tl.maximum(sure_start, high - FILTER[n][2] - start_place)
        if FILTER[n][3] >= 0:
            oldest = first - FILTER[n][3]
            clause_stop = tl.where(high < oldest, 0, clause_stop)
            sure_stop = tl.where(low < oldest, 0, sure_stop)
        if FILTER[n][7]:
            length = tl.load(lengths + b).to(tl.int32)
            clause_stop = tl.where(low >= length, 0, clause_stop)
            sure_stop = tl.where(high >= length, 0, sure_stop)
        if FILTER[n][9] > 0:
            clause_start = tl.maximum(clause_start, low + FILTER[n][9] - start_place)
            sure_start = tl.maximum(sure_start, high + FILTER[n][9] - start_place)
        start = tl.minimum(start, clause_start)
        stop = tl.maximum(stop, clause_stop)
    return start, stop, sure_start, sure_stop


@triton.jit
def _query_blocks(
    low, b, first, lengths, num_queries, num_keys, OWN: tl.constexpr, BLOCK: tl.constexpr,
    FILTER: tl.constexpr,
):  # fmt: skip
    """Where the blocks of queries begin that may see one of OWN keys from `low` on, and the last's end."""
    high = tl.minimum(low + OWN, num_keys) - 1
    start, stop, _, _ = _query_range(
        low, high, b, first, lengths, num_keys - num_queries, num_queries, FILTER
    )
    start = tl.maximum(start, 0) // BLOCK * BLOCK
    return start, tl.maximum((stop + BLOCK - 1) // BLOCK * BLOCK, start)


@triton.jit
def _rows(base, stride, index, width, WIDTH: tl.constexpr, limit, CHECK: tl.constexpr):
    """Rows of features, [len(index), WIDTH], zero beyond the limit and the width."""
    e = tl.arange(0, WIDTH)
    pointers = base + index[:, None].to(tl.int64) * stride + e[None, :]
    if CHECK:
        out = tl.load(pointers, mask=(index[:, None] < limit) & (e[None, :] < width), other=0.0)
    else:
        out = tl.load(pointers)
    return out


@triton.jit
def _settle(number, SETTLE: tl.constexpr):
    """Waits for products in flight; `number` is any.

    Where what is multiplied was loaded and changed, Triton 3.6 goes on to the next block while Hopper
    still reads this one from registers, or from where the next but one is written: results then differ
    from run to run, and by more than rounding.
    """
    if SETTLE:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.u32 $0, $1;", "=r,r", [number], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _row_of(b, h, n, line, num_heads, length, TOKENS: tl.constexpr):
    """Which row of an output belongs to place n of a head: head by head, or token by token."""
    return (b * length + n) * num_heads + h if TOKENS else line + n


@triton.jit
def _head(tensor, b, h, stride_b, stride_h, TMA: tl.constexpr):
    """Where a head begins; the copy engine finds it by itself."""
    return tensor if TMA else tensor + b * stride_b + h * stride_h


@triton.jit
def _block(
    base, b, h, stride_b, stride, start, width, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """ROWS rows of features from start on, by the copy engine or by pointers."""
    if TMA:
        batch = tl.where(stride_b == 0, 0, b).to(tl.int32)
        out = base.load([batch, h.to(tl.int32), start, 0]).reshape(ROWS, WIDTH)
    else:
        out = _rows(base, stride, start + tl.arange(0, ROWS), width, WIDTH, limit, CHECK)
    return out


@triton.constexpr_function
def _all_near(filter, clip):
    """Whether nothing is seen beyond a table's reach."""
    near = [clause[1] for clause in filter if 0 <= clause[1] <= clip]
    return len(near) == len(filter)


@triton.constexpr_function
def _strict(filter, clip):
    """Whether all that is seen lies within a table's reach, and not at its end."""
    return _all_near(filter, clip - 1)


@triton.constexpr_function
def _ends_early(filter):
    """Whether the last key that a query sees may be far from it."""
    return any(clause[7] or clause[9] for clause in filter)


@triton.jit
def _band_start(n, place, num_keys, width, CLIP: tl.constexpr):
    """The key that a band begins with, for all queries of a granule, below the reach of each.

    A band holds the table's numbers for the pairs (i, j) within reach, j along a line: so blocks of
    pairs are blocks in memory, from multiples of 16 on.
    """
    start = tl.maximum(n // GRANULE * GRANULE + place - CLIP - (GRANULE - 1), 0) // 16 * 16
    return tl.minimum(start, (num_keys + 15) // 16 * 16 - width)


@triton.jit
def _band_block(
    band, tiles, b, h, stb, n, first_query, column, num_queries, width,
    BM: tl.constexpr, BN: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """A block of a band, [queries, keys], from a column on; beyond the band it is anything."""
    if TILED:
        batch = tl.where(stb == 0, 0, b).to(tl.int32)
        out = tiles.load([batch, h.to(tl.int32), first_query, column]).reshape(BM, BN)
    else:
        c = column + tl.arange(0, BN)[None, :]
        at = band + n[:, None].to(tl.int64) * width + c
        out = tl.load(at, mask=(n < num_queries)[:, None] & (c < width), other=0.0)
    return out


@triton.jit
def _band_at(band, n, j, num_queries, width, start):
    """The same pair by pair; beyond the band it goes on as it ends."""
    c = tl.minimum(tl.maximum(j - start, 0), width - 1)
    at = band + n.to(tl.int64) * width + c
    return tl.load(at, mask=n < num_queries, other=0.0)


@triton.jit
def _held(x, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product left it: in registers, as the first operand of all products of a loop.

    Otherwise each would read it from shared memory again, which is as busy as the products are.
    """
    if PRECISION != "ieee":
        e = tl.arange(0, WIDTH)
        x = tl.dot(x, (e[:, None] == e[None, :]).to(x.dtype)).to(x.dtype)
    return x


@triton.jit
def _kept(seed, bh, n, j, num_queries, num_keys, dropout):
    """Which weights dropout keeps: the same in forward and backward."""
    offset = (bh.to(tl.int64) * num_queries + n.to(tl.int64)) * num_keys + j.to(tl.int64)
    return tl.rand(seed, offset) >= dropout


@triton.constexpr_function
def _empty_span(span, within, beyond, filter, clip):
    """Whether a span has nothing: the one within reach without a table, or the one beyond it."""
    return span == within if clip < 0 else span == beyond and _strict(filter, clip)


@triton.constexpr_function
def _of_keys(span, filter, clip, sided):
    """How a span of keys of a block of queries reads the table; not all lie in its band.

    In turn: masked, beyond the table's reach, within it, masked.
    """
    if clip < 0:
        return NONE.value
    if span == 1:
        return FAR.value
    near = span == 2 or _all_near(filter, clip) or (span == 3 and not _ends_early(filter))
    return BLOCKS.value if near and sided else PAIRS.value


@triton.constexpr_function
def _of_queries(span, filter, clip, sided, whole):
    """The same for queries of a block of keys; `whole`: not all are masked.

    In turn: masked, within the table's reach, beyond it, masked.
    """
    if clip < 0:
        return NONE.value
    if span == 2:
        return FAR.value
    first = span == 0 and whole and not any(clause[9] for clause in filter)
    near = span == 1 or _all_near(filter, clip) or first
    return BLOCKS.value if near and sided else PAIRS.value


@triton.constexpr_function
def _form(form, bias):
    """A plain dot product that needs its table by distance is plain no more."""
    return 0 if form == 1 and bias >= 2 else form


@triton.jit
def _power(x, DEGREE: tl.constexpr):
    out = x
    for _ in tl.static_range(DEGREE - 1):
        out = out * x
    return out


@triton.jit
def _columns(x, e, dtype: tl.constexpr, FOURTH: tl.constexpr):
    """Numbers of rows as three columns of half precision that add up to them, and what comes fourth.

    e: 0 to COLUMNS - 1, in a row.
    """
    high = x.to(dtype).to(tl.float32)
    middle = (x - high).to(dtype).to(tl.float32)
    low = x - high - middle
    rest = tl.where(e == 2, low[:, None], tl.where(e == 3, FOURTH, 0.0))
    rest = tl.where(e == 1, middle[:, None], rest)
    return tl.where(e == 0, high[:, None], rest).to(dtype)


@triton.jit
def _no_tickets(COUNTERS, bh):
    """None has been drawn in the pass over keys that begins with this head, nor in a second one."""
    first = tl.program_id(0) == 0
    tl.store(COUNTERS + bh, 0, mask=first)
    tl.store(COUNTERS + bh + 1, 0, mask=first)


@triton.jit
def _finite(x):
    """x without what is not finite: 0 times NaN is NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _numbers(col, start, num_keys, BN: tl.constexpr):
    """The numbers of BN keys from start on."""
    j = start + tl.arange(0, BN)
    return tl.load(col + j, mask=j < num_keys, other=0.0)


@triton.jit
def _numbers_of(col, start, num_keys, BN: tl.constexpr, HAS_COL: tl.constexpr):
    """The same, or, of EACH, a row of them for every row of `col`."""
    if HAS_COL == EACH:
        j = (start + tl.arange(0, BN))[None, :]
        out = tl.load(col + j, mask=j < num_keys, other=0.0)
    else:
        out = _numbers(col, start, num_keys, BN)
    return out


@triton.jit
def _below(x, HAS_COL: tl.constexpr):
    """Numbers per key beside rows of queries."""
    return x if HAS_COL == EACH else x[None, :]


@triton.jit
def _column(base, h, of, group, stride, HAS_COL: tl.constexpr):
    """Where the numbers per key of head h begin, or, of EACH, those of heads `of`, as a column."""
    return base + (of // group * stride)[:, None] if HAS_COL == EACH else base + h // group * stride


@triton.jit
def _ones(BM: tl.constexpr, dtype: tl.constexpr, MODE: tl.constexpr):
    """What columns are multiplied by to be added up."""
    out = tl.full((BM, COLUMNS), 1.0, dtype)
    if MODE == 2:
        three = tl.arange(0, COLUMNS)[None, :] < 3
        out = tl.where(three, out, tl.zeros_like(out))
    return out


@triton.constexpr_function
def _bits_beyond(dtype):
    """Bits of float32 that lie beyond those of half precision, and eight more."""
    return {tl.float16: 5}.get(dtype, 8)


@triton.jit
def _taken(out, DTYPE: tl.constexpr):
    """What rounding to half precision takes: eight more bits, to be added to those of the rounded number."""
    SHIFT: tl.constexpr = _bits_beyond(DTYPE)
    bits = out.to(tl.int32, bitcast=True)
    if SHIFT < 8:
        near = out.to(DTYPE).to(tl.float32)
        near = near.to(tl.int32, bitcast=True)
    else:
        # Rounded by hand: numbers that are converted one by one, not two by two, take longer.
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    taken = tl.minimum(bits - near + (1 << (SHIFT - 1)), (128 << SHIFT) - 1) >> SHIFT
    # What ends float16 is far from it, and what is too small for all of its bits may be.
    return tl.maximum(taken, -128) if SHIFT < 8 else taken


@triton.jit
def _given_back(rounded, taken, DTYPE: tl.constexpr):
    """What `_taken` was called for, but for its last bits; what is not finite stays so."""
    SHIFT: tl.constexpr = _bits_beyond(DTYPE)
    near = rounded.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True) + (taken.to(tl.int32) << SHIFT)
    return tl.where(tl.abs(near) < float("inf"), bits.to(tl.float32, bitcast=True), near)


@triton.jit
def _store_exactly(OUT, LOW, offset, out, mask, HAS_LOW: tl.constexpr):
    """Store an output, and what rounding takes from it: the backward needs <dO, O> better."""
    tl.store(OUT + offset, out.to(OUT.dtype.element_ty), mask=mask)
    if HAS_LOW:
        taken = _taken(out, OUT.dtype.element_ty)
        tl.store(LOW + offset, taken.to(tl.int8), mask=mask)


@triton.jit
def _spared(values, t):
    """Values without those that are not finite, whose scores say so instead.

    Such a value must not meet a weight of zero: 0 times NaN is NaN.
    """
    finite = tl.abs(values) < float("inf")
    bad = tl.max(tl.where(finite, 0, 1), 1) > 0
    return tl.where(finite, values, 0.0), tl.where(bad[None, :], float("nan"), t)


@triton.jit
def _cut(
    start, stop, sure_start, sure_stop, part, parts, num_keys,
    BN: tl.constexpr, SPLIT: tl.constexpr, SIMPLE: tl.constexpr,
):  # fmt: skip
    """What `_key_range` gave, in blocks of keys, of one part of them.

    [start, sure_start) and [sure_stop, stop) need a mask; what lies between does not.
    """
    start = tl.maximum(start, 0) // BN * BN
    if SPLIT:
        blocks = (num_keys + BN - 1) // BN
        start = tl.maximum(start, part * blocks // parts * BN)
        stop = tl.minimum(stop, (part + 1) * blocks // parts * BN)
    stop = tl.maximum(stop, start)
    if SIMPLE:
        sure_start = tl.minimum(tl.maximum((sure_start + BN - 1) // BN * BN, start), stop)
        sure_stop = tl.maximum(tl.minimum(sure_stop, stop) // BN * BN, sure_start)
    else:
        sure_start = stop
        sure_stop = stop
    return start, stop, sure_start, sure_stop


@triton.jit
def _finished(acc, mass, peak):
    """(out, log_mass) of sums; the peak is a logarithm to the base 2."""
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    lse = tl.where(empty, float("-inf"), LN2 * (tl.where(empty, 0.0, peak) + tl.log2(safe)))
    return acc / safe[:, None], lse


@triton.jit
def _forward_span(
    acc, mass, peak, start, stop, sure_start, sure_stop, q0, q1, scale0, scale1, row0, row1, far, k0, k1, v, col0, col1,
    band, tiles, begin, lengths, ids, i, n, b, bh, h, h0, h1, hv, first_query, first, num_queries,
    num_keys, seed, dropout, skb0, skt0, skb1, skt1, svb, svt, stride_ids, stb, width, e0, e1, dv,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, MODE0: tl.constexpr, MODE1: tl.constexpr,
    HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr, HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr,
    BIAS: tl.constexpr, FILTER: tl.constexpr, FORM: tl.constexpr, SAME: tl.constexpr,
    MASK: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, INSIDE0: tl.constexpr, INSIDE1: tl.constexpr, SUMMED: tl.constexpr,
    SPREAD: tl.constexpr, TMA: tl.constexpr, TILED: tl.constexpr, EDGES: tl.constexpr,
    STILL: tl.constexpr,
):  # fmt: skip
    """The keys from start to stop: the running peak, mass and sums of values.

    EDGES: a mask is needed before sure_start and from sure_stop
    on, and values are taken to be finite. STILL: the peak is one that no key exceeds. SUMMED: the second
    slot is another function of the same products, and weights add up.
    """
    CHECK: tl.constexpr = MASK or not EVEN
    # The numbers per key are read one block ahead: nothing else hides the wait for them.
    c0, c1 = far, far
    if HAS_COL0 and not SPREAD:
        c0 = _numbers_of(col0, start, num_keys, BN, HAS_COL0)
    if HAS_COL1:
        c1 = _numbers_of(col1, start, num_keys, BN, HAS_COL1)
    for first_key in tl.range(start, stop, BN):
        j = first_key + tl.arange(0, BN)
        k = _block(k0, b, h0, skb0, skt0, first_key, e0, num_keys, BN, E0, CHECK, TMA)
        t = tl.dot(q0, tl.trans(k), input_precision=PRECISION)
        if SPREAD:
            c = _block(k1, b, h1, skb1, skt1, first_key, 16, num_keys, BN, COLUMNS, CHECK, TMA)
            t = tl.dot(q1, tl.trans(c), t, input_precision=PRECISION)
        if E1 > 0:
            other = _block(k1, b, h1, skb1, skt1, first_key, e1, num_keys, BN, E1, CHECK, TMA)
            if SAME:
                t = tl.dot(q1, tl.trans(other), t, input_precision=PRECISION)
            else:
                t1 = tl.dot(q1, tl.trans(other), input_precision=PRECISION)
        if SUMMED:
            t1 = t
        if INSIDE0 > 0 or INSIDE1 > 0:
            wide = k.to(tl.float32)
            squares = tl.sum(wide * wide, 1)[None, :]
            t = _by_keys(t, squares, INSIDE0)
            if SUMMED:
                t1 = _by_keys(t1, squares, INSIDE1)
        if HAS_COL0 and not SPREAD:
            t += _below(c0, HAS_COL0)
            c0 = _numbers_of(col0, first_key + BN, num_keys, BN, HAS_COL0)
        values = _block(v, b, hv, svb, svt, first_key, dv, num_keys, BN, V, CHECK, TMA)
        seen = j[None, :] >= 0
        if MASK:
            seen = _visible(
                i[:, None], j[None, :], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
            values, t = _spared(values, t)
        if FORM == PLAIN:
            # One dot product: the positive scale waits until the exponent, one operation.
            if MASK:
                t = tl.where(seen, t, float("-inf"))
            if EDGES:
                if (first_key < sure_start) | (first_key >= sure_stop):
                    shown = _visible(
                        i[:, None], j[None, :], b, first, lengths, ids, stride_ids, num_keys, FILTER
                    )
                    t = tl.where(shown, t, float("-inf"))
            rate = scale0 * LOG2E
            if STILL:
                higher = peak
                p = tl.exp2(t * _down(rate, MODE0) - peak[:, None])
                shrink = peak
            else:
                higher = tl.maximum(peak, tl.max(t, 1) * rate + far)
                base = tl.where(higher == float("-inf"), 0.0, higher)
                p = tl.exp2(t * _down(rate, MODE0) - (base - far)[:, None])
                shrink = tl.exp2(peak - base)
        elif FORM == POLY:
            # The weight is s^p itself: no logarithm, and the row's scale is a power too.
            if MASK:
                t = tl.where(seen, t, 0.0)
            higher = tl.maximum(peak, tl.max(tl.abs(t), 1))
            inverse = tl.where(higher > 0.0, 1.0 / tl.where(higher > 0.0, higher, 1.0), 0.0)
            p = _power(t * inverse[:, None], PARAM0)
            shrink = _power(peak * inverse, PARAM0)
        else:
            s = _scaled(t, _down(scale0, MODE0), row0[:, None], LINK0, HAS_ROW0)
            e, a, _ = _link(s, LINK0, PARAM0, FORM == FLAT)
            if SUMMED or (E1 > 0 and not SAME):
                if HAS_COL1:
                    t1 += _below(c1, HAS_COL1)
                    c1 = _numbers_of(col1, first_key + BN, num_keys, BN, HAS_COL1)
                s1 = _scaled(t1, _down(scale1, MODE1), row1[:, None], LINK1, HAS_ROW1)
                exponent1, a1, _ = _link(s1, LINK1, PARAM1, False)
                if not SUMMED:
                    e += exponent1
                    a = a * a1
            if BIAS == BLOCKS:
                e += _band_block(
                    band, tiles, b, h, stb, n, first_query, first_key - begin, num_queries, width,
                    BM, BN, TILED,
                )  # fmt: skip
            elif BIAS == PAIRS:
                e += _band_at(band, n[:, None], j[None, :], num_queries, width, begin)
            if FORM == FLAT:
                # Weights from 0 to 1 as they are: they neither overflow nor all vanish.
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
        if FORM == FLAT or STILL:
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


@triton.jit(do_not_specialize=["num_heads", "first", "seed"])
def forward(
    Q0, K0, Q1, K1, V_, S0, S1, R0, R1, C0, C1, BAND, TILES, LENGTHS, IDS, OUT, LOW, LSE,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    E0: tl.constexpr, E1: tl.constexpr, V: tl.constexpr, LINK0: tl.constexpr, LINK1: tl.constexpr,
    PARAM0: tl.constexpr, PARAM1: tl.constexpr, MODE0: tl.constexpr, MODE1: tl.constexpr,
    LOG0: tl.constexpr, LOG1: tl.constexpr,
    HAS_COL0: tl.constexpr, HAS_COL1: tl.constexpr, HAS_ROW0: tl.constexpr, HAS_ROW1: tl.constexpr,
    CLIP: tl.constexpr, SIDED: tl.constexpr, FILTER: tl.constexpr, SIMPLE: tl.constexpr, FORM: tl.constexpr,
    SAME: tl.constexpr, EVEN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_LOW: tl.constexpr, SPLIT: tl.constexpr,
    INSIDE0: tl.constexpr, INSIDE1: tl.constexpr, SUMMED: tl.constexpr, SPREAD: tl.constexpr, TMA: tl.constexpr, TILED: tl.constexpr,
    TOKENS: tl.constexpr, HELD: tl.constexpr,
    FAST: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """out and log_mass of one block of queries; with SPLIT, over one part of the keys.

    GROUPED: queries, of one block, are heads that share their keys, all at the place of the last.

    FAST: values are taken to be finite (1), and weights to be
    those of a distance, of which a row's do not all vanish (2); a block where not is done again.
    """
    bh = tl.program_id(1)
    b, h = (bh // num_heads).to(tl.int64), (bh % num_heads).to(tl.int64)
    # Late blocks of a causal filter have the most to do: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    n = block * BM + tl.arange(0, BM)
    place = num_keys - num_queries
    i = n + place
    if GROUPED:
        place = num_keys - 1
        i = n * 0 + place
    inside = n < num_queries
    line = bh.to(tl.int64) * num_queries
    q0 = _rows(Q0 + b * sqb0 + h * sqh0, sqt0, n, e0, E0, num_queries, True)
    none = tl.zeros((BM,), tl.float32)
    half = none
    if FAST == 2:
        half = 0.5 * tl.sum(q0.to(tl.float32) * q0.to(tl.float32), 1)
    # Whose scales the queries have: those of one head, or of all in a group.
    of = h * num_queries + tl.minimum(n, num_queries - 1) if GROUPED else h
    scale0 = _scale(S0, number0, ss0, of, line, n, inside, MODE0, LOG0)
    q1, scale1, row1 = q0, scale0, none
    if E1 > 0 or SUMMED:
        scale1 = _scale(S1, number1, ss1, of, line, n, inside, MODE1, LOG1)
    if INSIDE0 == BY_LENGTHS or INSIDE1 == BY_LENGTHS:
        inverse = _inverse_length(tl.sum(q0.to(tl.float32) * q0.to(tl.float32), 1))
        if INSIDE0 == BY_LENGTHS:
            scale0 = scale0 * inverse
        if INSIDE1 == BY_LENGTHS:
            scale1 = scale1 * inverse
    if HELD & 1:
        q0 = _held(q0, E0, PRECISION)
    row0 = tl.load(R0 + line + n, mask=inside, other=0.0) if HAS_ROW0 else none
    if E1 > 0:
        q1 = _rows(Q1 + b * sqb1 + h * sqh1, sqt1, n, e1, E1, num_queries, True)
        if HELD & 4:
            q1 = _held(q1, E1, PRECISION)
    if E1 > 0 or SUMMED:
        row1 = tl.load(R1 + line + n, mask=inside, other=0.0) if HAS_ROW1 else none
    if SPREAD:
        q1 = _ones(BM, q0.dtype, MODE0)
    h0, h1, hv = h // group0, h // group1, h // group_v
    k0 = _head(K0, b, h0, skb0, skh0, TMA)
    k1 = _head(K1, b, h1, skb1, skh1, TMA and (E1 > 0 or SPREAD))
    v = _head(V_, b, hv, svb, svh, TMA)
    col0 = _column(C0 + b * scb0, h, of, gc0, sch0, HAS_COL0)
    col1 = _column(C1 + b * scb1, h, of, gc1, sch1, HAS_COL1)
    band, begin = BAND, 0
    far = none
    if CLIP >= 0:
        band = BAND + b * stb + h * sth
        begin = _band_start(block * BM, place, num_keys, width, CLIP)
        # Beyond the reach all keys have the number that a band begins with.
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
    if FAST > 0:
        # All keys in one loop, and no peak to look for where it is known; what that cannot do is rare.
        if FAST == 2:
            # Of a key at no distance.
            peak = half * (scale0 * LOG2E)
        acc, mass, peak = _forward_span(
            acc, mass, peak, start, stop, sure_start, sure_stop, q0, q1, scale0, scale1, row0, row1,
            none, k0, k1, v, col0, col1, band, TILES, begin, LENGTHS, IDS,
            i, n, b, bh, h, h0, h1, hv, block * BM, first, num_queries, num_keys, seed, dropout,
            skb0, skt0, skb1, skt1, svb, svt, stride_ids, stb, width, e0, e1, dv, E0, E1, V, LINK0,
            LINK1, PARAM0, PARAM1, MODE0, MODE1, HAS_COL0, HAS_COL1, HAS_ROW0, HAS_ROW1,
            NONE, FILTER, FORM, SAME, False, EVEN,
            DROPOUT, PRECISION, BM, BN, INSIDE0, INSIDE1, SUMMED, SPREAD, TMA, TILED, True, FAST == 2,
        )  # fmt: skip
        fine = tl.min((tl.abs(acc) < float("inf")).to(tl.int32), 1) > 0
        if FAST == 2:
            fine = fine & (mass > 1e-30)
        whole = tl.min((fine | ~inside).to(tl.int32), 0) == 0
        if whole:
            acc = tl.zeros((BM, V), tl.float32)
            mass = tl.zeros((BM,), tl.float32)
            peak = tl.full((BM,), float("-inf"), tl.float32)
    if FAST == 0 or whole:
        for span in tl.static_range(4):
            # In turn: masked, beyond the table's reach, within it, masked.
            near = sure_stop
            if CLIP >= 0:
                near = tl.maximum(tl.minimum((low - CLIP + 1) // BN * BN, sure_stop), sure_start)
            if span == 0:
                first_key, last_key = start, sure_start
            elif span == 1:
                first_key, last_key = sure_start, near
            elif span == 2:
                first_key, last_key = near, sure_stop
            else:
                first_key, last_key = sure_stop, stop
            if (SIMPLE or span == 0) and not _empty_span(span, 2, 1, FILTER, CLIP):
                acc, mass, peak = _forward_span(
                    acc, mass, peak, first_key, last_key, first_key, last_key, q0, q1, scale0, scale1, row0, row1,
                    far if span == 1 else none, k0, k1, v, col0, col1, band, TILES, begin, LENGTHS, IDS,
                    i, n, b, bh, h, h0, h1, hv, block * BM, first, num_queries, num_keys, seed, dropout,
                    skb0, skt0, skb1, skt1, svb, svt, stride_ids, stb, width, e0, e1, dv, E0, E1, V, LINK0,
                    LINK1, PARAM0, PARAM1, _mode(MODE0, GROUPED, INSIDE0), _mode(MODE1, GROUPED, INSIDE1), HAS_COL0, HAS_COL1, HAS_ROW0, HAS_ROW1,
                    _of_keys(span, FILTER, CLIP, SIDED), FILTER,
                    _form(FORM, _of_keys(span, FILTER, CLIP, SIDED)), SAME, span == 0 or span == 3, EVEN,
                    DROPOUT, PRECISION, BM, BN, INSIDE0, INSIDE1, SUMMED, SPREAD, TMA, TILED, False, False,
                )  # fmt: skip
    empty = mass == 0.0
    if FORM == POLY:
        peak = PARAM0 * tl.log2(tl.where(empty, 1.0, peak * tl.abs(scale0)))
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
    """One out and log_mass of a row from those of every part of the keys, of which there is room for PARTS."""
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
    # Of a part that is not a number, so is its share, and all that comes of it.
    share = tl.exp(log - base)
    mass = tl.sum(share, 0)
    empty = mass == 0.0
    safe = tl.where(empty, 1.0, mass)
    out = tl.sum(out * share[:, None], 0) / safe
    tl.store(OUT + n * dv + e, out.to(OUT.dtype.element_ty), mask=inside)
    tl.store(LSE + n, tl.where(empty, float("-inf"), base + tl.log(safe)))


@triton.jit
def _exactly(OUT, LOW, offset, mask, HAS_LOW: tl.constexpr):
    """An output with what rounding took from it."""
    out = tl.load(OUT + offset, mask=mask, other=0.0)
    if HAS_LOW:
        taken = tl.load(LOW + offset, mask=mask, other=0)
        return _given_back(out, taken, OUT.dtype.element_ty)
    return out.to(tl.float32)


@triton.jit
def _delta(grad, out, GRAD_LSE, LSE, at, inside, HAS_LSE: tl.constexpr):
    """<dO, O> - dlog_mass, and log_mass to the base 2."""
    delta = tl.sum(out * grad, 1)
    if HAS_LSE:
        delta -= tl.load(GRAD_LSE + at, mask=inside, other=0.0)
    lse = tl.load(LSE + at, mask=inside, other=float("-inf"))
    # Infinite where a row sees nothing: its weights are then zero.
    return delta, tl.where(lse == float("-inf"), float("inf"), LOG2E * lse)


@triton.jit
def merge_far(
    OUT, LOW, LSE, FAR, FAR_LOW, FAR_LSE, BAND, num_heads, length, dv, stb, sth, stt,
    V: tl.constexpr, BM: tl.constexpr, HAS_LOW: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """What the keys beyond a table's reach gave joins the rest; the table's end shifts their mass."""
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
