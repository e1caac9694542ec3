import pytest
import torch
from catalogue import KERNELS
from torch.utils.flop_counter import FlopCounterMode

import mercer as mc
from mercer.backends import sdpa
from mercer.backends.flex import backend as flex
from mercer.backends.flex import compiled
from mercer.backends.triton import backend as triton
from mercer.dispatch import rules
from mercer.dispatch.choose import BACKENDS
from mercer.dispatch.problem import prepare
from mercer.term.biases import QueryTable
from mercer.term.factors import CosineFactor, DistanceFactor
from mercer.term.sinusoids import SinusoidFactor

X = torch.randn(2, 4, 32, 16)


def test_an_explanation_has_every_field():
    said = mc.explain(mc.RBF(heads=4), X, X, X, filter=mc.Causal())
    assert said.formula == "exp(-|q - k|^2 / 2 s_h^2)"
    assert said.filter == "Causal()"
    assert said.backend == "sdpa"
    assert said.widths == (17,)
    assert said.cancelled == ("what depends on the query alone, in the normaliser",)
    assert set(said.refusals) == {*BACKENDS, "reference"} - {"sdpa"}
    assert said.memory > 0
    text = str(said)
    for part in (said.formula, said.terms[0], said.backend, "not       chunked", "memory"):
        assert part in text


@pytest.mark.parametrize(
    ("kernel", "filter", "widths"),
    [
        (mc.Exponential(), mc.Full(), (16,)),
        (mc.RBF(), mc.Full(), (17,)),
        (mc.Exponential() * mc.ALiBi([1.0] * 4), mc.Causal(), (17,)),
        (mc.Exponential() * mc.ALiBi([1.0] * 4), mc.Full(), (16,)),
        (mc.RBF() + mc.Polynomial(), mc.Full(), (17, 16)),
        (mc.RBF() * (mc.RBF() + mc.Cosine()), mc.Full(), (34, 33)),
        (mc.Lookup(torch.zeros(5, 16)), mc.Full(), (0,)),
    ],
    ids=repr,
)
def test_widths_count_features_and_numbers_per_key(kernel, filter, widths):
    assert mc.explain(kernel, X, X, X, filter=filter).widths == widths


def test_the_chosen_backend_is_the_one_that_runs(monkeypatch):
    from mercer.backends.chunked import backend as chunked

    ran = []
    for module in (chunked, sdpa):
        run = module.run
        monkeypatch.setattr(
            module, "run", lambda task, m=module, r=run: ran.append(m.name) or r(task)
        )
    for kernel in (mc.RBF(), mc.Polynomial()):
        ran.clear()
        mc.smooth(kernel, X, X, X)
        assert ran == [mc.explain(kernel, X, X, X).backend]


def test_every_refusal_has_its_reason():
    reasons = {
        "link": mc.explain(mc.Polynomial(), X, X, X).refusals["sdpa"],
        "table": mc.explain(mc.Lookup(torch.zeros(5, 16)), X, X, X).refusals["sdpa"],
        "dropout": mc.explain(mc.RBF(), X, X, X, dropout_p=0.1).refusals["sdpa"],
        "empty": mc.explain(mc.RBF(), X[:0], X[:0], X[:0]).refusals["sdpa"],
    }
    assert "s^2 is not the identity" in reasons["link"]
    assert "dense [Q, K] bias" in reasons["table"]
    assert "supports dropout only" in reasons["dropout"]
    assert "empty" in reasons["empty"]
    half = X.bfloat16()
    blurred = mc.explain(mc.RBF(), half, half, half).refusals["sdpa"]
    assert "learned scale" in blurred
    assert mc.explain(mc.RBF(trainable=False), half, half, half).backend == "sdpa"


def test_auto_passes_over_a_large_dense_mask():
    x = torch.randn(1, 1, 4096, 4)
    said = mc.explain(mc.RBF(), x, x, x, filter=mc.Window(64, 0))
    assert said.backend == "chunked"
    assert "dense mask of 16,777,216 elements" in said.refusals["sdpa"]
    assert mc.explain(mc.RBF(), x, x, x, filter=mc.Window(64, 0), backend="sdpa").backend == "sdpa"


