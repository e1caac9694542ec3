"""Memory: one model, whether it reads at once, in segments, step by step or behind padding."""

import pytest
import torch
from models.test_models import draw, logits_of, make

import mercer as mc
from mercer.models import presets

LENGTH, SEGMENT = 14, 4
SYSTEMS = [
    "dai2019", "shaw2018", "child2019", "parmar2018", "fixed", "kundu2026", "leng2026", "alibi",
    "tokens on keys", "mixed layers", "nano",
]  # fmt: skip


def build(name, **fields):
    if name == "fixed":
        options = {"pattern": "fixed", "stride": 3, "summary": 1}
        name, fields = "child2019", fields | {"system_options": options}
    return make(name, dtype=torch.float64, **{"segment_length": SEGMENT} | fields)


def by_segments(model, ids, length=SEGMENT, memory=None):
    memory = model.new_memory() if memory is None else memory
    return torch.cat([logits_of(model, part, memory=memory) for part in ids.split(length, 1)], 1)


def by_steps(model, ids, steps):
    cache = model.new_cache()
    return torch.cat([logits_of(model, x, past_key_values=cache) for x in ids.split(steps, 1)], 1)


def close(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "held"), [*((name, 3) for name in SYSTEMS), ("dai2019", 6), ("dai2019", None)]
)
def test_labels_a_cache_and_segments_give_the_same_logits(name, held):
    model, ids = build(name, memory_length=held), draw(2, LENGTH)
    want = by_segments(model, ids, memory=model.new_memory(held or SEGMENT))
    close(logits_of(model, ids, labels=ids), want)
    close(logits_of(model, ids, use_cache=False), want)
    close(logits_of(model, ids), want)
    close(by_steps(model, ids, [5, 1, 3, 2, 3]), want)
    # Behind padding a sequence has the segments that it has alone.
    for padding in (1, 3):
        mask = torch.cat([torch.zeros(2, padding), torch.ones(2, LENGTH)], 1).long()
        mask[1] = 1
        padded = torch.cat([draw(2, padding), ids], 1)
        close(logits_of(model, padded, attention_mask=mask)[0, padding:], want[0])


def test_a_memory_is_a_limit():
    """The test above compares nothing where all is seen."""
    ids = draw(1, LENGTH)
    limited = build("dai2019", memory_length=3)
    free = build("dai2019", segment_length=None)
    free.load_state_dict(limited.state_dict())
    apart = (logits_of(limited, ids) - logits_of(free, ids)).abs().amax((0, 2))
    assert apart[:SEGMENT].max() < 1e-9
    assert apart[SEGMENT:].min() > 1e-6


@pytest.mark.parametrize("name", ["dai2019", "leng2026", "fixed"])
def test_generated_text_is_that_of_the_labels(name):
    model, prompt = build(name, memory_length=3), draw(2, 5)
    options = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    ids = model.generate(prompt, **options)
    likely = logits_of(model, ids, labels=ids)[:, 4:-1].argmax(-1)
    assert torch.equal(ids[:, 5:], likely)
    assert torch.equal(model.generate(prompt, use_cache=False, **options), ids)
    padded = torch.cat([torch.zeros(2, 2).long(), prompt], 1)
    mask = (padded > 0).long()
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 2:], ids)


def test_a_memory_shows_what_it_holds():
    """Transformer-XL is evaluated with a longer memory than it was trained with."""
    ids = draw(1, LENGTH)
    model = build("dai2019", memory_length=3)
    longer = build("dai2019", memory_length=9)
    longer.load_state_dict(model.state_dict())
    want = by_segments(longer, ids)
    close(by_segments(model, ids, memory=model.new_memory(9)), want)
    assert (by_segments(model, ids) - want).abs().max() > 1e-6
    # Segments and memory of the call count, not those of the config.
    whole = build("dai2019", segment_length=None)
    whole.load_state_dict(model.state_dict())
    close(by_segments(model, ids, 5, model.new_memory(LENGTH)), logits_of(whole, ids))


def test_a_crop_of_the_cache_keeps_its_segments():
    """As after rejected guesses: the cache continues in an earlier segment."""
    model, ids = build("dai2019", memory_length=3), draw(1, LENGTH)
    cache = model.new_cache()
    logits_of(model, ids[:, :10], past_key_values=cache)
    cache.crop(7)
    got = logits_of(model, ids[:, 7:], past_key_values=cache)
    close(got, logits_of(model, ids, labels=ids)[:, 7:])


def test_gradients_stop_at_a_segment_where_there_are_labels():
    model, ids = build("dai2019", tie_word_embeddings=False), torch.arange(8)[None]
    (grad,) = torch.autograd.grad(model(ids, labels=ids).logits[:, 4:].sum(), model.embed.weight)
    assert not grad[:4].any()


def test_the_preset_of_transformer_xl():
    config = presets.lm(
        "xl-base", vocab_size=50, d_model=32, num_layers=2, num_heads=2, d_ff=32,
        context_length=6, memory_length=6, segment_length=6, adaptive=False,
    )  # fmt: skip
    from mercer.models import KernelLM

    model, ids = KernelLM(config).double().eval(), torch.randint(50, (1, 20))
    assert model.blocks[0].attention.filter == mc.Memory(6)
    want = by_segments(model, ids, 6)
    close(logits_of(model, ids), want)
    close(logits_of(model, ids, labels=ids), want)
