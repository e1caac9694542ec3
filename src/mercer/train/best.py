"""The best weights of a run by validation loss, and when it has waited long enough for better ones.

The rule: an evaluation on the way is better if its validation loss is below that of all before it.
A run with a patience ends after so many evaluations in a row that were not better, or at its last
step, which is evaluated, too. What is judged at the end, and saved, is the model of the best one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .distributed import Team
from .state import gather_model, spread_model

FILE = "best.safetensors"


class Patience(Exception):
    """A run that goes on had come to its end before: it takes no further step."""


class Best:
    """The best evaluation so far; without a patience it notes nothing."""

    def __init__(self, patience: int | None, team: Team) -> None:
        self.patience = patience
        self.team = team
        # The best evaluation, and the last one; 0 is none.
        self.step, self.last = 0, 0
        self.loss = math.inf
        # Evaluations since the best one.
        self.since = 0
        # Of the best one, on the CPU of the main process.
        self._weights: dict[str, Tensor] = {}

    @property
    def over(self) -> bool:
        """Whether the patience is at its end."""
        return self.patience is not None and self.since >= self.patience

    def note(self, step: int, loss: float, model: nn.Module) -> None:
        """An evaluation on the way; collective."""
        if self.patience is None:
            return
        self.last = step
        self.since += 1
        if loss < self.loss:
            self.step, self.loss, self.since = step, loss, 0
            # Weights on the CPU are those that go on learning.
            self._weights = {name: x.clone() for name, x in gather_model(model).items()}

    def restore(self, model: nn.Module) -> None:
        """Give the model the weights of the best evaluation; collective."""
        if self.step not in (0, self.last):
            spread_model(model, self._weights, self.team.size > 1)

    def save(self, folder: Path) -> None:
        """Write the weights beside a checkpoint's; in the main process."""
        if self._weights:
            save_file(self._weights, folder / FILE)

    def state(self) -> dict[str, Any]:
        names = ("step", "last", "loss", "since")
        return {name: getattr(self, name) for name in names if self.step}

    def load(self, state: dict[str, Any] | None, folder: Path) -> None:
        """Restore what a checkpoint holds."""
        for name, value in (state or {}).items():
            setattr(self, name, value)
        if self.team.main and (folder / FILE).exists():
            self._weights = load_file(folder / FILE)
