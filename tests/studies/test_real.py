"""A study with real training, small enough for a test."""

import io
import json
import os
import signal
from dataclasses import replace

import pytest
from rich.console import Console

from mercer import studies
from mercer.studies import Study, Variant

pytest.importorskip("transformers")


@pytest.fixture
def study(tmp_path):
    return Study(
        name="real",
        systems=["kundu2026", Variant("matern", kernel="Matern(1.5, heads=2)", position="rotary")],
        budget={
            "tokenizer": "bytes", "steps": 6, "batch": 2, "length": 32, "eval_items": 64,
            "eval_every": 2, "save_every": 2, "device": "cpu", "cache": str(tmp_path / "cache"),
        },
        seeds=(0,),
    )  # fmt: skip


def run(study, folder):
    return studies.run(study, folder, console=Console(file=io.StringIO()))


def test_an_interrupted_study_ends_as_one_that_was_not(study, tmp_path, monkeypatch):
    whole = run(study, tmp_path / "whole")
    assert [row.seeds for row in whole.rows] == ["1/1", "1/1"]
    assert all(1 < row.mean < 12 for row in whole.rows)

    show = studies.screen.Screen.show

    def interrupt(screen, progress):
        show(screen, progress)
        if progress.step == 4 and screen.job.variant == "matern":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(studies.screen.Screen, "show", interrupt)
    first = run(study, tmp_path / "parts")
    assert first.interrupted
    assert [row.seeds for row in first.rows] == ["1/1", "0/1"]
    monkeypatch.setattr(studies.screen.Screen, "show", show)
    second = run(study, tmp_path / "parts")
    assert not second.interrupted
    assert [row.mean for row in second.rows] == [row.mean for row in whole.rows]
    assert (tmp_path / "parts" / "curves.png").exists()

    # Without its ledger, the folders of the jobs know their results.
    lines = (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    (tmp_path / "whole" / "results.jsonl").unlink()
    again = run(study, tmp_path / "whole")
    assert [row.mean for row in again.rows] == [row.mean for row in whole.rows]
    steps = [entry["step"] for entry in json.loads(lines[0])["history"]]
    assert steps == [2, 4, 6]


def test_studies_beside_each_other_share_the_run_that_their_jobs_start_from(study, tmp_path):
    # The attention of both is the same, since all weights are those of the first run.
    start = {**study.budget, "system": "vaswani2017", "steps": 4}
    study = replace(
        study, systems=[Variant("low", system="vaswani2017"), Variant(
            "high", system="vaswani2017", overrides={"dropout": 0.5})], backbone=start,
    )  # fmt: skip

    def run_in(name, share):
        place = tmp_path / name
        found = studies.run(study, place, console=Console(file=io.StringIO()), share=share)
        assert not found.failed
        ends = [path.parent for path in place.glob("backbone/*/result.json")]
        for row in found.rows:
            (record,) = row.records
            assert record.settings["init"].startswith("backbone ")
        return [row.mean for row in found.rows], ends

    first, ends = run_in("first", share=True)
    assert len(ends) == 1
    (tmp_path / "first" / "results.jsonl").rename(tmp_path / "kept")
    assert run_in("second", share=True) == (first, [])
    (tmp_path / "second" / "results.jsonl").unlink()
    found, ends = run_in("alone", share=False)
    assert (found, len(ends)) == (first, 1)
