"""The interface of the Hopper kernels for portable code. None or False means: nothing was done.

Then the portable kernels do the work. `outcome` is the portable code itself, for check.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..plan import Inputs, Numbers, Plan, Rows
from . import eligible, launch
from .check import Outcome, allows, checking, completed
from .check import reason as reason
from .eligible import scale_by_keys as scale_by_keys

Made = tuple[Tensor, Tensor, Tensor]


def forward(
    x: Inputs, p: Plan, ready: Numbers, out: Tensor, low: Tensor, lse: Tensor, outcome: Outcome
) -> bool:
    """out, its rounding error if `low` has room for it, and log_mass."""
    if not (eligible.forwards(p) and allows("forward", x, p, outcome)):
        return False
    return completed("forward", p, launch.forward, x, p, ready, out, low, lse) is not None


def way(x: Inputs, p: Plan, grad: Tensor, outcome: Outcome) -> str:
    """How gradients are formed: "sums" by `one_pass`, "stores" by `all_passes`, "" by neither."""
    if eligible.sums(p, grad):
        # Asked after `sums`, which takes one clause of a filter only.
        pays = checking() is not None or eligible.pays_to_sum(p)
        if pays and allows("sums", x, p, outcome):
            return "sums"
    if eligible.stores(p, grad) and allows("stores", x, p, outcome):
        return "stores"
    return ""


def one_pass(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    of_queries: tuple[Any, ...], made: Made, lse: bool,
) -> list[Tensor] | None:  # fmt: skip
    """All gradients; fills `rows`. Returns the gradients of scales."""
    given = x, p, ready, rows, of_keys, of_queries, made, lse
    return completed("sums", p, launch.one_pass, *given)


def all_passes(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...],
    of_queries: tuple[Any, ...], lse: bool,
) -> bool:  # fmt: skip
    """All gradients; of those of scales the shares."""
    given = x, p, ready, rows, of_keys, of_queries, lse
    return completed("stores", p, launch.all_passes, *given) is not None


def keys(
    x: Inputs, p: Plan, ready: Numbers, rows: Rows, of_keys: tuple[Any, ...], dband: Tensor | None,
    outcome: Outcome,
) -> bool:  # fmt: skip
    """The pass over keys; with `dband`, it stores the gradients of all pairs there."""
    way = "keys" if dband is None else "keys of a table"
    if not (eligible.takes(p, rows.grad_out, dband is not None) and allows(way, x, p, outcome)):
        return False
    return completed(way, p, launch.keys, x, p, ready, rows, of_keys, dband) is not None
