"""Processes on one CPU, for tests: each runs the same function, with gloo."""

import multiprocessing
import os
import socket
import traceback

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["mercer.parallel", "mercer.models", "mercer.testing"])


def _work(rank, size, port, function, arguments, answers):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size)
        answers.put((rank, None, function(*arguments)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))


def run(function, size, *arguments):
    """What each of `size` processes returns, by rank; a failure in one of them fails the test."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    answers = CONTEXT.Queue()
    given = [(rank, size, port, function, arguments, answers) for rank in range(size)]
    processes = [CONTEXT.Process(target=_work, args=each, daemon=True) for each in given]
    for process in processes:
        process.start()
    try:
        results = {}
        for _ in processes:
            rank, failure, result = answers.get(timeout=120)
            if failure is not None:
                pytest.fail(f"process {rank} of {size}:\n{failure}")
            results[rank] = result
        for process in processes:
            process.join(30)
    finally:
        for process in processes:
            process.kill()
    return [results[rank] for rank in range(size)]
