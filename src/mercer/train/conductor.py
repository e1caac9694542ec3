"""Decides after each step: log, evaluate, save, or end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import TrainerControl

if TYPE_CHECKING:
    from .trainer import KernelTrainer


# A run that is killed loses at most so many seconds of steps, however far apart its checkpoints.
MOST_LOST = 60.0


class Conductor(TrainerCallback):
    """Pass Trainer's events on, and decide what it does after a step."""

    def __init__(self, trainer: KernelTrainer) -> None:
        self.trainer = trainer
        # Seconds of the run at its last checkpoint; None until its first step here.
        self.saved: float | None = None

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
        log = last or step % _given(settings.log_every) == 0
        evaluate = not last and step % _given(settings.eval_every) == 0
        self.saved = trainer.agreed_seconds if self.saved is None else self.saved
        late = trainer.agreed_seconds - self.saved >= MOST_LOST
        save = last or late or step % _given(settings.save_every) == 0
        trainer.learn(everything=last or save or evaluate)
        budget, seconds = trainer.judge.budget, trainer.agreed_seconds
        # Instead of an evaluation that would not end in time comes the last one.
        evaluate = evaluate and budget.fits(seconds)
        over = budget.limit is not None and seconds >= budget.limit
        if over or trainer.stopped_by:
            # The last step is checked, too, before it is saved.
            trainer.learn(everything=True)
            control.should_training_stop = save = True
            # A run that is stopped has the lines of one that is not: its evaluation comes when it
            # resumes.
            log, evaluate = log or over, evaluate and not over
            trainer.owing, evaluate = evaluate, False
        if trainer.broken_at is not None:
            control.should_training_stop = True
            log = evaluate = save = False
        control.should_log, control.should_evaluate = log, evaluate
        if save:
            self.saved = trainer.agreed_seconds
        control.should_save = save and trainer.checkpoints is not None


def _given(number: int | None) -> int:
    assert number is not None
    return number
