"""Run the jobs of a study that have no result yet, and keep each result as it comes.

Requirements: an interrupt never loses a finished job, and an interrupted job resumes from its
checkpoints; two processes never work on one job; results of another budget are never mixed in; one
failed job does not stop the others.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..storage.lock import Lock
from .ledger import TUNING, Ledger, Record, Shard, claim
from .look import look, look_up
from .measure import Trained
from .screen import Screen
from .study import Job, Study
from .table import Row, rows

if TYPE_CHECKING:
    from ..train import Result

# The share of its steps after which a job ends that has learnt no more than frequencies of tokens.
GIVE_UP = 0.25
# Trains one job in a folder, reports to the screen, and returns what mercer.train.run returns.
Runner = Callable[[Job, Path, Screen], Any]


@dataclass
class Outcome:
    """The outcome of a call of `run`."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    # Jobs that another process is running.
    elsewhere: list[Job] = field(default_factory=list)
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def missing(self) -> int:
        return sum(row.wanted - len(row.records) for row in self.rows)


def run(
    study: Study,
    folder: Path,
    *,
    shard: Shard | None = None,
    seeds: Sequence[int] | None = None,
    runner: Runner | None = None,
    console: Console | None = None,
    share: bool = False,
    compile: bool = False,
) -> Outcome:
    """Run the jobs of this shard; the outcome includes earlier results in the folder.

    With `share`, results of the same settings in other studies beside this folder are copied, and
    the run that all jobs start from is taken from there. With `compile`, models are compiled:
    longer runs take less time, and results are the same but for rounding.

    Raises ValueError before anything runs if a setting is wrong, the folder cannot be written, or
    it holds results of another budget; OSError if writing fails later.
    """
    if compile:
        check_compile(study)
    shard = shard or Shard()
    begun = time.monotonic()
    runner = runner or partial(train, share=share, compile=compile)
    _make(folder)
    ledger = Ledger(folder, shard)
    outcome = Outcome()
    jobs = study.jobs(seeds)[shard.index - 1 :: shard.count]
    records, notes = look(study, ledger)
    wanted = {job.key: (study.name, job.variant) for job in jobs if job.key not in records}
    if share and (shared := ledger.borrow(wanted)):
        records |= {record.key: record for record in shared}
        notes.append(f"{len(shared)} results are those of other studies beside this folder")
    todo = [job for job in jobs if job.key not in records]
    with Screen(console or Console(), study) as screen:
        for note in notes:
            screen.say(note, style="yellow")
        if len(todo) < len(jobs):
            screen.say(f"{len(jobs) - len(todo)} of {len(jobs)} jobs are done already")
        screen.open(rows(study, records.values(), seeds), len(todo))
        try:
            for job in todo:
                with claim(folder / "jobs" / job.name) as ours:
                    if not ours:
                        outcome.elsewhere.append(job)
                    # Another process may have finished it meanwhile.
                    if not ours or job.key in ledger.read():
                        screen.skip()
                        continue
                    if not _run_one(job, study, ledger, runner, screen, outcome):
                        outcome.interrupted = True
                        break
                    screen.update(rows(study, ledger.read().values(), seeds))
        except KeyboardInterrupt:
            outcome.interrupted = True
        # Inside the screen's block, since drawing takes a moment.
        screen.update(rows(study, ledger.read().values(), seeds))
        outcome.rows, outcome.notes, outcome.files = look_up(study, folder, seeds)
        there = ledger.read()
        outcome.elsewhere = [job for job in outcome.elsewhere if job.key not in there]
    outcome.seconds = time.monotonic() - begun
    return outcome


def check_compile(study: Study) -> None:
    """Raise ValueError if time ends a run: compiled ones take other steps, so they are others."""
    if any(job.settings.get("time") is not None for job in study.jobs(study.seeds[:1])):
        raise ValueError(
            f"the runs of {study.name} end by time, so compiling them is a part of the budget: "
            'set "compile" there, for all systems alike'
        )


