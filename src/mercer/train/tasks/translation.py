"""The task of translators: translate sentences."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ... import data, models
from ...models import presets
from .. import evaluate, samples
from ..distributed import Team
from ..scores import Answers, one_line
from ..settings import Settings
from ..unigram import MOST, Unigram
from .task import Task, Tell, shorten_hash

# Lengths that differ in few ways need few compiled kernels.
MULTIPLE = 16


class Translation(Task):
    """Translate sentences."""

    noun = judged = "pairs"
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
        super().__init__(settings, split=split, tell=tell)
        tokenizer = settings.tokenizer if like is None else like
        read = data.sketch_pairs if sketch else data.pairs
        self.pairs = self.read(read, tokenizer=tokenizer)
        self.how = self.pairs.how if sketch else None
        self.tokenizer = self.pairs.tokenizer
        self.source = self.pairs.source
        most = settings.length if split is None else None
        self.train = self.pairs.encoded("train", max_length=most)
        self.valid = self.pairs.encoded("valid")

    def fingerprint(self) -> str | None:
        return shorten_hash(self.pairs.train.fingerprint(), self.pairs.valid.fingerprint())

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(self.pairs.collate(items, MULTIPLE))

    def count_tokens(self, inputs: dict[str, Any]) -> int | Tensor:
        """Tokens of both sides, without padding."""
        return inputs["attention_mask"].sum() + self.count_targets(inputs)

    @property
    def has_test(self) -> bool:
        return self.pairs.test is not None

    def config(self) -> Any:
        return presets.translator(self.settings.preset, **(self.vocabulary() | self.parts()))

    def build(self) -> Any:
        model = models.KernelTranslator(self.config())
        model.generation_config.num_beams = self.settings.beams
        return model

    @functools.cached_property
    def unigram(self) -> Unigram:
        return Unigram(self.train.targets(MOST), len(self.tokenizer))

    def sample(self, model: Any, team: Team) -> dict[str, str] | None:
        """The greedy translation of the first validation sentence."""
        (source, target), given = self.pairs.valid[0], self._sources([self.valid[0]])
        found = samples.translate(model, given, team=team, precision=self.precision)
        return {"prompt": source, "sample": self._decode(found)[0], "reference": target}

    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """Nats per token and perplexity; after training, BLEU, too."""
        settings = self.settings
        assert settings.batch is not None
        batch = max(1, settings.batch // (settings.accumulate * team.size))

        def frequent(outputs: Any, inputs: dict[str, Any]) -> Tensor:
            return self.unigram.total(inputs["labels"])

        # Of the training data, which a task of one split does not have.
        look = frequent if self.only is None else None
        valid = self._spread(self.valid, items)
        loss, targets, plain = evaluate.mean_loss(
            model, valid, len(valid), batch=batch, collate=self.collate, look=look,
            targets=self.count_targets, team=team, precision=self.precision,
        )  # fmt: skip
        found: dict[str, Any] = {
            "eval_loss": loss / targets,
            "perplexity": evaluate.perplexity(loss / targets),
        }
        if look is not None:
            found["unigram_loss"] = plain / targets
        if final:
            pairs, encoded = self.pairs.valid, self.valid
            # A batch of short sentences is translated in few steps.
            lengths = encoded.lengths[: self._limit(len(pairs), items)]
            order = sorted(range(len(lengths)), key=lengths.__getitem__)

            def inputs(numbers: list[int]) -> dict[str, Any]:
                return self._sources([encoded[order[n]] for n in numbers])

            scores, texts = evaluate.score_translations(
                model, [pairs[n] for n in order], inputs=inputs, decode=self._decode,
                batch=batch, beams=settings.beams, team=team, precision=self.precision,
            )  # fmt: skip
            found |= scores
            lines = dict(zip(order, map(one_line, texts), strict=True))
            self.answers = Answers(name="hypotheses.txt", lines=[lines[n] for n in sorted(lines)])
        return found

    def _sources(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: x for name, x in self.collate(items).items() if name != "labels"}

    def _decode(self, ids: Tensor) -> list[str]:
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]
