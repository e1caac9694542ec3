"""transformers' Trainer with our order of data, learning rates, budget and checkpoints.

Trainer does the loop, accumulation, clipping, DDP through accelerate, and callbacks. We do: the
items of a step, the loss as a mean over all targets of a step on all processes, the schedule, the
end of a run, and checkpoints that hold everything the next step depends on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerState

from ..inspect import stored_bandwidths
from ..parallel import Split
from .best import Patience
from .board import Board
from .checkpoints import Checkpoints
from .conductor import Conductor
from .distributed import Spread, Team, Watch, sharing, spread
from .folder import Folder
from .judge import Judge
from .optimiser import make_optimizer, rate_after
from .order import Order, Stream
from .progress import Counts, Pace, Progress, Stopwatch, seconds_left
from .saving import load, save
from .settings import Settings
from .state import read_json, restore_random, seed_all
from .tasks import Task

# Trainer needs a number of steps; a run that ends by time alone never reaches this one.
ENDLESS = 1_000_000_000


class KernelTrainer(Trainer):
    """Train the model of a task as the settings say."""

    # Optional in Trainer; always set here.
    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *,
        settings: Settings,
        task: Task,
        model: Any,
        arguments: TrainingArguments,
        team: Team,
        folder: Folder,
        on_progress: Callable[[Progress], None] | None,
        signal: Callable[[], int],
        about: dict[str, Any],
        board: Board | None,
    ) -> None:
        self.settings = settings
        self.task = task
        self.team = team
        self.folder = folder
        self.on_progress = on_progress
        self.signal = signal
        self.about = about
        self.board = board
        self.watch = Watch(team)
        # Seconds of steps alone, and of the whole run.
        self.clock = Stopwatch()
        self.whole = Stopwatch()
        # What `whole` will say after one more step, agreed upon by all processes.
        self.agreed_seconds = 0.0
        self.broken_at: int | None = None
        self.stopped_by = 0
        # Whether an evaluation is left over from before a stop.
        self.owing = False
        self.judge = Judge(settings, task, team)
        self.counts = Counts(team)
        self._tokens = self.counts.tokens
        self.pace = Pace()
        self._progress = Progress(step=0, steps=settings.steps)
        self._step_loss: Tensor | None = None
        self._norm: Tensor = torch.zeros(())
        assert settings.batch is not None
        together = settings.context_parallel
        self.sharing = sharing(team, together)
        # Processes that share sequences get the same items.
        self.order = Order(
            batch=settings.batch, steps=settings.steps or ENDLESS, accumulate=settings.accumulate,
            rank=team.rank // together, processes=team.size // together,
        )  # fmt: skip
        super().__init__(
            model=model,
            args=arguments,
            train_dataset=Stream(task.train, settings.seed, settings.batch),
            data_collator=task.collate,
            callbacks=[Conductor(self)],
        )
        self.remove_callback(PrinterCallback)
        # Our loss is already a share of the step's loss: Trainer must not divide it again.
        self.model_accepts_loss_kwargs = True
        self.checkpoints = (
            None if folder.checkpoints is None else Checkpoints(folder.checkpoints, settings.keep)
        )
        if settings.fsdp:
            spread(model, team)
        if settings.compile:
            task.compile(model)

    def get_train_dataloader(self) -> DataLoader[Any]:
        # A separate generator: the loader draws a seed, which must not change the model's.
        return DataLoader(
            self.train_dataset,  # type: ignore[arg-type]
            batch_sampler=self.order,
            collate_fn=self.task.collate,
            num_workers=self.settings.workers,
            pin_memory=self.team.device.type == "cuda",
            generator=torch.Generator().manual_seed(self.settings.seed),
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """The micro-batches of a step, and how many targets it has on all processes."""
        batches = [b for _, b in zip(range(num_batches), epoch_iterator, strict=False)]
        targets = sum(self.task.count_targets(batch) for batch in batches)
        tokens = sum(self.task.count_tokens(batch) for batch in batches)
        total = self.team.sum([targets, tokens]) / self.settings.context_parallel
        self._tokens = total[1]
        self._step_loss = None
        return batches, total[0]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """This micro-batch's share of the mean over all targets of the step."""
        more = {}
        if self.sharing is not None:
            more["split"] = Split(self.sharing, inputs["input_ids"].shape[1])
        outputs = model(**inputs, **more)
        loss = self.task.loss(outputs, inputs)
        if num_items_in_batch is not None:
            # DDP and FSDP2 average over processes, so the share is multiplied by their number. The
            # loss of a part of a sequence is a share of the mean already.
            share = self.task.count_targets(inputs) * self.team.size / num_items_in_batch
            loss = loss * share.to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> Any:
        return self.task.precision(self.team.device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        # Batches are in pinned memory where there is a GPU, so that the copy is asynchronous.
        return {
            name: x.to(self.team.device, non_blocking=True) if isinstance(x, Tensor) else x
            for name, x in inputs.items()
        }

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if isinstance(model, Spread):
            model.sync(self.accelerator.sync_gradients)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_loss = loss if self._step_loss is None else self._step_loss + loss
        return loss

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return Spread(model) if self.settings.fsdp else model

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = super()._clip_grad_norm(model)
        self._norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return self._norm

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = self.task.groups(self.model)
            self.optimizer = make_optimizer(self.model, groups, self.settings)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:

            def factor(step: int) -> float:
                limit = self.judge.budget.limit
                return rate_after(step, self.agreed_seconds, self.settings, limit)

            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, factor
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def begin(self, state: TrainerState) -> None:
        """Seed this process, set the start of the data, and start the clocks."""
        # A resumed run loads its generator states after this.
        seed_all(self.settings.seed, self.team.rank, state.global_step)
        self.order.start = state.global_step
        self.whole.start()
        note = self.judge.begin(self.model)
        if note is not None and self.on_progress is not None:
            self.on_progress(Progress(step=0, steps=self.settings.steps, note=note))
        self.clock.start()
        if self.owing:
            self.owing = False
            self.evaluate()
        ended = [line for line in self.folder.history if line.get("step") == state.global_step]
        if self.judge.best.over or any(
            self.judge.gives_up(line, state.global_step) for line in ended if "eval_loss" in line
        ):
            raise Patience

    def note_step(self, step: int) -> None:
        """Share this process's outcome of a step with all processes."""
        assert self._step_loss is not None
        self.task.after_step(self.model, step / (self.settings.steps or ENDLESS))
        first = not self.counts.started
        seconds = self.whole.seconds + self.pace.lap(self.clock.seconds)
        self.watch.post(step, self._step_loss, self._norm, self.signal(), seconds)
        self.counts.add(self._tokens, self._step_loss, self.clock)
        if first:
            self.folder.begin(self.settings, self.about)

    def learn(self, *, everything: bool) -> None:
        """Read the shared outcomes: all up to this step, or those that have arrived."""
        for step, bad, signal, seconds in self.watch.read(everything=everything):
            self.agreed_seconds = seconds
            self.stopped_by = self.stopped_by or signal
            if bad and self.broken_at is None:
                self.broken_at = step

    def _get_learning_rate(self) -> float:
        """What a log calls the learning rate: that of the weights, which are the last group."""
        return float(self.lr_scheduler.get_last_lr()[-1])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a line of the journal and call `on_progress`."""
        if "loss" not in logs:
            # Trainer's summary at the end.
            return
        step, speed = self.state.global_step, self.counts.speed(self.clock)
        # Trainer's mean starts again with each process.
        loss = self.counts.mean_loss(step)
        numbers = {
            "loss": loss,
            "learning_rate": logs["learning_rate"],
            "grad_norm": float(logs.get("grad_norm", math.nan)),
            "tokens": int(self.counts.tokens.item()),
            "seconds": round(self.clock.seconds, 4),
        }
        self._tell(
            step, numbers | ({} if speed is None else {"tokens_per_second": round(speed, 1)})
        )
        left = seconds_left(self.settings, step, self.whole, self.order.start)
        self._progress = Progress(
            step=step, steps=self.settings.steps, loss=loss, learning_rate=logs["learning_rate"],
            tokens_per_second=speed, seconds_left=left,
        )  # fmt: skip
        if self.on_progress is not None:
            self.on_progress(self._progress)

    def _tell(self, step: int, numbers: dict[str, Any]) -> None:
        self.folder.note({"step": step, **numbers})
        if self.board is not None:
            self.board.note(step, numbers)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        *,
        final: bool = False,
        quiet: bool = False,
    ) -> dict[str, float]:
        """The metrics of the task, shown unless `quiet`; the state of training is unchanged."""
        step = self.state.global_step
        with self.clock.paused():
            metrics, text = self.judge.evaluate(self.model, step, final=final, sample=not quiet)
        if self.judge.best.over or (not final and self.judge.gives_up(metrics, step)):
            self.control.should_training_stop = True
            # Trainer asks again at its end.
            self.control.should_evaluate = False
            self.control.should_save = self.checkpoints is not None
        if widths := stored_bandwidths(self.model):
            self.folder.note({"step": step, "bandwidths": widths})
        self._tell(step, dict(metrics))
        if text is not None:
            self.folder.note({"step": step, **text})
        if self.on_progress is not None and not quiet:
            progress = replace(self._progress, step=step, metrics=metrics, sample=text)
            self.on_progress(progress)
        return {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Everything the next step depends on; collective."""
        with self.clock.paused():
            save(self)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing: the weights were loaded before the model was sharded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load(self, Path(checkpoint))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        found = read_json(Path(checkpoint) / "random.json")
        # With another number of processes there are no generator states to load: seed again from
        # the seed, the process and the step.
        if len(found) == self.team.size:
            restore_random(found[self.team.rank])

    def release(self) -> None:
        """Release the model, the optimiser and compiled code."""
        if self.settings.compile:
            # Past a few models of one class dynamo would run them uncompiled.
            torch._dynamo.reset()
        if self.team.device.type == "cpu":
            # No gc.collect(): it takes longer than a small run. The next run collects the rest.
            self.accelerator._models.clear()
            self.accelerator._optimizers.clear()
        else:
            self.accelerator.free_memory()
