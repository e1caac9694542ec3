"""Fine-tuning a language model of transformers: `init` with a kernel or token kernels."""

import json
import math
import os
import signal

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mercer import use
from mercer.data.tokens import spell_bytes
from mercer.integrations import hf
from mercer.train import Settings, plan, run
from mercer.train.pretrained import is_of_transformers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SIZES = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 256, "eos_token_id": 256,
}  # fmt: skip
TOKENS = 'TokenKernels(size=3, on="v", layers=[0])'


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama that reads bytes."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    spell_bytes().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def small(llama, tmp_path_factory):
    return {
        "init": llama, "length": 32, "batch": 4, "steps": 6, "eval_items": 300, "samples": False,
        "cache": str(tmp_path_factory.mktemp("cache")), "threads": 1, "log_every": 1,
    }  # fmt: skip


def curve(folder, key="loss"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def test_a_hundred_steps_lower_the_loss_and_the_run_is_used_like_any_other(small, tmp_path):
    folder = tmp_path / "run"
    more = {"steps": 100, "learning_rate": 1e-2, "bandwidth_rate": 1e-2, "log_every": 10}
    result = run(Settings(**small | more, kernel="RBF(heads=4)", output=str(folder)))
    losses = curve(folder)
    assert losses[100] < losses[10] - 0.5
    assert result.parameters == sum(
        x.numel() for x in hf.from_pretrained(folder / "model").parameters()
    )
    trained = use.load(folder)
    log = trained.model.model.layers[0].self_attn.mercer.kernel.log_bandwidth
    assert log.abs().min() > 1e-3, "the bandwidths have learned"
    judged = use.evaluate(trained, eval_items=300)
    assert judged.figures["eval_loss"] == pytest.approx(result.metrics["eval_loss"], abs=1e-6)
    text = "".join(use.generate(trained, "The class", tokens=8, temperature=0))
    assert text == "".join(use.generate(use.load(folder / "model"), "The class", tokens=8,
                                        temperature=0))  # fmt: skip
    # And once more from there.
    again = run(Settings(**small | {"init": str(folder), "steps": 1}))
    assert again.history[0]["loss"] < losses[10]


def test_without_a_kernel_the_model_stays_a_plain_one(small, tmp_path):
    run(Settings(**small | {"steps": 1}, output=str(tmp_path / "run")))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert not hasattr(loaded.config, "mercer")
    assert not any("mercer" in name for name in loaded.state_dict())


def test_a_run_that_was_stopped_resumes_to_the_same_bits(small, tmp_path):
    settings = {**small, "kernel": "RBF(heads=4)", "token_kernels": TOKENS, "save_every": 2,
                "eval_every": 2, "system_options": {"layers": [1]}}  # fmt: skip
    run(Settings(**settings, output=str(tmp_path / "whole")))

    def stop(progress):
        if progress.step == 3 and progress.metrics is None:
            os.kill(os.getpid(), signal.SIGTERM)

    folder = str(tmp_path / "cut")
    assert run(Settings(**settings, output=folder), stop).status == "stopped"
    assert run(Settings(**settings, output=folder, resume=True)).status == "done"
    whole, cut = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()
    assert curve(tmp_path / "whole") == curve(tmp_path / "cut")


def test_each_kind_of_parameter_has_its_rate(small, tmp_path, monkeypatch):
    made = []
    keep = torch.optim.AdamW.__init__

    def noting(self, *args, **kwargs):
        keep(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(torch.optim.AdamW, "__init__", noting)
    settings = {**small, "steps": 1, "kernel": "RBF(heads=4)", "token_kernels": TOKENS}
    rates = {"learning_rate": 1e-4, "bandwidth_rate": 2e-3, "token_rate": 3e-3}
    run(Settings(**settings, **rates, output=str(tmp_path / "run")))
    # What a log calls the learning rate is that of the weights.
    assert curve(tmp_path / "run", "learning_rate")[1] <= 1e-4
    counts = {
        group["initial_lr"]: sum(x.numel() for x in group["params"])
        for group in made[0].param_groups
        if group["weight_decay"] == 0
    }
    assert counts[2e-3] == 2 * 4
    assert counts[3e-3] == 257 * 3


def test_from_softmax_to_rbf(small, tmp_path):
    folder = tmp_path / "run"
    settings = {**small, "system_options": {"start": "as-softmax"}, "kernel": "RBF(heads=4)"}
    run(Settings(**settings, output=str(folder), learning_rate=1e-9, bandwidth_rate=0.0))
    plain = run(Settings(**small | {"steps": 1, "learning_rate": 1e-9}))
    # The first loss is that of the model as it came.
    assert curve(folder)[1] == pytest.approx(plain.history[0]["loss"], abs=1e-6)
    model = hf.from_pretrained(folder / "model")
    assert [layer.self_attn.mercer.kernel.c.item() for layer in model.model.layers] == [0.0, 0.0]


def test_a_plan_counts_what_a_run_trains(small):
    settings = Settings(**small, kernel="RBF(heads=4)", token_kernels=TOKENS)
    planned = plan(settings)
    assert settings.resolve().preset == "pretrained"
    assert planned.counted.parameters["kernel"] == 8
    assert planned.counted.parameters["token-kernels"] == 257 * 3
    result = run(settings)
    assert planned.counted.total == result.parameters
    assert planned.counted.flops_per_token == result.flops_per_token
    # All linear maps with the head, and a causal triangle of 32 places in 2 layers of width 32.
    maps = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 257 * 32
    assert math.isclose(result.flops_per_token, 3 * (2 * maps + 4 * 2 * 32 * 33 / 2))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kernel": "RBF(heads=3)"}, "which has 4 heads of 8 features"),
        ({"kernel": "RFB()"}, "did you mean 'RBF'"),
        ({"position": "Rotary()"}, "position is for models of Mercer"),
        ({"system": "dai2019"}, "system is for models of Mercer"),
        ({"evaluate_by": "memory"}, "evaluate_by memory is for models of Mercer"),
        ({"context_parallel": 2}, "context_parallel is for models of Mercer"),
        ({"system_options": {"layer": 1}}, "an option is one of layers, start, got layer"),
        ({"system_options": {"layers": [1]}}, "the option layers needs a kernel"),
        ({"kernel": "RBF(heads=4)", "system_options": {"layers": [9]}}, "no attention layer 9"),
        (
            {"kernel": "RBF(heads=4)", "system_options": {"start": "x"}},
            'start must be "as-softmax"',
        ),
        (
            {"kernel": "RBF()", "steps": None, "time": 9.0,
             "system_options": {"start": "as-softmax"}},
            "needs a number of steps",
        ),
        ({"token_kernels": "TokenKernels(size=4)"}, "size must be an odd number"),
        ({"token_kernels": "TokenKernels(sizes=3)"}, "unexpected keyword argument 'sizes'"),
        ({"token_kernels": "TokenKernels(layers=[7])"}, "no attention layer 7"),
        ({"length": 65}, "length must be at most 64, the places of"),
        ({"tokenizer": "bpe:300"}, "the tokenizer has 300 tokens, but"),
        ({"init": None, "token_kernels": TOKENS}, "has them by system leng2026"),
        ({"init": None, "preset": "pretrained"}, "is for task lm and init"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(small, given, said):
    with pytest.raises(ValueError, match=said) as caught:
        run(Settings(**small | given))
    assert "\n" not in str(caught.value)


def test_a_damaged_model_is_one_sentence(small, llama, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "x"}')
    with pytest.raises(ValueError, match="cannot be loaded") as caught:
        run(Settings(**small | {"init": str(tmp_path)}))
    assert "\n" not in str(caught.value)


def test_which_init_is_of_transformers(llama, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in (llama, "gpt2", "HuggingFaceTB/SmolLM2-135M", "model.gguf"):
        assert is_of_transformers(name), name
    for name in ("runs/gpt2", "./gpt2", "/nowhere/model", "runs", str(tmp_path)):
        assert not is_of_transformers(name), name
