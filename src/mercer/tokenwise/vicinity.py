"""Token-Wise Kernels (TWiKers) as a function: attention to convolved keys and values.

    out_i = sum_j w(q_i, k~_ij) v~_ij / sum_j w(q_i, k~_ij)
    k~_ij = sum_d a_j[d] k_{j+d},  v~_ij = sum_d b_j[d] v_{j+d}

over the taps d of key j that query i sees. Under a causal filter the boundary rule says which:

    "none"      all; keys after the query are read as zero
    "left"      d <= 0
    "truncate"  j + d <= i
    "shrink"    |d| <= i - j

Invisible taps are removed before the softmax. Taps beyond the ends of the sequence or of a
document, and taps on padding, contribute zero. Without a causal filter there is no future to hide,
and only "left" leaves taps out.

`definition.reference` is this, query by query, and the specification. A backend may take the whole
call (dispatch/tokens.py). Otherwise it is split into near and far keys (split.py).
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from ..backends.tokenwise.taps import Convolution, num_cut
from ..dispatch import tokens
from ..dispatch.choose import choose
from ..dispatch.problem import Problem, prepare
from ..filters import Causal, Filter
from ..filters.base import can_read
from ..filters.mask import masks_of
from ..filters.places import Where
from ..kernels import Exponential, Kernel
from ..smoother import finish, solve
from ..term.features import Input
from ..term.mix import Smoothed, mix
from .definition import reference
from .ordered import Ordered
from .split import Vicinity
from .taps import Boundary, check_boundary, check_taps, check_temperature


@overload
def vicinity(
    q: Input, k: Input, v: Tensor, *, key_taps: Tensor | None = ...,
    value_taps: Tensor | None = ..., normalize: float | None = ..., boundary: Boundary = ...,
    kernel: Kernel = ..., filter: Filter = ..., backend: str = ..., dropout_p: float = ...,
    return_log_mass: Literal[False] = ..., places: Where | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def vicinity(
    q: Input, k: Input, v: Tensor, *, key_taps: Tensor | None = ...,
    value_taps: Tensor | None = ..., normalize: float | None = ..., boundary: Boundary = ...,
    kernel: Kernel = ..., filter: Filter = ..., backend: str = ..., dropout_p: float = ...,
    return_log_mass: Literal[True], places: Where | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def vicinity(
    q: Input,
    k: Input,
    v: Tensor,
    *,
    key_taps: Tensor | None = None,
    value_taps: Tensor | None = None,
    normalize: float | None = None,
    boundary: Boundary = "shrink",
    kernel: Kernel = Exponential(),
    filter: Filter = Causal(),
    backend: str = "auto",
    dropout_p: float = 0.0,
    return_log_mass: bool = False,
    places: Where | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Smooth over keys and values that are small convolutions of their neighbours.

    Args:
        q, k, v: as in `smooth`; of the keys, the part `content` is convolved.
        key_taps, value_taps: the kernel of each key, [B, K, H or 1, S], tap d in column p + d.
        normalize: None uses taps as they are; a number T: softmax(taps / T) over visible taps.
        boundary: which taps a query sees near itself: none, left, truncate or shrink.
        kernel, filter, backend, dropout_p, return_log_mass: as in `smooth`.
        places: as in `smooth`; tap d of a key reads the key at its place + d.
    """
    problem = prepare(kernel, q, k, v, filter, dropout_p, return_log_mass, backend, places)
    check_boundary(boundary)
    _check_filter(problem)
    check_temperature("normalize", normalize)
    for name, given in (("key_taps", key_taps), ("value_taps", value_taps)):
        _check_taps(name, given, problem)
    if problem.places is not None and problem.places.left_out:
        key_taps, value_taps = (
            None if x is None else x[:, : problem.k.length] for x in (key_taps, value_taps)
        )
    convolution = Convolution(key_taps, value_taps, normalize, boundary)
    return finish(problem, lambda: _solve(problem, convolution, backend))


def refusal(
    kernel: Kernel, q: Input, k: Input, v: Tensor, filter: Filter, dropout_p: float
) -> str | None:
    """Why no backend takes the whole call, or None."""
    return tokens.refusal(prepare(kernel, q, k, v, filter, dropout_p, False, "auto"))


def _solve(problem: Problem, convolution: Convolution, backend: str) -> Smoothed:
    if backend == "reference":
        return reference(problem, convolution)
    convolved = convolution.key_taps is not None or convolution.value_taps is not None
    ordered, said = None, problem.places
    if convolved and said is not None and said.shift != 0:
        ordered = Ordered.of(*said.tensors(problem.v.device))
    elif convolved and backend == "auto":
        found = tokens.run(problem, convolution)
        if found is not None:
            return found
    call = Vicinity(problem, convolution, ordered=ordered)
    count = num_cut(convolution.boundary, problem.causal, convolution.size)
    if not (count and problem.k.length):
        return Smoothed(*solve(call.seen(None), backend))
    near = call.near(count)
    if near is None:
        # Without a lowering only the definition can run; a named backend refuses.
        choose((), backend)
        return reference(problem, convolution)
    if problem.k.length <= count and ordered is None:
        return near
    return mix([call.far(count, backend), near])


def _check_filter(problem: Problem) -> None:
    """Refuse a mask for which it is not known which taps a query may see."""
    filter = problem.filter
    if filter.heads is not None:
        raise ValueError(
            f"token kernels need a filter that is the same for all heads, got {filter!r}"
        )
    if not problem.causal and any(not can_read(mask.visible) for mask in masks_of(filter)):
        raise ValueError(
            f"in a compiled graph {filter!r} cannot be read, and token kernels must know whether "
            "it hides the future: join it with Causal(), or do not compile this call"
        )


def _check_taps(name: str, taps: Tensor | None, problem: Problem) -> None:
    num_keys = problem.k.length + (0 if problem.places is None else problem.places.left_out)
    x = problem.k.part("content") if name == "key_taps" else problem.v
    check_taps(name, taps, x, problem.batch, num_keys, problem.q.heads)
