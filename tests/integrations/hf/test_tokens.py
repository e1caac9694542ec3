"""Token kernels in models of transformers: at the Dirac the model as it came, and with any cache
what the whole sequence gives."""

import copy

import hf_models
import pytest
import torch
from transformers import DynamicCache, StaticCache

import mercer as mc
from mercer.integrations import hf
from mercer.integrations.hf.layers import attention_layers
from mercer.integrations.hf.patch import tokens_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def with_tokens(family="llama", *, moved=True, **options):
    model = hf_models.make(family)
    tokens = mc.nn.TokenKernels.like(model, **{"size": 3, "on": "kv", "layers": [0, 2]} | options)
    hf.patch(model, token_kernels=tokens)
    if moved:
        torch.manual_seed(2)
        with torch.no_grad():
            tokens.weight.add_(0.3 * torch.randn_like(tokens.weight))
    return model


@pytest.mark.parametrize("family", hf_models.READERS)
def test_at_the_dirac_the_model_is_as_it_came(family):
    model = with_tokens(family, moved=False)
    mask = hf_models.padded(17, left=family in hf_models.DECODERS)
    given = hf_models.inputs(family) | {"attention_mask": mask}
    came = hf_models.logits(hf_models.make(family), **given)
    got = hf_models.logits(model, **given)
    assert torch.allclose(got[mask.bool()], came[mask.bool()], atol=1e-6 * came.abs().max())


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_they_are_those_of_vicinity(family):
    model = with_tokens(family, layers=[0], on="v")
    calls = []
    layers = attention_layers(model)
    layers[0].module.mercer.register_forward_hook(
        lambda host, args, named, out: calls.append((args, named, out)), with_kwargs=True
    )
    ids = hf_models.inputs(family)["input_ids"]
    hf_models.logits(model, input_ids=ids)
    (((q, k, v), named, (got, _)),) = calls
    taps = tokens_of(model)(ids)
    want = mc.vicinity(
        q, k, v, value_taps=taps.values, kernel=mc.Exponential(named["scaling"]),
        filter=mc.Full() if family == "bert" else mc.Causal(), backend="reference",
    )  # fmt: skip
    assert torch.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_a_cache_keeps_the_ids(family, static):
    model = with_tokens(family)
    ids = hf_models.inputs(family)["input_ids"]
    whole = hf_models.logits(model, input_ids=ids)
    cache = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=24)
    parts = [
        hf_models.logits(model, input_ids=part, past_key_values=cache)
        for part in ids.split([9, 1, 3, 4], 1)
    ]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    plain = hf_models.logits(hf_models.make(family), input_ids=ids)
    assert not torch.allclose(whole, plain, atol=1e-2)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=lambda how: next(iter(how), "greedy"),
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate_is_that_without_a_cache(family, how):
    model = with_tokens(family)
    one = "prompt_lookup_num_tokens" in how
    given = hf_models.inputs(family, batch=1 if one else 2)
    if not one:
        given["attention_mask"] = hf_models.padded(17, left=True)
    given |= {"max_new_tokens": 10, "do_sample": False}
    beams = {"num_beams": how["num_beams"]} if "num_beams" in how else {}
    want = model.generate(**given, **beams, use_cache=False)
    assert torch.equal(model.generate(**given, **how), want)


