"""Equal tuning: one grid for all variants, on one seed, before the study."""

import io
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from mercer import studies
from mercer.studies import Shard, Study, Variant
from mercer.studies.tune import choose, points, say_chosen, tune

STUDY = Study(
    name="tuned",
    systems=["vaswani2017", Variant("rbf", system="vaswani2017", kernel="RBF()")],
    budget={"steps": 40, "batch": 4},
    tune={"learning_rate": (1e-3, 3e-3, 1e-2)},
    tune_budget={"steps": 20},
    seeds=(3, 4),
)  # fmt: skip
# Bits per byte at each rate.
FIGURES = {
    "vaswani2017": {1e-3: 2.6, 3e-3: 2.5, 1e-2: float("nan")},
    "rbf": {1e-3: 2.4, 3e-3: 2.7, 1e-2: 2.9},
}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr("mercer.studies.look.draw_curves", lambda study, rows, path: path)


class Runs:
    """A trainer with known results, and the rates and steps that it was given."""

    def __init__(self, stop_after=None):
        self.given, self.stop_after = [], stop_after

    def __call__(self, job, folder, screen):
        if self.stop_after == len(self.given):
            raise KeyboardInterrupt
        rate, steps = job.settings["learning_rate"], job.settings["steps"]
        self.given.append((job.variant, job.seed, rate, steps))
        value = FIGURES[job.variant][rate]
        status = "done" if value == value else "not converged at step 3"
        return SimpleNamespace(
            status=status, metrics={"bits_per_byte": value}, parameters=1, flops_per_token=1.0,
            tokens_per_second=None, steps=steps, history=[],
        )  # fmt: skip


def go(folder, runs, study=STUDY, shard=None):
    console = Console(file=io.StringIO())

    def attempt(trial, place):
        return studies.run(trial, place, shard=shard, runner=runs, console=console)

    return tune(study, folder, attempt)


def test_every_variant_gets_the_same_grid_on_one_seed(tmp_path):
    runs = Runs()
    tuned = go(tmp_path, runs)
    assert sorted(runs.given) == sorted(
        (name, 3, rate, 20) for name in FIGURES for rate in FIGURES[name]
    )
    assert tuned.chosen == {
        "vaswani2017": {"learning_rate": 3e-3}, "rbf": {"learning_rate": 1e-3},
    }  # fmt: skip
    jobs = [(job.variant, job.seed, job.settings["learning_rate"]) for job in tuned.jobs()]
    assert jobs[:2] == [("vaswani2017", 3, 3e-3), ("rbf", 3, 1e-3)]
    assert {job.settings["steps"] for job in tuned.jobs()} == {40}
    outcome = studies.run(tuned, tmp_path, runner=runs, console=Console(file=io.StringIO()))
    assert [row.mean for row in outcome.rows] == [2.5, 2.4]
    text = (tmp_path / "table.md").read_text()
    assert "Tuned with seed 3, the same grid for all (learning rate 0.001, 0.003, 0.01): " in text
    assert "vaswani2017 learning rate 0.003; rbf learning rate 0.001." in text
    # A second time nothing is tried.
    again = Runs()
    assert go(tmp_path, again).chosen == tuned.chosen
    assert again.given == []


def test_a_stopped_tuning_continues_where_it_was(tmp_path):
    assert go(tmp_path, Runs(stop_after=3)) is None
    assert choose(STUDY, tmp_path) is None
    rest = Runs()
    assert go(tmp_path, rest).chosen["rbf"] == {"learning_rate": 1e-3}
    assert len(rest.given) == 3


def test_shards_wait_for_each_other(tmp_path):
    assert go(tmp_path, Runs(), shard=Shard(1, 2)) is None
    assert go(tmp_path, Runs(), shard=Shard(2, 2)).chosen["rbf"] == {"learning_rate": 1e-3}


def test_what_never_converges_still_has_a_choice(tmp_path, monkeypatch):
    monkeypatch.setitem(FIGURES, "rbf", dict.fromkeys(FIGURES["rbf"], float("nan")))
    assert go(tmp_path, Runs()).chosen["rbf"] == {"learning_rate": 1e-3}


def test_a_study_without_a_grid_is_itself(tmp_path):
    study = replace(STUDY, tune={}, tune_budget={}, budget={"steps": 40})
    assert go(tmp_path, Runs(), study) is study
    assert say_chosen(study) == ""


def test_a_grid_of_two_settings_has_all_pairs():
    grid = {"learning_rate": (1e-3, 3e-3), "warmup": (0.0, 0.1)}
    found = points(replace(STUDY, tune=grid))
    assert len(found) == 4
    assert found[1][1].name == "learning_rate-0.001-warmup-0.1"
    assert found[1][1].budget == {"steps": 20, "batch": 4, "learning_rate": 1e-3, "warmup": 0.1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tune": {"learning_rate": (1e-3,)}}, "at least two different values of learning_rate"),
        ({"tune": {"learning_rate": "1e-3"}}, "at least two different values"),
        ({"budget": {"learning_rate": 1e-3}}, "learning_rate is tuned, so the budget must not"),
        ({"tune": {}}, "tune_budget needs tune"),
        ({"tune": {"kernel": ("RBF()", "Cosine()")}}, "the budget must not set 'kernel'"),
    ],
)
def test_a_wrong_grid_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        replace(STUDY, **changes)
