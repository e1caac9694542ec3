"""The rules that `auto` follows: they are whole, they decide, and tuning adds some."""

import json

import pytest
import torch
from catalogue import COMPOSED, DIM, KERNELS
from typer.testing import CliRunner

import mercer as mc
from mercer.bench.catalogue import KERNELS as BENCHED
from mercer.bench.workload import Workload
from mercer.cli.commands import app
from mercer.dispatch import choose as dispatch
from mercer.dispatch import rules
from mercer.dispatch.problem import prepare
from mercer.dispatch.rules import Call, Rule
from mercer.testing import Shape, inputs

ALL = KERNELS | COMPOSED
CPU = torch.device("cpu")
CAUSAL = mc.Causal()
TEXT = rules.PATH.read_text()


def tasks_of(kernel, filter=CAUSAL, dim=DIM, **given):
    q, k, v = inputs(kernel, Shape(**given), dim, torch.float32)
    return prepare(kernel, q, k, v, filter, 0.0, False, "auto").tasks()


@pytest.fixture
def family(monkeypatch):
    """Decide as if the inputs were on a device of another family."""
    return lambda name: monkeypatch.setattr(rules, "family", lambda device: name)


def test_the_file_is_valid_and_written_as_we_write_it():
    table = rules.read(TEXT, dispatch.BACKENDS)
    assert tuple(table) == rules.FAMILIES
    assert rules.write(table) == TEXT
    for family in table.values():
        assert not family[-1].conditions
        assert "chunked" in family[-1].backends
        assert all(rule.because for rule in family)
    assert {name for rule in table["hopper"] for name in rule.backends} == set(dispatch.BACKENDS)
    assert not any("flex" in rule.backends for rule in table["cpu"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.pop("cuda"), "must have the families"),
        (lambda raw: raw["cpu"].pop(), "last rule of cpu must have no conditions"),
        (lambda raw: raw["cpu"].clear(), "last rule of cpu must have no conditions"),
        (lambda raw: raw["cpu"][0].update(kind="magic"), "kind must be one of"),
        (lambda raw: raw["cpu"][0].update(backends=["magic"]), "backends must be among"),
        (lambda raw: raw["cpu"][0].update(backends=[]), "backends must be among"),
        (lambda raw: raw["cpu"][0].update(at_least_moons=3), "at_least_moons"),
        (lambda raw: raw["cpu"][0].pop("because"), "because"),
    ],
)
def test_a_wrong_rules_file_raises(change, message):
    raw = json.loads(TEXT)
    change(raw)
    with pytest.raises(ValueError, match=message):
        rules.read(json.dumps(raw), dispatch.BACKENDS)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("exponential", "plain"), ("cosine", "plain"), ("rbf", "keyed"), ("rbf-per-head", "keyed"),
        ("adaptive", "adaptive"), ("eq-9", "several"), ("rbf*rbf", "several"), ("lookup", "table"),
        ("buckets", "table"), ("lookup*buckets*alibi", "table"), ("polynomial", "power"),
        ("polynomial-4", "power"), ("laplace", "link"), ("rational", "link"),
        ("matern-5/2", "link"), ("rational*exponential", "mixed"), ("polynomial*laplace", "mixed"),
        ("rbf+polynomial", "mixed"), ("alibi", "keyed"),
    ],
)  # fmt: skip
def test_kinds(name, kind):
    assert rules.describe(tasks_of(ALL[name]())).kind == kind


def test_every_kernel_has_a_kind():
    for kernel in ALL.values():
        assert rules.describe(tasks_of(kernel())).kind in rules.KINDS


@pytest.mark.parametrize("name", BENCHED)
def test_the_bench_names_kinds_as_the_rules_do(name):
    workload = Workload(batch=1, heads=2, length=8, dim=8, dtype=torch.float32, device=CPU)
    given = workload.inputs(name)
    tasks = prepare(
        given.kernel, given.q, given.k, given.v, mc.Causal(), 0.0, False, "auto"
    ).tasks()
    assert rules.describe(tasks).kind == BENCHED[name].kind


def test_properties_that_rules_compare():
    tasks = tasks_of(mc.RBF(), mc.Window(2, 0), queries=5, keys=9, values=3)
    call = rules.describe(tasks)
    assert (call.queries, call.keys, call.features, call.values) == (5, 9, DIM, 3)
    assert call.mask == 45
    assert (call.half, call.log_mass, call.gradient) == (False, False, True)
    with torch.no_grad():
        assert not rules.describe(tasks).gradient
    assert not rules.describe(tasks_of(mc.Exponential())).gradient
    assert rules.describe(tasks_of(mc.RBF() + mc.RBF(2.0))).log_mass


CALL = Call(
    kind="keyed", half=True, gradient=False, log_mass=False, queries=1, keys=1000, features=64,
    values=32, mask=50,
)  # fmt: skip


