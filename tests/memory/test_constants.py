"""Tensors that are kept for the next call."""

from __future__ import annotations

import pytest
import torch

import mercer as mc
from mercer.kernels import bias
from mercer.memory import constants
from mercer.memory.constants import constant

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(constants, "_kept", type(constants._kept)())
    monkeypatch.setattr(constants, "_for_graphs", {})


def test_the_same_key_gives_the_same_tensor():
    first = constant("a", CPU, lambda: torch.ones(3))
    assert constant("a", CPU, lambda: torch.zeros(3)) is first
    assert constant("b", CPU, lambda: torch.zeros(3)) is not first


def test_few_are_kept_and_none_that_is_large(monkeypatch):
    monkeypatch.setattr(constants, "MOST", 2)
    monkeypatch.setattr(constants, "LARGEST", 16)
    for key in "abc":
        constant(key, CPU, lambda: torch.ones(4))
    constant("large", CPU, lambda: torch.ones(5))
    assert [key for key, *_ in constants._kept] == ["b", "c"]
    constant("b", CPU, lambda: torch.ones(4))
    constant("d", CPU, lambda: torch.ones(4))
    assert [key for key, *_ in constants._kept] == ["b", "d"]


def test_tensors_that_graphs_read_are_never_freed(monkeypatch):
    monkeypatch.setattr(constants, "MOST", 1)
    monkeypatch.setattr(constants, "FOR_GRAPHS", 20)
    assert constants._captured(("a", CPU, False)) is None
    first = constant("a", CPU, lambda: torch.ones(4))
    assert constants._captured(("a", CPU, True)) is None
    assert constants._captured(("a", CPU, False)) is first
    second = constant("b", CPU, lambda: torch.ones(1))
    assert constants._captured(("b", CPU, False)) is second
    constant("c", CPU, lambda: torch.ones(1))
    assert [key for key, *_ in constants._kept] == ["c"]
    assert constants._captured(("a", CPU, False)) is first
    # There is no more room.
    assert constants._captured(("c", CPU, False)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["buckets", "sinusoids", "slopes"])
def test_a_captured_graph_reads_what_was_kept(name):
    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    kernel = {
        "buckets": mc.Exponential() * mc.Buckets(torch.randn(8, 2)),
        "sinusoids": mc.Exponential() * mc.RelativeSinusoid(),
        "slopes": mc.Exponential() * mc.ALiBi([0.5, 0.25]),
    }[name].cuda()
    q, k, v = some(1, 2, 1, 64), some(1, 2, 99, 64), some(1, 2, 99, 64)
    if name == "sinusoids":
        q = mc.Features(content=q, relative=some(1, 2, 1, 64))

    def call() -> torch.Tensor:
        return mc.smooth(kernel, q, k, v, filter=mc.Causal())

    with torch.no_grad():
        anew, graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            # Kernels are compiled before anything is captured.
            wanted = call()
        torch.cuda.synchronize()
        made = len(constants._kept)
        constants._kept.clear()
        with torch.cuda.graph(anew):
            formed = call()
        assert not constants._for_graphs
        for _ in range(2):
            call()
        with torch.cuda.graph(graph):
            read = call()
        assert len(constants._for_graphs) == made > 0
        # What is not kept any more is written over.
        constants._kept.clear()
        others = [torch.full((2**20,), 7.0, device="cuda") for _ in range(16)]
        for run, out in ((anew, formed), (graph, read)):
            run.replay()
            assert torch.equal(out, wanted)
        for kept in constants._for_graphs.values():
            kept.tensor.zero_()
        anew.replay()
        graph.replay()
        assert torch.equal(formed, wanted)
        assert not torch.equal(read, wanted)
        assert all(bool((other == 7.0).all()) for other in others)


@pytest.mark.parametrize("positions", [mc.ALiBi([0.5, 0.25]), mc.Buckets(torch.randn(8, 2))])
def test_inference_tensors_are_cached_for_inference_only(positions):
    kernel, x = mc.Exponential() * positions, torch.randn(1, 2, 9, 4)
    with torch.inference_mode():
        alone = [mc.smooth(kernel, x, x, x, filter=mc.Causal()) for _ in range(2)]
        made = [kept.tensor for kept in constants._kept.values()]
    assert made
    assert all(found.is_inference() for found in made)
    x.requires_grad_()
    for own in positions.buffers():
        own.requires_grad_()
    out = mc.smooth(kernel, x, x, x, filter=mc.Causal())
    out.sum().backward()
    assert len(constants._kept) == 2 * len(made)
    assert torch.equal(alone[0], alone[1])
    assert torch.allclose(out, alone[0], atol=1e-6)


def test_changed_slopes_are_read_again():
    kernel, x = mc.Exponential() * mc.ALiBi([0.5, 0.25]), torch.randn(1, 2, 9, 4)
    before = mc.smooth(kernel, x, x, x, filter=mc.Causal())
    kernel.kernels[1].slopes.data.mul_(3.0)
    after = mc.smooth(kernel, x, x, x, filter=mc.Causal())
    wanted = mc.smooth(kernel, x, x, x, filter=mc.Causal(), backend="reference")
    assert not torch.allclose(before, after)
    assert torch.allclose(after, wanted, atol=1e-5)


def test_a_gradient_flows_through_what_is_formed_from_them():
    kernel = mc.Exponential() * mc.RelativeSinusoid()
    q = mc.Features(content=torch.randn(1, 2, 7, 4), relative=torch.randn(1, 2, 7, 6))
    q.part("relative").requires_grad_()
    x = torch.randn(1, 2, 7, 4)
    for _ in range(2):
        grads = [
            torch.autograd.grad(
                mc.smooth(kernel, q, x, x, filter=mc.Causal(), backend=backend).square().sum(),
                q.part("relative"),
            )[0]
            for backend in ("auto", "reference")
        ]
        assert torch.allclose(*grads, atol=1e-5)


def test_buckets_of_distances_are_cached(monkeypatch):
    made = []
    bucket = bias.bucket
    monkeypatch.setattr(
        bias, "bucket", lambda away, *given: made.append(given) or bucket(away, *given)
    )
    tables = torch.randn(2, 8, 2)
    kernels = [mc.Buckets(table) for table in tables] + [
        mc.Buckets(tables[0], max_distance=20), mc.Buckets(tables[0], bidirectional=False)
    ]  # fmt: skip
    x = torch.randn(1, 2, 30, 4)
    for _ in range(2):
        for kernel in kernels:
            given = (mc.Exponential() * kernel, x, x, x)
            out = mc.smooth(*given, backend="chunked")
            wanted = made.copy()
            assert (out - mc.smooth(*given, backend="reference")).abs().max() < 1e-5
            made[:] = wanted
    # A table of other numbers has the same buckets.
    assert made == [(8, 128, True), (8, 20, True), (8, 128, False)]
