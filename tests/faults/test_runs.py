"""Runs and studies: deaths at chosen points, full disks, damaged files, two at once."""

import errno
import gc
import json
import multiprocessing
import os
import signal
import time
import warnings
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer import studies
from mercer.cli.train import app
from mercer.data import cache as caches
from mercer.storage import lock as locks
from mercer.storage.lock import Lock
from mercer.studies import Ledger, Study
from mercer.studies.ledger import Record
from mercer.train import Settings, board, checkpoints, folder, run
from mercer.train.checkpoints import Checkpoints, examine
from mercer.train.conductor import Conductor
from mercer.train.folder import Folder, read_journal
from mercer.train.tasks import LanguageModel

START = multiprocessing.get_start_method()
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mercer.train", "mercer.cli.train"])
# Logs, evaluations and checkpoints at different steps, so that each can be cut from the others.
RUN = {
    "steps": 10, "batch": 4, "length": 32, "eval_items": 100, "overrides": {"dropout": 0.1},
    "log_every": 3, "eval_every": 4, "save_every": 5,
}  # fmt: skip
SMALL = ["--steps", "10", "--batch", "4", "--length", "32", "--eval-items", "100"]
SMALL += ["--log-every", "3", "--eval-every", "4", "--save-every", "5"]
TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Trainer collects garbage, which takes longer than a run here; and processes import slowly."""
    forkserver.ensure_running()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small text, and the cache of its tokens."""
    path = tmp_path_factory.mktemp("place")
    lines = (f"line {n} has the number {n * n % 97} and no other\n" for n in range(600))
    (path / "small.txt").write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def settings(place):
    return {**RUN, "data": str(place / "small.txt"), "cache": str(place)}


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
    """The lines of a run to which nothing happens."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(Settings(**settings, output=str(path))).status == "done"
    return lines(path)


@pytest.fixture
def invoke(tmp_path, place, monkeypatch):
    """The command in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, cache=str(place), data=str(place / "small.txt")):
        more = [*(["--cache", cache] if cache else []), *(["--data", data] if data else [])]
        done = CliRunner().invoke(app, ["lm", *arguments, *more])
        assert "Traceback" not in done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return call


def lines(path):
    """The journal without what a clock says."""
    return [{n: x for n, x in r.items() if n not in TIMES} for r in read_journal(path)]


def assert_same_lines(path, want):
    found = lines(path)
    assert [list(line) for line in found] == [list(line) for line in want]
    for line, other in zip(found, want, strict=True):
        for name, value in line.items():
            same = other[name] if isinstance(value, str) else pytest.approx(other[name], rel=1e-5)
            assert value == same, name


# Two at once.


def test_a_refused_process_leaves_the_lock_of_the_one_at_work(tmp_path):
    settings = Settings(output=str(tmp_path / "run"), steps=3).resolve()
    first = Folder(tmp_path / "run")
    first.open(settings)
    for _ in range(3):
        other = Folder(tmp_path / "run")
        with pytest.raises(ValueError, match="another process is training in"):
            other.open(settings)
        other.close()
        assert (tmp_path / "run" / ".lock").exists()
    first.close()
    last = Folder(tmp_path / "run")
    last.open(settings)
    last.close()
    assert not (tmp_path / "run").exists()


def test_a_lock_on_a_file_that_its_holder_removed_does_not_count(tmp_path, monkeypatch):
    """The holder removes it between the other's opening and locking."""
    path, take = tmp_path / "run" / ".lock", locks._lock

    def late(handle, wait):
        monkeypatch.setattr(locks, "_lock", take)
        path.unlink()
        path.parent.rmdir()
        return take(handle, wait)

    monkeypatch.setattr(locks, "_lock", late)
    first, second = Lock(path), Lock(path)
    assert first.take()
    assert path.exists()
    assert not second.take()
    first.release()
    assert second.take()
    second.release(remove=True)
    assert not path.exists()


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(handle, wait):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "_lock", refuse)
    with pytest.raises(ValueError, match="this disk has no file locks; use a folder on another"):
        Folder(tmp_path).open(Settings(output=str(tmp_path)).resolve())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path):
    lock, other = Lock(tmp_path / "a"), Lock(tmp_path / "a")
    assert lock.take()
    (wait, wake), (awake, ready) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork; the child touches none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.write(ready, b"x")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(awake, 1)
        assert not other.take()
        # What is left of the parent after a kill.
        lock.drop()
        assert other.take()
        other.release()
    finally:
        os.write(wake, b"x")
        os.waitpid(child, 0)
        for handle in (wait, wake, awake, ready):
            os.close(handle)


