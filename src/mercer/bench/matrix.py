"""Every kernel with every filter: forward and backward against float64, and three equal runs.

A configuration is one call. `configurations` lists those most likely to fail first. Few of them
compile the same code.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..dispatch import choose as dispatch
from ..dispatch.problem import prepare
from ..filters import Causal, Documents, Filter, Fixed, Full, Memory, Padding, Strided, Window
from ..kernels import (
    RBF,
    ALiBi,
    Bridge,
    Buckets,
    Exponential,
    Kernel,
    Laplace,
    Lookup,
    Matern,
    Polynomial,
    RationalQuadratic,
    Scaled,
)
from ..kernels.entry import normal
from ..storage.lock import Lock
from ..testing.cases import Case, Shape, rounding_of
from . import catalogue

BATCH, HEADS, KV_HEADS = 2, 6, 3
LENGTH = 1531
WIDTHS = (64, 96, 128)
SEEDS = 4
RUNS = 3


def _adaptive(heads: int, dim: int) -> Kernel:
    return catalogue.build_kernel("adaptive", heads, dim)


def _many(heads: int, dim: int) -> Kernel:
    slopes = torch.nn.Parameter(ALiBi.standard(heads))
    return Exponential() * Lookup(normal(9, dim)) * Buckets(normal(8, heads)) * ALiBi(slopes)


# The benchmark's kernels, and others that compile different code.
KERNELS: dict[str, Callable[[int, int], Kernel]] = {
    **{name: entry.build for name, entry in catalogue.KERNELS.items()},
    "rbf-fixed": lambda h, d: RBF(d**0.5, trainable=False),
    "bridge": lambda h, d: Bridge(d**0.5, 0.5, heads=h),
    "rbf*rbf": lambda h, d: RBF(d**0.5) * RBF(d**0.5, on="position"),
    "alibi-learned": lambda h, d: Exponential() * ALiBi(torch.nn.Parameter(ALiBi.standard(h))),
    "adaptive*alibi": lambda h, d: (
        catalogue.build_kernel("adaptive", h, d) * ALiBi(ALiBi.standard(h))
    ),
    "lookup-per-head": lambda h, d: Exponential() * Lookup(normal(h, 33, d)),
    "rbf*lookup": lambda h, d: RBF(d**0.5, heads=h) * Lookup(normal(129, d)),
    "lookup*buckets*alibi": _many,
    "polynomial-4": lambda h, d: Polynomial(4),
    "matern-1/2": lambda h, d: Matern(0.5, d**0.5, heads=h),
    "matern-5/2": lambda h, d: Matern(2.5, d**0.5, heads=h),
    "rational*exponential": lambda h, d: RationalQuadratic(d**0.5) * Exponential(),
    "polynomial*laplace": lambda h, d: Polynomial() * Laplace(d**0.5, on="position"),
    "rbf+polynomial": lambda h, d: RBF(d**0.5) + Polynomial(),
    "mixture": lambda h, d: Scaled(RBF(d**0.5), heads=h) + 0.5 * Exponential(),
    "power": lambda h, d: (RBF(d**0.5) * Exponential()) ** 0.5,
}
# Distances and tables: every width with every filter.
WIDE = (
    "rbf", "adaptive", "lookup", "lookup-per-head", "rbf*lookup", "relative-sinusoid", "laplace",
    "matern",
)  # fmt: skip


def _documents(length: int) -> Documents:
    """Documents of uneven lengths, different in each sequence."""
    places = torch.arange(length)
    return Documents(torch.stack([(places * 3 // 400), (places + 130) * 2 // 700]))


def _padding(length: int) -> Padding:
    return Padding([length, length * 5 // 8])


FILTERS: dict[str, Callable[[int], Filter]] = {
    "full": lambda n: Full(),
    "causal": lambda n: Causal(),
    "window": lambda n: Window(400, 0),
    "window-both": lambda n: Window(200, 100),
    "memory": lambda n: Memory(n // 5),
    "strided": lambda n: Strided(32),
    "fixed": lambda n: Fixed(32, 4),
    "padding": _padding,
    "documents": _documents,
    "causal&documents": lambda n: Causal() & _documents(n),
    "causal&padding": lambda n: Causal() & _padding(n),
    "window&documents": lambda n: Window(400, 0) & _documents(n),
    "window&strided": lambda n: Window(400, 0) & Strided(32),
    "strided&documents": lambda n: Strided(32) & _documents(n),
    "strided|window": lambda n: Strided(64) | Window(40, 0),
}
FEW = ("causal", "window", "documents")


@dataclass(frozen=True)
class Configuration:
    """One call: its kernel, filter and sizes; `log_mass`: whether it is returned, too."""

    kernel: str
    filter: str
    dim: int
    kv_heads: int = KV_HEADS
    dtype: str = "bfloat16"
    log_mass: bool = False
    length: int = LENGTH
    backend: str = "triton"

    def __str__(self) -> str:
        mass = ", log_mass" if self.log_mass else ""
        sizes = f"{BATCH}x{HEADS}({self.kv_heads})x{self.length}x{self.dim}"
        return f"{self.kernel}, {self.filter}, {sizes}, {self.dtype}{mass}, {self.backend}"


def configurations() -> list[Configuration]:
    """All of them, each once, in the order in which they should run."""
    return list(dict.fromkeys(_configurations()))


def _configurations() -> Iterator[Configuration]:
    every = [(kernel, filter) for kernel in KERNELS for filter in FILTERS]
    for kernel, filter in every:
        yield Configuration(kernel, filter, 64)
    for kernel, filter in every:
        if kernel in WIDE:
            yield Configuration(kernel, filter, 96)
            yield Configuration(kernel, filter, 128)
    for n, (kernel, filter) in enumerate(every):
        yield Configuration(kernel, filter, WIDTHS[1 + n % 2])
    for kernel in KERNELS:
        for filter in FEW:
            yield Configuration(kernel, filter, 64, kv_heads=HEADS)
            yield Configuration(kernel, filter, 128, kv_heads=HEADS)
            yield Configuration(kernel, filter, 64, log_mass=True)
        for dtype in ("float16", "float32"):
            yield Configuration(kernel, "causal", 64, dtype=dtype)
            yield Configuration(kernel, "causal&documents", 128, dtype=dtype)
    for filter in FILTERS:
        yield Configuration("polynomial", filter, 64, backend="linear")
        yield Configuration("polynomial", filter, 128, backend="linear")
    for kernel, filter in every:
        for dim in WIDTHS:
            yield Configuration(kernel, filter, dim, kv_heads=HEADS)


def check(
    kernel: str, filter: str, dim: int, kv_heads: int, dtype: str, log_mass: bool, length: int,
    backend: str, device: str,
) -> str:  # fmt: skip
    """ "passed" or "refused: why"; raises AssertionError with the failure."""
    torch.set_num_threads(1)
    config = Configuration(kernel, filter, dim, kv_heads, dtype, log_mass, length, backend)
    case = _case(config, device)
    refusal = _refusal(case, backend)
    if refusal is not None:
        return f"refused: {refusal}"
    first = _run(case, backend, log_mass, fill=math.nan)
    for n in range(1, RUNS):
        again = _run(case, backend, log_mass, fill=float(n))
        for name, x in again.items():
            same = torch.equal(first[name].nan_to_num(1e30), x.nan_to_num(1e30))
            assert same, f"run {n + 1} differs in bits of {name}"
    _check_errors(case, backend, log_mass, first)
    return "passed"


def _case(config: Configuration, device: str) -> Case:
    kernel = KERNELS[config.kernel](HEADS, config.dim).to(device)
    filter = FILTERS[config.filter](config.length).to(torch.device(device))
    shape = Shape(BATCH, HEADS, config.kv_heads, config.length, config.length, config.dim)
    return Case(kernel, filter, shape, config.dim, 0, getattr(torch, config.dtype), device)


def _refusal(case: Case, backend: str) -> str | None:
    q, k, v = case.inputs()
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_()
    for task in prepare(case.kernel, q, k, v, case.filter, 0.0, False, "auto").tasks():
        why = dispatch.BACKENDS[backend].refuses(task)
        if why is not None:
            return why
    return None


def _run(case: Case, backend: str, log_mass: bool, fill: float) -> dict[str, Tensor]:
    """One run, in memory filled with this number: kernels must not read what they did not write."""
    if case.device != "cpu":
        torch.cuda.empty_cache()
        held = [torch.full((size,), fill, device=case.device) for size in (2**25, *[2**14] * 64)]
        del held
    found = case.run(backend, log_mass=log_mass)
    if case.device != "cpu":
        torch.cuda.synchronize()
    return found


def _check_errors(case: Case, backend: str, log_mass: bool, first: dict[str, Tensor]) -> None:
    """The budget of `mercer.testing`: twice the plain backend's error, plus rounding.

    If one draw is over its budget, the dense formula's error in this dtype counts if it is larger,
    and more draws are checked together: a scalar gradient may be near zero by accident.
    """
    sums: dict[str, list[float]] = {}
    over: list[str] = []
    for seed in range(SEEDS):
        case = replace(case, seed=seed)
        got = first if seed == 0 else _run(case, backend, log_mass, fill=math.nan)
        want = case.run("chunked", log_mass=log_mass, wide=True)
        plain = case.run("chunked", log_mass=log_mass)
        rounding = rounding_of(case)
        for name, x in want.items():
            assert torch.equal(got[name].isneginf(), x.isneginf()), f"{name}: -inf elsewhere"
            finite = x.isfinite()
            errors = ((got[name].double() - x)[finite], (plain[name].double() - x)[finite])
            total = sums.setdefault(name, [0.0, 0.0, 0.0])
            for n, values in enumerate((*errors, x[finite])):
                total[n] += values.double().square().sum().item()
        over = _over(sums, rounding)
        if over:
            for name, error in _dense_errors(case, log_mass, want).items():
                sums[name][1] = max(sums[name][1], error)
            over = _over(sums, rounding)
        if not over:
            return
    raise AssertionError("; ".join(over))


def _over(sums: dict[str, list[float]], rounding: float) -> list[str]:
    """The results over their budget, in words."""
    said = []
    for name, squares in sums.items():
        error, usual, size = (math.sqrt(x) for x in squares)
        budget = 2 * usual + rounding * size
        if not error <= budget:
            share = f"{error / size:.1e}" if size else "infinity"
            said.append(
                f"{name} is off by {error:.2e}, more than {budget:.2e} (relative error {share})"
            )
    return said


def _dense_errors(case: Case, log_mass: bool, want: dict[str, Tensor]) -> dict[str, float]:
    """The sums of squared errors of the dense formula in the case's dtype."""
    # The dense formula holds B H Q K D differences: one process at a time.
    lock = Lock(Path(tempfile.gettempdir()) / "mercer-matrix.lock")
    lock.take(wait=True)
    try:
        got = case.run("reference", log_mass=log_mass)
        errors = {}
        for name, x in want.items():
            finite = x.isfinite()
            errors[name] = (got[name].double() - x)[finite].square().sum().item()
        del got
        if case.device != "cpu":
            torch.cuda.empty_cache()
    finally:
        lock.release()
    return errors


def job(config: Configuration, device: str) -> dict[str, object]:
    """The arguments of `check`."""
    return asdict(config) | {"device": device}


TARGET = f"{__name__}:check"