@pytest.mark.parametrize(
    ("fitting", "other"),
    [
        ({"kind": "keyed"}, {"kind": "plain"}),
        ({"half": True}, {"half": False}),
        ({"gradient": False}, {"gradient": True}),
        ({"log_mass": False}, {"log_mass": True}),
        ({"at_most_queries": 1}, {"at_most_queries": 0}),
        ({"at_least_keys": 1000}, {"at_least_keys": 1001}),
        ({"at_least_keys_per_dv": 0.48}, {"at_least_keys_per_dv": 0.49}),
        ({"at_least_features": 64}, {"at_least_features": 65}),
        ({"at_least_mask": 50}, {"at_least_mask": 51}),
        ({"at_most_mask": 50}, {"at_most_mask": 49}),
    ],
    ids=str,
)
def test_every_condition(fitting, other):
    assert Rule(backends=("sdpa",), because="", **fitting).fits(CALL)
    assert not Rule(backends=("sdpa",), because="", **other).fits(CALL)


def chosen(kernel, filter=CAUSAL, length=64, dim=16, queries=None, **options):
    x = torch.zeros(1, 2, length, dim)
    q = x if queries is None else x[:, :, -queries:]
    return mc.explain(kernel, q, x, x, filter=filter, **options).backend


def test_decisions_on_a_cpu():
    assert chosen(mc.Exponential()) == "sdpa"
    assert chosen(mc.RBF()) == "sdpa"
    assert chosen(mc.Laplace()) == "chunked"
    assert chosen(mc.RBF(), mc.Window(8, 0), length=2048) == "sdpa"  # a mask of 2^22 elements
    assert chosen(mc.RBF(), mc.Window(8, 0), length=2049) == "chunked"
    assert chosen(mc.Polynomial(), length=153) == "chunked"  # 0.6 * 16 * 16 = 153.6
    assert chosen(mc.Polynomial(), length=154) == "linear"
    assert chosen(mc.Polynomial(), length=154, queries=17) == "linear"
    assert chosen(mc.Polynomial(), length=154, queries=16) == "chunked"
    assert chosen(mc.Polynomial(), mc.Window(8, 0), length=154) == "chunked"
    assert chosen(mc.Polynomial(4), length=154) == "chunked"
    assert chosen(mc.Polynomial() + mc.RBF(), length=154) == "chunked"
    assert chosen(mc.RBF(), dropout_p=0.1) == "chunked"


def takes(name, *refused):
    """A backend that refuses some kinds, whatever the device."""

    class Fake:
        dense_mask = False

        def refuses(self, task):
            return "no" if rules.kind_of(task.term) in refused else None

        def memory(self, task):
            return 0

        def kernels(self, device):
            return ""

    return name, Fake()


@pytest.mark.parametrize("name", ["hopper", "cuda"])
def test_decisions_on_a_gpu(name, family, monkeypatch):
    family(name)
    monkeypatch.setitem(dispatch.BACKENDS, *takes("triton"))
    assert chosen(mc.Exponential()) == ("triton" if name == "hopper" else "sdpa")
    assert chosen(mc.Exponential(), mc.Window(8, 0)) == "triton"
    # 5 D V keys, with 16 features and values
    assert chosen(mc.Polynomial(), length=1279) == "triton"
    assert chosen(mc.Polynomial(), length=1280) == ("linear" if name == "hopper" else "triton")
    assert chosen(mc.Polynomial(), length=1280, queries=16) == "triton"
    for kernel in (mc.RBF(), mc.Laplace(), mc.Polynomial(), mc.RBF() + mc.Exponential()):
        assert chosen(kernel) == "triton"
    monkeypatch.setitem(dispatch.BACKENDS, *takes("triton", *rules.KINDS))
    monkeypatch.setitem(dispatch.BACKENDS, *takes("flex"))
    assert chosen(mc.RBF(), length=1024) == "sdpa"
    assert chosen(mc.RBF(), mc.Window(8, 0), length=4096) == "flex"
    assert chosen(mc.Laplace(), length=1024) == "flex"
    assert chosen(mc.Laplace(), length=1023) == "chunked"
    assert chosen(mc.Polynomial(), length=1024) == "linear"
    monkeypatch.setitem(dispatch.BACKENDS, *takes("flex", *rules.KINDS))
    assert chosen(mc.Laplace(), length=1024) == "chunked"


