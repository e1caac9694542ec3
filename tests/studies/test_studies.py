"""Studies with a fake trainer: jobs, results, output."""

import io
import json
import math
import multiprocessing
import re
import warnings
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from mercer import studies
from mercer.studies import Ledger, Record, Row, Shard, Study, Variant, conduct, curves
from mercer.studies.screen import clock
from mercer.studies.table import shorten

STUDY = Study(
    name="small",
    title="A small study",
    systems=[
        "vaswani2017",
        Variant("rbf", system="vaswani2017", system_options={"kernel": "RBF()"}),
        "kundu2026",
    ],
    budget={"steps": 40, "batch": 4},
    seeds=(0, 1),
)


@dataclass
class Result:
    status: str = "done"
    metrics: dict = field(default_factory=dict)
    parameters: int = 118_000
    flops_per_token: float = 1.3e6
    tokens_per_second: float = 21_000.0
    steps: int = 40
    history: list = field(default_factory=list)


@dataclass
class Pretended:
    """A trainer with known results, and the list of its calls."""

    ran: list = field(default_factory=list)
    stop_after: int | None = None
    fails: dict = field(default_factory=dict)

    def __call__(self, job, folder, screen):
        if self.stop_after == len(self.ran):
            raise KeyboardInterrupt
        assert folder.parent.is_dir()
        if job.variant in self.fails:
            outcome = self.fails[job.variant]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        self.ran.append(str(job))
        start = {"vaswani2017": 2.5, "rbf": 2.4, "kundu2026": 2.8}[job.variant]
        history = []
        for step in range(10, 41, 10):
            screen.show(SimpleNamespace(step=step, steps=40, loss=3.0, tokens_per_second=1e3))
            value = start + 2 * math.exp(-step / 10) + 0.02 * job.seed
            history.append({"step": step, "bits_per_byte": value})
        return Result(metrics={"bits_per_byte": start + 0.02 * job.seed}, history=history)


def quiet():
    return Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def no_curves(monkeypatch, request):
    """Skip drawing, which takes longer than the rest."""
    if "curves" not in request.function.__name__:
        monkeypatch.setattr("mercer.studies.look.draw_curves", lambda study, rows, path: path)


def go(folder, study=STUDY, **options):
    runner = options.pop("runner", None) or Pretended()
    outcome = studies.run(study, folder, runner=runner, console=quiet(), **options)
    return outcome, runner


def test_every_system_runs_with_every_seed(tmp_path):
    outcome, runner = go(tmp_path)
    assert runner.ran[:3] == ["vaswani2017 seed 0", "rbf seed 0", "kundu2026 seed 0"]
    assert len(runner.ran) == 6
    assert [row.figure for row in outcome.rows] == [
        "2.510 ± 0.014",
        "2.410 ± 0.014",
        "2.810 ± 0.014",
    ]
    assert outcome.missing == 0
    assert not outcome.interrupted
    names = {path.name for path in outcome.files}
    assert names == {"results.jsonl", "table.md", "curves.png"}
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 0, 0, 1, 1, 1]
    settings = json.loads(lines[1])["settings"]
    assert settings["system_options"] == {"kernel": "RBF()"}
    assert settings["steps"] == 40


def test_evaluations_get_the_seconds_of_the_logs_around_them():
    history = [
        {"step": 5, "bits_per_byte": 4.0}, {"step": 10, "loss": 3.0, "seconds": 2.0},
        {"step": 15, "bits_per_byte": 3.0}, {"step": 20, "loss": 2.0, "seconds": 6.0},
        {"step": 20, "bits_per_byte": 2.0},
    ]  # fmt: skip
    found = [entry.get("seconds") for entry in conduct.with_seconds(history)]
    # Before the first log nothing is known.
    assert found == [None, 2.0, 4.0, 6.0, 6.0]


def test_running_again_runs_nothing(tmp_path):
    go(tmp_path)
    outcome, runner = go(tmp_path)
    assert runner.ran == []
    assert outcome.missing == 0


@pytest.mark.parametrize("how", ["raises", "returns"])
def test_an_interrupt_keeps_what_is_finished(tmp_path, how):
    first = Pretended(stop_after=2)
    if how == "returns":
        first = Pretended(fails={"kundu2026": Result(status="stopped")})
    outcome, _ = go(tmp_path, runner=first)
    assert outcome.interrupted
    assert outcome.missing == 4
    outcome, second = go(tmp_path)
    assert not outcome.interrupted
    assert first.ran + second.ran == go(tmp_path / "at-once")[1].ran
    assert outcome.missing == 0


