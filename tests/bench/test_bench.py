"""`mercer bench`: rows come out, nothing wrong is timed, nothing measured is lost."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import mercer as mc
from mercer import bench
from mercer.backends.chunked import backend as chunked
from mercer.bench import check as bench_check
from mercer.bench import machine, measure, peers, report, session, written
from mercer.bench.catalogue import KERNELS, build_filter
from mercer.bench.check import check
from mercer.bench.contenders import Ours, refuse_to_swap
from mercer.bench.workload import Workload
from mercer.cli.commands import app

TINY = ["bench", "--device", "cpu", "--shapes", "1x2x64x16", "--repeats", "1"]
CPU = torch.device("cpu")


def run(*arguments):
    return CliRunner().invoke(app, [*TINY, *arguments])


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def settings(**given):
    given = {"shapes": "1x2x64x16", "repeats": 1, "peers": "none"} | given
    return bench.read(device=CPU, **given)


def workload(**given):
    given = {"batch": 1, "heads": 2, "length": 64, "dim": 16} | given
    return Workload(dtype=torch.float32, device=CPU, **given)


def test_a_row_for_every_kernel_and_peer():
    done = run()
    assert done.exit_code == 0, done.output
    for name in KERNELS:
        assert f"{name}, auto: " in done.output
    eager = ("rbf, eager, cdist", "rbf, eager, cdist by matmul", "alibi, eager")
    for name in ("softmax, SDPA", *eager):
        assert name in done.output
    assert "skipped keops: pykeops is not installed" in done.output
    assert "skipped flex: torch has no backward for it on CPU" in done.output
    for word in ("wrong by", "refuses", "fails", "out of memory"):
        assert word not in done.output


def test_figures_are_positive_and_relative_to_sdpa():
    yardstick, row = measure.measure(settings(kernels="rbf"))
    assert yardstick.name == "softmax, SDPA"
    assert yardstick.forward_of_sdpa == yardstick.forward_backward_of_sdpa == 1.0
    assert row.label == "rbf, auto: sdpa"
    assert row.forward_of_sdpa == yardstick.forward_ms / row.forward_ms > 0
    assert row.forward_backward_of_sdpa > 0
    # 2 heads, 64 * 65 / 2 visible pairs, 4 * 16 operations each; 3.5 times that with the backward
    flops = 2 * 2080 * 4 * 16
    assert row.forward_tflops == pytest.approx(flops / row.forward_ms / 1e9)
    assert row.forward_backward_tflops == pytest.approx(3.5 * flops / row.forward_backward_ms / 1e9)
    assert row.memory_bytes is None


@pytest.fixture
def flex_attention(monkeypatch):
    """Something in place of it that runs here."""
    monkeypatch.setattr(written.flex, "run", chunked.run)
    monkeypatch.setattr(written.flex, "_refuses_place", lambda task: None)
    monkeypatch.setattr(written.FlexScored, "available", lambda *_: None)


@pytest.mark.usefixtures("flex_attention")
@pytest.mark.parametrize("name", written.SCORED)
@pytest.mark.parametrize("form", [written.FlexScored, written.EagerScored])
def test_peers_get_the_weights_of_a_kernel(form, name):
    given = workload().inputs(name)
    peer = form(name)
    assert peer.settle(given, forward_only=False) == {peer: False}
    outs = peer.smooth(given), peer.exact(given)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=0)
    named = given.named(parameters=True).values()
    grads = [torch.autograd.grad(x.square().sum(), named, allow_unused=True) for x in outs]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_flex_refusals_are_checked_once_and_not_timed(monkeypatch):
    def refuses(task):
        pytest.fail("asked in a call that is timed")

    monkeypatch.setattr(written.flex, "run", chunked.run)
    monkeypatch.setattr(written.flex, "refuses", refuses)
    written.FlexScored("laplace").smooth(workload().inputs("laplace"))


@pytest.mark.usefixtures("flex_attention")
def test_flex_attention_is_a_peer_of_the_chosen_kernels():
    rows = measure.measure(settings(kernels="rbf,alibi,laplace", peers="flex-scored"))
    names = [row.name for row in rows if "Flex" in row.name]
    assert names == ["alibi, FlexAttention", "laplace, FlexAttention"]


@pytest.mark.usefixtures("flex_attention")
def test_unsupported_calls_of_flex_attention_are_refused():
    given = settings(kernels="product", peers="flex-scored", shapes="1x2x64x160")
    *_, row = measure.measure(given)
    assert row.problem == "refuses: a part has 320 features, more than 256"


@pytest.mark.parametrize("filter", ["full", "causal", "window:9", "window:3:2", "strided:5"])
def test_only_visible_pairs_are_counted(filter):
    w = workload(batch=3, length=40, filter=filter)
    assert w.pairs() == 3 * 2 * int(w.build_filter().mask(40, 40).sum())
    assert w.flops() == 4 * 16 * w.pairs()


def test_forward_only_and_decode():
    _, row = measure.measure(settings(kernels="rbf", forward_only=True))
    assert row.forward_ms > 0
    assert row.forward_backward_ms is None
    given = settings(kernels="alibi,laplace", decode=True, shapes="2x2x300x16")
    assert given.workloads[0].pairs() == 2 * 2 * 300
    for row in measure.measure(given):
        assert row.forward_of_sdpa > 0, row
        assert row.forward_backward_of_sdpa is None


def test_filters_of_the_command_line():
    assert build_filter("window:8") == mc.Window(8, 0)
    assert build_filter("window:8:-1", shrink=4) == mc.Window(2, -1)
    assert build_filter("fixed:8:2") == mc.Fixed(8, 2)
    done = run("--filter", "strided:8", "--kernels", "rbf", "--backends", "chunked,sdpa")
    assert done.exit_code == 0, done.output
    assert "rbf, chunked" in done.output
    assert "rbf, sdpa" in done.output


def test_saving_writes_json_and_markdown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("--kernels", "rbf,polynomial", "--peers", "eager-matmul", "--save")
    assert done.exit_code == 0, done.output
    stem = f"{machine.slug(machine.device_name(CPU))}-float32"
    files = sorted(path.name for path in (tmp_path / "results" / "bench").iterdir())
    assert files == [f"{stem}.json", f"{stem}.md"]

    saved = json.loads((tmp_path / "results" / "bench" / f"{stem}.json").read_text())
    assert saved["device"].endswith("CPU")
    assert {"mercer", "python", "torch", "triton", "cuda", "cudnn", "driver"} == set(
        saved["versions"]
    )
    assert saved["versions"]["torch"] == torch.__version__
    assert saved["commit"]
    assert saved["date"].startswith("20")
    assert saved["complete"] is True
    assert [row["name"] for row in saved["rows"]] == [
        "softmax, SDPA", "rbf", "polynomial", "rbf, eager, cdist by matmul",
    ]  # fmt: skip
    assert all(row["forward_backward_ms"] > 0 for row in saved["rows"])

    text = (tmp_path / "results" / "bench" / f"{stem}.md").read_text()
    for word in ("## 1x2x64x16", "| rbf, auto: sdpa |", "commit", "2.5 times", torch.__version__):
        assert word in text
    assert "not finished" not in text
    # The command that is written down repeats the run.
    assert saved["command"] in text
    again = CliRunner().invoke(app, saved["command"].split()[1:])
    assert again.exit_code == 0, again.output


def test_json_is_what_is_saved(tmp_path):
    done = run("--kernels", "rbf", "--peers", "none", "--json", "--output", str(tmp_path / "rows"))
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((tmp_path / "rows.json").read_text())
    assert "rbf, auto: " in done.stderr
    assert "wrote " in done.stderr


def test_json_of_tune_has_its_rules():
    done = run("--tune", "--kernels", "rbf", "--backends", "sdpa,chunked", "--json")
    found = json.loads(done.stdout)
    assert found["complete"]
    assert found["fastest"][0]["kernel"] == "rbf"
    assert found["rules"]["cpu"]
    assert "The fastest backends" in done.stderr


def test_json_of_an_interrupted_run_has_its_rows(monkeypatch):
    def rows(settings):
        yield measure.Row(shape="1x2x64x16", name="softmax, SDPA", kernel="softmax")
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "measure", rows)
    done = run("--kernels", "rbf", "--json")
    assert done.exit_code == 130
    found = json.loads(done.stdout)
    assert found["complete"] is False
    assert [row["name"] for row in found["rows"]] == ["softmax, SDPA"]


def test_output_names_the_files_and_saves(tmp_path):
    done = run("--kernels", "rbf", "--peers", "none", "--output", str(tmp_path / "a" / "mine.json"))
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["mine.json", "mine.md"]
    # Results are shared, and a folder of this machine means nothing elsewhere.
    assert str(tmp_path) not in (tmp_path / "a" / "mine.md").read_text()


@pytest.mark.parametrize("decode", [False, True])
def test_keys_may_have_fewer_heads(decode):
    given = settings(shapes="1x4/2x300x16", peers="sdpa,eager-matmul,eager-scored", decode=decode)
    (made,) = given.workloads
    assert (str(made), made.group) == ("1x4/2x300x16", 2)
    assert "1x4/2x300x16" in given.command
    assert made.pairs() == workload(heads=4, length=300, decode=decode).pairs()
    inputs = made.inputs("product")
    heads = [x.shape[1] for x in (*inputs.q.tensors(), *inputs.k.tensors(), inputs.v)]
    assert heads == [4, 4, 2, 2, 2]
    for row in measure.measure(given):
        assert row.shape == str(made)
        alone = "it needs as many key heads as query heads"
        assert row.problem == (f"refuses: {alone}" if "eager" in row.name else None), row


def test_the_check_has_groups_of_heads(monkeypatch):
    seen = []
    smooth = Ours.smooth

    def spy(self, given):
        seen.append((given.q.heads, given.k.heads))
        return smooth(self, given)

    monkeypatch.setattr(Ours, "smooth", spy)
    for heads, kv_heads, expected in ((8, 2, (4, 1)), (8, 8, (2, 2)), (6, 3, (2, 1))):
        seen.clear()
        given = workload(heads=heads, group=heads // kv_heads)
        assert check(Ours("rbf", "chunked"), given, forward_only=True) is None
        assert set(seen) == {expected}


def test_special_runs_have_files_of_their_own():
    assert settings().suffix == ""
    assert settings(decode=True, filter="window:8").suffix == "-decode-window-8"
    assert settings(tune=True, forward_only=True).suffix == "-tune-forward"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    report.write(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_wrong_output_gets_no_time(monkeypatch):
    right = chunked.run

    def slightly_wrong(tasks):
        return [result._replace(out=result.out * 1.001) for result in right(tasks)]

    monkeypatch.setattr(chunked, "run", slightly_wrong)
    done = run("--kernels", "rbf,laplace", "--peers", "none", "--backends", "sdpa,chunked")
    assert done.exit_code == 0, done.output
    for line in done.output.splitlines():
        if "chunked" in line:
            assert "wrong by" in line
            assert "0.00" not in line
    _, row = measure.measure(settings(kernels="laplace"))
    assert row.problem.startswith("wrong by")
    assert row.forward_ms is row.forward_backward_ms is row.forward_of_sdpa is None


def test_a_wrong_gradient_gets_no_time(monkeypatch):
    smooth = Ours.smooth

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.01

    monkeypatch.setattr(Ours, "smooth", lambda self, given: Doubled.apply(smooth(self, given)))
    said = check(Ours("rbf", "sdpa"), workload(), forward_only=False)
    assert "wrong by" in said
    assert "the gradient of" in said
    assert check(Ours("rbf", "sdpa"), workload(), forward_only=True) is None


def test_nan_is_wrong(monkeypatch):
    smooth = Ours.smooth
    monkeypatch.setattr(Ours, "smooth", lambda self, given: smooth(self, given) * torch.nan)
    assert "wrong by nan" in check(Ours("rbf", "sdpa"), workload(), forward_only=True)


def test_the_check_uses_a_short_sequence_with_the_same_filter():
    w = workload(length=4096, filter="window:1024")
    assert w.build_filter(256) == mc.Window(64, 0)
    assert check(Ours("rbf", "chunked"), w, forward_only=True) is None


def test_a_longer_sequence_is_checked_where_other_kernels_may_run(monkeypatch):
    given, smooth = workload(length=400, filter="window:100"), Ours.smooth
    monkeypatch.setattr(bench_check, "LONG", 300)

    def wrong(self, given):
        out = smooth(self, given)
        return out * 1.01 if out.shape[2] == 300 else out

    monkeypatch.setattr(Ours, "smooth", wrong)
    # On a CPU there are none.
    assert check(Ours("rbf", "sdpa"), given, forward_only=False) is None
    monkeypatch.setattr(bench_check, "_has_more", lambda contender, workload: True)
    assert "wrong by" in check(Ours("rbf", "sdpa"), given, forward_only=False)
    monkeypatch.setattr(Ours, "smooth", smooth)
    for kernel in ("rbf", "lookup", "polynomial"):
        assert check(Ours(kernel, "chunked"), given, forward_only=False) is None


def test_one_query_is_checked_against_the_reference(monkeypatch):
    monkeypatch.setattr(Ours, "precise", lambda self, given: pytest.fail("not here"))
    given = workload(length=600, decode=True)
    assert check(Ours("rbf", "chunked"), given, forward_only=True) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_are_checked_against_their_own_precision(dtype):
    for row in measure.measure(settings(kernels="rbf,lookup,sum", dtype=dtype)):
        assert row.problem is None, row


def test_a_refusal_does_not_stop_the_run():
    done = run("--kernels", "lookup,rbf", "--peers", "none", "--backends", "sdpa")
    assert done.exit_code == 0, done.output
    assert "refuses: its relative table" in done.output
    assert "rbf, sdpa" in done.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("can't allocate memory: you tried"), "out of memory"),
        (RuntimeError("no such kernel\nmore"), "fails: RuntimeError: no such kernel"),
    ],
)
def test_an_error_stays_in_its_row(monkeypatch, error, said):
    smooth = Ours.smooth

    def fail(self, given):
        if self.kernel == "rbf":
            raise error
        return smooth(self, given)

    monkeypatch.setattr(Ours, "smooth", fail)
    _, broken, fine = measure.measure(settings(kernels="rbf,alibi"))
    assert broken.problem == said
    assert fine.problem is None


def test_a_row_that_needs_too_much_memory_is_refused():
    refuse_to_swap(1000)
    with pytest.raises(ValueError, match="GiB, but this machine has"):
        refuse_to_swap(2**60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1x2x64"], "--shapes must be BxHxTxD"),
        (["--shapes", "1x2x0x8"], "at least 1"),
        (["--shapes", "1x4/3x64x8"], "a number of key heads that divides the query heads"),
        (["--shapes", "1x4/x64x8"], "or BxH/KxTxD with K key heads"),
        (["--shapes", "1x4/x/64x8"], "--shapes must be BxHxTxD"),
        (["--dtype", "int8"], "--dtype must be one of"),
        (["--kernels", "rbf,magic"], "--kernels has no 'magic'; there are: all, softmax"),
        (["--backends", "magic"], "--backends has no 'magic'"),
        (["--peers", "magic"], "--peers has no 'magic'"),
        (["--filter", "magic"], "--filter must be full, causal"),
        (["--filter", "window"], "--filter must be full, causal"),
        (["--filter", "window:many"], "needs whole numbers"),
        (["--filter", "strided:0"], "stride must be a whole number >= 1"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--device", "abacus"], "--device 'abacus' cannot be used"),
        (["--output", "/proc/none/x"], "cannot write to"),
        (["--kernels", "lookup", "--backends", "sdpa", "--peers", "none"], "no kernel was timed"),
    ],
)
def test_bad_arguments_give_a_one_line_error(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    errors = [line for line in done.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.output


def test_an_interrupt_keeps_the_rows(tmp_path, monkeypatch):
    calls = []
    whole = measure.measure_row

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(measure, "measure_row", interrupted)
    done = run("--kernels", "rbf,alibi", "--output", str(tmp_path / "rows"))
    assert done.exit_code == 130, done.output
    assert "interrupted: 1 rows kept" in done.output
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert [row["name"] for row in saved["rows"]] == ["softmax, SDPA"]
    assert saved["complete"] is False
    assert "not finished" in (tmp_path / "rows.md").read_text()


def test_an_interrupt_among_the_yardsticks_keeps_them(monkeypatch):
    def two(*_):
        return [peers.SDPA("one", " one"), peers.SDPA("two", " two")]

    def interrupted(contender, *_):
        if contender.key == "two":
            raise KeyboardInterrupt
        return measure.Row(shape="", name=contender.name, kernel="softmax", forward_ms=2.0)

    monkeypatch.setattr(measure, "build", two)
    monkeypatch.setattr(measure, "measure_row", interrupted)
    rows = measure.measure(settings())
    assert next(rows).forward_of_sdpa == 1.0
    with pytest.raises(KeyboardInterrupt):
        next(rows)


def test_tune_finds_the_fastest(tmp_path):
    done = run("--tune", "--kernels", "rbf,lookup", "--output", str(tmp_path / "rules"))
    assert done.exit_code == 0, done.output
    assert "The fastest backends" in done.output
    saved = json.loads((tmp_path / "rules.json").read_text())
    rbf, lookup = saved["fastest"]
    assert (rbf["kind"], rbf["shape"]) == ("keyed", "1x2x64x16")
    times = rbf["milliseconds"]
    assert {"sdpa", "chunked"} <= set(times)
    assert rbf["fastest"] == min(times, key=times.get)
    assert lookup["problems"]["sdpa"].startswith("refuses")
    (first, second) = saved["rules"]["cpu"]
    assert (first["kind"], second["kind"]) == ("keyed", "table")
    assert first["backends"][0] == rbf["fastest"]
    assert "| keyed | rbf |" in (tmp_path / "rules.md").read_text()


def test_tune_takes_one_kernel_of_each_kind():
    chosen = settings(tune=True, shapes=None)
    assert {KERNELS[name].kind for name in chosen.kernels} == {e.kind for e in KERNELS.values()}
    assert len(chosen.kernels) == len({e.kind for e in KERNELS.values()})
    assert "auto" not in chosen.backends
    assert len(chosen.workloads) > 1


def test_defaults_by_device():
    cuda = bench.read(device=torch.device("cuda"))
    assert cuda.dtype == "bfloat16"
    assert [str(w) for w in cuda.workloads] == ["8x10x2048x128", "4x16x8192x64", "2x16x8192x128"]
    cpu = bench.read(device=CPU)
    assert (cpu.dtype, cpu.shapes, cpu.filter) == ("float32", "1x4x1024x64", "causal")
    assert bench.read(device=CPU, decode=True).workloads[0].length == 32768


def test_peers_say_what_they_need():
    cuda = torch.device("cuda")
    for peer in peers.build():
        assert peer.key in bench.PEERS
        reasons = peer.available(CPU), peer.available(cuda)
        assert all(why is None or len(why) > 5 for why in reasons)
    assert peers.SDPA("x", "").available(cuda) == "it is for CPU"
    for peer in (peers.XTransformers(), peers.KeOps()):
        given = replace(workload().inputs("rbf"), filter=mc.Window(3, 0))
        with pytest.raises((ValueError, ModuleNotFoundError)):
            peer.smooth(given)


def test_a_checkout_differs_from_an_installed_copy(monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda *_: None)
    assert machine.commit() == "unknown"
    monkeypatch.setattr(machine, "_output", lambda *c: "" if "status" in c else "abc")
    assert machine.commit() == "abc"
    monkeypatch.setattr(machine, "_output", lambda *c: "abc")
    assert machine.commit() == "abc-dirty"


def test_the_bench_needs_nothing_that_is_optional():
    code = (
        "import sys; sys.modules.update({n: None for n in "
        "('triton', 'fla', 'pykeops', 'x_transformers', 'numpy')}); import mercer.bench"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_graphs_need_a_gpu():
    with pytest.raises(ValueError, match="--graph replays CUDA graphs"):
        bench.read(device=torch.device("cpu"), graph=True)
