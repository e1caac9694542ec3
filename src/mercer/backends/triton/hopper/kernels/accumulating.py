"""The warp group that adds to dq in fixed point, so the bits do not depend on the order.

dq_fixed_point.py has the kernels before and after, and explains how the fixed point is chosen.
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

from ...kernels.gradients import _counted
from ...kernels.primitives import COLUMNS, _finite
from .dq_fixed_point import _blocks, _bound, _fixed, _reference_within
from .primitives import BLOCK, OWN, _along, _skip, add, barrier
from .tickets import _hear

# Buffers: blocks of pairs from each multiplying group to this one, and blocks of sums on the way to
# memory.
SLOTS = gl.constexpr(3)
LEAVING = gl.constexpr(2)


@gluon.jit
def _give(found, step, own, pairs, given, taken):
    """Pass pairs to the group that sums dq."""
    slot = step % SLOTS
    mbarrier.wait(taken.index(slot), ((step // SLOTS) & 1) ^ 1)
    pairs.index(own * SLOTS + slot).store(found)
    fence_async_shared()
    barrier()
    mbarrier.arrive(given.index(own * SLOTS + slot), count=1)


@gluon.jit
def _give_none(
    begin, end, done, full, empty, own, pairs, given, taken, STAGES: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Signal that there are no pairs: these blocks of queries see none of the group's keys."""
    for step in range(begin, end):
        _skip(step, step + 1, done, full, empty, STAGES)
        none = gl.zeros([OWN, BLOCK], pairs.dtype, SCORES)
        _give(none, done + step, own, pairs, given, taken)


@gluon.jit
def _most(base, count):
    """The largest of some numbers, and the largest of as many after them."""
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
    """Round to the nearest integers."""
    return gl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], gl.int32, True, 1)


@gluon.jit
def _add(step, inputs, E0: gl.constexpr, EACH: gl.constexpr):
    """Add the contribution of a program's keys to the sums of one block of queries."""
    (
        DQ, bounds, shares, counted, turned, pairs, cols, sums, given, taken, most_k, most_v, query_blocks,
        done, turn, b, h, start,
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
    barrier()
    add(DQ, [b, h, 0, start + step * BLOCK], target)


@gluon.jit
def _sum(inputs, E0: gl.constexpr, BUFFERS: gl.constexpr, EACH: gl.constexpr):
    """The group that adds to dq in fixed point, so the bits do not depend on the order.

    EACH: it also adds to SHARES, the key part of the gradients of query scales: sum_j u_ij (c_j - ref).
    """
    (
        DQ, BOUNDS, MOST, SHARES, C0, k0s, cols, turned, pairs, sums, ready, given, taken, used, tickets, told,
        scb0, sch0, gc0, blocks, parts, num_heads, num_queries, num_keys,
    ) = inputs  # fmt: skip
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    FEATURES: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    done, turn = 0, 0
    key_blocks, query_blocks = _blocks(num_keys), _blocks(num_queries)
    ticket, _, _, b, h, start, steps = _hear(turn, tickets, told)
    while ticket < blocks * parts:
        bh = (b * num_heads + h).to(gl.int64)
        bounds = BOUNDS + bh * 2 * query_blocks + start // BLOCK
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
        # Products read them faster transposed.
        for own in gl.static_range(2):
            turned.index(own).store(_finite(k0s.index(at + own).permute((1, 0)).load(FEATURES)))
        fence_async_shared()
        barrier()
        mbarrier.arrive(used.index(turn % BUFFERS), count=1)
        inner = (
            DQ, bounds, shares, counted, turned, pairs, cols, sums, given, taken, most_k, most_v, query_blocks,
            done, turn, b, h, start,
        )  # fmt: skip
        for step in range(steps):
            _add(step, inner, E0, EACH)
        done += steps
        turn += 1
        ticket, _, _, b, h, start, steps = _hear(turn, tickets, told)
    tma.store_wait(0)
