"""Evaluates the model of a run: on the way, at the end, and before the first step to time it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .best import Best
from .budget import Budget, share
from .distributed import Team
from .settings import Settings
from .state import kept_random
from .tasks import Task
from .unigram import is_stuck


class Judge:
    """What the evaluations of a run find, and how much they read."""

    def __init__(self, settings: Settings, task: Task, team: Team) -> None:
        self.settings = settings
        self.task = task
        self.team = team
        self.metrics: dict[str, Any] = {}
        self.budget = share(settings, len(task.valid), task.step_items)
        self.best = Best(settings.patience, team)
        self._measured = False

    def restore(self, state: dict[str, Any] | None) -> None:
        """The budget of a run that goes on: its evaluations are not timed again."""
        if state is not None and self.budget.time is not None:
            self.budget = Budget(**{**state, "time": self.budget.time})
            self._measured = True

    def begin(self, model: Any) -> str | None:
        """Time a small evaluation where time bounds the run; one line on what will be read."""
        if self.budget.time is not None and not self._measured:
            with kept_random():
                self.budget.measure(
                    lambda items: self.task.evaluate(model, self.team, final=True, items=items),
                    lambda seconds: self.team.tell(lambda: seconds),
                )
        return self.budget.words(self.task.judged)

    def owes(self, step: int) -> bool:
        """Whether the last evaluation needs one like those on the way before it.

        It is a point of the curve, and with a patience the last step may be the best one.
        """
        if self.best.patience is not None:
            return self.best.last != step
        return self.budget.time is None and self.budget.usual < self.budget.last

    def gives_up(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Whether the run ends with this evaluation on the way, since it has learnt nothing."""
        share, steps = self.settings.give_up, self.settings.steps
        if share is None or steps is None or step < share * steps:
            return False
        return is_stuck(metrics, step)

    def evaluate(
        self, model: Any, step: int, *, final: bool, sample: bool
    ) -> tuple[dict[str, Any], dict[str, str] | None]:
        """The metrics, and a text of the model; random states are as before."""
        budget = self.budget
        items = budget.last if final else budget.usual
        # All of the validation data may be less than all of the test data.
        most = None if items == budget.whole else items
        with kept_random():
            found = self.task.evaluate(model, self.team, final=final, items=most)
            text = self.task.sample(model, self.team) if sample and self.settings.samples else None
        self.metrics = {**found, "eval_items": items}
        if final and self.best.step:
            self.metrics["best_step"] = self.best.step
        elif not final:
            self.best.note(step, found["eval_loss"], model)
        return self.metrics, text
