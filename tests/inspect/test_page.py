"""The page as a file: its size, its policy, its data; rows on it beside the reference."""

import math
import re

import pytest
import torch
from inspect_reports import HOSTILE, data_of, make

import mercer as mc
from mercer import inspect, nn


def test_tokens_are_data_and_never_html():
    page = inspect.make_page([make(title="<b>&\x00</b>")])
    # Its own two, and the style; nothing of a token is there.
    assert page.count("<script") == page.count("</script>") == 2
    assert "document.title" not in page
    assert "<title>&lt;b&gt;&amp;\ufffd&lt;/b&gt; · Mercer</title>" in page
    (model,) = data_of(page)["models"]
    assert model["words"][: len(HOSTILE)] == [word.replace("\ud800", "?") for word in HOSTILE]


def test_the_policy_allows_the_two_pieces_of_the_page_alone():
    page = inspect.make_page([make()])
    (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)


@pytest.mark.parametrize("size", [3, 5, 7])
def test_a_page_of_twelve_layers_and_a_large_vocabulary_is_small(size):
    # Of every row as many weights as `mercer inspect` takes for so many heads.
    report = make(
        layers=12, heads=12, vocabulary=50_257, text=20_000, places=90_000 // 144 // 8, size=size
    )
    page = inspect.make_page([report])
    assert len(page) < 1.5e6
    found = data_of(page)["models"][0]["tokens"]
    width, unit = found["width"], 10 ** found["decimals"]
    taps = [
        (int(found["taps"][n * width : (n + 1) * width]) + found["low"]) / unit
        for n in range(7 * size, 8 * size)
    ]
    assert taps == pytest.approx(report.tokens[7].kernel, abs=1 / unit)
    assert unit >= {3: 1e6, 5: 1e4, 7: 1e3}[size]
    assert found["deviation"][7] / 1e6 == pytest.approx(report.tokens[7].deviation, rel=1e-3)


def test_taps_may_be_below_zero_and_not_finite():
    values = (-0.25, math.nan, 1.5)
    one = inspect.TokenKernel(
        id=0, text="a", count=None, tag=None, kernel=values, deviation=0.5, direction=0.0
    )
    found = data_of(inspect.make_page([inspect.Report(title="t", tokens=inspect.Tokens((one,)))]))
    (tokens,) = [model["tokens"] for model in found["models"]]
    assert (tokens["low"], tokens["width"]) == (-250_000, 7)
    assert tokens["taps"] == "000000002500001750000"


def test_the_page_has_the_rows_of_the_reference():
    torch.manual_seed(0)
    layer = nn.KernelAttention(16, 4, kernel=mc.RBF(1.0), filter=mc.Causal())
    x = torch.randn(1, 40, 16)
    rows = inspect.largest(layer, x, range(30, 40), most=40)
    heads = inspect.heads(layer, x)
    report = inspect.Report(
        title="one", words=("a",), ids=(0,) * 40, context=40, heads=heads, rows=rows
    )
    found = data_of(inspect.make_page([report]))["models"][0]["rows"]
    want = nn.attention_weights(layer.double(), x.double())[0].detach()
    assert found["places"] == list(range(30, 40))
    for h, each in enumerate(found["layers"][0]["heads"]):
        for place, flat in zip(found["places"], each, strict=True):
            *pairs, rest = flat
            assert abs(rest) <= 1
            for key, weight in zip(pairs[::2], pairs[1::2], strict=True):
                assert weight / 1e6 == pytest.approx(float(want[h, place, key]), abs=1e-5)


def test_the_largest_weights_and_their_rest_make_a_row():
    torch.manual_seed(0)
    layer = nn.KernelAttention(16, 4, num_kv_heads=2, filter=mc.Causal())
    x = torch.randn(2, 20, 16)
    full = inspect.rows(layer, x, [4, 19], sequence=1)[0]
    for row in inspect.largest(layer, x, [4, 19], most=3, sequence=1):
        want = full.top(row.head, (4, 19).index(row.place), 3)
        assert list(zip(row.keys, row.weights, strict=True)) == [
            (key, pytest.approx(weight, abs=1e-6)) for key, weight in want
        ]
        assert sum(row.weights) + row.rest == pytest.approx(1, abs=1e-5)
    with pytest.raises(ValueError, match="places must be one or more numbers"):
        inspect.largest(layer, x, [])
    with pytest.raises(ValueError, match="most must be at least 1"):
        inspect.largest(layer, x, [1], most=0)


def test_a_page_replaces_a_file_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        inspect.write_page([make()], path)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    inspect.write_page([make()], path)
    assert path.read_text(encoding="utf-8") == inspect.make_page([make()])


def test_models_beside_each_other_have_names_and_distances():
    reports = inspect.name_apart([make(seed=n, title="one") for n in range(3)])
    assert [one.title for one in reports] == ["one (1)", "one (2)", "one (3)"]
    apart = inspect.distances_between(reports)
    found = data_of(inspect.make_page(reports, apart))["distances"]
    assert found["names"] == [one.title for one in reports]
    (a, b, low), (c, d, high) = found["joins"]
    near = min((apart.matrix[i, j].item(), i, j) for i in range(3) for j in range(i + 1, 3))
    assert (low, a, b) == (pytest.approx(near[0], rel=1e-4), near[1], near[2])
    assert {c, d} == {3, *({0, 1, 2} - {a, b})}
    assert high >= low
    assert inspect.distances_between([make(), make(size=5)]) is None
