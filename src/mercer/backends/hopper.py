"""Launches of the kernels in which groups of warps have parts of their own: Hopper alone has them.

They give what those of triton_backward.py give, sooner, for dot products without links and tables.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .triton_plan import INTERPRETED, Inputs, Launch, Numbers, Plan, describe, room
from .triton_sizes import shared_memory

# Keys that a group of warps owns, and queries of a block.
GROUP = 64
# The most features of two slots and the values that a group has the registers for.
ROOM = 256


@lru_cache(maxsize=16)
def available(device: torch.device) -> bool:
    """Whether they run: on Hopper, with a Triton that has the language they are in."""
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        from . import triton_hopper
    except (ImportError, AttributeError):
        return False
    return bool(triton_hopper.backward_keys)


def takes(p: Plan, grad_copies: bool) -> bool:
    """Whether the pass over keys is one of these."""
    c, (q0, q1, k0, k1, v, _) = p.constants, p.aligned
    two = c["E1"] > 0
    plain = not (c["LINK0"] or c["HAS_ROW0"] or c["DROPOUT"]) and c["CLIP"] < 0
    plain = plain and p.dtype.itemsize == 2
    if two:
        plain = plain and c["SAME"] and not c["HAS_COL1"] and c["E1"] in (64, 128)
        copied = q0 and q1 and k0 and k1 and v and grad_copies
    else:
        copied = q0 and k0 and v and grad_copies
    narrow = c["E0"] in (64, 128) and c["V"] in (64, 128)
    return plain and copied and narrow and available(p.device)


def keys(
    x: Inputs, p: Plan, ready: Numbers, rows: tuple[Tensor, Tensor, Tensor, Tensor],
    of_keys: tuple[Any, ...],
) -> None:  # fmt: skip
    """The pass over keys; `rows` are dO, log_mass to the base 2, delta and dlog_mass."""
    grad_out, lse2, delta, _ = rows
    dk, dv, dcol, ds = of_keys
    c = p.constants
    two = c["E1"] > 0
    tensors = (
        _of(x.q[0]), _of(x.k[0]), _of(x.q[1]) if two else x.v, _of(x.k[1]) if two else x.v, _of(x.v),
        x.scale[0], ready.col0, x.v if x.lengths is None else x.lengths,
        x.v if x.ids is None else x.ids, _of(grad_out), lse2, delta,
        _of(dk[0]), _of(dk[1]) if two else dk[0], _of(dv), dcol[0], ds[0],
    )  # fmt: skip
    wide = two and c["E0"] + c["E1"] + c["V"] > ROOM
    for part in (1, 2) if wide else (0,):
        _launch(p, part)(tensors, p.numbers(x.seed))


def _launch(p: Plan, part: int) -> Launch:
    found = p.launches.get(("groups", part))
    if found is not None:
        return found
    from . import triton_hopper

    c, slot = p.constants, p.static.slots[0]
    names = ("E0", "E1", "V", "MODE0", "LOG0", "HAS_COL0", "FILTER", "SIMPLE")
    # Bytes of a row of all features; a block has three numbers beside each.
    row = 2 * (c["E0"] + c["E1"] + c["V"])
    left = shared_memory(p.device) - 2 * GROUP * row - 2048
    constants = {name: c[name] for name in names} | {
        "NORM0": slot.norm, "WANT0": slot.wants, "SAVE_COL0": slot.saves, "PART": part,
        "STAGES": min(3, left // (GROUP * (row + 12))), "REGISTERS": 240,
    }  # fmt: skip
    batch, heads, _ = p.static.shape
    grid = (-(-p.num_keys // (2 * GROUP)), batch * heads, 1)
    found = Launch(triton_hopper.backward_keys, grid, constants, {"num_warps": 4})
    p.launches["groups", part] = found
    return found


def _of(x: Tensor) -> Any:
    """x for the copy engine, in blocks of 64 rows."""
    cls, layout = _descriptor()
    found: Any = object.__new__(cls)
    found.__dict__.update(describe(x, GROUP, room(x.shape[-1])).__dict__, layout=layout)
    return found


@lru_cache(maxsize=1)
def _descriptor() -> tuple[Any, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, NVMMASharedLayout(128, 16, 4)
