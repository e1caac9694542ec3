"""The forward for Hopper, for one dot product of up to 64 features and values, without links and tables.

The same sums as `triton_kernels.forward`. Its four warps ask the copy engine for all of a block of keys at
once, wait once for all of its products, and add up masses within threads until the end: what Triton's
compiler makes of the same loop waits four times.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...kernels.primitives import COLUMNS, LN2, LOG2E, _bits_beyond, _finite, _taken
from ...kernels.scores import _down, _scale
from ...kernels.visibility import _key_range, _keys_seen, _visible
from .dq_fixed_point import _most
from .primitives import BLOCK, OWN, _batch, _ones, _within, barrier, load, store


@gluon.jit
def _expect(s, fulls, E0: gl.constexpr, V: gl.constexpr, SPREAD: gl.constexpr):
    """Says how much will be copied. Each kind has barriers of its own: less for the compiler to keep apart."""
    of_keys, of_columns, of_values = fulls
    mbarrier.expect(of_keys.index(s), 2 * BLOCK * E0)
    if SPREAD:
        mbarrier.expect(of_columns.index(s), 2 * BLOCK * COLUMNS)
    mbarrier.expect(of_values.index(s), 2 * BLOCK * V)


@gluon.jit
def _copy(at, s, sources, targets, fulls, batches, heads, SPREAD: gl.constexpr):
    """Has a block of keys copied, their numbers as columns, and their values."""
    for kind in gl.static_range(3):
        if kind != 1 or SPREAD:
            place = [batches[kind], heads[kind], at, 0]
            load(sources[kind], place, fulls[kind].index(s), targets[kind].index(s))


@gluon.jit
def _weights(t, peak, rate, MODE0: gl.constexpr, STILL: gl.constexpr):
    """Weights of scores, the peak that they count from, and how far that moved. STILL: it does not."""
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
    """What queries have beside columns of keys."""
    THIN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.convert_layout(_ones(THIN).to(DTYPE), gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def _seen(i, first_key, b, seeing, FILTER: gl.constexpr, ACROSS: gl.constexpr):
    """Which keys of a block queries at places i see."""
    LENGTHS, IDS, stride_ids, num_keys, first = seeing
    j = first_key + gl.arange(0, BLOCK, ACROSS)
    return _visible(i[:, None], j[None, :], b, first, LENGTHS, IDS, stride_ids, num_keys, FILTER)


@gluon.jit
def _seen_along(
    i, first_key, b, seeing, FILTER: gl.constexpr, STRETCH: gl.constexpr, ACROSS: gl.constexpr
):
    """The same where each query sees one stretch of keys: an addition and a comparison for each pair.

    Of numbers without a sign, since keys of a thread are the same but for multiples of 8.
    """
    LENGTHS, _, _, num_keys, first = seeing
    start, stop = _keys_seen(i, b, first, LENGTHS, num_keys, FILTER, STRETCH)
    none = (start >= stop) | (STRETCH[1] < 0)
    after = gl.where(none, -BLOCK, first_key - start)
    last = gl.where(none, 0, stop - 1 - start)
    n = gl.arange(0, BLOCK, ACROSS)
    away = after[:, None] + (n % 8)[None, :] + (n // 8 * 8)[None, :]
    return away.to(gl.uint32, bitcast=True) <= last.to(gl.uint32, bitcast=True)[:, None]


@gluon.jit
def _shown(
    t, first_key, sure_start, sure_stop, i, b, seeing, FILTER: gl.constexpr, STRETCH: gl.constexpr,
    ACROSS: gl.constexpr,
):  # fmt: skip
    """Scores of keys that are seen; between two places all see all."""
    if (first_key < sure_start) | (first_key + BLOCK > sure_stop):
        if len(STRETCH) > 0:
            seen = _seen_along(i, first_key, b, seeing, FILTER, STRETCH, ACROSS)
        else:
            seen = _seen(i, first_key, b, seeing, FILTER, ACROSS)
        t = gl.where(seen, t, float("-inf"))
    return t


@gluon.jit
def _careful(
    t, values, acc, mass, peak, rate, i, first_key, b, seeing, MODE0: gl.constexpr, FILTER: gl.constexpr,
    SUMS: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """Sums and masses with those of one more block, of which values may not be finite."""
    # One that is not must not meet a weight of zero: 0 times NaN is NaN.
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


@gluon.constexpr_function
def _byte(dtype):
    """What forms one byte from each of four numbers: of bits of float32, or of numbers that fit in one."""
    if _bits_beyond(dtype) < 8:
        return "prmt.b32 a, $1, $2, 0x0040; prmt.b32 c, $3, $4, 0x0040;"
    # As `_taken` has it, with two numbers rounded at once.
    code = "cvt.rn.bf16x2.f32 a, $2, $1; cvt.rn.bf16x2.f32 c, $4, $3;"
    code += (
        "and.b32 b, a, 0xffff0000; shl.b32 a, a, 16; and.b32 d, c, 0xffff0000; shl.b32 c, c, 16;"
    )
    for near, number in zip("abcd", ("$1", "$2", "$3", "$4"), strict=True):
        code += f"sub.s32 {near}, {number}, {near}; add.s32 {near}, {near}, 128;"
        code += f"min.s32 {near}, {near}, 32767;"
    return code + "prmt.b32 a, a, b, 0x0051; prmt.b32 c, c, d, 0x0051;"


@gluon.constexpr_function
def _word(dtype):
    """What forms words of four bytes, half of them from a neighbour."""
    end = "prmt.b32 a, a, c, 0x5410; shfl.sync.bfly.b32 c, a, 1, 31, -1; prmt.b32 $0, a, c, $5;"
    return "{ .reg .b32 a, b, c, d; " + _byte(dtype) + end + " }"


@gluon.jit
def _lay_low(low, out, DTYPE: gl.constexpr):
    """Lays down what rounding takes from out, by words of four bytes.

    Of every eight numbers of a row a thread has two, which follow each other, and its neighbour the next two.
    They swap, so that of sixteen numbers one has four from the first eight, and the other four from the
    others: four threads have words 0, 2, 1, 3 of four.
    """
    ROWS: gl.constexpr = out.shape[0]
    WIDTH: gl.constexpr = out.shape[1]
    x = _taken(out, DTYPE) if _bits_beyond(DTYPE) < 8 else out.to(gl.int32, bitcast=True)
    even, odd = gl.split(x.reshape([ROWS, WIDTH // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, x0.type.layout)))
    halves = gl.where(lane % 2 == 0, 0x5410, 0x3276)[None, None, :]
    CODE: gl.constexpr = _word(DTYPE)
    words = gl.inline_asm_elementwise(
        CODE, "=r,r,r,r,r,r", [x0, x1, x2, x3, halves], gl.int32, False, 1
    )
    words = words.reshape([ROWS, WIDTH // 16, 2, 2]).permute((0, 1, 3, 2))
    WORDS: gl.constexpr = gl.NVMMASharedLayout(WIDTH, 32)
    low._reinterpret(gl.int32, [ROWS, WIDTH // 4], WORDS).store(words.reshape([ROWS, WIDTH // 4]))


@gluon.jit(do_not_specialize=["num_heads", "first", "seed"])
def forward(
    Q0, K0, K1, V_, S0, LENGTHS, IDS, OUT, LOW, LSE, TOPS,
    sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout,
    E0: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr, FILTER: gl.constexpr,
    SIMPLE: gl.constexpr, HAS_LOW: gl.constexpr, SPREAD: gl.constexpr, STILL: gl.constexpr, STAGES: gl.constexpr,
    HAS_TOPS: gl.constexpr,
):  # fmt: skip
    """out and log_mass of 64 queries of one head.

    K1: numbers per key as columns, where SPREAD. STILL: no weight is above that of no distance. Values are
    taken to be finite, and with STILL weights of a row not to vanish all; a block where not is done again.
    HAS_TOPS: the last keys that are seen are those at the queries' places. How large their values are is for
    `before_sums`.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = Q0.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    FEATURES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E0, 16])
    DOWN: gl.constexpr = gl.SliceLayout(1, SCORES)
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    bh = gl.program_id(1)
    b, h = bh // num_heads, bh % num_heads
    # Late blocks of a causal filter have the most to do: they start first.
    block = gl.num_programs(0) - 1 - gl.program_id(0)
    place = num_keys - num_queries
    low = block * OWN + place
    high = gl.minimum(block * OWN + OWN, num_queries) - 1 + place
    start, stop, sure_start, sure_stop = _key_range(low, high, b, first, LENGTHS, num_keys, FILTER)
    start = gl.maximum(start, 0) // BLOCK * BLOCK
    stop = gl.maximum(stop, start)
    steps = (stop - start + BLOCK - 1) // BLOCK
    if not SIMPLE:
        sure_start = stop
    k0s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E0], HALF)
    vs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], HALF)
    cols = k0s
    if SPREAD:
        cols = gl.allocate_shared_memory(
            DTYPE, [STAGES, BLOCK, COLUMNS], gl.NVMMASharedLayout(32, 16)
        )
    full0 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full1 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    full2 = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER).index(0)
    mbarrier.init(ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full0.index(stage), count=1)
        mbarrier.init(full1.index(stage), count=1)
        mbarrier.init(full2.index(stage), count=1)
    fence_async_shared()
    barrier()
    # Queries come where the last of the first values will, and leave for registers.
    q0 = vs.index(STAGES - 1)
    mbarrier.expect(ready, 2 * OWN * E0)
    load(Q0, [_batch(sqb0, b), h, block * OWN, 0], ready, q0)
    sources, targets, fulls = (K0, K1, V_), (k0s, cols, vs), (full0, full1, full2)
    batches = _batch(skb0, b), _batch(skb1, b), _batch(svb, b)
    heads = h // group0, h // group1, h // group_v
    for stage in gl.static_range(STAGES - 1):
        if stage < steps:
            _expect(stage, fulls, E0, V, SPREAD)
            _copy(start + stage * BLOCK, stage, sources, targets, fulls, batches, heads, SPREAD)
    n = block * OWN + gl.arange(0, OWN, DOWN)
    inside = n < num_queries
    i = n + place
    line = bh.to(gl.int64) * num_queries
    scale0 = _scale(S0, number0, ss0, h, line, n, inside, MODE0, LOG0)
    rate = scale0 * LOG2E
    q1 = cols
    if SPREAD:
        q1 = _beside(DTYPE, SCORES)
    mbarrier.wait(ready, 0)
    peak = gl.full([OWN], float("-inf"), gl.float32, DOWN)
    if STILL:
        # Of a key at no distance.
        x = q0.load(FEATURES).to(gl.float32)
        peak = 0.5 * gl.convert_layout(gl.sum(x * x, 1), DOWN) * rate
    q = q0.load(gl.DotOperandLayout(0, SCORES, 2))
    fence_async_shared()
    barrier()
    none = gl.zeros([OWN, BLOCK], gl.float32, SCORES)
    masses = _within(none)
    seeing = LENGTHS, IDS, stride_ids, num_keys, first
    acc = warpgroup_mma_init(gl.zeros([OWN, V], gl.float32, SUMS))
    for step in range(steps):
        s = step % STAGES
        first_key = start + step * BLOCK
        phase = (step // STAGES) & 1
        mbarrier.wait(full0.index(s), phase)
        t = warpgroup_mma(q, k0s.index(s).permute((1, 0)), none, use_acc=False, is_async=True)
        if SPREAD:
            mbarrier.wait(full1.index(s), phase)
            t = warpgroup_mma(q1, cols.index(s).permute((1, 0)), t, is_async=True)
        t, done = warpgroup_mma_wait(0, (t, acc))
        ahead = step - 1 + STAGES
        if ahead < steps:
            _expect(ahead % STAGES, fulls, E0, V, SPREAD)
        # Now all are done with the block before.
        barrier()
        if ahead < steps:
            _copy(
                start + ahead * BLOCK, ahead % STAGES, sources, targets, fulls, batches, heads, SPREAD
            )  # fmt: skip
        t = _shown(t, first_key, sure_start, sure_stop, i, b, seeing, FILTER, (), ACROSS)
        p, peak, shrink = _weights(t, peak, rate, MODE0, STILL)
        if not STILL:
            THREADS: gl.constexpr = gl.SliceLayout(1, masses.type.layout)
            masses = masses * gl.convert_layout(shrink, THREADS)[:, None]
            done = done * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]
        masses += _within(p)
        mbarrier.wait(full2.index(s), phase)
        acc = warpgroup_mma(
            gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMS, 2)), vs.index(s),
            warpgroup_mma_init(done), is_async=True,
        )  # fmt: skip
    acc = warpgroup_mma_wait(0, (acc,))
    mass = gl.convert_layout(gl.sum(masses, 1), DOWN)
    # NaN where a sum is not finite.
    fine = gl.convert_layout(gl.sum(acc * 0.0, 1), DOWN) == 0.0
    if STILL:
        fine = fine & (mass > 1e-30)
    if gl.min((fine | (n >= num_queries)).to(gl.int32), 0) == 0:
        acc = gl.zeros([OWN, V], gl.float32, SUMS)
        mass = gl.zeros([OWN], gl.float32, DOWN)
        peak = gl.full([OWN], float("-inf"), gl.float32, DOWN)
        # All of the first stage's copies have come; these go on with its barrier.
        come = (steps + STAGES - 1) // STAGES
        for step in range(steps):
            barrier()
            _expect(0, fulls, E0, V, SPREAD)
            barrier()
            _copy(start + step * BLOCK, 0, sources, targets, fulls, batches, heads, SPREAD)
            for kind in gl.static_range(3):
                if kind != 1 or SPREAD:
                    mbarrier.wait(fulls[kind].index(0), (come + step) & 1)
            t = warpgroup_mma(q, k0s.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
            if SPREAD:
                t = warpgroup_mma(q1, cols.index(0).permute((1, 0)), t, is_async=True)
            t = warpgroup_mma_wait(0, (t,))
            acc, mass, peak = _careful(
                t, vs.index(0), acc, mass, peak, rate, i, start + step * BLOCK, b, seeing, MODE0, FILTER, SUMS, ACROSS,
            )  # fmt: skip
            fence_async_shared()
    if HAS_TOPS:
        x = vs.index((steps - 1) % STAGES).load(SUMS).to(gl.float32)
        squares = gl.sum(x * x, 1)
        gl.store(TOPS + bh * gl.num_programs(0) + block, _most(squares, squares >= 0.0, 0.0))
    out, lse = _finished(acc, mass, peak, SUMS)
    gl.store(LSE + line + n, lse, mask=inside)
    # What was copied in leaves room for what is copied out.
    barrier()
    vs.index(0).store(out.to(DTYPE))
    low = vs.index(1)
    if HAS_LOW:
        low = low._reinterpret(gl.int8, [OWN, V], gl.NVMMASharedLayout(V, 8))
        _lay_low(low, out, DTYPE)
    fence_async_shared()
    barrier()
    store(OUT, [b, h, block * OWN, 0], vs.index(0))
    if HAS_LOW:
        store(LOW, [b, h, block * OWN, 0], low)
    tma.store_wait(0)
