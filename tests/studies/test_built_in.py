"""The studies that come with the package: their rows, sizes, data and costs."""

import io
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from rich.console import Console

from mercer import studies
from mercer.studies import Ledger, Record, Study, Trained, Variant
from mercer.studies.curves import _curve
from mercer.studies.load import FILES, check_data, list_sizes, load, use_data
from mercer.studies.parallel import _passing_on, run_workers
from mercer.studies.plan import estimate, rate
from mercer.studies.speed import reach
from mercer.studies.study import Metric
from mercer.studies.table import as_markdown, rows

SIZED = [(name, size) for name in FILES for size in list_sizes(name)]


def record(job, value=2.0, history=(), **more):
    return Record(
        key=job.key, study="x", variant=job.variant, seed=job.seed, status="done",
        metrics={"bits_per_byte": value, **more}, parameters=1000, flops_per_token=1e6,
        tokens_per_second=1e3, steps=10, seconds=1.0, finished=f"2026-01-0{job.seed + 1}",
        settings=dict(job.settings), history=list(history),
    )  # fmt: skip


@pytest.mark.parametrize(("name", "size"), SIZED, ids="-".join)
def test_every_job_of_a_study_can_be_set_up(name, size):
    study = load(name, size)
    if study.corpus:
        study = use_data(study, "somewhere")
    jobs = study.jobs()
    assert len({job.key for job in jobs}) == len(jobs) >= 3
    assert study.question.endswith("?")
    assert study.cost
    assert study.name == name + ("" if size == "full" else f"-{size}")


@pytest.mark.parametrize("name", [name for name, size in SIZED if size == "small"])
def test_every_model_of_a_small_study_can_be_built(name):
    costs = estimate(load(name, "small"))
    assert all(cost.parameters > 1000 for cost in costs)
    assert all(cost.flops > 0 or cost.seconds > 0 for cost in costs)


def test_the_tables_of_tsai_share_their_equal_rows():
    by_key = {}
    for name in ("tsai-positions", "tsai-kernels", "tsai-values", "tsai-order"):
        for job in load(name).jobs([0]):
            by_key.setdefault(job.key, set()).add(f"{name} {job.variant}")
    shared = {tuple(sorted(names)) for names in by_key.values() if len(names) > 1}
    assert (
        "tsai-kernels exponential", "tsai-positions direct-sum", "tsai-values direct-sum-I",
    ) in shared  # fmt: skip
    assert (
        "tsai-order in-a-b-c", "tsai-positions product-eq9", "tsai-values product-eq9-II",
    ) in shared  # fmt: skip
    assert ("tsai-positions look-up", "tsai-values look-up-II") in shared


def test_results_of_equal_runs_are_found_in_other_studies(tmp_path):
    budget = {"steps": 20, "batch": 4}
    one = Study(name="one", systems=["vaswani2017"], budget=budget, seeds=(0, 1))
    two = Study(
        name="two", systems=[Variant("base", system="vaswani2017"), "kundu2026"], budget=budget,
        seeds=(0, 1),
    )  # fmt: skip
    for job in one.jobs():
        Ledger(tmp_path / "one").append(record(job, 2.0 + job.seed))
    ran = []

    def runner(job, folder, screen):
        ran.append(str(job))
        raise KeyboardInterrupt

    console = Console(file=io.StringIO())
    outcome = studies.run(two, tmp_path / "two", runner=runner, console=console, share=True)
    assert ran == ["kundu2026 seed 0"]
    assert [row.seeds for row in outcome.rows] == ["2/2", "0/2"]
    assert outcome.rows[0].mean == 2.5
    assert "2 results are those of other studies beside this folder" in console.file.getvalue()


