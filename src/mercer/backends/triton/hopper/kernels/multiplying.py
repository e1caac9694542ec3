"""The two warp groups that multiply, each with its own 64 keys and at its own pace."""

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

from ...kernels.primitives import COLUMNS, LOG2E, _columns, _finite
from ...kernels.scores import _grown
from ...kernels.visibility import _query_range, _visible
from .accumulating import _give, _give_none
from .copying import DELTAS, MASSES, SCALES, _beside, _per_key
from .primitives import BLOCK, OWN, _along, _skip, _within, barrier, store
from .tickets import REFERENCE, SCALE, _hear, _heard, _number

# A number per key that makes a weight 0, and is finite in float32 and bfloat16.
LOWEST = gl.constexpr(-3e38)


@gluon.jit
def _span(
    begin, end, done, dk0, dk1, dv, dc, k0, k1, v, c, factor, j, start, b, place, first, lengths, ids,
    stride_ids, num_keys, q0s, q1s, gs, rows, col, ones, sides, full, empty, PAIRS, all_pairs, given, taken, biases, own, h, part, first_key,
    E1: gl.constexpr, MODE0: gl.constexpr, HAS_COL0: gl.constexpr, DCOL0: gl.constexpr,
    FILTER: gl.constexpr, MASK: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, STORE: gl.constexpr, SUMMED: gl.constexpr, BANDED: gl.constexpr,
    SCORES: gl.constexpr, SUMS0: gl.constexpr, SUMS1: gl.constexpr, SUMSV: gl.constexpr, SIDES: gl.constexpr,
):  # fmt: skip
    """The blocks of queries from begin to end; all pairs are transposed, [keys, queries]."""
    DTYPE: gl.constexpr = q0s.dtype
    ACROSS: gl.constexpr = gl.SliceLayout(0, SCORES)
    for step in range(begin, end):
        s = (done + step) % STAGES
        mbarrier.wait(full.index(s), ((done + step) // STAGES) & 1)
        # The addends are the initial accumulators, or columns of the products.
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
        # Read before any wait, if there are registers for it.
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
        u = dp * p
        if MASK:
            # A weight of zero must hide values that are not finite.
            u = gl.where(p == 0.0, 0.0, u)
        found = u.to(DTYPE)
        if MODE0 == 2:
            u = u * scale
        exact = u
        u = u.to(DTYPE)
        if PART != 2:
            left = gl.convert_layout(u, gl.DotOperandLayout(0, SUMS0, 2))
            dk0 = warpgroup_mma(left, q0s.index(s), warpgroup_mma_init(dk0), is_async=True)
        if E1 > 0 and PART != 1:
            left = gl.convert_layout(u, gl.DotOperandLayout(0, SUMS1, 2))
            dk1 = warpgroup_mma(left, q1s.index(s), warpgroup_mma_init(dk1), is_async=True)
        if DCOL0 and PART != 2:
            dc += _within(exact)
        if SUMMED:
            _give(found, done + step, own, all_pairs, given, taken)
        if STORE:
            # While the products run.
            pairs = all_pairs.index(own)
            tma.store_wait(0)
            if BANDED:
                pairs.permute((1, 0)).store(found)
                at = [b, h, start + step * BLOCK, first_key]
            else:
                pairs.store(found)
                at = [0, part, first_key, step * BLOCK]
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
    STORE: gl.constexpr, SUMMED: gl.constexpr, BANDED: gl.constexpr, WHOLE: gl.constexpr, HELD: gl.constexpr,
    SIDES: gl.constexpr, BY_KEYS: gl.constexpr, LAID: gl.constexpr, SUM0: gl.constexpr,
):  # fmt: skip
    """One of the two groups that multiply, with its 64 keys."""
    (
        DK0, DK1, DV, C0, DC0, DS0, LENGTHS, IDS, PAIRS, k0s, k1s, vs, all_along, q0s, q1s, gs, all_pairs, biases, rows,
        cols, ones, sides, ready, free, full, empty, given, taken, used, tickets, told, number0, scb0, sch0, gc0,
        stride_ids, blocks, parts, num_heads, num_queries, num_keys, first,
    ) = inputs  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    # Sums that this part does not need are as narrow as possible.
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
    ticket, low, part, b, h, start, steps = _hear(turn, tickets, told)
    c = gl.zeros([OWN], gl.float32, DOWN)
    if HAS_COL0 and not LAID:
        c = _per_key(C0, scb0, sch0, gc0, b, h, low + own * OWN, num_keys, DOWN)
    while ticket < blocks * parts:
        at = (turn % BUFFERS) * 2 + own
        head0 = _of_head(turn, tickets, number0, MODE0, LOG0)
        first_key = low + own * OWN
        # The blocks that may see a key of this group, and those that see all of them.
        high = gl.minimum(first_key + OWN, num_keys) - 1
        begin, end, sure_start, sure_stop = _query_range(
            first_key, high, b, first, LENGTHS, place, num_queries, FILTER
        )
        begin = gl.minimum(gl.maximum(begin - start, 0) // BLOCK, steps)
        end = gl.minimum(gl.maximum(end - start + BLOCK - 1, 0) // BLOCK, steps)
        if STORE:
            # A reader takes several blocks of queries at a time.
            begin, end = 0, steps
        end = gl.maximum(end, begin)
        sure_start = gl.maximum(sure_start - start + BLOCK - 1, 0) // BLOCK
        sure_stop = gl.maximum(sure_stop - start, 0) // BLOCK
        if WHOLE:
            # The first block has its mask, needed or not: where the first loop below has nothing to do,
            # the ptxas of Triton 3.6 has the second read addresses that only the first has formed.
            sure_start = gl.minimum(gl.maximum(sure_start, begin + 1), end)
            sure_stop = gl.maximum(gl.minimum(sure_stop, end), sure_start)
            # The last keys are not a full block: all their blocks are masked.
            short = high - first_key < OWN - 1
            sure_start = gl.where(short, end, sure_start)
            sure_stop = gl.where(short, end, sure_stop)
        else:
            sure_start = end
            sure_stop = end
        k0, k1, v = k0s.index(at), k1s.index(at), vs.index(at)
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
            # Two buffers: the group that sums dq may be one turn behind.
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
            # The gradients of earlier keys have been stored by now.
            if turn > 0:
                tma.store_wait(0)
                barrier()
                mbarrier.arrive(free.index(2 - at + 2 * own), count=1)
        if SUMMED:
            _give_none(0, begin, done, full, empty, own, all_pairs, given, taken, STAGES, SCORES)
        elif not STORE:
            _skip(0, begin, done, full, empty, STAGES)
        # Three ranges: masked, fully visible, masked.
        bounds = (begin, sure_start, sure_stop, end)
        for span in gl.static_range(3):
            if WHOLE or span == 0:
                dk0, dk1, dv, dcs = _span(
                    bounds[span], bounds[span + 1], done, dk0, dk1, dv, dcs, a, a1, w, c, factor, j, start, b, place, first,
                    LENGTHS, IDS, stride_ids, num_keys, q0s, q1s, gs, rows, col, ones, sides, full, empty, PAIRS, all_pairs, given, taken,
                    biases, own, h, part, first_key, E1, MODE0, HAS_COL0, DCOL0, FILTER, span != 1, PART, STAGES,
                    STORE, SUMMED, BANDED, SCORES, SUMS0, SUMS1, SUMSV, SIDES,
                )  # fmt: skip
        if SUMMED:
            _give_none(end, steps, done, full, empty, own, all_pairs, given, taken, STAGES, SCORES)
        elif not STORE:
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
            # The numbers of the next keys are in flight while gradients of these are stored.
            c_next = _per_key(C0, scb0, sch0, gc0, b_next, h_next, low + own * OWN, num_keys, DOWN)
        if MODE0 == 1:
            head0 = _grown(_number(turn, tickets, SCALE), LOG0)
        dc = gl.convert_layout(gl.sum(dcs, 1), DOWN)
        if SUMMED:
            # The group that sums dq reads these keys, too.
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
    tma.store_wait(0)
