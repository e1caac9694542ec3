import json
import subprocess
import sys
from dataclasses import fields

import pytest
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import mercer as mc
from mercer.cli.commands import app
from mercer.explain import Explanation

run = CliRunner().invoke


def test_python_runs_the_package_as_the_command():
    command = [sys.executable, "-m", "mercer", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert mc.__version__ in done.stdout


def test_systems_prints_a_row_for_each(monkeypatch):
    for columns in ("80", "160"):
        monkeypatch.setenv("COLUMNS", columns)
        done = run(app, ["systems"])
        assert done.exit_code == 0
        for name in mc.systems.SYSTEMS:
            assert name in done.output
    plain = run(app, ["systems", "--plain"]).output.splitlines()
    assert len(plain) == 1 + len(mc.systems.SYSTEMS)
    for column in ("feature space", "kernel", "value", "filter", "symmetric", "valid", "lowers to"):
        assert column in plain[0]


@pytest.mark.parametrize("name", [*mc.systems.SYSTEMS, "all"])
def test_explain_says_what_runs(name):
    done = run(app, ["explain", name, "--shape", "2,2,48,8"])
    assert done.exit_code == 0, done.output
    assert "backend" in done.output
    assert "B 2, H 2, Q 48, K 48" in done.output


def test_explain_computes_nothing_large():
    """The example of the help, on a shape whose projections alone would take minutes."""
    with FlopCounterMode(display=False) as counter:
        done = run(app, ["explain", "dai2019", "--shape", "4,16,8192,64", "--dtype", "bfloat16"])
    assert counter.get_total_flops() < 1e8
    assert done.exit_code == 0
    assert "Q 8192" in done.output


def test_explain_takes_a_dtype_and_a_backend():
    done = run(app, ["explain", "tsai2019", "--dtype", "bfloat16", "--backend", "chunked"])
    assert "bfloat16" in done.output
    assert "chunked: you named it" in done.output


def test_explain_as_json():
    """The fields of an explanation; a list for all systems."""
    done = run(app, ["explain", "dai2019", "--shape", "2,2,48,8", "--json"])
    assert (done.exit_code, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert list(found) == ["system", *(field.name for field in fields(Explanation))]
    said = run(app, ["explain", "dai2019", "--shape", "2,2,48,8"]).output
    assert f"backend   {found['backend']}: {found['because']}" in said
    assert f"kernel    {found['formula']}" in said
    for name, why in found["refusals"].items():
        assert f"not       {name}: {why}" in said
    assert found["memory"] > 0
    every = json.loads(run(app, ["explain", "all", "--shape", "2,2,48,8", "--json"]).stdout)
    assert [each["system"] for each in every] == list(mc.systems.SYSTEMS)
    assert found in every
    alone = run(app, ["explain", "--kernel", "RBF(2.0)", "--json"])
    assert json.loads(alone.stdout)["system"] is None
    wrong = run(app, ["explain", "bert", "--json"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "bert"], "there is no system 'bert'; there are: vaswani2017"),
        (["explain", "tsai2019", "--shape", "1,2,3"], "--shape must be B,H,T,D"),
        (["explain", "tsai2019", "--shape", "1,2,0,8"], "at least 1"),
        (["explain", "tsai2019", "--dtype", "int8"], "--dtype must be one of"),
        (["explain", "tsai2019", "--device", "abacus"], "--device 'abacus' cannot be used"),
        (["explain", "shaw2018", "--backend", "sdpa"], "backend 'sdpa' cannot run this"),
        (["explain", "tsai2019", "--backend", "magic"], "backend must be one of"),
    ],
)
def test_bad_arguments_give_a_one_line_error(arguments, message):
    done = run(app, arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


def test_help_and_version():
    assert "systems" in run(app, ["--help"]).output
    assert "B,H,T,D" in run(app, ["explain", "--help"]).output
    for command in ("explain", "bench"):
        assert "--json" in run(app, [command, "--help"], env={"COLUMNS": "200"}).output
    assert run(app, ["--version"]).output.startswith(f"mercer {mc.__version__}")
