"""The command `mercer study`."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ..studies import Shard, Study

FAILED, INTERRUPTED = 1, 130
MOST_SEEDS = 10_000


def run_study(
    study: Annotated[
        str | None,
        typer.Argument(
            help="The name of a study, or a Python file that defines `study`; none lists them.",
            metavar="FILE_OR_NAME",
            show_default=False,
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(help="Run part i of n, for example one part per machine.", metavar="i/n"),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(help="Such as 0,1,2 or 0-4; by default those of the study.", metavar="LIST"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="The folder of results; runs/NAME by default.", metavar="FOLDER"),
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Show the results so far; run nothing.")
    ] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Print the study's file, as a start for your own.")
    ] = False,
) -> None:
    """Train every system of a study with one budget and several seeds, and compare them.

    Stop it with Ctrl-C at any time: the same command continues. Processes and machines that share
    the folder share the work, and their results are merged.

    For example: `mercer study quick`, or `mercer study mine.py --shard 1/4 --seeds 0-4`
    """
    from .. import studies

    console = Console(highlight=False)
    try:
        if study is None:
            studies.list_studies(console)
            return
        if source:
            typer.echo(studies.find(study).read_text(encoding="utf-8"), nl=False)
            return
        chosen = studies.load(study)
        wanted = None if seeds is None else read_seeds(seeds)
        part = None if shard is None else read_shard(shard)
        folder = output or Path("runs") / chosen.name
        if table:
            chosen = replace(chosen, chosen=studies.choose(chosen, folder) or {})
            found, notes, files = studies.look_up(chosen, folder, wanted)
            if not files:
                raise ValueError(f"there are no results of this study in {folder} yet")
            studies.show(console, chosen, found, notes, files)
            return
        studies.introduce(console, chosen, folder, part, wanted)
        stopped: list[bool] = []

        def attempt(trial: Study, place: Path) -> bool:
            console.print(f"[bold]{escape(trial.title)}[/]")
            outcome = studies.run(trial, place, shard=part, console=console)
            for job, why in outcome.failed.items():
                console.print(f"[red]failed:[/] {escape(job)}: {escape(why)}", soft_wrap=True)
            stopped.append(outcome.interrupted)
            return not outcome.interrupted

        tuned = studies.tune(chosen, folder, attempt)
        if tuned is None:
            why = "stopped" if any(stopped) else "not complete: trials failed, or run elsewhere"
            console.print(f"The tuning is {why}. The same command continues.")
            raise typer.Exit(INTERRUPTED if any(stopped) else FAILED)
        chosen = tuned
        outcome = studies.run(chosen, folder, shard=part, seeds=wanted, console=console)
    except (ValueError, ModuleNotFoundError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error}; finished jobs are kept, and the same command continues with the rest")
    look = ["mercer", "study", study, *([] if output is None else ["--output", str(output)])]
    again = [*look, *(["--shard", shard] if shard else []), *(["--seeds", seeds] if seeds else [])]
    studies.conclude(
        console, chosen, outcome, again=shlex.join(again), look=shlex.join([*look, "--table"])
    )
    raise typer.Exit(INTERRUPTED if outcome.interrupted else FAILED if outcome.failed else 0)


def read_seeds(text: str) -> list[int]:
    """0,1,2 or 0-4, or both."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"--seeds must be such as 0,1,2 or 0-4, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if last >= 2**32 or last - first >= MOST_SEEDS:
            raise ValueError(
                f"--seeds must be below 2^32 and at most {MOST_SEEDS} in a range, got {text!r}"
            )
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


def read_shard(text: str) -> Shard:
    """i/n, with i from 1 to n."""
    from ..studies import Shard

    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise ValueError(f"--shard must be i/n with i from 1 to n, got {text!r}")
    return Shard(int(match[1]), int(match[2]))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    raise typer.Exit(2)