def _run_one(
    job: Job, study: Study, ledger: Ledger, runner: Runner, screen: Screen, outcome: Outcome
) -> bool:
    """Run one job and record its result; False if it was stopped, or told to at its end."""
    screen.start(job)
    begun = time.monotonic()
    place = ledger.folder / "jobs" / job.name
    try:
        result = runner(job, place, screen)
        if result.status == "stopped":
            return False
        record = as_record(job, study, result, time.monotonic() - begun)
        if study.measure is not None and record.converged:
            record = replace(record, metrics={**record.metrics, **_measure(study, job, place)})
    except OSError:
        # The disk or the network failed, not this system: the next job would fail, too.
        raise
    except Exception as error:
        # Without a record it is tried again next time.
        outcome.failed[str(job)] = str(error) or type(error).__name__
        screen.fail(job, outcome.failed[str(job)])
        return True
    ledger.append(record)
    screen.finish(record)
    return not getattr(result, "signal", 0)


def _measure(study: Study, job: Job, place: Path) -> dict[str, Any]:
    """More figures of the trained model, without the progress bars of loading it."""
    from ..train.run import quiet

    assert study.measure is not None
    with quiet():
        return dict(study.measure(Trained(place, job.settings, job.chosen, study.source)))


def as_record(job: Job, study: Study, result: Any, seconds: float) -> Record:
    """The record of a result."""
    return Record(
        key=job.key,
        study=study.name,
        variant=job.variant,
        seed=job.seed,
        status=result.status,
        metrics=dict(result.metrics),
        parameters=result.parameters,
        flops_per_token=result.flops_per_token,
        tokens_per_second=result.tokens_per_second,
        steps=result.steps,
        seconds=round(seconds, 2),
        finished=datetime.now(UTC).isoformat(),
        settings=dict(job.settings),
        environment=dict(getattr(result, "environment", {})),
        # Losses of single steps stay in the folder of the job. The last evaluation of a run with a
        # patience is of the best step, so it is no point of the curve.
        history=[
            e
            for e in with_seconds(result.history)
            if study.metric.curve.key in e and "best_step" not in e
        ],
    )


def with_seconds(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a journal, each with the seconds of steps at its step, from the logs around."""
    logs = {
        entry["step"]: entry["seconds"]
        for entry in history
        if "seconds" in entry and "step" in entry
    }
    steps = sorted(logs)
    found = []
    for entry in history:
        step, seconds = entry.get("step"), None
        before = [s for s in steps if step is not None and s <= step]
        after = [s for s in steps if step is not None and s >= step]
        if before and after:
            low, high = before[-1], after[0]
            share = 0.0 if low == high else (step - low) / (high - low)
            seconds = round(logs[low] + share * (logs[high] - logs[low]), 3)
        found.append(dict(entry) if seconds is None else {**entry, "seconds": seconds})
    return found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write to {folder}: {error.strerror or error}") from None


def train(
    job: Job, folder: Path, screen: Screen, *, share: bool = False, compile: bool = False
) -> Result:
    """Train a job by `mercer.train`, from its last checkpoint if it has one.

    With `share`, the run that all jobs start from may be that of a study beside this one; it is
    never compiled.
    """
    from ..train import Settings
    from ..train import run as run_training

    begun = (folder / "config.json").exists()
    # A study shows no sample texts, and does not wait for what learns nothing.
    chosen = {"samples": False, "give_up": GIVE_UP, "compile": compile, **job.chosen}
    settings = Settings(**chosen, output=str(folder), resume=begun)

    def say(text: str) -> None:
        screen.say(f"{job}: {text}")

    if job.backbone:
        # In the folder of the study, also for its trials.
        home = folder.parents[3] if folder.parents[2].name == TUNING else folder.parents[1]
        own = Path("backbone", job.settings["init"].rpartition(" ")[2])
        places = [home / own, *(home.parent.glob(f"*/{own}") if share else ())]
        place = next((one for one in places if (one / "result.json").exists()), home / own)
        stopped = prepare(job.backbone, place, screen, say)
        if stopped is not None:
            return stopped
        settings = replace(settings, init=str(place))
    return run_training(settings, screen.show, say=say, alter=job.alter)


def prepare(
    backbone: Mapping[str, Any], place: Path, screen: Screen, say: Callable[[str], None]
) -> Result | None:
    """Train the run that all jobs start from, once; its result if it was stopped."""
    from ..train import Settings
    from ..train import run as run_training

    lock = Lock(place.with_name(place.name + ".lock"))
    # Other processes of the study wait for it.
    lock.take(wait=True)
    try:
        if (place / "result.json").exists():
            return None
        say("first the run that all jobs start from")
        begun = (place / "config.json").exists()
        settings = Settings(**backbone, output=str(place), resume=begun)
        result = run_training(settings, screen.show, say=say)
    finally:
        lock.release()
    return result if result.status == "stopped" else None
