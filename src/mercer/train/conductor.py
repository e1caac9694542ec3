"""Decides after each step: log, evaluate, save, or end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl

if TYPE_CHECKING:
    from .trainer import KernelTrainer

# How long evaluations may take, as a share of the time spent in steps.
SPARING = 0.5


class Conductor(TrainerCallback):
    """Pass Trainer's events on, and decide what it does after a step."""

    def __init__(self, trainer: KernelTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.begin(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.note_step(state.global_step)
        self._decide(state.global_step, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.clock.stop()

    def _decide(self, step: int, control: TrainerControl) -> None:
        trainer, settings = self.trainer, self.trainer.settings
        last = settings.steps is not None and step >= settings.steps
        control.should_log = last or step % _given(settings.log_every) == 0
        control.should_evaluate = not last and step % _given(settings.eval_every) == 0
        control.should_save = last or step % _given(settings.save_every) == 0
        trainer.learn(everything=last or control.should_save or control.should_evaluate)
        if control.should_evaluate and settings.eval_sparingly:
            # The clock of the main process decides for all.
            spent = trainer.team.tell(lambda: trainer.judging)
            control.should_evaluate = spent <= SPARING * trainer.agreed_seconds
        over = settings.time is not None and trainer.agreed_seconds >= settings.time
        if over or trainer.stopped_by:
            # The last step is checked, too, before it is saved.
            trainer.learn(everything=True)
            control.should_training_stop = control.should_save = control.should_log = True
            control.should_evaluate = False
        if trainer.broken_at is not None:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = control.should_log = False
        if trainer.checkpoints is None:
            control.should_save = False


def _given(number: int | None) -> int:
    assert number is not None
    return number