# Full disks.


class Full:
    """A file on a full disk."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def write(self, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(patch, module, name, number):
    """The disk is full when a file is opened for the n-th time."""
    seen = []

    def opened(path, *args, **kwargs):
        if name in Path(path).name:
            seen.append(path)
            if len(seen) == number:
                return Full()
        return open(path, *args, **kwargs)

    patch.setattr(module, "open", opened, raising=False)


FULL = {
    "config.json": (folder, "config.json", 1),
    "metrics.jsonl": (folder, "metrics.jsonl", 5),
    "result.json": (folder, "result.json", 1),
    "tfevents": (board, "tfevents", 4),
    "model": None,
    "text": None,
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_is_a_sentence_and_loses_nothing(what, invoke, tmp_path, monkeypatch, request):
    arguments = [*SMALL, "--set", "dropout=0.1", "--output", "run", "--tensorboard"]
    with monkeypatch.context() as patch:
        if what == "model":
            save = LanguageModel.save_model

            def part(self, model, weights, path):
                save(self, model, weights, path)
                if "model" in path.name:
                    raise RuntimeError("I/O error: No space left on device (os error 28)")

            patch.setattr(LanguageModel, "save_model", part)
        elif what == "text":
            patch.setattr(caches.Writer, "append", lambda *_: Full().write(""))
        else:
            fill(patch, *FULL[what])
        done = invoke(*arguments, **({"cache": "own"} if what == "text" else {}))
    assert done.exit_code == 1, done.output
    if what == "text":
        assert "error: No space left on device; the cache own" in done.output
    else:
        assert "there is no room for run/" in done.output
        assert what in done.output
    assert "make room, then: mercer train lm --output run --resume" in done.output
    assert not (tmp_path / "run" / "model").exists() or what == "result.json"
    steps = Checkpoints(tmp_path / "run" / "checkpoints", 2).steps()
    assert all(examine(path) is None for path in steps)
    if steps:
        assert f"{steps[-1].name} is the last one" in done.output
    done = invoke(*arguments, "--resume")
    assert done.exit_code == 0, done.output
    assert_same_lines(tmp_path / "run", request.getfixturevalue("undisturbed"))
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()


def test_a_cache_that_is_a_file_is_a_sentence(invoke, tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/below"):
        done = invoke(*SMALL, cache=path)
        assert done.exit_code == 2
        assert f"the cache {path} must be a folder, but file is a file" in done.output


# Damaged files of a run.


def test_a_start_that_failed_does_not_block_the_next(invoke, tmp_path):
    wrong = [*SMALL, "--output", "run", "--set", "vocab_size=5"]
    assert invoke(*wrong).exit_code == 2
    assert not (tmp_path / "run").exists()
    assert invoke(*wrong, "--tensorboard").exit_code == 2
    # What a kill in the middle of the first file leaves.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.123").write_text("{")
    done = invoke(*SMALL, "--output", "run")
    assert done.exit_code == 0, done.output


@pytest.fixture(scope="module")
def ended(settings, tmp_path_factory):
    path = tmp_path_factory.mktemp("ended") / "run"
    run(Settings(**{**settings, "steps": 2, "save_every": 1}, output=str(path)))
    return path


DEEP = "[" * 5000 + "]" * 5000


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("config.json", "[]", "it must be an object with names and values, got []"),
        ("config.json", '{"steps": "x"}', "steps must be int | None, got 'x'"),
        ("config.json", '{"betas": [0.9]}', "betas must be tuple[float, float], got [0.9]"),
        ("config.json", '{"steps": -1}', "steps must be a whole number from 1 on, got -1"),
        ("config.json", DEEP, "it is nested more than 32 deep"),
        ("config.json", "\udcff", "codec can't decode"),
        ("result.json", "[]", "it must be an object with names and values, got []"),
        ("result.json", "{}", "status is missing"),
        ("result.json", '{"status": 3}', "status must be str, got 3"),
        ("result.json", "", "remove it, and --resume ends the run again"),
    ],
)
def test_a_damaged_file_is_named(name, text, said, ended, invoke):
    path, content = ended / name, (ended / name).read_bytes()
    path.write_bytes(text.encode(errors="surrogateescape"))
    try:
        done = invoke("--output", str(ended), "--resume", cache=None, data=None)
    finally:
        path.write_bytes(content)
    assert done.exit_code == 2, done.output
    kind = "settings" if name == "config.json" else "result"
    assert f"{path} cannot be read as the {kind} of a run: " in done.output
    assert said in done.output


@pytest.mark.parametrize("text", [None, b"\xff\xfe{}\n", b"[]\n" + DEEP.encode()])
def test_a_journal_may_be_gone(text, ended, invoke):
    path, content = ended / "metrics.jsonl", (ended / "metrics.jsonl").read_bytes()
    result = (ended / "result.json").read_bytes()
    try:
        path.unlink()
        if text is not None:
            path.write_bytes(text)
        done = invoke("--output", str(ended), "--resume", cache=None, data=None)
        assert done.exit_code == 0, done.output
        assert "metrics.jsonl is gone or empty" in done.output
        (ended / "result.json").unlink()
        done = invoke("--output", str(ended), "--resume")
        assert done.exit_code == 0, done.output
        assert "metrics.jsonl lacks 1 of 1 lines; new ones follow" in done.output
    finally:
        path.write_bytes(content)
        (ended / "result.json").write_bytes(result)


# Damaged results of a study.

STUDY = Study(systems=["vaswani2017", "kundu2026"], budget={"steps": 40, "batch": 4}, seeds=(0, 1))


def record(job):
    return Record(
        key=job.key, study="study", variant=job.variant, seed=job.seed, status="done",
        metrics={"bits_per_byte": 2.5, "eval_tokens": 100}, parameters=100, flops_per_token=1e6,
        tokens_per_second=None, steps=40, seconds=1.0, finished="2026-01-01",
        settings=dict(job.settings), environment={"versions": {"torch": "2"}},
        history=[{"step": 10, "bits_per_byte": 3.0}],
    )  # fmt: skip


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


WRONG = [
    ("metrics", None), ("metrics", {"bits_per_byte": "low"}), ("metrics", {"bits_per_byte": []}),
    ("metrics", {"bits_per_byte": float("nan")}), ("settings", []), ("settings", {"steps": None}),
    ("settings", {"overrides": nested(400)}), ("finished", 3), ("seed", -1), ("seed", True),
    ("seed", "0"), ("status", None), ("steps", 10**30), ("parameters", "many"),
    ("flops_per_token", float("inf")), ("tokens_per_second", {}), ("environment", None),
    ("environment", {"versions": []}), ("history", {}), ("history", [3]),
    ("history", [{"step": "x", "bits_per_byte": 2.0}]), ("variant", ["a"]), ("key", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{n} {str(x)[:12]}" for n, x in WRONG])
def test_a_wrongly_typed_result_is_left_out_and_named(name, value, tmp_path, monkeypatch):
    monkeypatch.setattr("mercer.studies.look.draw_curves", lambda study, rows, path: path)
    good, bad = map(record, STUDY.jobs()[:2])
    ledger = Ledger(tmp_path)
    ledger.append(good)
    with ledger.path.open("a") as file:
        file.write(json.dumps({**asdict(bad), name: value}) + "\n")
    if name == "settings" and value == {"steps": None}:
        # Well typed, and of another budget.
        with pytest.raises(ValueError, match="holds results of another budget"):
            studies.look_up(STUDY, tmp_path)
        return
    rows, notes, _ = studies.look_up(STUDY, tmp_path)
    assert [row.seeds for row in rows] == ["1/2", "0/2"]
    assert notes == ["results.jsonl line 2 cannot be read and is ignored; its job runs again"]


def test_lines_that_are_no_records_are_left_out(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.append(record(STUDY.jobs()[0]))
    with ledger.path.open("ab") as file:
        for line in (DEEP, '{"a":' * 2000 + "1" + "}" * 2000, "1" * 5000, "\xff", "{}"):
            file.write(line.encode("latin-1") + b"\n")
    found, torn = ledger.scan()
    assert len(found) == 1
    assert [place.rsplit(" ", 1)[1] for place in torn] == ["2", "3", "4", "5", "6"]


# Deaths.


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner, name, number, action):
    """Act before a call of a function, counted from 1."""
    original, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


# Where a process dies: the owner and name of the function, and which of its calls.
DEATHS = {
    "during an evaluation": (LanguageModel, "evaluate", 2),
    "before the rename of a checkpoint": (checkpoints.os, "rename", 2),
    "after the last evaluation": (LanguageModel, "save_model", 1),
    "before the rename of the model": (checkpoints.os, "rename", 3),
    "before the result": (Folder, "finish", 1),
}


def one_that_dies(settings, where):
    import torch

    torch.set_num_threads(1)
    # Of data workers, as in a process of its own.
    multiprocessing.set_start_method(START, force=True)
    on_call(*DEATHS[where], die)
    run(Settings(**settings))


@pytest.mark.parametrize("where", DEATHS)
def test_a_killed_run_has_the_lines_of_one_that_was_not(where, settings, undisturbed, tmp_path):
    path = tmp_path / "run"
    own = {**settings, "output": str(path)}
    process = CONTEXT.Process(target=one_that_dies, args=(own, where))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert run(Settings(**own, resume=True)).status == "done"
    assert_same_lines(path, undisturbed)
    assert not list(path.rglob(".writing*"))


def test_data_workers_do_not_keep_the_lock_of_a_killed_run(settings, tmp_path):
    """They notice its end seconds later."""
    path = tmp_path / "run"
    own = {**settings, "workers": 1, "output": str(path)}
    process = CONTEXT.Process(target=one_that_dies, args=(own, "during an evaluation"))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    lock = Lock(path / ".lock")
    assert lock.take()
    lock.release()


@pytest.mark.parametrize("step", [4, 8, 10])
def test_a_stopped_run_has_the_lines_of_one_that_was_not(
    step, settings, undisturbed, tmp_path, monkeypatch
):
    after_step = Conductor.on_step_end

    def stop(self, args, state, control, **more):
        if state.global_step == step:
            signal.raise_signal(signal.SIGTERM)
        after_step(self, args, state, control, **more)

    own = {**settings, "output": str(tmp_path / "run")}
    with monkeypatch.context() as patch:
        patch.setattr(Conductor, "on_step_end", stop)
        stopped = run(Settings(**own))
    assert (stopped.status, stopped.steps) == ("stopped", step)
    if step == 8:
        # Its evaluation comes first when it resumes; a death there must not double it.
        class Death(BaseException):
            pass

        def fall(*_, **__):
            raise Death

        with monkeypatch.context() as patch:
            patch.setattr(Conductor, "on_step_end", fall)
            with pytest.raises(Death):
                run(Settings(**own, resume=True))
        assert lines(tmp_path / "run")[-1]["step"] == 8
    assert run(Settings(**own, resume=True)).status == "done"
    assert_same_lines(tmp_path / "run", undisturbed)


def test_a_signal_at_the_end_of_a_job_stops_the_study(settings, tmp_path, monkeypatch):
    evaluate = LanguageModel.evaluate

    def stop(self, *args, final, items=None):
        if final:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, *args, final=final, items=items)

    monkeypatch.setattr(LanguageModel, "evaluate", stop)
    monkeypatch.setattr("mercer.studies.look.draw_curves", lambda study, rows, path: path)
    budget = {n: x for n, x in settings.items() if n != "overrides"} | {"steps": 1}
    study = Study(systems=["vaswani2017"], budget=budget, seeds=(0, 1))
    outcome = studies.run(study, tmp_path, console=Console(quiet=True))
    assert outcome.interrupted
    assert [row.seeds for row in outcome.rows] == ["1/2"]
    outcome = studies.run(study, tmp_path, console=Console(quiet=True))
    assert [row.seeds for row in outcome.rows] == ["2/2"]


def launcher(settings, portable):
    """torchrun: its process starts one that trains, and is then killed."""
    import torch

    from mercer.train import run as run_one
    from mercer.train import signals

    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_RUN_ID"] = "one"
    module = __import__("sys").modules["mercer.train.run"]
    assert module.end_with_torchrun is signals.end_with_torchrun
    if portable:
        module.end_with_torchrun = lambda: None
    started, parent = os.pipe(), os.getpid()
    if os.fork() == 0:

        def tell(progress):
            if progress.step == 3:
                os.kill(parent, signal.SIGKILL)
            time.sleep(0.02)

        try:
            run_one(Settings(**settings), tell)
        finally:
            os._exit(0)
    os.read(started[0], 1)


@pytest.mark.parametrize("portable", [False, True])
def test_a_process_ends_when_torchrun_is_killed(portable, settings, tmp_path):
    path = tmp_path / "run"
    endless = {**settings, "steps": 5000, "log_every": 1, "eval_every": 5000, "output": str(path)}
    process = CONTEXT.Process(target=launcher, args=(endless, portable))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    held = Lock(path / ".lock")
    for _ in range(1000):
        if held.take():
            break
        time.sleep(0.01)
    assert held.held
    held.release()
    (saved,) = Checkpoints(path / "checkpoints", 1).steps()
    assert examine(saved) is None
    assert 3 <= int(saved.name.split("-")[1]) < 50
