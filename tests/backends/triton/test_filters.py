"""Filters as the fused kernels read them: the clauses mean what the filter means."""

import pytest
import torch
from catalogue import FILTERS, UNFUSED

import mercer as mc
from mercer.backends.triton import filters
from mercer.filters import Earlier

K = 11


def seen(rule, b, i, j):
    """One query and one key against the clauses, as the kernels read them."""
    for clause in rule.cases:
        causal, left, right, memory, stride, fixed, summary, padding, documents, gap = clause
        away = i - j
        if gap and away < gap:
            continue
        ok = not causal or away >= 0
        ok = ok and (left < 0 or away <= left) and (right < 0 or away >= -right)
        ok = ok and (memory < 0 or j >= rule.first - memory)
        ok = ok and (not stride or away < stride or away % stride == 0)
        ok = ok and (not fixed or i // fixed == j // fixed or j % fixed >= fixed - summary)
        ok = ok and (not padding or j < rule.lengths[b])
        ok = ok and (not documents or bool(rule.ids[b, i] == rule.ids[b, j]))
        if ok:
            return True
    return False


ALL = {name: build for name, build in FILTERS.items() if name not in UNFUSED} | {
    "gap": lambda: Earlier(2),
    "documents with a gap": lambda: FILTERS["documents"]() & Earlier(1),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_some_filters_have_no_clauses(name):
    for filter in (FILTERS[name](), mc.Padding([K]) & FILTERS[name]()):
        assert f"does not support the filter {UNFUSED[name]}" in filters.read(filter, K, K)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("queries", [K, 4])
def test_clauses_mean_what_the_filter_means(name, queries):
    filter = ALL[name]()
    rule = filters.read(filter, queries, K)
    assert not isinstance(rule, str)
    mask = filter.mask(queries, K).expand(2, 1, queries, K)
    for b in range(2):
        for n in range(queries):
            for j in range(K):
                assert seen(rule, b, n + K - queries, j) == bool(mask[b, 0, n, j]), (b, n, j)


@pytest.mark.parametrize(
    ("filter", "simple"),
    [
        (mc.Causal(), True),
        (mc.Window(2, 1) & mc.Padding([3, 2]), True),
        (mc.Causal() & mc.Documents([[0] * 5 + [1] * 6]), False),
        (mc.Strided(3), False),
        (mc.Causal() | mc.Window(0, 1), False),
    ],
    ids=repr,
)
def test_simple_means_one_stretch_of_keys(filter, simple):
    assert filters.read(filter, 4, K).simple is simple


@pytest.mark.parametrize(
    ("filter", "why"),
    [
        (mc.Strided(3) & mc.Strided(2), "two strides"),
        (mc.Padding([3, 2]) | mc.Padding([1, 2]), "two sets of lengths"),
        (mc.Memory(2, start=3) | mc.Memory(2, start=4), "different starts"),
        (
            (mc.Window(0, 0) | mc.Window(0, 1) | mc.Strided(2)) & (mc.Window(2, 2) | mc.Fixed(3)),
            "or of 6 cases",
        ),
    ],
    ids=repr,
)
def test_a_filter_without_clauses_says_why(filter, why):
    assert why in filters.read(filter, K, K)


def test_a_filter_of_ones_own_is_not_known():
    class Odd(mc.Filter):
        def sees(self, b, i, j, start):
            return torch.as_tensor(j % 2 == 1)

    assert "does not support the filter Odd" in filters.read(Odd(), 4, K)
