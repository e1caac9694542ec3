"""Real processes: killed and continued to the same bits; two of them as good as one."""

import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time

import pytest

pytest.importorskip("accelerate")

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mercer.train", "mercer.cli.train"])
# Dropout, so that random numbers matter; accumulation, so that a step has parts.
RUN = [
    "--steps",
    "24",
    "--batch",
    "4",
    "--accumulate",
    "2",
    "--length",
    "32",
    "--set",
    "dropout=0.1",
]
WATCH = ["--log-every", "1", "--eval-every", "8", "--save-every", "3", "--eval-items", "300"]


def command(arguments, log, pause, limit):
    """The command in another process, with slower steps."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import torch

    torch.set_num_threads(1)
    from mercer.cli.train import app
    from mercer.train.conductor import Conductor

    after_step = Conductor.on_step_end

    def slowly(self, args, state, control, **more):
        time.sleep(pause)
        if limit and state.global_step == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        after_step(self, args, state, control, **more)

    Conductor.on_step_end = slowly
    sys.argv = ["mercer", *arguments]
    app(["lm", *arguments])


def start(arguments, log, pause=0.0, limit=None):
    process = CONTEXT.Process(target=command, args=([*arguments], str(log), pause, limit))
    process.start()
    return process


def finish(process):
    process.join(120)
    assert process.exitcode is not None, "still running"
    return process.exitcode


def wait_for(folder, step):
    """Until the journal has a line of this step."""
    path = folder / "metrics.jsonl"
    for _ in range(6000):
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} never came to step {step}")


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="module")
def common(caches):
    return [*RUN, *WATCH, "--cache", str(caches), "--system", "leng2026"]


@pytest.fixture(scope="module")
def undisturbed(common, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    log = folder.with_suffix(".log")
    assert finish(start([*common, "--output", str(folder)], log)) == 0, log.read_text()
    text = log.read_text()
    assert "bits per byte" in text
    assert "\x1b" not in text
    return folder


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


def curve(folder, key="loss"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def test_a_killed_run_resumes_to_the_same_bits(common, undisturbed, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    again = ["--output", str(folder), "--resume"]

    process = start([*common, "--output", str(folder)], log, pause=0.03)
    wait_for(folder, 7)
    os.kill(process.pid, signal.SIGKILL)
    assert finish(process) == -signal.SIGKILL
    # What a death in the middle of a checkpoint leaves behind.
    (folder / "checkpoints" / ".writing-00000009-1").mkdir()
    with open(folder / "metrics.jsonl", "a") as journal:
        journal.write('{"step": 8, "lo')

    process = start(again, log, pause=0.03)
    wait_for(folder, 11)
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 130, log.read_text()
    assert "to go on: mercer train lm --output" in log.read_text()
    assert not list((folder / "checkpoints").glob(".writing*"))
    last = sorted((folder / "checkpoints").iterdir())[-1]
    spoiled = bytearray((last / "model.safetensors").read_bytes())
    spoiled[-1] ^= 1
    (last / "model.safetensors").write_bytes(spoiled)

    process = start(again, log, pause=0.03)
    wait_for(folder, 17)
    os.kill(process.pid, signal.SIGTERM)
    assert finish(process) == 143
    assert f"checkpoint {last.name} is damaged (model.safetensors does not match" in log.read_text()

    assert finish(start(again, log)) == 0
    assert "Traceback" not in log.read_text()
    assert weights(folder) == weights(undisturbed)
    assert curve(folder, "bits_per_byte") == curve(undisturbed, "bits_per_byte")
    assert list(curve(folder)) == list(range(1, 25))
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_a_full_disk_gives_an_error_and_loses_nothing(common, tmp_path):
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start([*common, "--output", str(folder)], log, limit=100_000)
    assert finish(process) == 1
    text = log.read_text()
    assert "there is no room for the checkpoint of step 6; step-00000003 is the last one" in text
    assert f"make room, then: mercer train lm --output {folder} --resume" in text
    assert "Traceback" not in text
    (left,) = (folder / "checkpoints").iterdir()
    from mercer.train.checkpoints import examine

    assert left.name == "step-00000003"
    assert examine(left) is None


def member(rank, size, port, settings, stop_at, answers):
    """One of several processes, as torchrun starts them."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import torch
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    # In float32 curves part by rounding: Adam divides it by gradients that are nothing else.
    torch.set_default_dtype(torch.float64)
    from mercer.train import Settings, run
    from mercer.train.conductor import Conductor

    kinds = set()
    after_step = Conductor.on_step_end

    def looking(self, args, state, control, **more):
        kinds.add(type(self.trainer.model_wrapped).__name__)
        if all(isinstance(p, DTensor) for p in self.trainer.model.parameters()):
            kinds.add("sharded")
        after_step(self, args, state, control, **more)

    Conductor.on_step_end = looking

    def tell(progress):
        # The main process alone is told to stop; the others must come along.
        if progress.step == stop_at and progress.metrics is None:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        result = run(Settings(**settings), tell)
        answers.put((rank, result.status, result.steps, sorted(kinds)))
    except Exception as error:
        answers.put((rank, repr(error), 0, []))


