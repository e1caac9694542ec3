"""Compiles the kernels of a call for a GPU that this machine need not have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

# Called for each kernel with its name and Triton's compiled kernel.
Read = Callable[[str, Any], None]
# Of H200 and A100: multiprocessors, and the shared memory that a program may take, in bytes.
PROCESSORS = {90: 132, 80: 108}
SHARED = {90: 232448, 80: 166912}


class Driver:
    """A stand-in for Triton's driver: the properties of the GPU it compiles for."""

    launcher_cls = None

    def __init__(self, capability: int) -> None:
        self.capability, self.utils = capability, self

    def get_device_properties(self, device: int) -> dict[str, int]:
        shared, count = SHARED[self.capability], PROCESSORS[self.capability]
        return {"max_shared_mem": shared, "multiprocessor_count": count}

    def get_current_device(self) -> int:
        # Triton caches compiled kernels per device number.
        return self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def answers(capability: int) -> dict[str, Any]:
    """The answers of `backends.runtime.device` for this GPU, by name of function."""
    hopper = capability == 90
    return {
        "settles": hopper, "has_tma": hopper, "on_hopper": hopper, "there": hopper,
        "processors": PROCESSORS[capability], "shared_memory": SHARED[capability],
    }  # fmt: skip


def name_of(fn: Any) -> str:
    """The name of a kernel with its tier, such as hopper.forward."""
    parts = fn.__module__.split(".")
    return f"{parts[parts.index('kernels') - 1]}.{fn.__name__}"


@contextmanager
def compiled(capability: int, read: Read) -> Iterator[None]:
    """Within: calls of fused kernels with CPU tensors compile for a GPU and launch nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from ..backends.polynomial import plan as polynomial
    from ..backends.runtime import launch
    from ..backends.tokenwise import backend as tokenwise
    from ..backends.tokenwise import function, lookup
    from ..backends.triton import backend, plan
    from ..backends.triton.hopper import check, tier

    inner = JITFunction.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found = inner(kernel, *args, grid=grid, warmup=True, **options)
        name, shared = name_of(kernel.fn), found.metadata.shared
        assert shared <= SHARED[capability], f"{name} takes {shared} bytes of shared memory"
        read(name, found)
        return found

    def start(self: Any, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        self.kernel[self.grid](*tensors, *numbers, **self.constants, **self.options)

    with ExitStack() as changed:
        changed.enter_context(patch.object(JITFunction, "run", run))
        changed.enter_context(patch.object(launch.Launch, "__call__", start))
        # Nothing is computed, so the check of the Hopper tier has nothing to compare.
        allowed = capability == 90
        changed.enter_context(patch.object(tier, "allows", lambda *given: allowed))
        changed.enter_context(
            patch.object(tier, "completed", lambda way, p, start, *given: [start(*given)])
        )
        # Accept CPU tensors.
        for module in (backend, polynomial, tokenwise, function, lookup):
            changed.enter_context(patch.object(module, "INTERPRETED", True))
        changed.enter_context(patch.object(tokenwise, "_refuses", lambda task, q: None))
        for kept in (plan._plans, launch._launches):
            changed.enter_context(patch.dict(kept, clear=True))
        for module in [m for name, m in sys.modules.items() if name.startswith("mercer.backends")]:
            for name, value in answers(capability).items():
                if hasattr(module, name) and module is not check:
                    answer = patch.object(module, name, lambda device, value=value: value)
                    changed.enter_context(answer)
        changed.enter_context(patch.object(driver, "_active", Driver(capability)))
        yield
