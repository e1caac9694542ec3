"""`mercer train`: what it prints, where it writes, and with which code it ends."""

import io
import json

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from mercer import train
from mercer.cli.train import app
from mercer.train.screen import INTERVAL, duration, progress_line

SMALL = ["--steps", "3", "--batch", "4", "--length", "32", "--eval-items", "100"]


@pytest.fixture
def invoke(tmp_path, tmp_path_factory, monkeypatch):
    """The command in an empty folder, with tokens kept between tests."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path_factory.getbasetemp() / "tokens"

    def call(*arguments, cached=True):
        return CliRunner().invoke(app, [*arguments, *(["--cache", str(cache)] if cached else [])])

    return call


def test_help_has_examples():
    for task in ("lm", "translation", "recall", "vision"):
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [task, "--help"])
        assert done.exit_code == 0
        assert f"mercer train {task}" in done.output
    assert "--evaluate-by" not in done.output
    assert "--length" not in done.output
    text = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["lm", "--help"]).output
    for word in (
        "--dry-run",
        "--json",
        "--resume",
        "torchrun --nproc-per-node 8",
        "bandwidth-lr",
        "10m",
    ):
        assert word in text


def test_a_dry_run_prints_and_ends(invoke, tmp_path):
    done = invoke("lm", "--system", "kundu2026", "--dry-run", *SMALL)
    assert done.exit_code == 0, done.output
    for word in ("parameters", "feed-forward", "FLOPs", "memory", "128 tokens a step", "steps"):
        assert word in done.output
    assert not list(tmp_path.iterdir())


def test_a_dry_run_as_json(invoke, tmp_path):
    arguments = ["lm", "--system", "kundu2026", "--dry-run", *SMALL]
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["task"], found["system"], found["kernel"]) == ("lm", "kundu2026", None)
    assert found["parameters"] == sum(found["parameters_by_part"].values())
    assert (found["tokens_per_step"], found["unit"]) == (128, "tokens")
    assert (found["steps"], found["tokens"], found["time"]) == (3, 384, None)
    assert found["flops"] == 384 * found["flops_per_token"]
    said = invoke(*arguments).output
    assert f"{found['parameters']:,}" in said
    assert f"{found['items']:,} {found['noun']} to train on" in said
    assert f"{found['passes']:.2f} passes" in said
    assert found["estimated"] is None or found["estimated"] in said
    assert found["memory_bytes"] > 0
    # Without a number of steps there is no total.
    timed = json.loads(invoke("recall", "--time", "1m", "--dry-run", "--json", cached=False).stdout)
    assert (timed["time"], timed["steps"], timed["tokens"], timed["flops"]) == (
        60,
        None,
        None,
        None,
    )
    assert not list(tmp_path.iterdir())


def test_json_is_for_dry_runs(invoke, tmp_path):
    done = invoke("lm", *SMALL, "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--json needs --dry-run" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_prints_and_keeps_its_result(invoke, tmp_path):
    done = invoke("lm", "--system", "dai2019", "--option", "memory=16", *SMALL)
    assert done.exit_code == 0, done.output
    assert "done: 3 steps" in done.output
    assert "bits per byte" in done.output
    folder = tmp_path / "runs" / "lm-dai2019"
    assert json.loads((folder / "config.json").read_text())["system_options"] == {"memory": 16}
    assert invoke("lm", "--system", "dai2019", *SMALL).exit_code == 0
    assert (tmp_path / "runs" / "lm-dai2019-2" / "model").is_dir()
    # Asked for again, it says what it knows.
    again = invoke("lm", "--output", "runs/lm-dai2019", "--resume", cached=False)
    assert again.exit_code == 0, again.output
    assert "has ended before: done" in again.output


def test_a_kernel_from_the_command_line(invoke, tmp_path):
    kernel = 'RBF(2.0)*Exponential(on="position")'
    done = invoke("lm", "--kernel", kernel, "--position", "ProductKernel()", *SMALL)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs" / "lm-RBF-2-0-Exponential-on-position").is_dir()


def test_a_loss_that_is_not_finite_has_a_code(invoke):
    done = invoke("lm", *SMALL, "--lr", "1e30", "--clip", "1e30", "--output", "run")
    assert done.exit_code == 3
    assert "not converged at step 2" in done.output
    assert "Traceback" not in done.output


def test_there_must_be_a_run_to_go_on_with(invoke):
    done = invoke("lm", "--output", "nowhere", "--resume", cached=False)
    assert done.exit_code == 2
    assert "nowhere holds no run to go on with" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "bert"], "there is no system 'bert'"),
        (["--preset", "huge"], "there is no language model preset 'huge'"),
        (["--kernel", "__import__('os')"], "__import__"),
        (["--time", "soon"], "time must be such as 90s"),
        (["--option", "memory"], "an option must be NAME=VALUE"),
        (["--resume"], "--resume needs --output, the folder of the run"),
        (["--data", "no/such/file.txt"], "no/such/file.txt"),
        (["--fsdp"], "fsdp needs several processes: torchrun"),
        (["--steps", "0"], "steps must be a whole number from 1 on"),
    ],
)
def test_mistakes_give_a_one_line_error(arguments, message, invoke):
    done = invoke("lm", *SMALL, *arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_a_run_that_is_there_is_not_touched(invoke, tmp_path):
    assert invoke("lm", *SMALL, "--output", "run").exit_code == 0
    before = (tmp_path / "run" / "config.json").read_bytes()
    done = invoke("lm", *SMALL, "--output", "run")
    assert done.exit_code == 2
    assert "run holds a run already: continue it with --resume" in done.output
    done = invoke("lm", "--output", "run", "--resume", "--lr", "0.5", "--keep", "7")
    assert done.exit_code == 2
    assert "learning_rate was 0.003, now 0.5" in done.output
    assert "keep" not in done.output
    done = invoke("vision", "--output", "run", "--resume")
    assert "mercer train lm --output run --resume" in done.output
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_a_terminal_gets_one_line_and_a_pipe_a_few():
    steps = [
        train.Progress(step=n, steps=90, loss=2.5, tokens_per_second=1e4, seconds_left=65.0)
        for n in range(1, 10)
    ]
    judged = train.Progress(step=9, steps=90, metrics={"bits_per_byte": 1.25})
    screen, pipe = io.StringIO(), io.StringIO()
    with progress_line(Console(file=screen, force_terminal=True, width=120)) as show:
        for progress in [*steps[:5], judged, *steps[5:]]:
            show(progress)
    assert "loss 2.5000  10,000 tokens/s  1:05 left  bits per byte 1.25" in screen.getvalue()
    with progress_line(Console(file=pipe)) as show:
        for progress in [*steps, judged]:
            show(progress)
    first, second = pipe.getvalue().splitlines()
    assert first == "step 1/90  loss 2.5000  10,000 tokens/s  1:05 left"
    assert second == "step 9/90  bits per byte 1.25"
    assert INTERVAL >= 5
    assert duration(3 * 3600 + 61) == "3:01:01"


def test_a_full_gpu_gives_a_one_line_error(invoke, monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(train, "run", fails)
    done = invoke("lm", *SMALL)
    assert done.exit_code == 1
    assert "the GPU is out of memory: use more --accumulate" in done.output
