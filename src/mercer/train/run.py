"""run(settings) -> Result: train a model as the settings say, and judge it.

Requirements: many runs in one process do not affect each other (random numbers, log levels, signal
handlers); and a run ends in one of three ways, which its result names.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import TrainingArguments
from transformers.utils import logging

from .. import own, stored
from ..models.count import count
from .board import Board
from .checkpoints import Checkpoints, replacing, told_if_full
from .distributed import Team
from .folder import Folder, describe, read_journal
from .progress import Progress
from .settings import Settings
from .signals import end_with_torchrun, signals
from .state import gather_model, kept_random, read_json, seed_all
from .tasks import TASKS, Task
from .trainer import ENDLESS, KernelTrainer

# Trainer, accelerate and torch's generators are global to the process: one run at a time.
TURNS = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended, and its figures."""

    # "done", "stopped", or "not converged at step N".
    status: str
    steps: int
    metrics: dict[str, Any]
    parameters: int
    flops_per_token: float
    tokens_per_second: float | None
    seconds: float
    history: list[dict[str, Any]] = field(default_factory=list, repr=False)
    folder: str | None = None
    # The signal that stopped it, or that came during the last evaluation; 0 for none.
    signal: int = 0
    environment: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def converged(self) -> bool:
        return not self.status.startswith("not converged")