def test_data_is_named_by_its_place_in_the_folder(tmp_path):
    study = load("tsai-positions-lm")
    with pytest.raises(ValueError, match="needs data: give --data FOLDER, a folder with lm/wiki"):
        check_data(study)
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere, which --data names"):
        check_data(use_data(study, str(tmp_path / "nowhere")))
    check_data(use_data(study, "owner/name"))
    with pytest.raises(ValueError, match="has no folder lm, where lm/wikipedia should be"):
        check_data(use_data(study, str(tmp_path)))
    (tmp_path / "lm").mkdir()
    here = use_data(study, str(tmp_path))
    check_data(here)
    job, hub = here.jobs()[0], use_data(study, "wikitext103").jobs()[0]
    assert job.chosen["data"] == str(tmp_path / "lm/wikipedia")
    assert (job.settings["data"], hub.settings["data"]) == ("lm/wikipedia", "wikitext103")
    # The key does not depend on where the folder is.
    (tmp_path / "b" / "lm").mkdir(parents=True)
    assert use_data(study, str(tmp_path / "b")).jobs()[0].key == job.key != hub.key
    with pytest.raises(ValueError, match="names its own data, so it takes no --data"):
        use_data(load("quick"), "x")


def test_files_that_a_study_needs_are_looked_for_before_it_runs(tmp_path):
    study = load("tsai-positions-iwslt")
    (tmp_path / "translation").mkdir()
    message = "needs translation/iwslt14-valid.tsv.xz in a folder that --data names, got "
    for source in (str(tmp_path), "iwslt14"):
        with pytest.raises(ValueError, match=message + source):
            check_data(use_data(study, source))
    (tmp_path / study.needs[0]).touch()
    check_data(use_data(study, str(tmp_path)))


def test_sizes_are_named():
    with pytest.raises(ValueError, match="has no size 'smal' of gka-vision; did you mean 'small'"):
        load("gka-vision", "smal")
    with pytest.raises(ValueError, match="has one size only"):
        load("quick", "small")


def test_variants_differ_in_their_budget_only_where_the_study_says_so():
    longer = Variant("longer", system="vaswani2017", budget={"steps": 40})
    with pytest.raises(ValueError, match=r"'longer' sets 'steps'.*differ=\('steps',\)"):
        Study(systems=["vaswani2017", longer], budget={"steps": 20})
    study = Study(systems=["vaswani2017", longer], budget={"steps": 20}, differ=("steps",))
    assert [job.settings["steps"] for job in study.jobs([0])] == [20, 40]


def test_more_figures_are_measured_and_shown(tmp_path):
    def count(trained: Trained):
        assert trained.folder.parent.name == "jobs"
        return {"twice": 2.0 * trained.settings["steps"]}

    study = Study(
        systems=["vaswani2017"], budget={"steps": 20}, seeds=(0,), measure=count,
        # No run has the second: its files were not there.
        columns=(Metric("twice", "twice the steps", True, 1), Metric("absent", "absent", True)),
        analyse=lambda found, folder: f"{len(found)} row in {folder.name}",
    )  # fmt: skip

    def runner(job, folder, screen):
        return replace(record(job), status="done")

    outcome = studies.run(
        study, tmp_path / "more", runner=runner, console=Console(file=io.StringIO())
    )
    assert outcome.failed == {}
    text = (tmp_path / "more" / "table.md").read_text()
    assert "| vaswani2017 | 2.000 | 1/1 | 40.0 |" in text
    assert text.endswith("1 row in more\n")
    assert "absent" not in text
    # A measure is a part of the key.
    assert study.jobs()[0].key != replace(study, measure=None).jobs()[0].key


def test_an_analysis_that_fails_costs_no_table(tmp_path):
    def broken(found, folder):
        raise ValueError("two labels are needed")

    study = Study(systems=["vaswani2017"], budget={"steps": 20}, seeds=(0,), analyse=broken)
    outcome = studies.run(
        study, tmp_path / "broken", runner=lambda job, folder, screen: record(job),
        console=Console(file=io.StringIO()),
    )  # fmt: skip
    assert outcome.notes == ["the analysis failed: two labels are needed"]
    assert "| vaswani2017 | 2.000 |" in (tmp_path / "broken" / "table.md").read_text()


# A process that takes lines of a list, one after another, without importing anything heavy.
WORKER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
for number, line in enumerate((folder / "list").read_bytes().splitlines(True)):
    try:
        (folder / f"claim-{number}").mkdir()
    except FileExistsError:
        continue
    with (folder / "results.jsonl").open("ab") as file:
        file.write(line)
