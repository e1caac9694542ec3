"""Dispatch of whole calls of `vicinity`, and the lookup of taps."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor

from ..backends import Task
from ..backends.tokenwise import backend as tokenwise
from ..backends.tokenwise.taps import Convolution
from ..term.mix import Smoothed
from .problem import Problem


class Backend(Protocol):
    """The protocol of backends for convolved keys and values."""

    name: str

    def refuses(self, task: Task, keys: Tensor) -> str | None:
        """Why it cannot run a task whose `keys` are convolved, or None."""

    def keeps_nan(self, task: Task) -> bool:
        """Whether NaN stays in the rows that see it; if not, it gets cleaned inputs."""

    def run(self, task: Task, convolution: Convolution) -> Smoothed | None:
        """None if only the data show that it cannot run."""


BACKENDS = cast(tuple[Backend, ...], (tokenwise,))


def refusal(problem: Problem) -> str | None:
    """Why no backend takes the whole call, or None."""
    tasks = problem.tasks()
    if len(tasks) != 1:
        return "the kernel is not one term"
    reasons = [backend.refuses(tasks[0], problem.k.part("content")) for backend in BACKENDS]
    return None if None in reasons else reasons[0]


def run(problem: Problem, convolution: Convolution) -> Smoothed | None:
    """The whole call on the first backend that takes it, or None."""
    tasks = problem.tasks()
    if len(tasks) != 1:
        return None
    for backend in BACKENDS:
        if backend.refuses(tasks[0], problem.k.part("content")) is None:
            task = tasks[0] if backend.keeps_nan(tasks[0]) else problem.cleaned().tasks()[0]
            return backend.run(task, convolution)
    return None


def gather(table: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """The taps of these tokens, one tensor [B, T, H, S] for each target."""
    return tokenwise.gather(table, ids)
