"""`mercer systems | kernels | filters`: what there is, for people and for programs."""

import json

import pytest
import torch
from typer.testing import CliRunner

import mercer as mc
from mercer.cli import listing
from mercer.cli.commands import app
from mercer.filters import FILTERS
from mercer.kernels import KERNELS

run = CliRunner().invoke
NAMES = {
    "systems": list(mc.systems.SYSTEMS),
    "kernels": [kernel.__name__ for kernel in KERNELS],
    "filters": [filter.__name__ for filter in FILTERS],
}


@pytest.mark.parametrize("command", NAMES)
def test_everything_is_listed(command, monkeypatch):
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        done = run(app, [command])
        assert done.exit_code == 0, done.output
        assert all(name in done.output for name in NAMES[command])
    plain = run(app, [command, "--plain"]).output.splitlines()
    assert [line.split()[0] for line in plain[1:]] == NAMES[command]
    rows = json.loads(run(app, [command, "--json"]).output)
    assert [next(iter(row.values())) for row in rows] == NAMES[command]


def test_a_row_says_what_runs_where():
    rows = {row["kernel"]: row for row in listing.kernels()}
    rbf = rows["RBF"]
    assert rbf["weight"] == "exp(-|q - k|^2 / 2 s^2)"
    assert rbf["parameters"].startswith("bandwidth=None, heads=None")
    assert rbf["as text"] == "yes"
    assert rbf["backends"].startswith("sdpa, chunked")
    assert rows["Lookup"]["as text"] == "no"
    assert rows["Laplace"]["backends"] == "chunked"
    # Only degree 2 runs in linear time.
    assert "(linear)" in rows["Polynomial"]["backends"]
    assert {row["filter"]: row for row in listing.filters()}["Padding"]["as text"] == "no"


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_backends_named_do_run(kernel):
    (row,) = (row for row in listing.kernels() if row["kernel"] == kernel.__name__)
    first = row["backends"].split(", ")[0].strip("()")
    example = next(iter(kernel.entry.examples.values()))(2, 64)
    q, k, v = mc.testing.inputs(example, mc.testing.Shape(), 64, torch.float32)
    mc.smooth(example, q, k, v, filter=mc.Causal(), backend=first)


def test_no_color_is_respected(monkeypatch):
    """A terminal gets colours, unless NO_COLOR is set."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = run(app, ["kernels"], color=True).output
    monkeypatch.setenv("NO_COLOR", "1")
    plain = run(app, ["kernels"], color=True).output
    assert "\x1b[1m" in coloured
    # rich leaves bold and dim, which are no colours.
    assert "\x1b[3" not in plain.replace("\x1b[3m", "")
