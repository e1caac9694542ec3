"""Presets with the name of a published model: its parameters and its outputs, weights copied."""

import math

import pytest
import torch
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from mercer import models
from mercer.models import presets
from mercer.models.count import count

TOLERANCE = 1e-10


def on_meta(make, config):
    with torch.device("meta"):
        return sum(p.numel() for p in make(config).parameters())


def fill(model):
    """Every weight drawn, so that none can hide behind a zero or a one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model.double().eval()


def rename(state, names):
    """Tensors under other names: a name of theirs is replaced part by part."""
    found = {}
    for name, x in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = x
    return found


def draw(high, *shape):
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(1))


GPT2 = {
    "transformer.wte": "embed", "transformer.wpe": "input_position", "transformer.h.": "blocks.",
    "transformer.ln_f": "norm", "ln_1": "attention_norm", "ln_2": "feed_forward_norm",
    "attn.c_proj": "attention.out", "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down", "lm_head": "head",
}  # fmt: skip


def test_gpt2_small_is_gpt2():
    theirs = fill(
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=24, vocab_size=60))
    )
    config = presets.lm(
        "gpt2-small", vocab_size=60, num_layers=2, d_model=32, num_heads=4, context_length=24
    )
    ours = models.KernelLM(config).double().eval()
    state = {}
    for name, x in rename(theirs.state_dict(), GPT2).items():
        if "c_attn" in name:
            for part, own in zip(("query", "key", "value"), x.chunk(3, -1), strict=True):
                state[name.replace("attn.c_attn", f"attention.{part}")] = (
                    own.mT if x.dim() > 1 else own
                )
        elif x.dim() == 2 and name.startswith("blocks"):
            # Their linear maps are stored the other way around.
            state[name] = x.mT
        else:
            state[name] = x
    ours.load_state_dict(state)
    ids = draw(60, 2, 24)
    with torch.no_grad():
        want = theirs(ids, labels=ids)
        got = ours(ids, labels=ids)
    assert want.logits.std() > 0.3
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-6, atol=0)


def test_gpt2_small_has_the_parameters_of_gpt2():
    assert count(presets.lm("gpt2-small")).total == 124_439_808
    assert on_meta(GPT2LMHeadModel, GPT2Config()) == 124_439_808


VIT = {
    "vit.embeddings.cls_token": "class_token",
    "vit.embeddings.position_embeddings": "input_position.weight",
    "vit.embeddings.patch_embeddings.projection": "embed", "vit.layers.": "blocks.",
    "attention.q_proj": "attention.query", "attention.k_proj": "attention.key",
    "attention.v_proj": "attention.value", "attention.o_proj": "attention.out",
    "layernorm_before": "attention_norm", "layernorm_after": "feed_forward_norm",
    "mlp.fc1": "feed_forward.up", "mlp.fc2": "feed_forward.down", "vit.layernorm": "norm",
    "classifier": "head",
}  # fmt: skip
DEIT = {"hidden_act": "gelu", "layer_norm_eps": 1e-6, "num_labels": 1000}
SMALL = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}


def test_deit_is_a_vision_transformer_with_exact_gelu():
    shape = {"image_size": 12, "patch_size": 4, "num_labels": 7}
    theirs = fill(
        ViTForImageClassification(
            ViTConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
                **(DEIT | shape),
            )
        )
    )  # fmt: skip
    config = presets.vit("deit-tiny", d_model=32, num_heads=4, num_layers=2, **shape)
    ours = models.KernelViT(config).double().eval()
    state = rename(theirs.state_dict(), VIT)
    state["input_position.weight"] = state["input_position.weight"][0]
    ours.load_state_dict(state)
    images = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        want, got = theirs(images).logits, ours(images).logits
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "shape", "number"),
    [("deit-tiny", TINY, 5_717_416), ("deit-small", SMALL, 22_050_664)],
)
def test_deit_has_the_parameters_of_deit(name, shape, number):
    assert count(presets.vit(name)).total == number
    assert on_meta(ViTForImageClassification, ViTConfig(**DEIT, **shape)) == number


FSMT = {
    "model.encoder.layers.": "encoder.blocks.", "model.decoder.layers.": "blocks.",
    "self_attn_layer_norm": "attention_norm", "encoder_attn_layer_norm": "cross_norm",
    "final_layer_norm": "feed_forward_norm", "self_attn": "attention", "encoder_attn": "cross",
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "out",
    "fc1": "feed_forward.up", "fc2": "feed_forward.down",
    "model.encoder.embed_tokens": "encoder.embed", "model.decoder.output_projection": "head",
}  # fmt: skip


def test_iwslt_is_fairseqs_transformer():
    """With one vocabulary, and the sinusoids of the paper in place of fairseq's."""
    vocab, width, length = 40, 32, 11
    theirs = fill(
        FSMTForConditionalGeneration(
            FSMTConfig(
                langs=["de", "en"], src_vocab_size=vocab, tgt_vocab_size=vocab, d_model=width,
                encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
                encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=30,
                activation_function="relu", scale_embedding=True,
            )
        )
    )  # fmt: skip
    config = presets.translator(
        "iwslt", vocab_size=vocab, d_model=width, num_heads=4, d_ff=48, encoder_layers=2,
        decoder_layers=2,
    )  # fmt: skip
    ours = models.KernelTranslator(config).double().eval()
    # Theirs count from 2.
    table = torch.zeros(32, width).double()
    for i in range(30):
        for p in range(width // 2):
            angle = i / 10000 ** (2 * p / width)
            table[i + 2, 2 * p], table[i + 2, 2 * p + 1] = math.sin(angle), math.cos(angle)
    embedded = theirs.model.encoder.embed_tokens.weight.data
    for side in (theirs.model.encoder, theirs.model.decoder):
        side.embed_positions.weight.data = table
        side.embed_tokens.weight.data = embedded
    theirs.model.decoder.output_projection.weight.data = embedded
    state = theirs.state_dict()
    left = ("embed_positions", "decoder.embed_tokens")
    ours.load_state_dict(
        {n: x for n, x in rename(state, FSMT).items() if not any(part in n for part in left)}
    )
    source, target = draw(vocab, 2, length), draw(vocab, 2, length - 3)
    with torch.no_grad():
        # Their mask is a number that is only finite in float32.
        want = theirs.float()(source, decoder_input_ids=target, use_cache=False).logits
        got = ours.float()(source, decoder_input_ids=target).logits
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_iwslt_has_the_parameters_of_fairseqs_transformer():
    """Theirs has tables of sinusoids besides."""
    width, vocab, places = 512, 10_000, 1026
    theirs = on_meta(
        FSMTForConditionalGeneration,
        FSMTConfig(
            langs=["de", "en"], src_vocab_size=vocab, tgt_vocab_size=vocab, d_model=width,
            encoder_layers=6, decoder_layers=6, encoder_ffn_dim=1024, decoder_ffn_dim=1024,
            encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=1024,
            tie_word_embeddings=True,
        ),
    )  # fmt: skip
    ours = count(presets.translator("iwslt"), 64).total
    assert theirs - ours == 2 * places * width
    assert ours == 36_663_296


def test_positions_of_a_preset_give_way_to_those_that_are_named():
    for name in ("gpt2-small", "nano"):
        assert presets.lm(name, system="vaswani2017").input_position is None
        assert presets.lm(name, system="vaswani2017").position is None
        assert presets.lm(name, position="alibi").input_position is None
        assert presets.lm(name, kernel="RBF(on='position')").input_position is None
    kept = presets.lm("gpt2-small", kernel="RBF()")
    assert (kept.input_position, kept.system) == ("learned", None)
    both = presets.lm("gpt2-small", position="alibi", input_position="learned")
    assert (both.position, both.input_position) == ("alibi", "learned")
    assert presets.translator("iwslt", position="rotary").input_position is None
    assert presets.vit("deit-tiny", position="grid").input_position is None
    assert presets.vit("deit-tiny", system="vaswani2017").input_position is None
    assert presets.vit("deit-tiny", system="kundu2026").input_position == "learned"
