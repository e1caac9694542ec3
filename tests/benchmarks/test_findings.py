"""The findings say what the committed results say, and have no number from elsewhere."""

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mercer import studies
from mercer.studies import Ledger, Record
from mercer.studies.tune import points

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
NAME = "tsai-order-lm"
PAGE = """# Findings

## Not there yet

<!-- missing -->

<!-- end of missing -->
"""


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "benchmarks" / "findings.py"))


def record(job, value):
    return Record(
        key=job.key, study="x", variant=job.variant, seed=job.seed, status="done",
        metrics={"perplexity": value}, parameters=1000, flops_per_token=1e6,
        tokens_per_second=1e3, steps=10, seconds=36.0, finished=f"2026-01-0{job.seed + 1}",
        settings=dict(job.settings), environment={"device": "a GPU", "command": "x /home/me"},
    )  # fmt: skip


def test_the_pages_say_what_the_results_say(script, capsys):
    assert script["main"](["--check"]) == 0, capsys.readouterr().out


def test_every_number_of_the_findings_comes_from_somewhere(script):
    assert script["loose_numbers"]((ROOT / "docs/findings.md").read_text(), ROOT / "docs") == []


@pytest.mark.parametrize(
    ("text", "loose"),
    [
        ("RBF gains 0.28 BLEU.", ["0.28"]),
        ("On an H200, by Table 2 and GPT-2, depth 20.", []),
        ("`0.28` and <!-- cell: a | b | c -->0.28<!-- end -->.", []),
        (
            "It is 7 ([there](there.md#x)).\n\n- It is 7.\n- It is 8 ([there](there.md)).",
            ["7", "8"],
        ),
    ],
)
def test_a_number_from_nowhere_is_found(script, tmp_path, text, loose):
    (tmp_path / "there.md").write_text("There are 7.")
    assert script["loose_numbers"](text, tmp_path) == loose


def fill(root, study):
    """Two runs of each row of a study, and its trials, in runs/."""
    place = root / "runs" / study.name
    for point, trial in points(study):
        for job in trial.jobs():
            value = 50 + 1000 * next(iter(point.values()))
            Ledger(place / "tuning" / trial.name).append(record(job, value))
    chosen = studies.choose(study, place)
    for job in replace(study, chosen=chosen).jobs([0, 1]):
        better = 0.5 * (job.variant == "product-eq9")
        Ledger(place).append(record(job, 40 + job.seed - better))


@pytest.fixture
def root(script, tmp_path, monkeypatch):
    """A repository with two runs of each row of a study, in runs/."""
    monkeypatch.setattr("mercer.studies.look.draw_curves", lambda study, rows, path: path)
    fill(tmp_path, studies.load(NAME))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/findings.md").write_text(PAGE)
    (tmp_path / "README.md").write_text("# A library\n")
    return tmp_path


def test_one_command_merges_results_and_writes_the_page(script, root):
    page = root / "docs/findings.md"
    assert script["main"]([str(root / "runs")], root) == 0
    place = root / "results/studies" / NAME
    about = json.loads((place / "about.json").read_text())
    assert (about["jobs"], about["seeds"], about["devices"]) == (6, [0, 1], ["a GPU"])
    assert about["command"] == f"mercer study {NAME} --data DATA"
    assert "/home/me" not in (place / "results.jsonl").read_text()
    text = page.read_text()
    assert f"## {about['title']}\n\n<!-- study: {NAME} -->\n*{about['question']}*" in text
    assert "| product-eq9 | 40.00 ± 0.71 | 2/3 |" in text
    assert f"- `{NAME}`:" not in text
    # The same results, again: the same files. A result of another machine: merged.
    before = (place / "results.jsonl").read_bytes()
    shutil.rmtree(root / "runs" / NAME / "tuning")
    lines = (root / "runs" / NAME / "results.jsonl").read_text().splitlines(keepends=True)
    (root / "runs" / NAME / "results.jsonl").write_text("".join(lines[:3]))
    assert script["main"]([str(root / "runs")], root) == 0
    assert (place / "results.jsonl").read_bytes() == before
    assert page.read_text() == text


def test_results_without_their_trials_are_left_out(script, root, capsys):
    shutil.rmtree(root / "runs" / NAME / "tuning")
    assert script["main"]([str(root / "runs")], root) == 0
    assert f"{NAME}: not merged: {root / 'runs' / NAME} lacks trials of the tuning" in (
        capsys.readouterr().out
    )
    assert not (root / "results/studies" / NAME / "about.json").exists()


def test_a_rough_version_stands_there_until_the_full_one_does(script, root):
    page, rough = root / "docs/findings.md", f"{NAME}-rough"
    fill(root, studies.load(NAME, "rough"))
    shutil.move(root / "runs" / NAME, root / "full")
    assert script["main"]([str(root / "runs")], root) == 0
    about = json.loads((root / "results/studies" / rough / "about.json").read_text())
    assert about["command"] == f"mercer study {NAME} --size rough --data DATA"
    title = studies.load(NAME).title
    text = page.read_text()
    assert f"## {title}: a rough version\n\n<!-- study: {rough} -->" in text
    assert "steps 300 for 800" in text
    assert f"- `{NAME}`: Does a decoder need positions" in text
    assert "at all? A rough version has been run." in text
    shutil.move(root / "full", root / "runs" / NAME)
    assert script["main"]([str(root / "runs")], root) == 0
    text = page.read_text()
    assert f"## {title}\n\n<!-- study: {NAME} -->" in text
    assert rough not in text
    assert f"`{NAME}`: Does" not in text


def test_a_figure_that_is_not_in_the_results_fails(script, root):
    page = root / "docs/findings.md"
    assert script["main"]([str(root / "runs")], root) == 0
    said = (
        f"\nEq. 9 has <!-- cell: {NAME} | product-eq9 | perplexity -->40<!-- end -->, better by "
        f"<!-- difference: {NAME} | product-eq9 | none -->0.5<!-- end -->.\n"
    )
    right = page.read_text() + said
    page.write_text(right)
    assert script["main"](["--check"], root) == 0
    page.write_text(right.replace(">0.5<", ">0.7<").replace(">40<", ">39.9<"))
    assert script["main"](["--check"], root) == 1
    assert script["main"]([], root) == 0
    assert ">0.50<" in page.read_text()
    assert ">40.00<" in page.read_text()
    page.write_text(right.replace("| product-eq9 | perp", "| product | perp"))
    with pytest.raises(ValueError, match="no table of tsai-order-lm has the row 'product'"):
        script["main"](["--check"], root)
