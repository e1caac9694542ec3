"""More figures of a trained model: what a study measures when a job has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Trained:
    """A job that has ended: the folder of its run, and what decided it."""

    folder: Path
    settings: Mapping[str, Any]
    # What --data named; "" without it.
    source: str = ""

    @cached_property
    def model(self) -> Any:
        """The trained model, on the GPU if there is one."""
        import torch

        from .. import models

        kinds: dict[str, Any] = {
            "lm": models.KernelLM, "translation": models.KernelTranslator,
            "vision": models.KernelViT, "recall": models.KernelLM,
        }  # fmt: skip
        model = kinds[self.settings["task"]].from_pretrained(self.folder / "model")
        return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder / "model")

    def file(self, place: str) -> Path | None:
        """A file in the folder that --data named, or None if it is not there."""
        path = Path(self.source) / place
        return path if self.source and path.exists() else None
