"""The pass over keys for Hopper, where warps have parts: one group copies, two multiply.

The same sums as `triton_backward.backward_keys`, for dot products without links and tables. Each of the
two groups owns 64 keys and goes at its own pace, so that one forms weights while the other multiplies;
the third keeps the queries of the next blocks coming. Where registers are left for it, a fourth takes
gradients of pairs from both and adds what these keys give to gradients of queries; then no pass over
queries is needed. Triton's compiler does not share out work like that, so this is written in Gluon, the
language beneath it.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...kernels.gradients import _counted
from ...kernels.primitives import COLUMNS, LOG2E, _columns, _finite
from ...kernels.scores import _grown
from ...kernels.visibility import _first_place, _query_blocks, _query_range, _stretch, _visible
from .dq_fixed_point import _blocks, _bound, _fixed, _reference_within
from .dq_in_pass import _copy_pairs, _gather, _say_stored, _sorted, _wait_stored
from .primitives import (
    BLOCK,
    NOTE,
    OWN,
    REGISTERS,
    _along,
    _batch,
    _landed,
    _ones,
    _range,
    _skip,
    _wait_for,
    _within,
    barrier,
    load,
    store,
)


@builtin
def add_to(target, at, source, _semantic=None):
    """Adds a block of shared memory to one of memory, by the copy engine."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, target.handle, at, source.handle)


# What a block of queries needs beside features: log_mass, each query's scale, and -delta, where that is no
# column of a product.
MASSES, SCALES, DELTAS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# With a group that sums up gradients of queries: of those that multiply, and its own.
LESS_REGISTERS = gl.constexpr(208)
SUM_REGISTERS = gl.constexpr(72)
# Blocks of pairs on their way to that group, of each that multiplies, and of sums on theirs to memory.
SLOTS = gl.constexpr(3)
LEAVING = gl.constexpr(2)
# A number per key that leaves no weight, and ends neither float32 nor bfloat16.
LOWEST = gl.constexpr(-3e38)
# Blocks of queries whose sums a program begins, and the most of others, begun elsewhere, that see its keys.
MINE = gl.constexpr(2)
WATCHED = gl.constexpr(64)
# Notes on tickets that lie in shared memory: when one is drawn, all groups have read that of three turns before.
TICKETS = gl.constexpr(4)
FLAT = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
# Where a note has numbers of its head: the scale, and the first number per key.
SCALE, REFERENCE = gl.constexpr(7), gl.constexpr(8)
# Where it says that it is for queries.
FOR_QUERIES = gl.constexpr(9)


@gluon.jit
def _wait_begun(begun, count):
    """Waits until sums of so many blocks of queries have begun, WATCHED at most.

    Nothing is read after it that the first level of the cache may hold: the copy engine adds in the second,
    where sums lay before this was said. So it does not have to acquire.
    """
    n = gl.arange(0, WATCHED, gl.BlockedLayout([2], [32], [4], [0]))
    _wait_for(begun + gl.minimum(n, count - 1), 1)


