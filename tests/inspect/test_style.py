"""Style: distances, n-gram models, classification, dendrograms."""

import math

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

import mercer as mc
from mercer import inspect

NAMES = ("a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2", "c3")
LABELS = {name: name[0] for name in NAMES}


def draw(spread=0.1, dims=20, seed=0):
    """Three clusters of three corpora."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, dims, generator=generator, dtype=torch.float64)
    noise = torch.randn(9, dims, generator=generator, dtype=torch.float64)
    return inspect.Features(NAMES, centres.repeat_interleave(3, 0) + spread * noise)


def test_distances_by_hand():
    features = inspect.Features(("x", "y"), torch.tensor([[0.0, 1.0, 2.0], [4.0, 1.0, 2.0]]))
    want = {
        "euclidean": math.sqrt(16 / 3),
        "manhattan": 4 / 3,
        "cosine": 1 - 5 / math.sqrt(5 * 21),
        "correlation": 1 + 2 / math.sqrt(2 * 14 / 3),
    }
    for metric, distance in want.items():
        found = inspect.distances(features, metric)
        assert found.names == ("x", "y")
        assert found.matrix.dtype == torch.float64
        torch.testing.assert_close(
            found.matrix, torch.tensor([[0.0, distance], [distance, 0.0]], dtype=torch.float64)
        )
    with pytest.raises(ValueError, match="no metric 'euclid'; did you mean 'euclidean'"):
        inspect.distances(features, "euclid")
    flat = inspect.Features(("x", "y"), torch.tensor([[1.0, 1.0], [1.0, 2.0]]))
    with pytest.raises(ValueError, match="correlation needs features that vary, but those of 'x'"):
        inspect.distances(flat, "correlation")


def test_features_of_token_kernels():
    tables = {name: mc.nn.TokenKernels(5, temperature=None) for name in "xy"}
    with torch.no_grad():
        tables["y"].weight[3, ..., 0] = 0.5
        tables["y"].weight[4, ..., 0] = 9.0
    found = inspect.kernel_features(tables, [1, 3])
    assert found.values.tolist() == [[0, 1, 0, 0, 1, 0], [0, 1, 0, 0.5, 1, 0]]
    found = inspect.kernel_features(tables, [1, 3], of="deviations")
    assert found.values.tolist() == [[0, 0], [0, 0.5]]
    counts = {"x": torch.tensor([9, 5, 4, 8]), "y": torch.tensor([5, 6, 9, 1])}
    assert inspect.shared_ids(counts) == [0, 1]
    assert inspect.shared_ids(counts, 4) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"one shape, got x: \[5, .*; z: \[5, 2"):
        inspect.kernel_features({**tables, "z": mc.nn.TokenKernels(5, layers=2)}, [1])
    with pytest.raises(ValueError, match="ids must be one or more of the 5 tokens"):
        inspect.kernel_features(tables, [])


def test_word_frequencies_are_in_standard_deviations():
    counts = {"x": torch.tensor([6, 2, 0, 2]), "y": torch.tensor([20, 60, 0, 20])}
    found = inspect.word_frequencies(counts, most=3)
    # shares 0.6 0.2 and 0.2 0.6; the third never varies
    half = math.sqrt(0.5)
    want = torch.tensor([[half, -half], [-half, half]], dtype=torch.float64)
    torch.testing.assert_close(found.values, want)
    with pytest.raises(ValueError, match="the corpus 'y' has no tokens"):
        inspect.word_frequencies({"x": torch.tensor([1, 2]), "y": torch.tensor([0, 0])})


@pytest.mark.parametrize("order", [1, 2, 3])
def test_probabilities_of_an_ngram_model_sum_to_one(order):
    model = inspect.NGrams([0, 1, 2, 0, 1, 1, 3, 0, 1], 5, order)
    for history in ([0, 1], [1, 1], [4, 4], [2, 0], [4, 1]):
        p = sum(model.probabilities([*history, word])[-1] for word in range(5))
        assert p == pytest.approx(1)


def test_an_ngram_model_by_hand():
    # 0 1 0 2: unigrams 2 1 1 of 4, three kinds; after 0 come 1 and 2
    model = inspect.NGrams([0, 1, 0, 2], 4, 2)
    one = [(2 + 3 / 4) / 7, (1 + 3 / 4) / 7, (1 + 3 / 4) / 7, (3 / 4) / 7]
    assert model.probabilities([0, 1, 3, 0]).tolist() == pytest.approx(
        [one[0], (1 + 2 * one[1]) / 4, (1 * one[3]) / 2, one[0]]
    )
    assert model.cross_entropy([0]) == pytest.approx(-math.log(one[0]))
    # a text shorter than the order
    assert inspect.NGrams([1], 4, 3).probabilities([1]).tolist() == [(1 + 1 / 4) / 2]
    for ids, vocab, order in (([0], 2**32, 2), ([0], 4, 0), ([4], 4, 1), ([], 4, 1)):
        with pytest.raises(ValueError, match=r"must be at least 1|ids must be one or more"):
            inspect.NGrams(ids, vocab, order)


def test_a_text_is_nearest_to_its_like_by_perplexity():
    generator = torch.Generator().manual_seed(0)

    def text(step):
        jumps = torch.where(torch.rand(300, generator=generator) < 0.8, step, 1)
        return (jumps.cumsum(0) % 7).tolist()

    texts = {f"{step}-{n}": text(step) for step in (2, 3) for n in range(3)}
    found = inspect.ngram_distances(texts, 7)
    assert not found.matrix.diagonal().any()
    score = inspect.classify(found, {name: name[0] for name in texts}, permutations=19)
    assert score.accuracy == 1.0


@pytest.mark.parametrize("method", ["nearest", "logistic"])
def test_clusters_are_found(method):
    options = {"method": method, "permutations": 9}
    found = inspect.classify(draw(), LABELS, **options)
    assert (found.accuracy, found.predicted) == (1.0, LABELS)
    assert found.p == 1 / 10
    assert found.chance < 0.5
    assert inspect.classify(draw(), LABELS, **options) == found


def test_p_values_of_noise_are_those_of_chance():
    ps = [inspect.classify(draw(spread=1e6, seed=s), LABELS, permutations=99).p for s in range(60)]
    assert sum(p <= 0.1 for p in ps) <= 12
    # Accuracies have few values, so that p-values are larger rather than smaller.
    assert 0.4 < sum(ps) / 60 < 0.8


def test_a_group_is_left_out_as_a_whole():
    # The nearest corpus has the same author, and the period is in the second number.
    rows = [[0, 0.0], [0.1, 0], [5, 1], [5.1, 1], [9, 0], [9.1, 0], [3, 1], [3.1, 1]]
    names = tuple("abcdefgh")
    features = inspect.Features(names, torch.tensor(rows, dtype=torch.float64))
    authors = dict(zip(names, "AABBCCDD", strict=True))
    period = dict(zip(names, "00110011", strict=True))
    alone = inspect.classify(features, period, permutations=9)
    assert alone.accuracy == 1.0
    together = inspect.classify(features, period, groups=authors, permutations=200)
    # By hand: A is nearest to D, B to D, C to B, D to B.
    assert together.predicted == dict(zip(names, "11111111", strict=True))
    assert together.accuracy == 0.5
    # Labels are dealt to authors, so corpora of one author share theirs: multiples of 2 / 8.
    assert together.p > 0.2
    with pytest.raises(ValueError, match="the label 'A' is in one group"):
        inspect.classify(features, authors, groups=authors)


def test_the_permutation_p_value_is_that_of_all_labellings():
    features = inspect.Features(tuple("abcd"), torch.tensor([[0.0], [1.0], [10.0], [11.0]]))
    labels = {"a": "x", "b": "x", "c": "y", "d": "y"}
    found = inspect.classify(features, labels, permutations=2999)
    # Of the 3 ways to make two pairs one is as good.
    assert found.p == pytest.approx(1 / 3, abs=0.03)
    assert found.chance == pytest.approx(1 / 3, abs=0.03)


def test_logistic_regression_is_that_of_all_features():
    import numpy as np
    from sklearn.linear_model import LogisticRegression

    features = draw(spread=1.5)
    found = inspect.classify(features, LABELS, method="logistic", permutations=1).predicted
    for n, name in enumerate(NAMES):
        x = np.delete(features.values.numpy(), n, 0)
        y = [LABELS[other] for other in NAMES if other != name]
        mean = x.mean(0)
        scale = np.sqrt(((x - mean) ** 2).sum(1).mean())
        model = LogisticRegression(max_iter=5000).fit((x - mean) / scale, y)
        assert found[name] == model.predict((features.values.numpy()[n : n + 1] - mean) / scale)[0]


def test_a_comparison_has_a_row_for_each_way():
    given = {"kernels": draw(), "words": inspect.distances(draw(seed=1), "manhattan")}
    rows = inspect.compare(given, LABELS, permutations=2)
    assert [(row.what, row.method) for row in rows] == [
        ("kernels", "nearest"), ("kernels", "logistic"), ("words", "nearest"),
    ]  # fmt: skip
    assert all(row.accuracy == 1.0 for row in rows)


def test_what_cannot_be_classified_is_refused():
    features = draw()
    for options, said in (
        ({"method": "near"}, "no method 'near'; did you mean 'nearest'"),
        ({"permutations": 0}, "permutations must be at least 1"),
        ({"method": "logistic", "strength": 0.0}, "strength must be positive"),
        ({"groups": {"a": "x"}}, "'a1' has no label or group"),
    ):
        with pytest.raises(ValueError, match=said):
            inspect.classify(features, LABELS, **options)
    with pytest.raises(ValueError, match="two labels or more"):
        inspect.classify(features, dict.fromkeys(NAMES, "x"))
    with pytest.raises(ValueError, match="needs features, but distances"):
        inspect.classify(inspect.distances(features), LABELS, method="logistic")
    with pytest.raises(ValueError, match="all numbers must be finite"):
        inspect.Features(("x",), torch.tensor([[math.nan]]))
    with pytest.raises(ValueError, match="names must differ"):
        inspect.Features(("x", "x"), torch.zeros(2, 1))


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_dendrogram_is_a_file_of_equal_bytes(ending, tmp_path):
    found = inspect.distances(draw())
    paths = [tmp_path / f"{n}.{ending}" for n in range(2)]
    for path in paths:
        assert inspect.draw_dendrogram(found, path, labels=LABELS, title="three") == path
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert sorted(tmp_path.iterdir()) == paths
    with pytest.raises(ValueError, match=r"written as .png or .svg, got tree.pdf"):
        inspect.draw_dendrogram(found, tmp_path / "tree.pdf")


def test_a_dendrogram_of_equal_corpora_and_of_perplexities(tmp_path):
    same = inspect.Distances(("x", "y"), torch.zeros(2, 2, dtype=torch.float64))
    assert inspect.draw_dendrogram(same, tmp_path / "same.svg").stat().st_size
    skew = inspect.Distances(("x", "y"), torch.tensor([[0.0, 1.0], [3.0, 0.0]]))
    assert skew.symmetric().matrix.tolist() == [[0, 2], [2, 0]]
    assert inspect.draw_dendrogram(skew, tmp_path / "skew.svg").stat().st_size
