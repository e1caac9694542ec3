"""Runs in this process: they learn, repeat, end as they should, and leave nothing behind."""

import gc
import json
import logging
import math
import random
import signal
import threading
import time
from functools import partialmethod

import pytest
import torch

import mercer as mc

pytest.importorskip("accelerate")

from mercer.models import KernelLM
from mercer.models.base import KernelModel
from mercer.train import Settings, plan, run
from mercer.train import trainer as trainers
from mercer.train.distributed import Team
from mercer.train.screen import metric_words
from mercer.train.tasks import TASKS


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Settings of a run of a fraction of a second."""
    cache = str(tmp_path_factory.mktemp("tokens"))
    return {"batch": 4, "length": 32, "steps": 4, "eval_items": 200, "cache": cache}


def losses(result):
    return [line["loss"] for line in result.history if "loss" in line]


def test_a_tiny_model_learns_in_seconds(small):
    settings = Settings(**{**small, "steps": 40, "batch": 8, "log_every": 10, "eval_every": 20})
    seen = []
    result = run(settings, seen.append)
    assert result.status == "done"
    assert result.steps == 40
    assert losses(result)[-1] < losses(result)[0] - 0.5
    metrics = result.metrics
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))
    assert 0 < metrics["bits_per_byte"] < 8
    assert result.parameters > 0
    assert result.flops_per_token > 0
    assert result.tokens_per_second > 0
    assert [p.step for p in seen if p.metrics is None] == [10, 20, 30, 40]
    assert seen[0].steps == 40
    assert seen[0].seconds_left > 0
    assert all("bits_per_byte" in p.metrics for p in seen if p.metrics)


def judged(result):
    return [(x["step"], x["eval_items"]) for x in result.history if "bits_per_byte" in x]


def test_evaluations_come_by_step_and_read_what_the_steps_between_them_do(small, monkeypatch):
    task = TASKS["lm"]
    evaluate = task.evaluate

    def slowly(self, *args, **kwargs):
        time.sleep(0.05)
        return evaluate(self, *args, **kwargs)

    # However slow they are.
    monkeypatch.setattr(task, "evaluate", slowly)
    settings = {**small, "steps": 10, "samples": False}
    result = run(Settings(**settings, eval_every=4))
    assert judged(result) == [(4, 200), (8, 200), (10, 200)]
    assert "eval_tokens" in result.metrics
    settings |= {"eval_items": None, "tokenizer": "bytes", "length": 256, "batch": 1}
    notes = []
    result = run(Settings(**settings, eval_every=4), lambda p: notes.append(p.note))
    whole = judged(result)[-1][1]
    # Before the last one, on everything, comes one more for the curve.
    assert judged(result) == [(4, 1024), (8, 1024), (10, 1024), (10, whole)]
    assert whole > 30_000
    assert f"evaluations on the way read 1,024 of {whole:,} tokens, the last one all" in notes


@pytest.mark.parametrize("name", mc.systems.SYSTEMS)
def test_every_system_trains_all_its_parameters(name, small, monkeypatch):
    """A parameter without a gradient would make several processes hang."""
    idle = []
    clip = trainers.KernelTrainer._clip_grad_norm

    def looking(self, model):
        idle.extend(n for n, p in self.model.named_parameters() if p.grad is None)
        return clip(self, model)

    monkeypatch.setattr(trainers.KernelTrainer, "_clip_grad_norm", looking)
    options = {"height": 8, "width": 4} if name == "parmar2018" else {}
    result = run(Settings(**{**small, "steps": 1}, system=name, system_options=options))
    assert result.status == "done"
    assert not idle


def test_a_kernel_is_written_as_text(small):
    kernel = 'RBF(2.0)*Exponential(on="position")'
    result = run(Settings(**small, kernel=kernel, position="ProductKernel()"))
    assert result.status == "done"
    with pytest.raises(ValueError, match="Nonsense"):
        run(Settings(**small, kernel="Nonsense(2)"))


def test_runs_leave_nothing_behind(small):
    torch.manual_seed(5)
    random.seed(5)
    before = torch.get_rng_state(), random.getstate(), logging.getLogger("transformers").level
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    first = run(Settings(**small, overrides={"dropout": 0.1}))
    torch.rand(7)
    half = {**small, "steps": 1, "eval_items": 2}
    second = run(Settings(**half, overrides={"dropout": 0.1}, dtype="bfloat16"))
    third = run(Settings(**small, overrides={"dropout": 0.1}, seed=1))
    again = run(Settings(**small, overrides={"dropout": 0.1}))
    assert losses(first) == losses(again)
    assert first.metrics == again.metrics
    assert losses(first) != losses(third)
    assert losses(second) == pytest.approx(losses(first)[:1], abs=0.05)
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert logging.getLogger("transformers").level == before[2]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is KernelLM]


def test_a_run_without_a_folder_makes_none(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(Settings(**small)).status == "done"
    assert not list(tmp_path.iterdir())


def test_threads_take_turns(small):
    found = {}

    def work(number):
        found[number] = losses(run(Settings(**small, overrides={"dropout": 0.1}, seed=number)))

    threads = [threading.Thread(target=work, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == losses(run(Settings(**small, overrides={"dropout": 0.1}, seed=0)))
    assert found[0] != found[1]


def test_a_loss_that_is_not_finite_ends_the_run(small, tmp_path):
    settings = Settings(**small, learning_rate=1e30, clip=None, output=str(tmp_path / "run"))
    result = run(settings)
    assert result.status == "not converged at step 2"
    assert not result.converged
    assert not list((tmp_path / "run" / "checkpoints").glob("step-0000000[2-9]"))
    stored = json.loads((tmp_path / "run" / "result.json").read_text())
    assert stored["status"] == result.status
    # There is nothing to go on with: the same steps would end the same way.
    said = []
    again = run(
        Settings(**small, learning_rate=1e30, clip=None, output=str(tmp_path / "run"), resume=True),
        say=said.append,
    )
    assert again.status == result.status
    assert "has ended before: not converged at step 2" in said[0]


def test_the_parts_of_a_step_add_up(small):
    whole = losses(run(Settings(**small, log_every=1)))
    for accumulate in (2, 4):
        parts = losses(run(Settings(**small, log_every=1, accumulate=accumulate)))
        assert parts == pytest.approx(whole, abs=1e-5)


def test_a_compiled_run_is_the_same_run(small, monkeypatch):
    """Captured by dynamo and run without inductor, which is not ours to test."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    parts = partialmethod(KernelModel.compile_parts, backend=backend)
    monkeypatch.setattr(KernelModel, "compile_parts", parts)
    settings = {**small, "steps": 2, "log_every": 1}
    plain = run(Settings(**settings))
    compiled = run(Settings(**settings, compile=True))
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-5)
    assert compiled.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], abs=1e-5)
    # A block and the read-out; evaluations, whose last batch is smaller, run uncompiled.
    assert len(graphs) == 2


