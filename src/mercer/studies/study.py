"""A study: systems, a task, one budget for all of them, and seeds.

Requirements: systems differ only in what is compared, so the budget belongs to the study and never
to a system; and the key of a job covers everything that decides its result, so results of different
budgets never share a table.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import own, parse
from ..names import suggest
from ..systems import SYSTEMS
from .ledger import Record

if TYPE_CHECKING:
    from .measure import Trained
    from .paper import Paper
    from .table import Row

# The training settings that a variant may set: the parts and shape of the model, but not data,
# steps or rates.
PARTS = (
    "system", "kernel", "position", "value", "filter", "token_kernels", "system_options",
    "overrides",
)  # fmt: skip
# Settings in which the jobs of variants differ: their parts, and the files of their own kernels.
OF_VARIANTS = (*PARTS, "kernel_files")
# Settings that the study sets for each job.
ELSEWHERE = (
    "task", "seed", "output", "resume", "grown_from", "trust_kernels", "kernel_files",
)  # fmt: skip


class Variant:
    """A system under its own name, with the settings in which it differs.

    `budget` holds settings of training; the study must allow them in `differ`. `alter` changes a
    model after it is built, for a control that no setting gives.
    """

    def __init__(
        self,
        name: str,
        *,
        budget: Mapping[str, Any] | None = None,
        alter: Callable[[Any], None] | None = None,
        **parts: Any,
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name):
            raise ValueError(
                "the name of a variant must be letters, digits and . _ + - without spaces, "
                f"got {name!r}"
            )
        for part in parts:
            if part not in PARTS:
                raise ValueError(
                    f"variant {name!r} sets {part!r}, but systems may differ in "
                    f"{', '.join(PARTS)} only; the rest belongs to the budget, equal for all"
                )
        if not {"system", "kernel"} & set(parts):
            if name not in SYSTEMS:
                raise ValueError(
                    f"variant {name!r} must set system or kernel, or have the name of a system: "
                    f"{', '.join(SYSTEMS)}"
                )
            parts["system"] = name
        self.name = name
        try:
            # Kernels as text; a study is Python, so what its texts name may be imported.
            self.parts, needed = parse.spell(parts)
            self.trust = own.trusted((*needed, *own.sources(parts)))
        except ValueError as error:
            raise ValueError(f"variant {name!r}: {error}") from None
        self.budget = dict(budget or {})
        self.alter = alter

    def __repr__(self) -> str:
        parts = [f"{name}={part!r}" for name, part in self.parts.items()]
        if self.budget:
            parts.append(f"budget={self.budget!r}")
        return f"Variant({', '.join([repr(self.name), *parts])})"


def digest(settings: Mapping[str, Any]) -> str:
    """A hash of settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """One variant with one seed."""

    variant: str
    seed: int
    # The settings from the study.
    chosen: Mapping[str, Any]
    # All settings that decide its result, filled in.
    settings: Mapping[str, Any]
    # The settings of the run that it starts from.
    backbone: Mapping[str, Any] = field(default_factory=dict)
    # Changes the model after it is built.
    alter: Callable[[Any], None] | None = None

    @property
    def key(self) -> str:
        """A hash of everything that decides the result."""
        return digest(self.settings)

    @property
    def name(self) -> str:
        """The folder of the job."""
        return f"{self.variant}-seed{self.seed}-{self.key[:8]}"

    def __str__(self) -> str:
        return f"{self.variant} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Systems x seeds, each trained for one task with one budget."""

    systems: Sequence[str | Variant]
    task: str = "lm"
    budget: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = (0, 1)
    name: str = "study"
    title: str = ""
    # What it asks, and what it costs, for `mercer study list`.
    question: str = ""
    cost: str = ""
    # Where its data is in the folder that --data names, such as "translation/tatoeba". This is the
    # data in the key of a job, wherever the folder is.
    corpus: str = ""
    # Files of that folder without which the study cannot run, besides its corpus.
    needs: Sequence[str] = ()
    # The folder, or the source by name, that --data gave.
    source: str = ""
    # Settings of a run of the same task that is trained once, before all jobs; they start from its
    # weights.
    backbone: Mapping[str, Any] = field(default_factory=dict)
    # Settings in which variants differ by design, besides their parts, such as ("steps",).
    differ: Sequence[str] = ()
    # The metric of the table; the task's own unless given.
    main: Metric | None = None
    # More figures of a trained model, and those that the table shows.
    measure: Callable[[Trained], Mapping[str, float | None]] | None = None
    columns: Sequence[Metric] = ()
    # What all runs say together, as Markdown; it may write pictures into the folder.
    analyse: Callable[[Sequence[Row], Path], str] | None = None
    # A note below the table.
    remark: str = ""
    # The same grid for every variant, such as {"learning_rate": (1e-3, 3e-3)}, tried with the first
    # seed; and the settings in which the trials differ from the budget, such as fewer steps.
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_budget: Mapping[str, Any] = field(default_factory=dict)
    # What each variant was tuned to; filled by tune.py.
    chosen: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # A paper's table for the same variants.
    paper: Paper | None = None
    # What to try next: pairs of a command and its purpose.
    next_steps: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        if not self.systems or isinstance(self.systems, str):
            raise ValueError(f"systems must be a list of at least one, got {self.systems!r}")
        if self.task not in METRICS:
            raise ValueError(f"task must be one of {', '.join(METRICS)}, got {self.task!r}")
        for part in (*self.budget, *self.tune, *self.tune_budget, *self.differ):
            if part in {*PARTS, *ELSEWHERE} - {"overrides"}:
                raise ValueError(
                    f"the budget must not set {part!r}: "
                    "see systems, task and seeds of the study, and --output"
                )
        names = [variant.name for variant in self.variants]
        for variant in self.variants:
            self._check_budget(variant)
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"systems must have different names, but {min(twice)!r} occurs twice")
        check_seeds(self.seeds)
        self._check_grid()
        if self.paper is not None:
            self.paper.check(names)

    def _check_budget(self, variant: Variant) -> None:
        for name in variant.budget:
            if name not in self.differ:
                raise ValueError(
                    f"variant {variant.name!r} sets {name!r}, but all systems get the same budget; "
                    f"if they differ in it by design, say so: differ=({name!r},)"
                )

    def _check_grid(self) -> None:
        for name, values in self.tune.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or len(set(values)) < 2:
                raise ValueError(
                    f"tune must give at least two different values of {name}, got {values!r}"
                )
            if name in self.budget:
                raise ValueError(f"{name} is tuned, so the budget must not set it")
        if self.tune_budget and not self.tune:
            raise ValueError("tune_budget needs tune, the grid")

    @property
    def variants(self) -> list[Variant]:
        return [v if isinstance(v, Variant) else Variant(v) for v in self.systems]

    @property
    def metric(self) -> Metric:
        return self.main or METRICS[self.task]

    @property
    def free(self) -> tuple[str, ...]:
        """The settings in which variants may differ."""
        return (*OF_VARIANTS, *self.differ)

    def owns(self, record: Record) -> bool:
        """Whether a record fits this study as it is now, with any seed."""
        return not self.differences(record)

    def differences(self, record: Record) -> dict[str, str]:
        """Settings of a record that have changed since, such as "steps was 100, is now 200"."""
        by_name = {variant.name: variant for variant in self.variants}
        variant = by_name.get(record.variant)
        now = self.job(variant or self.variants[0], record.seed).settings
        then = record.settings
        changed = {
            name: f"{name} was {then.get(name)!r}, is now {now.get(name)!r}"
            for name in {**then, **now}
            if then.get(name) != now.get(name)
        }
        if variant is None:
            # An unknown variant may have any parts, but must have the same budget.
            changed = {name: text for name, text in changed.items() if name not in self.free}
        return changed

    def jobs(self, seeds: Sequence[int] | None = None) -> list[Job]:
        """Every variant with the first seed, then with the second, …: half a study is fair, too."""
        return [
            self.job(variant, seed)
            for seed in (self.seeds if seeds is None else seeds)
            for variant in self.variants
        ]

    def job(self, variant: Variant, seed: int) -> Job:
        """One job; ValueError for unknown or wrong settings."""
        from ..train.settings import Settings

        known = [entry.name for entry in fields(Settings)]
        for name in self.budget:
            if name not in known:
                raise ValueError(
                    f"the budget sets {name!r}, which is not a setting of training; "
                    f"{suggest(name, known)}"
                )
        tuned = self.chosen.get(variant.name, {})
        differs = {**tuned, **variant.budget, **variant.parts}
        chosen = {"task": self.task, **self.budget, **differs, "seed": seed}
        if variant.trust:
            chosen["trust_kernels"] = variant.trust
        # Config fields of the budget and of the variant are merged.
        both = [source.get("overrides", {}) for source in (self.budget, variant.parts)]
        chosen["overrides"] = {**both[0], **both[1]}
        located = self._locate(chosen)
        try:
            filled = Settings(**chosen).resolve()
            resolved = json.loads(filled.as_json())
            if (init := resolved.pop("init")) is not None:
                from ..train.initial import digest as digest_weights

                # The weights decide, not the name of their folder.
                resolved["init"] = digest_weights(init)
        except ValueError as error:
            raise ValueError(f"{variant.name}: {error}") from None
        # The other settings concern logging and storage, and may differ between machines.
        settings = {name: value for name, value in resolved.items() if name not in filled.free}
        if self.measure is not None:
            settings["measure"] = self.measure.__name__
        if variant.alter is not None:
            settings["alter"] = variant.alter.__name__
        backbone = {"task": self.task, **self.backbone} if self.backbone else {}
        if backbone:
            there = self._locate(backbone)
            settings["init"] = f"backbone {digest(backbone)}"
            backbone |= there
        given = {**chosen, **located}
        return Job(variant.name, seed, given, settings, backbone, variant.alter)

    def _locate(self, chosen: dict[str, Any]) -> dict[str, str]:
        """Set the name of the data, which is in the key, and return where it is."""
        if "data" in chosen or not self.corpus:
            name = chosen.get("data", "")
            # A variant's own corpus.
            inside = Path(self.source) / name
            # A member of an archive stands after "::".
            there = Path(str(inside).partition("::")[0]).exists()
            return {"data": str(inside)} if self.source and name and there else {}
        inside = Path(self.source) / self.corpus
        if self.source and (Path(self.source) / Path(self.corpus).parts[0]).is_dir():
            chosen["data"] = self.corpus
            return {"data": str(inside)}
        chosen["data"] = self.source or self.corpus
        return {}


@dataclass(frozen=True)
class Metric:
    """The metric of a task, and the metric during training."""

    key: str
    title: str
    lower_is_better: bool
    digits: int = 3
    # If the metric is measured at the end only.
    on_the_way: Metric | None = None

    @property
    def curve(self) -> Metric:
        return self.on_the_way or self


METRICS = {
    "lm": Metric("bits_per_byte", "bits per byte", True),
    "translation": Metric("bleu", "BLEU", False, 2, Metric("perplexity", "perplexity", True)),
    "vision": Metric("accuracy", "accuracy", False),
    "recall": Metric("accuracy", "accuracy of recall", False),
    "tagging": Metric("accuracy", "accuracy", False),
}


def check_seeds(seeds: Sequence[int]) -> None:
    whole = all(isinstance(seed, int) and seed >= 0 for seed in seeds)
    if not seeds or not whole or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers from 0 on, got {seeds!r}")
