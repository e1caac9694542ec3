"""How much each evaluation of a run reads, and how the time of a run is shared out.

Evaluations come at fixed steps, so runs with different seeds or systems have the same ones. Without
`eval_items` an evaluation on the way reads as many items as the steps between two evaluations train
on, which takes about a third of their time. The last one reads everything.

`time` bounds steps, evaluations and checkpoints together. A small evaluation before the first step
says what an item takes. The last evaluation gets at most `SHARE` of the time: if it would take
more, it reads a half, a quarter, … of the items. The steps end when the rest of the time is just
enough for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from .settings import Settings

SHARE = 0.25
# The estimate of the last evaluation is multiplied by this.
MARGIN = 1.25
# A small evaluation is repeated, since the first one allocates, if it took less of the time.
SHORT = 0.02


@dataclass
class Budget:
    """The items of an evaluation on the way and of the last one, and the seconds of an item."""

    # All items that there are, at most `eval_items`.
    whole: int
    usual: int
    last: int
    # A small evaluation: the items of one step.
    least: int
    # With a time alone: its seconds, and the seconds of one item in the last evaluation.
    time: float | None = None
    each: float = 0.0

    @property
    def reserve(self) -> float:
        """Seconds that are kept for the last evaluation."""
        if self.time is None:
            return 0.0
        return min(MARGIN * self.last * self.each, 0.5 * self.time)

    @property
    def limit(self) -> float | None:
        """Seconds after which no step begins."""
        return None if self.time is None else self.time - self.reserve

    def fits(self, seconds: float) -> bool:
        """Whether there is time for an evaluation on the way after so many seconds."""
        return self.limit is None or seconds + self.usual * self.each < self.limit

    def measure(self, evaluate: Callable[[int], Any], agree: Callable[[float], float]) -> None:
        """Time a small evaluation, and cut the last one to its share of the time.

        `agree` gives all processes the seconds of the main one.
        """
        assert self.time is not None
        taken = agree(_seconds(evaluate, self.least))
        if taken < SHORT * self.time:
            taken = min(taken, agree(_seconds(evaluate, self.least)))
        self.each = taken / self.least
        while self.last > self.least and MARGIN * self.last * self.each > SHARE * self.time:
            self.last = -(-self.last // 2)

    def words(self, noun: str) -> str | None:
        """One line on what evaluations read; None if they all read everything."""
        if self.time is not None:
            assert self.limit is not None
            of = (
                f"all {self.whole:,}"
                if self.last == self.whole
                else (f"{self.last:,} of {self.whole:,}")
            )
            return (
                f"{self.time:g} s in all: steps for {self.limit:.3g} s, then the last evaluation "
                f"on {of} {noun}, about {self.last * self.each:.2g} s"
            )
        if self.usual == self.whole:
            return None
        return (
            f"evaluations on the way read {self.usual:,} of {self.whole:,} {noun}, the last one all"
        )

    def state(self) -> dict[str, Any]:
        return asdict(self)


def share(settings: Settings, whole: int, step: int) -> Budget:
    """The budget of a run, with `whole` items to evaluate on, by steps of `step` items."""
    assert settings.eval_every is not None
    usual = whole = min(whole, settings.eval_items or whole)
    if settings.eval_items is None:
        usual = min(whole, max(2, settings.eval_every * step))
    return Budget(whole=whole, usual=usual, last=whole, least=min(step, whole), time=settings.time)


def _seconds(evaluate: Callable[[int], Any], items: int) -> float:
    begun = time.perf_counter()
    evaluate(items)
    return time.perf_counter() - begun
