"""Part of speech or frequency: rank correlations, shares of variance, p-values."""

import pytest
import torch

pytest.importorskip("scipy")

from scipy import stats

import mercer as mc
from mercer import inspect
from mercer.inspect.effects import rank

TAGS = ("DET", "NOUN", "VERB")


def draw(n=240, seed=0):
    """Frequencies and tags that depend on each other, as in a language."""
    generator = torch.Generator().manual_seed(seed)
    tags = torch.randint(0, 3, (n,), generator=generator)
    counts = (4 + torch.randn(n, generator=generator) + 2 * (tags == 0)).exp().round() + 1
    noise = torch.randn(n, dtype=torch.float64, generator=generator)
    words = {i: f"w{i}" for i in range(n)}
    table = {f"w{i}": TAGS[tag] for i, tag in enumerate(tags.tolist())}
    return tags, counts, noise, words, table


def test_ranks_and_partial_correlations_are_those_of_scipy():
    generator = torch.Generator().manual_seed(0)
    x, y, z = torch.randint(0, 9, (3, 50), generator=generator).double()
    y, z = y + x, z + 2 * x
    assert rank(x).tolist() == (stats.rankdata(x) - 1).tolist()
    assert inspect.partial_rank_correlation(x, y) == pytest.approx(
        stats.spearmanr(x, y).statistic, abs=1e-12
    )
    xy, xz, yz = (stats.spearmanr(*p).statistic for p in ((x, y), (x, z), (y, z)))
    formula = (xy - xz * yz) / ((1 - xz**2) * (1 - yz**2)) ** 0.5
    assert inspect.partial_rank_correlation(x, y, z) == pytest.approx(formula, abs=1e-12)
    assert inspect.partial_rank_correlation(x, y, x) == 0.0


def test_values_of_frequency_alone_have_no_effect_of_tags():
    _, counts, noise, words, table = draw()
    values = counts.log() + 0.3 * noise
    found = inspect.tag_effect(values, counts, words, table)
    assert found.tokens == 240
    assert found.correlation == pytest.approx(stats.spearmanr(values, counts).statistic)
    assert found.r2_frequency == pytest.approx(found.correlation**2)
    # Tags seem to matter, until frequency is known.
    assert found.r2_tags > 0.2
    assert found.tags_beyond < 0.03
    assert (found.p_tags > 0.05, found.p_frequency) == (True, 0.001)


def test_values_of_tags_alone_have_no_effect_of_frequency():
    tags, counts, noise, words, table = draw()
    values = (tags == 0) + 0.3 * noise
    found = inspect.tag_effect(values, counts, words, table)
    assert (found.p_tags, found.p_frequency > 0.05) == (0.001, True)
    assert found.tags_beyond > 0.3
    assert found.frequency_beyond < 0.03
    assert found.r2_both >= max(found.r2_tags, found.r2_frequency)
    assert found.partial["DET"] > 0.5 > 0 > found.partial["NOUN"]
    indicator = [1.0 * (table[words[i]] == "DET") for i in range(240)]
    assert found.partial["DET"] == pytest.approx(
        inspect.partial_rank_correlation(values, indicator, counts)
    )


def test_shares_of_variance_are_those_of_least_squares():
    tags, counts, noise, words, table = draw(60)
    found = inspect.tag_effect(noise + tags, counts, words, table, permutations=1)
    y, x = rank(noise + tags), rank(counts.double())
    one = torch.ones(60, dtype=torch.float64)
    columns = [one, x, *((tags == n).double() for n in range(2))]
    for chosen, got in (
        ((0, 1), found.r2_frequency), ((0, 2, 3), found.r2_tags), ((0, 1, 2, 3), found.r2_both),
    ):  # fmt: skip
        design = torch.stack([columns[n] for n in chosen], 1)
        residual = y - design @ torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
        assert got == pytest.approx(
            1 - float(residual.square().sum() / (y - y.mean()).square().sum())
        )
    want = (found.r2_both - found.r2_frequency) / (1 - found.r2_frequency)
    assert found.tags_beyond == pytest.approx(want)


