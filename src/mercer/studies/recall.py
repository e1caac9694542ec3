"""Which kernels can recall? Values are found by their keys, in models of two layers and one head.

Recall takes two steps. The first layer must carry each key to the value beside it, by position; the
second must find the key among all pairs, by content. All kernels get the same position part for the
first step, a table of the distances up to 4 (`LookupTable(4)`), as a factor; so they differ in the
second. Systems that have their own way to positions are there for comparison, under `SYSTEMS`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mercer.studies import Row, Study, Variant, roughen

QUESTION = "Which kernels find a value by its key, among how many pairs, at which width?"
COST = {
    "full": "about 15 minutes on one H200, with 8 jobs at once, by estimate",
    "rough": "40 minutes on two cores, with 2 jobs at once",
    "small": "about 3 minutes on two cores, with 2 jobs at once, by estimate",
}
POSITION = "LookupTable(4)"
# {width} is the number of features of the one head.
KERNELS = {
    "exponential": "Exponential()",
    "rbf": "RBF()",
    "adaptive-rbf": "AdaptiveRBF({width})",
    "laplace": "Laplace()",
    "matern": "Matern(1.5)",
    "rational-quadratic": "RationalQuadratic()",
    "cosine": "Cosine()",
    "polynomial": "Polynomial(2)",
    "linear": "Linear(signed=True)",
    "ard": "ARD({width})",
    "periodic": "Periodic(8.0)",
    "spectral-mixture": "SpectralMixture(2, {width})",
    "exponential-alibi": "Exponential() * ALiBi([0.0625])",
    # Weights by position alone: what is left without a kernel of the content.
    "lookup": "Exponential(0.0)",
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "relative-sinusoid": {"kernel": "Exponential(0.0)", "position": "RelativeSinusoid()"},
    "eq9-product": {"system": "tsai2019"},
    # Not tied, so that the place before can weigh more than the place itself.
    "eq9-untied": {"kernel": "Exponential()", "position": "ProductKernel(symmetric=False)"},
    "gka": {"system": "kundu2026", "position": "Rotary()"},
    "softmax-rotary": {"kernel": "Exponential()", "position": "Rotary()"},
    "softmax-learned": {"kernel": "Exponential()", "position": "DirectSum(Learned({longest}))"},
    # Softmax attention of the same position part, and token kernels on its values.
    "token-kernels": {
        "system": "leng2026", "system_options": {"base": "lee2018"}, "position": POSITION,
    },
}  # fmt: skip
SMALL = ("exponential", "rbf", "laplace", "polynomial", "linear", "lookup", "gka", "softmax-rotary")
# Recalled: right nine times in ten.
ENOUGH = 0.9
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "names": (*KERNELS, *SYSTEMS),
        "widths": (16, 64),
        "seeds": (0, 1, 2),
        "rates": (3e-3, 1e-2),
        "length": 256,
        "longest": 1024,
        "steps": 2000,
        "trial_steps": 1200,
        "batch": 128,
        "eval_items": 256,
        "data_options": {
            "pairs": [4, 8, 16, 32, 64],
            # The last two are more than in training, in sequences of 512 and 1024.
            "held_out_pairs": [4, 8, 16, 32, 64, 128, 256],
            # Every value is a label some twelve times a step; with fewer, models learn much later.
            "vocabulary": 512,
        },
    },
    "small": {
        "names": SMALL,
        "widths": (32,),
        "seeds": (0, 1),
        "rates": (3e-3, 1e-2),
        "length": 32,
        "longest": 32,
        "steps": 400,
        "trial_steps": 400,
        "batch": 32,
        "eval_items": 128,
        "data_options": {"pairs": [2, 4, 8], "vocabulary": 64},
    },
}
# Short sequences of few keys tell kernels apart on a CPU.
ROUGH: dict[str, Any] = {
    "steps": 600,
    "batch": 32,
    "length": 32,
    "eval_items": 128,
    "eval_every": 120,
    "save_every": 600,
    "data_options": {
        "pairs": [2, 4, 8], "held_out_pairs": [2, 4, 8, 16], "vocabulary": 64,
    },
    # As long as a run, so the best trial of a row is its run of the first seed.
    "trials": {"steps": 600},
}  # fmt: skip


def make(size: str) -> Study:
    """The study in a size: full, or small."""
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, got {size!r}")
    given = SIZES[size]
    steps = given["steps"]
    return Study(
        title="Which kernels find a value by its key?",
        question=QUESTION,
        cost=COST[size],
        task="recall",
        systems=[
            vary(name, width, given["longest"])
            for width in given["widths"]
            for name in given["names"]
        ],
        budget={
            "preset": "tiny",
            "steps": steps,
            "batch": given["batch"],
            "length": given["length"],
            "data_options": given["data_options"],
            "eval_items": given["eval_items"],
            "eval_every": steps // 5,
            "save_every": steps,
            "overrides": {"num_layers": 2, "num_heads": 1},
        },
        tune={"learning_rate": given["rates"]},
        tune_budget={"steps": given["trial_steps"]},
        seeds=given["seeds"],
        analyse=analyse,
        remark=(
            "Every kernel has the same position part, a table of the distances up to 4, so that "
            "only the kernel of the content differs; lookup has none. The accuracy is the mean "
            "over the numbers of pairs. gka, softmax-rotary, softmax-learned, eq9-product, "
            "eq9-untied and relative-sinusoid have their own positions."
        ),
    )


def vary(name: str, width: int, longest: int) -> Variant:
    """A kernel or a system at a width."""
    parts = {"kernel": KERNELS[name], "position": POSITION} if name in KERNELS else SYSTEMS[name]
    read: dict[str, Any] = {
        part: text.format(width=width, longest=longest) if isinstance(text, str) else text
        for part, text in parts.items()
    }
    return Variant(f"{name}-{width}", **read, overrides={"d_model": width, "d_ff": 2 * width})


def accuracies(row: Row) -> dict[int, float]:
    """The accuracy for each number of pairs, the mean over the seeds; {} without a mean."""
    if row.mean is None:
        return {}
    found: dict[int, list[float]] = {}
    for record in row.records:
        for name, value in record.metrics.items():
            if name.startswith("accuracy_") and isinstance(value, int | float):
                found.setdefault(int(name.removeprefix("accuracy_")), []).append(value)
    return {pairs: statistics.fmean(found[pairs]) for pairs in sorted(found)}


def most_recalled(shares: Mapping[int, float]) -> int:
    """The largest number of pairs up to which all are recalled; 0 if none is."""
    most = 0
    for pairs in sorted(shares):
        if shares[pairs] < ENOUGH:
            break
        most = pairs
    return most


def analyse(rows: Sequence[Row], folder: Path) -> str:
    """Accuracy by number of pairs, and how many pairs each kernel recalls at each width."""
    known = {row.variant: shares for row in rows if (shares := accuracies(row))}
    if not known:
        return ""
    pairs = sorted({number for shares in known.values() for number in shares})
    lines = ["## By number of pairs", "", *_head(["system", *(f"{n} pairs" for n in pairs)])]
    for name, shares in known.items():
        cells = (f"{shares[n]:.2f}" if n in shares else "" for n in pairs)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    by_width: dict[str, dict[int, int]] = {}
    for name, shares in known.items():
        kernel, _, width = name.rpartition("-")
        by_width.setdefault(kernel, {})[int(width)] = most_recalled(shares)
    widths = sorted({width for found in by_width.values() for width in found})
    lines += ["", f"## Most pairs recalled, right in at least {ENOUGH:.0%}", ""]
    lines += _head(["kernel", *(f"width {width}" for width in widths)])
    for kernel, found in by_width.items():
        lines.append(f"| {kernel} | {' | '.join(str(found.get(w, '')) for w in widths)} |")
    return "\n".join(lines) + "\n"


def _head(titles: Sequence[str]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]


studies: dict[str, Mapping[str, Callable[[], Study]]] = {
    "recall": {
        "full": lambda: make("full"),
        "rough": lambda: roughen(make("full"), cost=COST["rough"], **ROUGH),
        "small": lambda: make("small"),
    },
}
