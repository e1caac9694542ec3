import math
from contextlib import contextmanager

import pytest
import torch
from catalogue import COMPOSED, DIM, HEADS, KERNELS
from torch import nn

import mercer as mc
from mercer.testing import Shape, check_kernel, inputs

ALL = KERNELS | COMPOSED


@pytest.mark.parametrize("name", ALL)
def test_a_kernel_keeps_all_its_promises(name):
    check_kernel(ALL[name](), heads=HEADS, dim=DIM)


@pytest.mark.parametrize("name", ALL)
def test_weights_follow_the_formula(name):
    """The definitions of the design, written out once more in the plainest way."""
    with double_precision():
        kernel = ALL[name]().double()
    q, k, _ = inputs(kernel, Shape(queries=4, keys=6), DIM)
    got = kernel(q, k).expand(2, -1, -1, -1)
    for h in range(HEADS):
        for i in range(4):
            for j in range(6):
                want = WEIGHTS[name](kernel, _At(q, 1, h, i), _At(k, 1, h, j), i + 2, j, h)
                assert math.isclose(got[1, h, i, j].item(), want, rel_tol=1e-9), (i, j, h)


@contextmanager
def double_precision():
    """Bandwidths are kept as logarithms: made in float64, they are exact to 1e-16."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class _At:
    """The features of one token."""

    def __init__(self, features, b, h, t):
        for name, x in features.items():
            setattr(self, name, x[b, h, t].tolist())


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def apart(a, b):
    return math.sqrt(sum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def default(dim=DIM):
    return math.sqrt(math.sqrt(dim) / 2)


def rbf(q, k, s):
    return math.exp(-(apart(q, k) ** 2) / (2 * s**2))


def adaptive(kernel, q, k, i, j, h):
    steer = dot(q.content, kernel.weight[h].tolist())
    return rbf(q.content, k.content, default() * math.exp(2.0 * math.tanh(steer / 2.0)))


def matern(nu, r):
    a = math.sqrt(2 * nu) * r
    tail = {0.5: 1.0, 1.5: 1 + a, 2.5: 1 + a + a**2 / 3}[nu]
    return tail * math.exp(-a)


def cosine(q, k, scale):
    return math.exp(scale * dot(q, k) / math.sqrt(dot(q, q) * dot(k, k)))


def lookup(table, q, away, scale):
    clip = (len(table) - 1) // 2
    return math.exp(scale * dot(q, table[max(-clip, min(clip, away)) + clip]))


def sinusoid(c, away):
    total = 0.0
    for p in range(len(c) // 2):
        w = 10000.0 ** (-2 * p / len(c))
        total += c[2 * p] * math.sin(away * w) + c[2 * p + 1] * math.cos(away * w)
    return math.exp(total)


# Buckets of the distances 0, 1, 2, …: for 4 buckets one way and a largest distance of 6, two exact
# and 2 + floor(2 log(n/2) / log 3); for 6 and 5, three exact and 3 + floor(3 log(n/3) / log 5/3).
FOUR = [0, 1, 2, 2, 3, 3, 3, 3]
SIX = [0, 1, 2, 3, 4, 5, 5, 5]


def both_ways(table, away, h):
    bucket = FOUR[abs(away)] + (4 if away < 0 else 0)
    return math.exp(table[bucket][h])


def slope(h):
    return [2.0**-4, 2.0**-8][h]


def ard(q, k, widths):
    return math.exp(-sum((x - y) ** 2 / (2 * s**2) for x, y, s in zip(q, k, widths, strict=True)))


def periodic(q, k, p, s):
    away = (math.sin(math.pi * (x - y) / p) for x, y in zip(q, k, strict=True))
    return math.exp(-2 * sum(x**2 for x in away) / s**2)


@torch.no_grad()
def spectral(kernel, q, k, h):
    total = 0.0
    for component in kernel:
        bandwidths, wave = component.kernel.kernels
        turn = dot(wave.frequency[h].tolist(), [x - y for x, y in zip(q, k, strict=True)])
        near = ard(q, k, bandwidths.bandwidth(DIM)[h].tolist())
        weight = component.log_scale[h].exp().item()
        total += weight * near * (1 + math.cos(2 * math.pi * turn)) / 2
    return total


root = 1 / math.sqrt(DIM)
WEIGHTS = {
    "exponential": lambda _, q, k, i, j, h: math.exp(dot(q.content, k.content) * root),
    "exponential-scale": lambda _, q, k, i, j, h: math.exp(0.7 * dot(q.content, k.content)),
    # Tsai's exp(-|q - k|^2 / sqrt(D))
    "rbf": lambda _, q, k, i, j, h: math.exp(-(apart(q.content, k.content) ** 2) * root),
    "rbf-fixed": lambda _, q, k, i, j, h: rbf(q.content, k.content, 1.5),
    "rbf-per-head": lambda _, q, k, i, j, h: rbf(q.content, k.content, [1.0, 2.5][h]),
    "bridge": lambda _, q, k, i, j, h: math.exp(
        root * (dot(q.content, k.content) - dot(q.content, q.content) / 2)
    ),
    "bridge-per-head": lambda _, q, k, i, j, h: (
        rbf(q.content, k.content, [1.0, 2.5][h])
        * math.exp(0.4 * dot(k.content, k.content) / (2 * [1.0, 2.5][h] ** 2))
    ),
    "adaptive": adaptive,
    "polynomial": lambda _, q, k, i, j, h: dot(q.content, k.content) ** 2,
    "polynomial-4": lambda _, q, k, i, j, h: dot(q.content, k.content) ** 4,
    "linear": lambda _, q, k, i, j, h: dot(q.content, k.content),
    "laplace": lambda _, q, k, i, j, h: math.exp(-apart(q.content, k.content) / 2.0),
    "rational": lambda _, q, k, i, j, h: (
        (1 + apart(q.content, k.content) ** 2 / default() ** 2) ** -0.5
    ),
    "matern-1/2": lambda _, q, k, i, j, h: matern(0.5, apart(q.content, k.content) / default()),
    "matern-3/2": lambda _, q, k, i, j, h: matern(1.5, apart(q.content, k.content) / default()),
    "matern-5/2": lambda _, q, k, i, j, h: matern(2.5, apart(q.content, k.content) / 3.0),
    "cosine": lambda _, q, k, i, j, h: cosine(q.content, k.content, 3.0),
    "lookup": lambda u, q, k, i, j, h: lookup(u.table.tolist(), q.content, i - j, root),
    "lookup-per-head": lambda u, q, k, i, j, h: lookup(u.table[h].tolist(), q.content, i - j, 0.5),
    "lookup-causal": lambda u, q, k, i, j, h: (
        1.0 if j > i else lookup([*[[]] * 3, *u.table.tolist()], q.content, i - j, root)
    ),
    "relative-sinusoid": lambda _, q, k, i, j, h: sinusoid(q.relative, i - j),
    "relative-sinusoid-clipped": lambda _, q, k, i, j, h: sinusoid(
        q.relative, max(-2, min(2, i - j))
    ),
    "alibi": lambda _, q, k, i, j, h: math.exp(-slope(h) * abs(i - j)),
    "buckets": lambda u, q, k, i, j, h: both_ways(u.table.tolist(), i - j, h),
    "buckets-one-way": lambda u, q, k, i, j, h: math.exp(u.table[SIX[max(i - j, 0)]][h].item()),
    "ard": lambda u, q, k, i, j, h: ard(q.content, k.content, u.bandwidth(DIM).tolist()),
    "ard-per-head": lambda u, q, k, i, j, h: ard(
        q.content, k.content, u.bandwidth(DIM)[h].tolist()
    ),
    "periodic": lambda _, q, k, i, j, h: periodic(q.content, k.content, 2.0 + h, default()),
    "spectral": lambda u, q, k, i, j, h: spectral(u, q.content, k.content, h),
    "scaled": lambda _, q, k, i, j, h: (0.5 + h) * rbf(q.content, k.content, default()),
    "power": lambda _, q, k, i, j, h: (
        (rbf(q.content, k.content, 1.5) * math.exp(dot(q.content, k.content) * root)) ** 1.5
    ),
    "mixture": lambda u, q, k, i, j, h: (
        0.3 * rbf(q.content, k.content, default())
        + [0.5, 2.0][h] * math.exp(dot(q.content, k.content) * root)
    ),
    "eq-9": lambda _, q, k, i, j, h: math.exp(
        dot(q.content, k.content) * root + dot(q.position, k.position) * root
    ),
    "rbf*rbf": lambda _, q, k, i, j, h: (
        rbf(q.content, k.content, default()) * rbf(q.position, k.position, 2.0)
    ),
    "rational*exponential": lambda _, q, k, i, j, h: (
        math.exp(dot(q.content, k.content) * root)
        / (1 + apart(q.content, k.content) ** 2 / (2 * default() ** 2))
    ),
    "polynomial*laplace": lambda _, q, k, i, j, h: (
        dot(q.content, k.content) ** 2 * math.exp(-apart(q.position, k.position) / default())
    ),
    "rbf+polynomial": lambda _, q, k, i, j, h: (
        rbf(q.content, k.content, default()) + dot(q.content, k.content) ** 2
    ),
    "exponential+linear": lambda _, q, k, i, j, h: (
        math.exp(2 * dot(q.content, k.content))
        + dot(q.content, k.content) * rbf(q.content, k.content, default())
    ),
    "lookup*buckets*alibi": lambda u, q, k, i, j, h: (
        math.exp(dot(q.content, k.content) * root - slope(h) * abs(i - j))
        * lookup(u.kernels[1].table.tolist(), q.content, i - j, root)
        * both_ways(u.kernels[2].table.tolist(), i - j, h)
    ),
    "nested": lambda _, q, k, i, j, h: (
        (rbf(q.content, k.content, default()) + cosine(q.content, k.content, 2.0))
        * (
            math.exp(dot(q.position, k.position) * root)
            + matern(1.5, apart(q.content, k.content) / default())
        )
    ),
    "adaptive*alibi": lambda u, q, k, i, j, h: (
        adaptive(u.kernels[0], q, k, i, j, h)
        * math.exp(0.5 * dot(q.content, k.content) - slope(h) * abs(i - j))
    ),
    "transformer-xl": lambda _, q, k, i, j, h: (
        math.exp(dot(q.content, k.content) * root) * sinusoid(q.relative, i - j)
    ),
}


@pytest.mark.parametrize(
    ("kernel", "formula"),
    [
        (mc.Exponential(), "exp(<q, k> / sqrt(D))"),
        (mc.Exponential(0.5, on="position"), "exp(0.5 <q.position, k.position>)"),
        (mc.RBF(2.0), "exp(-|q - k|^2 / (2 * 2^2))"),
        (mc.RBF(heads=4), "exp(-|q - k|^2 / 2 s_h^2)"),
        (mc.Bridge(c=0.5), "exp(-|q - k|^2 / 2 s^2) * exp(0.5 |k|^2 / 2 s^2)"),
        (mc.Polynomial(4), "<q, k>^4"),
        (mc.Linear(signed=True), "<q, k>"),
        (mc.Laplace(3.0), "exp(-|q - k| / 3)"),
        (mc.RationalQuadratic(alpha=2.0), "(1 + |q - k|^2 / 4 s^2)^-2"),
        (mc.Cosine(), "exp(10 cos(q, k))"),
        (mc.RelativeSinusoid(), "exp(<q.relative, sinusoid(i-j)>)"),
        (mc.RelativeSinusoid(max_distance=9), "exp(<q.relative, sinusoid(clip(i-j, 9))>)"),
        (mc.ALiBi([0.5]), "exp(-m_h |i-j|)"),
        (mc.ARD(4), "exp(-sum_d (q_d - k_d)^2 / 2 s_d^2)"),
        (mc.ARD(4, heads=2, on="position"),
         "exp(-sum_d (q.position_d - k.position_d)^2 / 2 s_hd^2)"),
        (mc.Periodic(2.5, 0.5), "exp(-2 sum_d sin^2(pi (q_d - k_d) / 2.5) / 0.5^2)"),
        (mc.SpectralMixture(3, 4), "sum_c w_c exp(-sum_d (q_d - k_d)^2 / 2 s_cd^2) "
         "cos^2(pi <m_c, q - k>), c = 1 to 3"),
        (0.5 * mc.RBF() + mc.RBF() * 2, "0.5 * exp(-|q - k|^2 / 2 s^2) + 2 * "
         "exp(-|q - k|^2 / 2 s^2)"),
        (2 * (mc.Polynomial() + mc.Cosine(1.0)), "2 * (<q, k>^2 + exp(1 cos(q, k)))"),
        (mc.Scaled(mc.Polynomial(), heads=2), "c_h * <q, k>^2"),
        (mc.RBF() ** 0.5, "(exp(-|q - k|^2 / 2 s^2))^0.5"),
        (mc.Polynomial() * (mc.Cosine(1.0) + mc.RBF()), "<q, k>^2 * (exp(1 cos(q, k)) + "
         "exp(-|q - k|^2 / 2 s^2))"),
    ],
    ids=repr,
)  # fmt: skip
def test_repr_is_the_formula(kernel, formula):
    assert repr(kernel) == formula


def test_sums_and_products_flatten_and_compute_alike_in_any_order():
    a, b, c = mc.RBF(), mc.Polynomial(), mc.Cosine(1.0)
    assert len((a + b + c).kernels) == len((a * b * c).kernels) == 3
    q, k, v = inputs(a, Shape(), DIM)
    for u, w in [(a + b, b + a), (a * b, b * a), (a * (b + c), a * b + a * c)]:
        u, w = u.double(), w.double()
        for backend in ("reference", "chunked"):
            same = mc.smooth(u, q, k, v, backend=backend) - mc.smooth(w, q, k, v, backend=backend)
            assert same.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("kernel", "symmetric", "positive", "valid"),
    [
        (mc.Exponential(), True, True, True),
        (mc.Exponential(-1.0), True, True, False),
        (mc.RBF(), True, True, True),
        (mc.AdaptiveRBF(DIM), False, True, False),
        (mc.Linear(signed=True), True, False, True),
        (mc.RelativeSinusoid(), False, True, False),
        (mc.Lookup(torch.zeros(3, DIM)), False, True, False),
        (mc.ALiBi([1.0]), True, True, True),
        (mc.ALiBi([-1.0]), True, True, False),
        (mc.RBF() * mc.Polynomial(), True, True, True),
        (mc.RBF() + mc.AdaptiveRBF(DIM), False, True, False),
        (mc.RBF() * mc.Linear(signed=True), True, False, True),
        (0.5 * mc.Linear(signed=True), True, False, True),
        (mc.Scaled(mc.AdaptiveRBF(DIM)), False, True, False),
        (mc.RBF() ** 0.5, True, True, True),
        (mc.Lookup(torch.zeros(3, DIM)) ** 2, False, True, False),
        (mc.SpectralMixture(2, DIM), True, True, True),
    ],
    ids=lambda x: repr(x),
)
def test_properties_pass_through_the_algebra(kernel, symmetric, positive, valid):
    assert (kernel.symmetric, kernel.positive, kernel.valid) == (symmetric, positive, valid)


@pytest.mark.parametrize("name", ["rbf", "laplace", "rational", "matern-3/2", "matern-5/2"])
def test_distance_kernels_do_not_change_under_motions(name):
    kernel = KERNELS[name]().double()
    q, k, _ = inputs(kernel, Shape(), DIM)
    q, k = q.part("content"), k.part("content")
    turn = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64)).Q
    shift = torch.randn(DIM, dtype=torch.float64)
    assert (kernel(q + shift, k + shift) - kernel(q, k)).abs().max() < 1e-12
    assert (kernel(q @ turn, k @ turn) - kernel(q, k)).abs().max() < 1e-12


def test_dot_kernels_do_not_change_under_rotations_and_cosine_under_lengths():
    q, k, _ = inputs(mc.Cosine(), Shape(), DIM)
    q, k = q.part("content"), k.part("content")
    turn = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64)).Q
    for kernel in (mc.Exponential(), mc.Polynomial(), mc.Cosine()):
        assert ((kernel(q @ turn, k @ turn) - kernel(q, k)) / kernel(q, k)).abs().max() < 1e-10
    assert (mc.Cosine()(3 * q, k / 7) - mc.Cosine()(q, k)).abs().max() < 1e-8


def test_on_the_sphere_rbf_and_exponential_are_one_kernel():
    """Fact 7: features of constant norm make the number per key a constant."""
    q, k, v = inputs(mc.RBF(), Shape(), DIM)
    q, k = (nn.functional.normalize(x.part("content"), dim=-1) for x in (q, k))
    with double_precision():
        rbf = mc.RBF(0.5)
    same = mc.smooth(rbf, q, k, v) - mc.smooth(mc.Exponential(4.0), q, k, v)
    assert same.abs().max() < 1e-12


def test_equal_features_have_distance_zero_in_every_backend():
    """An infinite slope at zero must not magnify rounding, nor make a gradient NaN."""
    x = torch.randn(1, 2, 33, 64, dtype=torch.float64, requires_grad=True)
    v = torch.randn(1, 2, 33, 3, dtype=torch.float64)
    kernel = mc.Laplace(4.0).double()
    outs = [mc.smooth(kernel, x, x, v, backend=b) for b in ("reference", "chunked")]
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in outs]
    assert (outs[0] - outs[1]).abs().max() < 1e-12
    assert (grads[0] - grads[1]).abs().max() < 1e-10


@pytest.mark.parametrize("kernel", [mc.Polynomial(2), mc.Polynomial(4), mc.Linear(signed=True)])
def test_zero_features_have_finite_and_equal_gradients(kernel):
    """The weight is zero there, its slope in logarithms is not finite, its gradient is."""
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64) for _ in range(3))
    q[:, :, 2], k[:, :, 4] = 0.0, 0.0
    q[:, :, 2, 0] = 1e-3
    k[:, :, 3, 0] = 0.0
    grads = []
    for backend in ("reference", "chunked"):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out = mc.smooth(kernel, *given, backend=backend)
        grads.append(torch.autograd.grad((out * v).sum(), given))
    for a, b in zip(*grads, strict=True):
        assert a.isfinite().all()
        assert (a - b).abs().max() < 1e-9 * (1 + b.abs().max())


def test_a_query_without_mass_sees_nothing():
    q = torch.randn(1, 1, 4, 3)
    q[:, :, 1] = 0.0
    for backend in ("reference", "chunked"):
        out, mass = mc.smooth(mc.Polynomial(), q, q, q, backend=backend, return_log_mass=True)
        assert (out[:, :, 1] == 0).all()
        assert mass[0, 0, 1] == -math.inf


def test_too_many_terms_are_refused_with_the_limit():
    two = mc.RBF() + mc.Cosine()
    many = two * two * two * two * two * two * two
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="128 terms, more than the limit of 64"):
        mc.smooth(many, q, q, q)
    assert mc.smooth(many, q, q, q, backend="reference").isfinite().all()


def test_t5_buckets_are_those_of_t5():
    """The numbers of the published model for its 32 buckets and largest distance 128."""
    kernel = mc.Buckets(torch.zeros(32, 1))
    away = torch.tensor([0, 1, 7, 8, 11, 12, 16, 23, 32, 46, 64, 91, 128, 1000, -1, -8, -200])
    want = [0, 1, 7, 8, 8, 9, 10, 11, 12, 13, 14, 15, 15, 15, 17, 24, 31]
    assert kernel.bucket(away).tolist() == want


@pytest.mark.parametrize("learns", [True, False])
def test_a_table_of_buckets_by_distance_needs_no_copy(learns):
    """The same numbers, side by side, whether or not they have a gradient."""
    kernel = mc.Buckets(nn.Parameter(torch.randn(32, HEADS)), max_distance=40)
    q = torch.randn(1, HEADS, 5, DIM)
    with torch.set_grad_enabled(learns):
        table = kernel.terms(q, q)[0].relative.table
    away = torch.arange(-40, 41)
    assert torch.equal(table[0, :, 0].mT, kernel.table[kernel.bucket(away)])
    assert table.requires_grad == learns
    assert table.stride(-1) == 1


def test_a_kernel_is_a_module_whose_parameters_train():
    kernel = mc.RBF(heads=2) * mc.Lookup(nn.Parameter(torch.zeros(3, 4)))
    assert {n for n, _ in kernel.named_parameters()} == {
        "kernels.0.log_bandwidth",
        "kernels.1.table",
    }
    assert not list(mc.RBF(trainable=False).parameters())
    again = mc.RBF(heads=2) * mc.Lookup(nn.Parameter(torch.ones(3, 4)))
    again.load_state_dict(kernel.state_dict())
    assert (again.kernels[1].table == 0).all()
