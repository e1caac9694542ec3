"""Evaluations: how much they read, what they take of the time, samples, and the unigram rule."""

import contextlib
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate")

from mercer import data
from mercer.data import sketch
from mercer.train import Settings, plan, run, threads
from mercer.train.budget import MARGIN, SHARE, Budget, share
from mercer.train.distributed import Team
from mercer.train.folder import read_journal
from mercer.train.samples import NEW, on_one_line
from mercer.train.tasks import TASKS
from mercer.train.unigram import MARGIN as LEAD
from mercer.train.unigram import STEPS, STUCK, Unigram, is_stuck


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings of a run of a fraction of a second."""
    place = tmp_path_factory.mktemp("place")
    lines = (f"line {n} has the number {n * n % 97} and no other\n" for n in range(600))
    (place / "small.txt").write_text("".join(lines))
    return {
        "data": str(place / "small.txt"), "tokenizer": "bytes", "cache": str(place), "batch": 4,
        "length": 32, "steps": 4, "eval_items": 100,
    }  # fmt: skip


# How much is read.


def test_an_evaluation_on_the_way_reads_what_the_steps_between_two_do():
    settings = Settings(steps=100, eval_every=20).resolve()
    found = share(settings, whole=9000, step=64)
    assert (found.usual, found.last, found.reserve, found.limit) == (1280, 9000, 0.0, None)
    assert found.fits(1e9)
    assert share(settings, whole=900, step=64).usual == 900
    given = Settings(steps=100, eval_every=20, eval_items=5000).resolve()
    assert (share(given, 9000, 64).usual, share(given, 9000, 64).last) == (5000, 5000)


def test_images_of_all_classes_are_judged(small):
    pytest.importorskip("sklearn")
    task = TASKS["vision"](Settings(task="vision", cache=small["cache"]).resolve())
    data = torch.utils.data.TensorDataset(torch.arange(100))
    assert [int(row[0]) for row in task._spread(data, 5)] == [0, 20, 40, 60, 80]
    assert task._spread(data, 100) is data


@pytest.mark.parametrize(("cost", "last"), [(1e-5, 8000), (1e-3, 8000), (4e-3, 4000), (1.0, 32)])
def test_the_last_evaluation_gets_its_share_of_the_time(cost, last, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("mercer.train.budget.time.perf_counter", lambda: clock[0])
    read = []

    def evaluate(items):
        read.append(items)
        clock[0] += items * cost

    budget = Budget(whole=8000, usual=200, last=8000, least=32, time=100.0)
    budget.measure(evaluate, lambda seconds: seconds)
    assert set(read) == {32}
    assert budget.last == last
    assert budget.each == pytest.approx(cost)
    assert budget.reserve == pytest.approx(min(MARGIN * last * cost, 50))
    if last > 32:
        assert budget.reserve <= SHARE * 100
    assert budget.limit == 100 - budget.reserve
    assert budget.fits(budget.limit - 200 * cost - 1)
    assert not budget.fits(budget.limit - 200 * cost + 1)
    of = "all 8,000" if last == 8000 else f"{last:,} of 8,000"
    assert f"then the last evaluation on {of} tokens" in budget.words("tokens")


def test_time_bounds_evaluations_too(small, monkeypatch):
    """With evaluations that would take ten times the time."""
    task = TASKS["lm"]
    evaluate = task.evaluate

    def slowly(self, *args, items=None, **kwargs):
        time.sleep(items / 100 if items else 30)
        return evaluate(self, *args, items=items, **kwargs)

    monkeypatch.setattr(task, "evaluate", slowly)
    settings = {**small, "batch": 1, "steps": None, "eval_items": None, "samples": False}
    begun = time.perf_counter()
    result = run(Settings(**settings, time=4.0))
    assert result.status == "done"
    # A loaded machine may take longer; without a bound it would be 30 seconds.
    assert time.perf_counter() - begun < 15
    assert result.seconds < 10
    assert result.metrics["eval_items"] < 200
    assert [x["step"] for x in result.history if "eval_loss" in x] == [result.steps]


def test_a_run_with_a_time_resumes_with_its_budget(small, tmp_path):
    path = tmp_path / "run"
    settings = Settings(**{**small, "steps": None}, time=2.0, log_every=1, output=str(path))
    stops = iter([True])

    def interrupt(progress):
        if progress.step == 3 and next(stops, False):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(replace(settings, save_every=1), interrupt)
    state = json.loads((path / "checkpoints" / "step-00000002" / "state.json").read_text())
    assert state["whole"] >= state["seconds"]
    assert state["budget"]["each"] > 0
    result = run(replace(settings, resume=True))
    assert result.status == "done"
    assert result.steps > 3


# Samples.


def test_each_evaluation_writes_a_sample(small, tmp_path):
    seen = []
    path = tmp_path / "run"
    run(Settings(**small, eval_every=2, output=str(path)), seen.append)
    found = [p for p in seen if p.sample is not None]
    assert [p.step for p in found] == [2, 4]
    lines = [line for line in read_journal(path) if "sample" in line]
    assert [{"step": p.step, **p.sample} for p in found] == lines
    assert len({line["prompt"] for line in lines}) == 1
    assert lines[0]["prompt"] in Path(small["data"]).read_text()
    assert 0 < len(lines[0]["sample"].encode()) <= 4 * NEW


def test_samples_change_nothing_and_can_be_off(small):
    settings = {**small, "overrides": {"dropout": 0.1}, "log_every": 1, "eval_every": 1}
    first, second = (run(Settings(**settings, samples=on)) for on in (True, False))
    assert [x["loss"] for x in first.history if "loss" in x] == [
        x["loss"] for x in second.history if "loss" in x
    ]
    assert not [x for x in second.history if "sample" in x]


def test_a_translator_writes_a_translation(small):
    settings = Settings(
        task="translation", tokenizer="bytes", steps=1, batch=2, eval_items=2, beams=1,
        cache=small["cache"], preset="tiny",
    ).resolve()  # fmt: skip
    task = TASKS["translation"](settings)
    model = task.build()
    found = task.sample(model, Team(torch.device("cpu")))
    source, target = task.pairs.valid[0]
    assert (found["prompt"], found["reference"]) == (source, target)
    assert isinstance(found["sample"], str)


def test_a_sample_is_one_line_without_controls():
    assert on_one_line("a\n\nb\x1b[31m\tc\x00") == "a↵↵b[31mc"


# Not converged.


def test_frequencies_of_tokens_give_a_loss():
    unigram = Unigram(np.array([0, 0, 0, 1, 2, 2], np.uint16), 4)
    p = torch.tensor([4, 2, 3, 1]) / 10
    want = -(p[0].log() + p[3].log())
    assert unigram.total(torch.tensor([0, -100, 3])).item() == pytest.approx(want.item())


@pytest.mark.parametrize(
    ("metrics", "steps", "stuck"),
    [
        ({"eval_loss": 5.0, "unigram_loss": 5.0}, STEPS, True),
        ({"eval_loss": 5.0 - LEAD / 2, "unigram_loss": 5.0}, STEPS, True),
        ({"eval_loss": 4.9 - LEAD, "unigram_loss": 5.0}, STEPS, False),
        ({"eval_loss": 9.0, "unigram_loss": 5.0}, STEPS - 1, False),
        ({"eval_loss": 2.3}, STEPS, False),
    ],
)
def test_a_run_at_the_level_of_frequencies_is_stuck(metrics, steps, stuck):
    assert is_stuck(metrics, steps) is stuck


@pytest.mark.parametrize("mode", ["blocks", "memory"])
def test_the_baseline_is_over_the_same_tokens(mode, small):
    task = TASKS["lm"](Settings(**small, evaluate_by=mode).resolve())
    found = task.evaluate(task.build(), Team(torch.device("cpu")), final=False)
    count = np.bincount(task.text.train.ids, minlength=257) + 1
    ids = task.text.valid.ids[1 : found["eval_tokens"] + 1]
    want = -np.log(count[ids] / count.sum()).mean()
    assert found["unigram_loss"] == pytest.approx(want)


def test_a_run_that_stays_there_has_not_converged(small, tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.train.unigram.STEPS", 3)
    settings = Settings(**small, learning_rate=1e-9, samples=False, output=str(tmp_path / "run"))
    result = run(settings)
    assert result.status == STUCK
    assert not result.converged
    assert result.metrics["eval_loss"] > result.metrics["unigram_loss"]
    assert result.steps == settings.steps
    # It has ended as usual, and may get more steps.
    assert (tmp_path / "run" / "model").is_dir()
    longer = run(replace(settings, steps=6, resume=True))
    assert longer.steps == 6


def test_a_run_gives_up_that_learns_nothing(small, tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.train.unigram.STEPS", 2)
    given = {**small, "steps": 12, "eval_every": 2, "save_every": 2, "samples": False}
    settings = Settings(**given, learning_rate=1e-9, give_up=0.25, output=str(tmp_path / "run"))
    result = run(settings)
    # Step 2 comes too early: a quarter of the steps is 3.
    assert (result.status, result.steps) == (STUCK, 4)
    assert run(replace(settings, resume=True)).steps == 4
    # The process was killed between its last checkpoint and its result.
    (tmp_path / "run" / "result.json").unlink()
    again = run(replace(settings, resume=True))
    assert (again.status, again.steps, again.metrics) == (STUCK, 4, result.metrics)
    # A run that learns does not end, and takes the same steps as without the option.
    given |= {"learning_rate": 3e-3, "steps": 20}
    runs = [run(Settings(**given, give_up=share)) for share in (0.25, None)]
    assert [r.steps for r in runs] == [20, 20]
    assert [r.status for r in runs] == ["done", "done"]
    assert runs[0].metrics == runs[1].metrics


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_of_the_steps_is_checked(share):
    with pytest.raises(ValueError, match="give_up must be above 0 and at most 1, got"):
        Settings(give_up=share).resolve()


# A dry run.


def test_a_dry_run_trains_no_tokenizer(small, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a tokenizer was trained, or text was encoded")

    with monkeypatch.context() as patch:
        patch.setattr("mercer.data.tokens.train", refuse)
        patch.setattr("mercer.data.encode.encode", refuse)
        patch.setattr(data.PairData, "encoded", refuse)
        settings = {**small, "tokenizer": "bpe:300", "cache": str(tmp_path / "cache")}
        found = plan(Settings(**settings))
        assert "bpe:300 is not trained for this; tokens are estimated at" in str(found)
        assert "about" in str(found)
        pairs = plan(Settings(task="translation", cache=str(tmp_path / "cache")))
        assert pairs.items == 20_000
        assert not (tmp_path / "cache").exists()
    # Trained before, it is used, and the estimate is near.
    train = data.text(small["data"], tokenizer="bpe:300", cache_dir=tmp_path / "cache").train
    found = plan(Settings(**settings))
    assert "not trained" not in str(found)
    assert found.items == pytest.approx(len(train) // 32, rel=0.05)
    assert found.counted.total == plan(Settings(**settings)).counted.total


def test_a_sketch_of_a_long_text_reads_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(sketch, "SAMPLE", 1 << 17)
    text = "".join(f"line {n} of a long text\n" for n in range(60_000))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "valid.txt").write_text("short\n")
    found = sketch.sketch_text(tmp_path, tokenizer="bytes", cache_dir=tmp_path)
    assert found.num_tokens == pytest.approx(len(text), rel=0.2)
    with pytest.raises(ValueError, match="a BPE is named like"):
        sketch.sketch_text(tmp_path, tokenizer="bpe:many", cache_dir=tmp_path)


@pytest.mark.parametrize("size", [512, 1024])
def test_bytes_of_a_token(size, tmp_path):
    found = data.text(tokenizer=f"bpe:{size}", cache_dir=tmp_path).train
    each = found.num_bytes / len(found)
    assert sketch._bytes_per_token(size) == pytest.approx(each, rel=0.15)


# Threads.


def test_busy_cpus_are_left_alone(monkeypatch):
    monkeypatch.setattr(threads, "find_cpus", lambda: set(range(8)))
    monkeypatch.setattr(threads, "read_quota", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    for busy, number in ((0.2, 8), (3.1, 5), (8.0, 1)):
        monkeypatch.setattr(threads, "count_busy", lambda cpus, busy=busy: busy)
        found, note = threads.choose_threads()
        assert found == number
        assert (note is None) == (number == 8)
    assert "8 of 8 CPUs are busy with other work: training with 1 thread;" in note
    monkeypatch.setattr(threads, "count_busy", lambda cpus: 0.0)
    monkeypatch.setattr(threads, "read_quota", lambda: 2)
    assert threads.choose_threads() == (2, None)


def test_the_system_says_who_is_busy(monkeypatch, tmp_path):
    texts = iter(
        [
            "cpu 0 0 0 0 0\ncpu0 10 0 0 90 0 0 0 0\ncpu1 50 0 0 50 0 0 0 0\n",
            "cpu 0 0 0 0 0\ncpu0 20 0 0 90 0 0 0 0\ncpu1 50 0 0 55 5 0 0 0\n",
        ]
    )

    class Stat:
        def read_text(self):
            return next(texts)

    monkeypatch.setattr(threads, "LOOK", 0)
    monkeypatch.setattr(threads, "STAT", Stat())
    assert threads.count_busy({0, 1}) == 1.0
    monkeypatch.setattr(threads, "STAT", tmp_path / "none")
    assert threads.count_busy({0, 1}) == 0.0
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    assert threads.read_quota() == 2
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.read_quota() is None


def test_a_run_has_its_threads_and_keeps_them(small, tmp_path, monkeypatch):
    numbers = []

    @contextlib.contextmanager
    def pretend(number):
        # Two threads would be slow on a machine with one CPU.
        numbers.append(number)
        yield

    monkeypatch.setattr(sys.modules["mercer.train.run"], "threads", pretend)
    settings = Settings(**small, samples=False, output=str(tmp_path / "run"))
    run(replace(settings, threads=2))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["threads"] == 2
    # Resumed without a word, it has those of its start.
    run(replace(settings, steps=5, resume=True))
    run(replace(settings, steps=6, resume=True, threads=3))
    assert numbers == [2, 2, 3]
    with pytest.raises(ValueError, match="threads must be a whole number from 1 on"):
        Settings(threads=0).resolve()


def test_threads_are_restored():
    before = torch.get_num_threads()
    with threads.threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_perplexity_beside_the_baseline(small):
    metrics = run(Settings(**small)).metrics
    assert 0 < metrics["unigram_loss"] < math.log(257) + 1


def test_a_checkpoint_comes_at_least_once_a_minute(tmp_path, monkeypatch):
    from mercer.train import conductor

    monkeypatch.setattr(conductor, "MOST_LOST", 0.0)
    path = tmp_path / "often"
    settings = Settings(
        tokenizer="bytes", steps=4, batch=2, length=32, save_every=100, eval_every=100,
        eval_items=64, keep=10, output=str(path), device="cpu", samples=False,
    )  # fmt: skip
    assert run(settings).status == "done"
    steps = {int(place.name.split("-")[1]) for place in (path / "checkpoints").iterdir()}
    assert {2, 3, 4} <= steps
