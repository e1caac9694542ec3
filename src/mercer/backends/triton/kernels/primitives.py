"""What every fused kernel does with memory: loads, stores, rounding, and numbers as columns."""

import triton
import triton.language as tl

from .. import codes

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Numbers per key as columns of a product: three, filled up to the least that a product takes. Where
# every query has its own scale, the fourth is ones, for sums of gradients alone.
COLUMNS = tl.constexpr(16)
EACH = tl.constexpr(codes.EACH)


@triton.jit
def _rows(base, stride, index, width, WIDTH: tl.constexpr, limit, CHECK: tl.constexpr):
    """Rows of features, [len(index), WIDTH], zero beyond the limit and the width."""
    e = tl.arange(0, WIDTH)
    pointers = base + index[:, None].to(tl.int64) * stride + e[None, :]
    if CHECK:
        out = tl.load(pointers, mask=(index[:, None] < limit) & (e[None, :] < width), other=0.0)
    else:
        out = tl.load(pointers)
    return out


@triton.jit
def _settle(number, SETTLE: tl.constexpr):
    """Waits for matrix products in flight; `number` is any number.

    Triton 3.6 does not wait if an operand was loaded and changed in the loop. The next blocks then
    overwrite registers or shared memory that the product still reads, and results differ from run to
    run by more than rounding.
    """
    if SETTLE:
        tl.inline_asm_elementwise(
            "wgmma.wait_group.sync.aligned 0; mov.u32 $0, $1;", "=r,r", [number], tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _row_of(b, h, n, line, num_heads, length, TOKENS: tl.constexpr):
    """The row of an output for place n of a head: outputs lie head by head, or token by token."""
    return (b * length + n) * num_heads + h if TOKENS else line + n


@triton.jit
def _head(tensor, b, h, stride_b, stride_h, TMA: tl.constexpr):
    """The address of a head's first row. A TMA descriptor stays as it is."""
    return tensor if TMA else tensor + b * stride_b + h * stride_h


@triton.jit
def _block(
    base, b, h, stride_b, stride, start, width, limit,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """ROWS rows of features from start on, by TMA or by pointers."""
    if TMA:
        batch = tl.where(stride_b == 0, 0, b).to(tl.int32)
        out = base.load([batch, h.to(tl.int32), start, 0]).reshape(ROWS, WIDTH)
    else:
        out = _rows(base, stride, start + tl.arange(0, ROWS), width, WIDTH, limit, CHECK)
    return out


@triton.jit
def _held(x, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """x in registers, in the layout of a product's first operand: x times the unit matrix.

    Otherwise every product of a loop reads it from shared memory again, which limits their speed.
    """
    if PRECISION != "ieee":
        e = tl.arange(0, WIDTH)
        x = tl.dot(x, (e[:, None] == e[None, :]).to(x.dtype)).to(x.dtype)
    return x


@triton.jit
def _kept(seed, bh, n, j, num_queries, num_keys, dropout):
    """Which weights dropout keeps: the same in forward and backward."""
    offset = (bh.to(tl.int64) * num_queries + n.to(tl.int64)) * num_keys + j.to(tl.int64)
    return tl.rand(seed, offset) >= dropout


@triton.jit
def _no_tickets(COUNTERS, bh):
    """Sets the ticket counters to 0 of the pass over keys that begins with this head, and of a second."""
    first = tl.program_id(0) == 0
    tl.store(COUNTERS + bh, 0, mask=first)
    tl.store(COUNTERS + bh + 1, 0, mask=first)


@triton.jit
def _finite(x):
    """x with 0 in place of what is not finite, since 0 times NaN is NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def _numbers(col, start, num_keys, BN: tl.constexpr):
    """The numbers per key of BN keys from start on."""
    j = start + tl.arange(0, BN)
    return tl.load(col + j, mask=j < num_keys, other=0.0)


@triton.jit
def _numbers_of(col, start, num_keys, BN: tl.constexpr, HAS_COL: tl.constexpr):
    """The same. With EACH, a row of them for every row of `col`."""
    if HAS_COL == EACH:
        j = (start + tl.arange(0, BN))[None, :]
        out = tl.load(col + j, mask=j < num_keys, other=0.0)
    else:
        out = _numbers(col, start, num_keys, BN)
    return out


@triton.jit
def _below(x, HAS_COL: tl.constexpr):
    """Numbers per key, to be added to a block of [queries, keys]."""
    return x if HAS_COL == EACH else x[None, :]


@triton.jit
def _column(base, h, of, group, stride, HAS_COL: tl.constexpr):
    """Where the numbers per key of head h begin. With EACH, a column of these for heads `of`."""
    return base + (of // group * stride)[:, None] if HAS_COL == EACH else base + h // group * stride


@triton.jit
def _columns(x, e, dtype: tl.constexpr, FOURTH: tl.constexpr):
    """Numbers of rows as three columns of half precision whose sum they are, and a fourth column.

    e: 0 to COLUMNS - 1, in a row.
    """
    high = x.to(dtype).to(tl.float32)
    middle = (x - high).to(dtype).to(tl.float32)
    low = x - high - middle
    rest = tl.where(e == 2, low[:, None], tl.where(e == 3, FOURTH, 0.0))
    rest = tl.where(e == 1, middle[:, None], rest)
    return tl.where(e == 0, high[:, None], rest).to(dtype)


@triton.constexpr_function
def _bits_beyond(dtype):
    """How many of float32's last bits are left out if a number in half precision gets eight more bits."""
    return {tl.float16: 5}.get(dtype, 8)


@triton.jit
def _taken(out, DTYPE: tl.constexpr):
    """What rounding to half precision takes from a number, in eight bits."""
    SHIFT: tl.constexpr = _bits_beyond(DTYPE)
    bits = out.to(tl.int32, bitcast=True)
    if SHIFT < 8:
        near = out.to(DTYPE).to(tl.float32)
        near = near.to(tl.int32, bitcast=True)
    else:
        # Rounded by hand. Conversion would go number by number here, which is slower.
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    taken = tl.minimum(bits - near + (1 << (SHIFT - 1)), (128 << SHIFT) - 1) >> SHIFT
    # Beyond the range of float16, and among its subnormal numbers, the difference takes more bits.
    return tl.maximum(taken, -128) if SHIFT < 8 else taken


@triton.jit
def _given_back(rounded, taken, DTYPE: tl.constexpr):
    """The number before rounding, up to its last bits. What is not finite stays as it is."""
    SHIFT: tl.constexpr = _bits_beyond(DTYPE)
    near = rounded.to(tl.float32)
    bits = near.to(tl.int32, bitcast=True) + (taken.to(tl.int32) << SHIFT)
    return tl.where(tl.abs(near) < float("inf"), bits.to(tl.float32, bitcast=True), near)


@triton.jit
def _store_exactly(OUT, LOW, offset, out, mask, HAS_LOW: tl.constexpr):
    """Store an output, and what rounding takes from it, since the backward needs <dO, O> more exactly."""
    tl.store(OUT + offset, out.to(OUT.dtype.element_ty), mask=mask)
    if HAS_LOW:
        taken = _taken(out, OUT.dtype.element_ty)
        tl.store(LOW + offset, taken.to(tl.int8), mask=mask)


@triton.jit
def _exactly(OUT, LOW, offset, mask, HAS_LOW: tl.constexpr):
    """An output with what rounding took from it."""
    out = tl.load(OUT + offset, mask=mask, other=0.0)
    if HAS_LOW:
        taken = tl.load(LOW + offset, mask=mask, other=0)
        return _given_back(out, taken, OUT.dtype.element_ty)
    return out.to(tl.float32)


@triton.jit
def _delta(grad, out, GRAD_LSE, LSE, at, inside, HAS_LSE: tl.constexpr):
    """<dO, O> - dlog_mass, and log_mass to the base 2."""
    delta = tl.sum(out * grad, 1)
    if HAS_LSE:
        delta -= tl.load(GRAD_LSE + at, mask=inside, other=0.0)
    lse = tl.load(LSE + at, mask=inside, other=float("-inf"))
    # Infinite where a row sees no key, so that its weights are 0.
    return delta, tl.where(lse == float("-inf"), float("inf"), LOG2E * lse)
