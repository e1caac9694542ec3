"""Token kernels, curves of training and pictures as data."""

import json
import math
import sys

import pytest
import torch

import mercer as mc
from mercer import inspect
from mercer import nn as mn

TEXTS = (" the", " cat", " dog", " run", "ing", "\n")
TABLE = {"the": "DET", "cat": "NOUN", "dog": "NOUN", "run": "VERB"}


def make(size=3, **options):
    tokens = mn.TokenKernels(6, size, temperature=None, **options)
    with torch.no_grad():
        tokens.weight[0, ..., -1] += 0.5  # "the" reads the token after it
        tokens.weight[1, ..., 0] += 0.25  # "cat" the one before
    return tokens


def test_a_row_for_each_token():
    counts = torch.tensor([5, 3, 2, 1, 1, 0])
    words = inspect.words_from(TEXTS)
    assert words == {0: "the", 1: "cat", 2: "dog", 3: "run", 4: "ing"}
    tags = inspect.tags_by_id(words, TABLE)
    found = inspect.tokens(make(), TEXTS, counts=counts, tags=tags)
    assert len(found) == 6
    the, cat, dog = found[:3]
    assert (the.id, the.text, the.count, the.tag) == (0, " the", 5, "DET")
    assert the.kernel == pytest.approx((0, 1, 0.5))
    assert (the.deviation, the.direction) == pytest.approx((0.5, 0.5))
    assert (cat.deviation, cat.direction) == pytest.approx((0.25, -0.25))
    assert (dog.deviation, dog.direction, found[5].tag) == (0, 0, None)


def test_words_are_those_of_the_text():
    assert inspect.words_from(TEXTS, "the cat ran\nthe run") == {1: "cat", 3: "run"}


def test_several_kernels_of_a_token_are_averaged_and_layers_may_hold_them():
    tokens = mn.TokenKernels(6, 5, temperature=None, layers=2, on="kv", heads=2)
    with torch.no_grad():
        tokens.weight[0, 0, 0, 0, 4] = 0.8
    layer = mn.KernelAttention(8, 2, tokens=tokens)
    found = inspect.tokens(layer)
    assert found[0].text == "0"
    assert found[0].count is None
    assert found[0].kernel == pytest.approx((0, 0, 1, 0, 0.1))
    assert found[0].deviation == pytest.approx(0.1)
    held = mn.KernelAttention(8, 2)
    object.__setattr__(held, "tokens", tokens)
    assert inspect.tokens(held)[0] == found[0]


def test_parts_of_speech_have_mean_spread_and_words():
    tokens = make()
    found = inspect.summarise_tags(
        tokens, inspect.words_from(TEXTS), TABLE, published="shakes", minimum=1
    )
    assert [row.tag for row in found] == ["DET", "NOUN", "VERB"]
    noun = found[1]
    assert (noun.tokens, noun.mean, noun.spread) == (2, 0.125, 0.125)
    assert noun.direction == pytest.approx(-0.125)
    assert (noun.most, noun.least) == (("cat", "dog"), ("dog", "cat"))
    assert (found[0].published, noun.published) == (0.0520, 0.0009)
    rows = inspect.by_tag(tokens.deviation(), inspect.words_from(TEXTS), TABLE, minimum=1)
    assert [(r.tag, r.tokens) for r in rows] == [(r.tag, r.tokens) for r in found]
    assert [r.mean for r in rows] == pytest.approx([r.mean for r in found])
    with pytest.raises(ValueError, match="published must be shakes or victorian, got 'x'"):
        inspect.summarise_tags(tokens, {}, TABLE, published="x")


def test_a_model_without_token_kernels_and_lists_of_another_length():
    with pytest.raises(ValueError, match="no token kernels in KernelAttention"):
        inspect.tokens(mn.KernelAttention(8, 2))
    with pytest.raises(ValueError, match="texts must have one for each of the 6 tokens, got 2"):
        inspect.tokens(make(), ["a", "b"])
    with pytest.raises(ValueError, match="counts must have one for each"):
        inspect.tokens(make(), counts=[1, 2])


