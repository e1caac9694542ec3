"""The language model with every system: causal, trained, decoded, saved; and its errors."""

import warnings

import hf_models
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import mercer as mc
from mercer import models, systems
from mercer.filters import Diagonals
from mercer.models import KernelCache, KernelLM, KernelLMConfig, presets

VOCAB = 40
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "vocab_size": VOCAB, "context_length": 32}
# What a study would compose, besides the systems.
COMPOSED = {
    "rbf": {"kernel": "RBF(2.0)", "position": "rotary", "system_options": {"symmetric": True}},
    "on places": {"kernel": 'RBF(2.0)*Exponential(on="position")'},
    "a sum": {"kernel": "RBF() + Polynomial(2)", "position": "DirectSum(Learned(32))"},
    "alibi": {"kernel": "Laplace()", "position": "alibi", "filter": "Strided(3)"},
    "gaussian, turned": {"system": "kundu2026", "system_options": {"rotary": True}},
    "gaussian, value embeddings": {"system": "kundu2026", "value_embeddings": True},
    "gaussian, adaptive": {"system": "kundu2026", "system_options": {"adaptive": True}},
    "tokens on keys": {
        "system": "leng2026",
        "system_options": {"base": "tsai2019", "on": "kv", "size": 5, "layers": 1},
    },
    "mixed layers": {
        "system": ["dai2019", "kundu2026"],
        "windows": "SL",
        "short_window": 3,
    },
    "after the sum": {"system": "kundu2026", "pre_norm": False},
    "nano": {
        "position": "rotary", "norm": "rms-plain", "activation": "relu2", "normalize": True,
        "value_embeddings": True, "windows": "SL", "short_window": 4, "embedding_norm": True,
        "logit_cap": 15.0,
    },
    "adaptive softmax": {"system": "dai2019", "cutoffs": [10, 20], "div": 2},
    "grouped": {"system": "vaswani2017", "num_kv_heads": 1, "input_position": "learned"},
}  # fmt: skip
CASES = {name: {"system": name} for name in systems.SYSTEMS} | COMPOSED


def make(case="vaswani2017", *, dtype=torch.float32, **more):
    fields = SIZES | {"num_layers": 2, "memory_length": 8} | CASES[case] | more
    model = KernelLM(KernelLMConfig(**fields)).to(dtype).eval()
    for parameter in model.token_kernels.parameters() if model.token_kernels else ():
        # At the Dirac, where they start, taps hide.
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def draw(batch=2, length=11):
    return torch.randint(1, VOCAB, (batch, length))


