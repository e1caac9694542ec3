"""How far a run is, and how long its steps took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int
    # None where time ends the run.
    steps: int | None
    loss: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    # What an evaluation at this step found; None for a log.
    metrics: dict[str, float] | None = None


class Stopwatch:
    """Seconds of steps alone; evaluations and checkpoints do not count."""

    def __init__(self) -> None:
        self.before = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        return self.before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.before, self._since = self.seconds, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        running = self._since is not None
        self.stop()
        try:
            yield
        finally:
            if running:
                self.start()
