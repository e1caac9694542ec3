"""What a study will cost before it starts: jobs, tokens, operations, and about how long.

The operations are counted as in mercer.models.count. The time is theirs at the rate of finished
jobs of the study, or at an assumed rate, with a fifth more for starts and evaluations.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .screen import clock
from .study import Job, Study
from .table import shorten
from .tune import points, records

# Operations per second that small models reach, in float32 on a core and in bfloat16 on an H200.
ASSUMED = {"cpu": 2.5e10, "cuda": 2e14}
REST = 1.2
# Tokens of a sentence, where only its upper bound is set.
SENTENCE = 24
VOCABULARIES = {"bytes": 257, "gpt2": 50257}


@dataclass(frozen=True)
class Cost:
    """Jobs of a variant, and the operations of them all."""

    variant: str
    jobs: int
    parameters: int
    tokens: float
    flops: float
    # Bounds by time, where a budget has it.
    seconds: float = 0.0


def estimate(study: Study, seeds: int | None = None) -> list[Cost]:
    """The cost of every variant, its trials included; no data is read."""
    found = []
    for variant in study.variants:
        jobs = [(study.job(variant, study.seeds[0]), len(study.seeds) if seeds is None else seeds)]
        jobs += [(trial.job(variant, trial.seeds[0]), 1) for _, trial in points(study)]
        counted = [(_cost(job), number) for job, number in jobs]
        found.append(
            Cost(
                variant.name,
                sum(number for _, number in counted),
                counted[0][0].parameters,
                sum(cost.tokens * number for cost, number in counted),
                sum(cost.flops * number for cost, number in counted),
                sum(cost.seconds * number for cost, number in counted),
            )
        )
    return found


def _cost(job: Job) -> Cost:
    from ..models import presets
    from ..models.count import count

    settings = job.settings
    names = ("system", "system_options", "kernel", "position", "value", "filter")
    parts = {n: settings[n] for n in names if settings.get(n)} | dict(settings["overrides"])
    if settings["task"] == "vision":
        config: Any = presets.vit(settings["preset"], **parts)
        tokens = (config.image_size // config.patch_size) ** 2
    else:
        if (vocabulary := _vocabulary(settings)) is not None:
            parts = {"vocab_size": vocabulary} | parts
        lm = settings["task"] in ("lm", "recall", "tagging")
        config = (presets.lm if lm else presets.translator)(settings["preset"], **parts)
        tokens = settings["length"] if lm else min(settings["length"], SENTENCE)
    counted = count(config, tokens)
    steps = settings["steps"] or 0
    total = steps * settings["batch"] * tokens
    return Cost(
        job.variant, 1, counted.total, total, total * counted.flops_per_token,
        settings["time"] or 0.0,
    )  # fmt: skip


def _vocabulary(settings: Mapping[str, Any]) -> int | None:
    if settings["task"] == "recall":
        # The data has no tokenizer.
        from ..data.recall import VOCABULARY

        return int(settings["data_options"].get("vocabulary", VOCABULARY))
    said = settings["tokenizer"] or ""
    trained = re.fullmatch(r"bpe:(\d+)", said)
    return int(trained[1]) if trained else VOCABULARIES.get(said)


def rate(study: Study, folder: Path) -> tuple[float, str]:
    """Operations per second, and where the figure is from."""
    import torch

    speeds = [(r.tokens_per_second, r.flops_per_token) for r in records(study, folder)]
    seen = [tokens * flops for tokens, flops in speeds if tokens]
    if seen:
        return statistics.median(seen), f"as in {len(seen)} finished jobs"
    if torch.cuda.is_available():
        return ASSUMED["cuda"], "assumed, as for one H200"
    cores = torch.get_num_threads()
    return ASSUMED["cpu"] * cores, f"assumed for {cores} CPU threads"


def show_plan(
    console: Console, study: Study, folder: Path, jobs: int = 1, seeds: Sequence[int] | None = None
) -> None:
    """Print what every variant costs, and about how long all of it takes."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("system", "jobs", "parameters", "tokens", "FLOPs"):
        table.add_column(name, justify="left" if name == "system" else "right", no_wrap=True)
    costs = estimate(study, None if seeds is None else len(seeds))
    for cost in costs:
        table.add_row(
            escape(cost.variant), str(cost.jobs), shorten(cost.parameters),
            shorten(cost.tokens) if cost.tokens else "", shorten(cost.flops) if cost.flops else "",
        )  # fmt: skip
    console.print(table)
    speed, where = rate(study, folder)
    flops, bound = sum(c.flops for c in costs), sum(c.seconds for c in costs)
    total = sum(c.jobs for c in costs)
    seconds = REST * (flops / speed if flops else bound)
    done = len(records(study, folder))
    # A budget of time needs no count of operations.
    counted = f"{shorten(flops)} FLOPs at {shorten(speed)} a second ({where})"
    console.print(
        f"{total} jobs, trials of the tuning included; {done} are done. "
        f"{counted if flops else 'Each has its time'}: about "
        f"{clock(math.ceil(seconds))} for one process"
        + (f"; {jobs} at once share that device" if jobs > 1 else ""),
        soft_wrap=True,
    )