@gluon.jit
def _tile(
    ticket, blocks, parts, last, together, offset, num_heads, num_queries, num_keys, first, LENGTHS,
    FILTER: gl.constexpr, STORE: gl.constexpr, FRESH: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    """Which keys of which head a ticket is for, and the blocks of queries that may see them.

    JOINED: or which queries, and the blocks of keys that they may see.
    """
    second = False
    if JOINED:
        second, ticket = _sorted(ticket, blocks * parts, together, FILTER)
        blocks = gl.where(second, (blocks + 1) // 2, blocks)
        # Some heads together, from their ends on: so pairs of some queries are stored at about one time.
        before = ticket // (together * blocks) * together
        turn, count = ticket - before * blocks, gl.minimum(together, parts - before)
        block, part = blocks - 1 - turn // count, before + turn % count
    else:
        # Head by head, but for the last ones: of those the first blocks come first, which most see.
        rest = ticket - (parts - last) * blocks
        along, head = ticket % blocks, ticket // blocks
        if FRESH:
            # Who begins the sums of queries comes before all that add to them, and some heads take turns, so
            # that nobody has to wait.
            turn = ticket % (together * blocks)
            along = blocks - 1 - turn // together
            head = ticket // (together * blocks) * together + turn % together
        block = gl.where(rest < 0, along, rest // last)
        part = gl.where(rest < 0, head, parts - last + rest % last)
    bh = part + offset
    low = block * (2 * OWN)
    if JOINED:
        low = gl.where(second, 2 * low, low)
    ALIGN: gl.constexpr = STORE * BLOCK if STORE > 0 else BLOCK
    start, stop = _query_blocks(
        low, bh // num_heads, first, LENGTHS, num_queries, num_keys, 2 * OWN, ALIGN, FILTER
    )
    steps = (stop - start) // BLOCK
    if JOINED:
        key, count, _, _ = _range(
            low, 4 * OWN, bh // num_heads, first, LENGTHS, num_queries, num_keys, FILTER
        )
        start, steps = gl.where(second, key, start), gl.where(second, count, steps)
    return low, part, bh // num_heads, bh % num_heads, start, steps, second


@gluon.jit
def _tickets(blocks, parts, JOINED: gl.constexpr):
    """How many tickets there are."""
    return parts * (blocks + ((blocks + 1) // 2 if JOINED else 0))


@gluon.jit
def _tell(
    turn, about, FILTER: gl.constexpr, STORE: gl.constexpr, FRESH: gl.constexpr, MODE0: gl.constexpr,
    SUM0: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    """Draws the ticket for a turn; all groups of this program hear of it, and what it is for."""
    (
        COUNTER, tickets, told, blocks, parts, last, together, offset, num_heads, num_queries, num_keys, first, LENGTHS,
        S0, C0, ss0, scb0, sch0, gc0,
    ) = about  # fmt: skip
    ticket = gl.atomic_add(COUNTER, 1, sem="relaxed", scope="gpu")
    low, part, b, h, start, steps, second = _tile(
        gl.minimum(ticket, _tickets(blocks, parts, JOINED) - 1), blocks, parts, last, together, offset, num_heads,
        num_queries, num_keys, first, LENGTHS, FILTER, STORE, FRESH, JOINED,
    )  # fmt: skip
    n = gl.arange(0, 32, NOTE)
    note = gl.where(n == 0, ticket, gl.where(n == 1, low, gl.where(n == 2, part, b)))
    note = gl.where(n < 4, note, gl.where(n == 4, h, gl.where(n == 5, start, steps)))
    if JOINED:
        note = gl.where(n == FOR_QUERIES, second.to(gl.int32), note)
    # Numbers of the head by their bits.
    if MODE0 == 1:
        scale = gl.load(S0 + h * ss0)
        note = gl.where(n == SCALE, scale.to(gl.int32, bitcast=True), note)
    if SUM0:
        ref = gl.load(C0 + b.to(gl.int64) * scb0 + (h // gc0) * sch0)
        note = gl.where(n == REFERENCE, ref.to(gl.int32, bitcast=True), note)
    tickets.index(turn % TICKETS).store(note)
    barrier()
    mbarrier.arrive(told.index(turn % TICKETS), count=1)
    return ticket, low, b, h, start, steps, second


@gluon.jit
def _hear(turn, tickets, told):
    """The ticket for a turn, and what `_tile` gives for it."""
    mbarrier.wait(told.index(turn % TICKETS), (turn // TICKETS) & 1)
    return _heard(turn, tickets)


@gluon.jit
def _heard(turn, tickets):
    """The same once more, which takes no registers meanwhile."""
    note = tickets.index(turn % TICKETS).load(NOTE)
    ticket, low, part = _said(note, 0), _said(note, 1), _said(note, 2)
    b, h, start, steps = _said(note, 3), _said(note, 4), _said(note, 5), _said(note, 6)
    return ticket, low, part, b, h, start, steps


@gluon.jit
def _is_for_queries(turn, tickets):
    """Whether a ticket is."""
    return _said(tickets.index(turn % TICKETS).load(NOTE), FOR_QUERIES) > 0


@gluon.jit
def _number(turn, tickets, WHICH: gl.constexpr):
    """One of the numbers of a ticket's head."""
    bits = _said(tickets.index(turn % TICKETS).load(NOTE), WHICH)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _said(note, n: gl.constexpr):
    """One of the numbers of a note."""
    return gl.sum(gl.where(gl.arange(0, 32, NOTE) == n, note, 0), 0)


@gluon.jit
def _per_key(C0, scb0, sch0, gc0, b, h, first_key, num_keys, LAYOUT: gl.constexpr):
    """Numbers of a group's keys."""
    j = first_key + gl.arange(0, OWN, LAYOUT)
    col = C0 + b.to(gl.int64) * scb0 + (h // gc0) * sch0
    return gl.load(col + j, mask=j < num_keys, other=0.0, cache_modifier=".cg")


@gluon.jit
def _at(n, which: gl.constexpr, PACKED: gl.constexpr):
    """Where a group's keys lie (0), or its values (1), which follow them if they are packed."""
    return 2 * n + which if PACKED else n


@gluon.jit
def _beside(rows, s, WHAT: gl.constexpr, SIDES: gl.constexpr):
    """One number of each query of a block."""
    return rows.index(s * (2 if SIDES else 3) + WHAT)


@gluon.jit
def _rows_of(first, S0, LSE2, DELTA, line, num_queries, MODE0: gl.constexpr, SIDES: gl.constexpr):
    """What a block of queries needs beside features; past the first cache, which has better things to keep."""
    n = first + gl.arange(0, BLOCK, NOTE)
    inside = n < num_queries
    lse2 = gl.load(LSE2 + line + n, mask=inside, other=float("inf"), cache_modifier=".cg")
    m = n
    if SIDES:
        m = first + gl.arange(0, BLOCK, gl.SliceLayout(1, FLAT))
    delta = gl.load(DELTA + line + m, mask=m < num_queries, other=0.0, cache_modifier=".cg")
    scale = lse2
    if MODE0 == 2:
        scale = gl.load(S0 + line + n, mask=inside, other=0.0, cache_modifier=".cg")
    return lse2, delta, scale


@gluon.jit
def _copy_steps(
    begin, end, done, Q0, Q1, GRAD, TILES, S0, LSE2, DELTA, q0s, q1s, gs, biases, rows, sides, full, empty, b0, b1, bt,
    b, h, line, start, first_key, num_queries, E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr,
    MODE0: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr, SIDES: gl.constexpr, BACK: gl.constexpr,
):  # fmt: skip
    """Blocks of queries from begin to end; `done` blocks have been copied for keys before.

    BACK: from the last of them, where they start, to the first.
    """
    SIZE: gl.constexpr = BLOCK * 2
    NEXT: gl.constexpr = -BLOCK if BACK else BLOCK
    lse2, delta, scale = _rows_of(
        start + begin * NEXT, S0, LSE2, DELTA, line, num_queries, MODE0, SIDES
    )
    for step in range(begin, end):
        s = (done + step) % STAGES
        first = start + step * NEXT
        # Those of the next are on their way meanwhile.
        following = _rows_of(
            gl.maximum(first + NEXT, 0) if BACK else first + NEXT, S0, LSE2, DELTA, line, num_queries, MODE0, SIDES
        )  # fmt: skip
        mbarrier.wait(empty.index(s), (((done + step) // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), SIZE * (E0 + E1 + V + (2 * OWN if BANDED else 0)))
        load(Q0, [b0, h, first, 0], full.index(s), q0s.index(s))
        if E1 > 0:
            load(Q1, [b1, h, first, 0], full.index(s), q1s.index(s))
        load(GRAD, [b, h, first, 0], full.index(s), gs.index(s))
        if BANDED:
            for own in gl.static_range(2):
                at = [bt, h, first, first_key + own * OWN]
                load(TILES, at, full.index(s), biases.index(s * 2 + own))
        _beside(rows, s, MASSES, SIDES).store(lse2)
        if SIDES:
            sides.index(s).store(_columns(-delta, _along(FLAT), sides.dtype, 0.0))
            fence_async_shared()
            barrier()
        else:
            _beside(rows, s, DELTAS, SIDES).store(-delta)
        if MODE0 == 2:
            _beside(rows, s, SCALES, SIDES).store(scale)
        mbarrier.arrive(full.index(s), count=1)
        lse2, delta, scale = following


@gluon.jit
def _copy(
    inputs, E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, FILTER: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, STORE: gl.constexpr, BANDED: gl.constexpr,
    SIDES: gl.constexpr, PART: gl.constexpr, FRESH: gl.constexpr, LAID: gl.constexpr,
    SUM0: gl.constexpr, JOINED: gl.constexpr,
):  # fmt: skip
    """The group that copies: keys and values, then block after block of queries."""
    (
        Q0, K0, Q1, K1, V_, TILES, GRAD, S0, C0, LSE2, DELTA, LENGTHS, COUNTERS, PAIRS, STORED, found, panels, k0s, k1s, vs, along, q0s, q1s,
        gs, biases, rows, sides, ready, free, full, empty, tickets, told, sqb0, sqb1, skb0, skb1, svb, stb, ss0, scb0, sch0, gc0, group0,
        group1, group_v, blocks, parts, last, together, offset, num_heads, num_queries, num_keys, first,
    ) = inputs  # fmt: skip
    done, turn = 0, 0
    about = (
        COUNTERS + offset + (1 if PART == 2 else 0), tickets, told, blocks, parts, last, together, offset, num_heads,
        num_queries, num_keys, first, LENGTHS, S0, C0, ss0, scb0, sch0, gc0,
    )  # fmt: skip
    ticket, low, b, h, start, steps, second = _tell(
        turn, about, FILTER, STORE, FRESH, MODE0, SUM0, JOINED
    )
    while ticket < _tickets(blocks, parts, JOINED):
        line = (b * num_heads + h).to(gl.int64) * num_queries
        b0, b1, bt = _batch(sqb0, b), _batch(sqb1, b), _batch(stb, b)
        bk0, bk1, bv = _batch(skb0, b), _batch(skb1, b), _batch(svb, b)
        # Where keys wait for those before them to be done with, their first queries do not.
        early = 0
        if BUFFERS == 1:
            early = gl.where(turn == 0, 0, gl.minimum(steps, STAGES))
        part, hk = b * num_heads + h - offset, h // group0
        begun = start + (steps - 1) * BLOCK if JOINED else start
        if JOINED and second:
            places = (b * num_heads + h) * _blocks(num_keys) + low // (4 * BLOCK)
            _wait_stored(STORED + places, steps)
        elif BUFFERS == 1:
            _copy_steps(
                0, early, done, Q0, Q1, GRAD, TILES, S0, LSE2, DELTA, q0s, q1s, gs, biases, rows, sides, full, empty,
                b0, b1, bt, b, h, line, begun, low, num_queries, E0, E1, V, MODE0, STAGES, BANDED, SIDES, JOINED,
            )  # fmt: skip
        for own in gl.static_range(2):
            at = (turn % BUFFERS) * 2 + own
            if JOINED and second:
                # Room for what these queries will get.
                mbarrier.wait(free.index(at), ((turn // BUFFERS) & 1) ^ 1)
                mbarrier.arrive(ready.index(at), count=2 if LAID else 1)
            else:
                key = low + own * OWN
                if LAID:
                    c = _per_key(C0, scb0, sch0, gc0, b, h, key, num_keys, NOTE)
                mbarrier.wait(free.index(at), ((turn // BUFFERS) & 1) ^ 1)
                mbarrier.expect(ready.index(at), OWN * 2 * (E0 + E1 + V))
                load(K0, [bk0, h // group0, key, 0], ready.index(at), k0s.index(_at(at, 0, JOINED)))
                if E1 > 0:
                    load(K1, [bk1, h // group1, key, 0], ready.index(at), k1s.index(at))
                load(V_, [bv, h // group_v, key, 0], ready.index(at), vs.index(_at(at, 1, JOINED)))
                if LAID:
                    along.index(at).store(c)
                    mbarrier.arrive(ready.index(at), count=1)
        if not FRESH and not JOINED:
            # Who copies has time for it now, and not before keys that others wait for.
            following = _tell(turn + 1, about, FILTER, STORE, FRESH, MODE0, SUM0, JOINED)
        if JOINED and second:
            _copy_pairs(
                done, PAIRS, K0, LENGTHS, q0s, found, panels, full, empty, bk0, hk, part, b, low, start, steps,
                num_queries, num_keys, first, E0, FILTER, STAGES,
            )  # fmt: skip
        else:
            _copy_steps(
                early, steps, done, Q0, Q1, GRAD, TILES, S0, LSE2, DELTA, q0s, q1s, gs, biases, rows, sides, full, empty,
                b0, b1, bt, b, h, line, begun, low, num_queries, E0, E1, V, MODE0, STAGES, BANDED, SIDES, JOINED,
            )  # fmt: skip
        done += steps
        turn += 1
        if FRESH or JOINED:
            # As late as may be: nobody should wait for who came first, but has yet to start.
            following = _tell(turn, about, FILTER, STORE, FRESH, MODE0, SUM0, JOINED)
        ticket, low, b, h, start, steps, second = following


@gluon.jit
def _give(found, step, own, pairs, given, taken):
    """Pairs for the group that sums up gradients of queries."""
    slot = step % SLOTS
    mbarrier.wait(taken.index(slot), ((step // SLOTS) & 1) ^ 1)
    pairs.index(own * SLOTS + slot).store(found)
    fence_async_shared()
    barrier()
    mbarrier.arrive(given.index(own * SLOTS + slot), count=1)


@gluon.jit
def _give_none(
    begin,
    end,
    done,
    full,
    empty,
    own,
    pairs,
    given,
    taken,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
):
    """No pairs, of blocks of queries that see none of a group's keys."""
    for step in range(begin, end):
        _skip(step, step + 1, done, full, empty, STAGES)
        none = gl.zeros([OWN, BLOCK], pairs.dtype, SCORES)
        _give(none, done + step, own, pairs, given, taken)


@gluon.jit
def _most(base, count):
    """The largest of so many numbers, and of as many after them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    first = gl.zeros([128], gl.float32, LAYOUT)
    second = first
    for start in range(0, count, 128):
        n = start + gl.arange(0, 128, LAYOUT)
        first = gl.maximum(first, gl.load(base + n, mask=n < count, other=0.0))
        second = gl.maximum(second, gl.load(base + count + n, mask=n < count, other=0.0))
    return gl.max(first, 0), gl.max(second, 0)


@gluon.jit
def _whole(x):
    """The whole numbers next to these."""
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], gl.int32, True, 1)


@gluon.jit
def _say_begun(begun, step):
    """Says that sums of the block before a step have begun, once they have."""
    _landed()
    barrier()
    gl.atomic_add(begun + (step - 1), 1, sem="release", scope="gpu")


@gluon.jit
def _add(
    step, inputs, E0: gl.constexpr, EACH: gl.constexpr, BEGINS: gl.constexpr, SAYS: gl.constexpr
):
    """Adds what all keys of a program give to sums of one block of queries.

    BEGINS: they begin with it. SAYS: that those of the block before did is said.
    """
    (
        DQ, bounds, begun, shares, counted, turned, pairs, cols, sums, given, taken, most_k, most_v, query_blocks,
        done, turn, b, h, start, steps,
    ) = inputs  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    bound = _bound(bounds + step, query_blocks, most_k, most_v)
    slot = (done + step) % SLOTS
    acc = gl.zeros([E0, BLOCK], gl.float32, LAYOUT)
    phase = ((done + step) // SLOTS) & 1
    mbarrier.wait(given.index(slot), phase)
    acc = warpgroup_mma(turned.index(0), pairs.index(slot), acc, use_acc=False, is_async=True)
    mbarrier.wait(given.index(SLOTS + slot), phase)
    acc = warpgroup_mma(turned.index(1), pairs.index(SLOTS + slot), acc, is_async=True)
    if EACH:
        few = gl.zeros([BLOCK, COLUMNS], gl.float32, THIN)
        near, far = pairs.index(slot).permute((1, 0)), pairs.index(SLOTS + slot).permute((1, 0))
        col = (turn % 2) * 2
        few = warpgroup_mma(near, cols.index(col), few, use_acc=False, is_async=True)
        few = warpgroup_mma(far, cols.index(col + 1), few, is_async=True)
    tma.store_wait(LEAVING - 1)
    if EACH:
        acc, few = warpgroup_mma_wait(0, (acc, few))
    else:
        acc = warpgroup_mma_wait(0, (acc,))
    mbarrier.arrive(taken.index(slot), count=1)
    if EACH:
        found = _whole(gl.sum(few * counted, 1) * _fixed(bound * most_k))
        gl.atomic_add(shares + (start + step * BLOCK), found, sem="relaxed", scope="gpu")
    acc = acc * _fixed(bound)
    whole = _whole(acc)
    target = sums.index((done + step) % LEAVING)
    target.store(whole)
    fence_async_shared()
    if SAYS:
        _say_begun(begun, step)
    else:
        barrier()
    if SAYS and not BEGINS:
        # From here on others must have begun.
        _wait_begun(begun + step, steps - step)
    place = [b, h, 0, start + step * BLOCK]
    if BEGINS:
        store(DQ, place, target)
    else:
        add_to(DQ, place, target)


@gluon.jit
def _sum(
    inputs, E0: gl.constexpr, BUFFERS: gl.constexpr, EACH: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """The group that adds to gradients of queries, in fixed point: any order gives the same bits.

    EACH: and to SHARES of those of their scales, which numbers per key have: sum_j u_ij (c_j - ref).
    FRESH: sums of all heads but the last begin with what keys at the same places give, and BEGUN says when.
    """
    (
        DQ, BOUNDS, MOST, SHARES, BEGUN, C0, k0s, cols, turned, pairs, sums, ready, given, taken, used, tickets, told,
        scb0, sch0, gc0, blocks, parts, last, num_heads, num_queries, num_keys,
    ) = inputs  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    FEATURES: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    done, turn = 0, 0
    key_blocks, query_blocks = _blocks(num_keys), _blocks(num_queries)
    ticket, _, part, b, h, start, steps = _hear(turn, tickets, told)
    while ticket < blocks * parts:
        bh = (b * num_heads + h).to(gl.int64)
        bounds = BOUNDS + bh * 2 * query_blocks + start // BLOCK
        begun = BEGUN + bh * query_blocks + start // BLOCK
        at = (turn % BUFFERS) * 2
        most_k, most_v = _most(MOST + bh * 2 * key_blocks, key_blocks)
        shares, counted = SHARES, 0
        if EACH:
            THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
            shares += bh * query_blocks * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, THIN))
            ref0 = _reference_within(C0 + b.to(gl.int64) * scb0 + (h // gc0) * sch0, most_k)
            counted = _counted(_along(THIN), ref0)
        for own in gl.static_range(2):
            mbarrier.wait(ready.index(at + own), (turn // BUFFERS) & 1)
        # Products read them faster turned.
        for own in gl.static_range(2):
            turned.index(own).store(_finite(k0s.index(at + own).permute((1, 0)).load(FEATURES)))
        fence_async_shared()
        barrier()
        mbarrier.arrive(used.index(turn % BUFFERS), count=1)
        inner = (
            DQ, bounds, begun, shares, counted, turned, pairs, cols, sums, given, taken, most_k, most_v, query_blocks,
            done, turn, b, h, start, steps,
        )  # fmt: skip
        early = 0
        if FRESH:
            if part < parts - last:
                # Sums of the program's own places begin here, and a step later that is said.
                for step in gl.static_range(MINE + 1):
                    if step < steps:
                        _add(step, inner, E0, EACH, step < MINE, step > 0)
                    elif step == steps:
                        _say_begun(begun, step)
                early = gl.minimum(steps, MINE + 1)
        for step in range(early, steps):
            _add(step, inner, E0, EACH, False, False)
        done += steps
        turn += 1
        ticket, _, part, b, h, start, steps = _hear(turn, tickets, told)
    tma.store_wait(0)


@gluon.jit
def _seen(
    at, j, b, first, lengths, ids, stride_ids, num_keys, FILTER: gl.constexpr, ACROSS: gl.constexpr
):
    """Which keys at places j a block of queries sees whose first is `at`: `_visible`, with fewer additions."""
    n = gl.arange(0, BLOCK, ACROSS)
    STRETCH: gl.constexpr = _stretch(FILTER)
    if len(STRETCH) > 0:
        # One for each pair: the queries of a thread are the same but for multiples of 8.
        sees = _first_place(j, b, first, lengths, num_keys, FILTER, STRETCH) - at
        away = (n % 8)[None, :] - sees[:, None] + (n // 8 * 8)[None, :]
        LAST: gl.constexpr = max(STRETCH[1], 0)
        seen = away.to(gl.uint32, bitcast=True) <= LAST
    else:
        i = at + n
        seen = _visible(
            i[None, :], j[:, None], b, first, lengths, ids, stride_ids, num_keys, FILTER
        )
    return seen


@gluon.jit
def _span(
    begin, end, done, dk0, dk1, dv, dc, k0, k1, v, c, factor, j, start, b, place, first, lengths, ids,
    stride_ids, num_keys, q0s, q1s, gs, rows, col, ones, sides, full, empty, PAIRS, all_pairs, given, taken, biases, own, h, part, first_key, STORED, lines, final,
    E0: gl.constexpr, E1: gl.constexpr, MODE0: gl.constexpr, HAS_COL0: gl.constexpr, DCOL0: gl.constexpr,
    FILTER: gl.constexpr, MASK: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, SUMMED: gl.constexpr, BANDED: gl.constexpr,
    SCORES: gl.constexpr, SUMS0: gl.constexpr, SUMS1: gl.constexpr,
    SUMSV: gl.constexpr, SIDES: gl.constexpr, JOINED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The blocks of queries from begin to end; all pairs lie transposed, [keys, queries].

    JOINED: from the last block to the first; that all of four are stored is said with the next. FIRST: there is none
    before these.
    """
    DTYPE: gl.constexpr = q0s.dtype
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    for step in range(begin, end):
        s = (done + step) % STAGES
        mbarrier.wait(full.index(s), ((done + step) // STAGES) & 1)
        # Products begin with what would be added to them, or have it as columns.
        BEGUN: gl.constexpr = HAS_COL0 and not SIDES
        along = c[:, None].broadcast_to([OWN, BLOCK])
        t = warpgroup_mma(k0, q0s.index(s).permute((1, 0)), along, use_acc=BEGUN, is_async=True)
        if E1 > 0:
            t = warpgroup_mma(k1, q1s.index(s).permute((1, 0)), t, is_async=True)
        if SIDES and HAS_COL0:
            t = warpgroup_mma(col, ones.permute((1, 0)), t, is_async=True)
        delta = along
        if not SIDES:
            delta = _beside(rows, s, DELTAS, SIDES).load(ACROSS)[None, :].broadcast_to([OWN, BLOCK])
        dp = warpgroup_mma(v, gs.index(s).permute((1, 0)), delta, use_acc=not SIDES, is_async=True)
        if SIDES:
            dp = warpgroup_mma(ones, sides.index(s).permute((1, 0)), dp, is_async=True)
        # Read before anything is waited for, where there are registers for it.
        if MODE0 == 2:
            t = warpgroup_mma_wait(2 if SIDES else 1, (t,))
        lse2 = _beside(rows, s, MASSES, SIDES).load(ACROSS)[None, :]
        if MODE0 < 2:
            t = warpgroup_mma_wait(2 if SIDES else 1, (t,))
        if MODE0 == 2:
            scale = _beside(rows, s, SCALES, SIDES).load(ACROSS)[None, :]
            e = t * (scale * LOG2E) - lse2
        else:
            e = t * factor - lse2
        if BANDED:
            e += biases.index(s * 2 + own).permute((1, 0)).load(SCORES).to(gl.float32)
        if MASK:
            at = start + (final - step if JOINED else step) * BLOCK + place
            seen = _seen(at, j, b, first, lengths, ids, stride_ids, num_keys, FILTER, ACROSS)
            e = gl.where(seen, e, float("-inf"))
        p = gl.exp2(e)
        dp = warpgroup_mma_wait(0, (dp,))
        if PART != 2:
            weights = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMSV, 2))
            dv = warpgroup_mma(weights, gs.index(s), warpgroup_mma_init(dv), is_async=True)
        u = dp * p
        if MASK:
            # A weight of zero hides what is not finite.
            u = gl.where(p == 0.0, 0.0, u)
        found = u.to(DTYPE)
        if MODE0 == 2:
            u = u * scale
        exact = u
        u = u.to(DTYPE)
        if PART != 2:
            dk0 = warpgroup_mma(
                gl.convert_layout(u, gl.DotOperandLayout(0, SUMS0, 2)),
                q0s.index(s),
                warpgroup_mma_init(dk0),
                is_async=True,
            )
        if E1 > 0 and PART != 1:
            dk1 = warpgroup_mma(
                gl.convert_layout(u, gl.DotOperandLayout(0, SUMS1, 2)),
                q1s.index(s),
                warpgroup_mma_init(dk1),
                is_async=True,
            )
        if DCOL0 and PART != 2:
            dc += _within(exact)
        if SUMMED:
            _give(found, done + step, own, all_pairs, given, taken)
        if STORE > 0:
            # While the products run.
            pairs = all_pairs.index(own)
            if JOINED:
                at = start // BLOCK + final - step + 1
                if at % 4 == 0 and (not FIRST or step > begin):
                    _say_stored(STORED + (lines + at // 4))
            tma.store_wait(0)
            if BANDED:
                pairs.permute((1, 0)).store(found)
                at = [b, h, start + step * BLOCK, first_key]
            else:
                pairs.store(found)
                at = [0, part, first_key, (final - step if JOINED else step) * BLOCK]
            fence_async_shared()
            barrier()
            store(PAIRS, at, pairs)
        dk0, dk1, dv = warpgroup_mma_wait(0, (dk0, dk1, dv))
        mbarrier.arrive(empty.index(s), count=1)
    return dk0, dk1, dv, dc


@gluon.jit
def _of_head(turn, tickets, number0, MODE0: gl.constexpr, LOG0: gl.constexpr):
    """The scale of a ticket's head."""
    head0 = 1.0
    if MODE0 == 0:
        head0 = number0
    elif MODE0 == 1:
        head0 = _grown(_number(turn, tickets, SCALE), LOG0)
    return head0


@gluon.jit
def _multiply(
    own, inputs, E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr,
    HAS_COL0: gl.constexpr, FILTER: gl.constexpr, NORM0: gl.constexpr, WANT0: gl.constexpr,
    SAVE_COL0: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr,
    STORE: gl.constexpr, SUMMED: gl.constexpr, BANDED: gl.constexpr, WHOLE: gl.constexpr,
    HELD: gl.constexpr, SIDES: gl.constexpr, BY_KEYS: gl.constexpr, LAID: gl.constexpr, SUM0: gl.constexpr,
    JOINED: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply, with its 64 keys, or queries."""
    (
        DK0, DK1, DV, DQ, C0, DC0, DS0, LENGTHS, IDS, PAIRS, STORED, LEFT, across, found, panels, k0s, k1s, vs, all_along, q0s, q1s, gs, all_pairs, biases,
        rows, cols, ones, sides, ready, free, full, empty, given, taken, used, tickets, told, number0, scb0, sch0, gc0,
        stride_ids, blocks, parts, num_heads, num_queries, num_keys, first,
    ) = inputs  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    # Sums that this part does not form are as narrow as may be.
    WIDE0: gl.constexpr = E0 if PART != 2 else 8
    WIDE1: gl.constexpr = E1 if E1 > 0 and PART != 1 else 8
    WIDEV: gl.constexpr = V if PART != 2 else 8
    SUMS0: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE0, 16])
    SUMS1: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE1, 16])
    SUMSV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDEV, 16])
    DOWN: gl.constexpr = gl.SliceLayout(1, SCORES)
    DCOL0: gl.constexpr = NORM0 or SAVE_COL0 or SUM0
    done, turn = 0, 0
    place = num_keys - num_queries
    tiles = _tickets(blocks, parts, JOINED)
    ticket, low, part, b, h, start, steps = _hear(turn, tickets, told)
    c = gl.zeros([OWN], gl.float32, DOWN)
    if HAS_COL0 and not LAID:
        c = _per_key(C0, scb0, sch0, gc0, b, h, low + own * OWN, num_keys, DOWN)
    while ticket < tiles:
        at = (turn % BUFFERS) * 2 + own
        # Whose pairs are stored: nobody's, so far.
        stored = gl.minimum(turn, 0) - 1
        if JOINED and _is_for_queries(turn, tickets):
            rate = _of_head(turn, tickets, number0, MODE0, LOG0)
            mbarrier.wait(ready.index(at), (turn // BUFFERS) & 1)
            k0, v = k0s.index(_at(at, 0, JOINED)), vs.index(_at(at, 1, JOINED))
            _gather(
                own, done, k0, v, found, panels, q0s, full, empty, rate, LEFT, across, part, low, b, start, steps, first, LENGTHS,
                num_queries, num_keys, E0, FILTER, STAGES,
            )  # fmt: skip
            fence_async_shared()
            barrier()
            store(DQ, [b, h, low + 2 * own * OWN, 0], k0)
            store(DQ, [b, h, low + (2 * own + 1) * OWN, 0], v)
            done += steps
            ticket, low, part, b, h, start, steps = _hear(turn + 1, tickets, told)
        else:
            head0 = _of_head(turn, tickets, number0, MODE0, LOG0)
            first_key = low + own * OWN
            # Of all blocks, those that may see a key of this group, and those that see all of them.
            high = gl.minimum(first_key + OWN, num_keys) - 1
            begin, end, sure_start, sure_stop = _query_range(
                first_key, high, b, first, LENGTHS, place, num_queries, FILTER
            )
            begin = gl.minimum(gl.maximum(begin - start, 0) // BLOCK, steps)
            end = gl.minimum(gl.maximum(end - start + BLOCK - 1, 0) // BLOCK, steps)
            if STORE > 1:
                begin, end = 0, steps
            end = gl.maximum(end, begin)
            sure_start = gl.maximum(sure_start - start + BLOCK - 1, 0) // BLOCK
            sure_stop = gl.maximum(sure_stop - start, 0) // BLOCK
            if JOINED:
                begin, end = steps - end, steps - begin
                sure_start, sure_stop = steps - sure_stop, steps - sure_start
            if WHOLE:
                # The first block has its mask, needed or not: where the first loop below has nothing to do,
                # the ptxas of Triton 3.6 has the second read addresses that only the first has formed.
                sure_start = gl.minimum(gl.maximum(sure_start, begin + 1), end)
                sure_stop = gl.maximum(gl.minimum(sure_stop, end), sure_start)
                # The last keys are not a whole block: they need their mask throughout.
                short = high - first_key < OWN - 1
                sure_start = gl.where(short, end, sure_start)
                sure_stop = gl.where(short, end, sure_stop)
            else:
                sure_start = end
                sure_stop = end
            k0, k1 = k0s.index(_at(at, 0, JOINED)), k1s.index(at)
            v = vs.index(_at(at, 1, JOINED))
            j = first_key + gl.arange(0, OWN, DOWN)
            factor = head0 * LOG2E
            dcs = _within(gl.zeros([OWN, BLOCK], gl.float32, SCORES))
            dk0 = gl.zeros([OWN, WIDE0], gl.float32, SUMS0)
            dk1 = gl.zeros([OWN, WIDE1], gl.float32, SUMS1)
            dv = gl.zeros([OWN, WIDEV], gl.float32, SUMSV)
            mbarrier.wait(ready.index(at), (turn // BUFFERS) & 1)
            if LAID:
                c = all_along.index(at).load(DOWN)
            # Narrow keys and values stay in registers: shared memory is as busy as the products are.
            a, a1, w = k0, k1, v
            if HELD:
                a = k0.load(gl.DotOperandLayout(0, SCORES, 2))
                w = v.load(gl.DotOperandLayout(0, SCORES, 2))
                if E1 > 0:
                    a1 = k1.load(gl.DotOperandLayout(0, SCORES, 2))
            col = cols
            if SIDES:
                # Two turns: the group that sums up may be one behind.
                col = cols.index((turn % 2) * 2 + own)
            if SIDES and HAS_COL0:
                # Numbers of keys are columns of the products, as those of queries are. Of what is not finite,
                # there would be NaN for those that do not see it; the lowest number has the same weight, 0.
                THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
                along = gl.maximum(gl.convert_layout(c, gl.SliceLayout(1, THIN)), LOWEST)
                col.store(_columns(along, _along(THIN), k0.dtype, 1.0))
                fence_async_shared()
                barrier()
            if BUFFERS > 1:
                # By now, gradients of the keys before have left.
                if turn > 0:
                    tma.store_wait(0)
                    barrier()
                    mbarrier.arrive(free.index(2 - at + 2 * own), count=1)
            if SUMMED:
                _give_none(
                    0, begin, done, full, empty, own, all_pairs, given, taken, STAGES, SCORES,
                )  # fmt: skip
            elif STORE < 2:
                _skip(0, begin, done, full, empty, STAGES)
            # Where a head's blocks of four are said to be stored.
            lines = (b * num_heads + h) * _blocks(num_keys)
            for span in gl.static_range(3):
                # In turn: masked, seen by all, masked.
                if span == 0:
                    left, right = begin, sure_start
                elif span == 1:
                    left, right = sure_start, sure_stop
                else:
                    left, right = sure_stop, end
                if WHOLE or span == 0:
                    dk0, dk1, dv, dcs = _span(
                        left, right, done, dk0, dk1, dv, dcs, a, a1, w, c, factor, j, start, b, place, first,
                        LENGTHS, IDS, stride_ids, num_keys, q0s, q1s, gs, rows, col, ones, sides, full, empty, PAIRS, all_pairs, given, taken,
                        biases, own, h, part, first_key, STORED, lines, steps - 1, E0, E1, MODE0, HAS_COL0, DCOL0, FILTER, span != 1, PART, STAGES,
                        STORE, SUMMED, BANDED, SCORES, SUMS0, SUMS1, SUMSV, SIDES, JOINED, span == 0,
                    )  # fmt: skip
            if SUMMED:
                _give_none(
                    end, steps, done, full, empty, own, all_pairs, given, taken, STAGES, SCORES,
                )  # fmt: skip
            elif STORE < 2:
                _skip(end, steps, done, full, empty, STAGES)
            _, low, _, b, h, _, steps = _heard(turn, tickets)
            done += steps
            bh = b * num_heads + h
            first_key = low + own * OWN
            line = bh.to(gl.int64) * num_queries
            keys = bh.to(gl.int64) * num_keys
            sums = line + keys + num_queries
            j = first_key + gl.arange(0, OWN, DOWN)
            inside = j < num_keys
            ticket, low, part, b_next, h_next, start, steps = _hear(turn + 1, tickets, told)
            if LAID:
                c = all_along.index(at).load(DOWN)
            elif HAS_COL0:
                # Numbers of the next keys are on their way while gradients of these leave.
                c_next = _per_key(
                    C0, scb0, sch0, gc0, b_next, h_next, low + own * OWN, num_keys, DOWN
                )
            if MODE0 == 1:
                head0 = _grown(_number(turn, tickets, SCALE), LOG0)
            dc = gl.convert_layout(gl.sum(dcs, 1), DOWN)
            if SUMMED:
                # The group that sums up reads these keys, too.
                mbarrier.wait(used.index(turn % BUFFERS), (turn // BUFFERS) & 1)
            if PART != 2:
                if NORM0 or (BY_KEYS and WANT0):
                    x = k0.load(SUMS0).to(gl.float32)
                    if NORM0:
                        # A key that is not finite has no norm.
                        whole = gl.convert_layout(c, gl.SliceLayout(1, SUMS0))
                        x = gl.where((gl.abs(whole) < float("inf"))[:, None], x, 0.0)
                    else:
                        x = _finite(x)
                if WANT0 and MODE0 == 1:
                    share = gl.zeros([OWN], gl.float32, DOWN)
                    if SUM0:
                        share = _finite(c - _finite(_number(turn, tickets, REFERENCE))) * dc
                    if BY_KEYS:
                        # sum_i <q_i, dq_i> is sum_j <k_j, dk_j>.
                        share += gl.convert_layout(gl.sum(dk0 * x, 1), DOWN)
                    gl.store(DS0 + sums + j, share, mask=inside)
                if MODE0 != 2:
                    dk0 = dk0 * head0
                    dc = dc * head0
                if NORM0:
                    along = gl.convert_layout(dc, gl.SliceLayout(1, SUMS0))
                    dk0 -= along[:, None] * x
                if SAVE_COL0:
                    gl.store(DC0 + keys + j, dc, mask=inside)
                k0.store(dk0.to(k0.dtype))
                v.store(dv.to(v.dtype))
            if E1 > 0 and PART != 1:
                k1.store((dk1 * head0).to(k1.dtype))
            fence_async_shared()
            if JOINED:
                # The last block that they were stored for is that of the same places.
                stored = bh * _blocks(num_keys) + first_key // (4 * BLOCK)
                stored = gl.where(first_key < num_keys, stored, -1)
            barrier()
            if PART != 2:
                store(DK0, [b, h, first_key, 0], k0)
                store(DV, [b, h, first_key, 0], v)
            if E1 > 0 and PART != 1:
                store(DK1, [b, h, first_key, 0], k1)
            b, h = b_next, h_next
            if HAS_COL0 and not LAID:
                c = c_next
        turn += 1
        if BUFFERS == 1:
            tma.store_wait(0)
            barrier()
            mbarrier.arrive(free.index(at), count=1)
        if JOINED:
            # While the next keys are on their way.
            if stored >= 0:
                _say_stored(STORED + stored)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "first",
        "seed",
        "blocks",
        "parts",
        "last",
        "together",
        "offset",
        "across",
    ]
)
def backward_keys(
    Q0, K0, Q1, K1, V_, TILES, S0, C0, LENGTHS, IDS, GRAD, LSE2, DELTA, PAIRS, DK0, DK1, DV, DQ, LEFT, DC0,
    BOUNDS, MOST, SHARES, BEGUN, COUNTERS, DS0, sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, blocks, parts, last, together, offset, across,
    E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr,
    HAS_COL0: gl.constexpr, FILTER: gl.constexpr, SIMPLE: gl.constexpr, NORM0: gl.constexpr,
    WANT0: gl.constexpr, SAVE_COL0: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, STORE: gl.constexpr, SUMMED: gl.constexpr, BANDED: gl.constexpr,
    HELD: gl.constexpr, SIDES: gl.constexpr, FRESH: gl.constexpr, BY_KEYS: gl.constexpr,
    JOINED: gl.constexpr,
):  # fmt: skip
    """dk, dv and dcol of two times 64 keys, for one query head; PART as in `triton_backward`.

    STORE: what gradients of queries are made of is stored for pairs, [keys, queries], of the heads from
    `offset` on; queries count from the first block that sees a program's keys. So many blocks of them are
    read at a time: what one of them sees is stored for all. BANDED: a band has all pairs, [queries, keys],
    and so has what is stored.
    JOINED: and read again by the same programs, which form gradients of queries, DQ, of 256 at a time, while pairs
    are in the cache; LEFT is where these lie, `across` in a row, and anything thereafter. BEGUN counts, from 0 on,
    blocks of keys that are done with 256 queries. That takes a causal window, as many queries as keys, and as many
    features as values, 128.
    SUMMED: PAIRS is where gradients of queries are summed up, [features, queries], from 0 on; FRESH: from 0 on
    for the last heads alone, and BEGUN, of each block of queries, is 0 for all others. That takes a causal
    window, and as many queries as keys: a key at the place of a query is seen by it.
    BY_KEYS: what queries have of the gradient of their head's scale comes from keys, of which that is the same.
    A program that is done goes on with the next keys that nobody has: COUNTERS, from 0 on, has tickets
    drawn so far at the place `offset`, and for a second pass, of the second slot, at the next.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = Q0.dtype
    GROUPS: gl.constexpr = 2 * BUFFERS
    # Numbers per key come beside the keys, where they are not columns of products.
    LAID: gl.constexpr = HAS_COL0 and not SIDES
    # Keys have a share of the gradient of a head's scale.
    SUM0: gl.constexpr = WANT0 and HAS_COL0 and MODE0 == 1
    if JOINED:
        # As wide as keys are.
        k0s = gl.allocate_shared_memory(DTYPE, [2 * GROUPS, OWN, E0], HALF)
        vs = k0s
    else:
        k0s = gl.allocate_shared_memory(DTYPE, [GROUPS, OWN, E0], HALF)
        vs = gl.allocate_shared_memory(DTYPE, [GROUPS, OWN, V], HALF)
    q0s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E0], HALF)
    gs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], HALF)
    k1s, q1s = k0s, q0s
    if E1 > 0:
        k1s = gl.allocate_shared_memory(DTYPE, [GROUPS, OWN, E1], HALF)
        q1s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E1], HALF)
    pairs = k0s
    if STORE > 0:
        pairs = gl.allocate_shared_memory(DTYPE, [2, OWN, BLOCK], HALF)
    found, panels = gs, k0s
    if JOINED:
        # Pairs that are read again, of both groups: of the first of two blocks of queries where queries' gradients
        # of outputs lie otherwise, of the second where a group's keys and values do.
        found = gs._reinterpret(DTYPE, [2 * STAGES, OWN, BLOCK], HALF)
        panels = k0s._reinterpret(DTYPE, [4 * GROUPS, OWN, BLOCK], HALF)
    along = k0s
    if LAID:
        along = gl.allocate_shared_memory(gl.float32, [GROUPS, OWN], PLAIN)
    biases = k0s
    if BANDED:
        biases = gl.allocate_shared_memory(TILES.dtype, [STAGES * 2, BLOCK, OWN], HALF)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES * (2 if SIDES else 3), BLOCK], PLAIN)
    cols, ones, sides = k0s, k0s, k0s
    if SIDES:
        THIN: gl.constexpr = gl.NVMMASharedLayout(32, 16)
        ones = gl.allocate_shared_memory(DTYPE, [BLOCK, COLUMNS], THIN)
        ones.store(_ones(FLAT).to(DTYPE))
        sides = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, COLUMNS], THIN)
        cols = gl.allocate_shared_memory(DTYPE, [4, OWN, COLUMNS], THIN)
    ready = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    tickets = gl.allocate_shared_memory(gl.int32, [TICKETS, 32], PLAIN)
    told = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], BARRIER)
    for s in gl.static_range(TICKETS):
        mbarrier.init(told.index(s), count=1)
    given, taken, used, sums, turned = ready, ready, ready, k0s, k0s
    if SUMMED:
        pairs = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, OWN, BLOCK], HALF)
        sums = gl.allocate_shared_memory(
            gl.int32, [LEAVING, E0, BLOCK], gl.NVMMASharedLayout(128, 32)
        )
        given = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], BARRIER)
        taken = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
        turned = gl.allocate_shared_memory(DTYPE, [2, E0, OWN], HALF)
        used = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], BARRIER)
        for s in gl.static_range(2 * SLOTS):
            mbarrier.init(given.index(s), count=1)
        for s in gl.static_range(SLOTS):
            mbarrier.init(taken.index(s), count=1)
        for s in gl.static_range(BUFFERS):
            mbarrier.init(used.index(s), count=1)
    for s in gl.static_range(GROUPS):
        # Keys themselves, and numbers beside them.
        mbarrier.init(ready.index(s), count=2 if LAID else 1)
        mbarrier.init(free.index(s), count=1)
    for s in gl.static_range(STAGES):
        # The copy itself, and the numbers beside it; both groups have to let go.
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    multiply = (
        DK0, DK1, DV, DQ, C0, DC0, DS0, LENGTHS, IDS, PAIRS, BEGUN, LEFT, across, found, panels, k0s, k1s, vs, along, q0s, q1s, gs, pairs, biases, rows,
        cols, ones, sides, ready, free, full, empty, given, taken, used, tickets, told, number0, scb0, sch0, gc0, stride_ids,
        blocks, parts, num_heads, num_queries, num_keys, first,
    )  # fmt: skip
    copy = (
        Q0, K0, Q1, K1, V_, TILES, GRAD, S0, C0, LSE2, DELTA, LENGTHS, COUNTERS, PAIRS, BEGUN, found, panels, k0s, k1s, vs,
        along, q0s, q1s, gs, biases, rows, sides, ready, free, full, empty, tickets, told, sqb0, sqb1, skb0, skb1, svb, stb, ss0, scb0, sch0, gc0, group0,
        group1, group_v, blocks, parts, last, together, offset, num_heads, num_queries, num_keys, first,
    )  # fmt: skip
    summed = (
        PAIRS, BOUNDS, MOST, SHARES, BEGUN, C0, k0s, cols, turned, pairs, sums, ready, given, taken, used, tickets, told,
        scb0, sch0, gc0, blocks, parts, last, num_heads, num_queries, num_keys,
    )  # fmt: skip
    if SUMMED:
        gl.warp_specialize(
            [
                (_copy, (copy, E0, E1, V, MODE0, FILTER, STAGES, BUFFERS, STORE, BANDED, SIDES, PART, FRESH, LAID, SUM0, JOINED)),
                (_multiply, (
                    0, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0, JOINED,
                )),
                (_multiply, (
                    1, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0, JOINED,
                )),
                (_sum, (summed, E0, BUFFERS, MODE0 == 2 and WANT0, FRESH)),
            ],
            [4, 4, 4],
            [LESS_REGISTERS, LESS_REGISTERS, SUM_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_copy, (copy, E0, E1, V, MODE0, FILTER, STAGES, BUFFERS, STORE, BANDED, SIDES, PART, FRESH, LAID, SUM0, JOINED)),
                (_multiply, (
                    0, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0, JOINED,
                )),
                (_multiply, (
                    1, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0, JOINED,
                )),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