def run_together(size, settings, stop_at=None):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=member, args=(rank, size, port, settings, stop_at, answers))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    return found


@pytest.fixture(scope="module")
def shared(caches):
    return {
        "batch": 8, "length": 32, "steps": 8, "system": "leng2026", "cache": str(caches),
        "log_every": 1, "eval_every": 4, "save_every": 4, "eval_items": 500,
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    found = run_together(1, {**shared, "output": str(folder)})
    assert [status for _, status, *_ in found] == ["done"]
    return folder


def assert_same_curve(folder, other):
    """Losses are added up in float32, which tells 7.0 from 7.0000005."""
    for key in ("loss", "eval_loss"):
        here, there = curve(folder, key), curve(other, key)
        assert here.keys() == there.keys()
        assert all(abs(here[step] - there[step]) < 2e-6 for step in here), (here, there)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_learn_as_one_does(fsdp, shared, alone, tmp_path):
    folder = tmp_path / "run"
    found = run_together(2, {**shared, "output": str(folder), "fsdp": fsdp})
    how = ["Spread", "sharded"] if fsdp else ["DistributedDataParallel"]
    assert found == [(rank, "done", 8, how) for rank in (0, 1)]
    assert_same_curve(folder, alone)


def test_two_processes_fine_tune_a_model_of_transformers_as_one_does(caches, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from mercer.data.tokens import spell_bytes

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=257, **sizes, **heads)).save_pretrained(tmp_path / "it")
    spell_bytes().save_pretrained(tmp_path / "it")
    settings = {
        "init": str(tmp_path / "it"), "kernel": "RBF(heads=4)", "cache": str(caches), "steps": 3,
        "token_kernels": "TokenKernels(layers=[0])", "batch": 4, "length": 32, "log_every": 1,
        "eval_items": 300, "learning_rate": 1e-3, "bandwidth_rate": 1e-2, "samples": False,
    }  # fmt: skip
    for size in (1, 2):
        found = run_together(size, {**settings, "output": str(tmp_path / str(size))})
        assert [answer[1:3] for answer in found] == [("done", 3)] * size
    assert_same_curve(tmp_path / "2", tmp_path / "1")


@pytest.mark.parametrize(
    ("size", "sharing", "fsdp"),
    [(2, 2, False), (2, 2, True), (4, 2, False), (4, 2, True), (4, 4, False)],
)
def test_processes_share_their_sequences(size, sharing, fsdp, shared, alone, tmp_path):
    """Four processes with two for each sequence are two groups, beside DDP or FSDP2."""
    folder = tmp_path / "run"
    more = {"output": str(folder), "fsdp": fsdp, "context_parallel": sharing}
    assert [status for _, status, *_ in run_together(size, {**shared, **more})] == ["done"] * size
    assert_same_curve(folder, alone)


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_end_with_the_best_model(fsdp, shared, tmp_path):
    """With a rate so large that a later step is worse than the best."""
    path = tmp_path / "run"
    rough = {**shared, "eval_every": 1, "eval_items": 100, "patience": 2, "learning_rate": 3.0,
             "warmup": 4, "steps": 30, "samples": False, "fsdp": fsdp}  # fmt: skip
    found = run_together(2, {**rough, "output": str(path)})
    (steps,) = {answer[2] for answer in found}
    assert [answer[1] for answer in found] == ["done"] * 2
    metrics = json.loads((path / "result.json").read_text())["metrics"]
    assert metrics["best_step"] == steps - 2 < 28
    assert metrics["eval_loss"] == pytest.approx(min(curve(path, "eval_loss").values()), abs=2e-6)


def test_checkpoints_pass_from_one_way_to_the_other(shared, alone, tmp_path):
    folder = tmp_path / "run"
    settings = {**shared, "output": str(folder), "resume": True}
    ways = [(2, {}, 2), (2, {"fsdp": True}, 4), (2, {"accumulate": 2}, 6), (1, {}, None)]
    for size, way, stop_at in ways:
        found = run_together(size, {**settings, **way}, stop_at)
        # The signal came when the step was over; the next one is finished first.
        status, steps = ("done", 8) if stop_at is None else ("stopped", stop_at + 1)
        assert [answer[1:3] for answer in found] == [(status, steps)] * size
    assert_same_curve(folder, alone)
