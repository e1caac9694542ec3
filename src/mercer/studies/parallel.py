"""Several processes for one study on one machine: they share its folder, so they share its jobs.

Requirements: a stop of this process stops its workers, which save a checkpoint first; a worker that
fails does not stop the others; and each job has its share of the CPU's cores.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from .ledger import Ledger, Record
from .screen import clock
from .study import Study
from .tune import places, points

WAIT = 0.5
# A worker has its checkpoint long before; after this time it is killed.
PATIENCE = 120.0


@dataclass
class Ended:
    """How the workers ended."""

    codes: list[int] = field(default_factory=list)
    # The signal that stopped this process, or 0.
    signal: int = 0
    logs: list[Path] = field(default_factory=list)


def run_workers(
    command: Sequence[str], number: int, folder: Path, study: Study, console: Console
) -> Ended:
    """Run `number` processes of a command until all have ended; print each result as it comes."""
    ended = Ended()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = str(max(1, (cores or 1) // number))
    environment = {"OMP_NUM_THREADS": share, **os.environ}
    if sys.platform == "linux" and "PYTORCH_ALLOC_CONF" not in os.environ:
        # Batches differ in length. Without it each process caches blocks of every size, and the
        # processes together run out of GPU memory.
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        passing = stack.enter_context(_passing_on())
        for index in range(number):
            if passing.signal:
                break
            log = folder / f"worker-{index + 1}.log"
            ended.logs.append(log)
            file = stack.enter_context(log.open("ab"))
            passing.add(
                subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            )
        _watch(passing.workers, folder, study, console)
        ended.signal = passing.signal
    ended.codes = [worker.returncode for worker in passing.workers]
    return ended


class _Passing:
    """The workers, and the last signal of this process. They end after their step."""

    def __init__(self) -> None:
        self.workers: list[subprocess.Popen[bytes]] = []
        self.signal = self.passed = 0
        self.told: set[int] = set()

    def add(self, worker: subprocess.Popen[bytes]) -> None:
        self.workers.append(worker)
        # A signal may come after the worker has begun and before this process knows it.
        if self.passed and worker.pid not in self.told:
            worker.send_signal(self.passed)

    def note(self, got: int, frame: object) -> None:
        # A terminal sends Ctrl-C to the workers, too; a second signal ends their step at once.
        terminal = sys.stdin is not None and sys.stdin.isatty()
        if self.signal or got == signal.SIGTERM or not terminal:
            self.passed = got
            for worker in self.workers:
                self.told.add(worker.pid)
                if worker.poll() is None:
                    worker.send_signal(got)
        self.signal = got


@contextmanager
def _passing_on() -> Iterator[_Passing]:
    """Pass SIGINT and SIGTERM on to the workers."""
    passing = _Passing()
    before = {n: signal.signal(n, passing.note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield passing
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for worker in passing.workers:
            try:
                worker.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def _watch(
    workers: Sequence[subprocess.Popen[bytes]], folder: Path, study: Study, console: Console
) -> None:
    seen = {place: set(Ledger(place).read()) for place in places(study, folder)}
    known = sum(map(len, seen.values()))
    total = len(study.jobs()) + sum(len(trial.jobs()) for _, trial in points(study))
    begun = time.monotonic()
    done = 0
    with console.status("") as status:
        while True:
            running = sum(worker.poll() is None for worker in workers)
            for place in seen:
                for key, record in Ledger(place).read().items():
                    if key not in seen[place]:
                        seen[place].add(key)
                        done += 1
                        _say(console, study, record, place is not folder)
            left = max(0, total - known - done)
            spent = time.monotonic() - begun
            pace = f", about {clock(spent / done * left)} left" if done else ""
            status.update(f"{known + done} of {total} jobs, {running} at once{pace}")
            if not running:
                return
            time.sleep(WAIT)


def _say(console: Console, study: Study, record: Record, tuning: bool) -> None:
    metric = study.metric.curve if tuning else study.metric
    value = record.metrics.get(metric.key)
    said = record.status
    if record.converged and isinstance(value, int | float):
        said = f"{value:.{metric.digits}f} {metric.title}"
    grid = {n: record.settings.get(n) for n in study.tune} if tuning else {}
    told = "".join(f", {name.replace('_', ' ')} {x}" for name, x in grid.items())
    console.print(
        f"{record.variant} seed {record.seed}{told}: {said}, {record.seconds:.0f} s",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
