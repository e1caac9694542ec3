"""Adapters of PEFT beside kernels and token kernels: trained, saved, loaded, merged."""

import copy

import hf_models
import pytest
import torch

import mercer as mc
from mercer.integrations import hf

peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::UserWarning",
    # peft 0.21 asks by the name that transformers had before 5.23
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)
NEW = ["mercer", "mercer_tokens"]


def patched(start=None):
    """RBF in layers 0 and 1, token kernels in layer 0."""
    model = hf.patch(hf_models.make("llama"), "RBF(heads=4)", layers=[0, 1], start=start)
    tokens = mc.nn.TokenKernels.like(model, size=3, on="v", layers=[0])
    return hf.patch(model, token_kernels=tokens)


def logits(model):
    return hf_models.logits(model, **hf_models.inputs("llama"))


def adapted(model, steps=3):
    """With an adapter and the new parameters trained for a few steps."""
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=NEW, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(model, lora)
    ids = hf_models.inputs("llama")["input_ids"]
    optimizer = torch.optim.Adam([x for x in model.parameters() if x.requires_grad], lr=3e-2)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def test_the_new_parameters_train_and_nothing_else():
    model = patched()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    trained = adapted(model)
    for name, x in trained.named_parameters():
        plain = name.removeprefix("base_model.model.")
        for layer in (".base_layer", ".modules_to_save.default", ".original_module"):
            plain = plain.replace(layer, "")
        if "lora" in name:
            continue
        moved = not torch.equal(x, before[plain])
        assert moved == ("modules_to_save" in name), name


def test_an_adapter_is_saved_and_loaded(tmp_path):
    model = patched()
    came = copy.deepcopy(model)
    trained = adapted(model)
    trained.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(came, tmp_path).eval()
    assert torch.equal(logits(loaded), logits(trained))
    with trained.disable_adapter():
        assert torch.equal(logits(trained), logits(patched()))


def test_a_merged_model_is_saved_and_loaded(tmp_path):
    trained = adapted(patched())
    with pytest.raises(ValueError, match="has an adapter: merge it first"):
        hf.save(trained, tmp_path)
    want = logits(trained)
    merged = trained.merge_and_unload()
    assert torch.allclose(logits(merged), want, atol=1e-4)
    hf.save(merged, tmp_path)
    loaded = hf.from_pretrained(tmp_path)
    assert torch.equal(logits(loaded), logits(merged))
    assert loaded.config.mercer["kernels"] == {"0": "RBF(heads=4)", "1": "RBF(heads=4)"}


def test_a_report_and_the_path_to_rbf_reach_the_kernels_that_train():
    trained = adapted(patched(start="as-softmax"))
    hf.leave_softmax(trained, progress=1)
    bridges = [m for name, m in trained.named_modules() if isinstance(m, mc.Bridge)]
    assert [float(m.c.detach()) for m in bridges].count(0.0) == 2
    rows = hf.report(trained, hf_models.inputs("llama")["input_ids"])
    assert [row.head for row in rows] == [0, 1, 2, 3] * 3
    named = dict(trained.named_modules())
    host = "base_model.model.model.layers.0.self_attn.mercer.modules_to_save.default"
    assert rows[1].bandwidth == pytest.approx(named[host].kernel.bandwidth(8)[1].item())
    assert rows[0].deviation > 0


def test_a_model_with_an_adapter_is_patched_as_well():
    model = hf_models.make("llama")
    want = logits(hf.patch(copy.deepcopy(model), "RBF(1.5, heads=4)"))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    adapter = peft.get_peft_model(model, lora)
    assert hf.patch(adapter, "RBF(1.5, heads=4)") is adapter
    assert torch.equal(logits(adapter), want)