def test_time_ends_a_run(small):
    settings = Settings(**{**small, "steps": None}, time=1.0, log_every=1)
    notes = []
    result = run(settings, lambda progress: notes.append(progress.note))
    assert "1 s in all: steps for" in notes[0]
    assert result.status == "done"
    assert result.steps >= 2
    assert [line["learning_rate"] for line in result.history if "loss" in line][-1] < 1.2e-3


@pytest.mark.parametrize("warmup", [4, 0.2])
def test_rates_warm_up_and_fall_as_a_cosine(warmup, small):
    settings = Settings(**{**small, "steps": 20}, warmup=warmup, floor=0.1, log_every=1)
    rates = [line["learning_rate"] for line in run(settings).history if "loss" in line]
    assert rates[:4] == pytest.approx([3e-3 * n / 4 for n in (1, 2, 3, 4)])
    assert rates[4:] == pytest.approx(
        [3e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * n / 16))) for n in range(16)]
    )


def test_bandwidths_and_token_kernels_have_their_own_rates(small, monkeypatch):
    made = []
    create = trainers.KernelTrainer.create_optimizer

    def looking(self, model=None):
        made.append(create(self, model))
        return made[-1]

    monkeypatch.setattr(trainers.KernelTrainer, "create_optimizer", looking)
    rates = {"learning_rate": 1e-3, "bandwidth_rate": 2e-2, "token_rate": 3e-2}
    run(Settings(**small, **rates, system="leng2026", kernel="RBF(heads=2)"))
    groups = {group["initial_lr"]: group for group in made[0].param_groups}
    assert set(groups) == {1e-3, 2e-2, 3e-2}
    assert all(p.shape == (2,) for p in groups[2e-2]["params"])
    assert [list(p.shape) for p in groups[3e-2]["params"]] == [[1024, 1, 1, 1, 3]]
    assert groups[2e-2]["weight_decay"] == groups[3e-2]["weight_decay"] == 0.0


def test_the_folder_of_a_run_is_complete(small, tmp_path):
    pytest.importorskip("tensorboard")
    folder = tmp_path / "run"
    result = run(Settings(**small, output=str(folder), tensorboard=True, system="kundu2026"))
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "environment.json", "metrics.jsonl", "checkpoints", "model"} <= names
    assert {"result.json", "tensorboard"} <= names
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    assert json.loads((folder / "config.json").read_text())["system"] == "kundu2026"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines == result.history
    assert {"loss", "learning_rate", "grad_norm", "tokens", "seconds"} <= set(lines[0])
    assert any((folder / "tensorboard").iterdir())
    modes = {path.stat().st_mode for path in (folder / "checkpoints").glob("*/*")}
    assert modes == {(folder / "config.json").stat().st_mode}
    # The model and its tokenizer are files like any others of transformers.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.decode(tokenizer("a list of names")["input_ids"]) == "a list of names"
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1024)
    assert model.config.use_cache
    assert model.config.eos_token_id == tokenizer.eos_token_id
    from safetensors import safe_open

    for path in (folder / "checkpoints").rglob("*"):
        assert path.suffix in ("", ".json", ".safetensors"), "nothing that would be unpickled"
    with safe_open(folder / "checkpoints" / "step-00000004" / "optimizer.safetensors", "pt") as f:
        assert any(name.endswith("log_bandwidth/exp_avg") for name in f.keys())  # noqa: SIM118


