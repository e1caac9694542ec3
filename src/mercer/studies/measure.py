"""More figures of a trained model: what a study measures when a job has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any


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
    def loaded(self) -> Any:
        """The trained model as it was saved, with its tokenizer, on the GPU if there is one."""
        from .. import use

        return use.load(self.folder)

    @property
    def model(self) -> Any:
        return self.loaded.model

    @cached_property
    def task(self) -> Any:
        """The task of the run, with its data and tokenizer."""
        from ..train import Settings
        from ..train.tasks import make

        return make(Settings(**self.chosen).resolve())

    def evaluate(self, data: Path | None = None, **given: Any) -> dict[str, Any]:
        """The metrics of the model as it was saved, on validation data or on a file.

        `given` is as in `mercer.use.evaluate`.
        """
        from .. import use

        judged = use.evaluate(self.loaded, data, output=self.folder / "measured", **given)
        return dict(judged.figures)

    def file(self, place: str) -> Path | None:
        """A file in the folder that --data named, or None if it is not there."""
        path = Path(self.source) / place
        return path if self.source and path.exists() else None
