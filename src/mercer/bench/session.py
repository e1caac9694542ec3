"""One run of `mercer bench`, from its settings to its last row."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..dispatch import rules
from .measure import Row, measure
from .peers import SDPA, build
from .report import Report, cells, write
from .settings import Settings
from .tune import as_entries, as_rules, as_table, find, tune, updated

INTERRUPTED = 130
HEADER = ("forward ms", "fwd+bwd ms", "TFLOP/s", "MiB", "of SDPA")
WIDTHS = (7, 7, 13, 6, 13)


def run(
    settings: Settings, console: Console, print_json: Callable[[str], object] | None = None
) -> int:
    """Measure, print and save row by row; the exit code.

    At the end `print_json` gets all rows, in the form in which they are saved. An interrupt keeps
    the rows so far. Raises ValueError if files cannot be written, or if no kernel was timed.
    """
    report = Report(settings, {} if settings.tune else _skipped(settings))
    if settings.save:
        report.make_folder()
    screen = Screen(console)
    screen.open(report)
    try:
        for row in tune(settings) if settings.tune else measure(settings):
            report.rows.append(row)
            screen.show(row)
            if settings.save:
                report.save()
        report.complete = True
    except KeyboardInterrupt:
        console.print(f"\ninterrupted: {len(report.rows)} rows kept")
    if settings.tune:
        report.findings = find(report.rows)
        report.rules = as_rules(report.findings, settings)
        console.print("", as_table(report.findings))
        console.print(
            "\nfor rules.json, " + escape(as_entries(report.rules, settings)), soft_wrap=True
        )
    if settings.save and report.rows:
        for path in report.save():
            console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    if print_json is not None:
        print_json(report.as_json())
    if not report.complete:
        return INTERRUPTED
    ours = [row for row in report.rows if row.ours]
    if all(row.problem for row in ours):
        raise ValueError(f"no kernel was timed: {ours[0].label} {ours[0].problem}")
    if settings.write:
        _write_rules(report, console)
    return 0


def _write_rules(report: Report, console: Console) -> None:
    try:
        write(rules.PATH, updated(report.rules, report.settings))
    except OSError as error:
        raise ValueError(f"cannot write {rules.PATH}: {error.strerror or error}") from None
    console.print(f"wrote {escape(str(rules.PATH))}", soft_wrap=True)


def _skipped(settings: Settings) -> dict[str, str]:
    """The requested peers that cannot run, each with its reason."""
    # Do not list SDPA backends of the other kind of device: one always runs.
    wanted = [p for p in build() if p.key in settings.peers and not isinstance(p, SDPA)]
    reasons = {peer.key: peer.available(settings.device) for peer in wanted}
    return {name: why for name, why in reasons.items() if why is not None}


class Screen:
    """Prints a heading for every shape and a line for every row."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.shape = ""

    def open(self, report: Report) -> None:
        machine, settings = report.machine, report.settings
        versions = machine["versions"]
        assert isinstance(versions, dict)
        said = [str(machine["device"]), f"torch {versions['torch']}"]
        said += [f"triton {versions['triton']}"] if versions["triton"] else []
        said += [settings.dtype, settings.filter, f"commit {machine['commit']}"]
        self.console.print(escape(", ".join(said)), soft_wrap=True)
        for name, why in report.skipped.items():
            self.console.print(f"[dim]skipped {name}: {escape(why)}[/]", soft_wrap=True)

    def show(self, row: Row) -> None:
        if row.shape != self.shape:
            self.shape = row.shape
            self.console.print()
            self._print_figures(row.shape, HEADER, style="bold")
        if row.problem is None:
            self._print_figures(row.label, cells(row))
            return
        line = self._line()
        line.add_column(ratio=1)
        style = "red" if row.problem.startswith("wrong") else "yellow"
        line.add_row(escape(row.label), f"[{style}]{escape(row.problem)}[/]")
        self.console.print(line)

    def _print_figures(self, label: str, figures: tuple[str, ...], style: str = "") -> None:
        line = self._line()
        for width in WIDTHS:
            line.add_column(justify="right", width=width)
        line.add_row(escape(label), *figures, style=style)
        self.console.print(line)

    def _line(self) -> Table:
        """One line of a table whose columns have the same widths in every line."""
        line = Table.grid(padding=(0, 2))
        rest = self.console.width - sum(WIDTHS) - 2 * len(WIDTHS)
        line.add_column(width=max(16, min(44, rest)))
        return line
