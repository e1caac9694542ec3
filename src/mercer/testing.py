"""Checks that every kernel and filter must pass, yours included: one call runs them all.

    mercer.testing.check_kernel(MyKernel())
    mercer.testing.check_filter(MyFilter())

Two questions, never mixed. Is the lowering right? In float64, each backend against the reference,
to 1e-10, outputs and every gradient. Is the backend accurate? In lower precision, its error against
float64 is at most twice that of the reference in the same dtype, plus rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import dispatch
from .explain import explain
from .features import Features
from .filters import Causal, Filter, Full, Padding, Span, Window
from .kernels import Kernel
from .problem import prepare
from .smoother import smooth
from .term import accumulator

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


SHAPES = (
    Shape(),
    Shape(queries=1, keys=1),
    Shape(queries=3, keys=9, kv_heads=1),
    Shape(queries=9, keys=4),
    Shape(batch=1, queries=1, keys=6),
)


def check_kernel(
    kernel: Kernel, *, heads: int = 2, dim: int = 8, shapes: Sequence[Shape] = SHAPES
) -> None:
    """Everything a kernel promises; raises AssertionError with what broke.

    Args:
        kernel: any kernel; it is copied, never changed.
        heads, dim: the heads and features of a part that it was made for.
        shapes: the cases; their heads are replaced by `heads`.
    """
    check_properties(kernel, heads=heads, dim=dim)
    check_gradients(kernel, heads=heads, dim=dim)
    for shape in shapes:
        shape = _with_heads(shape, heads)
        filters = [Full(), Causal(), Window(2, 1)]
        filters.append(Padding([shape.keys, *[0] * (shape.batch - 1)]))
        for filter in filters:
            check_lowering(kernel, filter, shape, dim=dim)
    check_causality(kernel, heads=heads, dim=dim)
    check_accuracy(kernel, heads=heads, dim=dim)
    q, k, v = inputs(kernel, Shape(heads=heads, kv_heads=heads), dim)
    assert explain(_double(kernel), q, k, v).formula == repr(kernel)


def check_lowering(
    kernel: Kernel, filter: Filter, shape: Shape, *, dim: int = 8, seed: int = 0
) -> None:
    """float64, every backend that takes it against the reference: outputs and all gradients."""
    kernel = _double(kernel)
    expected = _run(kernel, filter, shape, dim, seed, "reference")
    for backend in _taking(kernel, filter, shape, dim):
        for name, (got, want) in _pairs(
            _run(kernel, filter, shape, dim, seed, backend), expected
        ).items():
            _assert_close(got, want, f"{kernel!r}, {filter!r}, {shape}, {backend}: {name}")


def check_gradients(kernel: Kernel, *, heads: int = 2, dim: int = 8) -> None:
    """The reference against finite differences, once and twice."""
    kernel = _double(kernel)
    shape = Shape(batch=1, heads=heads, kv_heads=heads, queries=2, keys=3, values=2)
    q, k, v = inputs(kernel, shape, min(dim, dim))
    names = [*q, *k]
    parameters = dict(kernel.named_parameters())
    tensors = [*q.tensors(), *k.tensors(), v, *parameters.values()]
    tensors = [x.detach().requires_grad_() for x in tensors]

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        size = len(list(q))
        parts = given[: len(names)]
        queries = Features(**dict(zip(names[:size], parts[:size], strict=True)))
        keys = Features(**dict(zip(names[size:], parts[size:], strict=True)))
        values = dict(zip(parameters, given[len(names) + 1 :], strict=True))
        call = _Call(kernel)
        return torch.func.functional_call(
            call, {f"kernel.{n}": x for n, x in values.items()}, (queries, keys, given[len(names)])
        )

    assert torch.autograd.gradcheck(run, tensors), f"{kernel!r}: gradient"
    assert torch.autograd.gradgradcheck(run, tensors), f"{kernel!r}: second gradient"


def check_properties(kernel: Kernel, *, heads: int = 2, dim: int = 8) -> None:
    """Symmetric, positive and valid as it says; rows sum to one; log_weight is the log."""
    kernel = _double(kernel)
    x, _, v = inputs(kernel, Shape(heads=heads, kv_heads=heads, queries=9, keys=9), dim)
    gram = kernel(x, x)
    _assert_close(kernel.log_weight(x, x).exp(), gram.abs(), f"{kernel!r}: log_weight")
    if kernel.symmetric:
        _assert_close(gram, gram.mT, f"{kernel!r} says symmetric")
    if kernel.positive:
        assert bool((gram >= 0).all()), f"{kernel!r} says positive"
    if kernel.valid:
        assert kernel.symmetric, f"{kernel!r} says valid, but not symmetric"
        least = torch.linalg.eigvalsh(gram).amin().item()
        assert least > -EXACT * gram.abs().amax().item(), f"{kernel!r} says valid: {least}"
    ones = smooth(kernel, x, x, torch.ones_like(v), backend="reference")
    _assert_close(ones, torch.ones_like(ones), f"{kernel!r}: rows sum to one")


def check_causality(kernel: Kernel, *, heads: int = 2, dim: int = 8) -> None:
    """Changing the future changes no earlier row, to the last bit."""
    shape = Shape(heads=heads, kv_heads=heads, queries=9, keys=9)
    for backend in (*_taking(kernel, Causal(), shape, dim), "reference"):
        q, k, v = inputs(kernel, shape, dim, torch.float32)
        before = smooth(kernel, q, k, v, filter=Causal(), backend=backend)
        k2, v2 = Features(**{n: x.clone() for n, x in k.items()}), v.clone()
        for x in (*k2.tensors(), v2):
            if x.requires_grad:
                x = x.detach()
            x[:, :, 5:] += 3.0
        after = smooth(kernel, q, k2, v2, filter=Causal(), backend=backend)
        assert torch.equal(before[:, :, :5], after[:, :, :5]), f"{kernel!r}, {backend}: causality"


def check_accuracy(
    kernel: Kernel,
    *,
    heads: int = 2,
    dim: int = 8,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    filter: Filter = Causal(),
    device: str = "cpu",
) -> None:
    """The error budget: at most twice the reference's error in the same dtype, plus rounding."""
    shape = Shape(heads=heads, kv_heads=heads, queries=33, keys=33)
    for dtype in dtypes:
        reference = _errors(kernel, filter, shape, dim, dtype, "reference", device)
        for backend in _taking(kernel, filter, shape, dim, dtype, device):
            errors = _errors(kernel, filter, shape, dim, dtype, backend, device)
            for name, (error, size, rounding) in errors.items():
                budget = 2 * reference[name][0] + rounding * size
                assert error <= budget, (
                    f"{kernel!r}, {backend}, {dtype}: the error of {name} is {error:.2e}, "
                    f"more than {budget:.2e} (the reference's is {reference[name][0]:.2e})"
                )


