"""Checkpoints of a trainer: everything that its next step depends on, saved and restored."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from .checkpoints import Checkpoints
from .optimiser import rate_after
from .state import (
    gather_model,
    gather_optimizer,
    gather_random,
    load_optimizer,
    read_json,
)

if TYPE_CHECKING:
    from .trainer import KernelTrainer


def save(trainer: KernelTrainer) -> None:
    """Save a checkpoint of this step; collective."""
    weights = gather_model(trainer.model)
    numbers = gather_optimizer(trainer.model, trainer.optimizer)
    scheduler = trainer.lr_scheduler.state_dict().items()
    state = {
        "scheduler": {name: value for name, value in scheduler if name != "lr_lambdas"},
        "seconds": trainer.clock.seconds,
        "whole": trainer.whole.seconds,
        "owing": trainer.owing,
        "budget": trainer.judge.budget.state(),
        "best": trainer.judge.best.state(),
        "steps": trainer.settings.steps,
        "lines": len(trainer.folder.history),
        **trainer.counts.state(),
    }
    chance = gather_random()

    def fill(path: Path) -> None:
        trainer.task.save_checkpoint(trainer.model, weights, path)
        save_file(numbers, path / "optimizer.safetensors")
        trainer.judge.best.save(path)
        (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
        (path / "random.json").write_text(json.dumps(chance), encoding="utf-8")
        trainer.state.save_to_json(str(path / "trainer_state.json"))

    def write(checkpoints: Checkpoints) -> None:
        trainer.folder.sync()
        checkpoints.save(trainer.state.global_step, fill)

    assert trainer.checkpoints is not None
    # If the disk is full, all processes get the error and end.
    trainer.team.tell(partial(write, trainer.checkpoints))


def load(trainer: KernelTrainer, checkpoint: Path) -> None:
    """Restore the optimiser, the schedule, the clocks and the counts; not the weights."""
    settings, scheduler = trainer.settings, trainer.lr_scheduler
    state = read_json(checkpoint / "state.json")
    load_optimizer(checkpoint, trainer.model, trainer.optimizer)
    scheduler.load_state_dict(state["scheduler"] | {"lr_lambdas": [None]})
    trainer.clock.before = state["seconds"]
    # Older checkpoints have the seconds of steps alone.
    trainer.whole.before = trainer.agreed_seconds = state.get("whole", state["seconds"])
    trainer.owing = state.get("owing", False)
    trainer.judge.restore(state.get("budget"))
    trainer.judge.best.load(state.get("best"), checkpoint)
    trainer.counts.load(state, step=trainer.state.global_step)
    if state.get("steps", settings.steps) != settings.steps:
        # The run was extended: from here on the schedule is that of the new length.
        factor = rate_after(trainer.state.global_step, 0.0, settings)
        scheduler._last_lr = [base * factor for base in scheduler.base_lrs]
    rates = scheduler.get_last_lr()
    for group, rate in zip(trainer.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
