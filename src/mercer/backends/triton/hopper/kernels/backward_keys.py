"""The pass over keys for Hopper: one warp group copies, two multiply, and a fourth may sum dq.

The same sums as the portable `backward_keys`, for dot products without links, and with no table or one of all
pairs. Each of the two groups owns 64 keys and runs at its own pace, so one computes weights while the other
multiplies. The copying group prefetches blocks of queries. If registers suffice, a fourth group reads the
scores of both and adds the contribution of these keys to dq. Then no pass over queries is needed. Triton's
compiler does not specialise warps like this, so the kernel is written in Gluon.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...kernels.primitives import COLUMNS
from .accumulating import LEAVING, SLOTS, _sum
from .copying import FLAT, _copy
from .multiplying import _multiply
from .primitives import BLOCK, OWN, REGISTERS, _ones
from .tickets import TICKETS

# Registers per thread with a group that sums dq: of the multiplying groups, and of that group.
LESS_REGISTERS = gl.constexpr(208)
SUM_REGISTERS = gl.constexpr(72)


@gluon.jit(do_not_specialize=["num_heads", "first", "seed", "blocks", "parts", "last", "offset"])
def backward_keys(
    Q0, K0, Q1, K1, V_, TILES, S0, C0, LENGTHS, IDS, GRAD, LSE2, DELTA, PAIRS, DK0, DK1, DV, DC0,
    BOUNDS, MOST, SHARES, COUNTERS, DS0, sqb0, sqh0, sqt0, skb0, skh0, skt0, sqb1, sqh1, sqt1, skb1, skh1, skt1, svb, svh, svt,
    scb0, sch0, scb1, sch1, stride_ids, ss0, ss1, stb, sth, width,
    num_heads, group0, group1, group_v, gc0, gc1, num_queries, num_keys, first, e0, e1, dv,
    seed, number0, number1, dropout, blocks, parts, last, offset,
    E0: gl.constexpr, E1: gl.constexpr, V: gl.constexpr, MODE0: gl.constexpr, LOG0: gl.constexpr,
    HAS_COL0: gl.constexpr, FILTER: gl.constexpr, SIMPLE: gl.constexpr, NORM0: gl.constexpr,
    WANT0: gl.constexpr, SAVE_COL0: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, STORE: gl.constexpr, SUMMED: gl.constexpr, BANDED: gl.constexpr,
    HELD: gl.constexpr, SIDES: gl.constexpr, BY_KEYS: gl.constexpr,
):  # fmt: skip
    """dk, dv and dcol of two times 64 keys, for one query head; PART as in the portable kernel.

    STORE: the gradients of scores are stored, [keys, queries], for the heads from `offset` on, with queries
    counted from the first block that sees a program's keys. The reader takes two blocks of queries at a
    time, so pairs that one of them sees are stored for both. BANDED: a band has all pairs, [queries, keys],
    and the stored pairs have its layout.
    SUMMED: dq is summed in PAIRS, [features, queries], which starts at 0.
    BY_KEYS: the query part of the gradient of a head's scale is computed from keys, which gives the same.
    A finished program draws the ticket of the next keys. COUNTERS, initially 0, counts the tickets drawn,
    at `offset`, and at `offset` + 1 for a second pass, of the second slot.
    """
    HALF: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = Q0.dtype
    GROUPS: gl.constexpr = 2 * BUFFERS
    # Numbers per key are loaded beside the keys, unless they are columns of products.
    LAID: gl.constexpr = HAS_COL0 and not SIDES
    # Keys contribute to the gradient of a head's scale.
    SUM0: gl.constexpr = WANT0 and HAS_COL0 and MODE0 == 1
    k0s = gl.allocate_shared_memory(DTYPE, [GROUPS, OWN, E0], HALF)
    vs = gl.allocate_shared_memory(DTYPE, [GROUPS, OWN, V], HALF)
    q0s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E0], HALF)
    gs = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, V], HALF)
    k1s, q1s = k0s, q0s
    if E1 > 0:
        k1s = gl.allocate_shared_memory(DTYPE, [GROUPS, OWN, E1], HALF)
        q1s = gl.allocate_shared_memory(DTYPE, [STAGES, BLOCK, E1], HALF)
    pairs = k0s
    if STORE:
        pairs = gl.allocate_shared_memory(DTYPE, [2, OWN, BLOCK], HALF)
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
        # Keys, and the numbers beside them.
        mbarrier.init(ready.index(s), count=2 if LAID else 1)
        mbarrier.init(free.index(s), count=1)
    for s in gl.static_range(STAGES):
        # The copy, and the numbers beside it; both groups must release the buffer.
        mbarrier.init(full.index(s), count=2)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    multiply = (
        DK0, DK1, DV, C0, DC0, DS0, LENGTHS, IDS, PAIRS, k0s, k1s, vs, along, q0s, q1s, gs, pairs, biases, rows,
        cols, ones, sides, ready, free, full, empty, given, taken, used, tickets, told, number0, scb0, sch0, gc0, stride_ids,
        blocks, parts, num_heads, num_queries, num_keys, first,
    )  # fmt: skip
    copy = (
        Q0, K0, Q1, K1, V_, TILES, GRAD, S0, C0, LSE2, DELTA, LENGTHS, COUNTERS, k0s, k1s, vs, along, q0s, q1s, gs, biases, rows, sides, ready, free, full, empty, tickets, told, sqb0, sqb1, skb0, skb1, svb, stb, ss0, scb0, sch0, gc0, group0,
        group1, group_v, blocks, parts, last, offset, num_heads, num_queries, num_keys, first,
    )  # fmt: skip
    summed = (
        PAIRS, BOUNDS, MOST, SHARES, C0, k0s, cols, turned, pairs, sums, ready, given, taken, used, tickets, told,
        scb0, sch0, gc0, blocks, parts, num_heads, num_queries, num_keys,
    )  # fmt: skip
    if SUMMED:
        gl.warp_specialize(
            [
                (_copy, (copy, E0, E1, V, MODE0, FILTER, STAGES, BUFFERS, STORE, BANDED, SIDES, PART, LAID, SUM0)),
                (_multiply, (
                    0, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0,
                )),
                (_multiply, (
                    1, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0,
                )),
                (_sum, (summed, E0, BUFFERS, MODE0 == 2 and WANT0)),
            ],
            [4, 4, 4],
            [LESS_REGISTERS, LESS_REGISTERS, SUM_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_copy, (copy, E0, E1, V, MODE0, FILTER, STAGES, BUFFERS, STORE, BANDED, SIDES, PART, LAID, SUM0)),
                (_multiply, (
                    0, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0,
                )),
                (_multiply, (
                    1, multiply, E0, E1, V, MODE0, LOG0, HAS_COL0, FILTER, NORM0, WANT0, SAVE_COL0, PART, STAGES,
                    BUFFERS, STORE, SUMMED, BANDED, SIMPLE, HELD, SIDES, BY_KEYS, LAID, SUM0,
                )),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
