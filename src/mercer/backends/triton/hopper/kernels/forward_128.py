"""The forward for Hopper of 128 features and values, where two groups of warps share keys.

The same sums as the portable forward. A third group copies keys for both multiplying groups, 64 queries each, and
prefetches for the next queries while outputs are stored. The sums of a block of keys overlap the weights of
the next one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...kernels.primitives import COLUMNS, LN2, LOG2E, _finite, _taken
from ...kernels.scores import _down, _scale
from ...kernels.visibility import _visible
from .primitives import BLOCK, OWN, REGISTERS, _batch, _ones, _range, _within, barrier, load, store


@gluon.jit
def _weights(t, peak, rate, MODE0: gl.constexpr, STILL: gl.constexpr):
    """Weights from scores, the running maximum, and its change. STILL: the maximum is fixed."""
    if STILL:
        higher, shrink = peak, peak
        p = gl.exp2(t * _down(rate, MODE0) - peak[:, None])
    else:
        higher = gl.maximum(peak, gl.max(t, 1) * rate)
        base = gl.where(higher == float("-inf"), 0.0, higher)
        p = gl.exp2(t * _down(rate, MODE0) - base[:, None])
        shrink = gl.exp2(peak - base)
    return p, higher, shrink


@gluon.jit
def _beside(DTYPE: gl.constexpr, SCORES: gl.constexpr):
    """The columns of queries that multiply columns of keys."""
    THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.convert_layout(_ones(THIN).to(DTYPE), gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def _seen(i, first_key, b, seeing, FILTER: gl.constexpr, ACROSS: gl.constexpr):
    """Which keys of a block queries at places i see."""
    LENGTHS, IDS, stride_ids, num_keys, first = seeing
    j = first_key + gl.arange(0, BLOCK, ACROSS)
    return _visible(i[:, None], j[None, :], b, first, LENGTHS, IDS, stride_ids, num_keys, FILTER)


@gluon.jit
def _shown(
    t, first_key, sure_start, sure_stop, i, b, seeing, FILTER: gl.constexpr, ACROSS: gl.constexpr
):
    """Scores with hidden keys masked; between two places all queries see all keys."""
    if (first_key < sure_start) | (first_key + BLOCK > sure_stop):
        t = gl.where(_seen(i, first_key, b, seeing, FILTER, ACROSS), t, float("-inf"))
    return t


@gluon.jit
def _careful(
    t, values, acc, mass, peak, rate, i, first_key, b, seeing, MODE0: gl.constexpr, FILTER: gl.constexpr,
    SUMS: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Add one more block to sums and masses, with values that may not be finite."""
    # A value that is not finite must not be multiplied by a weight of zero: 0 times NaN is NaN.
    x = values.load(SUMS).to(gl.float32)
    whole = gl.min((gl.abs(x) < float("inf")).to(gl.int32), 1) > 0
    values.store(_finite(x).to(values.dtype))
    fence_async_shared()
    barrier()
    t = gl.where(gl.convert_layout(whole, ACROSS)[None, :], t, float("nan"))
    seen = _seen(i, first_key, b, seeing, FILTER, ACROSS)
    p, peak, shrink = _weights(gl.where(seen, t, float("-inf")), peak, rate, MODE0, False)
    mass = mass * shrink + gl.sum(p, 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
    weights = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, SUMS, 2))
    return warpgroup_mma(weights, values, acc), mass, peak


@gluon.jit
def _finished(acc, mass, peak, SUMS: gl.constexpr):
    """out and log_mass; of a row that sees nothing, 0 and -inf."""
    empty = mass == 0.0
    safe = gl.where(empty, 1.0, mass)
    out = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, SUMS))[:, None]
    lse = gl.where(empty, float("-inf"), LN2 * (gl.where(empty, 0.0, peak) + gl.log2(safe)))
    return out, lse