def test_left_padding_changes_nothing():
    model = with_tokens()
    ids = hf_models.inputs("llama")["input_ids"][:1]
    alone = hf_models.logits(model, input_ids=ids)
    padded = torch.cat([ids.new_full((1, 4), 5), ids], 1)
    mask = torch.ones_like(padded)
    mask[:, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    got = hf_models.logits(model, input_ids=padded, attention_mask=mask, position_ids=places)
    assert torch.allclose(got[:, 4:], alone, atol=1e-5)


def test_packed_sequences_do_not_reach_into_each_other():
    model = with_tokens()
    ids = hf_models.inputs("llama")["input_ids"]
    places = torch.tensor([[*range(10), *range(7)]] * 2)
    packed = hf_models.logits(model, input_ids=ids, position_ids=places, use_cache=False)
    alone = hf_models.logits(model, input_ids=ids[:, 10:])
    assert torch.allclose(packed[:, 10:], alone, atol=1e-5)


def test_gradients_with_checkpointing_are_those_without():
    grads = []
    for checkpointing in (False, True):
        model = with_tokens().train()
        if checkpointing:
            hf_models.checkpoint(model)
        ids = hf_models.inputs("llama")["input_ids"]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append(tokens_of(model).weight.grad)
    assert grads[0].abs().max() > 0
    assert torch.allclose(*grads, atol=1e-6)


def test_ids_may_stand_beside_embeddings():
    model = with_tokens()
    ids = hf_models.inputs("llama")["input_ids"]
    want = hf_models.logits(model, input_ids=ids)
    given = {"inputs_embeds": model.get_input_embeddings()(ids)}
    assert torch.equal(hf_models.logits(model, **given, token_ids=ids), want)
    with pytest.raises(ValueError, match="was called without input_ids: beside inputs_embeds"):
        model(**given)
    with pytest.raises(ValueError, match=r"must be \[2, 17\], as inputs_embeds, got \[2, 16\]"):
        model(**given, token_ids=ids[:, 1:])


def test_an_encoder_decoder_has_them_on_its_decoder():
    model = hf_models.make("whisper")
    found = attention_layers(model)
    numbers = [one.number for one in found if "decoder" in one.name and "self" in one.name]
    tokens = mc.nn.TokenKernels.like(model, layers=numbers)
    hf.patch(model, token_kernels=tokens)
    given = hf_models.inputs("whisper")
    came = hf_models.logits(hf_models.make("whisper"), **given)
    assert torch.allclose(hf_models.logits(model, **given), came, atol=1e-5)
    torch.nn.init.normal_(tokens.weight)
    assert not torch.allclose(hf_models.logits(model, **given), came, atol=1e-2)
    features = given["input_features"]
    for beams in (1, 2):
        how = {"max_new_tokens": 6, "num_beams": beams, "do_sample": False}
        want = model.generate(features, **how, use_cache=False)
        assert torch.equal(model.generate(features, **how), want)


def test_compiled_in_one_graph():
    torch.compiler.reset()
    model = with_tokens(layers=[0])
    del model.model.layers[1:]
    mask = hf_models.padded(17, left=True)
    given = hf_models.inputs("llama") | {"attention_mask": mask, "use_cache": False}
    want = hf_models.logits(model, **given)
    got = hf_models.logits(torch.compile(model, backend="eager", fullgraph=True), **given)
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vocab_size": 50}, "vocabulary of 50 tokens, but the model has 97"),
        ({"heads": 3}, "are for 3 heads, but layer 0 .* has 4"),
        ({"layers": [0, 5]}, "there is no attention layer 5: the model has layers 0 to 2"),
    ],
)
def test_token_kernels_that_do_not_fit(options, said):
    tokens = mc.nn.TokenKernels(**{"vocab_size": 97} | options)
    with pytest.raises(ValueError, match=said):
        hf.patch(hf_models.make("llama"), token_kernels=tokens)


def test_a_model_without_tokens_has_no_token_kernels():
    with pytest.raises(ValueError, match="sees no tokens with ids"):
        hf.patch(hf_models.make("vit"), token_kernels=mc.nn.TokenKernels(97))


def test_a_cache_that_another_model_has_filled():
    model, ids = with_tokens(), hf_models.inputs("llama")["input_ids"]
    cache = DynamicCache(config=model.config)
    hf_models.logits(hf_models.make("llama"), input_ids=ids, past_key_values=cache)
    with pytest.raises(ValueError, match="keys of 17 tokens, and the ids of 0"):
        model(input_ids=ids[:, :1], past_key_values=cache)


def test_a_cache_of_a_window_drops_neighbours():
    model = with_tokens("mistral")
    given = hf_models.inputs("mistral") | {"max_new_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match=r"past_key_values=DynamicCache\(\), which keeps all keys"):
        model.generate(**given)
    got = model.generate(**given, past_key_values=DynamicCache())
    assert torch.equal(got, model.generate(**given, use_cache=False))


def test_a_copy_has_token_kernels_of_its_own():
    model = with_tokens()
    want, twin = hf_models.logits(model, **hf_models.inputs("llama")), copy.deepcopy(model)
    torch.nn.init.normal_(tokens_of(model).weight)
    assert torch.equal(hf_models.logits(twin, **hf_models.inputs("llama")), want)
    host = copy.deepcopy(model.model.layers[0].self_attn.mercer)
    assert host.tokens is model.model.mercer_tokens
