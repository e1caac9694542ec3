"""Parameters by part, operations and memory, counted without weights."""

import pytest
import torch

import mercer as mc
from mercer import models, systems
from mercer.models import presets
from mercer.models.count import count, visible_pairs

LENGTH = 64


def test_nano_has_the_parameters_of_the_paper():
    """83.9 + 419.4 + 393.2 million, and without W_Q, W_K, W_V and value embeddings 83.9 + 294.9."""
    baseline = count(presets.lm("nano", depth=20, vocab_size=32768))
    gaussian = count(presets.lm("nano", system="kundu2026", depth=20, vocab_size=32768))
    assert baseline.total == pytest.approx(896.5e6, rel=0.005)
    assert gaussian.total == pytest.approx(378.8e6, rel=0.005)
    assert gaussian.total / baseline.total == pytest.approx(0.42, abs=0.005)
    assert baseline.parameters["embedding"] + baseline.parameters["head"] == 2 * 32768 * 1280
    assert baseline.parameters["value-embedding"] == 10 * 32768 * 1280
    assert baseline.parameters["attention"] == 20 * 4 * 1280**2
    assert baseline.parameters["feed-forward"] == 20 * 8 * 1280**2
    assert gaussian.parameters["value-embedding"] == 0
    assert gaussian.parameters["attention"] == 20 * 1280**2
    assert gaussian.parameters["kernel"] == 20 * 10
    kept = presets.lm("nano", system="kundu2026", depth=20, value_embeddings=True)
    kept = count(kept).parameters
    assert kept == gaussian.parameters | {"value-embedding": 10 * 32768 * 1280}
    assert baseline.parameters["norm"] == 0
    assert gaussian.flops_per_token < baseline.flops_per_token


def test_published_sizes():
    # Transformer-XL's authors say 151 M.
    assert count(presets.lm("xl-base", adaptive=True)).total == pytest.approx(151e6, rel=0.005)
    # fairseq's shape: 12 attentions of an encoder-decoder are 18 here, 6 of them crossed.
    iwslt = count(presets.translator("iwslt"), LENGTH)
    assert iwslt.parameters["attention"] == 18 * 4 * (512**2 + 512)


@pytest.mark.parametrize("name", systems.SYSTEMS)
def test_the_parts_add_up(name):
    config = presets.lm("tiny", system=name)
    counted = count(config, LENGTH)
    model = models.KernelLM(config)
    assert counted.total == sum(p.numel() for p in model.parameters())
    assert count(model, LENGTH) == counted
    assert (counted.parameters["token-kernels"] > 0) == (name == "leng2026")


def test_flops_by_hand():
    """Full attention on rows of 64: linear maps by their weights, 2 (D + V) a head and pair."""
    config = presets.lm("tiny", system="lee2018", vocab_size=100)
    maps = 2 * (4 * 64**2 + 2 * 64 * 256) + 64 * 100
    pairs = 2 * (LENGTH + 1) / 2 * 2 * (32 + 32)
    assert count(config, LENGTH).flops_per_token == 3 * 2 * (maps + pairs)
    # One number a key more, and no projections of queries, keys and values.
    gaussian = presets.lm("tiny", system="kundu2026", vocab_size=100)
    maps = 2 * (64**2 + 2 * 64 * 256) + 64 * 100
    pairs = 2 * (LENGTH + 1) / 2 * 2 * (33 + 32)
    assert count(gaussian, LENGTH).flops_per_token == 3 * 2 * (maps + pairs)
    # A table of 33 rows, for each head.
    shaw = presets.lm("tiny", system="shaw2018", vocab_size=100)
    more = count(shaw, LENGTH).flops_per_token - count(config, LENGTH).flops_per_token
    assert more == 3 * 2 * 2 * 2 * 33 * 32
    # A causal table has the distances from 0 to 512 alone, for each head.
    huang = presets.lm("tiny", system="huang2018", vocab_size=100)
    more = count(huang, LENGTH).flops_per_token - count(config, LENGTH).flops_per_token
    assert more == 3 * 2 * 2 * 2 * 513 * 32
    assert count(huang, LENGTH).parameters["kernel"] == 2 * 2 * 513 * 32
    seen = count(presets.vit("tiny", system="huang2018")).parameters["kernel"]
    assert seen == 2 * 2 * 1025 * 32
    # Three taps on the values.
    tokens = presets.lm("tiny", system="leng2026", vocab_size=100)
    base = presets.lm("tiny", system="vaswani2017", vocab_size=100)
    more = count(tokens, LENGTH).flops_per_token - count(base, LENGTH).flops_per_token
    assert more == 3 * 2 * 2 * 3 * 64


def test_pairs_are_those_the_filter_shows():
    filters = (
        mc.Causal(),
        mc.Window(5, 0),
        mc.Strided(4),
        mc.Full(),
        mc.Window(3, 2) | mc.Fixed(4),
    )
    for filter in filters:
        assert visible_pairs(filter, 33) == int(filter.mask(33, 33).sum())
    # The mean over heads that see different keys: 33 pairs, and 33 * 34 / 2.
    assert visible_pairs(mc.Heads([mc.Window(0, 0), mc.Causal()]), 33) == (33 + 33 * 17) / 2
    short = presets.lm("nano", depth=2, context_length=LENGTH, short_window=8)
    long = presets.lm("nano", depth=2, context_length=LENGTH, windows=None)
    assert count(short).flops_per_token < count(long).flops_per_token


def test_memory_grows_with_the_batch_and_the_states():
    counted = count(presets.lm("tiny"), LENGTH)
    assert counted.memory_bytes(optimizer=None) == 4 * counted.total
    assert counted.memory_bytes(optimizer=None, dtype=torch.bfloat16) == 2 * counted.total
    adam, none = (counted.memory_bytes(4, optimizer=name) for name in ("adamw", "none"))
    assert adam - none == 8 * counted.total
    assert counted.memory_bytes(8) > counted.memory_bytes(4)
    assert counted.memory_bytes(8, torch.bfloat16) < counted.memory_bytes(8)
    with pytest.raises(ValueError, match="optimizer must be one of adamw"):
        counted.memory_bytes(optimizer="lion")
    with pytest.raises(ValueError, match="length must be at least 1"):
        count(presets.lm("tiny"), 0)
    assert "total" in str(counted)
    assert "FLOPs per token" in str(counted)


def test_segments_see_what_they_remember():
    """All but the first of 40 see 150 more places, and compute their keys and values again."""
    config = presets.lm("xl-base")
    long, short = (count(config, length) for length in (6000, 150))
    pairs = 150 * 39 / 40
    # A head's content and value, and the sinusoids, which are as wide as the model.
    pair = 2.0 * config.num_heads * (41 + 41 + 410)
    again = 2.0 * 2 * config.d_model**2 * 39 / 40
    extra = config.num_layers * (pair * pairs + again)
    assert (long.flops_per_token - short.flops_per_token) / 3 == pytest.approx(extra, rel=1e-6)
