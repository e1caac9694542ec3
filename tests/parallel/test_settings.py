"""Misuse of `--context-parallel`."""

import pytest
import torch

pytest.importorskip("accelerate")

from mercer.train import Settings
from mercer.train.distributed import Team, sharing


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"context_parallel": 0}, "context_parallel must be a whole number from 1 on, got 0"),
        (
            {"context_parallel": 3},
            "3 cuts a sequence into 6 chunks, which do not divide the length of 128",
        ),
        ({"context_parallel": 2, "task": "vision"}, "not of the task vision"),
        (
            {"context_parallel": 2, "compile": True},
            "compile and context_parallel exclude each other",
        ),
    ],
)
def test_settings(given, said):
    with pytest.raises(ValueError, match=said):
        Settings(**given).resolve()


def test_a_number_that_does_not_divide_the_processes():
    for size in (1, 4):
        with pytest.raises(
            ValueError, match=f"3 does not divide the number of processes.* {size}:"
        ):
            sharing(Team(torch.device("cpu"), size=size), 3)
    assert sharing(Team(torch.device("cpu"), size=4), 1) is None