def test_the_evaluation_of_text_is_exact(small):
    """Blocks, sliding windows and memory, each against a sum written by hand."""
    settings = Settings(**{**small, "eval_items": 150}, system="dai2019").resolve()
    task = TASKS["lm"](settings)
    torch.manual_seed(0)
    model = task.build().eval()
    ids = torch.as_tensor(task.text.valid.ids[:400].astype("int64"))
    team = Team(torch.device("cpu"))

    def nats(context, targets):
        """-log p of the last targets of a context."""
        with torch.no_grad():
            logits = model(ids[None, context]).logits[0].log_softmax(-1)
        picked = logits[:-1].gather(1, ids[context][1:, None])[:, 0]
        return -picked[-targets:].sum().item()

    # 32 tokens a window: windows from 0, 31, 62, 93 predict 31 tokens each.
    want = sum(nats(slice(s, s + 32), 31) for s in (0, 31, 62, 93)) / 124
    found = task.evaluate(model, team, final=True)
    assert found["eval_loss"] == pytest.approx(want, rel=1e-5)
    assert found["eval_tokens"] == 124
    text = task.tokenizer.decode(ids[:125].tolist(), skip_special_tokens=True)
    bits = want * 124 / math.log(2) / len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5)

    task.settings = Settings(**{**small, "eval_items": 96}, evaluate_by="sliding").resolve()
    want = nats(slice(0, 32), 31) + sum(nats(slice(s, s + 32), 16) for s in (16, 32, 48, 64))
    found = task.evaluate(model, team, final=True)
    assert found["eval_loss"] == pytest.approx(want / (31 + 4 * 16), rel=1e-5)

    # With a memory the second segment sees what the first one held.
    task.settings = Settings(**{**small, "eval_items": 65}, evaluate_by="memory").resolve()
    memory = model.new_memory(64)
    with torch.no_grad():
        logits = [model(ids[None, s : s + 32], memory=memory).logits[0] for s in (0, 32)]
    want = torch.nn.functional.cross_entropy(torch.cat(logits), ids[1:65]).item()
    found = task.evaluate(model, team, final=True)
    assert found["eval_loss"] == pytest.approx(want, rel=1e-5)
    assert found["eval_tokens"] == 64


def test_a_translator_gets_a_bleu_with_its_signature(small):
    pytest.importorskip("sacrebleu")
    settings = {**small, "batch": 16, "steps": 3, "eval_items": 6}
    result = run(Settings(**settings, task="translation", beams=2))
    assert result.status == "done"
    assert 0 <= result.metrics["bleu"] <= 100
    assert "version:" in result.metrics["signature"]
    assert result.metrics["perplexity"] > 1


def test_a_vision_transformer_learns_digits(small):
    pytest.importorskip("sklearn")
    settings = {**small, "batch": 32, "steps": 40, "eval_items": 100, "eval_every": 40}
    result = run(Settings(**settings, task="vision"))
    assert result.status == "done"
    assert result.metrics["accuracy"] > 0.3
    assert result.history[-1]["accuracy"] == result.metrics["accuracy"]


def test_recall_is_learned_and_reported_by_number_of_pairs(small):
    given = {
        **small, "task": "recall", "batch": 32, "length": 8, "steps": 80, "learning_rate": 1e-2,
        "eval_every": 80, "eval_items": 64, "position": "LookupTable(2)",
        "overrides": {"d_model": 32, "d_ff": 32},
        "data_options": {"pairs": [1, 2], "held_out_pairs": [1, 2, 5], "vocabulary": 10},
    }  # fmt: skip
    result = run(Settings(**given))
    shares = [result.metrics[f"accuracy_{pairs}"] for pairs in (1, 2, 5)]
    assert result.metrics["accuracy"] == pytest.approx(sum(shares) / 3)
    # A guess among the values is right one time in five.
    assert shares[0] > 0.6
    assert all(0 <= share <= 1 for share in shares)
    assert "5 pairs" in metric_words(result.metrics)
    text = str(plan(Settings(**given)))
    assert "recall of 1, 2 pairs among 10 tokens: 4,096 sequences" in text


def test_options_of_recall_are_checked():
    for options, message in (
        ({"pair": 4}, "the data has no option 'pair'; did you mean 'pairs'?"),
        ({"pairs": [99]}, "length must be at least four times the pairs, 396"),
        ({"seed": 1}, "the data has no option 'seed'"),
    ):
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            plan(Settings(task="recall", data_options=options))
    small = Settings(task="recall", overrides={"vocab_size": 50})
    with pytest.raises(ValueError, match="vocab_size must be at least 64, the tokens of the data"):
        plan(small)


def test_a_plan_counts_without_weights(small):
    found = plan(Settings(**small, system="leng2026"))
    text = str(found)
    for word in ("parameters", "token-kernels", "FLOPs", "memory", "steps", "passes"):
        assert word in text
    result = run(Settings(**{**small, "steps": 1}, system="leng2026"))
    assert found.counted.total == result.parameters
    assert found.counted.flops_per_token == result.flops_per_token
