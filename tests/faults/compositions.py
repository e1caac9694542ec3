"""An attack: a random kernel under a random filter, every backend against the reference in float64.

Outputs, log_mass and all gradients must agree, a key that a row does not see must not change the
row, and a NaN in a key must reach all rows that see it.
"""

import random
from typing import Any

import torch

import mercer as mc
from mercer.filters import Filter
from mercer.kernels import KERNELS, Kernel
from mercer.testing.cases import EXACT, Case, Shape, double, errors, rounding_of, taking

LONGEST = 40
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.bfloat16, torch.float16)}


def attack(seed: int, device: str = "cpu") -> str:
    """One composition; AssertionError says which backend was wrong, and where."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    heads, dim = choose.choice((1, 2, 3, 4)), choose.choice((2, 4, 8, 12))
    kernel = draw_kernel(choose, heads, dim)
    shape = Shape(
        batch=choose.randint(1, 3),
        heads=heads,
        kv_heads=choose.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        queries=choose.randint(1, LONGEST),
        keys=choose.randint(1, LONGEST),
        values=choose.randint(1, 9),
    )
    filter = draw_filter(choose, shape)
    case = Case(double(kernel), filter, shape, dim, seed)
    said = f"{kernel!r}, {filter!r}, {shape}, dim {dim}"
    backends = backends_of(case.kernel, filter, shape, dim)
    if device == "cpu":
        check_exact(case, backends, said)
    check_hidden(kernel, filter, shape, dim, choose, said, device)
    check_accuracy(kernel, filter, shape, dim, choose.choice(DTYPES[device]), said, device)
    return f"{said}: {', '.join(backends)}"


def backends_of(*call: Any) -> list[str]:
    """The backends that take a call; not FlexAttention, which compiles each for seconds."""
    return [name for name in taking(*call) if name != "flex"]


def draw_kernel(choose: random.Random, heads: int, dim: int) -> Kernel:
    """A sum of up to three products of up to three kernels."""
    examples = [build for kernel in KERNELS for build in kernel.entry.examples.values()]
    terms = []
    for _ in range(choose.choice((1, 1, 2, 3))):
        factors = [choose.choice(examples)(heads, dim) for _ in range(choose.choice((1, 1, 2, 3)))]
        term = factors[0]
        for factor in factors[1:]:
            term = term * factor
        terms.append(term)
    kernel = terms[0]
    for term in terms[1:]:
        kernel = kernel + term
    return kernel


def draw_filter(choose: random.Random, shape: Shape, depth: int = 2) -> Filter:
    """A filter, or up to four joined by & and |."""
    if depth and choose.random() < 0.4:
        first, second = (draw_filter(choose, shape, depth - 1) for _ in range(2))
        return first & second if choose.random() < 0.5 else first | second
    return choose.choice(
        (
            mc.Full,
            mc.Causal,
            lambda: mc.Window(choose.randint(-1, 12), choose.randint(0, 6)),
            lambda: mc.Memory(choose.randint(0, 12)),
            lambda: mc.Strided(choose.randint(1, 9)),
            lambda: mc.Fixed(stride := choose.randint(1, 9), choose.randint(1, stride)),
            lambda: mc.Padding([choose.randint(0, shape.keys) for _ in range(shape.batch)]),
            lambda: mc.Documents(
                [[choose.randint(0, 2) for _ in range(shape.keys)] for _ in range(shape.batch)]
            ),
        )
    )()


def check_exact(case: Case, backends: list[str], said: str) -> None:
    """Every backend that takes the call, in float64."""
    want = case.run("reference", log_mass=True)
    # Weights that cancel magnify each rounding.
    limit = max(EXACT, 1e5 * rounding_of(case))
    for backend in backends:
        got = case.run(backend, log_mass=True)
        for name, x in want.items():
            infinite = torch.equal(got[name].isneginf(), x.isneginf())
            assert infinite, f"{said}, {backend}: {name} is -inf at other places"
            finite = x.isfinite()
            if not bool(finite.any()):
                continue
            error = (got[name] - x)[finite].abs().max().item()
            size = x[finite].abs().max().item()
            assert error <= limit * (1 + size), f"{said}, {backend}: {name} is off by {error:.1e}"


@torch.no_grad()
def check_hidden(
    kernel: Kernel, filter: Filter, shape: Shape, dim: int, choose: random.Random, said: str,
    device: str,
) -> None:  # fmt: skip
    """A key becomes NaN: rows that do not see it keep their bits, and the others are NaN."""
    key = choose.randrange(shape.keys)
    sees = filter.mask(shape.queries, shape.keys).expand(shape.batch, 1, -1, -1)[..., key]
    for backend in backends_of(kernel, filter, shape, dim, torch.float32, device):
        case = Case(kernel.to(device), filter, shape, dim, 1, torch.float32, device)
        q, k, v = case.inputs()
        # Random content, which is finite, where NaN comes next: both calls then have the same path.
        before = mc.smooth(case.kernel, q, k, v, filter=filter, backend=backend)
        for x in (*k.tensors(), v):
            x[:, :, key] = float("nan")
        after = mc.smooth(case.kernel, q, k, v, filter=filter, backend=backend)
        rows = sees.to(device).expand(-1, shape.heads, -1)
        blind, seeing = ~rows, rows
        equal = torch.equal(before[blind].nan_to_num(7.0), after[blind].nan_to_num(7.0))
        assert equal, f"{said}, {backend}: key {key}, which is NaN, changed rows that do not see it"
        assert bool(after[seeing].isnan().all()), (
            f"{said}, {backend}: key {key} is NaN, but a row that sees it is not"
        )


def check_accuracy(
    kernel: Kernel, filter: Filter, shape: Shape, dim: int, dtype: torch.dtype, said: str,
    device: str,
) -> None:  # fmt: skip
    """Twice the reference's error, plus rounding of numbers of size 1 that cancel.

    `mercer.testing.check_accuracy` has the strict budget, for calls with many visible keys.
    """
    for backend in backends_of(kernel, filter, shape, dim, dtype, device):
        known = errors(kernel, filter, shape, dim, dtype, "reference", device, seeds=2)
        found = errors(kernel, filter, shape, dim, dtype, backend, device, seeds=2)
        for name, (error, size, rounding) in found.items():
            budget = 2 * known[name][0] + 8 * rounding * (1 + size)
            assert error <= budget, (
                f"{said}, {backend}, {dtype}: {name} is off by {error:.1e}, more than {budget:.1e}"
            )
