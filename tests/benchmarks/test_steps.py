"""The benchmark of whole steps, at sizes that take no time."""

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "steps.py"


def test_steps_are_timed_beside_the_yardstick(tmp_path, capsys):
    main = runpy.run_path(str(SCRIPT))["main"]
    small = "--device cpu --preset tiny --lengths 16,32 --tokens 32 --eager --repeats 1"
    systems = "kundu2026,leng2026,parmar2018,rbf"
    rows = main([*small.split(), "--systems", systems, "--output", str(tmp_path / "here")])
    assert [row.length for row in rows] == [16] * 6 + [32] * 6
    assert not [row.problem for row in rows if row.problem]
    assert all(row.ratio > 0 for row in rows)
    sticks = [row.ratio for row in rows if row.system.startswith("vaswani2017 on SDPA")]
    assert sum(sticks[:2]) == pytest.approx(2)
    stored = json.loads((tmp_path / "here.json").read_text())
    assert stored["command"].startswith("python benchmarks/steps.py --device cpu")
    assert {"device", "versions", "commit", "rows"} <= set(stored)
    assert "| kundu2026 |" in (tmp_path / "here.md").read_text()
    assert "the slowest" in capsys.readouterr().out


def test_a_problem_is_a_row_of_its_own(tmp_path):
    main = runpy.run_path(str(SCRIPT))["main"]
    small = "--device cpu --preset tiny --lengths 16 --tokens 16 --eager --repeats 1"
    rows = main([*small.split(), "--systems", "bert"])
    assert "there is no system 'bert'" in rows[1].problem
