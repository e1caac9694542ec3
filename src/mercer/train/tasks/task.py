"""What all tasks have: data, model, loss and evaluation. The trainer is the same for all."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_model
from torch import Tensor
from torch.utils.data import Subset

from ... import models
from ...models.count import count
from ...names import suggest
from ..distributed import Team
from ..initial import check_config
from ..scores import Answers
from ..settings import Settings

IGNORE = -100
# Told what is read, and how far it is, from 0 to 1.
Tell = Callable[[str, float], None]


class Task(ABC):
    """Data, model, loss and evaluation of a run.

    With `split`, this split of the data alone, to judge a model. `like` is then what the model was
    trained with: its tokenizer, or how it sees images. `tell` hears of data that take long to read.
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

    def __init__(
        self,
        settings: Settings,
        *,
        split: str | None = None,
        like: Any = None,
        tell: Tell | None = None,
    ) -> None:
        self.settings = settings
        self.only = split
        self.tell = tell

    @property
    def like(self) -> Any:
        """What the model is trained with, besides the settings."""
        return self.tokenizer

    def fingerprint(self) -> str | None:
        """A hash of the data, to tell its versions apart; None for data that is drawn."""
        return None

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
        if "on_progress" in inspect.signature(function).parameters:
            given["on_progress"] = self.tell
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

    def count(self, model: Any = None) -> Any:
        """What the model costs; without one, what that of the config would."""
        config = self.config() if model is None else model.config
        return count(config if model is None else model, self.sequence_length(config))

    def resume(self, model: Any, checkpoint: Path) -> None:
        """Load the weights of a checkpoint."""
        check_config(model.config, checkpoint)
        load_model(model, str(checkpoint / "model.safetensors"))

    def after_step(self, model: Any, progress: float) -> None:
        """Change the model after a step; `progress` is the share of the steps."""
        return None

    def compile(self, model: Any) -> None:
        """Compile the parts of the model in place."""
        # Segments see different numbers of earlier states, so shapes differ.
        grows = self.ragged or getattr(model.config, "segment_length", None) is not None
        model.compile_parts(dynamic=None if grows else False)

    def save_checkpoint(self, model: Any, weights: dict[str, Tensor], path: Path) -> None:
        """Write config and weights alone."""
        model.save_pretrained(path, state_dict=weights, whole=False)

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


def shorten_hash(*parts: object) -> str:
    """A short hash of the texts of the parts."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:12]


def check_least(name: str, settings: Settings, least: int, what: str) -> None:
    """Raise ValueError if the settings give a size that the data does not fit in."""
    given = settings.overrides.get(name)
    if isinstance(given, int) and given < least:
        raise ValueError(f"{name} must be at least {least}, the {what}, got {given}")
