"""`mercer bench --tune`: which backend is the fastest, by kind of kernel and by shape.

The outcome is a table of rules that `auto` could follow; for now it is printed and saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from .catalogue import KERNELS
from .contenders import Ours
from .measure import Row, measure_row
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Rule:
    """For a kind of kernel on a shape: the fastest backend, and what each one gave."""

    kind: str
    kernel: str
    shape: str
    fastest: str
    milliseconds: dict[str, float]
    problems: dict[str, str]

    @property
    def cells(self) -> tuple[str, ...]:
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        said = ", ".join(f"{name} {ms:.3g}" for name, ms in times)
        return self.kind, self.kernel, self.shape, self.fastest, said


COLUMNS = ("kind", "kernel", "shape", "fastest", "ms")


def tune(settings: Settings) -> Iterator[Row]:
    """Every backend on every kernel and shape, as the rows come; refusals are rows, too."""
    for workload in settings.workloads:
        flops = workload.flops()
        for kernel in settings.kernels:
            for backend in settings.backends:
                yield measure_row(Ours(kernel, backend), workload, settings, flops)


def find_rules(rows: list[Row]) -> list[Rule]:
    """The fastest backend for each kernel and shape that any backend was timed on."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.shape), []).append(row)
    rules = []
    for (kernel, shape), group in groups.items():
        times = {row.backend: ms for row in group if (ms := row.decisive_ms) is not None}
        if times:
            rules.append(
                Rule(
                    kind=KERNELS[kernel].kind,
                    kernel=kernel,
                    shape=shape,
                    fastest=min((ms, name) for name, ms in times.items())[1],
                    milliseconds=times,
                    problems={row.backend: row.problem for row in group if row.problem},
                )
            )
    return rules


def as_table(rules: list[Rule]) -> Table:
    """The rules for a terminal."""
    table = Table(*COLUMNS, title="The fastest backends", title_justify="left")
    for rule in rules:
        table.add_row(*rule.cells)
    return table


def as_markdown(rules: list[Rule]) -> list[str]:
    """The rules as lines of a table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return lines + ["| " + " | ".join(rule.cells) + " |" for rule in rules]
