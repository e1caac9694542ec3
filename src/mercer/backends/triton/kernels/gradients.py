"""What both passes of the backward share: the weights again, their derivatives, and gradient stores.

With P the normalised weights and g_ij = dP_ij - delta_i, where delta = <dO, O> - dlog_mass, and
t_ij = <q_i, k_j> + col_j,

    dv_j = sum_i P_ij dO_i        ds_ij = g_ij P_ij slope(s_ij)        dt_ij = scale_i ds_ij
    dk_j = sum_i dt_ij q_i        dcol_j = sum_i dt_ij                 drow_i = sum_j ds_ij
    dq_i = sum_j dt_ij k_j        dscale_i = sum_j ds_ij t_ij

What can wait until the end of a block is done there, once for each row instead of once for each
pair: sum_j ds_ij <q_i, k_j> = <q_i, sum_j ds_ij k_j>, and a number per key that is -|k_j|^2 / 2
adds -dcol_j k_j to dk_j. The product has rounded ds_ij, though. The gradient of a link's scale is a
small difference of large sums, so it is summed pair by pair.
"""

import triton
import triton.language as tl

from .bands import BLOCKS
from .primitives import COLUMNS
from .scores import FLAT, IDENTITY, POLY, _link, _power, _scaled


@triton.jit
def _weights(
    t0, t1, scale0, scale1, row0, row1, bias, lse2, rate, seen,
    SLOT0: tl.constexpr, SLOT1: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    FORM: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """(P, dP/ds0, dP/ds1): the weights again, and their derivatives at a fixed mass."""
    if FORM == POLY:
        x = t0 * rate
        if MASK:
            x = tl.where(seen, x, 0.0)
        pull0 = _power(x, SLOT0.param - 1)
        p = pull0 * x
        pull1 = p
    elif FORM == FLAT:
        _, a, c = _link(
            _scaled(t0, scale0, row0, SLOT0.link, SLOT0.row), SLOT0.link, SLOT0.param, True
        )
        p = a * rate
        pull0 = c * rate
        if MASK:
            p = tl.where(seen, p, 0.0)
            pull0 = tl.where(seen, pull0, 0.0)
        pull1 = p
    else:
        s0 = _scaled(t0, scale0, row0, SLOT0.link, SLOT0.row)
        e, a0, c0 = _link(s0, SLOT0.link, SLOT0.param, False)
        a1 = 1.0
        c1 = 1.0
        if SLOT1.width > 0 and not SAME:
            s1 = _scaled(t1, scale1, row1, SLOT1.link, SLOT1.row)
            other, a1, c1 = _link(s1, SLOT1.link, SLOT1.param, False)
            e += other
        if BIAS >= BLOCKS:
            e += bias
        if MASK:
            e = tl.where(seen, e, float("-inf"))
        bare = tl.exp2(e - lse2)
        p = bare * a0 * a1
        pull0 = p
        pull1 = p
        if SLOT0.link != IDENTITY:
            pull0 = bare * c0 * a1
        if SLOT1.width > 0 and not SAME:
            if SLOT1.link != IDENTITY:
                pull1 = bare * a0 * c1
    return p, pull0, pull1


@triton.jit
def _grad(GRAD, b, h, line, num_heads, num_queries, dv, TMA: tl.constexpr, TOKENS: tl.constexpr):
    """The address of a head's dO, or its TMA descriptor, and the stride of its rows."""
    if TMA:
        base, stride = GRAD, dv
    elif TOKENS:
        base, stride = GRAD + (b * num_queries * num_heads + h) * dv, num_heads * dv
    else:
        base, stride = GRAD + line * dv, dv
    return base, stride


@triton.jit
def _reference(col, HAS_COL: tl.constexpr):
    """The first number per key, which is subtracted from the others.

    The gradient of a scale sums u (<q, k> + col) over all pairs. A constant in col gives a large sum
    that cancels. For a row, sum u is dlog_mass, so the constant's share is known and added later.
    """
    out = 0.0
    if HAS_COL:
        out = tl.load(col)
        out = tl.where(tl.abs(out) < float("inf"), out, 0.0)
    return out


@triton.jit
def _counted(e, ref):
    """The factors of columns whose sum is col - ref. The fourth column (e = 3) is ones."""
    return tl.where(e < 3, 1.0, tl.where(e == 3, -ref, 0.0))


@triton.jit
def _of_columns(sums, ref):
    """sum_j u_ij (col_j - ref), from the sums of u times each column."""
    return tl.sum(sums * _counted(tl.arange(0, COLUMNS)[None, :], ref), 1)


@triton.jit
def _store(target, x, mask, ADD: tl.constexpr):
    """Store x. ADD: add it to what an earlier pass has stored."""
    if ADD:
        x += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, x.to(target.dtype.element_ty), mask=mask)
