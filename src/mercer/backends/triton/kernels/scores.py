"""From products to exponents: scales, links, and how a slot's weights are formed.

    s = scale (<q, k> + col) + row        w = 2^exponent(s) factor(s)

Exponents are to the base 2.
"""

import triton
import triton.language as tl

from ....term import factors
from .. import codes
from .primitives import LOG2E

SQRT3 = tl.constexpr(1.7320508075688772)
SQRT5 = tl.constexpr(2.23606797749979)
IDENTITY, POWER, RATIONAL, MATERN12, MATERN32, MATERN52 = map(tl.constexpr, codes.LINKS)
# How weights are formed: in general, or in one of the shorter ways.
GENERAL, PLAIN, POLY, FLAT = map(tl.constexpr, codes.FORMS)
NORMS = tl.constexpr(codes.NORMS)
BY_LENGTHS = tl.constexpr(codes.LENGTHS)
LEAST_LENGTH = tl.constexpr(factors.LEAST_LENGTH)


@triton.jit
def _link(s, LINK: tl.constexpr, PARAM: tl.constexpr, FLAT: tl.constexpr):
    """(E, A, C): w = A 2^E and dw/ds = C 2^E, with as few slow instructions as possible.

    For the identity, s is already to the base 2. FLAT: the weight needs no exponential. Comparisons
    are written so that NaN stays NaN.
    """
    exponent = s
    factor = 1.0
    pull = 1.0
    if LINK == POWER:
        exponent = PARAM * tl.log2(tl.abs(s))
        pull = tl.where(s == 0.0, 0.0, PARAM / tl.where(s == 0.0, 1.0, s))
    elif LINK == RATIONAL:
        base = 1.0 + tl.where(s > 0.0, 0.0, -s) * (1.0 / PARAM)
        root = tl.rsqrt(base)
        inverse = root * root
        if FLAT:
            factor = inverse
            pull = inverse * inverse
        else:
            exponent = -PARAM * tl.log2(base)
            pull = inverse
    elif LINK != IDENTITY:
        square = tl.where(s > 0.0, 0.0, -2.0 * s)
        inverse = tl.rsqrt(square + 1e-30)
        r = square * inverse
        if LINK == MATERN12:
            exponent = -LOG2E * r
            pull = tl.where(square > 0.0, inverse, 0.0)
        elif LINK == MATERN32:
            exponent = (-LOG2E * SQRT3) * r
            factor = 1.0 + SQRT3 * r
            pull = 3.0
        else:
            exponent = (-LOG2E * SQRT5) * r
            factor = 1.0 + SQRT5 * r + (5.0 / 3.0) * square
            pull = (5.0 / 3.0) * (1.0 + SQRT5 * r)
    return exponent, factor, pull


@triton.jit
def _tanh(x):
    """tanh: odd, and without overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _bent(x, LOG: tl.constexpr):
    """log s of a parameter, and its slope; plan.py says what LOG means."""
    slope = 1.0
    if LOG[0] == 2:
        free = tl.minimum(tl.maximum(x, LOG[2]), LOG[3])
        bend = _tanh((x - free) / LOG[4])
        x = free + LOG[4] * bend
        slope = 1.0 - bend * bend
    return x + LOG[1], slope


@triton.jit
def _grown(x, LOG: tl.constexpr):
    """A head's scale, from its parameter where that is a logarithm."""
    if LOG[0] > 0:
        log, _ = _bent(x, LOG)
        x = tl.exp(-2.0 * log)
    return x


@triton.jit
def _scale(tensor, number, stride, h, line, n, inside, MODE: tl.constexpr, LOG: tl.constexpr):
    """The scale of a slot: one number, one of the head, or one of each query."""
    if MODE == 0:
        out = number
    elif MODE == 1:
        out = _grown(tl.load(tensor + h * stride), LOG)
    else:
        out = tl.load(tensor + line + n, mask=inside, other=0.0)
    return out


@triton.jit
def _inverse_length(squares):
    """1 / |x|, bounded, so that products of a zero vector are 0."""
    return 1.0 / tl.maximum(tl.sqrt(squares), LEAST_LENGTH)


@triton.jit
def _by_keys(t, squares, INSIDE: tl.constexpr):
    """Products with the norms of keys subtracted, or divided by the lengths of keys."""
    if INSIDE == NORMS:
        t -= 0.5 * squares
    elif INSIDE == BY_LENGTHS:
        t = t * _inverse_length(squares)
    return t


@triton.constexpr_function
def _mode(mode, grouped, inside):
    """The mode of a scale in a block: 2 also if queries are heads of a group, or divided by lengths."""
    return 2 if (mode == 1 and grouped) or inside == BY_LENGTHS.value else mode


@triton.jit
def _down(x, MODE: tl.constexpr):
    """A scale for a block of [queries, keys]."""
    return x[:, None] if MODE == 2 else x


@triton.jit
def _scaled(t, scale, row, LINK: tl.constexpr, HAS_ROW: tl.constexpr):
    """s = scale t + row. For the identity to the base 2; exactly 0 within rounding of a cusp."""
    if LINK == IDENTITY:
        s = t * (scale * LOG2E)
    else:
        s = t * scale
    if HAS_ROW:
        s += row * LOG2E if LINK == IDENTITY else row
        if LINK == MATERN12:
            s = tl.where(s > -3.8e-6 * tl.abs(row), 0.0, s)
    return s


@triton.jit
def _power(x, DEGREE: tl.constexpr):
    out = x
    for _ in tl.static_range(DEGREE - 1):
        out = out * x
    return out
