"""Content kernels, positions and filters as a layer, every pair of them, against the reference.

Each kernel with each position meets a third of the filters. The thirds are arranged such that each
kernel, and each position, meets every filter.
"""

import pytest
import torch
from catalogue import FILTERS, KERNELS

import mercer as mc

WIDTH, HEADS, T = 16, 2, 11
POSITIONS = {
    "none": mc.nn.NoPosition(),
    "direct sum": mc.nn.DirectSum(),
    "learned": mc.nn.DirectSum(mc.nn.Learned(T)),
    "lookup": mc.nn.LookupTable(3),
    "lookup per head": mc.nn.LookupTable(3, per_head=True),
    "sinusoid": mc.nn.RelativeSinusoid(),
    "sinusoid, plain": mc.nn.RelativeSinusoid(biases=False, width="head"),
    "product": mc.nn.ProductKernel(),
    "rotary": mc.nn.Rotary(),
    "alibi": mc.nn.ALiBi(trainable=True),
    "grid": mc.nn.Grid2D(3, 4),
}
THIRDS = 3
CONTENT = [name for name in KERNELS if not KERNELS[name]().relative and name != "linear"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kernel", CONTENT)
def test_every_kernel_with_every_position_under_filters(kernel, position):
    layer = mc.nn.KernelAttention(
        WIDTH, HEADS, kernel=KERNELS[kernel](), position=POSITIONS[position]
    ).double()
    x = torch.randn(2, T, WIDTH, dtype=torch.float64, requires_grad=True)
    steer = torch.randn(2, T, WIDTH, dtype=torch.float64)
    wanted = (x, *layer.parameters())
    taken = set()
    third = (CONTENT.index(kernel) + list(POSITIONS).index(position)) % THIRDS
    for name, filter in list(FILTERS.items())[third::THIRDS]:
        results = {}
        for backend in ("reference", "chunked", "sdpa"):
            layer.backend = backend
            try:
                out = layer(x, filter=filter())
            except ValueError as refusal:
                assert backend == "sdpa", refusal  # noqa: PT017
                continue
            loss = (out * steer).sum()
            grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
            results[backend] = (out, *grads)
            taken.add(backend)
        for backend, result in results.items():
            for got, want in zip(result, results["reference"], strict=True):
                error = (got - want).abs().max()
                assert error <= 1e-10 * (1 + want.abs().max()), (name, backend)
    assert {"reference", "chunked"} <= taken
