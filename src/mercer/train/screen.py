"""The output of a run: one live line on a terminal; else a line from time to time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from .progress import Progress
from .samples import on_one_line

# Seconds between lines where there is no terminal.
INTERVAL = 10.0


@contextmanager
def progress_line(console: Console) -> Iterator[Callable[[Progress], None]]:
    """A live line on a terminal; else a line from time to time and one per evaluation."""
    if not console.is_terminal:
        spoken = [0.0]

        def write(progress: Progress) -> None:
            if progress.note is not None:
                console.print(escape(progress.note), soft_wrap=True)
                return
            now = time.monotonic()
            if progress.metrics is None and now - spoken[0] < INTERVAL:
                return
            spoken[0] = now
            of = "" if progress.steps is None else f"/{progress.steps}"
            console.print(
                escape(f"step {progress.step}{of}  {progress_words(progress)}"), soft_wrap=True
            )
            if progress.sample is not None:
                console.print(sample_words(progress.sample), soft_wrap=True)

        yield write
        return

    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TextColumn("{task.description}"),
    )  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        judged = [""]

        def show(progress: Progress) -> None:
            if progress.note is not None:
                bar.console.print(escape(progress.note), soft_wrap=True)
                return
            if progress.metrics is not None:
                judged[0] = metric_words(progress.metrics)
                if progress.sample is not None:
                    bar.console.print(f"[dim]step {progress.step}[/]", end="")
                    bar.console.print(sample_words(progress.sample), soft_wrap=True)
                return
            text = "  ".join(part for part in (progress_words(progress), judged[0]) if part)
            bar.update(
                task, completed=progress.step, total=progress.steps, description=escape(text)
            )

        yield show


def progress_words(progress: Progress) -> str:
    if progress.metrics is not None:
        return metric_words(progress.metrics)
    parts = [] if progress.loss is None else [f"loss {progress.loss:.4f}"]
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    if progress.seconds_left is not None:
        parts.append(f"{duration(progress.seconds_left)} left")
    return "  ".join(parts)


def sample_words(sample: dict[str, str]) -> str:
    """What the model was given, dim, and what it wrote."""
    given, written = (escape(on_one_line(sample[name])) for name in ("prompt", "sample"))
    return f"  [dim]{given} →[/] {written}"


def metric_words(metrics: dict[str, Any]) -> str:
    shown = ("bits_per_byte", "perplexity", "bleu", "accuracy")
    found = [(name.replace("_", " "), metrics[name]) for name in shown if name in metrics]
    # The recall of each number of pairs.
    many = [name for name in metrics if name.startswith("accuracy_")]
    found += [(f"{name.removeprefix('accuracy_')} pairs", metrics[name]) for name in many]
    return "  ".join(f"{name} {value:.4g}" for name, value in found)


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
