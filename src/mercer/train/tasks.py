"""The tasks: language modelling, translation, vision, associative recall.

A task has the data, the model, the loss and the evaluation. The trainer is the same for all.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from .. import data, models
from ..models import presets
from ..names import suggest
from . import evaluate, samples
from .distributed import Team
from .scores import Answers, one_line
from .settings import Settings
from .unigram import MOST, Unigram

IGNORE = -100


class Task(ABC):
    """Data, model, loss and evaluation of a run.

    With `split`, this split of the data alone, to judge a model. `like` is then what the model was
    trained with: its tokenizer, or how it sees images.
    """

    # The unit of speed, the name of an item, and whether batches differ in shape.
    unit = "tokens"
    noun = "blocks"
    # What an evaluation counts.
    judged = "tokens"
    ragged = False
    train: Any
    valid: Any
    tokenizer: Any = None
    source: str
    # With a sketch of the data alone: where its numbers come from.
    how: str | None = None
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

    @property
    def step_items(self) -> int:
        """What a step trains on, counted as evaluations are."""
        assert self.settings.batch is not None
        return self.settings.batch

    @abstractmethod
    def build(self) -> Any:
        """The model, initialised by the seed."""

    @abstractmethod
    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """The metrics of the task, on at most `items` items."""

    def sample(self, model: Any, team: Team) -> dict[str, str] | None:
        """A short text of the model, and what it was given."""
        return None

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
        given = {"cache_dir": self.settings.cache, **given}
        if self.only is not None:
            given["split"] = self.only
        return function(self.settings.data, **self.options(function, **given))

    def options(self, function: Callable[..., Any], **given: Any) -> dict[str, Any]:
        """What is given, and the options of the settings, if the function takes them."""
        known = [n for n in inspect.signature(function).parameters if n not in given]
        known = [n for n in known if n not in ("source", "on_progress", "split", "look")]
        for name in self.settings.data_options:
            if name not in known:
                raise ValueError(f"the data has no option {name!r}; {suggest(name, known)}")
        return given | dict(self.settings.data_options)

    def parts(self) -> dict[str, Any]:
        """The config fields of the attention."""
        settings = self.settings
        names = ("system", "system_options", "kernel", "position", "value", "filter")
        given = {name: getattr(settings, name) for name in names}
        given["trust_kernels"] = settings.trust_kernels
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

    def _limit(self, number: int, items: int | None = None) -> int:
        """`number`, at most `eval_items` and at most `items`."""
        given = (number, self.settings.eval_items, items)
        return max(1, min(n for n in given if n is not None))

    def _spread(self, data: Any, items: int | None) -> Any:
        """As many items as an evaluation may have, spread evenly: data may be sorted."""
        number = self._limit(len(data), items)
        if number == len(data):
            return data
        return Subset(data, [n * len(data) // number for n in range(number)])


def check_least(name: str, settings: Settings, least: int, what: str) -> None:
    """Raise ValueError if the settings give a size that the data does not fit in."""
    given = settings.overrides.get(name)
    if isinstance(given, int) and given < least:
        raise ValueError(f"{name} must be at least {least}, the {what}, got {given}")


class LanguageModel(Task):
    """Predict the next token."""

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
    ) -> None:
        super().__init__(settings, split=split)
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
    ) -> None:
        super().__init__(settings, split=split)
        tokenizer = settings.tokenizer if like is None else like
        read = data.sketch_pairs if sketch else data.pairs
        self.pairs = self.read(read, tokenizer=tokenizer)
        self.how = self.pairs.how if sketch else None
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

            def inputs(numbers: list[int]) -> dict[str, Any]:
                return self._sources([encoded[n] for n in numbers])

            scores, texts = evaluate.score_translations(
                model, pairs[: self._limit(len(pairs), items)], inputs=inputs, decode=self._decode,
                batch=batch, beams=settings.beams, team=team, precision=self.precision,
            )  # fmt: skip
            found |= scores
            self.answers = Answers(name="hypotheses.txt", lines=[one_line(text) for text in texts])
        return found

    def _sources(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: x for name, x in self.collate(items).items() if name != "labels"}

    def _decode(self, ids: Tensor) -> list[str]:
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return [text.strip() for text in texts]


class Vision(Task):
    """Classify images."""

    unit = "patches"
    noun = judged = "images"

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        sketch: bool = False,
    ) -> None:
        super().__init__(settings, split=split)
        size = settings.overrides.get("image_size")
        given = {} if size is None or "size" in settings.data_options else {"size": size}
        self.images = self.read(data.images, look=like, **given)
        self.source = self.images.source
        self.train, self.valid = self.images.train, self.images.valid
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
        config: Any = presets.vit(self.settings.preset, **(shape | self.parts()))
        if "id2label" not in self.settings.overrides:
            # More labels than classes keep the names that transformers gives them.
            named: dict[int, str] = {**config.id2label, **dict(enumerate(images.class_names))}
            config.id2label, config.label2id = named, {name: n for n, name in named.items()}
        return config

    def build(self) -> Any:
        config = self.config()
        self.patches = self.sequence_length(config)
        return models.KernelViT(config)

    def save_model(self, model: Any, weights: dict[str, Tensor], path: Path) -> None:
        """The same, with the image processor: size, mean and deviation of the training."""
        super().save_model(model, weights, path)
        images = self.images
        models.KernelImageProcessor(
            size=images.image_size,
            num_channels=images.channels,
            image_mean=images.mean,
            image_std=images.std,
        ).save_pretrained(path)

    def count_tokens(self, inputs: dict[str, Any]) -> int | Tensor:
        return inputs["pixel_values"].shape[0] * self.patches

    def evaluate(
        self, model: Any, team: Team, *, final: bool, items: int | None = None
    ) -> dict[str, Any]:
        """The mean loss and the top-1 accuracy."""
        settings, valid = self.settings, self._spread(self.valid, items)
        assert settings.batch is not None

        def right(outputs: Any, inputs: dict[str, Any]) -> Tensor:
            hits: Tensor = outputs.logits.argmax(-1).eq(inputs["labels"]).sum()
            return hits

        chosen: dict[int, int] = {}

        def note(numbers: list[int], outputs: Any) -> None:
            chosen.update(zip(numbers, outputs.logits.argmax(-1).tolist(), strict=True))

        loss, targets, hits = evaluate.mean_loss(
            model, valid, len(valid), collate=self.collate, team=team, look=right,
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


TASKS: dict[str, Callable[..., Task]] = {
    "lm": LanguageModel,
    "translation": Translation,
    "vision": Vision,
    "recall": Recall,
}