@gluon.jit
def _tile(turn, pairs, parts, num_heads):
    """The work of a turn: (block of queries, batch, head), and whether there is any.

    Head by head, a late block and then an early one. By a causal filter, or none, all such pairs are equal
    work. When fewer pairs than programs are left, single blocks are shared: late blocks first, then early
    ones for the programs that had none, or the shortest.
    """
    programs, mine = gl.num_programs(0), gl.program_id(0)
    rounds = pairs * parts // programs
    left = pairs * parts - rounds * programs
    last = turn - 2 * rounds
    place = gl.where(last == 0, mine, 2 * programs - 1 - mine)
    some = (last < 0) | ((last < 2) & (place < 2 * left))
    late = gl.where(last < 0, turn % 2 == 0, place < left)
    pair = rounds * programs + gl.where(late, place, 2 * left - 1 - place)
    pair = gl.where(last < 0, turn // 2 * programs + mine, pair)
    # Any valid block, if there is no work.
    pair = gl.minimum(gl.maximum(pair, 0), pairs * parts - 1)
    bh, early = pair // pairs, pair % pairs
    return gl.where(late, 2 * pairs - 1 - early, early), bh // num_heads, bh % num_heads, some


@gluon.jit
def _copy(
    inputs, E0: gl.constexpr, V: gl.constexpr, FILTER: gl.constexpr, SPREAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The group that copies: queries of both groups, then block after block of keys."""
    (
        Q0, K0, K1, V_, LENGTHS, qs, k0s, cols, vs, ready, free, full, fuller, empty, sqb0, skb0, skb1, svb, group0,
        group1, group_v, pairs, parts, num_heads, num_queries, num_keys, first,
    ) = inputs  # fmt: skip
    done, turn = 0, 0
    block, b, h, some = _tile(turn, pairs, parts, num_heads)
    while some:
        bq, bk, bc, bv = _batch(sqb0, b), _batch(skb0, b), _batch(skb1, b), _batch(svb, b)
        start, steps, _, _ = _range(
            block * 2 * OWN, 2 * OWN, b, first, LENGTHS, num_queries, num_keys, FILTER
        )
        steps = gl.maximum(steps, 1)
        for own in gl.static_range(2):
            mbarrier.wait(free.index(own), (turn & 1) ^ 1)
            mbarrier.expect(ready.index(own), 2 * OWN * E0)
            load(Q0, [bq, h, (2 * block + own) * OWN, 0], ready.index(own), qs.index(own))
        for step in range(steps):
            s = (done + step) % STAGES
            key = start + step * BLOCK
            mbarrier.wait(empty.index(s), (((done + step) // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), 2 * BLOCK * (E0 + (COLUMNS if SPREAD else 0)))
            load(K0, [bk, h // group0, key, 0], full.index(s), k0s.index(s))
            if SPREAD:
                load(K1, [bc, h // group1, key, 0], full.index(s), cols.index(s))
            mbarrier.expect(fuller.index(s), 2 * BLOCK * V)
            load(V_, [bv, h // group_v, key, 0], fuller.index(s), vs.index(s))
        done += steps
        turn += 1
        block, b, h, some = _tile(turn, pairs, parts, num_heads)


@gluon.jit
def _skip(begin, end, done, full, fuller, empty, STAGES: gl.constexpr):
    """Release blocks of keys that a group's queries do not see."""
    for step in range(begin, end):
        s = (done + step) % STAGES
        mbarrier.wait(full.index(s), ((done + step) // STAGES) & 1)
        mbarrier.wait(fuller.index(s), ((done + step) // STAGES) & 1)
        mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def _scores(
    step, q, q1, none, k0s, cols, full, SPREAD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start the scores of a block of keys once it is loaded; asynchronous."""
    s = step % STAGES
    mbarrier.wait(full.index(s), (step // STAGES) & 1)
    t = warpgroup_mma(q, k0s.index(s).permute((1, 0)), none, use_acc=False, is_async=True)
    if SPREAD:
        t = warpgroup_mma(q1, cols.index(s).permute((1, 0)), t, is_async=True)
    return t


@gluon.jit
def _formed(
    t, peak, rate, masses, DTYPE: gl.constexpr, MODE0: gl.constexpr, STILL: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """Weights as an operand, the maximum, the new masses, and the factor on older sums."""
    p, peak, shrink = _weights(t, peak, rate, MODE0, STILL)
    if not STILL:
        THREADS: gl.constexpr = gl.SliceLayout(1, masses.type.layout)
        masses = masses * gl.convert_layout(shrink, THREADS)[:, None]
    masses += _within(p)
    return gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2)), peak, masses, shrink


@gluon.jit
def _again(
    own, inputs, q, q1, low, b, h, line, come, E0: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr,
    LOG0: gl.constexpr, FILTER: gl.constexpr, SPREAD: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The careful path: a running maximum, values that may not be finite, block by block."""
    (
        K0, K1, V_, S0, LENGTHS, IDS, outs, thin, once, skb0, skb1, svb, stride_ids, ss0, group0, group1, group_v,
        number0, num_queries, num_keys, first,
    ) = inputs  # fmt: skip
    DOWN: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    bk, bc, bv = _batch(skb0, b), _batch(skb1, b), _batch(svb, b)
    start, steps, _, _ = _range(low, OWN, b, first, LENGTHS, num_queries, num_keys, FILTER)
    n = low + gl.arange(0, OWN, DOWN)
    i = n + num_keys - num_queries
    rate = _scale(S0, number0, ss0, h, line, n, n < num_queries, MODE0, LOG0) * LOG2E
    block, bar = outs.index(own), once.index(own)
    acc = gl.zeros([OWN, V], gl.float32, SUMS)
    none = gl.zeros([OWN, BLOCK], gl.float32, SCORES)
    mass = gl.zeros([OWN], gl.float32, DOWN)
    peak = gl.full([OWN], float("-inf"), gl.float32, DOWN)
    seeing = LENGTHS, IDS, stride_ids, num_keys, first
    tma.store_wait(0)
    for step in range(steps):
        key = start + step * BLOCK
        fence_async_shared()
        barrier()
        mbarrier.expect(bar, 2 * BLOCK * (E0 + (COLUMNS if SPREAD else 0)))
        load(K0, [bk, h // group0, key, 0], bar, block)
        if SPREAD:
            load(K1, [bc, h // group1, key, 0], bar, thin.index(own))
        mbarrier.wait(bar, (come + 2 * step) & 1)
        t = warpgroup_mma(q, block.permute((1, 0)), none, use_acc=False, is_async=True)
        if SPREAD:
            t = warpgroup_mma(q1, thin.index(own).permute((1, 0)), t, is_async=True)
        t = warpgroup_mma_wait(0, (t,))
        barrier()
        mbarrier.expect(bar, 2 * BLOCK * V)
        load(V_, [bv, h // group_v, key, 0], bar, block)
        mbarrier.wait(bar, (come + 2 * step + 1) & 1)
        acc, mass, peak = _careful(
            t, block, acc, mass, peak, rate, i, key, b, seeing, MODE0, FILTER, SUMS, ACROSS
        )
    return acc, mass, peak, steps


@gluon.jit
def _multiply(
    own, inputs, E0: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr, FILTER: gl.constexpr,
    SIMPLE: gl.constexpr, HAS_LOW: gl.constexpr, SPREAD: gl.constexpr, STILL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply, with its 64 queries."""
    (
        K0, K1, V_, S0, LENGTHS, IDS, OUT, LOW, LSE, qs, k0s, cols, vs, outs, lows, thin, ready, free, full, fuller, empty,
        once, skb0, skb1, svb, stride_ids, ss0, group0, group1, group_v, number0, pairs, parts, num_heads, num_queries,
        num_keys, first,
    ) = inputs  # fmt: skip
    DTYPE: gl.constexpr = k0s.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    FEATURES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E0, 16])
    DOWN: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    place = num_keys - num_queries
    q1 = cols
    if SPREAD:
        q1 = _beside(DTYPE, SCORES)
    none = gl.zeros([OWN, BLOCK], gl.float32, SCORES)
    seeing = LENGTHS, IDS, stride_ids, num_keys, first
    done, turn, come = 0, 0, 0
    block, b, h, some = _tile(turn, pairs, parts, num_heads)
    while some:
        low = (2 * block + own) * OWN
        start, steps, _, _ = _range(
            block * 2 * OWN, 2 * OWN, b, first, LENGTHS, num_queries, num_keys, FILTER
        )
        mine, count, sure_start, sure_stop = _range(
            low, OWN, b, first, LENGTHS, num_queries, num_keys, FILTER
        )
        # At least one block, even if it is invisible.
        steps = gl.maximum(steps, 1)
        begin = gl.minimum(gl.maximum(mine - start, 0) // BLOCK, steps - 1)
        end = gl.minimum(begin + gl.maximum(count, 1), steps)
        if not SIMPLE:
            sure_start = num_keys
        line = (b * num_heads + h).to(gl.int64) * num_queries
        n = low + gl.arange(0, OWN, DOWN)
        inside = n < num_queries
        i = n + place
        rate = _scale(S0, number0, ss0, h, line, n, inside, MODE0, LOG0) * LOG2E
        _skip(0, begin, done, full, fuller, empty, STAGES)
        mbarrier.wait(ready.index(own), turn & 1)
        q = qs.index(own).load(gl.DotOperandLayout(0, SCORES, 2))
        t = _scores(done + begin, q, q1, none, k0s, cols, full, SPREAD, STAGES)
        peak = gl.full([OWN], float("-inf"), gl.float32, DOWN)
        if STILL:
            # The score of a key at distance 0.
            x = qs.index(own).load(FEATURES).to(gl.float32)
            peak = 0.5 * gl.convert_layout(gl.sum(x * x, 1), DOWN) * rate
        fence_async_shared()
        mbarrier.arrive(free.index(own), count=1)
        masses = _within(none)
        acc = gl.zeros([OWN, V], gl.float32, SUMS)
        t = warpgroup_mma_wait(0, (t,))
        first_key = start + begin * BLOCK
        t = _shown(t, first_key, sure_start, sure_stop, i, b, seeing, FILTER, ACROSS)
        p, peak, masses, shrink = _formed(t, peak, rate, masses, DTYPE, MODE0, STILL, SUMS)
        for step in range(begin + 1, end):
            if not STILL:
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
            # Start the scores of these keys, and the sums of earlier keys, whose weights are known. Meanwhile the
            # weights of these keys are formed.
            t = _scores(done + step, q, q1, none, k0s, cols, full, SPREAD, STAGES)
            last = done + step - 1
            mbarrier.wait(fuller.index(last % STAGES), (last // STAGES) & 1)
            sums = warpgroup_mma(p, vs.index(last % STAGES), acc, is_async=True)
            t = warpgroup_mma_wait(1, (t,))
            first_key = start + step * BLOCK
            t = _shown(t, first_key, sure_start, sure_stop, i, b, seeing, FILTER, ACROSS)
            p, peak, masses, shrink = _formed(t, peak, rate, masses, DTYPE, MODE0, STILL, SUMS)
            acc = warpgroup_mma_wait(0, (sums,))
            mbarrier.arrive(empty.index(last % STAGES), count=1)
        last = done + end - 1
        mbarrier.wait(fuller.index(last % STAGES), (last // STAGES) & 1)
        if not STILL:
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        sums = warpgroup_mma(p, vs.index(last % STAGES), acc, is_async=True)
        # Meanwhile, prepare the next turn.
        mass = gl.convert_layout(gl.sum(masses, 1), DOWN)
        next_block, next_b, next_h, some = _tile(turn + 1, pairs, parts, num_heads)
        acc = warpgroup_mma_wait(0, (sums,))
        mbarrier.arrive(empty.index(last % STAGES), count=1)
        _skip(end, steps, done, full, fuller, empty, STAGES)
        # NaN if a sum is not finite.
        fine = gl.convert_layout(gl.sum(acc, 1) * 0.0, DOWN) == 0.0
        if STILL:
            fine = fine & (mass > 1e-30)
        if gl.min((fine | (n >= num_queries)).to(gl.int32), 0) == 0:
            again = (
                K0, K1, V_, S0, LENGTHS, IDS, outs, thin, once, skb0, skb1, svb, stride_ids, ss0, group0, group1, group_v,
                number0, num_queries, num_keys, first,
            )  # fmt: skip
            acc, mass, peak, count = _again(
                own, again, q, q1, low, b, h, line, come, E0, V, MODE0, LOG0, FILTER, SPREAD, SCORES, SUMS,
            )  # fmt: skip
            come += 2 * count
        out, lse = _finished(acc, mass, peak, SUMS)
        gl.store(LSE + line + n, lse, mask=inside)
        # The buffer is free once the previous output has been stored.
        tma.store_wait(0)
        barrier()
        outs.index(own).store(out.to(DTYPE))
        if HAS_LOW:
            lows.index(own).store(_taken(out, DTYPE).to(gl.int8))
        fence_async_shared()
        barrier()
        store(OUT, [b, h, low, 0], outs.index(own))
        if HAS_LOW:
            store(LOW, [b, h, low, 0], lows.index(own))
        done += steps
        turn += 1
        block, b, h = next_block, next_b, next_h
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_heads", "first", "seed", "pairs", "parts"])
def forward(
    Q0, K0, K1, V_, S0, LENGTHS, IDS, OUT, LOW, LSE,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, pairs, parts,
    E0: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr, FILTER: gl.constexpr,
    SIMPLE: gl.constexpr, HAS_LOW: gl.constexpr, SPREAD: gl.constexpr, STILL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out and log_mass of two times 64 queries of one head, then of other queries.

    Each of `parts` heads has `pairs` pairs of blocks of 128 queries; the last block may be empty.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = Q0.dtype
    qs = gl.allocate_shared_memory(DTYPE, [2, OWN, E0], HALF)
    k0s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E0], HALF)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], HALF)
    outs = gl.allocate_shared_memory(DTYPE, [2, OWN, V], HALF)
    cols, thin, lows = k0s, k0s, outs
    if SPREAD:
        cols = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, COLUMNS], SLIM)
        thin = gl.allocate_shared_memory(DTYPE, [2, BLOCK, COLUMNS], SLIM)
    if HAS_LOW:
        lows = gl.allocate_shared_memory(gl.int8, [2, OWN, V], gl.NVMMASharedLayout(V, 8))
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    once = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    fuller = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for own in gl.static_range(2):
        mbarrier.init(ready.index(own), count=1)
        mbarrier.init(free.index(own), count=1)
        mbarrier.init(once.index(own), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(fuller.index(s), count=1)
        # Both groups must release the buffer.
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    copy = (
        Q0, K0, K1, V_, LENGTHS, qs, k0s, cols, vs, ready, free, full, fuller, empty, sqb0, skb0, skb1, svb, group0,
        group1, group_v, pairs, parts, num_heads, num_queries, num_keys, first,
    )  # fmt: skip
    multiply = (
        K0, K1, V_, S0, LENGTHS, IDS, OUT, LOW, LSE, qs, k0s, cols, vs, outs, lows, thin, ready, free, full, fuller, empty,
        once, skb0, skb1, svb, stride_ids, ss0, group0, group1, group_v, number0, pairs, parts, num_heads, num_queries,
        num_keys, first,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_copy, (copy, E0, V, FILTER, SPREAD, STAGES)),
            (_multiply, (0, multiply, E0, V, MODE0, LOG0, FILTER, SIMPLE, HAS_LOW, SPREAD, STILL, STAGES)),
            (_multiply, (1, multiply, E0, V, MODE0, LOG0, FILTER, SIMPLE, HAS_LOW, SPREAD, STILL, STAGES)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip
