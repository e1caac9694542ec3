"""The task of tagging: the part of speech of each word, or the genre of a text."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ... import data
from .. import evaluate
from ..distributed import Team
from ..settings import Settings
from .language import LanguageModel
from .task import IGNORE, Task, Tell, shorten_hash

MULTIPLE = 8


class Tagging(LanguageModel):
    """Labels from the words up to here, by a language model; the data are of `data.tagged`."""

    noun = "texts"
    judged = "labels"
    ragged = True

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
        tell: Tell | None = None,
    ) -> None:
        Task.__init__(self, settings, split=split, tell=tell)
        assert settings.length is not None
        self.length = settings.length
        tokenizer = settings.tokenizer if like is None else like
        self.tagged = self.read(data.tagged, tokenizer=tokenizer, length=self.length)
        self.tokenizer, self.source = self.tagged.tokenizer, self.tagged.source
        self.train, self.valid = self.tagged.train, self.tagged.valid

    @property
    def has_test(self) -> bool:
        return self.tagged.test is not None

    def fingerprint(self) -> str | None:
        return shorten_hash(self.tagged.fingerprint)

    @property
    def step_items(self) -> int:
        assert self.settings.batch is not None
        return self.settings.batch

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Padded on the right, where causal attention does not look."""
        longest = max(len(item["input_ids"]) for item in items)
        width = min(self.length, math.ceil(longest / MULTIPLE) * MULTIPLE)

        def pad(row: Tensor, value: int) -> Tensor:
            return F.pad(row, (0, width - len(row)), value=value)

        padded = [
            {"input_ids": pad(item["input_ids"], 0), "labels": pad(item["labels"], IGNORE)}
            for item in items
        ]
        return super().collate(padded)

    def sample(self, model: Any, team: Team) -> dict[str, str] | None:
        return None

    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """The mean loss, the share of right labels, and that of the most frequent label."""
        settings, valid = self.settings, self._spread(self.valid, items)
        assert settings.batch is not None

        def right(outputs: Any, inputs: dict[str, Any]) -> Tensor:
            hits: Tensor = outputs.logits[:, :-1].argmax(-1).eq(inputs["labels"][:, 1:]).sum()
            return hits

        loss, targets, hits = evaluate.mean_loss(
            model, valid, len(valid), collate=self.collate, team=team, look=right,
            batch=max(1, settings.batch // (settings.accumulate * team.size)),
            targets=self.count_targets, precision=self.precision,
        )  # fmt: skip
        labels = Counter(x for n in range(len(valid)) for x in valid[n]["labels"].tolist())
        # Label 0 is the most frequent one in training.
        return {
            "eval_loss": loss / targets,
            "accuracy": hits / targets,
            "most_frequent": labels[0] / targets,
        }
