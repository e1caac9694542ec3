"""The Hopper kernels on a GPU: at least as close to float64 as the portable ones."""

import math

import pytest
import torch

import mercer as mc
from mercer.backends.triton import plan
from mercer.backends.triton.backend import INSTALLED
from mercer.backends.triton.hopper import check, eligible, launch, tier
from mercer.testing import Shape
from mercer.testing.cases import Case

DEVICE = torch.device("cuda")
RUNS = INSTALLED and torch.cuda.is_available() and check.there(DEVICE)
pytestmark = pytest.mark.skipif(not RUNS, reason="needs a Hopper GPU and Triton")

LONG = Shape(heads=2, kv_heads=2, queries=300, keys=300, values=128)
GROUPED = Shape(heads=4, kv_heads=2, queries=390, keys=390, values=128)
WIDE = Shape(heads=4, kv_heads=2, queries=130, keys=390, values=128)
CROSS = Shape(heads=4, kv_heads=2, queries=130, keys=390, values=64)
NARROW = Shape(heads=2, kv_heads=2, queries=300, keys=300, values=64)
DOCUMENTS = torch.arange(300).div(90, rounding_mode="floor").expand(2, -1)


def _adaptive(dim):
    kernel = mc.AdaptiveRBF(dim, heads=2)
    torch.nn.init.normal_(kernel.weight, std=0.1)
    return kernel


def _band(dim):
    """A table that reaches all keys."""
    return mc.Exponential() * mc.Lookup(torch.nn.Parameter(torch.randn(2 * 400 + 1, dim)))


def _sinusoids(dim):
    return mc.Exponential() * mc.RelativeSinusoid()


CASES = {
    "plain": (lambda dim: mc.Exponential(), 64, mc.Causal(), CROSS),
    "plain-full": (lambda dim: mc.Exponential(), 128, mc.Full(), LONG),
    "plain-narrow": (lambda dim: mc.Exponential(), 40, mc.Causal(), CROSS),
    "rbf": (lambda dim: mc.RBF([8.0, 11.0]), 128, mc.Causal(), LONG),
    "rbf-window": (lambda dim: mc.RBF([8.0, 11.0]), 64, mc.Window(70, 30), LONG),
    "rbf-padding": (lambda dim: mc.RBF(9.0), 64, mc.Causal() & mc.Padding([211, 0]), LONG),
    "rbf-documents": (lambda dim: mc.RBF(9.0), 128, mc.Documents(DOCUMENTS), LONG),
    "rbf-strided": (lambda dim: mc.RBF(9.0), 64, mc.Strided(17) | mc.Window(0, 20), LONG),
    "wide-cross": (lambda dim: mc.RBF(9.0), 128, mc.Causal(), WIDE),
    "wide-window": (lambda dim: mc.RBF(9.0), 128, mc.Window(70, 30), LONG),
    "wide-padding": (lambda dim: mc.RBF(9.0), 128, mc.Causal() & mc.Padding([211, 0]), LONG),
    "alibi": (lambda dim: mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(2)), 64, mc.Causal(), LONG),
    "wide-alibi": (
        lambda dim: mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(2)), 120, mc.Causal(), LONG
    ),
    "along": (lambda dim: mc.Exponential(), 128, mc.Window(100, 0), LONG),
    "along-grouped": (lambda dim: mc.Exponential(), 112, mc.Window(200, 0), GROUPED),
    "along-alibi": (
        lambda dim: mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(2)), 120, mc.Window(70, 0), LONG
    ),
    "adaptive": (_adaptive, 128, mc.Causal(), LONG),
    "two-parts": (
        lambda dim: mc.Exponential() * mc.Exponential(on="position"), 128, mc.Causal(), LONG
    ),
    "two-passes": (
        lambda dim: mc.Exponential() * mc.Exponential(on="position"),
        128,
        mc.Strided(17) | mc.Window(0, 20),
        LONG,
    ),
    "two-narrow-parts": (
        lambda dim: mc.Exponential() * mc.Exponential(on="position"), 64, mc.Window(150, 0), CROSS
    ),
    "band": (_band, 64, mc.Causal(), CROSS),
    "band-wide": (_band, 128, mc.Causal(), LONG),
    "sinusoids": (_sinusoids, 64, mc.Causal(), LONG),
    "summed": (lambda dim: mc.RBF([8.0, 11.0]), 64, mc.Causal(), NARROW),
    "summed-full": (lambda dim: mc.Exponential(), 64, mc.Full(), NARROW),
    "summed-cross": (lambda dim: mc.RBF(9.0), 40, mc.Window(90, 10), CROSS),
    "summed-window": (lambda dim: mc.RBF([8.0, 11.0]), 64, mc.Window(70, 30), NARROW),
    "summed-along": (lambda dim: mc.RBF([8.0, 11.0]), 64, mc.Window(100, 0), NARROW),
    "summed-along-plain": (lambda dim: mc.Exponential(), 64, mc.Window(70, 0), NARROW),
    "summed-padding": (lambda dim: mc.RBF(9.0), 64, mc.Causal() & mc.Padding([211, 0]), NARROW),
    "summed-documents": (lambda dim: mc.RBF(9.0), 64, mc.Documents(DOCUMENTS), NARROW),
    "summed-strided": (lambda dim: mc.RBF(9.0), 64, mc.Strided(17), NARROW),
    "summed-alibi": (
        lambda dim: mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(2)), 64, mc.Causal(), NARROW
    ),
    "summed-slopes": (
        lambda dim: mc.RBF([8.0, 11.0]) * mc.ALiBi(mc.ALiBi.standard(2)), 64, mc.Causal(), NARROW
    ),
    "summed-scales": (_adaptive, 64, mc.Causal(), NARROW),
    "summed-scales-window": (_adaptive, 40, mc.Window(70, 30), NARROW),
    "summed-scales-padding": (_adaptive, 64, mc.Causal() & mc.Padding([211, 0]), NARROW),
}  # fmt: skip


