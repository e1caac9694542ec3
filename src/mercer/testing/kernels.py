"""The contract of a kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..explain import explain
from ..filters import Causal, Filter, Full, Padding, Window
from ..kernels import Kernel
from ..smoother import smooth
from ..term.features import Features
from .cases import EXACT, Case, Shape, assert_close, double, errors, inputs, taking

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
    """Check the contract of a kernel; raises AssertionError with the failure.

    Args:
        kernel: any kernel; it is copied, never changed.
        heads, dim: the heads and features that it was made for.
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
    assert explain(double(kernel), q, k, v).formula == repr(kernel)


def check_lowering(
    kernel: Kernel, filter: Filter, shape: Shape, *, dim: int = 8, seed: int = 0
) -> None:
    """float64, every backend that takes it against the reference: outputs and all gradients."""
    case = Case(double(kernel), filter, shape, dim, seed)
    expected = case.run("reference", log_mass=True)
    for backend in taking(case.kernel, filter, shape, dim):
        got = case.run(backend, log_mass=True)
        for name, want in expected.items():
            assert_close(got[name], want, f"{kernel!r}, {filter!r}, {shape}, {backend}: {name}")


def check_gradients(kernel: Kernel, *, heads: int = 2, dim: int = 8) -> None:
    """The reference against finite differences, once and twice."""
    kernel = double(kernel)
    shape = Shape(batch=1, heads=heads, kv_heads=heads, queries=2, keys=3, values=2)
    q, k, v = inputs(kernel, shape, dim)
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
    assert torch.autograd.gradgradcheck(run, tensors, fast_mode=True), (
        f"{kernel!r}: second gradient"
    )


def check_properties(kernel: Kernel, *, heads: int = 2, dim: int = 8) -> None:
    """The flags symmetric, positive and valid; rows sum to one; log_weight is the log."""
    kernel = double(kernel)
    x, _, v = inputs(kernel, Shape(heads=heads, kv_heads=heads, queries=9, keys=9), dim)
    gram = kernel(x, x)
    assert_close(kernel.log_weight(x, x).exp(), gram.abs(), f"{kernel!r}: log_weight")
    if kernel.symmetric:
        assert_close(gram, gram.mT, f"{kernel!r} says symmetric")
    if kernel.positive:
        assert bool((gram >= 0).all()), f"{kernel!r} says positive"
    if kernel.valid:
        assert kernel.symmetric, f"{kernel!r} says valid, but not symmetric"
        least = torch.linalg.eigvalsh(gram).amin().item()
        assert least > -EXACT * gram.abs().amax().item(), f"{kernel!r} says valid: {least}"
    ones = smooth(kernel, x, x, torch.ones_like(v), backend="reference")
    assert_close(ones, torch.ones_like(ones), f"{kernel!r}: rows sum to one")


def check_causality(kernel: Kernel, *, heads: int = 2, dim: int = 8) -> None:
    """Changing the future changes no earlier row, to the last bit."""
    shape = Shape(heads=heads, kv_heads=heads, queries=9, keys=9)
    for backend in (*taking(kernel, Causal(), shape, dim), "reference"):
        q, k, v = inputs(kernel, shape, dim, torch.float32)
        before = smooth(kernel, q, k, v, filter=Causal(), backend=backend)
        for x in (*k.tensors(), v):
            x[:, :, 5:] += 3.0
        after = smooth(kernel, q, k, v, filter=Causal(), backend=backend)
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
        reference = errors(kernel, filter, shape, dim, dtype, "reference", device)
        for backend in taking(kernel, filter, shape, dim, dtype, device):
            found = errors(kernel, filter, shape, dim, dtype, backend, device)
            for name, (error, size, rounding) in found.items():
                budget = 2 * reference[name][0] + rounding * size
                assert error <= budget, (
                    f"{kernel!r}, {backend}, {dtype}: the error of {name} is {error:.2e}, "
                    f"more than {budget:.2e} (the reference's is {reference[name][0]:.2e})"
                )


class _Call(torch.nn.Module):
    """The reference as a module, so that functional_call can pass kernel parameters."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, q: Features, k: Features, v: Tensor) -> tuple[Tensor, Tensor]:
        return smooth(
            self.kernel, q, k, v, filter=Causal(), backend="reference", return_log_mass=True
        )


def _with_heads(shape: Shape, heads: int) -> Shape:
    kv_heads = heads if shape.kv_heads == shape.heads else 1
    return Shape(shape.batch, heads, kv_heads, shape.queries, shape.keys, shape.values)
