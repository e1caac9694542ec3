"""Tickets: which keys of which head a program works on next, drawn from a counter.

The copying group draws a ticket for each turn and writes a note about it to shared memory, which all groups
read. A finished program draws the next ticket, so all programs end at about the same time. This cannot
deadlock: a block waits only for blocks with earlier tickets.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...kernels.visibility import _query_blocks
from .dq_from_scores import TOGETHER
from .primitives import BLOCK, NOTE, OWN, barrier

# Notes in shared memory: when a ticket is drawn, all groups have read the note of three turns earlier.
TICKETS = gl.constexpr(4)
# Where a note has the numbers of its head: the scale, and the first number per key.
SCALE, REFERENCE = gl.constexpr(7), gl.constexpr(8)


@gluon.jit
def _tile(
    ticket, blocks, parts, last, offset, num_heads, num_queries, num_keys, first, LENGTHS,
    FILTER: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Which keys of which head a ticket is for, and the blocks of queries that may see them."""
    # Head by head, except for the last heads: there, first blocks go first, since most queries see them.
    rest = ticket - (parts - last) * blocks
    along, head = ticket % blocks, ticket // blocks
    block = gl.where(rest < 0, along, rest // last)
    part = gl.where(rest < 0, head, parts - last + rest % last)
    bh = part + offset
    low = block * (2 * OWN)
    ALIGN: gl.constexpr = TOGETHER if STORE else BLOCK
    start, stop = _query_blocks(
        low, bh // num_heads, first, LENGTHS, num_queries, num_keys, 2 * OWN, ALIGN, FILTER
    )
    return low, part, bh // num_heads, bh % num_heads, start, (stop - start) // BLOCK


@gluon.jit
def _tell(
    turn, about, FILTER: gl.constexpr, STORE: gl.constexpr, MODE0: gl.constexpr,
    SUM0: gl.constexpr,
):  # fmt: skip
    """Draw the ticket for a turn and write its note for all groups of this program."""
    (
        COUNTER, tickets, told, blocks, parts, last, offset, num_heads, num_queries, num_keys, first, LENGTHS,
        S0, C0, ss0, scb0, sch0, gc0,
    ) = about  # fmt: skip
    ticket = gl.atomic_add(COUNTER, 1, sem="relaxed", scope="gpu")
    low, part, b, h, start, steps = _tile(
        gl.minimum(ticket, blocks * parts - 1), blocks, parts, last, offset, num_heads,
        num_queries, num_keys, first, LENGTHS, FILTER, STORE,
    )  # fmt: skip
    n = gl.arange(0, 32, NOTE)
    note = gl.where(n == 0, ticket, gl.where(n == 1, low, gl.where(n == 2, part, b)))
    note = gl.where(n < 4, note, gl.where(n == 4, h, gl.where(n == 5, start, steps)))
    # Numbers of the head, as bits.
    if MODE0 == 1:
        scale = gl.load(S0 + h * ss0)
        note = gl.where(n == SCALE, scale.to(gl.int32, bitcast=True), note)
    if SUM0:
        ref = gl.load(C0 + b.to(gl.int64) * scb0 + (h // gc0) * sch0)
        note = gl.where(n == REFERENCE, ref.to(gl.int32, bitcast=True), note)
    tickets.index(turn % TICKETS).store(note)
    barrier()
    mbarrier.arrive(told.index(turn % TICKETS), count=1)
    return ticket, low, b, h, start, steps


@gluon.jit
def _hear(turn, tickets, told):
    """Read the ticket of a turn, and its `_tile`."""
    mbarrier.wait(told.index(turn % TICKETS), (turn // TICKETS) & 1)
    return _heard(turn, tickets)


@gluon.jit
def _heard(turn, tickets):
    """Read it again later, so that it takes no registers meanwhile."""
    note = tickets.index(turn % TICKETS).load(NOTE)
    ticket, low, part = _said(note, 0), _said(note, 1), _said(note, 2)
    b, h, start, steps = _said(note, 3), _said(note, 4), _said(note, 5), _said(note, 6)
    return ticket, low, part, b, h, start, steps


@gluon.jit
def _number(turn, tickets, WHICH: gl.constexpr):
    """One of the numbers of a ticket's head."""
    bits = _said(tickets.index(turn % TICKETS).load(NOTE), WHICH)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _said(note, n: gl.constexpr):
    """One of the numbers of a note."""
    return gl.sum(gl.where(gl.arange(0, 32, NOTE) == n, note, 0), 0)
