"""The runner of the GPU's matrix, and its configurations, without a GPU."""

import os
import sys
import time

import pytest

from mercer.bench import matrix
from mercer.bench.matrix import FILTERS, KERNELS, WIDE, WIDTHS, Configuration, configurations
from mercer.bench.workers import Worker
from mercer.filters import FILTERS as ALL_FILTERS
from mercer.filters import Blocks, Heads, Mask
from mercer.kernels import KERNELS as ALL_KERNELS
from mercer.kernels import Linear


def act(do: str, number: int = 0) -> str:
    """The job of a worker in these tests."""
    if do == "abort":
        os.abort()
    if do == "hang":
        time.sleep(60)
    if do == "poison":
        raise RuntimeError("CUDA error: an illegal instruction was encountered")
    if do == "wrong":
        raise AssertionError("off by 1")
    # A reply is not mixed with what is printed.
    os.write(1, b"noise\n")
    return f"{do} {number} of {os.getpid()}"


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    one = Worker("bench.test_workers:act")
    yield one
    one.close()


def test_a_worker_is_replaced_when_it_dies(worker):
    first = worker.run({"do": "work", "number": 1}, timeout=100)
    again = worker.run({"do": "work", "number": 2}, timeout=100)
    assert (first.status, again.status) == ("done", "done")
    assert first.said.replace("work 1", "work 2") == again.said

    wrong = worker.run({"do": "wrong"}, timeout=100)
    assert (wrong.status, wrong.said) == ("failed", "off by 1")
    assert worker.run({"do": "work", "number": 2}, timeout=100).said == again.said

    crash = worker.run({"do": "poison"}, timeout=100)
    assert crash.status == "crashed"
    assert "illegal instruction" in crash.said
    after = worker.run({"do": "work", "number": 2}, timeout=100)
    assert after.status == "done"
    assert after.said != again.said


def test_a_job_that_never_replies_is_named(worker):
    assert worker.run({"do": "abort"}, timeout=100).status == "crashed"
    assert worker.run({"do": "hang"}, timeout=3).status == "hung"


def test_every_kernel_meets_every_filter():
    found = configurations()
    assert len(found) == len(set(found))
    fused = [c for c in found if c.backend == "triton"]
    pairs = [(kernel, filter) for kernel in KERNELS for filter in FILTERS]
    # First each pair once, so that a run that is cut short has met all.
    assert [(c.kernel, c.filter) for c in fused[: len(pairs)]] == pairs
    for kernel, filter in pairs:
        widths = {(c.dim, c.kv_heads) for c in fused if (c.kernel, c.filter) == (kernel, filter)}
        assert {(dim, matrix.HEADS) for dim in WIDTHS} < widths
        grouped = {dim for dim, heads in widths if heads == matrix.KV_HEADS}
        assert len(grouped) >= (3 if kernel in WIDE else 2)


def test_every_registered_kernel_and_filter_is_there():
    """Only a kernel with negative weights and these filters have no fused form."""
    found = {type(f) for build in FILTERS.values() for f in parts(build(131), "filters")}
    assert set(ALL_FILTERS) - found == {Mask, Heads, Blocks}
    found = {type(k) for build in KERNELS.values() for k in parts(build(6, 64), "kernels")}
    assert set(ALL_KERNELS) - found == {Linear}


def parts(whole, name):
    """The kernel or filter, and its members."""
    return [whole, *(x for part in getattr(whole, name, ()) for x in parts(part, name))]


def changed(monkeypatch, change):
    """SDPA gives a different result in each run."""
    run = matrix.Case.run

    def other(self, backend, **more):
        found = run(self, backend, **more)
        return {n: change(x) for n, x in found.items()} if backend == "sdpa" else found

    monkeypatch.setattr(matrix.Case, "run", other)


CALL = matrix.job(
    Configuration("rbf", "causal&documents", 8, dtype="float32", length=37, backend="sdpa"), "cpu"
)


@pytest.mark.parametrize("log_mass", [False, True])
def test_a_configuration_is_checked(log_mass, monkeypatch):
    assert matrix.check(**CALL | {"log_mass": log_mass}) == "passed"
    assert matrix.check(**CALL | {"backend": "linear"}).startswith("refused: ")
    changed(monkeypatch, lambda x: 1.01 * x)
    with pytest.raises(AssertionError, match="is off by"):
        matrix.check(**CALL | {"log_mass": log_mass})


def test_other_bits_are_noticed(monkeypatch):
    draws = iter(range(100))
    changed(monkeypatch, lambda x: x + 1e-6 * next(draws))
    with pytest.raises(AssertionError, match="differs in bits"):
        matrix.check(**CALL)