def test_memory_is_linear_in_the_length_but_for_the_reference():
    def memory(length, backend):
        x = torch.zeros(1, 2, length, 16)
        return mc.explain(mc.RBF(), x, x, x, filter=mc.Causal(), backend=backend).memory

    for backend, power in (("sdpa", 2), ("chunked", 2), ("reference", 4)):
        ratio = memory(8192, backend) / memory(4096, backend)
        assert 1 < ratio <= power, backend
    assert memory(8192, "reference") / memory(4096, "reference") == 4


def test_explaining_draws_no_random_numbers():
    torch.manual_seed(0)
    mc.explain(mc.RBF(), X, X, X, dropout_p=0.5)
    after = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


EXPLAINED = {
    "plain": lambda: mc.Exponential() * mc.RelativeSinusoid(),
    "learned": lambda: mc.Exponential() * mc.RelativeSinusoid(weight=torch.randn(3, 8, 6)),
    "table": lambda: mc.Exponential() * mc.Lookup(torch.randn(5, 8)),
    "distance": lambda: mc.RBF(heads=3),
    "linked": lambda: mc.Laplace(),
    "adaptive": lambda: mc.AdaptiveRBF(8, heads=3),
    "cosine": lambda: mc.Cosine(),
}


@pytest.fixture
def available(monkeypatch):
    """flex and triton check every term, on any machine."""
    monkeypatch.setattr(compiled, "unavailable", lambda device: None)
    monkeypatch.setattr(triton, "_unavailable", lambda device: None)


@pytest.mark.parametrize("name", EXPLAINED)
@pytest.mark.parametrize("gradient", [True, False])
def test_explaining_multiplies_nothing(name, gradient, available):
    x = torch.randn(2, 3, 32, 8, requires_grad=gradient)
    given = mc.Features(content=x, relative=x)
    with FlopCounterMode(display=False) as counter:
        mc.explain(EXPLAINED[name](), given, given, x, filter=mc.Causal())
    assert counter.get_total_flops() == 0


FORMED = {
    QueryTable: ["table"],
    SinusoidFactor: ["q", "c"],
    CosineFactor: ["q", "k"],
    DistanceFactor: ["row", "col"],
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_learned_forms_no_tensor(name, available, monkeypatch):
    def formed(self):
        raise AssertionError(f"{type(self).__name__} was formed")

    x = torch.randn(2, 3, 32, 8, requires_grad=True)
    given = mc.Features(content=x, relative=x)
    call = (EXPLAINED[name](), given, given, x, mc.Causal(), 0.0, False, "auto")
    (task,) = prepare(*call).tasks()
    for factor, parts in FORMED.items():
        for part in parts:
            monkeypatch.setattr(factor, part, property(formed))
    assert task.learns
    assert rules.describe((task,)).gradient
    for backend in (flex, sdpa, triton):
        backend.refuses(task)
    with torch.no_grad():
        assert not task.learns


@pytest.mark.parametrize("name", [n for n in KERNELS if list(KERNELS[n]().parameters())])
def test_learned_is_true_for_kernels_with_parameters(name):
    x = torch.randn(2, 2, 11, 8)
    given = mc.Features(content=x, relative=x)
    kernel = KERNELS[name]()

    def learns():
        call = (kernel, given, given, x, mc.Causal(), 0.0, False, "auto")
        return any(task.learns for task in prepare(*call).tasks())

    assert learns()
    kernel.requires_grad_(False)
    assert not learns()


def test_the_reason_is_that_of_the_backend_that_runs():
    x = torch.randn(1, 2, 16, 4)
    with torch.no_grad():
        assert "SDPA wins" in mc.explain(mc.RBF(), x, x, x).because
        said = mc.explain(mc.Laplace(), x, x, x)
    assert said.backend == "chunked"
    assert "SDPA wins" not in said.because
    assert "sdpa comes first by the rule and cannot run this" in said.because