def logits_of(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_training_reaches_every_parameter(case):
    model, ids = make(case).train(), draw()
    loss = model(ids, labels=ids).loss
    assert loss.isfinite()
    loss.backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert not missing
    assert all(p.grad.isfinite().all() for p in model.parameters())
    before = loss.item()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    assert model(ids, labels=ids).loss.item() < before


@pytest.mark.parametrize("case", CASES)
def test_the_future_changes_no_bit(case):
    model, ids = make(case), draw()
    later = ids.clone()
    later[:, 6:] = torch.randint(1, VOCAB, later[:, 6:].shape)
    a, b = logits_of(model, ids), logits_of(model, later)
    assert torch.equal(a[:, :6], b[:, :6])
    assert not torch.equal(a[:, 6:], b[:, 6:])


@pytest.mark.parametrize("case", CASES)
def test_decoding_with_a_cache_equals_the_whole_pass(case):
    model, ids = make(case, dtype=torch.float64), draw()
    cache = model.new_cache()
    pieces = [logits_of(model, x, past_key_values=cache) for x in ids.split([5, 1, 3, 2], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), logits_of(model, ids), rtol=0, atol=1e-9)
    assert cache.get_seq_length() == 11
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for beams in (1, 3):
        with_cache, without = (
            model.generate(ids, num_beams=beams, use_cache=use, **options) for use in (True, False)
        )
        assert torch.equal(with_cache, without)


# Blocks are counted from the first place.
@pytest.mark.parametrize("case", [name for name in CASES if name != "parmar2018"])
def test_padding_on_the_left_changes_nothing(case):
    model, ids = make(case, dtype=torch.float64), draw(1, 11)
    short = ids[:, 4:]
    padded = torch.cat([ids, F.pad(short, (4, 0))])
    mask = torch.ones_like(padded)
    mask[1, :4] = 0
    both = logits_of(model, padded, attention_mask=mask)
    torch.testing.assert_close(both[1:, 4:], logits_of(model, short), rtol=0, atol=1e-9)
    torch.testing.assert_close(both[:1], logits_of(model, ids), rtol=0, atol=1e-9)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    batched = model.generate(padded, attention_mask=mask, **options)
    assert torch.equal(batched[1:, 4:], model.generate(short, **options))
    assert torch.equal(batched[:1], model.generate(ids, **options))


@pytest.mark.parametrize("case", ["vaswani2017", "leng2026", "nano"])
def test_padding_on_the_right_changes_nothing(case):
    model, ids = make(case, dtype=torch.float64), draw(1, 11)
    padded = torch.cat([ids, F.pad(ids[:, :7], (0, 4))])
    mask = torch.ones_like(padded)
    mask[1, 7:] = 0
    both = logits_of(model, padded, attention_mask=mask)
    torch.testing.assert_close(both[1:, :7], logits_of(model, ids[:, :7]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_it_is_the_same(case, tmp_path):
    model, ids = make(case), draw()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is KernelLM
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert AutoConfig.from_pretrained(tmp_path).layer_parts() == model.config.layer_parts()


def test_a_fresh_model_equals_one_filled_later():
    """Bandwidths, slopes and kernels of tokens start where they should on the meta device, too."""
    for case in ("kundu2026", "leng2026", "alibi", "rbf", "shaw2018"):
        with torch.device("meta"):
            model = KernelLM(KernelLMConfig(**(SIZES | {"num_layers": 2} | CASES[case])))
        assert {p.device.type for p in model.parameters()} == {"meta"}
        model.to_empty(device="cpu")
        model.init_weights()
        fresh = KernelLM(KernelLMConfig(**(SIZES | {"num_layers": 2} | CASES[case])))
        for (name, a), b in zip(
            model.state_dict().items(), fresh.state_dict().values(), strict=True
        ):
            if "bandwidth" in name or "slopes" in name or "token_kernels" in name:
                assert torch.equal(a, b), name
            elif a.numel() > 1:
                assert abs(a.std() - b.std()) <= 0.5 * b.std(), name
        assert model(draw(), labels=draw()).loss.isfinite()


def test_token_kernels_are_one_object_of_the_model():
    model = make("leng2026")
    names = [name for name, _ in model.named_parameters() if "token" in name]
    assert names == ["token_kernels.weight"]
    assert all(block.attention.tokens is model.token_kernels for block in model.blocks)
    first = make("tokens on keys")
    assert [block.attention.has_token_kernels for block in first.blocks] == [True, False]


def test_filters_of_systems_become_causal():
    def filters(case, **more):
        return [block.attention.filter for block in make(case, **more).blocks]

    assert filters("vaswani2017") == [mc.Causal()] * 2
    assert filters("child2019") == [mc.Heads([mc.Window(31, 0), Diagonals(32)])] * 2
    assert filters("child2019", system_options={"merged": True}) == [mc.Strided(32)] * 2
    assert filters("tsai2019multimodal") == [mc.Causal()] * 2
    assert filters("parmar2018") == [mc.Blocks(256, 256)] * 2
    assert filters("dai2019") == [mc.Memory(8)] * 2
    assert filters("dai2019", filter="Window(4, 4)") == [mc.Window(4, 4) & mc.Causal()] * 2
    assert filters("nano") == [mc.Window(4, 0), mc.Causal()]


def test_positions_are_added_once_by_each_layer():
    """The embeddings of vaswani2017 are the tokens' alone; every layer adds the places itself."""
    model, ids = make("vaswani2017"), draw(1, 1).expand(1, 6)
    hidden = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(hidden[0][:, 0], hidden[0][:, 5])
    assert not torch.allclose(hidden[1][:, 0], hidden[1][:, 5])


def test_memory_of_earlier_segments():
    model, ids = make("dai2019", dtype=torch.float64), draw(2, 12)
    memory = model.new_memory()
    pieces = [logits_of(model, segment, memory=memory) for segment in ids.split(4, 1)]
    # 8 states and 4 tokens reach back to the start.
    torch.testing.assert_close(torch.cat(pieces, 1), logits_of(model, ids), rtol=0, atol=1e-9)
    assert [m.length for m in memory] == [8, 8]
    blind = model.new_memory(0)
    logits_of(model, ids[:, :4], memory=blind)
    alone = logits_of(model, ids[:, 4:8], memory=blind)
    torch.testing.assert_close(alone, logits_of(model, ids[:, 4:8]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["dai2019", "vaswani2017", "kundu2026", "leng2026"])
def test_segments_of_a_long_input(name):
    """As by hand with a memory; no gradient goes from a segment to those before it."""
    fields = {"segment_length": 4, "memory_length": 6, "tie_word_embeddings": False}
    model, ids = make(name, dtype=torch.float64, **fields), torch.arange(12).expand(2, -1)
    memory = model.new_memory()
    pieces = [logits_of(model, segment, memory=memory) for segment in ids.split(4, 1)]
    out = model(ids, labels=ids, output_hidden_states=True)
    torch.testing.assert_close(out.logits, torch.cat(pieces, 1), rtol=0, atol=1e-9)
    assert len(out.hidden_states) == 1 + len(model.blocks)
    (grad,) = torch.autograd.grad(out.logits[:, 8:].sum(), model.embed.weight)
    assert not grad[:8].any()
    assert grad[8:12].any()
    with pytest.raises(ValueError, match="without padding"):
        model(ids, labels=ids, attention_mask=torch.arange(12).expand(2, -1) > 1)


@pytest.mark.parametrize("name", ["leng2026", "kundu2026"])
def test_memory_with_value_embeddings_and_token_kernels(name):
    fields = {"value_embeddings": True, "num_layers": 2}
    model, ids = make(name, dtype=torch.float64, **fields), draw(2, 12)
    memory = model.new_memory(12)
    pieces = [logits_of(model, segment, memory=memory) for segment in ids.split(4, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), logits_of(model, ids), rtol=0, atol=1e-9)


def test_the_loss_is_that_of_the_next_token():
    model, ids = make(), draw()
    labels = ids.clone()
    labels[0, :4] = -100
    out = model(ids, labels=labels)
    by_hand = F.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(out.loss, by_hand)
    items = (labels[:, 1:] != -100).sum()
    half = model(ids, labels=labels, num_items_in_batch=2 * items).loss
    torch.testing.assert_close(half, out.loss / 2)


def test_the_adaptive_softmax_is_a_distribution():
    model, ids = make("adaptive softmax"), draw()
    labels = ids.clone()
    labels[1, -3:] = -100
    out = model(ids, labels=labels)
    torch.testing.assert_close(out.logits.exp().sum(-1), torch.ones(2, 11))
    by_hand = F.nll_loss(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, by_hand)
    untied = make("adaptive softmax", tie_word_embeddings=False)
    assert untied.num_parameters() > model.num_parameters()
    torch.testing.assert_close(untied(ids).logits.exp().sum(-1), torch.ones(2, 11))


def test_the_adaptive_softmax_keeps_the_dtype_of_a_float64_model():
    model, ids = make("adaptive softmax", dtype=torch.float64), draw()
    out = model(ids, labels=ids)
    assert out.logits.dtype == out.loss.dtype == torch.float64
    torch.testing.assert_close(
        out.logits.exp().sum(-1), torch.ones(2, 11).double(), rtol=0, atol=1e-13
    )
    assert make("adaptive softmax", dtype=torch.bfloat16)(ids).logits.dtype == torch.float32


def test_tied_and_untied_embeddings():
    tied, untied = make(), make(tie_word_embeddings=False)
    assert tied.head.weight is tied.embed.weight
    assert untied.num_parameters() - tied.num_parameters() == VOCAB * 16


def test_sampling_cropping_and_rejected_guesses():
    model, ids = make("tsai2019"), draw(1, 6)
    torch.manual_seed(1)
    a = model.generate(ids, max_new_tokens=6, do_sample=True, pad_token_id=0)
    torch.manual_seed(1)
    assert torch.equal(
        a, model.generate(ids, max_new_tokens=6, do_sample=True, use_cache=False, pad_token_id=0)
    )
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    guessed = model.generate(ids, prompt_lookup_num_tokens=3, **options)
    assert torch.equal(guessed, model.generate(ids, **options))
    cache = model.new_cache()
    logits_of(model, ids, past_key_values=cache)
    cache.crop(-2)
    assert cache.get_seq_length() == 4
    cache.crop(3)
    assert cache.get_seq_length() == 3
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 2
    with pytest.raises(ValueError, match="holds 3 places, so 4 cannot go"):
        cache.crop(-4)
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("case", ["leng2026", "kundu2026", "nano"])
def test_gradient_checkpointing_changes_nothing(case):
    model, ids = make(case).train(), draw()
    model(ids, labels=ids).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hf_models.checkpoint(model)
    model(ids, labels=ids).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))
    with pytest.raises(ValueError, match="runs a block twice"):
        model(ids, memory=model.new_memory(4))


@pytest.mark.parametrize("case", ["dai2019", "kundu2026"])
def test_it_compiles_into_one_graph(case):
    torch._dynamo.reset()
    model, ids = make(case, num_layers=1), draw()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        loss = compiled(ids, labels=ids).loss
        torch.testing.assert_close(loss, model(ids, labels=ids).loss)
    torch._dynamo.reset()


def test_parameter_groups():
    named = models.groups(make("mixed layers"))
    assert named["bandwidth"] == ["blocks.1.attention.log_bandwidth"]
    assert models.groups(make("leng2026"))["token_kernels"] == ["token_kernels.weight"]
    for case in ("rbf", "nano", "tokens on keys"):
        model = make(case)
        each = [name for names in models.groups(model).values() for name in names]
        assert sorted(each) == sorted(name for name, _ in model.named_parameters())
    assert models.groups(make("rbf"))["bandwidth"] == [
        "blocks.0.attention.kernel.log_bandwidth", "blocks.1.attention.kernel.log_bandwidth",
    ]  # fmt: skip
    kernel = mc.Scaled(mc.ARD(4) * mc.Periodic(2.0)) + mc.SpectralMixture(2, 4)
    assert models.groups(kernel)["rest"] == []


def test_bandwidths_that_are_equal_start_where_they_were_given():
    from mercer.models.starts import remember_start, restart

    kernel = mc.ARD(64, 2.0, heads=32)
    remember_start(kernel)
    kernel.log_bandwidth.data.zero_()
    restart(kernel)
    assert bool((kernel.log_bandwidth.exp() - 2).abs().max() < 1e-6)


CONFIG_ERRORS = {
    "there is no system 'bert'; there are: vaswani2017": {"system": "bert"},
    "there is no kernel 'RBX'": {"kernel": "RBX()"},
    "d_model 16 does not divide into 3 heads": {"num_heads": 3},
    "num_layers must be a whole number from 1 up, got 0": {"num_layers": 0},
    "system must have one entry for each of 2 layers, got 3": {"system": ["lee2018"] * 3},
    "norm must be one of layer, rms, rms-plain": {"norm": "batch"},
    "activation must be one of": {"activation": "step"},
    "dropout must be at least 0 and below 1": {"dropout": 1.0},
    "input_position must be 'learned'": {"input_position": "rotary"},
    "residual_start must be 'scaled'": {"residual_start": "big"},
}
MODEL_ERRORS = {
    "the layer takes no option 'rotary'": {"system_options": {"rotary": True}},
    "kundu2026 has its own kernel": {"system": "kundu2026", "kernel": "RBF()"},
    r"position of kundu2026 must be Rotary\(\) or NoPosition\(\)": {
        "system": "kundu2026", "position": "alibi"
    },
    "dai2019 takes no option 'momory'": {"system": "dai2019", "system_options": {"momory": 3}},
    "vocab_size of leng2026 must be the model's 40": {
        "system": "leng2026", "system_options": {"vocab_size": 50257}
    },
    "bandwidths for 3 heads": {"kernel": "RBF(heads=3)"},
    "reads part 'relative'": {"kernel": "Exponential(on='relative')"},
    "are for images": {"kernel": "Exponential(on='height')"},
    "pattern must be made of S and L": {"windows": "SXL"},
    "their options must be the same": {
        "system": "leng2026", "system_options": [{"size": 3}, {"size": 5}]
    },
    "cutoffs must rise": {"cutoffs": [20, 10]},
    "base of leng2026 must be another system": {
        "system": "leng2026", "system_options": {"base": "kundu2026"}
    },
}  # fmt: skip


@pytest.mark.parametrize("said", CONFIG_ERRORS)
def test_a_config_says_what_is_wrong(said):
    with pytest.raises(ValueError, match=said):
        KernelLMConfig(**(SIZES | {"num_layers": 2} | CONFIG_ERRORS[said]))


@pytest.mark.parametrize("said", MODEL_ERRORS)
def test_a_model_says_what_is_wrong(said):
    with pytest.raises(ValueError, match=said):
        KernelLM(KernelLMConfig(**(SIZES | {"num_layers": 2} | MODEL_ERRORS[said])))


def test_inputs_that_do_not_fit():
    model, ids = make("child2019"), draw()
    with pytest.raises(ValueError, match=r"from 0 to 39, but reach from .* to 40: does the tok"):
        model(torch.full((1, 3), 40))
    with pytest.raises(ValueError, match=r"input_ids must be whole numbers \[B, T\]"):
        model(torch.rand(1, 3))
    with pytest.raises(ValueError, match="positions have 32 places, got 33"):
        model(draw(1, 33))
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 11\]"):
        model(ids, attention_mask=torch.ones(2, 10))
    with pytest.raises(ValueError, match="must be a KernelCache, got list"):
        model(ids, past_key_values=[1])
    with pytest.raises(ValueError, match="one entry for each of 2 layers"):
        model(ids, memory=model.new_memory(3)[:1])
    with pytest.raises(ValueError, match="exclude each other"):
        model(ids, memory=model.new_memory(3), past_key_values=KernelCache(2))
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="segments without padding"):
        model(ids, memory=model.new_memory(3), attention_mask=mask)
    with pytest.raises(ValueError, match="no memory_length"):
        make(memory_length=None).new_memory()


def test_presets():
    tiny = presets.lm("tiny", vocab_size=VOCAB, system="shaw2018", num_layers=1)
    assert (tiny.vocab_size, tiny.system, tiny.num_layers) == (VOCAB, "shaw2018", 1)
    xl = presets.lm("xl-base")
    assert (xl.num_layers, xl.d_model, xl.num_heads) == (16, 410, 10)
    assert (xl.context_length, xl.memory_length, xl.system) == (150, 150, "dai2019")
    nano = presets.lm("nano", depth=6)
    assert (nano.d_model, nano.num_heads, nano.head_dim) == (384, 3, 128)
    composed = presets.lm("nano", depth=2, kernel='RBF()*Exponential(on="position")')
    assert composed.position is None
    with pytest.raises(ValueError, match="no language model preset 'huge'; there are: xl-base"):
        presets.lm("huge")
    with pytest.raises(ValueError, match="depth is for the preset nano"):
        presets.lm("tiny", depth=3)
    with pytest.raises(ValueError, match="depth must be a whole number"):
        presets.lm("nano", depth=0)
