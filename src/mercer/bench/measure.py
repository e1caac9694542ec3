"""Read this first: how `mercer bench` measures a row.

For each shape we measure softmax attention by torch's own operator, whose fastest backend is the
yardstick; then every kernel on every backend; then the other peers. A row is checked, then timed.
A row that fails says why, and the next one runs.

Floating-point operations are those of softmax attention on the same shape and filter, whatever the
row computes: 4 D a visible pair forward, 2.5 times that backward. So rates compare like times.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .check import check
from .clock import Clock
from .contenders import Contender, Ours
from .peers import SDPA, build
from .settings import Settings
from .workload import BACKWARD, Inputs, Workload


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurement of one contender on one shape, or why there is none."""

    shape: str
    name: str
    kernel: str
    backend: str = ""  # as given; empty for a peer
    ran: str = ""  # what `auto` chose
    problem: str | None = None
    forward_ms: float | None = None
    forward_backward_ms: float | None = None
    memory_bytes: int | None = None
    forward_tflops: float | None = None
    forward_backward_tflops: float | None = None
    # The yardstick's time divided by this row's.
    forward_of_sdpa: float | None = None
    forward_backward_of_sdpa: float | None = None

    @property
    def ours(self) -> bool:
        return bool(self.backend)

    @property
    def label(self) -> str:
        if not self.ours:
            return self.name
        chosen = f"auto: {self.ran}" if self.backend == "auto" and self.ran else self.backend
        return f"{self.name}, {chosen}"

    @property
    def decisive_ms(self) -> float | None:
        """Forward and backward together, or forward where only that was timed."""
        return self.forward_ms if self.forward_backward_ms is None else self.forward_backward_ms

    def beside(self, yardsticks: list[Row]) -> Row:
        """The row with its speed as a share of the fastest yardstick's."""

        def share(part: str) -> float | None:
            own = getattr(self, part)
            times = [t for y in yardsticks if (t := getattr(y, part)) is not None]
            return min(times) / own if times and own else None

        return replace(
            self,
            forward_of_sdpa=share("forward_ms"),
            forward_backward_of_sdpa=share("forward_backward_ms"),
        )


def measure(settings: Settings) -> Iterator[Row]:
    """Yield all rows."""
    for workload in settings.workloads:
        flops = workload.flops()
        peers = [p for p in build(settings.kernels) if p.available(workload.device) is None]
        yardsticks: list[Row] = []
        try:
            for peer in peers:
                if isinstance(peer, SDPA):
                    yardsticks.append(measure_row(peer, workload, settings, flops))
        finally:
            # Yardsticks wait until the fastest is known; an interrupt still yields those measured.
            yield from [row.beside(yardsticks) for row in yardsticks]
        ours = [Ours(kernel, b) for kernel in settings.kernels for b in settings.backends]
        others = [p for p in peers if p.key in settings.peers and not isinstance(p, SDPA)]
        for contender in (*ours, *others):
            yield measure_row(contender, workload, settings, flops).beside(yardsticks)


def measure_row(contender: Contender, workload: Workload, settings: Settings, flops: float) -> Row:
    """Measure one contender on one shape; failures become part of the row."""
    row = Row(
        shape=str(workload),
        name=contender.name,
        kernel=contender.kernel,
        backend=contender.backend,
    )
    try:
        row = _measured(row, contender, workload, settings, flops)
    except torch.OutOfMemoryError:
        row = replace(row, problem="out of memory")
    except ValueError as error:
        # The row already names the backend.
        reason = _first_line(error).removeprefix(f"backend {row.backend!r} cannot run this: ")
        row = replace(row, problem=f"refuses: {reason}")
    # Compilers, drivers and other libraries raise anything, and the next row may still run.
    except Exception as error:
        memory = "can't allocate memory" in str(error)
        said = "out of memory" if memory else f"fails: {type(error).__name__}: {_first_line(error)}"
        row = replace(row, problem=said)
    if workload.device.type == "cuda":
        # Free the memory of a failed row for the next one.
        gc.collect()
        torch.cuda.empty_cache()
    return row


def _measured(
    row: Row, contender: Contender, workload: Workload, settings: Settings, flops: float
) -> Row:
    forward_only = settings.forward_only
    if workload.group > 1 and not contender.groups:
        raise ValueError("it needs as many key heads as query heads")
    given = workload.inputs(contender.kernel)
    settled = contender.settle(given, forward_only=forward_only)
    row = replace(row, ran=" / ".join(each.backend for each in settled))
    for each, only in settled.items():
        wrong = check(each, workload, forward_only=only)
        if wrong is not None:
            return replace(row, problem=wrong)

    clock = Clock(workload.device, settings.repeats, settings.graph)

    def forward() -> None:
        with torch.no_grad():
            contender.smooth(given)

    ms = clock.median(forward)
    row = replace(row, forward_ms=ms, forward_tflops=flops / ms / 1e9)
    if forward_only:
        return replace(row, memory_bytes=clock.peak(forward))

    tensors = list(given.named(parameters=contender.trains).values())
    steer = _steer(given, workload)

    def both() -> None:
        # Gradients are returned, not accumulated, so there is nothing to clear between runs.
        torch.autograd.grad(contender.smooth(given), tensors, steer, allow_unused=True)

    ms = clock.median(both)
    return replace(
        row,
        forward_backward_ms=ms,
        forward_backward_tflops=flops * (1 + BACKWARD) / ms / 1e9,
        memory_bytes=clock.peak(both),
    )


def _steer(given: Inputs, workload: Workload) -> Tensor:
    """A gradient of the output, [B, H, Q, V]."""
    shape = (workload.batch, workload.heads, workload.queries, workload.dim)
    return torch.randn(shape, device=given.v.device, dtype=given.v.dtype)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]