def test_more_seeds_run_only_what_is_new(tmp_path):
    go(tmp_path)
    outcome, runner = go(tmp_path, seeds=[0, 1, 2])
    assert runner.ran == ["vaswani2017 seed 2", "rbf seed 2", "kundu2026 seed 2"]
    assert [row.seeds for row in outcome.rows] == ["3/3"] * 3
    # The table shows what is there, also for fewer seeds.
    assert [row.seeds for row in studies.look_up(STUDY, tmp_path)[0]] == ["3/3"] * 3


def test_shards_split_the_jobs_and_merge(tmp_path):
    one, first = go(tmp_path, shard=Shard(1, 2))
    assert one.missing == 3
    two, second = go(tmp_path, shard=Shard(2, 2))
    assert not set(first.ran) & set(second.ran)
    assert two.missing == 0
    assert {p.name for p in tmp_path.glob("*.jsonl")} == {
        "results.jsonl", "results-1-of-2.jsonl", "results-2-of-2.jsonl",
    }  # fmt: skip
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 6
    assert go(tmp_path)[1].ran == []


def test_shards_of_two_machines_merge_when_copied_together(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    go(here, shard=Shard(1, 2))
    go(there, shard=Shard(2, 2))
    name = "results-2-of-2.jsonl"
    (here / name).write_bytes((there / name).read_bytes())
    found, notes, _ = studies.look_up(STUDY, here)
    assert [row.seeds for row in found] == ["2/2"] * 3
    assert notes == []
    assert len((here / "results.jsonl").read_text().splitlines()) == 6


def test_a_torn_line_is_run_again(tmp_path):
    go(tmp_path)
    path = tmp_path / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    found, notes, _ = studies.look_up(STUDY, tmp_path)
    assert [row.seeds for row in found] == ["2/2", "2/2", "1/2"]
    assert "results.jsonl line 6 cannot be read" in notes[0]
    outcome, runner = go(tmp_path)
    assert runner.ran == ["kundu2026 seed 1"]
    assert outcome.missing == 0
    assert len(Ledger(tmp_path).read()) == 6


def test_lines_of_another_kind_are_no_results(tmp_path):
    go(tmp_path)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('[1, 2]\n{"key": "x"}\nnull\n\n"text"\n')
    records, torn = Ledger(tmp_path).scan()
    assert len(records) == 6
    assert len(torn) == 4


def test_of_two_results_the_first_counts(tmp_path):
    go(tmp_path)
    ledger = Ledger(tmp_path, Shard(3, 4))
    record = next(iter(ledger.read().values()))
    later = replace(record, finished="9999", metrics={"bits_per_byte": 0.0})
    ledger.append(later)
    assert ledger.read()[record.key] == record


def _append(folder, shard, number):
    ledger = Ledger(folder, shard)
    template = next(iter(Ledger(folder / "template").read().values()))
    for n in range(20):
        ledger.append(replace(template, key=f"{number}-{n}"))
        ledger.gather()


@pytest.mark.parametrize("same_file", [True, False])
def test_processes_write_at_once(tmp_path, same_file):
    go(tmp_path / "template", seeds=[0])
    context = multiprocessing.get_context("fork")
    shards = [Shard() if same_file else Shard(n + 1, 3) for n in range(3)]
    workers = [
        context.Process(target=_append, args=(tmp_path, shard, n)) for n, shard in enumerate(shards)
    ]
    with warnings.catch_warnings():
        # Python 3.12 warns of threads at a fork; ours touches none.
        warnings.simplefilter("ignore", DeprecationWarning)
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    records, torn = Ledger(tmp_path).scan()
    assert len(records) == 60
    assert torn == []
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 60


def test_a_job_of_another_process_is_left_to_it(tmp_path):
    job = STUDY.jobs()[1]
    from mercer.studies.ledger import claim

    with claim(tmp_path / "jobs" / job.name) as ours:
        assert ours
        outcome, runner = go(tmp_path)
    assert [str(j) for j in outcome.elsewhere] == ["rbf seed 0"]
    assert "rbf seed 0" not in runner.ran
    assert outcome.missing == 1
    assert go(tmp_path)[1].ran == ["rbf seed 0"]


def test_what_did_not_converge_is_a_result(tmp_path):
    diverged = Result(status="not converged at step 7", metrics={"bits_per_byte": math.nan})
    outcome, _ = go(tmp_path, runner=Pretended(fails={"rbf": diverged}))
    row = outcome.rows[1]
    assert row.figure == "not converged at step 7"
    assert row.mean is None
    assert row.seeds == "2/2"
    # JSON has no NaN.
    assert "NaN" not in (tmp_path / "results.jsonl").read_text()
    assert go(tmp_path)[1].ran == []
    half = replace(row, records=(row.records[0], outcome.rows[0].records[1]))
    assert half.figure == "1 of 2 not converged (2.520)"


def test_a_job_that_fails_is_tried_again(tmp_path):
    outcome, runner = go(tmp_path, runner=Pretended(fails={"rbf": RuntimeError("no memory")}))
    assert outcome.failed == {"rbf seed 0": "no memory", "rbf seed 1": "no memory"}
    assert len(runner.ran) == 4
    assert go(tmp_path)[1].ran == ["rbf seed 0", "rbf seed 1"]


def test_a_full_disk_stops_everything(tmp_path):
    full = OSError(28, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        go(tmp_path, runner=Pretended(fails={"rbf": full}))
    assert len(Ledger(tmp_path).read()) == 1


def test_another_budget_is_noticed(tmp_path):
    go(tmp_path)
    longer = replace(STUDY, budget={"steps": 80, "batch": 4})
    with pytest.raises(ValueError, match=r"another budget: steps was 40, is now 80\b.*--output"):
        go(tmp_path, longer)
    with pytest.raises(ValueError, match="another budget"):
        studies.look_up(longer, tmp_path)


def test_another_definition_of_a_system_is_left_out(tmp_path):
    go(tmp_path)
    changed = replace(STUDY, systems=["vaswani2017", Variant("rbf", system="tsai2019")])
    found, notes, _ = studies.look_up(changed, tmp_path)
    assert [row.seeds for row in found] == ["2/2", "0/2"]
    assert "older results of 'rbf' are left out: " in notes[0]
    assert "system was 'vaswani2017', is now 'tsai2019'" in notes[0]


def test_a_mixture_of_machines_is_reported(tmp_path):
    go(tmp_path)
    ledger = Ledger(tmp_path)
    first, second, *_ = ledger.read().values()
    (tmp_path / "results.jsonl").unlink()
    for record, python, tokens in ((first, "3.11.7", 100), (second, "3.12.1", 120)):
        metrics = {**record.metrics, "eval_tokens": tokens}
        around = {"versions": {"python": python}, "data": f"hash{tokens}"}
        ledger.append(replace(record, environment=around, metrics=metrics))
    assert studies.look_up(STUDY, tmp_path)[1] == [
        "results come from several versions of python: 3.11.7, 3.12.1",
        "results on embedded are of 2 versions of the data, so they cannot be compared: "
        "hash100 in 1, hash120 in 1 of the results",
        "results were measured on different texts, of 100, 120 tokens",
    ]


def test_the_key_holds_all_that_decides():
    keys = {job.key for job in STUDY.jobs()}
    assert len(keys) == 6
    assert keys == {job.key for job in replace(STUDY, name="other", title="x").jobs()}
    for changed in (
        replace(STUDY, budget={"steps": 41, "batch": 4}),
        replace(STUDY, seeds=(2, 3)),
        replace(STUDY, task="vision"),
    ):
        assert not keys & {job.key for job in changed.jobs()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Study(systems=[]), "systems must be a list"),
        (lambda: Study(systems="vaswani2017"), "systems must be a list"),
        (lambda: Study(systems=["bert"]), "'bert' must set system or kernel.*vaswani2017"),
        (lambda: Study(systems=["dai2019", "dai2019"]), "'dai2019' occurs twice"),
        (lambda: Study(systems=["dai2019"], task="chess"), "task must be one of lm, translation"),
        (lambda: Study(systems=["dai2019"], seeds=[]), "seeds must be different numbers"),
        (lambda: Study(systems=["dai2019"], seeds=[1, 1]), "seeds must be different numbers"),
        (
            lambda: Study(systems=["dai2019"], budget={"kernel": "x"}),
            "the budget must not set 'kernel'",
        ),
        (lambda: Study(systems=["dai2019"], budget={"step": 3}).jobs(), "did you mean 'steps'"),
        (lambda: Study(systems=["dai2019"], budget={"steps": 0}).jobs(), "dai2019: steps must be"),
        (lambda: Variant("a", steps=3), "sets 'steps', but systems may differ in"),
        (lambda: Variant("a b", system="dai2019"), "must be letters"),
        (lambda: Shard(3, 2), "i from 1 to n, got 3/2"),
        (lambda: Shard(0, 2), "i from 1 to n"),
    ],
)
def test_mistakes_raise_with_a_message(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to"):
        go(tmp_path / "file" / "x")


@pytest.mark.parametrize("width", [45, 60, 80, 140])
def test_the_table_fits(tmp_path, width):
    outcome, _ = go(tmp_path)
    console = Console(width=width, file=io.StringIO())
    console.print(studies.draw(outcome.rows, "rbf", width))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for word in ("vaswani2017", "▸ 2/2", "2.510 ± 0.014", "2/2"):
        assert word in text
    assert ("118k" in text) == (width >= 60)
    assert ("tokens/s" in text) == (width >= 80)


def test_the_curves_are_drawn_again_in_one_step(tmp_path):
    go(tmp_path)
    path = tmp_path / "curves.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.glob(".curves*")] == []


def test_a_mean_curve_has_the_steps_that_all_seeds_have(tmp_path):
    outcome, _ = go(tmp_path)
    row = outcome.rows[0]
    first, second = row.records
    assert list(curves._curve(row)) == [10, 20, 30, 40]
    assert [len(values) for values in curves._curve(row).values()] == [2] * 4

    def with_steps(record, points, **more):
        found = [{"step": n, "bits_per_byte": x, **more} for n, x in points]
        return replace(record, history=found)

    # Each seed falls; a mean over the seeds of each step would rise at 20 and at 30.
    apart = (
        with_steps(first, [(10, 3.0), (30, 2.9), (40, 2.5)]),
        with_steps(second, [(10, 2.0), (20, 1.9), (40, 1.5)]),
    )
    assert curves._curve(replace(row, records=apart)) == {10: [3.0, 2.0], 40: [2.5, 1.5]}
    # A run whose loss was not finite at once has no points, and takes none away.
    gone = replace(second, status="not converged at step 2", history=[])
    assert list(curves._curve(replace(row, records=(first, gone)))) == [10, 20, 30, 40]
    # The last evaluation reads more: it is no point of the curve.
    more = with_steps(first, [(10, 3.0), (20, 2.0)], eval_items=64)
    more.history.append({"step": 20, "bits_per_byte": 9.0, "eval_items": 1000})
    assert curves._curve(replace(row, records=(more,))) == {10: [3.0], 20: [2.0]}
    none = replace(row, records=(with_steps(first, [(10, 3.0)]), with_steps(second, [(20, 3.0)])))
    assert curves._curve(none) == {}
    assert curves.draw_curves(STUDY, [none], tmp_path / "none.png") is None


def test_a_run_at_the_level_of_token_frequencies_is_a_result(tmp_path):
    stuck = Result(status="not converged (unigram)", metrics={"bits_per_byte": 3.1})
    outcome, _ = go(tmp_path, runner=Pretended(fails={"rbf": stuck}))
    assert outcome.rows[1].figure == "not converged (unigram)"
    assert outcome.rows[1].mean is None
    assert outcome.notes == [
        "no better than the frequencies of tokens, so not converged: rbf "
        "(the rule is in docs/training.md)"
    ]


def test_numbers_are_short():
    shown = [shorten(n) for n in (0.5, 12, 999.7, 1000, 118_234, 999_600, 1_324_000, 2.5e12)]
    assert shown == ["0.5", "12", "1k", "1k", "118k", "1M", "1.32M", "2.5T"]
    assert [clock(s) for s in (0, 65, 7390)] == ["0:00", "1:05", "2:03:10"]


def test_a_terminal_shows_the_table_as_it_fills(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    studies.run(STUDY, tmp_path, runner=Pretended(), console=console)
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())
    assert "bits per byte" in seen


def test_of_many_rows_the_first_and_the_best_have_a_colour_of_their_own():
    many = replace(STUDY, systems=[Variant(f"v{n}", system="tsai2019") for n in range(12)])
    records = [
        Record(
            key=f"{n}", study="x", variant=f"v{n}", seed=0, status="done",
            metrics={"bits_per_byte": 2.0 - 0.1 * n}, parameters=1, flops_per_token=1.0,
            tokens_per_second=1.0, steps=1, seconds=1.0, finished="2026", settings={},
        )
        for n in range(12)
    ]  # fmt: skip
    found = [Row(f"v{n}", 1, (record,), many.metric) for n, record in enumerate(records)]
    looks = curves._choose_looks(many, found)
    assert [n for n, look in enumerate(looks) if look != curves.REST] == [0, *range(6, 12)]
    assert len({colour for colour, _ in looks}) == 8
    assert curves._choose_looks(STUDY, found[:8]) == list(
        zip(curves.COLOURS, curves.MARKERS, strict=True)
    )
