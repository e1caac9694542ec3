"""More figures of a trained model: what a study measures when a job has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Trained:
    """A job that has ended: the folder of its run, and what decided it."""

    folder: Path
    # As in its record, and as they were given to training.
    settings: Mapping[str, Any]
    chosen: Mapping[str, Any] = field(default_factory=dict)
    # What --data named; "" without it.
    source: str = ""

    @cached_property
    def model(self) -> Any:
        """The trained model as it was saved, on the GPU if there is one."""
        from .. import models

        kinds: dict[str, Any] = {
            "lm": models.KernelLM, "translation": models.KernelTranslator,
            "vision": models.KernelViT, "recall": models.KernelLM,
        }  # fmt: skip
        model = kinds[self.settings["task"]].from_pretrained(self.folder / "model")
        return model.to(self.device).eval()

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def task(self) -> Any:
        """The task of the run, with its data and tokenizer."""
        from ..train import Settings
        from ..train.tasks import TASKS

        return TASKS[self.settings["task"]](Settings(**self.chosen).resolve())

    def evaluate(self) -> dict[str, Any]:
        """The metrics of the model as it was saved, on validation data."""
        from ..train.distributed import Team

        found: dict[str, Any] = self.task.evaluate(self.model, Team(self.device, 0, 1), final=False)
        return found

    def file(self, place: str) -> Path | None:
        """A file in the folder that --data named, or None if it is not there."""
        path = Path(self.source) / place
        return path if self.source and path.exists() else None