def test_curves_are_read_from_a_journal(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0, "learning_rate": 0.1, "tokens": 10, "grad_norm": None},
        {"step": 1, "eval_loss": 2.9, "bandwidths": {"blocks.0": [1.0, 2.0]}, "prompt": "a"},
        {"step": 2, "loss": 2.5, "learning_rate": 0.05, "tokens": 20},
        {"step": 2, "eval_loss": float("nan"), "bandwidths": {"blocks.0": [1.5, None]}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    found = inspect.curves(tmp_path)
    assert {curve.name: (curve.steps, curve.values) for curve in found} == {
        "loss": ((1, 2), (3.0, 2.5)),
        "learning_rate": ((1, 2), (0.1, 0.05)),
        "eval_loss": ((1,), (2.9,)),
        "bandwidth blocks.0 0": ((1, 2), (1.0, 1.5)),
        "bandwidth blocks.0 1": ((1,), (2.0,)),
    }
    assert found.find("loss").unit == "nats per token"
    assert found.find("x") is None
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl"):
        inspect.curves(tmp_path / "nowhere")


def test_tables_as_text_dictionaries_and_frames():
    found = inspect.tokens(make(), TEXTS)
    assert str(found).splitlines()[0].split() == ["id", "text", "kernel", "deviation", "direction"]
    assert str(found).splitlines()[1].split()[:2] == ["0", "the"]
    assert json.loads(json.dumps(found.as_dicts()))[1]["kernel"] == pytest.approx([0.25, 1, 0])
    assert inspect.Curves(()).as_dicts() == []
    assert str(inspect.Curves(())) == "(nothing)"
    pandas = pytest.importorskip("pandas")
    frame = found.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == list(found.columns)
    assert frame.deviation.max() == pytest.approx(0.5)
    layer = mn.KernelAttention(8, 2, filter=mc.Causal())
    torch.manual_seed(0)
    frame = inspect.rows(layer, torch.randn(1, 4, 8), [1]).to_pandas()
    assert len(frame) == 4
    assert frame.weight.sum() == pytest.approx(2, abs=1e-5)


def test_without_pandas_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        inspect.tokens(make()).to_pandas()


def test_every_table_draws_itself():
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    layer = mn.KernelAttention(
        8, 2, kernel=mc.AdaptiveRBF(4, heads=2), position="alibi", filter=mc.Causal()
    )
    x = torch.randn(1, 6, 8)
    heads = inspect.heads(layer, x)
    axes = heads.plot(of="distance")
    assert axes.images[0].get_array().shape == (1, 2)
    with pytest.raises(ValueError, match="of must be one of neighbours"):
        heads.plot(of="colour")
    axes = inspect.rows(layer, x, [3]).plot(tokens=list("abcdef"))
    assert len(axes.lines) == 2
    assert axes.get_xticklabels()[1].get_text() == "b"
    lines = inspect.by_distance(layer, x).plot().lines
    assert max(lines[0].get_ydata()) == 0
    assert len(lines) == 2
    ids = torch.zeros(1, 6, dtype=torch.long)
    assert len(inspect.spreads(layer, x, ids).plot().lines) == 6
    assert inspect.tokens(make(), TEXTS).plot(most=2).images[0].get_array().shape == (2, 3)
    tags = inspect.summarise_tags(
        make(), inspect.words_from(TEXTS), TABLE, published="shakes", minimum=1
    )
    assert [t.get_text() for t in tags.plot().get_yticklabels()] == ["DET", "NOUN", "VERB"]
    curves = inspect.curves([{"step": n, "loss": math.exp(-n)} for n in range(3)])
    assert list(curves.plot().lines[0].get_xdata()) == [0, 1, 2]
    with pytest.raises(ValueError, match="no curve is named x; there are: loss"):
        curves.plot(names=["x"])
