"""Kernels with everything but their tensors: which one a plan needs, and how it is started."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..triton.block_sizes import (
    NOWHERE,
    PLAIN,
    SPREADS,
    bucket_of,
    fitted,
    on_hopper,
    shared_memory,
    sizes_of,
)

if TYPE_CHECKING:
    from ..triton.plan import Plan

# Triton's own interpreter, in which the tests run these kernels on a CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(eq=False)
class Launch:
    """One kernel with everything but its tensors; compiled at its first start."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: dict[str, int]
    compiled: Any = None
    # Whether the first cache has what shared memory leaves of their common room. Triton would have
    # all of that for shared memory.
    caches: bool = False

    def __call__(self, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> None:
        if INTERPRETED:
            self.kernel[self.grid](*tensors, *numbers, **self.constants, **self.options)
            return
        device = tensors[-1].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._start(tensors, numbers, device)
        else:
            self._start(tensors, numbers, device)

    def _start(
        self, tensors: tuple[Any, ...], numbers: tuple[int | float, ...], device: torch.device
    ) -> None:
        if self.compiled is None:
            self.compiled = self.kernel[self.grid](
                *tensors, *numbers, **self.constants, **self.options
            )
            if self.caches:
                _share_room(self.compiled, device)
        else:
            # Triton would look for the compiled kernel anew by each of some eighty arguments. All
            # that it is specialised for is in the key under which this launch is kept.
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            # Nor does the driver have to ask whose memory an address is.
            addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
            self.compiled[self.grid](*addresses, *numbers, *self.constants.values(), stream=stream)


# The driver's number of the attribute that says how much of the room shared memory gets, in
# percent, and what it takes for itself of each program's.
CARVEOUT, RESERVED = 9, 1024


def _share_room(compiled: Any, device: torch.device) -> None:
    """Have no more room for shared memory than the kernel takes: a hint, which may go unheard."""
    whole = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    percent = -(-100 * (compiled.metadata.shared + RESERVED) // whole)
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, percent)


def launch_of(
    p: Plan, kind: str, *, parts: int = 0, inside: tuple[int, int] = NOWHERE,
    grad_copies: bool = False, low: bool = False, part: int = 0, add: bool = False,
    cut: bool = False, lse: bool = False, store: bool = False,
) -> Launch:  # fmt: skip
    """The kernel of this kind for the plan.

    `parts`: into how many the keys of few queries are cut; `inside`: what it forms of
    keys itself, for each slot.
    """
    key = (kind, parts, inside, grad_copies, low, part, add, cut, lse, store)
    found = p.launches.get(key)
    if found is not None:
        return found
    from ..triton.kernels import backward_keys, backward_queries
    from ..triton.kernels import forward as triton_kernels

    sizes = sizes_of("split" if parts else kind, p)
    sizes = fitted(kind, sizes, p, shared_memory(p.device))
    bm, bn = sizes.queries, sizes.keys
    slots = p.static.slots
    two = len(slots) == 2
    q0, q1, k0, k1, v, band = p.aligned
    spread = p.spread and (kind, bucket_of(p)) in SPREADS
    flags: dict[str, Any] = {"BM": bm, "BN": bn}
    if kind == "forward":
        kernel: Any = triton_kernels.forward
        flags |= {"HAS_LOW": low, "SPLIT": parts > 1, "SPREAD": spread}
        flags |= {"INSIDE0": inside[0], "INSIDE1": inside[1], "SUMMED": p.static.summed}
        flags |= {"FAST": 0, "GROUPED": p.static.grouped}
    else:
        kernel = backward_keys.backward_keys
        flags |= {
            "NORM0": slots[0].norm, "NORM1": two and slots[-1].norm,
            "WANT0": slots[0].wants, "WANT1": two and slots[-1].wants,
            "SAVE_COL0": slots[0].saves, "SAVE_COL1": two and slots[-1].saves,
        }  # fmt: skip
        if kind == "queries":
            kernel = backward_queries.backward_queries
            flags["SPREAD"] = spread
            flags |= {"CUT": cut, "HAS_LSE": lse, "FIRST": not add}
            flags["HAS_LOW"] = low
        flags["ADD"] = add
    if kind == "keys":
        flags |= {"TMA": q0 and grad_copies and (q1 or not two), "PART": part, "STORE": store}
    else:
        flags["TMA"] = k0 and v and (k1 or not (two or spread))
    flags["TOKENS"] = p.static.tokens
    flags["TILED"] = p.static.clip >= 0 and band
    # What has more to do needs all the registers there are.
    lean = flags["TMA"] or p.constants["CLIP"] >= 0
    lean = lean and p.static.simple and not p.static.dropout_p and p.dtype != torch.float32
    lean = lean and (not two or p.constants["SAME"])
    flags["HELD"] = sizes.held if lean else 0
    plain = p.constants["FORM"] == PLAIN and p.constants["CLIP"] < 0 and not two and not parts
    if kind == "forward" and plain and flags["TMA"] and (lean or INTERPRETED):
        flags["FAST"] = 2 if p.still else 1
    constants = p.constants | flags
    # The copy engine fills up what lies beyond the width.
    constants["EVEN"] = constants["EVEN"] or flags["TMA"]
    batch, heads, num_queries = p.static.shape
    blocks = -(-p.num_keys // bn) if kind == "keys" else -(-num_queries // bm)
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    if sizes.registers and lean:
        options["maxnreg"] = sizes.registers
    found = p.launches[key] = Launch(
        kernel, (blocks, batch * heads, max(parts, 1)), constants, options
    )
    return found


_helpers: dict[tuple[Any, ...], Launch] = {}


def settles(device: torch.device) -> bool:
    """Whether kernels have to wait for products of what was loaded and changed: see `_settle`."""
    return on_hopper(device) and not INTERPRETED


def helper(
    name: str, grid: tuple[int, int, int], constants: dict[str, Any], tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...], options: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Start one of the small kernels."""
    kinds = ((x.dtype, x.data_ptr() % 16) for x in tensors)
    key = (name, grid, tensors[-1].device, *constants.values(), *kinds, *numbers)
    found = _helpers.get(key)
    if found is None:
        from ..triton.hopper.kernels import dq_fixed_point as triton_summed
        from ..triton.kernels import (
            forward as triton_kernels,
        )
        from ..triton.kernels import (
            norms as triton_numbers,
        )
        from ..triton.kernels import (
            tables as triton_bands,
        )

        if len(_helpers) > 4096:
            _helpers.clear()
        homes = (triton_numbers, triton_summed, triton_bands, triton_kernels)
        kernel = next(getattr(home, name) for home in homes if hasattr(home, name))
        found = _helpers[key] = Launch(kernel, grid, constants, options or {"num_warps": 4})
    found(tensors, numbers)