"""


def test_several_processes_share_the_jobs(tmp_path):
    study = Study(name="many", systems=["vaswani2017"], budget={"steps": 20}, seeds=(0, 1, 2, 3))
    for job in study.jobs():
        Ledger(tmp_path / "made").append(record(job, 2.0 + job.seed))
    folder = tmp_path / "many"
    folder.mkdir()
    (tmp_path / "made" / "results.jsonl").rename(folder / "list")
    console = Console(file=io.StringIO(), width=100)
    ended = run_workers([sys.executable, "-c", WORKER, str(folder)], 2, folder, study, console)
    assert ended.codes == [0, 0], [log.read_text() for log in ended.logs]
    assert len(Ledger(folder).read()) == 4
    assert "vaswani2017 seed 3: 5.000 bits per byte" in console.file.getvalue()


def test_a_worker_that_fails_is_named(tmp_path):
    study = Study(systems=["vaswani2017"], seeds=(0,))
    console = Console(file=io.StringIO())
    ended = run_workers([sys.executable, "-c", "raise SystemExit(3)"], 1, tmp_path, study, console)
    assert ended.codes == [3]
    assert ended.signal == 0


def test_a_signal_reaches_the_workers(tmp_path):
    parent = """
import io, sys
from pathlib import Path
from rich.console import Console
from mercer.studies import Study, run_workers
child = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143));"
child += "print('up', flush=True); time.sleep(60)"
study, console = Study(systems=["vaswani2017"], seeds=(0,)), Console(file=io.StringIO())
ended = run_workers([sys.executable, "-c", child], 2, Path(sys.argv[1]), study, console)
print(ended.signal, ended.codes)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    logs = [tmp_path / f"worker-{n}.log" for n in (1, 2)]
    while not all(log.exists() and "up" in log.read_text() for log in logs):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    said, _ = process.communicate(timeout=60)
    assert said.strip() == "15 [143, 143]"


def test_a_signal_reaches_a_worker_that_is_just_starting():
    with _passing_on() as passing, subprocess.Popen(["sleep", "60"]) as worker:
        signal.raise_signal(signal.SIGTERM)
        passing.add(worker)
        assert worker.wait(timeout=60) == -signal.SIGTERM
    assert passing.signal == signal.SIGTERM


def test_a_plan_takes_the_speed_of_finished_jobs(tmp_path):
    study = replace(load("quick"), seeds=(0,))
    assumed, where = rate(study, tmp_path)
    assert assumed > 1e9
    assert "assumed" in where
    Ledger(tmp_path).append(record(study.jobs()[0]))
    assert rate(study, tmp_path) == (1e9, "as in 1 finished jobs")
    costs = estimate(study)
    # 160 steps of 8 blocks of 128 tokens.
    assert {cost.tokens for cost in costs} == {160 * 8 * 128}
    plan = Console(file=io.StringIO(), width=120)
    studies.show_plan(plan, study, tmp_path)
    assert "6 jobs, trials of the tuning included; 1 are done" in plan.file.getvalue()
    more = Console(file=io.StringIO(), width=120)
    studies.show_plan(more, study, tmp_path, seeds=[0, 1, 2])
    assert "18 jobs, trials of the tuning included" in more.file.getvalue()


def test_a_mean_curve_has_only_the_steps_of_all_seeds():
    study = Study(systems=["vaswani2017"], seeds=(0, 1))
    first, second = study.jobs()
    found = [
        record(job, history=[{"step": s, "bits_per_byte": start - s, "seconds": pace * s}
                             for s in steps])
        for job, start, pace, steps in ((first, 4.0, 2.0, (1, 2, 3)), (second, 3.0, 4.0, (1, 3)))
    ]  # fmt: skip
    (row,) = rows(study, found)
    assert _curve(row) == {1: [3.0, 2.0], 3: [1.0, 0.0]}
    assert _curve(row, "seconds") == {3.0: [3.0, 2.0], 9.0: [1.0, 0.0]}
    # Both curves pass 1.5 between two points, on a straight line: at steps 2.5 and 1.5.
    assert reach(row, 1.5) == (pytest.approx((5.0 + 6.0) / 2), pytest.approx(2.0))
    assert reach(row, -1.0) is None
    assert "| vaswani2017 | 2.000 ± 0.000 | 2/2 |" in as_markdown(study, [row])
