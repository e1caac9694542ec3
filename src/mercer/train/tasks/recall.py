"""Associative recall: give the value of a key that came earlier."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset

from ... import data
from .. import evaluate
from ..distributed import Team
from ..settings import Settings
from .language import LanguageModel
from .task import Task, Tell, check_least


class Recall(LanguageModel):
    """Give the value of a key that came earlier; the data are drawn by `data.recall`."""

    noun = judged = "sequences"

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
        tell: Tell | None = None,
    ) -> None:
        Task.__init__(self, settings)
        self.split = split or "valid"
        options = self.options(data.recall, length=settings.length, seed=settings.seed)
        self.recall = data.recall(**options)
        self.length, self.source = self.recall.longest, self.recall.source
        self.train = self.recall.train
        held_out = [self.recall.held_out(self.split, n) for n in self.recall.held_out_pairs]
        self.valid = ConcatDataset(held_out)

    @property
    def like(self) -> Any:
        return None

    def fingerprint(self) -> str | None:
        return None

    @property
    def has_test(self) -> bool:
        return True

    def vocabulary(self) -> dict[str, Any]:
        check_least("vocab_size", self.settings, self.recall.vocabulary, "tokens of the data")
        return {"vocab_size": self.recall.vocabulary}

    @property
    def step_items(self) -> int:
        assert self.settings.batch is not None
        return self.settings.batch

    def sample(self, model: Any, team: Team) -> dict[str, str] | None:
        return None

    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """The share of right values for each number of pairs, and the mean of these shares."""
        settings = self.settings
        assert settings.batch is not None
        share = None if items is None else max(1, items // len(self.recall.held_out_pairs))
        return evaluate.score_recall(
            model, self.recall, self.split, limit=lambda number: self._limit(number, share),
            collate=self.collate, team=team,
            batch=max(1, settings.batch // (settings.accumulate * team.size)),
            targets=self.count_targets, precision=self.precision,
        )  # fmt: skip
