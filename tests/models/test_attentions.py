"""output_attentions: the weights of every layer, for every kernel; P v is what it projects."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from models.test_models import CASES, draw, make

import mercer as mc
from mercer import models, nn
from mercer.models import presets
from mercer.nn import weights as weighing
from mercer.term.layout import repeat


@contextlib.contextmanager
def watched(layers):
    """The inputs of attention layers, and what their output projections read."""
    calls, mixed = [], []

    def look(layer, args, kwargs):
        calls.append((layer, args, kwargs))

    hooks = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    hooks += [
        layer.out.register_forward_pre_hook(lambda m, a: mixed.append(a[0])) for layer in layers
    ]
    yield calls, mixed
    for hook in hooks:
        hook.remove()


def agree(given, calls, mixed):
    """P v, in heads, is what the projection reads."""
    assert len(given) == len(calls) == len(mixed) > 0
    for p, (layer, args, kwargs), out in zip(given, calls, mixed, strict=True):
        v = layer.parts(*args, **{n: x for n, x in kwargs.items() if n != "cache"})[2]
        v = repeat(v, p.shape[0], p.shape[1])
        torch.testing.assert_close((p @ v).transpose(1, 2).flatten(2), out, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_weights_times_values_are_the_output_of_a_language_model(case):
    model, ids = make(case, dtype=torch.float64), draw()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    for given in (None, mask):
        layers = [block.attention for block in model.blocks]
        with watched(layers) as (calls, mixed), torch.no_grad():
            out = model(ids, attention_mask=given, output_attentions=True)
        agree(out.attentions, calls, mixed)
        assert all(p.shape == (2, 2, 11, 11) for p in out.attentions)
        assert all(not p.triu(1).any() for p in out.attentions)
    assert model(ids).attentions is None


@pytest.mark.parametrize("case", [c for c in CASES if "token" not in c and c != "leng2026"])
def test_they_are_the_shares_of_the_kernel(case):
    """The Gram matrix, hidden keys left out, by the kernel's definition."""
    model, ids = make(case, dtype=torch.float64), draw(2, 9)
    layers = [block.attention for block in model.blocks]
    with watched(layers) as (calls, _), torch.no_grad():
        out = model(ids, output_attentions=True, use_cache=False)
        for p, (layer, args, kwargs) in zip(out.attentions, calls, strict=True):
            q, k, _, seen = layer.parts(*args, **kwargs)
            gram = layer.joined_kernel(q.repeat_heads(2), k.repeat_heads(2))
            gram = gram * seen.mask(9, 9, ids.device)
            torch.testing.assert_close(p, gram / gram.sum(-1, keepdim=True), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", ["dai2019", "kundu2026", "leng2026", "tokens on keys", "grouped"])
def test_decoding_gives_rows_of_the_whole_and_leaves_the_cache_alone(case):
    model, ids = make(case, dtype=torch.float64), draw(2, 11)
    cache = model.new_cache()
    with torch.no_grad():
        whole = model(ids, output_attentions=True)
        rows, logits = [], []
        for piece in ids.split([5, 1, 3, 2], 1):
            out = model(piece, past_key_values=cache, output_attentions=True)
            rows.append([F.pad(p, (0, 11 - p.shape[-1])) for p in out.attentions])
            logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, rtol=0, atol=1e-9)
    for layer, p in enumerate(whole.attentions):
        parts = torch.cat([row[layer] for row in rows], 2)
        torch.testing.assert_close(parts, p, rtol=0, atol=1e-9)


def test_segments_have_their_memory_and_long_inputs_say_so():
    model, ids = make("dai2019", dtype=torch.float64, segment_length=4), draw(1, 8)
    memory = model.new_memory()
    shapes = [
        model(part, memory=memory, output_attentions=True).attentions[0].shape
        for part in ids.split(4, 1)
    ]
    assert shapes == [(1, 2, 4, 4), (1, 2, 4, 8)]
    assert memory[0].seen == 8
    with pytest.raises(ValueError, match=r"needs one segment, at most 4 tokens.*got 8"):
        model(ids, output_attentions=True, use_cache=False)


def test_a_translator_has_three_kinds():
    config = presets.translator(
        "tiny", vocab_size=30, encoder_attention={"system": "tsai2019", "kernel": "RBF()"},
        decoder_attention={"system": "leng2026"}, cross_attention={"kernel": "Laplace()"},
    )  # fmt: skip
    model = models.KernelTranslator(config).double().eval()
    source, target = torch.randint(3, 30, (2, 7)), torch.randint(3, 30, (2, 5))
    mask = torch.ones_like(source)
    mask[0, :2] = 0
    each = {
        "encoder": [block.attention for block in model.encoder.blocks],
        "decoder": [block.attention for block in model.blocks],
        "cross": [block.cross for block in model.blocks],
    }
    for name, layers in each.items():
        with watched(layers) as (calls, mixed), torch.no_grad():
            out = model(source, mask, target, output_attentions=True, use_cache=False)
        agree(out[f"{name}_attentions"], calls, mixed)
    assert out.cross_attentions[0].shape == (2, 2, 5, 7)
    assert not out.cross_attentions[0][0, ..., 5:].any()
    made = model.generate(
        source, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, num_beams=2,
        do_sample=False, output_attentions=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert len(made.cross_attentions) == 3
    assert made.decoder_attentions[2][1].shape == (4, 2, 1, 3)
    assert made.encoder_attentions[0].shape == (2, 2, 7, 7)


def test_images_and_generation_and_the_config():
    model = models.KernelViT(presets.vit("tiny", kernel="RBF()")).double().eval()
    layers = [block.attention for block in model.blocks]
    pixels = torch.randn(2, 1, 8, 8).double()
    with watched(layers) as (calls, mixed), torch.no_grad():
        out = model(pixels, output_attentions=True)
    agree(out.attentions, calls, mixed)
    language, ids = make("rbf"), draw(1, 4)
    made = language.generate(
        ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True, pad_token_id=0
    )
    assert [step[0].shape for step in made.attentions] == [(1, 2, 4, 4), (1, 2, 1, 5)]
    language.config.output_attentions = True
    assert len(language(ids).attentions) == 2
    assert language(ids, output_attentions=False).attentions is None


def test_dropout_does_not_act_on_them_and_they_have_gradients():
    model, ids = make("rbf", attention_dropout=0.5).train(), draw()
    (p, _) = model(ids, output_attentions=True).attentions
    torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:3]))
    p.square().sum().backward()
    assert model.blocks[0].attention.kernel.log_bandwidth.grad.abs() > 0


def test_too_many_weights_are_refused(monkeypatch):
    monkeypatch.setattr(weighing, "MOST", 100)
    layer = nn.KernelAttention(8, 2, kernel=mc.RBF())
    assert nn.attention_weights(layer, torch.randn(1, 7, 8)).shape == (1, 2, 7, 7)
    with pytest.raises(ValueError, match="would be 1 x 2 x 8 x 8 numbers, more than 100"):
        nn.attention_weights(layer, torch.randn(1, 8, 8))
