"""The output of a running study: the table so far, and the current job.

On a terminal the table is updated in place; a pipe or a file gets one line per job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .ledger import Record
from .study import Job, Study
from .table import Row, draw, shorten


class Progress(Protocol):
    """The progress of a job, as training reports it."""

    @property
    def step(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def tokens_per_second(self) -> float | None: ...


class Screen:
    """A live table on a terminal, a line for each job elsewhere."""

    def __init__(self, console: Console, study: Study) -> None:
        self.console = console
        self.study = study
        self.rows: Sequence[Row] = ()
        self.job: Job | None = None
        self.progress: Progress | None = None
        # Of the jobs of this call: their number, and the seconds of finished ones.
        self.number = 0
        self.times: list[float] = []
        self.started = time.monotonic()
        self.reasons: set[str] = set()
        self._live = Live(
            get_renderable=self._picture, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.console.is_terminal:
            self._live.stop()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def open(self, rows: Sequence[Row], number: int) -> None:
        self.rows, self.number = rows, number

    def start(self, job: Job) -> None:
        self.job, self.progress, self.started = job, None, time.monotonic()

    def show(self, progress: Progress) -> None:
        self.progress = progress

    def update(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def skip(self) -> None:
        """Another process has done a job of this call."""
        self.number -= 1

    def finish(self, record: Record) -> None:
        """A job ended with a result."""
        self.times.append(time.monotonic() - self.started)
        self.job = None
        metric = self.study.metric
        value = record.metrics.get(metric.key)
        said = record.status
        if record.converged and value is not None:
            said = f"{value:.{metric.digits}f} {metric.title}"
        count = f"{len(self.times)}/{self.number}"
        if not self.console.is_terminal:
            name = f"{record.variant} seed {record.seed}"
            self.say(f"{count:>7}  {name:<24} {said}, {record.seconds:.0f} s")

    def fail(self, job: Job, why: str) -> None:
        """A job ended without a result; a repeated reason is printed once."""
        self.job = None
        self.number -= 1
        if why not in self.reasons:
            self.reasons.add(why)
            self.say(f"failed: {job}: {why}", style="red")

    def _picture(self) -> RenderableType:
        if not self.rows:
            return Text("")
        active = None if self.job is None else self.job.variant
        parts: list[RenderableType] = [draw(self.rows, active, self.console.width)]
        if self.job is not None:
            parts += [
                self._bar(),
                Text(self._words(), style="dim", overflow="ellipsis", no_wrap=True),
            ]
        return Group(*parts)

    def _bar(self) -> Table:
        """The bar over all jobs of this call; the current one counts by its steps."""
        done = len(self.times) + self._share
        line = Table.grid(padding=(0, 1), expand=False)
        bar = ProgressBar(total=max(1, self.number), completed=done, width=34)
        line.add_row(
            bar, f"job {min(len(self.times) + 1, self.number)} of {self.number}", self._left
        )
        return line

    @property
    def _share(self) -> float:
        """The finished share of the current job."""
        if self.job is None or self.progress is None or not self.progress.steps:
            return 0.0
        return min(1.0, self.progress.step / self.progress.steps)

    @property
    def _left(self) -> str:
        """The time left, from how long this call's jobs took so far."""
        spent = sum(self.times) + (time.monotonic() - self.started if self.job else 0.0)
        done = len(self.times) + self._share
        if done < 0.3:
            return ""
        return f"about {clock(spent / done * (self.number - done))} left"

    def _words(self) -> str:
        assert self.job is not None
        words = [str(self.job)]
        if (progress := self.progress) is None:
            return f"{self.job}: loading"
        words.append(f"step {progress.step}" + (f"/{progress.steps}" if progress.steps else ""))
        if progress.loss is not None:
            words.append(f"loss {progress.loss:.3f}")
        if progress.tokens_per_second:
            words.append(f"{shorten(progress.tokens_per_second)} tokens/s")
        return ", ".join(words)


def clock(seconds: float) -> str:
    """1:05, or 2:03:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
