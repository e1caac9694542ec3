"""Code shared by the warp-specialised kernels for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ...kernels.primitives import COLUMNS
from ...kernels.visibility import _key_range

# Current names of Triton, or those of 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Adds a block of shared memory to one of memory by TMA. None in 3.6: see `eligible.can_add`.
add = getattr(tma, "async_atomic_add", None)

# Keys of a group and queries of a block, or the other way round.
OWN = gl.constexpr(64)
BLOCK = gl.constexpr(64)
# Registers of a multiplying thread.
REGISTERS = gl.constexpr(240)
# A number for each thread of a group, or for some.
NOTE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def _batch(stride, b):
    """The index of a batch; 0 if all batches share the tensor."""
    return gl.where(stride == 0, 0, b)


@gluon.jit
def _range(low, count, b, first, LENGTHS, num_queries, num_keys, FILTER: gl.constexpr):
    """Blocks of keys that some queries may see: the first, the number, and those fully visible."""
    place = num_keys - num_queries
    high = gl.minimum(low + count, num_queries) - 1 + place
    start, stop, sure_start, sure_stop = _key_range(
        low + place, high, b, first, LENGTHS, num_keys, FILTER
    )
    start = gl.maximum(start, 0) // BLOCK * BLOCK
    stop = gl.where(low < num_queries, gl.maximum(stop, start), start)
    return start, (stop - start + BLOCK - 1) // BLOCK, sure_start, sure_stop


@gluon.jit
def _skip(begin, end, done, full, empty, STAGES: gl.constexpr):
    """Release blocks that a group does not use."""
    for step in range(begin, end):
        s = (done + step) % STAGES
        mbarrier.wait(full.index(s), ((done + step) // STAGES) & 1)
        mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def _within(x):
    """Sums over the columns that one thread has of each row: [keys, threads of a row]."""
    return gl.sum(gl.sum(x.reshape([OWN, BLOCK // 8, 4, 2]), 3), 1)


@gluon.jit
def _along(LAYOUT: gl.constexpr):
    """The numbers of columns, as a row."""
    return gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _ones(LAYOUT: gl.constexpr):
    """The factors that add up three columns: ones for the first three."""
    ones = gl.full([BLOCK, COLUMNS], 1.0, gl.float32, LAYOUT)
    return gl.where(_along(LAYOUT) < 3, ones, 0.0)
