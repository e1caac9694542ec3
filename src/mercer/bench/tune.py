"""`mercer bench --tune`: which backend is the fastest, by kind of kernel and by shape.

It prints the times, and entries of rules.json, which the backend `auto` follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.table import Table

from ..dispatch import rules
from ..dispatch.choose import BACKENDS
from ..dispatch.rules import Rule
from ..term.layout import accumulator
from .catalogue import KERNELS
from .contenders import Ours
from .machine import device_name
from .measure import Row, measure_row
from .settings import Settings
from .workload import Workload


@dataclass(frozen=True, kw_only=True)
class Finding:
    """For a kind of kernel on a shape: the fastest backend, and the times of all."""

    kind: str
    kernel: str
    shape: str
    fastest: str
    milliseconds: dict[str, float]
    problems: dict[str, str]

    @property
    def order(self) -> tuple[str, ...]:
        """The backends that were timed, the fastest first."""
        return tuple(sorted(self.milliseconds, key=lambda name: (self.milliseconds[name], name)))

    @property
    def times(self) -> str:
        return ", ".join(f"{name} {self.milliseconds[name]:.3g}" for name in self.order)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.kind, self.kernel, self.shape, self.fastest, self.times


COLUMNS = ("kind", "kernel", "shape", "fastest", "ms")


def tune(settings: Settings) -> Iterator[Row]:
    """Yield rows for every backend, kernel and shape, refusals included."""
    for workload in settings.workloads:
        flops = workload.flops()
        for kernel in settings.kernels:
            for backend in settings.backends:
                yield measure_row(Ours(kernel, backend), workload, settings, flops)


def find(rows: list[Row]) -> list[Finding]:
    """The fastest backend for each kernel and shape with a timed backend."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.shape), []).append(row)
    findings = []
    for (kernel, shape), group in groups.items():
        times = {row.backend: ms for row in group if (ms := row.decisive_ms) is not None}
        if times:
            findings.append(
                Finding(
                    kind=KERNELS[kernel].kind,
                    kernel=kernel,
                    shape=shape,
                    fastest=min((ms, name) for name, ms in times.items())[1],
                    milliseconds=times,
                    problems={row.backend: row.problem for row in group if row.problem},
                )
            )
    return findings


def as_rules(findings: list[Finding], settings: Settings) -> list[Rule]:
    """The findings as entries of rules.json: for each kind, the longest and widest shapes first."""
    workloads = {str(workload): workload for workload in settings.workloads}
    kinds: dict[str, dict[int, dict[int, Rule]]] = {}
    for finding in findings:
        workload = workloads[finding.shape]
        rule = _rule(finding, workload, settings)
        if rule.backends:
            lengths = kinds.setdefault(finding.kind, {})
            lengths.setdefault(workload.length, {}).setdefault(workload.dim, rule)
    return [rule for lengths in kinds.values() for rule in _by_size(lengths)]


def _rule(finding: Finding, workload: Workload, settings: Settings) -> Rule:
    masked = workload.build_filter().mask_elements(workload.queries, workload.length) > 0
    passes = "forward" if settings.forward_only else "forward and backward"
    what = "one query" if settings.decode else settings.filter
    where = f"{device_name(settings.device)}, {finding.shape} {settings.dtype} {what}"
    return Rule(
        kind=finding.kind,
        half=accumulator(workload.dtype) != workload.dtype,
        gradient=not settings.forward_only,
        at_most_queries=1 if settings.decode else None,
        at_least_mask=1 if masked else None,
        at_most_mask=None if masked else 0,
        backends=tuple(name for name in finding.order if name in BACKENDS),
        because=f"measured on {where}, {finding.kernel}, {passes}: {finding.times} ms",
    )


def _by_size(lengths: dict[int, dict[int, Rule]]) -> list[Rule]:
    """The rules of one kind. The rule of the smallest size serves all smaller ones.

    A size with the same order of backends as the next smaller one needs no rule.
    """
    found: list[list[Rule]] = []
    before: list[tuple[int | None, tuple[str, ...]]] | None = None
    for length in sorted(lengths):
        dims = lengths[length]
        kept: list[tuple[int | None, Rule]] = []
        for dim in sorted(dims):
            if not kept or kept[-1][1].backends != dims[dim].backends:
                kept.append((dim if kept else None, dims[dim]))
        asked = [(dim, rule.backends) for dim, rule in kept]
        if asked != before:
            keys = length if found else None
            sized = [replace(r, at_least_keys=keys, at_least_features=dim) for dim, r in kept]
            found.append(sized[::-1])
            before = asked
    return [rule for group in reversed(found) for rule in group]


def as_entries(found: list[Rule], settings: Settings) -> str:
    """The rules as rules.json holds them."""
    return f"{rules.family(settings.device)}:\n" + ",\n".join(map(rules.as_entry, found))


def updated(found: list[Rule], settings: Settings) -> str:
    """rules.json with these rules first."""
    table = rules.read(rules.PATH.read_text(encoding="utf-8"), BACKENDS)
    return rules.write(rules.put_first(table, rules.family(settings.device), found))


def as_table(findings: list[Finding]) -> Table:
    """The findings for a terminal."""
    table = Table(*COLUMNS, title="The fastest backends", title_justify="left")
    for finding in findings:
        table.add_row(*finding.cells)
    return table


def as_markdown(findings: list[Finding]) -> list[str]:
    """The findings as lines of a table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    return lines + ["| " + " | ".join(finding.cells) + " |" for finding in findings]
