"""Which portable kernel a plan starts, and with which constants and block sizes."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime.device import INTERPRETED, shared_memory
from ..runtime.launch import Launch
from .block_sizes import Sizes, fitted, sizes_of
from .codes import NOWHERE
from .plan import Plan
from .specialize import grouped


def forward_launch(
    p: Plan, *, parts: int = 0, inside: tuple[int, int] = NOWHERE, low: bool = False
) -> Launch:
    """The forward of a plan.

    `parts`: the number of parts of the keys for few queries; `inside`: the INSIDE code of each slot;
    `low`: whether it keeps the rounding error of the output.
    """
    found = p.launches.get(key := ("forward", parts, inside, low))
    if found is not None:
        return found
    from .kernels.forward import forward as kernel

    sizes, flags = _common("forward", p, cut=parts > 0)
    flags |= {
        "HAS_LOW": low, "SPLIT": parts > 1,
        "INSIDE0": inside[0], "INSIDE1": inside[1], "SUMMED": p.static.summed,
        "GROUPED": p.static.grouped, "TMA": _keys_by_tma(p),
    }  # fmt: skip
    return _keep(key, kernel, p, sizes, flags, -(-p.static.shape[2] // sizes.queries), parts)


def queries_launch(
    p: Plan, *, add: bool = False, cut: bool = False, lse: bool = False, low: bool = False
) -> Launch:
    """The pass over queries.

    `add`: it adds to the gradients of an earlier plan; `cut`: a later plan adds to its own; `lse`:
    log_mass has a gradient.
    """
    found = p.launches.get(key := ("queries", add, cut, lse, low))
    if found is not None:
        return found
    from .kernels.backward_queries import backward_queries as kernel

    sizes, flags = _common("queries", p)
    flags |= _of_slots(p) | {
        "CUT": cut, "HAS_LSE": lse, "FIRST": not add, "HAS_LOW": low, "ADD": add,
        "TMA": _keys_by_tma(p),
    }  # fmt: skip
    return _keep(key, kernel, p, sizes, flags, -(-p.static.shape[2] // sizes.queries))


def keys_launch(
    p: Plan, *, grad_by_tma: bool, part: int = 0, add: bool = False, store: bool = False
) -> Launch:
    """The pass over keys.

    `grad_by_tma`: TMA can read the gradient of the output; `part`: see `key_parts`; `store`: it
    stores the gradients of all pairs.
    """
    found = p.launches.get(key := ("keys", grad_by_tma, part, add, store))
    if found is not None:
        return found
    from .kernels.backward_keys import backward_keys as kernel

    q0, q1, *_ = p.aligned
    sizes, flags = _common("keys", p)
    flags |= _of_slots(p) | {"ADD": add, "PART": part, "STORE": store}
    flags["TMA"] = q0 and grad_by_tma and (q1 or len(p.static.slots) == 1)
    return _keep(key, kernel, p, sizes, flags, -(-p.num_keys // sizes.keys))


def _common(kind: str, p: Plan, *, cut: bool = False) -> tuple[Sizes, dict[str, Any]]:
    """Block sizes, and the constants that all kernels take."""
    sizes = fitted(kind, sizes_of("split" if cut else kind, p), p, shared_memory(p.device))
    tiled = p.static.clip >= 0 and p.aligned[5]
    return sizes, {
        "BM": sizes.queries, "BN": sizes.keys, "TOKENS": p.static.tokens, "TILED": tiled,
    }  # fmt: skip


def _of_slots(p: Plan) -> dict[str, bool]:
    """Which gradients of scales and of numbers per key a backward writes."""
    first, *others = p.static.slots
    second = others[0] if others else first._replace(norm=False, wants=False, saves=False)
    return {
        "NORM0": first.norm, "NORM1": second.norm, "WANT0": first.wants, "WANT1": second.wants,
        "SAVE_COL0": first.saves, "SAVE_COL1": second.saves,
    }  # fmt: skip


def _keys_by_tma(p: Plan) -> bool:
    """Whether TMA can read the keys and values."""
    _, _, k0, k1, v, _ = p.aligned
    return k0 and v and (k1 or len(p.static.slots) == 1)


def _lean(p: Plan, flags: dict[str, Any]) -> bool:
    """Whether a kernel leaves registers free: its bound pays then, and operands can be held."""
    c, static = p.constants, p.static
    lean = flags["TMA"] or c["CLIP"] >= 0
    lean = lean and static.simple and not static.dropout_p and p.dtype != torch.float32
    return bool(lean and (len(static.slots) == 1 or c["SAME"]))


def _keep(
    key: tuple[Any, ...], kernel: Any, p: Plan, sizes: Sizes, flags: dict[str, Any], blocks: int,
    parts: int = 0,
) -> Launch:  # fmt: skip
    """A launch for the plan, kept under the key."""
    lean = _lean(p, flags)
    constants = p.constants | flags | {"HELD": sizes.held if lean else 0}
    # TMA reads zeros beyond the width.
    constants["EVEN"] = constants["EVEN"] or flags["TMA"]
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    if sizes.registers and lean:
        options["maxnreg"] = sizes.registers
    batch, heads, _ = p.static.shape
    grid = (blocks, batch * heads, max(parts, 1))
    constants = grouped(constants, interpreted=INTERPRETED)
    found = p.launches[key] = Launch(kernel, grid, constants, options)
    return found
