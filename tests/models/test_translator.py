"""The translator with every system: trained, decoded by beams, saved; padding and errors."""

import hf_models
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSeq2SeqLM

import mercer as mc
from mercer import nn as mn
from mercer import systems
from mercer.models import KernelTranslator, KernelTranslatorConfig, presets

VOCAB = 40
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24, "vocab_size": VOCAB, "context_length": 32}
COMPOSED = {
    "order apart": {
        "encoder_attention": {"kernel": "RBF(2.0)", "position": "product"},
        "decoder_attention": {"system": "dai2019"},
        "cross_attention": {"kernel": "RBF()", "position": "direct-sum"},
    },
    "after the sum": {"system": "kundu2026", "pre_norm": False, "input_position": "sinusoid"},
    "mixed layers": {"decoder_attention": {"system": ["leng2026", "shaw2018"]}},
}
CASES = {name: {"system": name} for name in systems.SYSTEMS} | COMPOSED


def make(case="vaswani2017", *, dtype=torch.float64, **more):
    fields = SIZES | {"encoder_layers": 1, "decoder_layers": 2} | CASES[case] | more
    return KernelTranslator(KernelTranslatorConfig(**fields)).to(dtype).eval()


def draw(batch=2, length=8):
    return torch.randint(3, VOCAB, (batch, length))


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_training_reaches_every_parameter(case):
    model, source, target = make(case).train(), draw(), draw(2, 6)
    target[1, 4:] = -100
    loss = model(source, labels=target).loss
    assert loss.isfinite()
    loss.backward()
    assert not [name for name, p in model.named_parameters() if p.grad is None]
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    assert model(source, labels=target).loss < loss


@pytest.mark.parametrize("case", CASES)
def test_the_decoder_does_not_see_what_it_will_write(case):
    model, source, target = make(case), draw(), draw(2, 7)
    later = target.clone()
    later[:, 4:] = draw(2, 3)
    a, b = (model(source, decoder_input_ids=ids).logits for ids in (target, later))
    assert torch.equal(a[:, :4], b[:, :4])
    assert not torch.equal(a[:, 4:], b[:, 4:])
    # But all of the source.
    changed = source.clone()
    changed[:, -1] = (changed[:, -1] - 2) % (VOCAB - 3) + 3
    assert not torch.equal(model(changed, decoder_input_ids=target).logits[:, :1], a[:, :1])


@pytest.mark.parametrize("case", CASES)
def test_beams_with_a_cache_equal_beams_without(case):
    model, source = make(case), draw(2, 8)
    mask = torch.ones_like(source)
    mask[1, 5:] = 0
    options = {"max_new_tokens": 6, "do_sample": False}
    for beams in (1, 3):
        found = model.generate(source, attention_mask=mask, num_beams=beams, **options)
        again = model.generate(
            source, attention_mask=mask, num_beams=beams, use_cache=False, **options
        )
        assert torch.equal(found, again)
    # The padded sentence is translated as if it were alone, wherever its padding stands.
    alone = model.generate(source[1:, :5], num_beams=3, **options)
    left = torch.cat([source[:1], F.pad(source[1:, :5], (3, 0))])
    shifted = model.generate(left, attention_mask=mask.flip(1), num_beams=3, **options)
    for batched in (found, shifted):
        assert torch.equal(batched[1, : alone.shape[1]], alone[0])


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_it_is_the_same(case, tmp_path):
    model, source, target = make(case, dtype=torch.float32), draw(), draw(2, 5)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is KernelTranslator
    with torch.no_grad():
        a, b = (m(source, labels=target) for m in (model, loaded))
    assert torch.equal(a.logits, b.logits)
    assert torch.equal(a.loss, b.loss)


def test_each_attention_has_its_own_parts():
    model = make("order apart")
    encoder, decoder = model.encoder.blocks[0].attention, model.blocks[0].attention
    cross = model.blocks[0].cross
    assert isinstance(encoder.position, mn.ProductKernel)
    assert isinstance(encoder.kernel, mc.RBF)
    assert isinstance(decoder.position, mn.RelativeSinusoid)
    assert isinstance(cross.position, mn.DirectSum)
    assert isinstance(cross.kernel, mc.RBF)
    assert (encoder.filter, decoder.filter, cross.filter) == (mc.Full(), mc.Memory(150), mc.Full())
    plain = make("kundu2026").blocks[0].cross
    assert isinstance(plain.position, mn.NoPosition)
    assert isinstance(plain.kernel, mc.Exponential)


def test_the_loss_is_that_of_the_labels():
    model, source, labels = make(), draw(), draw(2, 5)
    labels[0, 3:] = -100
    ids = model.prepare_decoder_input_ids_from_labels(labels)
    assert ids[:, 0].tolist() == [1, 1]
    assert ids[0].tolist() == [1, *labels[0, :3].tolist(), 0]
    out = model(source, labels=labels)
    torch.testing.assert_close(
        out.loss, F.cross_entropy(out.logits.float().flatten(0, 1), labels.flatten())
    )
    items = (labels != -100).sum()
    twice = model(source, labels=labels, num_items_in_batch=2 * items).loss
    torch.testing.assert_close(twice, out.loss / 2)


def test_gradient_checkpointing_changes_nothing():
    model, source, target = make("leng2026").train(), draw(), draw(2, 6)
    model(source, labels=target).loss.backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hf_models.checkpoint(model)
    model(source, labels=target).loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


ERRORS = {
    "cross-attention cannot decode a kernel of i - j": {"cross_attention": {"position": "alibi"}},
    "kundu2026 has no cross-attention": {"cross_attention": {"system": "kundu2026"}},
    "token kernels are for self-attention": {"cross_attention": {"system": "leng2026"}},
    "encoder has no part 'kernels'": {"encoder_attention": {"kernels": "RBF()"}},
    "cross-attention system must have one entry for each of 2 layers": {
        "cross_attention": {"system": ["lee2018"]}
    },
    "there is no system": {"system": "bahdanau2015"},
    "decoder_layers must be a whole number": {"decoder_layers": 0},
}


@pytest.mark.parametrize("said", ERRORS)
def test_it_says_what_is_wrong(said):
    with pytest.raises(ValueError, match=said):
        make(**ERRORS[said])


def test_inputs_that_do_not_fit():
    model, source = make("child2019"), draw()
    with pytest.raises(ValueError, match="needs decoder_input_ids or labels"):
        model(source)
    with pytest.raises(ValueError, match="needs input_ids"):
        model(labels=source)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 8\]"):
        model(source, attention_mask=torch.ones(2, 7), labels=source)
    with pytest.raises(ValueError, match="positions have 32 places, got 40"):
        model(draw(1, 40), labels=source[:1])
    with pytest.raises(ValueError, match="decoder_input_ids must be from 0 to 39"):
        model(source, decoder_input_ids=source + VOCAB)


def test_presets():
    iwslt = presets.translator("iwslt")
    assert (iwslt.encoder_layers, iwslt.decoder_layers) == (6, 6)
    assert (iwslt.d_model, iwslt.num_heads, iwslt.d_ff) == (512, 4, 1024)
    assert presets.translator("tiny", vocab_size=77).vocab_size == 77
    with pytest.raises(ValueError, match="no translator preset 'wmt'; there are: iwslt, tiny"):
        presets.translator("wmt")
