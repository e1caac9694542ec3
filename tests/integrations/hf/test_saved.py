"""A saved model comes back exactly; what does not belong together is refused."""

import json
import logging

import hf_models
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mercer as mc
from mercer.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def patched(family="llama", **options):
    """A patched model whose new parameters have moved."""
    options = {"kernel": "RBF(2.0, heads=4)"} | options
    model = hf.patch(hf_models.make(family), **options)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "mercer" in name:
                x.add_(torch.randn_like(x) / 10)
    return model


def logits(model, family="llama"):
    return hf_models.logits(model, **hf_models.inputs(family))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit", "whisper"])
def test_a_round_trip_is_exact(family, tmp_path):
    model = patched(family)
    hf.save(model, tmp_path)
    loaded = hf.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.architectures == [type(model).__name__]
    assert torch.equal(logits(loaded, family), logits(model, family))
    hf.save(loaded, tmp_path / "again")
    again = hf.from_pretrained(tmp_path / "again")
    assert again.config.mercer == model.config.mercer
    assert torch.equal(logits(again, family), logits(model, family))


def test_some_layers_and_token_kernels(tmp_path):
    model = hf_models.make("llama")
    tokens = mc.nn.TokenKernels.like(model, size=3, on="kv", layers=[0, 2])
    patched_ = hf.patch(model, {1: "Cosine(3.0)", "model.layers.2": mc.RBF(1.5)})
    hf.patch(patched_, token_kernels=tokens)
    torch.nn.init.normal_(tokens.weight)
    hf.save(model, tmp_path)
    loaded = hf.from_pretrained(tmp_path)
    assert loaded.config.mercer["kernels"] == {"1": "Cosine(3.0)", "2": "RBF(1.5)"}
    assert torch.equal(logits(loaded), logits(model))


def test_a_kernel_that_was_replaced_by_hand_is_saved(tmp_path):
    model = patched()
    model.model.layers[1].self_attn.mercer.set(mc.Laplace(3.0))
    hf.save(model, tmp_path)
    assert torch.equal(logits(hf.from_pretrained(tmp_path)), logits(model))


def test_half_precision_keeps_bandwidths(tmp_path):
    model = patched()
    tokens = mc.nn.TokenKernels.like(model)
    hf.patch(model, token_kernels=tokens)
    hf.save(model, tmp_path)
    for half in (model.bfloat16(), hf.from_pretrained(tmp_path, dtype=torch.bfloat16)):
        kinds = {n: x.dtype for n, x in half.named_parameters()}
        assert {x for n, x in kinds.items() if "mercer" in n} == {torch.float32}
        assert {x for n, x in kinds.items() if "mercer" not in n} == {torch.bfloat16}
        assert logits(half).isfinite().all()


