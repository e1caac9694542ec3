"""How far a run is, how long its steps took, and what they saw."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .distributed import Team
from .settings import Settings


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
    # A text of the model with an evaluation: what it was given, and what it wrote.
    sample: dict[str, str] | None = None
    # One line on how the run goes about it; everything else is empty then.
    note: str | None = None


class Reading:
    """Notes on data that take long to read: the first after `every` seconds, and so on."""

    def __init__(
        self, on_progress: Callable[[Progress], None] | None, steps: int | None, every: float = 5.0
    ) -> None:
        self.on_progress, self.steps, self.every = on_progress, steps, every
        self.spoken = time.monotonic()

    def __call__(self, what: str, share: float) -> None:
        now = time.monotonic()
        if self.on_progress is not None and now - self.spoken >= self.every:
            self.spoken = now
            note = f"{what}: {share:.0%}"
            self.on_progress(Progress(step=0, steps=self.steps, note=note))


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


class Pace:
    """The seconds of the shortest step so far; the first one, which compiles, does not count."""

    def __init__(self) -> None:
        self.shortest = 0.0
        self._last: float | None = None

    def lap(self, seconds: float) -> float:
        """After a step that ended at `seconds`: the seconds of another one."""
        if self._last is not None:
            taken = seconds - self._last
            self.shortest = min(self.shortest, taken) if self.shortest else taken
        self._last = seconds
        return self.shortest


class Counts:
    """Tokens and losses of the steps so far, over all processes."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.tokens: Tensor = team.sum([0])[0]
        # Since the last log, of this process.
        self._losses = torch.zeros_like(self.tokens)
        self._logged = 0
        # Tokens and seconds after the first step, which compiles and allocates.
        self._mark: tuple[float, float] | None = None

    @property
    def started(self) -> bool:
        """Whether this process has finished a step."""
        return self._mark is not None

    def add(self, tokens: Tensor, loss: Tensor, clock: Stopwatch) -> None:
        """Count a step."""
        self.tokens = self.tokens + tokens
        self._losses = self._losses + loss
        if self._mark is None:
            # Synchronises, so that later steps are timed from here.
            self._mark = self.tokens.item(), clock.seconds

    def mean_loss(self, step: int) -> float:
        """The mean over the steps since the last call; collective."""
        mean = self._shared_losses() / (step - self._logged)
        self._losses, self._logged = torch.zeros_like(self._losses), step
        return mean

    def speed(self, clock: Stopwatch) -> float | None:
        """Tokens per second of all processes, from the second step on; evaluations do not count."""
        tokens, seconds = self._mark or (0.0, 0.0)
        tokens, seconds = self.tokens.item() - tokens, clock.seconds - seconds
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def state(self) -> dict[str, Any]:
        """For a checkpoint; collective."""
        losses = self._shared_losses()
        return {"tokens": self.tokens.item(), "losses": losses, "logged": self._logged}

    def load(self, state: dict[str, Any], *, step: int) -> None:
        self.tokens = self.tokens + state["tokens"]
        # An older checkpoint has no losses.
        self._losses = self._losses + state.get("losses", 0.0)
        self._logged = state.get("logged", step)

    def _shared_losses(self) -> float:
        return self.team.sum([self._losses]).item() / self.team.size


def seconds_left(settings: Settings, step: int, whole: Stopwatch, start: int) -> float | None:
    """By the pace since step `start`, at which this process began."""
    left = [] if settings.time is None else [settings.time - whole.seconds]
    if settings.steps is not None and step > start:
        left.append((whole.seconds - whole.before) / (step - start) * (settings.steps - step))
    return max(min(left), 0.0) if left else None
