"""The command `mercer study`, with a fake trainer."""

import json
import math
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from mercer import studies
from mercer.cli.study import read_seeds, read_shard, run_study

app = typer.Typer()
app.command("study")(run_study)
app.callback()(lambda: None)
conduct, look = (sys.modules[f"mercer.studies.{name}"] for name in ("conduct", "look"))

MINE = """
from mercer.studies import Study, Variant

study = Study(
    systems=["vaswani2017", Variant("rbf", kernel="RBF()", position="direct-sum")],
    budget={"steps": 20},
    seeds=(0, 1),
)
"""


def pretend(job, folder, screen, **options):
    value = 2.5 + 0.02 * job.seed + (0.1 if job.variant == "rbf" else 0.0)
    screen.show(SimpleNamespace(step=10, steps=20, loss=3.0, tokens_per_second=1e3))
    return SimpleNamespace(
        status="done", metrics={"bits_per_byte": value}, parameters=118_000, steps=20,
        flops_per_token=1.3e6, tokens_per_second=2e4,
        history=[{"step": n, "bits_per_byte": value + math.exp(-n)} for n in (10, 20)],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(conduct, "train", pretend)
    monkeypatch.setattr(look, "draw_curves", lambda study, rows, path: path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(app, ["study", *arguments])


def test_a_file_runs_and_its_table_is_shown_again(place):
    done = call("mine.py")
    assert done.exit_code == 0, done.output
    assert "2.510 ± 0.014" in done.output
    assert "2.610 ± 0.014" in done.output
    assert (place / "runs" / "mine" / "results.jsonl").exists()
    again = call("mine.py", "--table")
    assert again.exit_code == 0
    assert "2.510 ± 0.014" in again.output
    told = json.loads(call("mine.py", "--table", "--json").output)
    assert [row["wanted"] for row in told["rows"]] == [2] * len(told["rows"])
    assert any(row["mean"] == pytest.approx(2.51) for row in told["rows"])
    refused = call("mine.py", "--json")
    assert (refused.exit_code, "--json needs --table, or list" in refused.output) == (2, True)


def test_the_list_is_there_as_json():
    told = {study["name"]: study for study in json.loads(call("list", "--json").output)}
    assert told["quick"]["jobs"] == 12
    assert told["twikers-bias-tags"]["data"] == "style/ud-ewt"


def test_shards_seeds_and_output(place):
    first = call("mine.py", "--shard", "1/2", "--seeds", "0-2", "--output", "there")
    assert first.exit_code == 0
    assert "3 jobs to go" in first.output
    second = call("mine.py", "--shard", "2/2", "--seeds", "0-2", "--output", "there")
    assert "done in" in second.output
    assert len((place / "there" / "results.jsonl").read_text().splitlines()) == 6


def test_compiled_runs_count_as_the_same_runs(place, monkeypatch):
    given = []

    def note(job, folder, screen, **options):
        given.append(options["compile"])
        result = pretend(job, folder, screen)
        result.environment = {"compiled": True} if options["compile"] else {}
        return result

    monkeypatch.setattr(conduct, "train", note)
    assert call("mine.py", "--seeds", "0").exit_code == 0
    assert call("mine.py", "--compile").exit_code == 0
    assert given == [False, False, True, True]
    told = " ".join(call("mine.py", "--table").output.split())
    assert "2 of 4 results are of compiled models, so do not compare speeds" in told


def test_runs_that_end_by_time_are_compiled_by_their_budget(place):
    timed = place / "timed.py"
    timed.write_text(MINE.replace('"steps": 20', '"time": 5.0'))
    for more in ([], ["--jobs", "2"]):
        refused = call("timed.py", "--compile", *more)
        assert refused.exit_code == 2
        assert "the runs of timed end by time" in " ".join(refused.output.split())
    found = [
        studies.load(str(timed)),
        replace(studies.load(str(timed)), budget={"time": 5.0, "compile": True}),
    ]
    assert found[0].jobs()[0].key != found[1].jobs()[0].key
    steps = studies.load("mine.py")
    same = replace(steps, budget={**steps.budget, "compile": True})
    assert steps.jobs()[0].key == same.jobs()[0].key


def test_workers_compile_too(monkeypatch):
    commands = []

    def pretend_workers(command, *rest):
        commands.append(command)
        return studies.parallel.Ended()

    monkeypatch.setattr(studies, "run_workers", pretend_workers)
    call("mine.py", "--jobs", "2", "--compile")
    assert commands[0][-2:] == ["mine.py", "--compile"]


def test_an_interrupt_says_how_to_go_on(place, monkeypatch):
    def stop(job, folder, screen, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(conduct, "train", stop)
    done = call("mine.py")
    assert done.exit_code == 130
    assert "interrupted" in done.output
    assert "4 jobs to go" in done.output


def test_a_failure_is_an_exit_code(monkeypatch):
    def fail(job, folder, screen, **options):
        raise RuntimeError("out of memory [16 GB]")

    monkeypatch.setattr(conduct, "train", fail)
    done = call("mine.py")
    assert done.exit_code == 1
    assert "rbf seed 1: out of memory [16 GB]" in done.output
    # Said once as it happens, and once for all jobs at the end.
    assert done.output.count("out of memory") == 2
    assert "Traceback" not in done.output


def test_a_full_disk_gives_a_one_line_error(monkeypatch):
    def fill(job, folder, screen, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conduct, "train", fill)
    done = call("mine.py")
    assert done.exit_code == 2
    assert "No space left on device; finished jobs are kept" in done.output


def test_without_matplotlib_there_is_a_table(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(look, "draw_curves", studies.draw_curves)
    done = call("mine.py")
    assert done.exit_code == 0, done.output
    assert "2.510 ± 0.014" in done.output
    assert "no curves: they need matplotlib: pip install 'mercer[train]'" in done.output


def test_without_a_name_the_studies_are_listed():
    done = call()
    assert done.exit_code == 0
    assert "quick" in done.output


def test_the_source_of_a_study_is_a_study(place):
    (place / "copy.py").write_text(call("quick", "--source").output)
    copy, quick = studies.load("copy.py"), studies.load("quick")
    assert [job.key for job in copy.jobs()] == [job.key for job in quick.jobs()]


def test_quick_is_what_it_promises():
    quick = studies.load("quick")
    names = " ".join(variant.name for variant in quick.variants)
    for system in ("vaswani2017", "dai2019", "tsai2019", "rbf", "kundu2026", "leng2026"):
        assert system in names
    assert len(quick.seeds) == 2
    # Systems differ in their attention alone: one budget, rates included.
    budgets = [
        {k: v for k, v in job.settings.items() if k not in (*studies.PARTS, "seed")}
        for job in quick.jobs()
    ]
    assert all(budget == budgets[0] for budget in budgets)
    shapes = [job.settings["overrides"] for job in quick.jobs()]
    assert all(shape == shapes[0] for shape in shapes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quack"], "there is no study 'quack'; there are: quick"),
        (["gone.py"], "there is no file gone.py"),
        (["mine.py", "--shard", "2"], "--shard must be i/n"),
        (["mine.py", "--shard", "3/2"], "--shard must be i/n"),
        (["mine.py", "--shard", "0/2"], "--shard must be i/n"),
        (["mine.py", "--seeds", "a"], "--seeds must be such as"),
        (["mine.py", "--seeds", "4-2"], "--seeds must be such as"),
        (["mine.py", "--table"], "there are no results of this study in runs/mine yet"),
        (["empty.py"], "empty.py must define `study = Study(...)`, but has no `study`"),
        (["wrong.py"], "must be a mercer.studies.Study, got 3"),
        (["broken.py"], "broken.py:2: "),
        (["division.py"], "division.py:3: division by zero"),
        (["typo.py"], "did you mean 'learning_rate'?"),
    ],
)
def test_mistakes_give_a_one_line_error(place, arguments, message):
    (place / "empty.py").write_text("")
    (place / "wrong.py").write_text("from mercer import studies\nstudy = 3")
    (place / "broken.py").write_text("x = 1\nstudy = Study(")
    (place / "division.py").write_text("x = 1\n\ny = x / 0\n")
    (place / "typo.py").write_text(MINE.replace('"steps": 20', '"learning_rat": 1e-3'))
    done = call(*arguments)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_another_budget_in_the_folder(place):
    call("mine.py")
    (place / "mine.py").write_text(MINE.replace('"steps": 20', '"steps": 30'))
    for arguments in (["mine.py"], ["mine.py", "--table"]):
        done = call(*arguments)
        assert done.exit_code == 2
        assert "steps was 20, is now 30" in done.output
    assert call("mine.py", "--output", "runs/longer").exit_code == 0


def test_seeds_and_shards_are_read():
    assert read_seeds("0,1, 2") == [0, 1, 2]
    assert read_seeds("3") == [3]
    assert read_seeds("0-2,2-4,9") == [0, 1, 2, 3, 4, 9]
    assert read_shard("2/3") == studies.Shard(2, 3)
