"""The command `mercer study`."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ..studies import Outcome, Shard, Study

FAILED, INTERRUPTED = 1, 130
MOST_SEEDS = 10_000


def run_study(
    study: Annotated[
        str | None,
        typer.Argument(
            help="The name of a study, or a Python file that defines one; `list` lists them.",
            metavar="FILE_OR_NAME",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A folder of data with lm/, translation/, …, or a source by name.",
            metavar="FOLDER_OR_NAME",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="rough: the same rows on a fraction of the budget; small: a version for two cores."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=64, help="So many jobs at once on this machine.")
    ] = 1,
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
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile the models: faster for runs of many steps on a GPU."
        ),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say what it will cost; run nothing.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Show the results so far; run nothing.")
    ] = False,
    publish: Annotated[
        Path | None,
        typer.Option(
            help="Merge the results so far into this folder, without checkpoints; run nothing.",
            metavar="FOLDER",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --table or list: print JSON, for programs.")
    ] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Print the study's file, as a start for your own.")
    ] = False,
) -> None:
    """Train every system of a study with one budget and several seeds, and compare them.

    Stop it with Ctrl-C at any time: the same command continues. Processes and machines that share
    the folder share the work, and their results are merged. Studies beside each other share the
    results of equal runs.

    For example: `mercer study quick`, or `mercer study tsai-kernels --data DATA --jobs 3`
    """
    from .. import studies

    console = Console(highlight=False)
    try:
        listed = study is None or study == "list"
        if as_json and not (listed or table):
            raise ValueError("--json needs --table, or list")
        if study is None or listed:
            if as_json:
                typer.echo(json.dumps(studies.describe_studies(), indent=2))
            else:
                studies.list_studies(console)
            return
        if source:
            typer.echo(studies.find(study).read_text(encoding="utf-8"), nl=False)
            return
        chosen = studies.load(study, size)
        if data is not None:
            chosen = studies.use_data(chosen, data)
        wanted = None if seeds is None else read_seeds(seeds)
        part = None if shard is None else read_shard(shard)
        folder = output or Path("runs") / chosen.name
        if plan:
            studies.introduce(console, chosen, folder, part, wanted)
            studies.show_plan(console, chosen, folder, jobs, wanted)
            return
        if table:
            chosen = replace(chosen, chosen=studies.choose(chosen, folder) or {})
            found, notes, files = studies.look_up(chosen, folder, wanted)
            if not files:
                raise ValueError(f"there are no results of this study in {folder} yet")
            if as_json:
                typer.echo(json.dumps(studies.as_data(chosen, found, notes), indent=2))
            else:
                studies.show(console, chosen, found, notes, files)
            return
        if publish is not None:
            for path in studies.publish(chosen, folder, publish):
                console.print(f"wrote {escape(str(path))}", soft_wrap=True)
            return
        studies.check_data(chosen)
        if compiled:
            studies.check_compile(chosen)
        studies.introduce(console, chosen, folder, part, wanted)
        given = {"--data": data, "--size": size, "--output": output, "--shard": shard}
        given["--seeds"] = seeds
        options = [str(x) for pair in given.items() if pair[1] is not None for x in pair]
        options += ["--compile"] if compiled else []
        if jobs > 1:
            chosen, outcome = _side_by_side(console, chosen, folder, study, options, jobs, wanted)
        else:
            chosen, outcome = _one_by_one(
                console, chosen, folder, part, wanted, share=output is None, compiled=compiled
            )
    except (ValueError, ModuleNotFoundError) as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error}; finished jobs are kept, and the same command continues with the rest")
    again = ["mercer", "study", study, *options]
    look = [word for word in again if word != shard and word != "--shard"]
    if jobs > 1:
        again += ["--jobs", str(jobs)]
    studies.conclude(
        console, chosen, outcome, again=shlex.join(again), look=shlex.join([*look, "--table"])
    )
    raise typer.Exit(INTERRUPTED if outcome.interrupted else FAILED if outcome.failed else 0)


def _one_by_one(
    console: Console, study: Study, folder: Path, part: Shard | None, seeds: list[int] | None, *,
    share: bool, compiled: bool,
) -> tuple[Study, Outcome]:  # fmt: skip
    """Tune and run the study in this process."""
    from .. import studies

    said: set[Path] = set()
    stopped: list[bool] = []

    run = partial(studies.run, shard=part, console=console, share=share, compile=compiled)

    def attempt(trial: Study, place: Path) -> Outcome:
        if place not in said:
            said.add(place)
            console.print(f"[bold]{escape(trial.title)}[/]")
        outcome = run(trial, place)
        for job, why in outcome.failed.items():
            console.print(f"[red]failed:[/] {escape(job)}: {escape(why)}", soft_wrap=True)
        stopped.append(outcome.interrupted)
        return outcome

    tuned = studies.tune(study, folder, attempt)
    if tuned is None:
        why = "stopped" if any(stopped) else "not complete: trials failed, or run elsewhere"
        console.print(f"The tuning is {why}. The same command continues.")
        raise typer.Exit(INTERRUPTED if any(stopped) else FAILED)
    return tuned, run(tuned, folder, seeds=seeds)


def _side_by_side(
    console: Console, study: Study, folder: Path, name: str, options: list[str], jobs: int,
    seeds: list[int] | None,
) -> tuple[Study, Outcome]:  # fmt: skip
    """Run the study in several processes."""
    from .. import studies

    begun = time.monotonic()
    command = [sys.executable, "-m", "mercer.cli.main", "study", name, *options]
    ended = studies.run_workers(command, jobs, folder, study, console)
    study = replace(study, chosen=studies.choose(study, folder) or {})
    rows, notes, files = studies.look_up(study, folder, seeds)
    outcome = studies.Outcome(
        rows=rows, notes=notes, files=files, interrupted=bool(ended.signal),
        seconds=time.monotonic() - begun,
    )  # fmt: skip
    if not ended.signal:
        for number, (code, log) in enumerate(zip(ended.codes, ended.logs, strict=True), 1):
            if code:
                outcome.failed[f"worker {number}"] = f"it ended with code {code}; its log is {log}"
    return study, outcome


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
