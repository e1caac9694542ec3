"""The warp group that copies: keys and values of a ticket, then block after block of queries."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...kernels.primitives import _columns
from .primitives import BLOCK, NOTE, OWN, _along, _batch, barrier, load
from .tickets import _tell

# Numbers of a block of queries beside features: log_mass, each query's scale, and -delta unless it is
# a column of a product.
MASSES, SCALES, DELTAS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
FLAT = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))


@gluon.jit
def _per_key(C0, scb0, sch0, gc0, b, h, first_key, num_keys, LAYOUT: gl.constexpr):
    """Load the numbers of a group's keys."""
    j = first_key + gl.arange(0, OWN, LAYOUT)
    col = C0 + b.to(gl.int64) * scb0 + (h // gc0) * sch0
    return gl.load(col + j, mask=j < num_keys, other=0.0, cache_modifier=".cg")


@gluon.jit
def _beside(rows, s, WHAT: gl.constexpr, SIDES: gl.constexpr):
    """One number of each query of a block."""
    return rows.index(s * (2 if SIDES else 3) + WHAT)


@gluon.jit
def _rows_of(first, S0, LSE2, DELTA, line, num_queries, MODE0: gl.constexpr, SIDES: gl.constexpr):
    """Load the numbers of a block of queries, bypassing L1, which is for spilled registers."""
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
    MODE0: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr, SIDES: gl.constexpr,
):  # fmt: skip
    """Copy blocks of queries from begin to end; `done` blocks were copied for earlier keys."""
    SIZE: gl.constexpr = BLOCK * 2
    lse2, delta, scale = _rows_of(
        start + begin * BLOCK, S0, LSE2, DELTA, line, num_queries, MODE0, SIDES
    )
    for step in range(begin, end):
        s = (done + step) % STAGES
        first = start + step * BLOCK
        # The numbers of the next block are in flight meanwhile.
        following = _rows_of(first + BLOCK, S0, LSE2, DELTA, line, num_queries, MODE0, SIDES)
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
    SIDES: gl.constexpr, PART: gl.constexpr, LAID: gl.constexpr, SUM0: gl.constexpr,
):  # fmt: skip
    """The group that copies: keys and values, then block after block of queries."""
    (
        Q0, K0, Q1, K1, V_, TILES, GRAD, S0, C0, LSE2, DELTA, LENGTHS, COUNTERS, k0s, k1s, vs, along, q0s, q1s, gs,
        biases, rows, sides, ready, free, full, empty, tickets, told, sqb0, sqb1, skb0, skb1, svb, stb, ss0, scb0, sch0, gc0, group0,
        group1, group_v, blocks, parts, last, offset, num_heads, num_queries, num_keys, first,
    ) = inputs  # fmt: skip
    done, turn = 0, 0
    about = (
        COUNTERS + offset + (1 if PART == 2 else 0), tickets, told, blocks, parts, last, offset, num_heads,
        num_queries, num_keys, first, LENGTHS, S0, C0, ss0, scb0, sch0, gc0,
    )  # fmt: skip
    ticket, low, b, h, start, steps = _tell(turn, about, FILTER, STORE, MODE0, SUM0)
    while ticket < blocks * parts:
        line = (b * num_heads + h).to(gl.int64) * num_queries
        b0, b1, bt = _batch(sqb0, b), _batch(sqb1, b), _batch(stb, b)
        bk0, bk1, bv = _batch(skb0, b), _batch(skb1, b), _batch(svb, b)
        # Keys wait until the groups have released the previous keys; the first queries need not wait.
        early = 0
        if BUFFERS == 1:
            early = gl.where(turn == 0, 0, gl.minimum(steps, STAGES))
            _copy_steps(
                0, early, done, Q0, Q1, GRAD, TILES, S0, LSE2, DELTA, q0s, q1s, gs, biases, rows, sides, full, empty,
                b0, b1, bt, b, h, line, start, low, num_queries, E0, E1, V, MODE0, STAGES, BANDED, SIDES,
            )  # fmt: skip
        for own in gl.static_range(2):
            at = (turn % BUFFERS) * 2 + own
            key = low + own * OWN
            if LAID:
                c = _per_key(C0, scb0, sch0, gc0, b, h, key, num_keys, NOTE)
            mbarrier.wait(free.index(at), ((turn // BUFFERS) & 1) ^ 1)
            mbarrier.expect(ready.index(at), OWN * 2 * (E0 + E1 + V))
            load(K0, [bk0, h // group0, key, 0], ready.index(at), k0s.index(at))
            if E1 > 0:
                load(K1, [bk1, h // group1, key, 0], ready.index(at), k1s.index(at))
            load(V_, [bv, h // group_v, key, 0], ready.index(at), vs.index(at))
            if LAID:
                along.index(at).store(c)
                mbarrier.arrive(ready.index(at), count=1)
        # Not before the keys, which the other groups wait for.
        following = _tell(turn + 1, about, FILTER, STORE, MODE0, SUM0)
        _copy_steps(
            early, steps, done, Q0, Q1, GRAD, TILES, S0, LSE2, DELTA, q0s, q1s, gs, biases, rows, sides, full, empty,
            b0, b1, bt, b, h, line, start, low, num_queries, E0, E1, V, MODE0, STAGES, BANDED, SIDES,
        )  # fmt: skip
        done += steps
        turn += 1
        ticket, low, b, h, start, steps = following
