"""The pass over keys for Hopper, where warps have parts: one group copies, two multiply.

The same sums as `triton_backward.backward_keys`, for dot products without links and tables. Each of the
two groups owns 64 keys and goes at its own pace, so that one forms weights while the other multiplies;
the third keeps the queries of the next blocks coming. Triton's compiler does not share out work like
that, so this is written in Gluon, the language beneath it.
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

from .triton_backward import _reference
from .triton_kernels import LOG2E, _query_range, _scale, _visible

# As Triton 3.6 calls them, and as later ones do.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# Keys of a group, and queries of a block.
OWN = gl.constexpr(64)
BLOCK = gl.constexpr(64)
# What a block of queries needs beside features: log_mass, delta, and a scale of each query.
ROWS = gl.constexpr(3)
# Of a thread that multiplies, and of one that copies.
REGISTERS = gl.constexpr(240)
FEW_REGISTERS = gl.constexpr(24)


@gluon.jit
def _copy(
    Q0, K0, Q1, K1, V_, TILES, GRAD, S0, LSE2, DELTA, k0s, k1s, vs, q0s, q1s, gs, owned, biases, rows, ready,
    full, empty, b0, b1, bt, bk0, bk1, bv, b, h, h0, h1, hv, line, first_key, start, steps, num_queries,
    E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, STAGES: gl.constexpr,
    BANDED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """The group that copies: keys and values once, then block after block of queries."""
    SIZE: gl.constexpr = BLOCK * 2
    mbarrier.expect(ready, 2 * OWN * 2 * (E0 + E1 + V + (E0 if ADDS else 0)))
    for own in gl.static_range(2):
        load(K0, [bk0, h0, first_key + own * OWN, 0], ready, k0s.index(own))
        if ADDS:
            load(Q0, [b0, h, first_key + own * OWN, 0], ready, owned.index(own))
        if E1 > 0:
            load(K1, [bk1, h1, first_key + own * OWN, 0], ready, k1s.index(own))
        load(V_, [bv, hv, first_key + own * OWN, 0], ready, vs.index(own))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    for step in range(steps):
        s = step % STAGES
        first = start + step * BLOCK
        n = first + gl.arange(0, BLOCK, LAYOUT)
        inside = n < num_queries
        lse2 = gl.load(LSE2 + line + n, mask=inside, other=float("inf"))
        delta = gl.load(DELTA + line + n, mask=inside, other=0.0)
        if MODE0 == 2:
            scale = gl.load(S0 + line + n, mask=inside, other=0.0)
        mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), SIZE * (E0 + E1 + V + (2 * OWN if BANDED else 0)))
        load(Q0, [b0, h, first, 0], full.index(s), q0s.index(s))
        if E1 > 0:
            load(Q1, [b1, h, first, 0], full.index(s), q1s.index(s))
        load(GRAD, [b, h, first, 0], full.index(s), gs.index(s))
        if BANDED:
            for own in gl.static_range(2):
                at = [bt, h, first, first_key + own * OWN]
                load(TILES, at, full.index(s), biases.index(s * 2 + own))
        rows.index(s * ROWS).store(lse2)
        rows.index(s * ROWS + 1).store(delta)
        if MODE0 == 2:
            rows.index(s * ROWS + 2).store(scale)
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def _span(
    begin, end, dk0, dk1, dv, dc, k0, k1, v, c, factor, j, start, b, place, first, lengths, ids,
    stride_ids, num_keys, q0s, q1s, gs, rows, full, empty, PAIRS, pairs, biases, own, h, part, first_key,
    E0: gl.constexpr, E1: gl.constexpr, MODE0: gl.constexpr, HAS_COL0: gl.constexpr, DCOL0: gl.constexpr,
    FILTER: gl.constexpr, MASK: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, BANDED: gl.constexpr,
    SCORES: gl.constexpr, SUMS0: gl.constexpr, SUMS1: gl.constexpr, SUMSV: gl.constexpr,
):  # fmt: skip
    """The blocks of queries from begin to end; all pairs lie transposed, [keys, queries]."""
    DTYPE: gl.constexpr = q0s.dtype
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    for step in range(begin, end):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        none = gl.zeros([OWN, BLOCK], gl.float32, SCORES)
        t = warpgroup_mma(k0, q0s.index(s).permute((1, 0)), none, use_acc=False, is_async=True)
        if E1 > 0:
            t = warpgroup_mma(k1, q1s.index(s).permute((1, 0)), t, is_async=True)
        dp = warpgroup_mma(v, gs.index(s).permute((1, 0)), none, use_acc=False, is_async=True)
        t = warpgroup_mma_wait(1, (t,))
        lse2 = rows.index(s * ROWS).load(ACROSS)[None, :]
        if MODE0 == 2:
            scale = rows.index(s * ROWS + 2).load(ACROSS)[None, :]
            if HAS_COL0:
                t += c[:, None]
            e = t * (scale * LOG2E) - lse2
        elif HAS_COL0:
            e = t * factor + (c * factor)[:, None] - lse2
        else:
            e = t * factor - lse2
        if BANDED:
            e += biases.index(s * 2 + own).permute((1, 0)).load(SCORES).to(gl.float32)
        if MASK:
            i = start + step * BLOCK + place + gl.arange(0, BLOCK, ACROSS)
            seen = _visible(
                i[None, :], j[:, None], b, first, lengths, ids, stride_ids, num_keys, FILTER
            )
            e = gl.where(seen, e, float("-inf"))
        p = gl.exp2(e)
        dp = warpgroup_mma_wait(0, (dp,))
        if PART != 2:
            weights = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, SUMSV, 2))
            dv = warpgroup_mma(weights, gs.index(s), warpgroup_mma_init(dv), is_async=True)
        delta = rows.index(s * ROWS + 1).load(ACROSS)[None, :]
        g = dp - delta
        if MASK:
            g = gl.where(seen, g, 0.0)
        u = g * p
        found = u.to(DTYPE)
        if MODE0 == 2:
            u = u * scale
        if DCOL0 and PART != 2:
            dc += gl.sum(u, 1)
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
        if STORE:
            # While the products run.
            tma.store_wait(0)
            if BANDED:
                pairs.permute((1, 0)).store(found)
                at = [b, h, start + step * BLOCK, first_key]
            else:
                pairs.store(found)
                at = [0, part, first_key, start + step * BLOCK]
            fence_async_shared()
            barrier()
            store(PAIRS, at, pairs)
        dk0, dk1, dv = warpgroup_mma_wait(0, (dk0, dk1, dv))
        mbarrier.arrive(empty.index(s), count=1)
    return dk0, dk1, dv, dc


@gluon.jit
def _multiply(
    DK0, DK1, DV, C0, DC0, DS0, PULLS, k0, k1, v, owned, q0s, q1s, gs, rows, ready, full, empty, head0, ref0,
    LENGTHS, IDS, b, h, line_c, keys, sums, first_key, start, steps, sure_start, sure_stop,
    place, first, stride_ids, num_keys, PAIRS, pairs, biases, own, part,
    E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr,
    HAS_COL0: gl.constexpr, FILTER: gl.constexpr, NORM0: gl.constexpr, WANT0: gl.constexpr,
    SUM0: gl.constexpr, SAVE_COL0: gl.constexpr, PART: gl.constexpr,
    STAGES: gl.constexpr, STORE: gl.constexpr, BANDED: gl.constexpr, WHOLE: gl.constexpr,
    ADDS: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply, with its 64 keys."""
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
    j = first_key + gl.arange(0, OWN, DOWN)
    inside = j < num_keys
    c = gl.zeros([OWN], gl.float32, DOWN)
    if HAS_COL0:
        c = gl.load(C0 + line_c + j, mask=inside, other=0.0)
    factor = head0 * LOG2E
    dc = gl.zeros([OWN], gl.float32, DOWN)
    dk0 = gl.zeros([OWN, WIDE0], gl.float32, SUMS0)
    dk1 = gl.zeros([OWN, WIDE1], gl.float32, SUMS1)
    dv = gl.zeros([OWN, WIDEV], gl.float32, SUMSV)
    mbarrier.wait(ready, 0)
    for turn in gl.static_range(3):
        # In turn: masked, seen by all, masked.
        if turn == 0:
            begin, end = 0, sure_start
        elif turn == 1:
            begin, end = sure_start, sure_stop
        else:
            begin, end = sure_stop, steps
        if WHOLE or turn == 0:
            dk0, dk1, dv, dc = _span(
                begin, end, dk0, dk1, dv, dc, k0, k1, v, c, factor, j, start, b, place, first, LENGTHS,
                IDS, stride_ids, num_keys, q0s, q1s, gs, rows, full, empty, PAIRS, pairs, biases, own, h, part, first_key, E0, E1,
                MODE0, HAS_COL0, DCOL0, FILTER, turn != 1, PART, STAGES, STORE, BANDED, SCORES, SUMS0, SUMS1, SUMSV,
            )  # fmt: skip
    if PART != 2:
        if WANT0 and MODE0 == 1:
            share = (c - ref0) * dc if SUM0 else gl.zeros([OWN], gl.float32, DOWN)
            gl.store(DS0 + sums + j, share, mask=inside)
        if ADDS:
            pull = gl.load(PULLS + keys + j, mask=inside, other=0.0)
            pull = gl.convert_layout(pull, gl.SliceLayout(1, SUMS0))
            dk0 += pull[:, None] * owned.load(SUMS0).to(gl.float32)
        if MODE0 != 2:
            dk0 = dk0 * head0
            dc = dc * head0
        if NORM0:
            along = gl.convert_layout(dc, gl.SliceLayout(1, SUMS0))
            dk0 -= along[:, None] * k0.load(SUMS0).to(gl.float32)
        if SAVE_COL0:
            gl.store(DC0 + keys + j, dc, mask=inside)
        k0.store(dk0.to(k0.dtype))
        v.store(dv.to(v.dtype))
    if E1 > 0 and PART != 1:
        k1.store((dk1 * head0).to(k1.dtype))
    fence_async_shared()
    barrier()
    if PART != 2:
        store(DK0, [b, h, first_key, 0], k0)
        store(DV, [b, h, first_key, 0], v)
    if E1 > 0 and PART != 1:
        store(DK1, [b, h, first_key, 0], k1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_heads", "first", "seed", "offset"])
def backward_keys(
    Q0, K0, Q1, K1, V_, TILES, S0, C0, LENGTHS, IDS, GRAD, LSE2, DELTA, PAIRS, DK0, DK1, DV, DC0, DS0,
    PULLS, sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, offset,
    E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr,
    HAS_COL0: gl.constexpr, FILTER: gl.constexpr, SIMPLE: gl.constexpr, NORM0: gl.constexpr,
    WANT0: gl.constexpr, SAVE_COL0: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    STORE: gl.constexpr, BANDED: gl.constexpr, ADDS: gl.constexpr,
):  # fmt: skip
    """dk, dv and dcol of two times 64 keys, for one query head; PART as in `triton_backward`.

    STORE: what gradients of queries are made of is stored for all pairs, [keys, queries], of the heads
    from `offset` on. BANDED: a band has all pairs, [queries, keys], and so has what is stored.
    ADDS: the query at a key's own place adds its own, by PULLS.
    """
    part = gl.program_id(1)
    bh = part + offset
    b, h = bh // num_heads, bh % num_heads
    low = gl.program_id(0) * (2 * OWN)
    high = gl.minimum(low + 2 * OWN, num_keys) - 1
    place = num_keys - num_queries
    line = bh.to(gl.int64) * num_queries
    keys = bh.to(gl.int64) * num_keys
    start, stop, sure_start, sure_stop = _query_range(
        low, high, b, first, LENGTHS, place, num_queries, FILTER
    )
    # Blocks that are stored are read by two.
    ALIGN: gl.constexpr = 2 * BLOCK if STORE else BLOCK
    start = gl.maximum(start, 0) // ALIGN * ALIGN
    stop = gl.maximum((stop + ALIGN - 1) // ALIGN * ALIGN, start)
    steps = (stop - start + BLOCK - 1) // BLOCK
    if SIMPLE:
        sure_start = gl.minimum(gl.maximum((sure_start - start + BLOCK - 1) // BLOCK, 0), steps)
        sure_stop = gl.maximum(gl.minimum((sure_stop - start) // BLOCK, steps), sure_start)
        # The last keys are not whole blocks: they need their mask throughout.
        short = high - low < 2 * OWN - 1
        sure_start = gl.where(short, steps, sure_start)
        sure_stop = gl.where(short, steps, sure_stop)
    else:
        sure_start = steps
        sure_stop = steps
    SUM0: gl.constexpr = WANT0 and HAS_COL0 and MODE0 == 1
    line_c = b.to(gl.int64) * scb0 + (h // gc0) * sch0
    ref0 = _reference(C0 + line_c, SUM0)
    head0 = 1.0
    if MODE0 < 2:
        head0 = _scale(S0, number0, ss0, h, line, low, low < num_keys, MODE0, LOG0)
    HALF: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = Q0.dtype
    k0s = gl.allocate_shared_memory(DTYPE, [2, OWN, E0], HALF)
    vs = gl.allocate_shared_memory(DTYPE, [2, OWN, V], HALF)
    q0s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E0], HALF)
    gs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], HALF)
    k1s, q1s = k0s, q0s
    if E1 > 0:
        k1s = gl.allocate_shared_memory(DTYPE, [2, OWN, E1], HALF)
        q1s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E1], HALF)
    pairs = k0s
    if STORE:
        pairs = gl.allocate_shared_memory(DTYPE, [2, OWN, BLOCK], HALF)
    owned = k0s
    if ADDS:
        owned = gl.allocate_shared_memory(DTYPE, [2, OWN, E0], HALF)
    biases = k0s
    if BANDED:
        biases = gl.allocate_shared_memory(TILES.dtype, [STAGES * 2, BLOCK, OWN], HALF)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS, BLOCK], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(ready, count=1)
    for s in gl.static_range(STAGES):
        # The copy itself, and the numbers beside it; both groups have to let go.
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    bq0 = gl.where(sqb0 == 0, 0, b)
    bq1 = gl.where(sqb1 == 0, 0, b)
    bk0 = gl.where(skb0 == 0, 0, b)
    bk1 = gl.where(skb1 == 0, 0, b)
    bv = gl.where(svb == 0, 0, b)
    bt = gl.where(stb == 0, 0, b)
    sums = line + keys + num_queries
    gl.warp_specialize(
        [
            (_multiply, (
                DK0, DK1, DV, C0, DC0, DS0, PULLS, k0s.index(0), k1s.index(0), vs.index(0), owned.index(0),
                q0s, q1s, gs, rows,
                ready, full, empty, head0, ref0, LENGTHS, IDS, b, h, line_c, keys, sums, low,
                start, steps, sure_start, sure_stop, place, first, stride_ids, num_keys, PAIRS, pairs.index(0), biases, 0, part,
                E0, E1, V, MODE0, HAS_COL0, FILTER, NORM0, WANT0, SUM0, SAVE_COL0, PART, STAGES, STORE, BANDED, SIMPLE, ADDS,
            )),
            (_multiply, (
                DK0, DK1, DV, C0, DC0, DS0, PULLS, k0s.index(1), k1s.index(1), vs.index(1), owned.index(1),
                q0s, q1s, gs, rows,
                ready, full, empty, head0, ref0, LENGTHS, IDS, b, h, line_c, keys, sums, low + OWN,
                start, steps, sure_start, sure_stop, place, first, stride_ids, num_keys, PAIRS, pairs.index(1), biases, 1, part,
                E0, E1, V, MODE0, HAS_COL0, FILTER, NORM0, WANT0, SUM0, SAVE_COL0, PART, STAGES, STORE, BANDED, SIMPLE, ADDS,
            )),
            (_copy, (
                Q0, K0, Q1, K1, V_, TILES, GRAD, S0, LSE2, DELTA, k0s, k1s, vs, q0s, q1s, gs, owned, biases, rows,
                ready, full, empty, bq0, bq1, bt, bk0, bk1, bv, b, h, h // group0, h // group1, h // group_v, line, low,
                start, steps, num_queries, E0, E1, V, MODE0, STAGES, BANDED, ADDS,
            )),
        ],
        [4, 4],
        [REGISTERS, FEW_REGISTERS],
    )  # fmt: skip
