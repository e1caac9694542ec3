"""A paper's table beside our runs: intervals, verdicts, orders, and what is printed."""

import io
import math
import random
import statistics

import pytest
from rich.console import Console

from mercer import studies
from mercer.studies import Claim, Paper, Study
from mercer.studies.claims import Interval, bootstrap, judge, kendall, paired
from mercer.studies.ledger import Record
from mercer.studies.paper import beside, compare
from mercer.studies.study import METRICS
from mercer.studies.table import Row


def record(variant, seed, value, status="done"):
    return Record(
        study="s", key=f"{variant}{seed}", variant=variant, seed=seed, status=status,
        metrics={"bleu": value}, parameters=1, flops_per_token=1.0, tokens_per_second=None,
        steps=1, seconds=1.0, finished="", settings={},
    )  # fmt: skip


def row(variant, values, status="done"):
    records = tuple(record(variant, seed, x, status) for seed, x in enumerate(values))
    return Row(variant, len(values), records, METRICS["translation"])


def test_the_interval_is_exact_for_few_seeds():
    # Of the 27 resamples of three differences, the outer ones are the differences themselves.
    assert bootstrap([1.0, 3.0, 2.0]) == Interval(2.0, 1.0, 3.0, 3)
    assert bootstrap([2.0, 3.0]) is None
    assert bootstrap([]) is None
    found = bootstrap([0.3, 0.5, 0.4, 0.2, 0.6])
    assert found.mean == pytest.approx(0.4)
    assert 0.25 < found.low < 0.3
    assert found.high == pytest.approx(0.8 - found.low)


def test_the_interval_of_many_seeds_is_drawn_and_covers_the_mean():
    choose = random.Random(1)
    inside = 0
    for _ in range(60):
        found = bootstrap([choose.gauss(1.0, 0.5) for _ in range(20)])
        inside += found.low <= 1.0 <= found.high
    # 95 % in the limit; less for small samples.
    assert inside >= 50
    spread = (found.high - found.low) / 2
    assert spread == pytest.approx(1.96 * 0.5 / math.sqrt(20), rel=0.5)


def test_seeds_pair_the_runs():
    assert paired({0: 3.0, 1: 4.0, 7: 9.0}, {1: 3.5, 0: 1.0}, lower=False) == [2.0, 0.5]
    assert paired({0: 3.0, 1: 4.0}, {0: 1.0, 1: 3.5}, lower=True) == [-2.0, -0.5]


@pytest.mark.parametrize(
    ("low", "high", "margin", "said"),
    [
        (0.1, 0.5, None, "supported"),
        (-0.5, -0.1, None, "contradicted"),
        (-0.1, 0.5, None, "undecided"),
        (-0.1, 0.2, 0.3, "supported"),
        (-0.1, 0.4, 0.3, "undecided"),
        (0.4, 0.5, 0.3, "contradicted"),
        (-0.5, -0.4, 0.3, "contradicted"),
    ],
)
def test_a_claim_is_judged_by_its_interval(low, high, margin, said):
    assert judge(Interval((low + high) / 2, low, high, 5), margin) == said
    assert judge(None, margin) == "undecided"


def test_kendall():
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    # Ties: tau-b.
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / math.sqrt(6))
    assert kendall([1, 1], [1, 2]) is None
    assert kendall([], []) is None


PAPER = Paper(
    source="Tsai et al. 2019, Table 2",
    data="IWSLT'14 De-En",
    metric="BLEU",
    figures={"exponential": 33.98, "rbf": 34.26, "linear": None},
    claims=[
        Claim("RBF is better than the exponential kernel", "rbf", "exponential"),
        Claim("both are alike", "rbf", "exponential", margin=0.5),
        Claim("the linear kernel does not converge", "linear"),
        Claim("the exponential kernel is better than the linear one", "exponential", "linear"),
    ],
)
ROWS = [
    row("exponential", [30.0, 30.4, 30.2]),
    row("rbf", [30.3, 30.6, 30.6]),
    row("linear", [math.nan] * 3, "not converged at step 3"),
]


def test_claims_and_orders_of_a_table():
    found = compare(PAPER, ROWS)
    better, alike, fails, against = found.verdicts
    assert better.said == alike.said == "supported"
    assert better.interval.mean == pytest.approx(statistics.fmean([0.3, 0.2, 0.4]))
    assert str(better) == "supported: +0.3 [+0.2, +0.4], 3 pairs"
    assert fails.said == "supported: 3 of 3 runs did not converge"
    assert against.said == "undecided: linear did not converge"
    # What did not converge ranks last on both sides.
    assert found.tau == 1.0
    assert found.count == 3


def test_missing_runs_decide_nothing():
    found = compare(PAPER, [row("exponential", [30.0]), row("rbf", []), row("linear", [])])
    said = [verdict.said for verdict in found.verdicts]
    assert said[0] == said[1] == "undecided: it takes 3 seeds that both have"
    assert said[2] == "no run yet"
    assert found.tau is None
    assert found.order == "The orders cannot be compared yet."


def test_the_table_has_both_figures():
    text = beside(PAPER, ROWS)
    assert "| rbf | 30.500 ± 0.173 | 34.26 |".replace("30.500 ± 0.173", ROWS[1].figure) in text
    assert "| linear | not converged at step 3 | not converged |" in text
    assert "The paper's figures are of IWSLT'14 De-En. Kendall's tau" in text
    assert "| both are alike | supported: +0.3 [+0.2, +0.4], 3 pairs |" in text
    assert beside(None, ROWS) == ""
    console = Console(file=io.StringIO(), width=100)
    study = Study(
        systems=[studies.Variant(n, system="vaswani2017") for n in PAPER.figures],
        task="translation", paper=PAPER, seeds=(0, 1, 2),
    )  # fmt: skip
    studies.show(console, study, ROWS, [], [])
    said = console.file.getvalue()
    assert "Beside Tsai et al. 2019, Table 2" in said
    assert "34.26" in said
    assert "supported: 3 of 3 runs did not converge" in said


def test_a_table_of_other_variants_is_refused():
    with pytest.raises(ValueError, match="the paper's table has 'exponential', but the study"):
        Study(systems=["vaswani2017"], task="translation", paper=PAPER)
    with pytest.raises(ValueError, match="a margin must be above 0 and needs two variants, got 0"):
        Claim("alike", "a", "b", margin=0)
    with pytest.raises(ValueError, match="a margin must be above 0 and needs two variants"):
        Claim("alike", "a", margin=1.0)
