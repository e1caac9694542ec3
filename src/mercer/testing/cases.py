"""Random calls, their results, and their errors."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from ..dispatch import choose as dispatch
from ..dispatch.problem import prepare
from ..filters import Filter, Full
from ..kernels import Kernel, Sum
from ..smoother import smooth
from ..term.features import Features
from ..term.layout import accumulator

EXACT = 1e-10


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; keys and values may have fewer heads."""

    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 7
    keys: int = 7
    values: int = 5


def inputs(
    kernel: Kernel,
    shape: Shape,
    dim: int = 8,
    dtype: torch.dtype = torch.float64,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Features, Features, Tensor]:
    """Random queries, keys and values with the parts that the kernel reads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, width: int) -> Tensor:
        x = torch.randn(shape.batch, heads, length, width, generator=generator, dtype=torch.float64)
        return x.to(dtype).to(device)

    names = sorted(kernel.query_parts | kernel.key_parts | {"content"})
    q = Features(**{n: draw(shape.heads, shape.queries, dim) for n in names})
    k = Features(**{n: draw(shape.kv_heads, shape.keys, dim) for n in names})
    return q, k, draw(shape.kv_heads, shape.keys, shape.values)


def double(kernel: Kernel) -> Kernel:
    return copy.deepcopy(kernel).double()


def taking(
    kernel: Kernel,
    filter: Filter,
    shape: Shape,
    dim: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[str]:
    """The backends that accept the kernel and compute its gradients."""
    kernel = copy.deepcopy(kernel).to(device)
    q, k, v = inputs(kernel, shape, dim, dtype, device=device)
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_()
    tasks = prepare(kernel, q, k, v, filter, 0.0, False, "auto").tasks()
    return [
        name
        for name, backend in dispatch.BACKENDS.items()
        if tasks and all(backend.refuses(task) is None for task in tasks)
    ]


@dataclass(frozen=True)
class Case:
    """One random call; with `wide`, the same numbers in float64 on the reference."""

    kernel: Kernel
    filter: Filter
    shape: Shape
    dim: int
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    def inputs(self, *, wide: bool = False) -> tuple[Features, Features, Tensor]:
        q, k, v = inputs(
            self.kernel, self.shape, self.dim, self.dtype, seed=self.seed, device=self.device
        )
        return (q.to(torch.float64), k.to(torch.float64), v.double()) if wide else (q, k, v)

    def run(self, backend: str, *, log_mass: bool = False, wide: bool = False) -> dict[str, Tensor]:
        """Output, log_mass and the gradient of everything, from one random loss."""
        kernel = double(self.kernel) if wide else self.kernel
        q, k, v = self.inputs(wide=wide)
        named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()}
        named["v"] = v
        for x in named.values():
            x.requires_grad_()
        named |= dict(kernel.named_parameters())
        out, mass = (
            smooth(kernel, q, k, v, filter=self.filter, backend=backend, return_log_mass=True)
            if log_mass
            else (smooth(kernel, q, k, v, filter=self.filter, backend=backend), None)
        )
        generator = torch.Generator().manual_seed(self.seed + 1)
        steer = torch.randn(out.shape, generator=generator).to(self.dtype)
        loss = (out * steer.to(out)).sum()
        result = {"out": out.detach()}
        if mass is not None:
            result["log_mass"] = mass.detach()
            steer = torch.randn(mass.shape, generator=generator)
            loss = loss + (torch.where(mass.isfinite(), mass, 0.0) * steer.to(mass)).sum()
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for (name, x), grad in zip(named.items(), grads, strict=True):
            result[f"gradient of {name}"] = torch.zeros_like(x) if grad is None else grad
        return result


def assert_close(got: Tensor, want: Tensor, what: str) -> None:
    assert torch.equal(got.isneginf(), want.isneginf()), f"{what}: -inf at different positions"
    finite = want.isfinite()
    size = want[finite].abs().amax().item() if bool(finite.any()) else 0.0
    error = (got - want)[finite].abs().amax().item() if bool(finite.any()) else 0.0
    assert error <= EXACT * (1 + size), f"{what}: off by {error:.2e} at size {size:.2e}"


def errors(
    kernel: Kernel,
    filter: Filter,
    shape: Shape,
    dim: int,
    dtype: torch.dtype,
    backend: str,
    device: str,
    seeds: int = 4,
) -> dict[str, tuple[float, float, float]]:
    """For every result: its error, its size (both root mean squares) and its rounding."""
    kernel = copy.deepcopy(kernel).to(device)
    sums: dict[str, list[float]] = {}
    rounding = 0.0
    for seed in range(seeds):
        case = Case(kernel, filter, shape, dim, seed, dtype, device)
        got = case.run(backend)
        # The same inputs in float64: rounding of the inputs is not the backend's error.
        want = case.run("reference", wide=True)
        rounding = max(rounding, rounding_of(case))
        for name, x in want.items():
            total = sums.setdefault(name, [0.0, 0.0, 0.0])
            total[0] += (got[name].double() - x).square().sum().item()
            total[1] += x.square().sum().item()
            total[2] += x.numel()
    return {
        name: ((error / count) ** 0.5, (size / count) ** 0.5, rounding)
        for name, (error, size, count) in sums.items()
    }


@torch.no_grad()
def rounding_of(case: Case) -> float:
    """One rounding of a result, and one of every number that enters a logit."""
    kernel = double(case.kernel)
    q, k, v = case.inputs(wide=True)
    largest = 0.0
    for task in prepare(kernel, q, k, v, Full(), 0.0, False, "auto").tasks():
        for f in task.term.factors:
            entries = f.q.norm(dim=-1).amax() * f.k.norm(dim=-1).amax()
            entries += 0.0 if f.col is None else f.col.abs().amax()
            scale = f.scale.abs().amax() if isinstance(f.scale, Tensor) else abs(f.scale)
            row = 0.0 if f.row is None else f.row.abs().amax()
            largest = max(largest, float(scale * entries), float(row))
    for addend in kernel.kernels if isinstance(kernel, Sum) else [kernel]:
        if not addend.positive:
            # Weights that cancel in their sum magnify every rounding.
            seen = case.filter.mask(case.shape.queries, case.shape.keys, device=v.device)
            weight = addend(q, k.repeat_heads(case.shape.heads)) * seen
            mass = weight.sum(-1).abs()
            grows = (weight.abs().sum(-1) / mass)[mass > 0]
            largest *= grows.amax().item() if grows.numel() else 1.0
    wide = torch.finfo(accumulator(case.dtype)).eps
    return torch.finfo(case.dtype).eps + 4 * wide * (1 + largest)
