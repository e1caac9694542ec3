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
from transformers import TrainingArguments
from transformers.utils import logging

from .. import own
from ..storage import stored
from ..storage.journal import read_journal
from .best import Patience
from .board import Board
from .checkpoints import Checkpoints, replacing, told_if_full
from .distributed import Team
from .folder import Folder, describe
from .initial import start_from
from .pretrained import PRETRAINED
from .progress import Progress, Reading
from .scores import save_scores
from .settings import Settings
from .signals import end_with_torchrun, signals
from .state import gather_model, kept_random, read_json, seed_all
from .tasks import Task, make
from .threads import choose_threads, threads
from .trainer import ENDLESS, KernelTrainer
from .unigram import STUCK, is_stuck

# Trainer, accelerate and torch's generators are global to the process: one run at a time.
TURNS = threading.RLock()


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended, and its figures."""

    # "done", "stopped", "not converged at step N" for a loss that is not finite, or
    # "not converged (unigram)" for one that is no better than the frequencies of tokens.
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
    # Whether the data has a test split.
    test_split: bool = False

    @property
    def converged(self) -> bool:
        return not self.status.startswith("not converged")


def run(
    settings: Settings,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    say: Callable[[str], None] | None = None,
    alter: Callable[[Any], None] | None = None,
) -> Result:
    """Train, evaluate, and write everything to the folder of the run, if it has one.

    Args:
        on_progress: called in the main process with each log, each evaluation and each note.
        say: called with a message, such as one on a damaged checkpoint.
        alter: changes the model after it is built, for controls that no setting gives. It is not
            stored: give it again to resume.
    """
    settings = settings.resolve()
    if missing := settings.untrusted:
        raise own.Untrusted(missing)
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda cannot be used here: torch finds no GPU; give device cpu")
    with TURNS, quiet(), kept_random():
        return _run(settings, on_progress, say or (lambda text: None), alter)


def _run(
    settings: Settings,
    on_progress: Callable[[Progress], None] | None,
    say: Callable[[str], None],
    alter: Callable[[Any], None] | None,
) -> Result:
    end_with_torchrun()
    arguments = make_arguments(settings)
    team = Team(arguments.device, arguments.process_index, arguments.world_size)
    speaks = on_progress if team.main else None
    folder = Folder(None if settings.output is None else Path(settings.output), main=team.main)
    with (
        told_if_full(folder.checkpoints),
        contextlib.closing(folder),
        contextlib.ExitStack() as stack,
    ):
        settings = team.tell(lambda: folder.open(settings))
        if (ended := team.tell(lambda: _ended(folder, say))) is not None:
            return ended
        if settings.threads is None:
            settings = replace(settings, threads=_choose_threads(settings, speaks))
        assert settings.threads is not None
        stack.enter_context(threads(settings.threads))
        about = describe(team.device)
        board = None
        if settings.tensorboard and folder.writes and folder.path is not None:
            board = Board(folder.path / "tensorboard", settings)
        seed_all(settings.seed)
        task = make(settings, tell=Reading(speaks, settings.steps))
        if (data := task.fingerprint()) is not None:
            about |= {"data": data}
        about |= {"compiled": True} if settings.compile else {}
        # Read before training, so that data without a test split is an error at once.
        test = None
        if settings.split == "test":
            test = type(task)(settings, split="test", like=task.like, tell=task.tell)
        seed_all(settings.seed)
        model = task.build()
        if alter is not None:
            alter(model)
        counted = task.count(model)
        checkpoint = team.tell(lambda: _find(settings, folder, say))
        if checkpoint is not None:
            task.resume(model, Path(checkpoint))
        elif settings.init is not None and settings.preset != PRETRAINED:
            start_from(model, task.tokenizer, settings.init, say if team.main else lambda _: None)
        with signals() as signal:
            trainer = KernelTrainer(
                settings=settings,
                task=task,
                model=model,
                arguments=arguments,
                team=team,
                folder=folder,
                on_progress=speaks,
                signal=signal,
                about=about,
                board=board,
            )
            _rewind(folder, settings, checkpoint, say)
            begun = time.perf_counter()
            try:
                with contextlib.suppress(Patience):
                    trainer.train(resume_from_checkpoint=checkpoint)
                status = _status(trainer)
                metrics = trainer.judge.metrics
                if status == "done":
                    metrics = _judge(trainer, task, test, folder)
                    status = STUCK if is_stuck(metrics, trainer.state.global_step) else status
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
            test_split=task.has_test,
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
    if folder.extends is not None and result.status in ("done", STUCK):
        return None
    say(f"the run in {folder.path} has ended before: {result.status}")
    history = read_journal(folder.path)
    if not history:
        say(f"{folder.path / 'metrics.jsonl'} is gone or empty")
    return replace(result, history=history)


def _rewind(
    folder: Folder, settings: Settings, checkpoint: str | None, say: Callable[[str], None]
) -> None:
    """Cut the journal to what it held when the checkpoint was saved."""
    if checkpoint is None:
        folder.rewind(0)
        return
    step = int(Path(checkpoint).name.split("-")[1])
    state = read_json(Path(checkpoint) / "state.json")
    # The last evaluation of a run that was extended came after this checkpoint.
    extended = state.get("steps", settings.steps) != settings.steps
    lines = None if extended else state.get("lines")
    folder.rewind(step, lines)
    if folder.extends is not None:
        folder.note({"step": step, "steps_before": folder.extends, "steps": settings.steps})
    if folder.writes and lines is not None and len(folder.history) < lines:
        missing = lines - len(folder.history)
        say(f"{folder.path}/metrics.jsonl lacks {missing} of {lines} lines; new ones follow")


def _status(trainer: KernelTrainer) -> str:
    if trainer.broken_at is not None:
        return f"not converged at step {trainer.broken_at}"
    return "stopped" if trainer.stopped_by else "done"


def _judge(trainer: KernelTrainer, task: Task, test: Task | None, folder: Folder) -> dict[str, Any]:
    """The last evaluation; saves the trained model and its answers if the run has a folder."""
    if trainer.judge.owes(trainer.state.global_step):
        trainer.evaluate(quiet=True)
    trainer.judge.best.restore(trainer.model)
    trainer.evaluate(final=True)
    _save_scores(folder, "valid", task, trainer.judge.metrics)
    metrics = dict(trainer.judge.metrics)
    if test is not None:
        with kept_random():
            found = test.evaluate(trainer.model, trainer.team, final=True)
        _save_scores(folder, "test", test, found)
        # The signature is the same.
        found.pop("signature", None)
        metrics |= {f"test_{name.removeprefix('eval_')}": value for name, value in found.items()}
    if folder.path is not None:
        weights = gather_model(trainer.model)
        path = folder.path / "model"
        if folder.writes:
            with told_if_full(folder.checkpoints, str(path)), replacing(path) as aside:
                task.save_model(trainer.model, weights, aside)
                if task.tokenizer is not None:
                    task.tokenizer.save_pretrained(aside)
    return metrics


def _save_scores(folder: Folder, split: str, task: Task, metrics: dict[str, Any]) -> None:
    if folder.writes:
        assert folder.path is not None
        figures = {"data": task.source, "split": split, **metrics}
        save_scores(folder.path / "evaluations" / split, figures, task.answers)


def _find(settings: Settings, folder: Folder, say: Callable[[str], None]) -> str | None:
    """The checkpoint to resume from, or None."""
    if folder.checkpoints is None:
        return None
    checkpoints = Checkpoints(folder.checkpoints, settings.keep)
    checkpoints.sweep()
    found = checkpoints.latest(say) if settings.resume else None
    if found is not None:
        say(f"going on from {found.name}")
    elif folder.extends is not None:
        raise ValueError(
            f"the run in {settings.output} has no checkpoint to go on from: start anew with "
            "another --output"
        )
    elif settings.resume:
        say(f"there is no checkpoint in {settings.output} yet: starting from the first step")
    if folder.extends is not None:
        say(
            f"the run had {folder.extends} steps and now has {settings.steps}: from here on the "
            f"learning rate follows the schedule of {settings.steps} steps. A run of that length "
            "from the start would differ"
        )
    return None if found is None else str(found)


def _choose_threads(settings: Settings, speaks: Callable[[Progress], None] | None) -> int:
    """The number of threads of this machine; each process of a run takes its own."""
    number, note = choose_threads()
    if note is not None and speaks is not None:
        speaks(Progress(step=0, steps=settings.steps, note=note))
    return number


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
