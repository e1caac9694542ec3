"""A KernelLM with the weights of a Llama model gives its logits, its tokens and its counts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers import LlamaForCausalLM as Llama

from mercer import models
from mercer.models import KernelLM, from_llama, presets
from mercer.models.count import count

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.2,
}  # fmt: skip


def make(**more):
    torch.manual_seed(1)
    model = Llama(LlamaConfig(**(SIZES | more))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def draw(*shape):
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


CASES = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "one head each": {"num_key_value_heads": 4},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_logits_are_those_of_llama(case):
    theirs, ids = make(**CASES[case]), draw(2, 40)
    ours = from_llama(theirs)
    with torch.no_grad():
        want, got = theirs(ids).logits, ours(ids).logits
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert count(ours).total == sum(p.numel() for p in theirs.parameters())


def test_it_generates_pads_and_trains_as_llama():
    theirs, ids = make(), draw(2, 7)
    ours = from_llama(theirs)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    want = theirs.generate(ids, attention_mask=mask, **options)
    assert torch.equal(ours.generate(ids, attention_mask=mask, **options), want)
    losses = [model(ids, labels=ids).loss for model in (theirs, ours)]
    torch.testing.assert_close(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    gate = ours.blocks[1].feed_forward.gate.weight.grad
    torch.testing.assert_close(gate, theirs.model.layers[1].mlp.gate_proj.weight.grad)


def test_a_folder_is_read_and_the_result_is_saved(tmp_path):
    theirs, ids = make(), draw(1, 5)
    theirs.save_pretrained(tmp_path / "llama")
    ours = from_llama(tmp_path / "llama")
    ours.save_pretrained(tmp_path / "kernel")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "kernel")
    assert torch.equal(loaded(ids).logits, ours(ids).logits)
    assert loaded.generation_config.eos_token_id == 2


def test_the_kernel_may_be_another():
    theirs, ids = make(), draw(1, 5)
    ours = from_llama(theirs, kernel="RBF(4.0, heads=4)")
    assert ours.blocks[0].attention.kernel.log_bandwidth.exp().tolist() == pytest.approx([4.0] * 4)
    weights = theirs.model.layers[1].self_attn.q_proj.weight
    assert torch.equal(ours.blocks[1].attention.query.weight, weights)
    assert ours(ids).logits.isfinite().all()
    half = from_llama(theirs.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16


def test_counts_of_a_gated_net_by_hand():
    sizes = {"system": "lee2018", "vocab_size": 100, "norm": "rms"}
    plain, gated = (count(presets.lm("tiny", mlp=mlp, **sizes), 64) for mlp in ("plain", "gated"))
    more = 2 * 64 * 256
    assert gated.parameters["feed-forward"] - plain.parameters["feed-forward"] == more
    assert gated.flops_per_token - plain.flops_per_token == 3 * 2 * more
    assert gated.activations_per_token - plain.activations_per_token == 2 * 2 * 256


@pytest.mark.parametrize("preset", ["translator", "vit"])
def test_the_other_models_have_gated_nets_too(preset):
    config = getattr(presets, preset)("tiny", mlp="gated", activation="silu", norm="rms")
    model = {"translator": models.KernelTranslator, "vit": models.KernelViT}[preset](config)
    assert all(b.feed_forward.gate is not None for b in model.blocks)


def test_the_epsilon_of_norms():
    for norm, usual in (("layer", 1e-5), ("rms", 1e-6)):
        for given, want in ((None, usual), (0.5, 0.5)):
            config = presets.lm("tiny", norm=norm, norm_eps=given, num_layers=1)
            model = KernelLM(config)
            block = model.blocks[0]
            norms = (model.norm, block.attention_norm, block.feed_forward_norm)
            assert {one.eps for one in norms} == {want}


ERRORS = {
    "model must be a LlamaForCausalLM, got GPT2LMHeadModel": lambda: from_llama(
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    ),
    "positions scaled by 'linear' are not known": lambda: from_llama(
        make(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    ),
    "head_dim must be hidden_size / num_attention_heads, got 4": lambda: from_llama(
        make(head_dim=4)
    ),
    "hidden_act must be 'silu', got 'gelu'": lambda: from_llama(make(hidden_act="gelu")),
    "attention_bias and mlp_bias must be both": lambda: from_llama(make(mlp_bias=True)),
    "the weights do not fit these fields": lambda: from_llama(make(), d_ff=20),
    "do not fit these fields: blocks.0.feed_forward.gate": lambda: from_llama(make(), mlp="plain"),
    "a mercer-lm has no field 'kernal'; .*kernel": lambda: from_llama(make(), kernal="RBF()"),
    "mlp must be one of plain, gated, got 'swiglu'": lambda: presets.lm("tiny", mlp="swiglu"),
    "norm_eps must be above 0, got 0": lambda: presets.lm("tiny", norm_eps=0),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_is_wrong(message):
    with pytest.raises(ValueError, match=message):
        ERRORS[message]()
