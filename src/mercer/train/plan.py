"""The size of a run before it starts: parameters, operations, memory, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .settings import Settings
from .tasks import make


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run in numbers; `print` it."""

    settings: Settings
    source: str
    counted: Any
    items: int
    tokens_per_step: int
    unit: str
    noun: str
    processes: int
    # Where estimates of the data come from; None where it was counted.
    how: str | None = None

    @property
    def memory_bytes(self) -> int:
        """Of one process: weights, gradients, optimiser states and activations."""
        settings = self.settings
        assert settings.batch is not None
        rows = max(1, settings.batch // (settings.accumulate * self.processes))
        dtype = getattr(torch, settings.dtype)
        return int(self.counted.memory_bytes(rows, dtype, "adamw"))

    def as_dict(self) -> dict[str, Any]:
        """The same numbers for programs; `estimated` says how the data was, if not counted."""
        settings = self.settings
        found: dict[str, Any] = {
            name: getattr(settings, name) for name in ("task", "preset", "system", "kernel")
        }
        found |= {"data": self.source, "items": self.items, "noun": self.noun}
        found |= {"estimated": self.how, "parameters": self.counted.total}
        found |= {"parameters_by_part": dict(self.counted.parameters)}
        found |= {"flops_per_token": self.counted.flops_per_token}
        found |= {"memory_bytes": self.memory_bytes, "processes": self.processes}
        found |= {name: getattr(settings, name) for name in ("dtype", "batch", "accumulate")}
        found |= {"tokens_per_step": self.tokens_per_step, "unit": self.unit}
        return found | {
            "steps": settings.steps,
            "tokens": self.tokens,
            "passes": self.passes,
            "flops": None if self.tokens is None else self.tokens * self.counted.flops_per_token,
            "time": settings.time,
        }

    @property
    def tokens(self) -> int | None:
        """Of all steps; None if only the time is bounded."""
        steps = self.settings.steps
        return None if steps is None else steps * self.tokens_per_step

    @property
    def passes(self) -> float | None:
        """Through the data, in all steps."""
        settings = self.settings
        if settings.steps is None:
            return None
        return settings.steps * _known(settings.batch) / max(1, self.items)

    def __str__(self) -> str:
        settings = self.settings
        attention = settings.kernel or settings.system or "with the preset's attention"
        rows = [("model", f"{settings.task}, preset {settings.preset}, {attention}")]
        about = "" if self.how is None else "about "
        rows.append(("data", f"{self.source}: {about}{self.items:,} {self.noun} to train on"))
        if self.how is not None:
            rows.append(("", self.how))
        total = self.counted.total
        rows.append(("parameters", f"{total:,}"))
        for part, number in self.counted.parameters.items():
            if number:
                rows.append((f"  {part}", f"{number:,} ({number / total:.1%})"))
        flops = self.counted.flops_per_token
        rows.append(("FLOPs", f"{scale(flops)} a token, forward and backward"))
        rows.append(
            ("memory", f"about {size(self.memory_bytes)} a process, {settings.dtype}, AdamW")
        )
        a_step = f"{self.tokens_per_step:,} {self.unit} a step (batch {settings.batch}"
        parts = f", {settings.accumulate} parts" if settings.accumulate > 1 else ""
        rows.append(("step", a_step + parts + ")"))
        if self.tokens is not None:
            rows.append(
                (
                    "steps",
                    f"{settings.steps:,}: {self.tokens:,} {self.unit}, "
                    f"{about}{self.passes:.2f} passes",
                )
            )
            rows.append(("in all", f"{scale(flops * self.tokens)} FLOPs"))
        if settings.time is not None:
            rows.append(("time", f"{settings.time:g} s in all, evaluations included"))
        wide = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{wide}}  {text}" for name, text in rows)


def plan(settings: Settings, processes: int = 1) -> Plan:
    """Count the data and the model; no tokenizer is trained, and no weights are made."""
    settings = settings.resolve()
    task = make(settings, sketch=True)
    counted = task.count()
    return Plan(
        settings=settings,
        source=task.source,
        counted=counted,
        items=len(task.train),
        tokens_per_step=_known(settings.batch) * counted.length,
        unit=task.unit,
        noun=task.noun,
        processes=processes,
        how=task.how,
    )


def scale(number: float) -> str:
    """12.3 M, 4.5 G."""
    for letter in ("", "K", "M", "G", "T", "P", "E"):
        if number < 1000 or letter == "E":
            return f"{number:.3g} {letter}".rstrip()
        number /= 1000
    raise AssertionError


def size(number: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            return f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError


def _known(number: int | None) -> int:
    assert number is not None
    return number
