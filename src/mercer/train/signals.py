"""How a run is told to stop: by a signal, or by the end of the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Of Linux's prctl: the signal that this process gets when its parent ends.
PARENT_DEATH_SIGNAL = 1
TERM = int(signal.SIGTERM)


@contextlib.contextmanager
def signals() -> Iterator[Callable[[], int]]:
    """A function that tells the signal received so far, SIGINT or SIGTERM, or 0.

    The run finishes its step and saves a checkpoint first. A second signal ends the process. Works
    in the main thread only; elsewhere it tells 0. A process of torchrun also gets SIGTERM if
    torchrun itself is gone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    caught = [0]
    before: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        caught[0] = number
        signal.signal(number, before[number])

    parent = os.getppid() if torch.distributed.is_torchelastic_launched() else None

    def look() -> int:
        if parent is not None and os.getppid() != parent and not caught[0]:
            caught[0] = TERM
        return caught[0]

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, note)
    try:
        yield look
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def end_with_torchrun() -> None:
    """On Linux: SIGTERM when torchrun, the parent of this process, ends in any way."""
    if sys.platform == "linux" and torch.distributed.is_torchelastic_launched():
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, TERM)
