"""Every fused kernel with every filter on a GPU; `benchmarks/matrix.py` writes the same as a table.

    python -m pytest tests/gpu -n 12

Configurations run in a process of their own, so that one crash does not hide the others.
"""

import pytest
import torch

from mercer.bench.matrix import TARGET, configurations, job
from mercer.bench.workers import Worker

if not torch.cuda.is_available():
    pytest.skip("the matrix of kernels and filters needs a CUDA GPU", allow_module_level=True)


@pytest.fixture(scope="module")
def worker():
    one = Worker(TARGET)
    yield one
    one.close()


@pytest.mark.parametrize("config", configurations(), ids=str)
def test_a_kernel_with_a_filter(config, worker):
    reply = worker.run(job(config, "cuda"), timeout=300)
    assert reply.status == "done", f"{reply.status}: {reply.said}"
    if reply.said != "passed":
        assert config.backend == "linear", reply.said
        pytest.skip(reply.said)
