"""The report of a patched model, and the weights that people plot, against their definitions."""

import hf_models
import pytest
import torch

import mercer as mc
from mercer.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def patched():
    """RBF in layer 0, token kernels in layer 2, and softmax as it came elsewhere."""
    model = hf.patch(hf_models.make("llama"), "RBF(1.3, heads=4)", layers=0)
    tokens = mc.nn.TokenKernels.like(model, size=3, on="v", layers=[2], heads=4)
    hf.patch(model, token_kernels=tokens)
    torch.nn.init.normal_(tokens.weight, std=0.3)
    return model, tokens


def test_numbers_of_heads_are_those_of_the_weights():
    model, tokens = patched()
    ids = hf_models.inputs("llama")["input_ids"]
    rows = hf.report(model, ids)
    assert [(row.layer, row.head) for row in rows] == [
        (f"model.layers.{layer}.self_attn", head) for layer in range(3) for head in range(4)
    ]
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True).attentions)[:2].double()
    entropy = torch.special.entr(weights).sum(-1).exp().mean((1, 3)).flatten()
    assert [row.neighbours for row in rows[:8]] == pytest.approx(entropy.tolist(), rel=1e-4)
    alone = weights.diagonal(dim1=-2, dim2=-1).mean((1, 3)).flatten()
    assert [row.self_weight for row in rows[:8]] == pytest.approx(alone.tolist(), rel=1e-4)
    assert [row.bandwidth for row in rows] == pytest.approx([1.3] * 4 + [None] * 8)
    away = tokens.deviations()[ids.flatten(), 0, 0].mean(0)
    assert [row.deviation for row in rows] == pytest.approx([None] * 8 + away.tolist())


def test_text_needs_a_tokenizer():
    model, _ = patched()

    def tokenizer(text):
        return {"input_ids": [ord(letter) % 97 for letter in text]}

    rows = hf.report(model, "a text of letters", tokenizer=tokenizer, length=6)
    assert {row.visible for row in rows} == {3.5}
    with pytest.raises(ValueError, match=r"it does not say where it came from: give tokenizer="):
        hf.report(model, "a text of letters")
    with pytest.raises(ValueError, match="the text has no tokens"):
        hf.report(model, "", tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            torch.zeros(1, 0, dtype=torch.long),
            r"ids must be whole numbers \[B, T\], got .* \[1, 0\]",
        ),
        (torch.zeros(3, dtype=torch.long), r"ids must be .* \[3\]"),
        (torch.zeros(1, 3), "ids must be .* got torch.float32"),
        (torch.full((1, 3), 97), "token id 97 is outside the model's 97 tokens"),
        ([5, 6], "a report reads text, ids .* got list"),
    ],
)
def test_what_is_no_text(text, said):
    with pytest.raises(ValueError, match=said):
        hf.report(patched()[0], text)


def test_layers_of_cross_attention_have_no_distance():
    model = hf.patch(hf_models.make("whisper"), "RBF(heads=4)")
    rows = hf.report(model, hf_models.inputs("whisper"))
    assert len(rows) == 6 * 4
    assert {row.layer for row in rows if row.distance is None} == {
        f"model.decoder.layers.{n}.encoder_attn" for n in (0, 1)
    }


def test_only_patched_models_have_a_report():
    with pytest.raises(ValueError, match="is not patched"):
        hf.report(hf_models.make("llama"), torch.ones(1, 4, dtype=torch.long))


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bert", "modernbert", "vit"])
def test_output_attentions_gives_the_true_weights(family):
    given = hf_models.inputs(family) | {"output_attentions": True}
    came = hf_models.make(family)
    came.set_attn_implementation("eager")
    patched = hf.patch(hf_models.make(family), "Exponential()")
    with torch.no_grad():
        want, got = came(**given).attentions, patched(**given).attentions
    assert len(got) == len(want) == 3
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_output_attentions_of_an_encoder_decoder():
    given = hf_models.inputs("whisper") | {"output_attentions": True}
    came = hf_models.make("whisper")
    came.set_attn_implementation("eager")
    patched = hf.patch(hf_models.make("whisper"), "Exponential()")
    with torch.no_grad():
        want, got = came(**given), patched(**given)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(got[name]) == len(want[name]) == 2
        for a, b in zip(got[name], want[name], strict=True):
            assert torch.allclose(a, b, atol=1e-6)


def test_weights_with_token_kernels_give_the_output():
    model, _ = patched()
    host, seen = model.model.layers[2].self_attn.mercer, []
    host.register_forward_hook(
        lambda m, args, named, out: seen.append((args, out)), with_kwargs=True
    )
    ids = hf_models.inputs("llama")["input_ids"]
    with torch.no_grad():
        model(ids, output_attentions=True)
    ((_, _, v), (out, weights)) = seen[0]
    assert torch.allclose(weights @ v.repeat_interleave(2, 1), out, atol=1e-5)


def test_tables_of_inspect_read_a_patched_model():
    model, _ = patched()
    ids = hf_models.inputs("llama")["input_ids"]
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    for one, want in zip(mc.inspect.rows(model, ids, [3, 16]), weights, strict=True):
        assert torch.allclose(one.weights, want[0, :, [3, 16]], atol=1e-6)


def test_long_sequences_have_no_table_of_weights(monkeypatch):
    from mercer.integrations.hf import weights

    monkeypatch.setattr(weights, "MOST_KEYS", 16)
    model, _ = patched()
    with pytest.raises(ValueError, match="at most 16 keys, got 17"):
        model(**hf_models.inputs("llama"), output_attentions=True)