def check_filter(filter: Filter, *, batch: int = 2, lengths: Sequence[int] = (1, 7, 12)) -> None:
    """One definition: the mask, SDPA's arguments, the block mask and the blocks agree."""
    for num_keys in lengths:
        for num_queries in (num_keys, max(num_keys - 3, 1), 1):
            here = filter.until(num_keys, 0)
            mask = here.mask(num_queries, num_keys)
            _check_masks(here, mask, num_queries, num_keys)
            _check_blocks(here, mask, num_queries, num_keys)
            if here.causal:
                assert torch.equal(mask, mask & Causal().mask(num_queries, num_keys)), (
                    f"{here!r} says causal, but shows a later key"
                )


def _check_masks(filter: Filter, mask: Tensor, num_queries: int, num_keys: int) -> None:
    arguments = filter.sdpa(num_queries, num_keys)
    given = arguments["attn_mask"]
    if given is None:
        kind = Causal() if arguments["is_causal"] else Full()
        given = kind.mask(num_queries, num_keys)
    assert torch.equal(mask, given.expand_as(mask)), f"{filter!r}: SDPA's arguments"
    rule = filter.mask_mod(num_queries, num_keys)
    for b in range(mask.shape[0]):
        for i in range(num_queries):
            for j in range(num_keys):
                seen = rule(*(torch.tensor(n) for n in (b, 0, i, j)))
                assert bool(seen) == bool(mask[b, 0, i, j]), f"{filter!r}: mask_mod at {b, i, j}"


def _check_blocks(filter: Filter, mask: Tensor, num_queries: int, num_keys: int) -> None:
    start = num_keys - num_queries
    for rows in _spans(num_queries):
        for cols in _spans(num_keys):
            block = mask[:, :, rows.first : rows.last + 1, cols.first : cols.last + 1]
            places = Span(rows.first + start, rows.last + start)
            covered = filter.covers(places, cols, start)
            if covered is not None:
                right = bool(block.all()) if covered else not bool(block.any())
                assert right, f"{filter!r}: covers({places}, {cols}) = {covered}"


def _spans(length: int) -> Iterator[Span]:
    for size in (1, 3, length):
        for first in range(0, length, size):
            yield Span(first, min(first + size, length) - 1)


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


