"""What cannot be right is refused, each with one sentence that names it."""

import hf_models
import pytest
import torch
import transformers
from transformers import masking_utils

import mercer as mc
from mercer.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}
OUTSIDE = {
    "FalconModel": lambda: transformers.FalconConfig(**SMALL),
    "GPTJModel": lambda: transformers.GPTJConfig(
        vocab_size=97, n_embd=32, n_layer=1, n_head=4, rotary_dim=4
    ),
    "MptModel": lambda: transformers.MptConfig(vocab_size=97, d_model=32, n_layers=1, n_heads=4),
    "DebertaV2Model": lambda: transformers.DebertaV2Config(**SMALL),
}
OTHER_SCORES = {
    "T5Model": (
        lambda: transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, num_layers=1, num_heads=4),
        "adds a bias for each pair of positions",
    ),
    "GptOssModel": (
        lambda: transformers.GptOssConfig(**SMALL, num_key_value_heads=2, num_local_experts=2),
        "gives each head a sink",
    ),
    "Gemma2Model": (
        lambda: transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8),
        "caps the scores with tanh",
    ),
}


def refused(said, call):
    with pytest.raises(ValueError, match=said) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_model_outside_the_interface_is_refused_by_name(name):
    with torch.device("meta"):
        model = getattr(transformers, name)(OUTSIDE[name]())
    said = f"{name} computes its attention itself and not through transformers' AttentionInterface"
    refused(said, lambda: hf.patch(model, "RBF()"))


@pytest.mark.parametrize("name", OTHER_SCORES)
def test_a_model_with_other_scores_is_refused_by_name(name):
    config, said = OTHER_SCORES[name]
    with torch.device("meta"):
        model = getattr(transformers, name)(config())
    refused(
        rf"{name} cannot be patched: its attention \(.*\) {said}", lambda: hf.patch(model, "RBF()")
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "patch needs kernel="),
        ({"kernel": "RBF()", "layers": 3}, "no attention layer 3: the model has layers 0 to 2"),
        ({"kernel": "RBF()", "layers": "model.layer.0"}, "no attention layer 'model.layer.0'"),
        ({"kernel": "RBF()", "layers": []}, r"layers must be .* got \[\]"),
        ({"kernel": "RBF()", "layers": [0, None]}, "layers must be .* got None"),
        ({"kernel": "RBF()", "layers": 1.0}, "layers must be .* got 1.0"),
        ({"kernel": {7: "RBF()"}}, "there is no attention layer 7"),
        ({"kernel": {}}, "names no layer"),
        ({"kernel": {0: "RBF()"}, "layers": 0}, "names its layers: leave out layers="),
        ({"kernel": "RBF(heads=3)"}, r"does not fit layer 0 \(.*self_attn\), which has 4 heads"),
        ({"kernel": "ARD(5)"}, "which has 4 heads of 8 features: ARD was made for 5 features"),
        ({"kernel": 'RBF(on="position")'}, "reads the part 'position'"),
        ({"kernel": 3}, "a kernel must be text such as"),
        ({"kernel": "RFB()"}, "there is no kernel 'RFB'"),
        ({"kernel": "__import__('os').system('ls')"}, "is not a call such as"),
        ({"token_kernels": 3}, "token_kernels must be TokenKernels, got int"),
        ({"token_kernels": mc.nn.TokenKernels(97), "layers": 0}, "but there is no kernel"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_what_patch_does_not_take(options, said):
    model = hf_models.make("llama")
    refused(said, lambda: hf.patch(model, **options))
    # Nothing has changed.
    assert model.config._attn_implementation == "sdpa"
    assert not any("mercer" in name for name, _ in model.named_modules())


def test_what_is_no_model_of_transformers():
    refused("patch is for models of transformers", lambda: hf.patch(torch.nn.Linear(2, 2), "RBF()"))


def test_a_model_that_only_has_the_name():
    model = hf_models.make("llama")
    model.set_attn_implementation("mercer")
    refused("LlamaAttention was not patched", lambda: model(**hf_models.inputs("llama")))


def test_continuous_batching():
    model = hf.patch(hf_models.make("llama"), "RBF()")
    prompts = [[5, 6, 7], [8, 9]]
    refused("no continuous batching", lambda: model.generate_batch(prompts))
    refused("no continuous batching", model.init_continuous_batching)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (torch.zeros(2, 1, 17, 17), r"a mask of unknown origin, torch.float32 \[2, 1, 17, 17\]"),
        (torch.zeros(2, 4, 17, 17, dtype=torch.long), "a mask of unknown origin, torch.int64"),
    ],
)
def test_a_mask_of_unknown_origin(mask, said):
    model = hf.patch(hf_models.make("llama"), "RBF(heads=4)")
    given = hf_models.inputs("llama") | {"attention_mask": mask}
    refused(said, lambda: model(**given))


def test_a_boolean_mask_is_one_that_is_known():
    ids = hf_models.inputs("llama")["input_ids"]
    mask = torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    model = hf.patch(hf_models.make("llama"), "RBF(heads=4)")
    got = hf_models.logits(model, input_ids=ids, attention_mask=mask)
    assert torch.allclose(got, hf_models.logits(model, input_ids=ids), atol=1e-5)


def test_a_mask_function_that_is_not_known_becomes_a_table():
    came = hf_models.make("llama")
    patched = hf.patch(hf_models.make("llama"), "Exponential()")
    ids = hf_models.inputs("llama")["input_ids"]

    def first_five(batch, head, query, key):
        return key < 5

    for model in (came, patched):
        embedded = model.get_input_embeddings()(ids)
        masks = masking_utils.create_causal_mask(
            config=model.config, inputs_embeds=embedded, attention_mask=None, past_key_values=None,
            or_mask_function=first_five,
        )  # fmt: skip
        model.seen = masks
    assert isinstance(patched.seen, torch.Tensor)
    a = hf_models.logits(came, input_ids=ids, attention_mask=came.seen)
    b = hf_models.logits(patched, input_ids=ids, attention_mask=patched.seen)
    assert torch.equal(a, b)
    assert not torch.allclose(a, hf_models.logits(came, input_ids=ids), atol=1e-2)


def test_a_call_that_changes_the_scores():
    model = hf.patch(hf_models.make("llama"), "RBF(heads=4)")
    given = hf_models.inputs("llama")
    said = r"LlamaAttention cannot be patched: it caps the scores with tanh \(softcap\)"
    refused(said, lambda: model(**given, softcap=30.0))
