"""The settings of a run: task, model, data, budget, optimiser, and the folder of its files.

Requirements: everything that decides a result is here, so a run can be resumed from its folder
alone; open fields are filled from a recipe once and stored filled; mistakes are found before
anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import own, parse
from ..kernels import Kernel
from ..storage import stored
from .pretrained import PRETRAINED, check, is_of_transformers

TASKS = ("lm", "translation", "vision", "recall", "tagging")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
MODES = ("blocks", "sliding", "memory")
SPLITS = ("valid", "test")
SCHEDULES = ("cosine", "inverse-sqrt")

# May differ on resume: they change logging, storage, sharding, rounding and the drawing of dropout,
# or when a run ends that learns nothing, and not the result.
FREE = (
    "output", "resume", "log_every", "eval_every", "save_every", "keep", "samples", "threads",
    "grown_from", "tensorboard", "accumulate", "workers", "fsdp", "device", "cache", "split",
    "trust_kernels", "context_parallel", "give_up", "compile",
)  # fmt: skip

WHOLE = (
    "steps", "batch", "length", "accumulate", "log_every", "eval_every", "save_every", "keep",
    "beams", "eval_items", "threads", "grown_from", "patience", "context_parallel",
)  # fmt: skip

# Settings with text that may name classes of one's own, as `own.py` reads it.
TEXTS = ("kernel", "position", "filter", "system_options", "overrides")

# More than any run needs; numbers that arithmetic of 64 bits cannot take are mistakes.
LARGEST = 10**12
# numpy takes seeds of 32 bits.
LARGEST_SEED = 2**32 - 1

# task, preset -> batch, length, learning rate; the rest of a preset is in the model's config.
RECIPES: dict[tuple[str, str], dict[str, Any]] = {
    ("lm", "tiny"): {"batch": 16, "length": 128, "learning_rate": 3e-3, "tokenizer": "bpe:1024"},
    ("lm", "gpt2-small"): {"batch": 64, "length": 1024, "learning_rate": 6e-4},
    # Four segments of 150, each with the states of earlier ones.
    ("lm", "xl-base"): {"batch": 16, "length": 600, "learning_rate": 2.5e-4},
    ("lm", "nano"): {"batch": 32, "length": 2048, "learning_rate": 1e-3},
    # A trained model moves little; a bandwidth is a logarithm.
    ("lm", PRETRAINED): {
        "batch": 8,
        "length": 512,
        "learning_rate": 5e-5,
        "bandwidth_rate": 1e-3,
    },
    ("translation", "tiny"): {"batch": 64, "length": 64, "learning_rate": 3e-3},
    ("translation", "iwslt"): {"batch": 128, "length": 256, "learning_rate": 5e-4},
    ("vision", "tiny"): {"batch": 64, "learning_rate": 3e-3},
    ("vision", "cifar"): {"batch": 128, "learning_rate": 1e-3},
    ("tagging", "tiny"): {"batch": 32, "length": 128, "learning_rate": 3e-3},
    ("recall", "tiny"): {"batch": 64, "length": 32, "learning_rate": 3e-3},
}
GENERAL = {"batch": 32, "length": 512, "learning_rate": 5e-4}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run, in full. Fields that are None are filled by `resolve` from the preset's recipe."""

    task: str = "lm"
    # The attention: a system by name (None: the preset's own), and parts of it as text.
    system: str | None = None
    system_options: Mapping[str, Any] = field(default_factory=dict)
    kernel: str | Kernel | None = None
    position: str | None = None
    value: str | None = None
    filter: str | None = None
    # Of a model of transformers: `TokenKernels(size=3, on="v", layers=[0])`.
    token_kernels: str | None = None
    # Files and modules that may be imported for these texts; never stored.
    trust_kernels: str | list[str] | tuple[str, ...] = ()
    # The start of the SHA-256 of each file that the texts name, found by `resolve`.
    kernel_files: Mapping[str, str] = field(default_factory=dict)
    # The model's shape, and fields of its config that differ from the preset's.
    preset: str = "tiny"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    # The data.
    data: str = "embedded"
    tokenizer: str | None = None
    data_options: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    # A run or a saved model whose weights are the initial ones; or a language model of
    # transformers, and then the preset is "pretrained".
    init: str | None = None
    # The budget, steps or time, whichever ends first. Time counts evaluations and checkpoints, too.
    steps: int | None = None
    time: float | None = None
    # A step sees `batch` sequences of `length` tokens, over all processes, in `accumulate` parts.
    batch: int | None = None
    length: int | None = None
    accumulate: int = 1
    # The optimiser. Bandwidths and token kernels have their own learning rates.
    learning_rate: float | None = None
    bandwidth_rate: float | None = None
    token_rate: float | None = None
    warmup: float = 0.05
    # After the warm-up: down to `floor` at the last step, or as 1 / sqrt(step), without an end.
    schedule: str = "cosine"
    floor: float = 0.1
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float | None = 1.0
    smoothing: float | None = None
    seed: int = 0
    dtype: str = "float32"
    compile: bool = False
    device: str | None = None
    fsdp: bool = False
    # So many processes share a sequence, each with a part of its tokens.
    context_parallel: int = 1
    workers: int = 0
    # CPU threads; None: as many as are free, chosen once.
    threads: int | None = None
    # End after so many evaluations on the way without a better validation loss, and judge the best
    # of them; None: judge the last step.
    patience: int | None = None
    # End after this share of the steps if no more was learnt than frequencies of tokens.
    give_up: float | None = None
    # How often, in steps; None: about a hundred logs and ten evaluations, a checkpoint with each.
    log_every: int | None = None
    eval_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    # How a language model is evaluated, and on how many tokens, pairs or images at most; None: the
    # last evaluation on all, earlier ones on as many as the steps between two of them see.
    evaluate_by: str = "blocks"
    eval_items: int | None = None
    # A short text of the model with each evaluation.
    samples: bool = True
    beams: int = 4
    # What is scored at the end: validation data alone, or the data's test split, too.
    split: str = "valid"
    # Where the files go; None: nowhere.
    output: str | None = None
    resume: bool = False
    tensorboard: bool = False
    # The number of steps before the run was last extended; set by the run itself.
    grown_from: int | None = None

    def __post_init__(self) -> None:
        given = self.trust_kernels
        trust = (given,) if isinstance(given, str) else tuple(given)
        for name in TEXTS:
            text, needed = parse.spell(getattr(self, name))
            object.__setattr__(self, name, text)
            trust += needed
        object.__setattr__(self, "trust_kernels", tuple(dict.fromkeys(trust)))

    def _own_sources(self) -> tuple[str, ...]:
        return own.sources(*(getattr(self, name) for name in TEXTS))

    @property
    def untrusted(self) -> tuple[str, ...]:
        """The files and modules that the texts name and that are not to be imported."""
        return own.untrusted(self._own_sources(), self.trust_kernels)

    def resolve(self) -> Settings:
        """The same with all fields filled, or ValueError."""
        if self.init is not None and self.task == "lm" and is_of_transformers(self.init):
            self = replace(self, preset=PRETRAINED)
        self._check_choice("task", TASKS)
        self._check_choice("dtype", DTYPES)
        self._check_choice("evaluate_by", MODES)
        self._check_choice("split", SPLITS)
        self._check_choice("schedule", SCHEDULES)
        if self.device is not None:
            self._check_choice("device", DEVICES)
        sources = [name for name in self._own_sources() if name not in self.untrusted]
        recipe = GENERAL | RECIPES.get((self.task, self.preset), {})
        rate = _or(self.learning_rate, recipe["learning_rate"])
        steps = self.steps
        if steps is None and self.time is None:
            steps = 300
        smoothing = 0.1 if self.task == "translation" else 0.0
        if self.task == "recall":
            self._check_drawn()
        filled: dict[str, Any] = {
            "steps": steps,
            "batch": _or(self.batch, recipe["batch"]),
            "length": _or(self.length, recipe["length"]),
            "tokenizer": _or(self.tokenizer, recipe.get("tokenizer")),
            "learning_rate": rate,
            "bandwidth_rate": _or(self.bandwidth_rate, recipe.get("bandwidth_rate", rate)),
            "token_rate": _or(self.token_rate, max(rate, 5e-3)),
            "smoothing": _or(self.smoothing, smoothing),
            "log_every": _or(self.log_every, _every(steps, 100)),
            "eval_every": _or(self.eval_every, _every(steps, 10)),
            "system_options": dict(self.system_options),
            "overrides": dict(self.overrides),
            "data_options": dict(self.data_options),
            "betas": tuple(self.betas),
            "kernel_files": {**self.kernel_files, **own.digests(sources, self.trust_kernels)},
        }
        filled["save_every"] = _or(self.save_every, filled["eval_every"])
        settings = replace(self, **filled)
        settings._check_numbers()
        if settings.preset == PRETRAINED:
            check(settings)
        elif settings.token_kernels is not None:
            raise ValueError(
                "token_kernels are for init, a language model of transformers; a model of Mercer "
                "has them by system leng2026"
            )
        return settings

    def _check_drawn(self) -> None:
        """The task recall draws its data, so it reads none."""
        for name, empty in (("data", "embedded"), ("tokenizer", None)):
            if (value := getattr(self, name)) != empty:
                raise ValueError(
                    f"the task recall draws its data and takes no {name}, got {value!r}; "
                    "see data_options"
                )

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")

    def _check_numbers(self) -> None:
        for name in WHOLE:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a whole number from 1 on, got {value!r}")
            if value is not None and value > LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST}, got {value}")
        for name in ("time", "learning_rate", "clip"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be above 0, got {value!r}")
        for name in ("bandwidth_rate", "token_rate", "weight_decay", "warmup"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be at least 0, got {value!r}")
        for name in ("floor", "smoothing", *(["warmup"] if self.steps is None else [])):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {value!r}")
        for name, most in (("seed", LARGEST_SEED), ("workers", 1024)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number from 0 on, got {value!r}")
            if value > most:
                raise ValueError(f"{name} must be at most {most}, got {value}")
        assert self.batch is not None
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch must be a multiple of accumulate, got {self.batch} and {self.accumulate}"
            )
        self._check_parts()
        for name, given in (("patience", self.patience), ("schedule", self.schedule)):
            if given not in (None, "cosine") and (self.time is not None or self.steps is None):
                raise ValueError(
                    f"{name} {given} counts steps, so the run must have steps, no time"
                )
        if self.give_up is not None and not 0 < self.give_up <= 1:
            raise ValueError(f"give_up must be above 0 and at most 1, got {self.give_up}")
        if self.resume and self.output is None:
            raise ValueError("resume needs output, the folder of the run")

    def _check_parts(self) -> None:
        """A sequence is cut into two chunks for each process that shares it."""
        number = self.context_parallel
        if number == 1:
            return
        if self.task != "lm":
            raise ValueError(
                f"context_parallel splits the sequences of language models, not of the task "
                f"{self.task}"
            )
        if self.length is not None and self.length % (2 * number):
            raise ValueError(
                f"context_parallel {number} cuts a sequence into {2 * number} chunks, which do not "
                f"divide the length of {self.length}"
            )
        if self.compile:
            raise ValueError("compile and context_parallel exclude each other: give one of them")

    @property
    def free(self) -> tuple[str, ...]:
        """Settings that do not change the result; a patience and a time make one of them decide."""
        decides = {"eval_every": self.patience is not None, "compile": self.time is not None}
        return tuple(name for name in FREE if not decides.get(name))

    @property
    def name(self) -> str:
        """The name of the attention, as part of a file name."""
        parts = re.findall(r"[A-Za-z0-9]+", str(self.kernel or self.system or self.preset))
        return "-".join([self.task, *parts])[:80]

    def as_json(self) -> str:
        values = asdict(self)
        del values["trust_kernels"]
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Settings from JSON as `as_json` gives it, without trust in the files that it names."""
        what = "the settings of a run"
        found = replace(stored.read(cls, path, what), trust_kernels=())
        try:
            found.resolve()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read as {what}: {error}") from None
        return found

    def changes(self, other: Settings) -> dict[str, tuple[Any, Any]]:
        """Fields that decide a result and differ: name -> (here, there)."""
        here, there = (json.loads(s.as_json()) for s in (self, other))
        return {
            name: (here[name], there[name])
            for name in here
            if name not in self.free and here[name] != there[name]
        }


def _or(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given


def _every(steps: int | None, times: int) -> int:
    return 50 if steps is None else max(1, steps // times)


def read_time(text: str) -> float:
    """Seconds of "90", "90s", "10m", "1h30m"."""
    found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if found is None or not any(found.groups()):
        raise ValueError(f"time must be such as 90s, 10m or 1h30m, got {text!r}")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds
