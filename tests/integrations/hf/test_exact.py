"""A patched model with softmax is the model as it came, bit for bit; other kernels are exact."""

import copy

import hf_models
import pytest
import torch
from transformers import DynamicCache

import mercer as mc
from mercer.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def pair(family, kernel="Exponential()"):
    model = hf_models.make(family)
    return model, hf.patch(copy.deepcopy(model), kernel)


@pytest.mark.parametrize("family", hf_models.MAKE)
def test_softmax_is_the_model_as_it_came(family):
    came, patched = pair(family)
    given = hf_models.inputs(family)
    assert torch.equal(hf_models.logits(came, **given), hf_models.logits(patched, **given))


@pytest.mark.parametrize("family", hf_models.MAKE)
def test_another_kernel_changes_the_model(family):
    came, patched = pair(family, "RBF(0.7, heads=4)")
    given = hf_models.inputs(family)
    a, b = hf_models.logits(came, **given), hf_models.logits(patched, **given)
    assert (a - b).abs().max() > 1e-3
    assert b.isfinite().all()


def test_patching_again_adds_to_it_and_takes_the_attention_back():
    model = hf_models.make("llama")
    given = hf_models.inputs("llama")
    want = hf_models.logits(
        hf.patch(copy.deepcopy(model), {0: "RBF(2.0)", 2: "Laplace()"}), **given
    )
    hf.patch(model, "RBF(2.0)", layers=0)
    model.set_attn_implementation("sdpa")
    hf.patch(model, "Laplace()", layers=[2])
    assert torch.equal(hf_models.logits(model, **given), want)
    assert model.config.mercer["kernels"] == {"0": "RBF(2.0)", "2": "Laplace()"}


def test_other_models_with_the_same_config_keep_their_attention():
    config = hf_models.make("llama").config
    one, other = (type(hf_models.make("llama"))(config).eval() for _ in range(2))
    given = hf_models.inputs("llama")
    want = hf_models.logits(other, **given)
    hf.patch(one, "RBF(heads=4)")
    assert torch.equal(hf_models.logits(other, **given), want)
    assert not hasattr(config, "mercer")


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
@pytest.mark.parametrize("family", hf_models.READERS)
def test_padding(family, left):
    came, patched = pair(family)
    mask = hf_models.padded(17, left=left)
    given = hf_models.inputs(family) | {"attention_mask": mask}
    a, b = hf_models.logits(came, **given), hf_models.logits(patched, **given)
    assert torch.equal(a[mask.bool()], b[mask.bool()])
    assert not torch.equal(b, hf_models.logits(patched, **hf_models.inputs(family)))


@pytest.mark.parametrize("family", hf_models.DECODERS)
def test_packed_sequences(family):
    came, patched = pair(family)
    places = torch.tensor([[*range(10), *range(7)]] * 2)
    given = hf_models.inputs(family) | {"position_ids": places, "use_cache": False}
    a, b = hf_models.logits(came, **given), hf_models.logits(patched, **given)
    assert torch.equal(a, b)
    alone = {"input_ids": given["input_ids"][:, 10:]}
    assert torch.allclose(b[:, 10:], hf_models.logits(came, **alone), atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "num_beams": 2},
        {"use_cache": False},
    ],
    ids=lambda how: "-".join(how) or "greedy",
)
@pytest.mark.parametrize("family", hf_models.DECODERS)
def test_generate(family, how):
    came, patched = pair(family)
    one = "prompt_lookup_num_tokens" in how
    given = hf_models.inputs(family, batch=1 if one else 2)
    if not one:
        given["attention_mask"] = hf_models.padded(17, left=True)
    given |= how | {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(came.generate(**given), patched.generate(**given))


def test_generate_of_an_encoder_decoder():
    came, patched = pair("whisper")
    given = {"input_features": hf_models.inputs("whisper")["input_features"], "max_new_tokens": 8}
    for how in ({"do_sample": False}, {"num_beams": 2}, {"cache_implementation": "static"}):
        assert torch.equal(came.generate(**given, **how), patched.generate(**given, **how))


def test_assisted_generation_with_a_second_model():
    came, patched = pair("llama", "RBF(heads=4)")
    given = hf_models.inputs("llama", batch=1) | {"max_new_tokens": 12, "do_sample": False}
    plain = patched.generate(**given)
    assert torch.equal(patched.generate(**given, assistant_model=came), plain)


@pytest.mark.parametrize(
    "kernel", ["RBF(1.5, heads=4)", "Laplace(2.0)", "Exponential() * ALiBi(4)"]
)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_a_cache_gives_what_the_whole_sequence_gives(family, kernel):
    if "ALiBi" in kernel:
        kernel = mc.Exponential() * mc.ALiBi([0.5, 0.2, 0.1, 0.05])
    patched = hf.patch(hf_models.make(family), kernel)
    ids = hf_models.inputs(family)["input_ids"]
    whole = hf_models.logits(patched, input_ids=ids)
    for static in (False, True):
        cache = hf_static(patched, 24) if static else DynamicCache(config=patched.config)
        parts = [
            hf_models.logits(patched, input_ids=part, past_key_values=cache)
            for part in ids.split([9, 1, 3, 4], 1)
        ]
        assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5)


def hf_static(model, length):
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=length)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_gradients_also_with_checkpointing(family):
    came, patched = pair(family)
    given = hf_models.inputs(family)
    given["labels"] = given["input_ids"]
    for model in (came, patched):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for name in ("attention_dropout", "attn_dropout"):
            for module in model.modules():
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
    hf_models.checkpoint(patched)
    came(**given).loss.backward()
    patched(**given).loss.backward()
    for (name, x), y in zip(came.named_parameters(), patched.parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), name
        if x.grad is not None:
            assert torch.allclose(x.grad, y.grad, atol=1e-6 + 1e-5 * x.grad.abs().max()), name


def shorten(model):
    """One layer, since every layer is compiled."""
    inner = getattr(model, model.base_model_prefix)
    layers = getattr(inner, "layers", None) or getattr(inner, "h", None) or inner.encoder.layer
    del layers[1:]
    return model


@pytest.mark.parametrize(
    ("family", "backend", "masked"),
    [
        ("llama", "aot_eager", True),
        ("llama", "eager", False),
        ("mistral", "eager", True),
        ("bert", "eager", True),
        ("gpt2", "eager", True),
    ],
)
def test_compiled_in_one_graph(family, backend, masked):
    torch.compiler.reset()
    came, patched = map(shorten, pair(family))
    run = torch.compile(patched, backend=backend, fullgraph=True)
    given, mask = hf_models.inputs(family), torch.ones(2, 17, dtype=torch.long)
    if masked:
        given["attention_mask"] = mask = hf_models.padded(17, left=family != "bert")
    a, b = hf_models.logits(run, **given), hf_models.logits(came, **given)
    assert torch.allclose(a[mask.bool()], b[mask.bool()], atol=1e-5)
