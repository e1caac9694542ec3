"""The task of language models: predict the next token."""

from __future__ import annotations

import functools
import math
from typing import Any

from torch import Tensor

from ... import data, models
from ...models import presets
from .. import evaluate, samples
from ..distributed import Team
from ..settings import Settings
from ..unigram import Unigram
from .task import IGNORE, Task, Tell, shorten_hash


class LanguageModel(Task):
    """Predict the next token."""

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(settings, split=split, tell=tell)
        tokenizer = settings.tokenizer if like is None else like
        read = data.sketch_text if sketch else data.text
        self.text = self.read(read, tokenizer=tokenizer, seed=settings.seed)
        self.valid, self.how = self.text.valid, self.text.how if sketch else None
        assert settings.length is not None
        self.length = settings.length
        self.tokenizer = self.text.tokenizer
        self.source = self.text.source
        self.train = self.text.blocks("train", self.length) if split is None else ()

    @property
    def has_test(self) -> bool:
        return self.text.test is not None

    def fingerprint(self) -> str | None:
        return shorten_hash(self.text.train.fingerprint, self.text.valid.fingerprint)

    def config(self) -> Any:
        parts = self.vocabulary() | self.parts()
        config = presets.lm(self.settings.preset, **parts)
        if config.context_length < self.length and "context_length" not in parts:
            config = presets.lm(self.settings.preset, **parts, context_length=self.length)
        return config

    @property
    def step_items(self) -> int:
        return super().step_items * self.length

    def build(self) -> Any:
        return models.KernelLM(self.config())

    def count_targets(self, inputs: dict[str, Any]) -> Tensor:
        return inputs["labels"][..., 1:].ne(IGNORE).sum()

    def loss(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = outputs.loss
        return loss

    @functools.cached_property
    def unigram(self) -> Unigram:
        return Unigram(self.text.train.ids, len(self.tokenizer))

    def sample(self, model: Any, team: Team) -> dict[str, str] | None:
        """The most likely continuation of a passage in the middle of the validation data."""
        start = len(self.valid) // 2
        prompt = self.valid.slice(start, start + min(samples.PROMPT, self.length // 2))
        found = samples.continue_text(model, prompt, team=team, precision=self.precision)
        return {
            "prompt": self.tokenizer.decode(prompt.tolist(), skip_special_tokens=True),
            "sample": self.tokenizer.decode(found),
        }

    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """Nats per token, perplexity, and bits per byte of the text."""
        settings, file = self.settings, self.valid
        assert settings.batch is not None
        batch = max(1, settings.batch // (settings.accumulate * team.size))
        tokens = min(len(file), max(self._limit(len(file), items), 2))
        if settings.evaluate_by == "memory":
            loss, targets = evaluate.stream_loss(
                model, file.ids[:tokens], length=self.length, streams=batch, team=team,
                precision=self.precision,
            )  # fmt: skip
        else:
            # Windows that share one token: each token is predicted once, within its window.
            stride = self.length - 1 if settings.evaluate_by == "blocks" else self.length // 2
            windows = self.text.windows("valid", self.length, stride)
            number = len(windows)
            if tokens < len(file):
                number = min(number, 1 + max(0, tokens - self.length) // stride)
            if number < len(windows):
                tokens = (number - 1) * stride + min(self.length, len(file))
            loss, targets, _ = evaluate.mean_loss(
                model, windows, number, batch=batch, collate=self.collate,
                targets=self.count_targets, team=team, precision=self.precision,
            )  # fmt: skip
        found = {
            "eval_loss": loss / targets,
            "perplexity": evaluate.perplexity(loss / targets),
            "bits_per_byte": loss / math.log(2) / self._bytes(tokens),
            "eval_tokens": int(targets),
        }
        if self.only is None:
            plain = float(self.unigram.total(file.slice(1, tokens)))
            found["unigram_loss"] = plain / (tokens - 1)
        return found

    def _bytes(self, tokens: int) -> int:
        file = self.valid
        if tokens == len(file):
            return file.num_bytes
        text = self.tokenizer.decode(file.ids[:tokens].tolist(), skip_special_tokens=True)
        return max(1, len(text.encode()))