def test_families(monkeypatch):
    assert rules.family(CPU) == rules.family(torch.device("meta")) == "cpu"
    for capability, name in (((9, 0), "hopper"), ((8, 0), "cuda"), ((10, 0), "cuda")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        rules._family_of_capability.cache_clear()
        assert rules.family(torch.device("cuda")) == rules.family(torch.device("cuda:1")) == name
    rules._family_of_capability.cache_clear()


def test_explain_says_which_rule_decided():
    x = torch.zeros(1, 2, 200, 16)
    said = mc.explain(mc.Polynomial(), x, x, x)
    rule = dispatch.RULES["cpu"][1]
    assert said.because == f"{rule.because} [cpu rule: kind power, at least keys per dv 0.6]"
    assert f"backend   linear: {rule.because}" in str(said)
    assert mc.explain(mc.Laplace(), x, x, x, backend="chunked").because == "you named it"


def test_the_next_rule_counts_where_all_backends_of_one_refuse(monkeypatch):
    first = Rule(kind="link", backends=("sdpa", "linear"), because="first")
    last = Rule(backends=("chunked",), because="last")
    monkeypatch.setitem(dispatch.RULES, "cpu", (first, last))
    x = torch.zeros(1, 2, 20, 16)
    said = mc.explain(mc.Laplace(), x, x, x)
    assert (said.backend, said.because) == ("chunked", "last [cpu rule: always]")


def few_and_rest(of):
    """The rules for few queries, and all others."""
    few = tuple(r for r in of if r.at_most_queries is not None)
    return few, tuple(r for r in of if r not in few)


def test_new_rules_come_first_and_replace_their_like():
    table = rules.read(TEXT, dispatch.BACKENDS)

    def rule(**given):
        return Rule(backends=("chunked",), because="new", **given)

    decode = rule(kind="keyed", at_most_queries=1)
    once = rules.put_first(table, "cpu", [decode])
    twice = rules.put_first(
        once, "cpu", [rule(kind="keyed", at_least_keys=9), rule(kind="keyed"), rule(kind="link")]
    )
    again = rules.put_first(twice, "cpu", [rule(kind="keyed", at_least_features=7)])
    few, rest = few_and_rest(table["cpu"])
    assert few
    assert [r.conditions for r in again["cpu"]] == [
        {"kind": "keyed", "at_most_queries": 1},
        *(r.conditions for r in few),
        {"kind": "keyed", "at_least_features": 7},
        {"kind": "link"},
        *(r.conditions for r in rest),
    ]
    assert again["hopper"] == table["hopper"]
    assert rules.read(rules.write(again), dispatch.BACKENDS) == again


def test_tuning_writes_entries_that_change_the_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "PATH", tmp_path / "rules.json")
    rules.PATH.write_text(TEXT)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["bench", "--device", "cpu", "--shapes", "1x2x64x16", "--repeats", "1", "--tune"]
    arguments += ["--kernels", "rbf", "--backends", "chunked"]

    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert '"kind": "keyed"' in done.output
    assert rules.PATH.read_text() == TEXT

    done = CliRunner().invoke(app, [*arguments, "--write"])
    assert done.exit_code == 0, done.output
    table = rules.read(rules.PATH.read_text(), dispatch.BACKENDS)
    before, (written, *after) = few_and_rest(table["cpu"])
    assert table["cpu"] == (*before, written, *after)
    assert rules.as_entry(written) in done.output
    assert written.conditions == {
        "kind": "keyed", "half": False, "gradient": True, "at_most_mask": 0,
    }  # fmt: skip
    assert "1x2x64x16 float32 causal, rbf, forward and backward: chunked" in written.because
    assert (*before, *after) == dispatch.RULES["cpu"]

    assert chosen(mc.RBF()) == "sdpa"
    monkeypatch.setattr(dispatch, "RULES", table)
    assert chosen(mc.RBF()) == "chunked"
    with torch.no_grad():
        assert chosen(mc.RBF()) == "sdpa"


def test_writing_needs_tuning():
    done = CliRunner().invoke(app, ["bench", "--device", "cpu", "--write"])
    assert done.exit_code == 2
    assert "it needs --tune" in done.output


def test_sizes_that_change_nothing_get_no_rule():
    from mercer import bench
    from mercer.bench.tune import Finding, as_rules

    shapes = {"1x1x64x16": "a", "1x1x64x32": "b", "1x1x128x16": "a", "1x1x128x32": "b"}
    shapes |= {"1x1x256x16": "b", "1x1x256x32": "b"}
    times = {"a": {"sdpa": 1.0, "chunked": 2.0}, "b": {"sdpa": 2.0, "chunked": 1.0}}
    found = [
        Finding(
            kind="keyed", kernel="rbf", shape=shape, fastest="", milliseconds=times[which],
            problems={},
        )
        for shape, which in shapes.items()
    ]  # fmt: skip
    settings = bench.read(device=CPU, shapes=",".join(shapes), tune=True, forward_only=True)
    got = [(r.at_least_keys, r.at_least_features, r.backends[0]) for r in as_rules(found, settings)]
    assert got == [(256, None, "chunked"), (None, 32, "chunked"), (None, None, "sdpa")]
    decode = bench.read(device=CPU, shapes=",".join(shapes), tune=True, decode=True)
    assert all(r.at_most_queries == 1 and r.gradient is False for r in as_rules(found, decode))
    window = bench.read(device=CPU, shapes=",".join(shapes), tune=True, filter="window:8")
    assert all((r.at_least_mask, r.at_most_mask) == (1, None) for r in as_rules(found, window))
