"""Gradients of queries from pairs that the pass over keys has just stored, by the same programs.

Programs take tickets for keys, or for 256 queries at a time. Some heads at a time go from their ends on, so that what
their queries see is stored at about one time, and read again while it is in the cache; once read, it need not reach
memory at all. `triton_hopper` has the pass over keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...kernels.visibility import _query_blocks
from .dq_from_scores import BEYOND
from .primitives import BLOCK, NOTE, OWN, _landed, _range, _skip, _wait_for, barrier, load

# Of each head, so many tickets for keys come before the first for queries, and as many as a window has.
AHEAD = gl.constexpr(3)


@gluon.jit
def _sorted(ticket, tiles, together, FILTER: gl.constexpr):
    """Whether a ticket is for queries, and of how many such, or of how many for keys, it is.

    Once all keys that the last queries see are at work, one in three is for queries: there are half as many. It
    comes after all for keys that it waits for, so that these are drawn, and nobody waits for ever.
    """
    REACH: gl.constexpr = (FILTER[0][1] + 2 * OWN - 1) // (2 * OWN)
    ahead = gl.minimum((REACH + AHEAD) * together, tiles)
    rest, left = ticket - ahead, tiles - ahead
    late = rest - left // 2 * 3
    odd = left % 2
    second = (late >= odd) | ((late < 0) & (rest >= 0) & (rest % 3 == 2))
    of_queries = gl.where(late < 0, rest // 3, left // 2 + late - odd)
    of_keys = gl.where(rest < 0, ticket, ahead + rest // 3 * 2 + rest % 3)
    return second, gl.where(second, of_queries, of_keys)


@gluon.jit
def _say_stored(stored):
    """Says that a group is done with four blocks of queries: what it has stored for them lies in memory.

    That is the second cache, where the copy engine stores, and reads again, and where this counts. So it does not
    have to release, which would wait for all else that this thread has stored, too.
    """
    _landed()
    barrier()
    gl.atomic_add(stored, 1, sem="relaxed", scope="gpu")


@gluon.jit
def _wait_stored(stored, count):
    """Waits until so many blocks of keys are done with four blocks of queries, and the copy engine may read pairs."""
    _wait_for(stored + gl.arange(0, 128, NOTE) * 0, count)
    gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)
    barrier()
    gl.inline_asm_elementwise("fence.proxy.async; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def _copy_pairs(
    done, PAIRS, K0, LENGTHS, q0s, found, panels, full, empty, bk, hk, part, b, low, start, steps, num_queries, num_keys,
    first, E0: gl.constexpr, FILTER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Blocks of keys, with the pairs of four blocks of queries that begin at `low`."""
    for step in range(steps):
        s = (done + step) % STAGES
        key = start + step * BLOCK
        origin, _ = _query_blocks(
            key // (2 * OWN) * (2 * OWN), b, first, LENGTHS, num_queries, num_keys, 2 * OWN, BLOCK, FILTER
        )  # fmt: skip
        begin, end = _query_blocks(
            key, b, first, LENGTHS, num_queries, num_keys, BLOCK, BLOCK, FILTER
        )
        mbarrier.wait(empty.index(s), (((done + step) // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), 2 * BLOCK * (E0 + 4 * BLOCK))
        load(K0, [bk, hk, key, 0], full.index(s), q0s.index(s))
        for n in gl.static_range(4):
            query = low + n * BLOCK
            # What is hidden is not stored: from beyond the end zeros come, and nothing is read.
            row = gl.where((query >= begin) & (query < end), key, BEYOND)
            at = [0, part, row, query - origin]
            if n % 2 == 0:
                load(PAIRS, at, full.index(s), found.index(2 * s + n // 2))
            else:
                load(PAIRS, at, full.index(s), panels.index(4 * (n // 2) + s))
        # There is nothing beside them.
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def _forget(
    LEFT, across, key, place, part, b, first, LENGTHS, num_queries, num_keys, FIRST: gl.constexpr, SECOND: gl.constexpr,
    FILTER: gl.constexpr,
):  # fmt: skip
    """Pairs of 64 keys and of one block of queries, or of two, are not asked for again, and need not reach memory."""
    origin, _ = _query_blocks(
        key // (2 * OWN) * (2 * OWN), b, first, LENGTHS, num_queries, num_keys, 2 * OWN, BLOCK, FILTER
    )  # fmt: skip
    n = gl.arange(0, 2 * BLOCK, NOTE)
    rows = part * ((num_keys + 2 * OWN - 1) // (2 * OWN) * (2 * OWN)) + key + n % BLOCK
    at = LEFT + (rows.to(gl.int64) * across + (place - origin + n // BLOCK * BLOCK))
    use = n >= 0
    if not FIRST:
        use = n >= BLOCK
    elif not SECOND:
        use = n < BLOCK
    code: gl.constexpr = (
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p discard.global.L2 [$1], 128; mov.b32 $0, 0; }"
    )
    gl.inline_asm_elementwise(code, "=r,l,r", [at, use.to(gl.int32)], gl.int32, False, 1)


@gluon.jit
def _gathered(
    begin, end, acc0, acc1, inputs, FIRST: gl.constexpr, SECOND: gl.constexpr, STAGES: gl.constexpr,
    FILTER: gl.constexpr,
):  # fmt: skip
    """Sums of one block of queries, or of both, with those of blocks of keys."""
    (
        done, own, q0s, found, panels, full, empty, LEFT, across, start, place, part, b, first, LENGTHS, num_queries, num_keys,
    ) = inputs  # fmt: skip
    for step in range(begin, end):
        s = (done + step) % STAGES
        mbarrier.wait(full.index(s), ((done + step) // STAGES) & 1)
        if FIRST:
            pairs = found.index(2 * s + own).permute((1, 0))
            acc0 = warpgroup_mma(pairs, q0s.index(s), acc0, is_async=True)
        if SECOND:
            more = panels.index(4 * own + s).permute((1, 0))
            acc1 = warpgroup_mma(more, q0s.index(s), acc1, is_async=True)
        _forget(
            LEFT, across, start + step * BLOCK, place, part, b, first, LENGTHS, num_queries, num_keys, FIRST, SECOND,
            FILTER,
        )  # fmt: skip
        acc0, acc1 = warpgroup_mma_wait(0, (acc0, acc1))
        mbarrier.arrive(empty.index(s), count=1)
    return acc0, acc1


@gluon.jit
def _gather(
    own, done, k0, v, found, panels, q0s, full, empty, head0, LEFT, across, part, low, b, start, steps, first, LENGTHS,
    num_queries, num_keys, E0: gl.constexpr, FILTER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Gradients of two blocks of queries, of stored pairs; they lie where keys and values would otherwise."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E0, 16])
    place = low + 2 * own * BLOCK
    key0, count0, _, _ = _range(place, BLOCK, b, first, LENGTHS, num_queries, num_keys, FILTER)
    key1, count1, _, _ = _range(
        place + BLOCK, BLOCK, b, first, LENGTHS, num_queries, num_keys, FILTER
    )
    begin0 = gl.minimum(gl.maximum(key0 - start, 0) // BLOCK, steps)
    end0 = gl.minimum(begin0 + count0, steps)
    begin1 = gl.minimum(gl.maximum((key1 - start) // BLOCK, begin0), end0)
    begin1 = gl.where(count1 > 0, begin1, end0)
    end1 = gl.where(count1 > 0, gl.minimum((key1 - start) // BLOCK + count1, steps), end0)
    end1 = gl.maximum(end1, end0)
    _skip(0, begin0, done, full, empty, STAGES)
    inputs = (
        done, own, q0s, found, panels, full, empty, LEFT, across, start, place, part, b, first, LENGTHS, num_queries, num_keys,
    )  # fmt: skip
    acc0 = gl.zeros([BLOCK, E0], gl.float32, SUMS)
    acc1 = gl.zeros([BLOCK, E0], gl.float32, SUMS)
    acc0, acc1 = _gathered(begin0, begin1, acc0, acc1, inputs, True, False, STAGES, FILTER)
    acc0, acc1 = _gathered(begin1, end0, acc0, acc1, inputs, True, True, STAGES, FILTER)
    acc0, acc1 = _gathered(end0, end1, acc0, acc1, inputs, False, True, STAGES, FILTER)
    _skip(end1, steps, done, full, empty, STAGES)
    k0.store((acc0 * head0).to(k0.dtype))
    v.store((acc1 * head0).to(v.dtype))