def test_the_p_value_is_near_that_of_f_and_equal_for_equal_seeds():
    _, counts, noise, words, table = draw(30)
    options = {"permutations": 99, "minimum": 1}
    first, again = (inspect.tag_effect(noise, counts, words, table, **options) for _ in range(2))
    assert first == again
    assert inspect.tag_effect(noise, counts, words, table, seed=1, **options) != first
    for seed in range(6):
        noise = draw(30, seed)[2]
        found = inspect.tag_effect(noise, counts, words, table, permutations=999, minimum=1)
        for gain, df, p in (
            (found.r2_both - found.r2_frequency, 2, found.p_tags),
            (found.r2_both - found.r2_tags, 1, found.p_frequency),
        ):
            f = gain / df / ((1 - found.r2_both) / 26)
            assert p == pytest.approx(stats.f.sf(f, df, 26), abs=0.05)


def test_words_of_two_tags_belong_to_both_in_part_by_shares():
    tags, counts, _, words, table = draw(40)
    shared = {word: {tag: 0.5, "X": 0.5} for word, tag in table.items()}
    found = inspect.tag_effect(
        tags.double(), counts, words, shared.get, weighing="shares", permutations=1
    )
    assert set(found.partial) == {*TAGS, "X"}
    assert found.r2_tags == pytest.approx(1.0)
    single = inspect.tag_effect(tags.double(), counts, words, table, permutations=1)
    assert single.r2_tags == pytest.approx(1.0)


def test_rare_tags_unseen_and_untagged_tokens_are_left_out():
    _, counts, noise, words, table = draw(40)
    table |= {"w0": "INTJ", "w1": None}
    counts[2] = 0
    found = inspect.tag_effect(noise, counts, words, table, permutations=1)
    assert found.tokens == 37
    assert set(found.partial) == set(TAGS)


def test_effects_of_what_does_not_fit_are_refused():
    _, counts, noise, words, table = draw(40)
    for call, said in (
        (lambda: inspect.tag_effect(noise, counts[:9], words, table), "40 values, but 9 counts"),
        (lambda: inspect.tag_effect(noise * 0, counts, words, table), "all values are equal"),
        (lambda: inspect.tag_effect(noise, counts, words, table, minimum=99), "tags none"),
        (lambda: inspect.tag_effect(noise, counts, words, table, permutations=0), "at least 1"),
        (lambda: inspect.tag_effect(noise, counts, {99: "w1"}, table), "has the id 99, of 40"),
        (lambda: inspect.partial_rank_correlation([1, 2], [1, 2]), "3 numbers or more"),
        (lambda: inspect.partial_rank_correlation([1, 2, 3], [1, 2]), "one length"),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_counts_of_ids():
    assert inspect.count_ids([[0, 2], [2, 4]], 5).tolist() == [1, 0, 2, 0, 1]
    assert inspect.count_ids(torch.tensor([], dtype=torch.int64), 2).tolist() == [0, 0]
    for ids in ([5], [-1]):
        with pytest.raises(ValueError, match="ids must be from 0 to 4"):
            inspect.count_ids(ids, 5)


def test_means_by_tag_of_each_layer_target_and_head():
    tokens = mc.nn.TokenKernels(4, layers=2, on="kv", heads=3, temperature=None)
    with torch.no_grad():
        tokens.weight[0, 1, 1, 2, 0] = 0.5
    words = dict(enumerate(("the", "cat", "dog", "run")))
    table = {"the": "DET", "cat": "NOUN", "dog": "NOUN", "run": "VERB"}
    cells = inspect.by_layer_and_head(tokens, words, table, minimum=1)
    assert len(cells) == 12
    found = {(c.layer, c.target, c.head): c.rows[0] for c in cells if c.rows[0].mean > 0}
    assert found == {(1, "v", 2): inspect.Row("DET", 1, 0.5)}
    shared = inspect.by_layer_and_head(mc.nn.TokenKernels(4), words, table, minimum=2)
    assert [(c.layer, c.target, c.head) for c in shared] == [(0, "v", 0)]
    assert [row.tag for row in shared[0].rows] == ["NOUN"]