@pytest.fixture(autouse=True)
def unchecked():
    """Kernels run without the check that a process makes once, and their errors are not caught."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier, "allows", lambda *given: True)
        patch.setattr(tier, "completed", lambda way, p, start, *given: [start(*given)])
        yield


WINDOW = mc.Window(200, 0)
SUMMED = [name for name in CASES if name.startswith("summed")]


def run(name, dtype, monkeypatch, many=1):
    """(The Hopper pass, the portable pass, float64, how often the Hopper pass ran)."""
    make, dim, filter, shape = CASES[name]
    torch.manual_seed(0)
    case = Case(make(dim).to(DEVICE), filter, shape, dim, 0, dtype, "cuda")
    monkeypatch.setattr(plan, "STORED", 1)
    monkeypatch.setattr(eligible, "MANY_KEYS", many)
    ran = []
    for way in ("keys", "one_pass", "all_passes")[: 3 if launch.all_passes else 2]:
        inner = getattr(launch, way)
        monkeypatch.setattr(launch, way, lambda *a, inner=inner: (ran.append(1), inner(*a))[1])
    got = case.run("triton", log_mass=True)
    again = case.run("triton", log_mass=True)
    assert all(torch.equal(got[name], again[name]) for name in got), "not the same bits"
    monkeypatch.setattr(eligible, "takes", lambda *a: False)
    other = case.run("triton", log_mass=True)
    return got, other, case.run("reference", log_mass=True, wide=True), len(ran)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_hopper_pass_equals_the_portable_pass(name, dtype, monkeypatch):
    got, other, want, ran = run(name, dtype, monkeypatch)
    assert ran == 2
    for what, x in want.items():
        finite = x.isfinite()
        assert torch.equal(got[what].isneginf(), x.isneginf()), what
        error, usual = ((y[what].double() - x)[finite].norm().item() for y in (got, other))
        size = x[finite].norm().item()
        assert error <= _bar(what, usual, size), f"{what}: {error:.2e}, other {usual:.2e}"


@pytest.mark.parametrize("name", SUMMED)
def test_fewer_keys_take_two_passes(name, monkeypatch):
    _, other, want, _ = run(name, torch.bfloat16, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(launch, "one_pass", None)
    two, *_, ran = run(name, torch.bfloat16, monkeypatch, many=math.inf)
    assert ran == 2
    for what, x in want.items():
        finite = x.isfinite()
        error, usual = ((y[what].double() - x)[finite].norm().item() for y in (two, other))
        assert error <= _bar(what, usual, x[finite].norm().item()), what


def _bar(what, usual, size):
    """The error that is allowed, by that of the portable pass.

    The reader of stored pairs forms the gradient of a query's scale from rounded weights alone; the
    portable pass adds the part of the numbers per key in float32.
    """
    more = 1.5 if what in ("gradient of log_bandwidth", "gradient of weight") else 1.1
    return more * usual + 1e-4 * size


def _need_sums():
    if not eligible.can_add():
        pytest.skip("TMA adds to memory from Triton 3.9 on")


ALIKE_OR_EACH = {"rbf": lambda: mc.RBF(8.0), "adaptive": lambda: _adaptive(64)}


def summed(monkeypatch, change=lambda q, k, v, grad: None, filter=WINDOW, name="rbf", queries=500):
    """Gradients of q, k, v and parameters in one pass, for modified inputs."""
    _need_sums()
    monkeypatch.setattr(eligible, "MANY_KEYS", 1)
    monkeypatch.setattr(launch, "keys", None)
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape, like = (2, 2, 500, 64), {"device": DEVICE, "dtype": torch.bfloat16}
    given = [torch.randn(shape, generator=generator, **like) for _ in range(4)]
    change(*given)
    q, k, v, grad = given
    inputs = [x.requires_grad_() for x in (q[:, :, -queries:].contiguous(), k, v)]
    torch.manual_seed(0)
    kernel = ALIKE_OR_EACH[name]().to(DEVICE)
    out = mc.smooth(kernel, *inputs, filter=filter, backend="triton")
    return torch.autograd.grad(out, [*inputs, *kernel.parameters()], grad[:, :, -queries:])


@pytest.mark.parametrize("name", ALIKE_OR_EACH)
@pytest.mark.parametrize("power", [-60, 40])
def test_sums_have_as_many_digits_whatever_their_size(power, name, monkeypatch):
    got = summed(monkeypatch, name=name)
    scaled = summed(monkeypatch, lambda q, k, v, grad: grad.mul_(2.0**power), name=name)
    assert all(torch.equal(a * 2.0**power, b) for a, b in zip(got, scaled, strict=True))


@pytest.mark.parametrize("name", ALIKE_OR_EACH)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e18])
def test_hidden_values_do_not_change_the_sums(value, name, monkeypatch):
    filter = mc.Window(200, 0) & mc.Padding([300, 500])

    def change_keys(q, k, v, grad):
        k[0, :, 300:] = value

    def change_both(q, k, v, grad):
        k[0, :, 300:] = v[0, :, 300:] = value

    plain = summed(monkeypatch, filter=filter, name=name)
    for change in (change_keys, change_both):
        among = summed(monkeypatch, change, filter, name)
        for got, want in zip(among, plain, strict=True):
            if math.isfinite(value) or change is change_keys:
                assert torch.equal(got, want)
            else:
                # Where a value is not finite, the forward runs again, and rounds otherwise. The
                # gradient of a parameter is one number, in which large ones cancel.
                assert (got - want).norm() < 2 ** (-8 if got.dim() == 4 else -4) * want.norm()


def test_the_first_key_may_be_far_from_all_others(monkeypatch):
    """Numbers per key are relative to the first key, up to a limit; here it is hidden."""

    def change(q, k, v, grad):
        k[:, :, 0] = 1e18

    plain, far = (
        summed(monkeypatch, *changed, name="adaptive", queries=250) for changed in ((), (change,))
    )
    # They count from another number then, and so round otherwise.
    for got, want in zip(far, plain, strict=True):
        assert (got - want).norm() < 2 ** (-7 if got.dim() == 4 else -4) * want.norm()


def test_a_gradient_that_is_not_finite_stays_among_its_neighbours(monkeypatch):
    def change(q, k, v, grad):
        grad[0, 0, 130, 5] = math.nan

    plain, (dq, *_) = summed(monkeypatch), summed(monkeypatch, change)
    assert dq[0, 0, 130].isnan().all()
    same = torch.ones(500, dtype=torch.bool)
    same[128:192] = False
    assert torch.equal(dq[:, :, same], plain[0][:, :, same])
    assert torch.equal(dq[1], plain[0][1])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_who_sees_what_is_not_finite_has_no_gradient(value, monkeypatch):
    def change(q, k, v, grad):
        v[0, 0, 100] = value

    plain, (dq, *_) = summed(monkeypatch), summed(monkeypatch, change)
    assert not dq[0, 0, 100:301].isfinite().any()
    got, want = dq[0, 0, 320:], plain[0][0, 0, 320:]
    # The queries of these blocks do not see it, but their forward runs again, and rounds otherwise.
    assert (got - want).norm() < 2**-8 * want.norm()
    assert torch.equal(got[64:], want[64:])


@pytest.mark.parametrize("name", ["rbf", "two-parts", "adaptive"])
def test_heads_take_turns_where_pairs_are_many(name, monkeypatch):
    got, *_ = run(name, torch.bfloat16, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(eligible, "PAIRS", 3 * 384 * 384)
    monkeypatch.setattr(eligible, "LEAST", 0)
    in_turn, *_ = run(name, torch.bfloat16, monkeypatch)
    assert all(torch.equal(got[name], in_turn[name]) for name in got)


@pytest.mark.parametrize("rounds", [0, 1000], ids=["head-by-head", "longest-first"])
@pytest.mark.parametrize("name", CASES)
def test_programs_take_further_blocks_of_keys(name, rounds, monkeypatch):
    """Three programs for all blocks equal one program per block."""
    got, *_ = run(name, torch.bfloat16, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(plan, "_plans", {})
    for module in (eligible, launch):
        monkeypatch.setattr(module, "processors", lambda device: 3)
    monkeypatch.setattr(launch, "ROUNDS", rounds)
    monkeypatch.setattr(launch, "LAST", 1)
    in_turn, *_ = run(name, torch.bfloat16, monkeypatch)
    assert all(torch.equal(got[name], in_turn[name]) for name in got)


@pytest.mark.parametrize(
    "name", ["wide-cross", "wide-window", "wide-padding", "two-parts", "along"]
)
def test_no_pair_is_read_that_was_not_stored(name, monkeypatch):
    got, *_ = run(name, torch.bfloat16, monkeypatch)
    monkeypatch.undo()
    space = launch._space
    monkeypatch.setattr(launch, "_space", lambda *a: space(*a).fill_(math.nan))
    among_nan, *_ = run(name, torch.bfloat16, monkeypatch)
    assert all(torch.equal(got[name], among_nan[name]) for name in got)


@pytest.mark.parametrize("dim", [64, 128])
def test_token_major_tensors_give_the_same(dim):
    kernel = mc.RBF([8.0, 11.0]).to(DEVICE)
    given = [torch.randn(2, 2, 1200, dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]

    def results(turn):
        inputs = [turn(x).requires_grad_() for x in given]
        out = mc.smooth(kernel, *inputs, filter=mc.Causal(), backend="triton")
        return out, *torch.autograd.grad(out.square().sum(), [*inputs, *kernel.parameters()])

    turned = results(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    assert turned[1].transpose(1, 2).is_contiguous()
    for a, b in zip(results(torch.clone), turned, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("pairs", [384 * 384 - 1, 3 * 384 * 384])
def test_pairs_of_too_few_heads_are_not_stored(pairs, monkeypatch):
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(eligible, "PAIRS", pairs)
    monkeypatch.setattr(launch, "all_passes", None)
    got, other, _, ran = run("rbf", torch.bfloat16, monkeypatch)
    assert ran == 2
    assert got.keys() == other.keys()


def test_float32_and_links_are_left_to_the_other_pass(monkeypatch):
    monkeypatch.setattr(launch, "keys", None)
    monkeypatch.setattr(launch, "one_pass", None)
    monkeypatch.setattr(launch, "all_passes", None)
    monkeypatch.setattr(eligible, "MANY_KEYS", 1)
    for kernel, dtype in ((mc.RBF(8.0), torch.float32), (mc.Laplace(8.0), torch.bfloat16)):
        Case(kernel.to(DEVICE), mc.Causal(), LONG, 64, 0, dtype, "cuda").run("triton")


WIDER = [name for name in CASES if name.startswith(("wide", "along"))]
FORWARD = ["plain-full", "rbf", "adaptive", *WIDER]


def forwards(case, monkeypatch):
    """(The Hopper forward, the portable forward), and float64."""
    ran, found = [], []
    inner = launch.forward
    monkeypatch.setattr(launch, "forward", lambda *a: (ran.append(1), inner(*a))[1])
    for given in (True, False):
        if not given:
            monkeypatch.setattr(eligible, "forwards", lambda p: False)
        found.append(case.run("triton", log_mass=True))
        assert len(ran) == 1
    return *found, case.run("reference", log_mass=True, wide=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in FORWARD), ("plain-full", torch.float16)],
    ids=str,
)
def test_the_hopper_forward_equals_the_portable_one(name, dtype, monkeypatch):
    make, dim, filter, shape = CASES[name]
    torch.manual_seed(0)
    case = Case(make(dim).to(DEVICE), filter, shape, dim, 0, dtype, "cuda")
    got, other, want = forwards(case, monkeypatch)
    for what in ("out", "log_mass"):
        x, finite = want[what], want[what].isfinite()
        assert torch.equal(got[what].isneginf(), x.isneginf()), what
        error, usual = ((y[what].double() - x)[finite].norm().item() for y in (got, other))
        size = x[finite].norm().item()
        assert error <= 1.1 * usual + 1e-5 * size, f"{what}: {error:.2e}, other {usual:.2e}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["summed", "summed-scales", "summed-full", "rbf", "adaptive", "plain-full"]
)
def test_hidden_values_that_are_not_finite_leave_the_forward_alone(name, value):
    make, dim, _, _ = CASES[name]
    torch.manual_seed(0)
    kernel, filter = make(dim).to(DEVICE), mc.Causal() & mc.Padding([211, 300])
    q, k, v = (torch.randn(2, 2, 300, dim, device=DEVICE).bfloat16() for _ in range(3))
    with torch.no_grad():
        want = mc.smooth(kernel, q, k, v, filter=filter, backend="triton", return_log_mass=True)
        v[0, :, 211:] = value
        got = mc.smooth(kernel, q, k, v, filter=filter, backend="triton", return_log_mass=True)
        assert all(
            torch.allclose(x, y, rtol=2e-2, atol=1e-2) for x, y in zip(got, want, strict=True)
        )
        v[1, 1, 250, 5] = value
        out = mc.smooth(kernel, q, k, v, filter=filter, backend="triton")
    assert out[1, 1, 250:].isnan().all()
    out[1, 1, 250:] = 0.0
    assert out.isfinite().all()


@pytest.mark.parametrize("name", ["summed", "summed-scales", "rbf", "adaptive"])
def test_queries_far_from_all_keys_have_weights(name):
    make, dim, filter, _ = CASES[name]
    torch.manual_seed(0)
    kernel = make(dim).to(DEVICE)
    q, k, v = (torch.randn(1, 2, 300, dim, device=DEVICE).bfloat16() for _ in range(3))
    q[:, :, 100:110] *= 30.0
    with torch.no_grad():
        got = mc.smooth(kernel, q, k, v, filter=filter, backend="triton")
        wide = (x.double() for x in (q, k, v))
        want = mc.smooth(kernel.double(), *wide, filter=filter, backend="reference")
    assert (got.double() - want).abs().max() < 0.05
    assert got[:, :, 100:110].abs().max() > 0.1


@pytest.mark.parametrize("programs", [1, 5])
@pytest.mark.parametrize("make", [mc.Exponential, lambda: mc.RBF(8.0)], ids=["plain", "rbf"])
def test_blocks_are_computed_again_where_the_fast_path_fails(make, programs, monkeypatch):
    """Queries far from all keys, and values that are not finite, in turns far apart."""
    kernel, filter, heads = make().to(DEVICE), mc.Causal(), 23
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 300, 128, device=DEVICE).bfloat16() for _ in range(3))
    for head, place in ((0, 70), (17, 5), (22, 250)):
        q[:, head, place] *= 40.0
    spoiled = torch.zeros(1, heads, 300, dtype=torch.bool, device=DEVICE)
    for head, place in ((3, 40), (21, 280)):
        v[:, head, place, 7] = math.inf
        spoiled[:, head, place:] = True
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(launch, "processors", lambda device: programs)
    with torch.no_grad():
        got = mc.smooth(kernel, q, k, v, filter=filter, backend="triton", return_log_mass=True)
        wide = (x.double() for x in (q, k, v))
        want = mc.smooth(
            kernel.double(), *wide, filter=filter, backend="reference", return_log_mass=True
        )
    assert not got[0][spoiled].isfinite().any()
    for x, y in zip(got, want, strict=True):
        error = (x.double() - y)[~spoiled]
        assert error.norm() < 0.01 * y[~spoiled].norm()
        assert error.abs().max() < 0.05 * y[~spoiled].abs().max()
