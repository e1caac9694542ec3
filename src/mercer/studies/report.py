"""The output before and after a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .conduct import Outcome
from .ledger import Shard
from .load import NAMES, list_sizes, load
from .paper import RULE, Paper, compare
from .screen import clock
from .study import Study
from .table import CAPTION, Row, best, draw
from .tune import say_chosen


def introduce(
    console: Console, study: Study, folder: Path, shard: Shard | None, seeds: Sequence[int] | None
) -> None:
    """Print what will run, and the common budget."""
    number = len(study.seeds if seeds is None else seeds)
    part = f", shard {shard}" if shard else ""
    console.print(f"[bold]{escape(study.title or study.name)}[/]")
    console.print(
        f"{len(study.variants)} systems x {number} seeds{part}, into {escape(str(folder))}"
    )
    console.print(f"[dim]the same for all: {escape(say_budget(study.budget))}[/]")
    for name, values in study.tune.items():
        tried = ", ".join(map(str, values))
        console.print(f"[dim]tuned first, for each system: {escape(name)} {escape(tried)}[/]")
    console.print("[dim]Ctrl-C stops it; the same command continues[/]")


def conclude(console: Console, study: Study, outcome: Outcome, *, again: str, look: str) -> None:
    """Print the final table, the files, and what to try next.

    `again` is the command to continue, `look` the one that shows the table.
    """
    show(console, study, outcome.rows, outcome.notes, outcome.files)
    for why in dict.fromkeys(outcome.failed.values()):
        jobs = ", ".join(job for job, reason in outcome.failed.items() if reason == why)
        console.print(f"[red]failed:[/] {escape(jobs)}: {escape(why)}", soft_wrap=True)
    if outcome.elsewhere:
        names = ", ".join(map(str, outcome.elsewhere))
        console.print(f"another process is running: {escape(names)}", soft_wrap=True)
    if outcome.interrupted:
        console.print(
            f"[yellow]interrupted[/] after {clock(outcome.seconds)}: {_missing(outcome)} to go. "
            "Nothing is lost; continue by"
        )
        console.print(f"  [bold]{escape(again)}[/]", soft_wrap=True)
        return
    if outcome.failed:
        console.print("The same command tries failed jobs again.")
        return
    if outcome.missing:
        todo = "run the other shards into this folder, or copy their results*.jsonl here"
        if len(outcome.elsewhere) == outcome.missing:
            todo = "wait for that one"
        console.print(f"{_missing(outcome)} to go: {todo}. The table of all of them:")
        console.print(f"  [bold]{escape(look)}[/]", soft_wrap=True)
        return
    console.print(f"done in {clock(outcome.seconds)}")
    suggest(console, study)


def show(
    console: Console,
    study: Study,
    rows: Sequence[Row],
    notes: Sequence[str],
    files: Sequence[Path],
) -> None:
    """Print the table, its notes, and the files."""
    console.print(draw(rows, width=console.width, columns=study.columns))
    console.print(f"[dim]{CAPTION}[/]")
    if (first := best(rows)) is not None and first.spread is not None:
        rivals = [r for r in rows if r is not first and r.mean is not None and _ties(first, r)]
        if rivals:
            names = ", ".join(row.variant for row in rivals)
            console.print(
                f"[dim]Within two spreads of the best: {escape(names)}. Try more seeds.[/]"
            )
    if chosen := say_chosen(study):
        console.print(f"[dim]{escape(chosen)}[/]")
    if study.paper is not None:
        _show_paper(console, study.paper, rows)
    if study.remark and not any(row.wanted - len(row.records) for row in rows):
        console.print(f"[dim]{escape(study.remark)}[/]")
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]")
    console.print()
    for path in files:
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)


def as_data(study: Study, rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    """The table as data, for programs: the figure of every seed, its mean and its spread."""
    shown = [
        {
            "system": row.variant, "mean": row.mean, "spread": row.spread, "wanted": row.wanted,
            "seeds": {record.seed: record.metrics.get(row.metric.key) for record in row.records},
            "not_converged": [record.seed for record in row.diverged],
            **{metric.key: row.cell(metric) for metric in study.columns},
        }
        for row in rows
    ]  # fmt: skip
    return {"study": study.name, "metric": study.metric.key, "rows": shown, "notes": list(notes)}


def _show_paper(console: Console, paper: Paper, rows: Sequence[Row]) -> None:
    """Print our figures beside the paper's, and what our runs say of its claims."""
    found = compare(paper, rows)
    table = Table(title=escape(f"Beside {paper.source}"), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("")
    table.add_column(f"ours, {rows[0].metric.title}", justify="right")
    table.add_column(f"paper, {paper.metric}", justify="right")
    by_name = {row.variant: row for row in rows}
    for name, figure in paper.figures.items():
        theirs = "not converged" if figure is None else f"{figure:g}"
        table.add_row(escape(name), by_name[name].figure.strip(), theirs)
    console.print(table)
    console.print(f"[dim]The paper's figures are of {escape(paper.data)}. {found.order}[/]")
    for verdict in found.verdicts:
        console.print(f"{escape(verdict.claim.text)}\n  [bold]{escape(str(verdict))}[/]")
    if found.verdicts:
        console.print(f"[dim]{RULE}[/]")


def suggest(console: Console, study: Study) -> None:
    """Print what to try next."""
    if not study.next_steps:
        return
    console.print("\n[bold]What to try next[/]")
    for command, purpose in study.next_steps:
        console.print(f"  {escape(purpose)}\n    [cyan]{escape(command)}[/]", soft_wrap=True)


def describe_studies() -> list[dict[str, Any]]:
    """The studies that come with the package: what each asks, its jobs, its cost, its data."""
    loaded = [(name, load(name)) for name in NAMES]
    return [
        {
            "name": name, "question": study.question or study.title, "jobs": len(study.jobs()),
            "cost": study.cost, "data": study.corpus, "sizes": list(list_sizes(name)),
        }
        for name, study in loaded
    ]  # fmt: skip


def list_studies(console: Console) -> None:
    """Print them."""
    console.print("Studies that come with Mercer:\n")
    for told in describe_studies():
        needs = f", data {told['data']} by --data" if told["data"] else ""
        sizes = f", sizes {', '.join(told['sizes'])}" if told["sizes"] else ""
        about = f"{told['jobs']} jobs; {told['cost']}{needs}{sizes}"
        console.print(f"[bold]{told['name']}[/]  {escape(told['question'])}", soft_wrap=True)
        console.print(f"  [dim]{escape(about)}[/]", soft_wrap=True)
    console.print(
        "\nRun one by `mercer study NAME`, or one of your own by `mercer study FILE.py`; --plan "
        "says what it costs, --size rough takes minutes of a GPU, --size small is for two cores. "
        "docs/studies.md says how to write one."
    )


def say_budget(budget: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in budget.items())


def _ties(first: Row, other: Row) -> bool:
    """Whether two means are closer than twice the larger spread."""
    assert first.mean is not None
    assert other.mean is not None
    return abs(first.mean - other.mean) < 2 * max(first.spread or 0.0, other.spread or 0.0)


def _missing(outcome: Outcome) -> str:
    return f"{outcome.missing} job" + ("" if outcome.missing == 1 else "s")
