"""How a run of `mercer train` ended: what is printed, its exit code, and the commands after it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ..train import Result, Settings

# Exit codes: 0 done, 1 out of disk or memory, 2 a wrong option, 3 not converged,
# 4 an error that nothing expected (see main.py), 128 + n stopped by signal n.
NOT_CONVERGED = 3


def again(task: str, settings: Settings) -> str:
    """The command that goes on with a run."""
    words = ["mercer", "train", task, "--output", str(settings.output), "--resume"]
    return shlex.join([*words, *trust_words(settings.trust_kernels)])


def trust_words(names: Iterable[str]) -> list[str]:
    """The options that trust files and modules."""
    return [word for name in names for word in ("--trust-kernels", name)]


def report(console: Console, task: str, settings: Settings, result: Result) -> None:
    """Print how it ended, in two or three lines, and return the exit code."""
    from ..train.screen import duration, metric_words

    if result.status == "stopped":
        console.print(
            f"stopped after step {result.steps}, with a checkpoint; to go on: "
            f"[bold]{escape(again(task, settings))}[/]",
            soft_wrap=True,
        )
        raise typer.Exit(128 + result.signal)
    if result.status.startswith("not converged at"):
        _lost(console, result, "the loss is not finite. A smaller --lr or --clip may help.")
    speed = result.tokens_per_second
    pace = "" if speed is None else f", {speed:,.0f} tokens/s"
    console.print(f"done: {result.steps} steps in {duration(result.seconds)}{pace}")
    console.print(f"[bold]validation[/]  {metric_words(result.metrics)}")
    tested = {n.removeprefix("test_"): x for n, x in result.metrics.items() if n[:5] == "test_"}
    if tested:
        console.print(f"[bold]test[/]        {metric_words(tested)}")
    if "signature" in result.metrics:
        console.print(f"sacrebleu   {escape(result.metrics['signature'])}", soft_wrap=True)
    if result.folder is not None:
        console.print(f"the model is in {escape(result.folder)}/model; to use it:")
        for command in next_steps(task, settings, result):
            console.print(f"  [bold]{escape(command)}[/]", soft_wrap=True)
    if not result.converged:
        loss, plain = (f"{result.metrics[name]:.3f}" for name in ("eval_loss", "unigram_loss"))
        why = f"a loss of {loss}, no better than that of token frequencies, {plain}"
        _lost(console, result, f"{why}. More --steps or a larger --lr may help.")


def _lost(console: Console, result: Result, why: str) -> NoReturn:
    console.print(f"[red]{result.status}[/]: {why}", soft_wrap=True)
    raise typer.Exit(NOT_CONVERGED)


def next_steps(task: str, settings: Settings, result: Result) -> list[str]:
    """The commands that use the model of a run."""
    folder = shlex.join([str(result.folder), *trust_words(settings.trust_kernels)])
    embedded = settings.data == "embedded"
    first = {
        "lm": f"mercer generate {folder} 'The'",
        "translation": f"mercer translate {folder} "
        + ("'Die Katze schläft.'" if embedded else "< FILE"),
        "vision": f"mercer classify {folder} IMAGE.png",
    }
    if task in ("recall", "tagging"):
        return [f"mercer evaluate {folder} --split test"]
    untested = result.test_split and settings.split != "test"
    other = "" if task == "vision" else " --data FILE"
    judge = f"mercer evaluate {folder}" + (" --split test" if untested else other)
    return [first[task], judge, f"mercer inspect {folder}"]
