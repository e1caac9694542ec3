"""Which kernel reaches a given loss first on one device?

All kernels have rotary positions, and all systems their own, in the same blocks. Every row has the
same seconds of steps, so a kernel that learns less in a step may still win by faster steps. Run it
with one job at a time: jobs side by side share the device, and their seconds mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mercer.studies import Row, Study, Variant, roughen

ROTARY: dict[str, Any] = {"position": "rotary", "value": "content"}
KERNELS = {
    "exponential": "Exponential()",
    "rbf": "RBF(heads={heads})",
    "adaptive-rbf": "AdaptiveRBF({dim}, heads={heads})",
    "laplace": "Laplace(heads={heads})",
    "matern": "Matern(1.5, heads={heads})",
    "rational-quadratic": "RationalQuadratic(heads={heads})",
    "cosine": "Cosine()",
    "polynomial": "Polynomial(2)",
}
SYSTEMS = ("vaswani2017", "shaw2018", "dai2019", "tsai2019", "kundu2026", "leng2026")
BASE = "exponential"


def analyse(rows: Sequence[Row], folder: Path) -> str:
    """Seconds and steps until each row has the last figure of the baseline."""
    by_name = {row.variant: row for row in rows}
    base = by_name[BASE]
    if base.mean is None:
        return ""
    lines = [
        f"## Time to the last figure of {BASE}, {base.mean:.3f}", "",
        "| system | seconds | of its time | steps | steps in all |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    whole = _whole(base)
    order = sorted(rows, key=lambda row: reach(row, base.mean) or (float("inf"), 0))
    for row in order:
        found = reach(row, base.mean)
        steps = statistics.median(r.steps for r in row.records) if row.records else 0
        if found is None:
            lines.append(f"| {row.variant} | not reached | | | {steps:.0f} |")
            continue
        seconds, step = found
        share = f"{seconds / whole:.2f}" if whole else ""
        lines.append(f"| {row.variant} | {seconds:.0f} | {share} | {step:.0f} | {steps:.0f} |")
    return "\n".join([*lines, ""])


def _whole(row: Row) -> float | None:
    ends = [entry["seconds"] for r in row.records for entry in r.history[-1:] if "seconds" in entry]
    found = [float(x) for x in ends if isinstance(x, int | float)]
    return statistics.fmean(found) if found else None


def reach(row: Row, level: float | None) -> tuple[float, float] | None:
    """The mean over seeds of the seconds and the step at which a curve passes a level.

    Between two evaluations it is taken as straight. None if a seed never does.
    """
    key, lower = row.metric.curve.key, row.metric.curve.lower_is_better
    found = []
    for record in row.records:
        before = None
        for entry in record.history:
            value, seconds, step = entry.get(key), entry.get("seconds"), entry.get("step")
            if not all(isinstance(x, int | float) for x in (value, seconds, step)):
                continue
            now = (float(value), float(seconds), float(step))  # type: ignore[arg-type]
            if level is not None and (now[0] <= level if lower else now[0] >= level):
                found.append(_between(before, now, level))
                break
            before = now
    if not found or len(found) < len(row.records):
        return None
    return statistics.fmean(s for s, _ in found), statistics.fmean(n for _, n in found)


def _between(
    before: tuple[float, float, float] | None, now: tuple[float, float, float], level: float
) -> tuple[float, float]:
    if before is None or before[0] == now[0]:
        return now[1], now[2]
    share = (before[0] - level) / (before[0] - now[0])
    return before[1] + share * (now[1] - before[1]), before[2] + share * (now[2] - before[2])


def make(size: str) -> Study:
    """Every kernel and six systems, with equal time."""
    small = size == "small"
    heads, dim = (2, 32) if small else (8, 64)
    systems: list[str | Variant] = [
        Variant(name, kernel=text.format(heads=heads, dim=dim), **ROTARY)
        for name, text in KERNELS.items()
    ]
    systems += [Variant("alibi", kernel="Exponential()", position="alibi", value="content")]
    systems += list(SYSTEMS)
    shape: dict[str, Any] = (
        {"preset": "tiny", "data": "embedded", "batch": 8, "length": 128, "time": 10.0,
         "eval_every": 25, "eval_items": 10_000, "tokenizer": "bpe:1024"}
        if small else
        {"preset": "gpt2-small", "batch": 32, "length": 1024, "time": 25.0, "eval_every": 50,
         "dtype": "bfloat16", "tokenizer": "bpe:16384", "eval_items": 120_000,
         "overrides": {"num_layers": 8, "num_heads": 8, "d_model": 512, "dropout": 0.0,
                       "attention_dropout": 0.0}}
    )  # fmt: skip
    return Study(
        title="Which kernel reaches a given loss first?",
        question="Which kernel reaches the loss of softmax attention first, on one GPU?",
        cost="10 minutes on two cores, by estimate"
        if small
        else "about 28 minutes on one H200, a job at a time, by estimate",
        systems=systems,
        budget=shape,
        tune={"learning_rate": (3e-3, 1e-2) if small else (6e-4, 2e-3)},
        tune_budget={"time": 5.0 if small else 10.0},
        seeds=(0,) if small else (0, 1, 2),
        corpus="" if small else "lm/wikipedia",
        analyse=analyse,
    )


studies: dict[str, Mapping[str, Callable[[], Study]]] = {
    "kernels-per-second": {
        "full": lambda: make("full"),
        "rough": lambda: roughen(make("full"), time=8.0, trials={"time": 4.0}),
        "small": lambda: make("small"),
    },
}  # fmt: skip
