"""How the fused kernels read a table, from its band.

A band holds the table's numbers for the pairs within reach, to the base 2. The keys of a line run as
memory does, so that a block of pairs is a block of memory.
"""

import triton
import triton.language as tl

from .. import codes

GRANULE = tl.constexpr(codes.GRANULE)
# How a span of keys reads a table: not at all, only its end, by blocks of its band, or pair by pair.
NONE, FAR, BLOCKS, PAIRS = map(tl.constexpr, range(4))


@triton.jit
def _band_start(n, place, num_keys, width, CLIP: tl.constexpr):
    """The first key of a band: the same for all queries of a granule, and before the reach of each.

    It is a multiple of 16, so that blocks of pairs are aligned in memory.
    """
    start = tl.maximum(n // GRANULE * GRANULE + place - CLIP - (GRANULE - 1), 0) // 16 * 16
    return tl.minimum(start, (num_keys + 15) // 16 * 16 - width)


@triton.jit
def _band_block(
    band, tiles, b, h, stb, n, first_query, column, num_queries, width,
    BM: tl.constexpr, BN: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """A block of a band, [queries, keys], from a column on. Outside of the band it has any values."""
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
    """The same pair by pair. Pairs outside of the band have the numbers at its ends."""
    c = tl.minimum(tl.maximum(j - start, 0), width - 1)
    at = band + n.to(tl.int64) * width + c
    return tl.load(at, mask=n < num_queries, other=0.0)


@triton.constexpr_function
def _all_near(filter, clip):
    """Whether no visible key is beyond a table's reach."""
    near = [clause[1] for clause in filter if 0 <= clause[1] <= clip]
    return len(near) == len(filter)


@triton.constexpr_function
def _strict(filter, clip):
    """Whether all visible keys are within a table's reach, and none is at its end."""
    return _all_near(filter, clip - 1)


@triton.constexpr_function
def _ends_early(filter):
    """Whether the last visible key may be far from its query."""
    return any(clause[7] or clause[9] for clause in filter)


@triton.constexpr_function
def _empty_span(span, within, beyond, filter, clip):
    """Whether a span is empty: the one within reach if there is no table, or the one beyond reach."""
    return span == within if clip < 0 else span == beyond and _strict(filter, clip)


@triton.constexpr_function
def _of_keys(span, filter, clip, sided):
    """How a span of keys reads the table, for a block of queries. Its pairs may lie outside of the band.

    The spans: masked, beyond the table's reach, within it, masked.
    """
    if clip < 0:
        return NONE.value
    if span == 1:
        return FAR.value
    near = span == 2 or _all_near(filter, clip) or (span == 3 and not _ends_early(filter))
    return BLOCKS.value if near and sided else PAIRS.value


@triton.constexpr_function
def _of_queries(span, filter, clip, sided, whole):
    """The same for a span of queries and a block of keys. `whole`: there are unmasked spans.

    The spans: masked, within the table's reach, beyond it, masked.
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
    """The way to form weights in a span: a table that is added makes PLAIN general."""
    return 0 if form == 1 and bias >= 2 else form
