"""One kernel with its grid and constants, and how it is started."""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .device import INTERPRETED

# CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT of the driver, in percent; and the shared
# memory that the driver takes for itself of each program, in bytes.
CARVEOUT, RESERVED = 9, 1024
# How many launches `start` caches before it clears the cache.
MOST = 4096


@dataclass(eq=False)
class Launch:
    """A kernel with everything but its tensors and numbers; compiled at its first start.

    Cache it under a key of everything that Triton specialises for.
    """

    kernel: Any
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: dict[str, int]
    # What Triton compiled, and the same with its grid; None before the first start.
    compiled: Any = None
    runner: Any = None
    # Whether L1 gets all that the kernel does not need as shared memory: spilled registers go to L1.
    reserve_l1: bool = False
    # Whether the compiled kernel takes arguments directly.
    direct: bool = True

    def __call__(self, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> None:
        if INTERPRETED:
            self._ordinary(tensors, numbers)
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
            self.compiled = self._ordinary(tensors, numbers)
            self.runner = self.compiled[self.grid]
            if self.reserve_l1:
                _reserve_l1(self.compiled, device)
        elif not (self.direct and self._directly(tensors, numbers)):
            self._ordinary(tensors, numbers)

    def _ordinary(self, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> Any:
        return self.kernel[self.grid](*tensors, *numbers, **self.constants, **self.options)

    def _directly(self, tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> bool:
        """Start the compiled kernel by position, as Triton's tutorials do, if this Triton can.

        It skips the search for the compiled kernel by each of some eighty arguments. Addresses in
        place of tensors save the driver a lookup each.
        """
        addresses = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
        try:
            self.runner(*addresses, *numbers, *self.constants.values())
        except (AttributeError, TypeError, ValueError):
            # Wrong arguments raise before anything is launched.
            self.direct = False
        return self.direct


def _reserve_l1(compiled: Any, device: torch.device) -> None:
    """Limit the shared-memory carve-out to what the kernel takes. The driver may ignore it."""
    whole = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    percent = -(-100 * (compiled.metadata.shared + RESERVED) // whole)
    with contextlib.suppress(OSError, AttributeError, TypeError, ctypes.ArgumentError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuFuncSetAttribute(ctypes.c_void_p(compiled.function), CARVEOUT, percent)


_launches: dict[tuple[Any, ...], Launch] = {}


def start(
    kernel: Any, grid: tuple[int, int, int], constants: dict[str, Any], tensors: tuple[Any, ...],
    numbers: tuple[int | float, ...], options: dict[str, int] | None = None,
) -> None:  # fmt: skip
    """Start a small kernel; reuse the launch of an earlier call that differs in tensors only."""
    kinds = ((x.dtype, x.data_ptr() % 16) for x in tensors)
    # The launch holds the kernel, so its id is not reused.
    key = (id(kernel), grid, tensors[-1].device, *constants.values(), *kinds, *numbers)
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= MOST:
            _launches.clear()
        found = _launches[key] = Launch(kernel, grid, constants, options or {"num_warps": 4})
    found(tensors, numbers)
