"""A run that ends when its validation loss no longer falls, and judges its best model."""

import math
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("accelerate")

from mercer.storage.journal import read_journal
from mercer.studies import Study
from mercer.train import Settings, run
from mercer.train.best import Best
from mercer.train.distributed import Team
from mercer.train.optimiser import rate_after

ALONE = Team(torch.device("cpu"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings of a run of a fraction of a second, with an evaluation after each step."""
    place = tmp_path_factory.mktemp("place")
    lines = (f"line {n} has the number {n * n % 97} and no other\n" for n in range(600))
    (place / "small.txt").write_text("".join(lines))
    return {
        "data": str(place / "small.txt"), "tokenizer": "bytes", "cache": str(place), "batch": 4,
        "length": 32, "steps": 9, "eval_items": 100, "samples": False, "log_every": 1,
        "eval_every": 1, "patience": 2, "overrides": {"dropout": 0.1},
    }  # fmt: skip


@pytest.fixture
def losses(monkeypatch):
    """Validation losses by step, in place of those that are found; others are 9."""
    given, note = {}, Best.note

    def altered(self, step, loss, model):
        note(self, step, given.get(step, 9.0), model)

    monkeypatch.setattr(Best, "note", altered)
    return given


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


def curve(folder):
    return [(x["step"], x["eval_loss"]) for x in read_journal(folder) if "eval_loss" in x]


def test_it_ends_after_its_patience_and_keeps_the_best(small, losses, tmp_path):
    losses |= {1: 3.0, 2: 2.0, 3: 2.5, 4: 2.0, 5: 1.0}
    result = run(Settings(**small, output=str(tmp_path / "run")))
    # Step 4 is not below step 2, so it waits for the second time, and never sees step 5.
    assert (result.status, result.steps, result.metrics["best_step"]) == ("done", 4, 2)
    found = curve(tmp_path / "run")
    assert [step for step, _ in found] == [1, 2, 3, 4, 4]
    # The model of step 2 is judged, and saved.
    assert result.metrics["eval_loss"] == found[-1][1] == found[1][1] != found[3][1]
    run(Settings(**small | {"patience": None, "keep": 9}, output=str(tmp_path / "whole")))
    want = load_file(tmp_path / "whole" / "checkpoints" / "step-00000002" / "model.safetensors")
    got = weights(tmp_path / "run")
    assert all(torch.equal(got[name], x) for name, x in want.items())


def test_the_last_step_is_evaluated_too(small, losses, tmp_path):
    losses |= {n: 4.0 - n / 10 for n in range(1, 10)}
    result = run(Settings(**small, output=str(tmp_path / "run")))
    assert (result.steps, result.metrics["best_step"]) == (9, 9)
    losses |= {9: 5.0}
    result = run(Settings(**small, output=str(tmp_path / "other")))
    assert (result.steps, result.metrics["best_step"]) == (9, 8)
    first, second = weights(tmp_path / "run"), weights(tmp_path / "other")
    assert any(not torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
@pytest.mark.parametrize("save_every", [1, 3])
def test_it_resumes_to_the_same_end(small, losses, tmp_path, stop, save_every):
    """Interrupted at any step, also right after the evaluation that ends it."""
    losses |= {1: 3.0, 2: 2.0, 3: 1.5, 4: 2.0, 5: 1.6}
    given = {**small, "save_every": save_every}
    once = run(Settings(**given, output=str(tmp_path / "once")))
    assert (once.steps, once.metrics["best_step"]) == (5, 3)
    settings = Settings(**given, output=str(tmp_path / "twice"))
    seen = []

    def interrupt(progress):
        seen.append(progress)
        if progress.step == stop and progress.metrics is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(settings, interrupt)
    again = run(replace(settings, resume=True))
    assert (again.status, again.steps) == ("done", 5)
    assert again.metrics == once.metrics
    assert curve(tmp_path / "twice") == curve(tmp_path / "once")
    here, there = weights(tmp_path / "once"), weights(tmp_path / "twice")
    assert all(torch.equal(here[name], there[name]) for name in here)


@pytest.mark.parametrize("stop", [2, 4])
def test_a_stop_by_a_signal_owes_its_evaluation(small, losses, tmp_path, stop):
    """The signal comes when a step is over, and the next one ends the run: 3, or 5, the last."""
    losses |= {1: 3.0, 2: 2.0, 3: 1.5, 4: 2.0, 5: 1.6}
    once = run(Settings(**small, output=str(tmp_path / "once")))
    settings = Settings(**small, output=str(tmp_path / "twice"))

    def send(progress):
        if progress.step == stop and progress.metrics is not None:
            signal.raise_signal(signal.SIGTERM)

    stopped = run(settings, send)
    assert (stopped.status, stopped.steps) == ("stopped", stop + 1)
    again = run(replace(settings, resume=True))
    assert (again.status, again.steps, again.metrics) == ("done", 5, once.metrics)
    assert curve(tmp_path / "twice") == curve(tmp_path / "once")


def test_a_run_killed_at_its_end_takes_no_further_step(small, losses, tmp_path):
    losses |= {1: 1.0}
    path = tmp_path / "run"
    result = run(Settings(**small, output=str(path)))
    assert (result.steps, result.metrics["best_step"]) == (3, 1)
    (path / "result.json").unlink()
    again = run(Settings(**small, output=str(path), resume=True))
    assert (again.steps, again.metrics) == (3, result.metrics)
    assert [x for x in read_journal(path) if x["step"] > 3] == []


def test_evaluations_decide_the_result_of_a_run_with_a_patience():
    kept = {"steps": 100, "patience": 2}
    keys = []
    for budget in (
        kept,
        {**kept, "eval_every": 5},
        {"steps": 100},
        {"steps": 100, "eval_every": 5},
    ):
        keys.append(Study(systems=["vaswani2017"], budget=budget).jobs()[0].key)
    assert keys[0] != keys[1]
    assert keys[2] == keys[3]
    with pytest.raises(ValueError, match="patience 2 counts steps, so the run must have steps, no"):
        Settings(patience=2, time=5.0).resolve()
    with pytest.raises(ValueError, match="schedule must be one of cosine, inverse-sqrt, got 'lin'"):
        Settings(schedule="lin").resolve()
    with pytest.raises(ValueError, match="patience must be a whole number from 1 on, got 0"):
        Settings(patience=0).resolve()


def test_a_loss_that_is_not_a_number_is_never_the_best():
    best, model = Best(3, ALONE), torch.nn.Linear(1, 1)
    for step, loss in enumerate((math.nan, math.inf), 1):
        best.note(step, loss, model)
    assert (best.step, best.since, best.state()) == (0, 2, {})
    best.note(3, 1.0, model)
    with torch.no_grad():
        before = model.weight.clone()
        model.weight += 1
    best.note(4, 2.0, model)
    best.restore(model)
    assert torch.equal(model.weight, before)


def test_the_inverse_root_does_not_depend_on_the_last_step():
    def rates(steps):
        settings = Settings(steps=steps, warmup=4, schedule="inverse-sqrt").resolve()
        return [rate_after(step, 0.0, settings) for step in range(16)]

    assert rates(20) == rates(2000)
    assert rates(20)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates(20)[15] == pytest.approx(0.5)