class _Call(torch.nn.Module):
    """A kernel's reference as a module, so that its parameters can be given as arguments."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, q: Features, k: Features, v: Tensor) -> tuple[Tensor, Tensor]:
        return smooth(
            self.kernel, q, k, v, filter=Causal(), backend="reference", return_log_mass=True
        )


def _double(kernel: Kernel) -> Kernel:
    return copy.deepcopy(kernel).double()


def _with_heads(shape: Shape, heads: int) -> Shape:
    kv_heads = heads if shape.kv_heads == shape.heads else 1
    return Shape(shape.batch, heads, kv_heads, shape.queries, shape.keys, shape.values)


def _taking(
    kernel: Kernel,
    filter: Filter,
    shape: Shape,
    dim: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> list[str]:
    """The backends that take the kernel with its log_mass, and without, by asking them."""
    kernel = copy.deepcopy(kernel).to(device)
    q, k, v = inputs(kernel, shape, dim, dtype, device=device)
    tasks = prepare(kernel, q, k, v, filter, 0.0, False, "auto").tasks()
    taking = []
    for name, backend in dispatch.BACKENDS.items():
        if tasks and all(backend.refuses(task) is None for task in tasks):
            taking.append(name)
    return taking


def _run(
    kernel: Kernel,
    filter: Filter,
    shape: Shape,
    dim: int,
    seed: int,
    backend: str,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    log_mass: bool = True,
) -> dict[str, Tensor]:
    """Output, log_mass and the gradient of everything, from one random loss."""
    q, k, v = inputs(kernel, shape, dim, dtype, seed=seed, device=device)
    named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()} | {"v": v}
    for x in named.values():
        x.requires_grad_()
    named |= dict(kernel.named_parameters())
    result: dict[str, Tensor] = {}
    if log_mass:
        out, mass = smooth(kernel, q, k, v, filter=filter, backend=backend, return_log_mass=True)
        result["log_mass"] = mass.detach()
    else:
        out = smooth(kernel, q, k, v, filter=filter, backend=backend)
        mass = None
    generator = torch.Generator().manual_seed(seed + 1)
    loss = (out * torch.randn(out.shape, generator=generator).to(out)).sum()
    if mass is not None:
        seen = mass.isfinite()
        steer = torch.randn(mass.shape, generator=generator).to(mass)
        loss = loss + (torch.where(seen, mass, 0.0) * steer).sum()
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    result["out"] = out.detach()
    for (name, x), grad in zip(named.items(), grads, strict=True):
        result[f"gradient of {name}"] = torch.zeros_like(x) if grad is None else grad
    return result


def _pairs(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (got[name], want[name]) for name in want}


def _assert_close(got: Tensor, want: Tensor, what: str) -> None:
    assert torch.equal(got.isneginf(), want.isneginf()), f"{what}: -inf in other places"
    finite = want.isfinite()
    size = want[finite].abs().amax().item() if bool(finite.any()) else 0.0
    error = (got - want)[finite].abs().amax().item() if bool(finite.any()) else 0.0
    assert error <= EXACT * (1 + size), f"{what}: off by {error:.2e} at size {size:.2e}"


def _errors(
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
        got = _run(kernel, filter, shape, dim, seed, backend, dtype, device, log_mass=False)
        # The same numbers in float64: what is rounded at the start is not the backend's error.
        want = _wide(kernel, filter, shape, dim, seed, dtype)
        rounding = max(rounding, _rounding(kernel, shape, dim, seed, dtype))
        for name, x in want.items():
            total = sums.setdefault(name, [0.0, 0.0, 0.0])
            total[0] += (got[name].double().cpu() - x).square().sum().item()
            total[1] += x.square().sum().item()
            total[2] += x.numel()
    return {
        name: ((error / count) ** 0.5, (size / count) ** 0.5, rounding)
        for name, (error, size, count) in sums.items()
    }


def _wide(
    kernel: Kernel, filter: Filter, shape: Shape, dim: int, seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    double = copy.deepcopy(kernel).cpu().double()
    q, k, v = inputs(double, shape, dim, dtype, seed=seed)
    q, k, v = q.to(torch.float64), k.to(torch.float64), v.double()
    named = {f"q.{n}": x for n, x in q.items()} | {f"k.{n}": x for n, x in k.items()} | {"v": v}
    for x in named.values():
        x.requires_grad_()
    named |= dict(double.named_parameters())
    out = smooth(double, q, k, v, filter=filter, backend="reference")
    generator = torch.Generator().manual_seed(seed + 1)
    loss = (out * torch.randn(out.shape, generator=generator).to(dtype).double()).sum()
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    result = {"out": out.detach()}
    for (name, x), grad in zip(named.items(), grads, strict=True):
        result[f"gradient of {name}"] = torch.zeros_like(x) if grad is None else grad
    return result


def _rounding(kernel: Kernel, shape: Shape, dim: int, seed: int, dtype: torch.dtype) -> float:
    """One rounding of a result, and one of every number that enters a logit."""
    double = copy.deepcopy(kernel).cpu().double()
    q, k, v = inputs(double, shape, dim, dtype, seed=seed)
    problem = prepare(
        double, q.to(torch.float64), k.to(torch.float64), v.double(), Full(), 0.0, False, "auto"
    )
    largest = 0.0
    for task in problem.tasks():
        for f in task.term.factors:
            entries = [f.q.norm(dim=-1).amax() * f.k.norm(dim=-1).amax()]
            entries += [] if f.col is None else [f.col.abs().amax()]
            scale = f.scale.abs().amax() if isinstance(f.scale, Tensor) else abs(f.scale)
            largest = max(largest, float(scale * sum(entries)))
            largest = max(largest, 0.0 if f.row is None else float(f.row.abs().amax()))
    if not double.positive:
        # Weights that cancel in their sum magnify every rounding.
        weight = double(problem.q, problem.k).tril()
        largest *= (weight.abs().sum(-1) / weight.sum(-1).abs()).amax().item()
    return torch.finfo(dtype).eps + 4 * torch.finfo(accumulator(dtype)).eps * (1 + largest)
