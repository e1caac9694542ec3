"""The kernel of one head as a formula with its learned numbers."""

from __future__ import annotations

import math

from torch import Tensor

from ..kernels import ALiBi, Buckets, Kernel, Power, Product, Scaled, Sum
from ..kernels.distance import AdaptiveRBF, Distance, distance
from ..kernels.stationary import ARD, Periodic
from ..nn import GaussianAttention
from ..term.features import Features
from .calls import Layer


def write_head(layer: Layer, head: int, q: Features | None = None) -> str:
    """The kernel of a head, positions included, such as exp(-|q - k|^2 / (2 * 3.1^2)).

    With the queries q, default bandwidths, which depend on their width, are numbers too.
    """
    if isinstance(layer, GaussianAttention):
        s = _number(float(layer.bandwidth.detach()[head]))
        if layer.adaptive:
            return f"exp(-|q - k|^2 / 2 s(q)^2), s(q) around {s}"
        return f"exp(-|q - k|^2 / (2 * {s}^2))"
    return _write(layer.joined_kernel, head, q)


def _write(kernel: Kernel, head: int, q: Features | None) -> str:
    if isinstance(kernel, Product):
        return " * ".join(
            f"({_write(one, head, q)})" if isinstance(one, Sum) else _write(one, head, q)
            for one in kernel
        )
    if isinstance(kernel, Sum):
        return " + ".join(_write(one, head, q) for one in kernel)
    if isinstance(kernel, Scaled):
        inner = _write(kernel.kernel, head, q)
        inner = f"({inner})" if isinstance(kernel.kernel, Sum) else inner
        return f"{_number(math.exp(_of_head(kernel.log_scale, head)))} * {inner}"
    if isinstance(kernel, Power):
        return f"({_write(kernel.kernel, head, q)})^{kernel.exponent:g}"
    if isinstance(kernel, ALiBi):
        return f"exp(-{_number(_of_head(kernel.slopes, head))} |i-j|)"
    if isinstance(kernel, Buckets):
        return "exp(b[bucket(i-j)])"
    if isinstance(kernel, Distance):
        return _distance(kernel, head, q)
    return kernel.formula


def _distance(kernel: Distance, head: int, q: Features | None) -> str:
    if isinstance(kernel, ARD):
        return f"{kernel.formula}, s_d {_range(_of_row(kernel.log_bandwidth, head))}"
    s = bandwidth_of(kernel, head, q)
    name = "s" if s is None else _number(s)
    if isinstance(kernel, AdaptiveRBF):
        return f"{kernel.formula}, s(q) around {name}"
    if isinstance(kernel, Periodic):
        p = _number(math.exp(_of_head(kernel.log_period, head)))
        formula = kernel.written_with(distance(kernel.on), name)
        return formula.replace("p_h", p)
    return kernel.written_with(distance(kernel.on), name)


def bandwidth_of(kernel: Distance, head: int, q: Features | None) -> float | None:
    """s of a head; None where it depends on a width that is not known."""
    s = math.exp(_of_head(kernel.log_bandwidth, head))
    if not kernel.relative_to_default:
        return s
    if q is None or kernel.on not in q:
        return None
    return s * kernel.default(q.part(kernel.on).shape[-1])


def _of_head(x: Tensor, head: int) -> float:
    """The number of a head, of one number or one per head."""
    flat = x.detach().reshape(-1)
    return float(flat[head] if flat.numel() > 1 else flat[0])


def _of_row(x: Tensor, head: int) -> Tensor:
    """The numbers of a head, of one row or one per head."""
    rows = x.detach().reshape(-1, x.shape[-1])
    return rows[head if len(rows) > 1 else 0]


def _range(log: Tensor) -> str:
    return f"{_number(math.exp(float(log.min())))} to {_number(math.exp(float(log.max())))}"


def _number(x: float) -> str:
    return f"{x:.3g}"
