"""What a call costs the host: microseconds of Python and torch, on a machine without a GPU.

    python benchmarks/host.py [--kernels rbf,softmax] [--calls 500] [--widths 64,128]

The fused kernels take tensors of a CPU here, and their launches start nothing. What Triton itself
takes for a launch is not in it. Needs Triton.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from unittest.mock import patch

import torch

import mercer as mc
from mercer.bench.catalogue import build_kernel
from mercer.testing.compiling import answers

BATCH, HEADS, LENGTH = 2, 2, 2048


class Idle:
    """Stands for a compiled kernel."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: None


@contextmanager
def idle() -> Iterator[None]:
    """Calls with tensors of a CPU do all that they do on a Hopper GPU, but start nothing."""
    from mercer.backends.runtime import launch
    from mercer.backends.triton import backend
    from mercer.backends.triton.hopper import check
    from mercer.dispatch import rules

    with ExitStack() as changed:
        to = changed.enter_context
        to(patch.object(torch.cuda, "current_device", lambda: None))
        to(patch.object(launch.Launch, "_ordinary", lambda self, tensors, numbers: Idle()))
        to(patch.object(launch, "_reserve_l1", lambda compiled, device: None))
        to(patch.object(backend, "INTERPRETED", True))
        to(patch.object(rules, "family", lambda device: "hopper"))
        to(patch.object(check, "_disagrees", lambda *given: None))
        for module in [m for name, m in sys.modules.items() if name.startswith("mercer.backends")]:
            for name, value in answers(90).items():
                if hasattr(module, name):
                    to(patch.object(module, name, lambda device, value=value: value))
        yield


def main() -> None:
    options = read()
    with idle():
        for name in options.kernels.split(","):
            row = [measure(name, width, options) for width in options.widths]
            print(f"{name:18}" + "".join(f"{a:8.0f} {b:8.0f}" for a, b in row), flush=True)


def measure(name: str, width: int, options: argparse.Namespace) -> tuple[float, float]:
    """Medians of the forward and of the backward, in microseconds."""
    kernel = build_kernel(name, HEADS, width)
    shape = (BATCH, HEADS, LENGTH, width)
    given = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    q, k, v = given
    learned = [*given, *kernel.parameters()]
    grad = torch.zeros(shape, dtype=torch.bfloat16)
    forward, backward = [], []
    for _ in range(options.calls):
        start = time.perf_counter()
        out = mc.smooth(kernel, q, k, v, filter=mc.Causal())
        middle = time.perf_counter()
        torch.autograd.grad(out, learned, grad)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    return 1e6 * median(forward), 1e6 * median(backward)


def read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", default="softmax,rbf,alibi,adaptive,lookup")
    parser.add_argument(
        "--widths", type=lambda text: [*map(int, text.split(","))], default=[64, 128]
    )
    parser.add_argument("--calls", type=int, default=500)
    return parser.parse_args()


if __name__ == "__main__":
    main()
