"""The three tasks: language modelling, translation, vision.

A task has the data, the model, the loss and the evaluation. The trainer is the same for all.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import data, models
from ..models import presets
from ..names import suggest
from . import evaluate
from .distributed import Team
from .scores import Answers, one_line
from .settings import Settings

IGNORE = -100


class Task(ABC):
    """Data, model, loss and evaluation of a run.

    With `split`, this split of the data alone, to judge a model. `like` is then what the model was
    trained with: its tokenizer, or how it sees images.
    """

    # The unit of speed, the name of an item, and whether batches differ in shape.
    unit = "tokens"
    noun = "blocks"
    ragged = False
    train: Any
    tokenizer: Any = None
    source: str
    # The model's answers in the last evaluation at the end of a run.
    answers: Answers | None = None

    def __init__(self, settings: Settings, *, split: str | None = None, like: Any = None) -> None:
        self.settings = settings
        self.only = split

    @property
    def like(self) -> Any:
        """What the model is trained with, besides the settings."""
        return self.tokenizer

    @abstractmethod
    def config(self) -> Any:
        """The model's config."""

    @property
    def has_test(self) -> bool:
        """Whether the data has a test split besides the one for validation."""
        return False

    def sequence_length(self, config: Any) -> int:
        """Tokens of one item, at most."""
        assert self.settings.length is not None
        return self.settings.length

    @abstractmethod
    def build(self) -> Any:
        """The model, initialised by the seed."""

    @abstractmethod
    def evaluate(self, model: Any, team: Team, *, final: bool) -> dict[str, Any]:
        """The metrics of the task."""

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return {n: torch.stack([torch.as_tensor(i[n]) for i in items]) for n in items[0]}

    def count_targets(self, inputs: dict[str, Any]) -> Tensor:
        """The number of targets that the mean loss of a batch is over."""
        return inputs["labels"].ne(IGNORE).sum()

    def count_tokens(self, inputs: dict[str, Any]) -> int | Tensor:
        return inputs["input_ids"].numel()

    def loss(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        """The mean over the targets."""
        if not self.settings.smoothing:
            loss: Tensor = outputs.loss
            return loss
        logits, labels = outputs.logits, inputs["labels"]
        return F.cross_entropy(
            logits.float().flatten(0, -2),
            labels.flatten(),
            ignore_index=IGNORE,
            label_smoothing=self.settings.smoothing,
        )

    def groups(self, model: Any) -> dict[str, list[str]]:
        """Names of parameters by learning rate."""
        return models.groups(model)

    def precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if self.settings.dtype == "float32":
            return contextlib.nullcontext()
        return torch.autocast(device.type, torch.bfloat16)

    def read(self, function: Callable[..., Any], **given: Any) -> Any:
        """The data, read by a function of `mercer.data`, with the options of the settings."""
        settings = self.settings
        given = {"cache_dir": settings.cache, "split": self.only, **given}
        known = [n for n in inspect.signature(function).parameters if n not in given]
        known = [n for n in known if n not in ("source", "on_progress")]
        for name in settings.data_options:
            if name not in known:
                raise ValueError(f"the data has no option {name!r}; {suggest(name, known)}")
        return function(settings.data, **given, **settings.data_options)

    def parts(self) -> dict[str, Any]:
        """The config fields of the attention."""
        settings = self.settings
        names = ("system", "system_options", "kernel", "position", "value", "filter")
        given = {name: getattr(settings, name) for name in names}
        return {name: part for name, part in given.items() if part} | dict(settings.overrides)

    def vocabulary(self) -> dict[str, Any]:
        """The config fields that depend on the tokenizer."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        check_least("vocab_size", self.settings, len(self.tokenizer), "tokens of the tokenizer")
        found = {name: getattr(self.tokenizer, name) for name in names}
        return {"vocab_size": len(self.tokenizer), **found}

    def save_model(self, model: Any, weights: dict[str, Tensor], path: Path) -> None:
        """Write files for `from_pretrained`; `weights` are gathered, also of a sharded model."""
        model.save_pretrained(path, state_dict=weights)

    def _limit(self, items: int) -> int:
        most = self.settings.eval_items
        return items if most is None else max(1, min(items, most))


def check_least(name: str, settings: Settings, least: int, what: str) -> None:
    """Raise ValueError if the settings give a size that the data does not fit in."""
    given = settings.overrides.get(name)
    if isinstance(given, int) and given < least:
        raise ValueError(f"{name} must be at least {least}, the {what}, got {given}")


class LanguageModel(Task):
    """Predict the next token."""

    def __init__(self, settings: Settings, *, split: str | None = None, like: Any = None) -> None:
        super().__init__(settings, split=split)
        tokenizer = settings.tokenizer if like is None else like
        self.text = self.read(data.text, tokenizer=tokenizer, seed=settings.seed)
        assert settings.length is not None
        self.length = settings.length
        self.tokenizer = self.text.tokenizer
        self.source = self.text.source
        self.train = self.text.blocks("train", self.length) if split is None else ()

    @property
    def has_test(self) -> bool:
        return self.text.test is not None

    def config(self) -> Any:
        parts = self.vocabulary() | self.parts()
        config = presets.lm(self.settings.preset, **parts)
        if config.context_length < self.length and "context_length" not in parts:
            config = presets.lm(self.settings.preset, **parts, context_length=self.length)
        return config

    def build(self) -> Any:
        return models.KernelLM(self.config())

    def count_targets(self, inputs: dict[str, Any]) -> Tensor:
        return inputs["labels"][..., 1:].ne(IGNORE).sum()

    def loss(self, outputs: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = outputs.loss
        return loss

    def evaluate(self, model: Any, team: Team, *, final: bool) -> dict[str, Any]:
        """Nats per token, perplexity, and bits per byte of the text."""
        settings, file = self.settings, self.text.valid
        assert settings.batch is not None
        batch = max(1, settings.batch // (settings.accumulate * team.size))
        tokens = min(len(file), max(settings.eval_items or len(file), 2))
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
        return {
            "eval_loss": loss / targets,
            "perplexity": evaluate.perplexity(loss / targets),
            "bits_per_byte": loss / math.log(2) / self._bytes(tokens),
            "eval_tokens": int(targets),
        }

    def _bytes(self, tokens: int) -> int:
        file = self.text.valid
        if tokens == len(file):
            return file.num_bytes
        text = self.tokenizer.decode(file.ids[:tokens].tolist(), skip_special_tokens=True)
        return max(1, len(text.encode()))


class Translation(Task):
    """Translate sentences."""

    noun = "pairs"
    ragged = True

    def __init__(self, settings: Settings, *, split: str | None = None, like: Any = None) -> None:
        super().__init__(settings, split=split)
        tokenizer = settings.tokenizer if like is None else like
        self.pairs = self.read(data.pairs, tokenizer=tokenizer)
        self.tokenizer = self.pairs.tokenizer
        self.source = self.pairs.source
        most = settings.length if split is None else None
        self.train = self.pairs.encoded("train", max_length=most)
        self.valid = self.pairs.encoded("valid")

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(self.pairs.collate(items))

    def count_tokens(self, inputs: dict[str, Any]) -> int | Tensor:
        """Tokens of both sides, without padding."""
        return inputs["attention_mask"].sum() + self.count_targets(inputs)

    @property
    def has_test(self) -> bool:
        return self.pairs.test is not None

    def config(self) -> Any:
        return presets.translator(self.settings.preset, **(self.vocabulary() | self.parts()))

    def build(self) -> Any:
        return models.KernelTranslator(self.config())

    def evaluate(self, model: Any, team: Team, *, final: bool) -> dict[str, Any]:
        """Nats per token and perplexity; after training, BLEU, too."""
        settings = self.settings
        assert settings.batch is not None
        batch = max(1, settings.batch // (settings.accumulate * team.size))
        loss, targets, _ = evaluate.mean_loss(
            model, self.valid, self._limit(len(self.valid)), batch=batch, collate=self.collate,
            targets=self.count_targets, team=team, precision=self.precision,
        )  # fmt: skip
        found: dict[str, Any] = {
            "eval_loss": loss / targets,
            "perplexity": evaluate.perplexity(loss / targets),
        }
        if final:
            pairs, items = self.pairs.valid, self.valid

            def inputs(numbers: list[int]) -> dict[str, Any]:
                batch = self.collate([items[n] for n in numbers])
                return {name: x for name, x in batch.items() if name != "labels"}

            scores, texts = evaluate.score_translations(
                model, pairs[: self._limit(len(pairs))], inputs=inputs, decode=self._decode,
                batch=batch, beams=settings.beams, team=team, precision=self.precision,
            )  # fmt: skip
            found |= scores
            self.answers = Answers(name="hypotheses.txt", lines=[one_line(text) for text in texts])
        return found

    def _decode(self, ids: Tensor) -> list[str]:
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


class Vision(Task):
    """Classify images."""

    unit = "patches"
    noun = "images"

    def __init__(self, settings: Settings, *, split: str | None = None, like: Any = None) -> None:
        super().__init__(settings, split=split)
        size = settings.overrides.get("image_size")
        given = {} if size is None or "size" in settings.data_options else {"size": size}
        self.images = self.read(data.images, look=like, **given)
        self.source = self.images.source
        self.train = self.images.train
        self.patches = 1

    @property
    def like(self) -> Any:
        return self.images.look

    def sequence_length(self, config: Any) -> int:
        return int((config.image_size // config.patch_size) ** 2)

    def config(self) -> Any:
        images = self.images
        shape = {
            "num_labels": images.num_classes,
            "image_size": images.image_size,
            "num_channels": images.channels,
        }
        check_least("num_labels", self.settings, images.num_classes, "classes of the data")
        return presets.vit(self.settings.preset, **(shape | self.parts()))

    def build(self) -> Any:
        config = self.config()
        self.patches = self.sequence_length(config)
        return models.KernelViT(config)

    def count_tokens(self, inputs: dict[str, Any]) -> int | Tensor:
        return inputs["pixel_values"].shape[0] * self.patches

    def evaluate(self, model: Any, team: Team, *, final: bool) -> dict[str, Any]:
        """The mean loss and the top-1 accuracy."""
        settings, valid = self.settings, self.images.valid
        assert settings.batch is not None

        def right(outputs: Any, inputs: dict[str, Any]) -> Tensor:
            hits: Tensor = outputs.logits.argmax(-1).eq(inputs["labels"]).sum()
            return hits

        chosen: dict[int, int] = {}

        def note(numbers: list[int], outputs: Any) -> None:
            chosen.update(zip(numbers, outputs.logits.argmax(-1).tolist(), strict=True))

        loss, targets, hits = evaluate.mean_loss(
            model, valid, self._limit(len(valid)), collate=self.collate, team=team, look=right,
            batch=max(1, settings.batch // (settings.accumulate * team.size)),
            targets=self.count_targets, precision=self.precision, note=note if final else None,
        )  # fmt: skip
        if final:
            self.answers = self._answer(evaluate.gather(chosen, team))
        return {"eval_loss": loss / targets, "accuracy": hits / targets}

    def _answer(self, chosen: dict[int, int]) -> Answers:
        """The class of each image beside the right one."""
        names, valid = self.images.class_names, self.images.valid
        paths = getattr(valid.pixels, "paths", None)
        rows = [("image", "class", "predicted")]
        for n in sorted(chosen):
            image = str(n) if paths is None else str(paths[n])
            rows.append((image, names[int(valid.labels[n])], names[chosen[n]]))
        lines = ["\t".join(one_line(cell) for cell in row) for row in rows]
        return Answers(name="predictions.tsv", lines=lines)


TASKS: dict[str, type[Task]] = {
    "lm": LanguageModel,
    "translation": Translation,
    "vision": Vision,
}
