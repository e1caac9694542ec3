"""A rough version differs from the study in its budget alone."""

from dataclasses import replace

import pytest

from mercer import studies
from mercer.studies import Study, Variant, roughen
from mercer.studies.load import NAMES, list_sizes

FULL = Study(
    name="mine",
    title="Mine",
    question="Which?",
    systems=["vaswani2017", Variant("longer", system="dai2019", budget={"steps": 300})],
    budget={"steps": 100, "batch": 8, "eval_every": 50},
    tune={"learning_rate": (1e-3, 2e-3)},
    tune_budget={"steps": 40},
    seeds=(0, 1, 2, 3, 4),
    differ=("steps",),
    remark="Small data.",
)


def test_the_budget_is_smaller_and_the_remark_says_so():
    rough = roughen(FULL, steps=20, eval_every=10, share=0.1, trials={"steps": 5})
    assert rough.title == "Mine: a rough version"
    assert rough.remark == (
        "A rough version: steps 20 for 100, eval every 10 for 50, 10% of the steps of the full "
        "study. Small data."
    )
    assert (rough.budget["steps"], rough.budget["batch"]) == (20, 8)
    assert rough.tune_budget == {"steps": 5}
    assert rough.tune == FULL.tune
    assert rough.seeds == (0, 1, 2)
    first, longer = rough.variants
    assert (first.budget, longer.budget) == ({}, {"steps": 30})
    # The study itself stays.
    assert FULL.variants[1].budget == {"steps": 300}
    assert FULL.seeds == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("name", [name for name in NAMES if "rough" in list_sizes(name)])
def test_rough_versions_have_the_rows_of_the_full_ones_and_no_verdicts(name):
    full, rough = studies.load(name), studies.load(name, "rough")
    assert rough.name == f"{name}-rough"
    assert [v.name for v in rough.variants] == [v.name for v in full.variants]
    assert [v.parts for v in rough.variants] == [v.parts for v in full.variants]
    if full.paper is not None:
        assert rough.paper == replace(full.paper, claims=[])
        assert bool(full.paper.claims) == ("too little for a verdict" in rough.remark)
    assert rough.tune == full.tune
    assert rough.corpus == full.corpus
    assert len(rough.seeds) == min(3, len(full.seeds))


def test_every_study_but_the_first_has_one():
    assert [name for name in NAMES if "rough" not in list_sizes(name)] == ["quick"]
