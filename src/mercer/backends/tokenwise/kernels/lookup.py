"""The gradient of a table of taps: rows summed by token, as whole numbers, the same in any order."""

import triton
import triton.language as tl


@triton.jit
def _size(x):
    """|x|, with NaN as the largest."""
    x = tl.abs(x)
    return tl.where(x < float("inf"), x, float("inf"))


@triton.jit
def clear(G0, G1, PEAKS, SUMS, count, cells, TARGETS: tl.constexpr, BM: tl.constexpr):
    """Clear SUMS, and find each program's largest gradient."""
    programs = tl.num_programs(0)
    peak = 0.0
    for start in range(tl.program_id(0) * BM, count, programs * BM):
        n = start + tl.arange(0, BM)
        x = _size(tl.load(G0 + n, mask=n < count, other=0.0).to(tl.float32))
        if TARGETS > 1:
            x = tl.maximum(x, _size(tl.load(G1 + n, mask=n < count, other=0.0).to(tl.float32)))
        peak = tl.maximum(peak, tl.max(x, 0))
    tl.store(PEAKS + tl.program_id(0), peak)
    for start in range(tl.program_id(0) * BM, cells, programs * BM):
        n = start + tl.arange(0, BM)
        tl.store(SUMS + n, tl.zeros((BM,), tl.int64), mask=n < cells)


@triton.jit
def _unit(PEAKS, PROGRAMS: tl.constexpr):
    """The power of two above all gradients, and whether all are finite."""
    peak = tl.max(tl.load(PEAKS + tl.arange(0, PROGRAMS)), 0)
    fine = peak < float("inf")
    bits = tl.where(fine & (peak > 0.0), peak, 1.0).to(tl.int32, bitcast=True)
    return (bits >> 23) - 126, fine


@triton.jit
def _scaled(x, exponent):
    """x 2^exponent for exponents beyond those of one float."""
    half = exponent // 2
    a = ((half + 127) << 23).to(tl.float32, bitcast=True)
    b = ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)
    return x * a * b


@triton.jit
def scatter(
    G0, G1, IDS, PEAKS, SUMS, count, width, bits,
    TARGETS: tl.constexpr, PROGRAMS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """SUMS[id] += G, as whole numbers below 2^bits: the same sum in any order."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = n < count
    exponent, fine = _unit(PEAKS, PROGRAMS)
    token = tl.load(IDS + n // width, mask=ok, other=0).to(tl.int64)
    place = token * (TARGETS * width) + n % width
    x = tl.load(G0 + n, mask=ok, other=0.0).to(tl.float32)
    x = tl.where(fine, x, 0.0)
    tl.atomic_add(SUMS + place, _whole_number(x, bits - exponent), mask=ok & (x != 0.0))
    if TARGETS > 1:
        x = tl.load(G1 + n, mask=ok, other=0.0).to(tl.float32)
        x = tl.where(fine, x, 0.0)
        tl.atomic_add(SUMS + place + width, _whole_number(x, bits - exponent), mask=ok & (x != 0.0))


@triton.jit
def _whole_number(x, exponent):
    """x 2^exponent as an integer: its 24 bits, shifted."""
    bits = x.to(tl.int32, bitcast=True)
    power = (bits >> 23) & 255
    digits = ((bits & 0x7FFFFF) | tl.where(power > 0, 0x800000, 0)).to(tl.int64)
    move = tl.where(power > 0, power, 1) - 150 + exponent
    left = digits << tl.minimum(tl.maximum(move, 0), 40).to(tl.int64)
    right = digits >> tl.minimum(tl.maximum(-move, 0), 40).to(tl.int64)
    size = tl.where(move >= 0, left, right)
    return tl.where(bits < 0, -size, size)


@triton.jit
def gathered(
    PEAKS, SUMS, TABLE, cells, bits, PROGRAMS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Whole numbers back to a gradient."""
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    ok = n < cells
    exponent, fine = _unit(PEAKS, PROGRAMS)
    x = tl.load(SUMS + n, mask=ok, other=0).to(tl.float32)
    x = tl.where(fine, _scaled(x, exponent - bits), float("nan"))
    tl.store(TABLE + n, x.to(TABLE.dtype.element_ty), mask=ok)
