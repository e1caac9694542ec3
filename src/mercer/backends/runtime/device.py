"""Properties of the GPU and the installation. All other modules ask this one."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch

INSTALLED = importlib.util.find_spec("triton") is not None
# Triton's interpreter, in which the tests run the kernels on a CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# The shared memory that a program may take on Hopper, in bytes.
HOPPER = 232448
# The number of SMs that plans assume without a GPU.
INTERPRETED_PROCESSORS = 16


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """The shared memory of one program, in bytes: 227 KiB on Hopper, 99 on most others."""
    if device.type != "cuda":
        return HOPPER
    from triton.runtime import driver

    # Triton compares a compiled kernel with the same number.
    most: int = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return most


@lru_cache(maxsize=16)
def on_hopper(device: torch.device) -> bool:
    """Whether the GPU has asynchronous matrix products of warp groups (WGMMA)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@lru_cache(maxsize=16)
def has_tma(device: torch.device) -> bool:
    """Whether a GPU has TMA: Hopper and later."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """The number of streaming multiprocessors (SMs)."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def settles(device: torch.device) -> bool:
    """Whether a kernel must wait for a product before it overwrites the operands; see `_settle`."""
    return on_hopper(device) and not INTERPRETED