def run(
    settings: Settings,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train, evaluate, and write everything to the folder of the run, if it has one.

    Args:
        on_progress: called in the main process with each log and each evaluation.
        say: called with a message, such as one on a damaged checkpoint.
    """
    settings = settings.resolve()
    for source in settings.untrusted:
        raise own.distrust(source)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda cannot be used here: torch finds no GPU; give device cpu")
    with TURNS, quiet(), kept_random():
        return _run(settings, on_progress, say or (lambda text: None))


def _run(
    settings: Settings,
    on_progress: Callable[[Progress], None] | None,
    say: Callable[[str], None],
) -> Result:
    end_with_torchrun()
    arguments = make_arguments(settings)
    team = Team(arguments.device, arguments.process_index, arguments.world_size)
    folder = Folder(None if settings.output is None else Path(settings.output), main=team.main)
    with told_if_full(folder.checkpoints), contextlib.closing(folder):
        team.tell(lambda: folder.open(settings))
        if (ended := team.tell(lambda: _ended(folder, say))) is not None:
            return ended
        about = describe(team.device)
        board = None
        if settings.tensorboard and folder.writes and folder.path is not None:
            board = Board(folder.path / "tensorboard", settings)
        seed_all(settings.seed)
        task = TASKS[settings.task](settings)
        seed_all(settings.seed)
        model = task.build()
        counted = count(model, task.sequence_length(model.config))
        checkpoint = team.tell(lambda: _find(settings, folder, say))
        if checkpoint is not None:
            load_model(model, str(Path(checkpoint) / "model.safetensors"))
        with signals() as signal:
            trainer = KernelTrainer(
                settings=settings,
                task=task,
                model=model,
                arguments=arguments,
                team=team,
                folder=folder,
                on_progress=on_progress if team.main else None,
                signal=signal,
                about=about,
                board=board,
            )
            _rewind(folder, checkpoint, say)
            begun = time.perf_counter()
            try:
                trainer.train(resume_from_checkpoint=checkpoint)
                status = _status(trainer)
                metrics = _judge(trainer, task, folder) if status == "done" else trainer.metrics
            finally:
                trainer.release()
        result = Result(
            status=status,
            steps=trainer.state.global_step,
            metrics=metrics,
            parameters=counted.total,
            flops_per_token=counted.flops_per_token,
            tokens_per_second=trainer.counts.speed(trainer.clock),
            seconds=time.perf_counter() - begun,
            history=folder.history,
            folder=settings.output,
            signal=trainer.stopped_by or signal(),
            environment=about,
        )
        if status != "stopped":
            values = asdict(result) | {"signal": 0}
            folder.finish({n: x for n, x in values.items() if n != "history"})
        return result


def _ended(folder: Folder, say: Callable[[str], None]) -> Result | None:
    """The result of a run that has ended before, or None."""
    if folder.path is None or not (path := folder.path / "result.json").exists():
        return None
    try:
        result = stored.read(Result, path, "the result of a run")
    except ValueError as error:
        raise ValueError(f"{error}; remove it, and --resume ends the run again") from None
    say(f"the run in {folder.path} has ended before: {result.status}")
    history = read_journal(folder.path)
    if not history:
        say(f"{folder.path / 'metrics.jsonl'} is gone or empty")
    return replace(result, history=history)


def _rewind(folder: Folder, checkpoint: str | None, say: Callable[[str], None]) -> None:
    """Cut the journal to what it held when the checkpoint was saved."""
    if checkpoint is None:
        folder.rewind(0)
        return
    lines = read_json(Path(checkpoint) / "state.json").get("lines")
    folder.rewind(int(Path(checkpoint).name.split("-")[1]), lines)
    if folder.writes and lines is not None and len(folder.history) < lines:
        missing = lines - len(folder.history)
        say(f"{folder.path}/metrics.jsonl lacks {missing} of {lines} lines; new ones follow")


def _status(trainer: KernelTrainer) -> str:
    if trainer.broken_at is not None:
        return f"not converged at step {trainer.broken_at}"
    return "stopped" if trainer.stopped_by else "done"


def _judge(trainer: KernelTrainer, task: Task, folder: Folder) -> dict[str, Any]:
    """The last evaluation; saves the trained model if the run has a folder."""
    trainer.evaluate(final=True)
    if folder.path is not None:
        weights = gather_model(trainer.model)
        path = folder.path / "model"
        if folder.writes:
            with told_if_full(folder.checkpoints, str(path)), replacing(path) as aside:
                task.save_model(trainer.model, weights, aside)
                if task.tokenizer is not None:
                    task.tokenizer.save_pretrained(aside)
    return trainer.metrics


def _find(settings: Settings, folder: Folder, say: Callable[[str], None]) -> str | None:
    """The checkpoint to resume from, or None."""
    if folder.checkpoints is None:
        return None
    checkpoints = Checkpoints(folder.checkpoints, settings.keep)
    checkpoints.sweep()
    found = checkpoints.latest(say) if settings.resume else None
    if found is not None:
        say(f"going on from {found.name}")
    elif settings.resume:
        say(f"there is no checkpoint in {settings.output} yet: starting from the first step")
    return None if found is None else str(found)


def make_arguments(settings: Settings) -> TrainingArguments:
    """Trainer's arguments. `Conductor` decides on logs, evaluations and checkpoints."""
    assert settings.learning_rate is not None
    arguments = TrainingArguments(
        # An existing folder, since Trainer would create it; Trainer writes nothing.
        output_dir=settings.output or ".",
        max_steps=settings.steps or ENDLESS,
        gradient_accumulation_steps=settings.accumulate,
        learning_rate=settings.learning_rate,
        # Infinity clips nothing, but the norm is still computed.
        max_grad_norm=math.inf if settings.clip is None else settings.clip,
        seed=settings.seed,
        use_cpu=settings.device == "cpu" or not torch.cuda.is_available(),
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        # A loss that is not finite ends the run; Trainer would filter it out.
        logging_nan_inf_filter=False,
        # `Order` starts at the right step by itself.
        ignore_data_skip=True,
        remove_unused_columns=False,
        # Trainer writes it into the model's config, where users of the model would find it.
        use_cache=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    # One device per process; Trainer would split batches over all visible GPUs.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    return arguments


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Restore global state: the log level of transformers, and torch's oneDNN switch."""
    level = logging.get_verbosity()
    bar = logging.is_progress_bar_enabled()
    fast = torch._C._get_mkldnn_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # A CPU without bfloat16 prints a long warning once, and then computes all later matrix
            # products another way.
            warnings.filterwarnings("ignore", "mkldnn_matmul failed")
            yield
    finally:
        torch._C._set_mkldnn_enabled(fast)
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
