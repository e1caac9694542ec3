"""Presets with the name of a published model: its parameters and its outputs, weights copied."""

import copy
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


class TransformerXL(torch.nn.Module):
    """Transformer-XL as its authors wrote it: the shift of relative scores, u and v for all layers,
    a clamp of distances, adaptive softmax with a bias for each token; in evaluation."""

    def __init__(self, vocab, cutoffs, width, heads, inner, layers, clamp):
        super().__init__()
        self.edges, self.heads, self.clamp = [0, *cutoffs, vocab], heads, clamp
        self.embed = torch.nn.Embedding(vocab, width)
        self.r_w_bias = torch.nn.Parameter(torch.zeros(heads, width // heads))
        self.r_r_bias = torch.nn.Parameter(torch.zeros(heads, width // heads))
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({
                "qkv_net": torch.nn.Linear(width, 3 * width, bias=False),
                "r_net": torch.nn.Linear(width, width, bias=False),
                "o_net": torch.nn.Linear(width, width, bias=False),
                "attn_norm": torch.nn.LayerNorm(width),
                "up": torch.nn.Linear(width, inner),
                "down": torch.nn.Linear(inner, width),
                "ff_norm": torch.nn.LayerNorm(width),
            })
            for _ in range(layers)
        )  # fmt: skip
        self.out_bias = torch.nn.Parameter(torch.zeros(vocab))
        self.cluster = torch.nn.Linear(width, len(cutoffs))

    def forward(self, ids, memories):
        x = self.embed(ids) * self.embed.embedding_dim**0.5
        length, width = x.shape[1:]
        before = 0 if memories is None else memories[0].shape[1]
        away = torch.arange(before + length - 1, -1, -1.0).double().clamp(max=self.clamp)
        angles = away[:, None] / 10000 ** (torch.arange(0.0, width, 2).double() / width)
        r = torch.cat([angles.sin(), angles.cos()], -1)
        kept = []
        for n, layer in enumerate(self.layers):
            kept.append(x)
            whole = x if memories is None else torch.cat([memories[n], x], 1)
            x = layer["attn_norm"](x + self.attend(layer, x, whole, r))
            x = layer["ff_norm"](x + layer["down"](torch.relu(layer["up"](x))))
        return self.log_p(x), kept

    def attend(self, layer, x, whole, r):
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in layer["qkv_net"](whole).chunk(3, -1))
        q = q[:, -x.shape[1] :]
        r = layer["r_net"](r).unflatten(-1, (self.heads, -1))
        content = torch.einsum("bihd,bjhd->bhij", q + self.r_w_bias, k)
        place = self.shift(torch.einsum("bihd,jhd->bhij", q + self.r_r_bias, r))
        score = (content + place) / q.shape[-1] ** 0.5
        hidden = torch.ones(score.shape[-2:]).triu(1 + k.shape[1] - q.shape[1]).bool()
        share = score.masked_fill(hidden, -math.inf).softmax(-1)
        return layer["o_net"](torch.einsum("bhij,bjhd->bihd", share, v).flatten(2))

    @staticmethod
    def shift(x):
        padded = torch.cat([torch.zeros_like(x[..., :1]), x], -1)
        return padded.view(*x.shape[:2], x.shape[3] + 1, x.shape[2])[:, :, 1:].reshape(x.shape)

    def log_p(self, x):
        score = x @ self.embed.weight.T + self.out_bias
        first, *rest = self.edges[1:]
        head = torch.cat([score[..., :first], self.cluster(x)], -1).log_softmax(-1)
        each, low = [head[..., :first]], first
        for n, high in enumerate(rest):
            each.append(head[..., first + n, None] + score[..., low:high].log_softmax(-1))
            low = high
        return torch.cat(each, -1)


def xl_state(theirs, heads):
    """The weights under our names; theirs have sines before cosines, ours side by side."""
    state = {
        "relative_biases.content_bias": theirs.r_w_bias[:, None],
        "relative_biases.position_bias": theirs.r_r_bias[:, None],
        "head.cluster.weight": theirs.cluster.weight, "head.cluster.bias": theirs.cluster.bias,
        "head.token_bias": theirs.out_bias,
    }  # fmt: skip
    for n, (low, high) in enumerate(zip(theirs.edges[:-1], theirs.edges[1:], strict=True)):
        state[f"embed.tables.{n}.weight"] = theirs.embed.weight[low:high]
    for n, layer in enumerate(theirs.layers):
        own = f"blocks.{n}."
        q, k, v = layer["qkv_net"].weight.chunk(3)
        r = layer["r_net"].weight.unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)
        state |= {
            own + "attention.query.weight": q, own + "attention.key.weight": k,
            own + "attention.value.weight": v, own + "attention.out.weight": layer["o_net"].weight,
            own + "attention.position.kernel.weight": r.unflatten(0, (heads, -1)),
        }  # fmt: skip
        names = {"attention_norm": "attn_norm", "feed_forward_norm": "ff_norm"}
        names |= {"feed_forward.up": "up", "feed_forward.down": "down"}
        for ours, name in names.items():
            for part in ("weight", "bias"):
                state[f"{own}{ours}.{part}"] = getattr(layer[name], part)
    return state


def test_xl_base_is_transformer_xl():
    vocab, heads, length, clamp = 50, 4, 6, 7
    theirs = fill(TransformerXL(vocab, [12, 30], 32, heads, 48, 2, clamp))
    config = presets.lm(
        "xl-base", adaptive=True, vocab_size=vocab, cutoffs=[12, 30], d_model=32, num_heads=heads,
        num_layers=2, d_ff=48, context_length=length, memory_length=length, segment_length=length,
        system_options={"max_distance": clamp},
    )  # fmt: skip
    ours = models.KernelLM(config).double().eval()
    ours.load_state_dict(xl_state(theirs, heads))
    ids = draw(vocab, 2, 3 * length)
    memory, kept = ours.new_memory(), None
    with torch.no_grad():
        for segment in ids.split(length, 1):
            want, kept = theirs(segment, kept)
            got = ours(segment, memory=memory).logits
            assert want.std() > 0.3
            torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    # All distances of a segment and its memory, and none at all, are something else.
    for other in ({"max_distance": 2 * length}, {}):
        free = models.KernelLM(presets.lm(
            "xl-base", **(config_fields(config) | {"system_options": other})
        )).double().eval()  # fmt: skip
        free.load_state_dict(ours.state_dict())
        memory = free.new_memory()
        with torch.no_grad():
            parts = [free(segment, memory=memory).logits for segment in ids.split(length, 1)]
        assert (parts[-1] - got).abs().max() > 1e-3


def config_fields(config):
    return {
        name: getattr(config, name)
        for name in (
            "vocab_size", "cutoffs", "div", "d_model", "num_heads", "num_layers", "d_ff",
            "context_length", "memory_length", "segment_length",
        )
    }  # fmt: skip


def test_xl_base_has_the_parameters_of_transformer_xl():
    assert count(presets.lm("xl-base", adaptive=True)).total == 151_107_538
    theirs = on_meta(lambda sizes: TransformerXL(*sizes), (
        267_735, [20_000, 40_000, 200_000], 410, 10, 2100, 16, 400
    ))  # fmt: skip
    assert theirs == 151_107_538


def test_a_model_that_shares_its_biases_is_saved_copied_and_trained(tmp_path):
    config = presets.lm(
        "xl-base", vocab_size=20, d_model=32, num_heads=4, num_layers=2, d_ff=48,
        memory_length=4, segment_length=4, adaptive=True,
    )  # fmt: skip
    model = models.KernelLM(config)
    ids = draw(20, 2, 8)
    model(ids, labels=ids).loss.backward()
    shared = model.relative_biases
    assert shared.content_bias.grad.abs().max() > 0
    assert sum("_bias" in name for name, _ in model.named_parameters()) == 3
    assert model.head.token_bias.grad.abs().max() > 0
    with torch.no_grad():
        shared.content_bias.normal_()
        model.head.token_bias.normal_()
    model.eval().save_pretrained(tmp_path)
    want = model(ids[:, :4]).logits
    assert torch.equal(models.KernelLM.from_pretrained(tmp_path)(ids[:, :4]).logits, want)
    twin = copy.deepcopy(model)
    twin.relative_biases.content_bias.data.zero_()
    assert torch.equal(model(ids[:, :4]).logits, want)
    assert not torch.equal(twin(ids[:, :4]).logits, want)
    with pytest.raises(ValueError, match="share_biases is for RelativeSinusoid positions"):
        models.KernelLM(presets.lm("tiny", share_biases=True))


def test_a_head_may_have_a_bias():
    model = models.KernelLM(presets.lm("tiny", head_bias=True))
    assert model.head.bias.shape == (1024,)
    assert not model.head.bias.any()
    plain = models.KernelLM(presets.lm("tiny"))
    plain.load_state_dict({n: x for n, x in model.state_dict().items() if n != "head.bias"})
    model.head.bias.data.normal_()
    ids = draw(1024, 1, 5)
    torch.testing.assert_close(model(ids).logits, plain(ids).logits + model.head.bias)
