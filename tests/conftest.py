"""One seed, one thread a worker, and memory that is NaN until it is written."""

import os

import pytest
import torch

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One more than there are cores: some tests wait for processes of their own."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else None


@pytest.fixture(autouse=True)
def reproducible():
    torch.manual_seed(42)
    # Besides what its name says, this fills torch.empty with NaN. On a GPU torch's own attention
    # would refuse to run; there, our kernels are tested for it themselves.
    torch.use_deterministic_algorithms(not torch.cuda.is_available())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4, so that short sequences have many."""
    from mercer.backends.chunked import blocks

    monkeypatch.setattr(blocks, "block_side", lambda batch_heads, device: 4)