def test_a_plain_loading_says_what_it_drops(tmp_path, caplog):
    hf.save(patched(kernel="Cosine(3.0)"), tmp_path)
    logger = logging.getLogger("transformers")
    logger.propagate = True
    with caplog.at_level("WARNING"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    logger.propagate = False
    assert "load_with_mercer_integrations_hf" in caplog.text
    assert "UNEXPECTED" in caplog.text


def test_a_vanilla_checkpoint_gets_its_bandwidths(tmp_path):
    model = hf_models.make("llama")
    model.save_pretrained(tmp_path)
    loaded = hf.from_pretrained(tmp_path, kernel="RBF(2.0, heads=4)", layers=[1])
    log = loaded.model.layers[1].self_attn.mercer.kernel.log_bandwidth
    assert torch.allclose(log.exp(), torch.full((4,), 2.0))
    assert torch.equal(logits(loaded), logits(hf.patch(model, "RBF(2.0, heads=4)", layers=[1])))
    with pytest.raises(ValueError, match="was not saved by mercer: give kernel="):
        hf.from_pretrained(tmp_path)


def test_on_the_meta_device():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**hf_models.GROUPED))
        hf.patch(model, "RBF(2.0, heads=4)")
    model.to_empty(device="cpu")
    log = model.model.layers[0].self_attn.mercer.kernel.log_bandwidth
    assert torch.allclose(log.exp(), torch.full((4,), 2.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_new_parameters_are_where_the_model_is():
    model = patched(token_kernels=mc.nn.TokenKernels(97)).cuda()
    again = hf.patch(hf_models.make("llama").cuda(), "RBF(heads=4)", start="as-softmax")
    hf.patch(again, token_kernels=mc.nn.TokenKernels(97))
    for one in (model, again):
        assert {x.device.type for x in one.parameters()} == {"cuda"}
        assert one(hf_models.inputs("llama")["input_ids"].cuda()).logits.isfinite().all()


def test_a_class_may_be_named(tmp_path):
    hf.save(patched(), tmp_path)
    for kind in (transformers.AutoModel, transformers.LlamaModel):
        assert type(hf.from_pretrained(tmp_path, model_class=kind)) is transformers.LlamaModel
    for kind, said in (
        (transformers.GPT2LMHeadModel, "for a LlamaConfig, got GPT2LMHeadModel"),
        ("LlamaModel", "for a LlamaConfig, got 'LlamaModel'"),
        (
            transformers.AutoModelForSeq2SeqLM,
            "AutoModelForSeq2SeqLM has no class for a LlamaConfig",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            hf.from_pretrained(tmp_path, model_class=kind)


@pytest.mark.parametrize("name", ["Nothing", "GPT2LMHeadModel", "pipeline"])
def test_a_checkpoint_may_not_name_any_class(name, tmp_path):
    hf.save(patched(), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"architectures": [name]}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"names {name}, which is none .* for a LlamaConfig"):
        hf.from_pretrained(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    for path, said in ((tmp_path / "gone", "no such folder"), (tmp_path, "cannot be loaded")):
        with pytest.raises(ValueError, match=said) as caught:
            hf.from_pretrained(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_kernel_of_ones_own_needs_trust(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import mercer as mc\nclass Near(mc.RBF):\n    pass\n", encoding="utf-8"
    )
    model = hf.patch(hf_models.make("llama"), "mine.py:Near(2.0)", trust_kernels="mine.py")
    hf.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="if you trust this file"):
        hf.from_pretrained(tmp_path / "saved")
    loaded = hf.from_pretrained(tmp_path / "saved", trust_kernels="mine.py")
    assert torch.equal(logits(loaded), logits(model))


def test_a_kernel_without_text_is_not_saved(tmp_path):
    model = hf.patch(hf_models.make("llama"), mc.Lookup(torch.zeros(5, 8)))
    with pytest.raises(ValueError, match="has no text form"):
        hf.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_only_patched_models_are_saved(tmp_path):
    with pytest.raises(ValueError, match="is not patched"):
        hf.save(hf_models.make("llama"), tmp_path)


def test_token_kernels_of_another_vocabulary_are_not_saved(tmp_path):
    model = patched()
    hf.patch(model, token_kernels=mc.nn.TokenKernels.like(model))
    model.resize_token_embeddings(120)
    with pytest.raises(ValueError, match="vocabulary of 97 tokens, but the model has 120"):
        hf.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def tokens(**change):
    """The entry of token kernels in a config, with a change."""
    plain = {"vocab_size": 97, "size": 3, "on": "v", "heads": None, "layers": None}
    rest = {"temperature": None, "boundary": "shrink", "start": 10.0}
    return {"token_kernels": plain | rest | change}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernels": {"0": "__import__('os')"}}, "there is no kernel '__import__'"),
        ({"kernels": {"7": "RBF()"}}, "there is no attention layer 7"),
        ({"kernels": {"one": "RBF()"}}, "is no number of a layer"),
        ({"kernels": {"0": "RBF(heads=3)"}}, "has 4 heads"),
        ({"kernels": {"0": 3}}, "kernels must be"),
        ({"kernels": {"0": "RBF()", "1": "RBF()", "2": "RBF()"}}, "its config says"),
        ({"kernels": {"0": "Cosine()"}}, "which its config does not name"),
        ({"kernels": None}, "kernels must be"),
        ({"version": 2}, "its version is 2"),
        ({"code": "os"}, "'code', which is none of version"),
        ({"token_kernels": {"size": 3}}, "vocab_size is missing"),
        (tokens(vocab_size=50), "vocabulary of 50 tokens, but the model has 97"),
        (tokens(vocab_size=10**13), "vocabulary of 10000000000000 tokens, but the model has 97"),
        (tokens(size=10**9 + 1), "1,000,000,001 taps for each token, more than 65,536"),
        (tokens(layers=10**9), "3,000,000,000 taps for each token, more than 65,536"),
        (tokens(heads=3), "are for 3 heads, but layer 0"),
        (tokens(layers=[0, 9]), "there is no attention layer 9"),
        (tokens(heads=True), "heads must be int"),
    ],
)  # fmt: skip
def test_a_config_that_was_changed_is_refused(tmp_path, change, said):
    hf.save(patched(), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["mercer"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said) as caught:
        hf.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_our_weights_is_refused(tmp_path):
    model = patched()
    state = {n: x for n, x in model.state_dict().items() if "mercer" not in n}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="has no weights of Mercer"):
        hf.from_pretrained(tmp_path)
