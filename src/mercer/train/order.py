"""The order of the data: which items a step sees, whatever the number of processes.

Position p of the stream is item `shuffled(p // n)[p % n]`, where every pass over the n items has a
permutation of its own. Step s sees the positions from s * batch on; they are cut into `accumulate`
parts, and each part into one share a process. So the sum over shares and parts is the same for one
process and for many, and a run goes on at any step without reading what came before.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class Order(Sampler[list[int]]):
    """The items of each micro-batch of one process, from step `start` on."""

    def __init__(
        self,
        items: int,
        *,
        batch: int,
        steps: int,
        seed: int,
        accumulate: int = 1,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        if items < 1:
            raise ValueError("there is nothing to train on: the training data is empty")
        if batch % (accumulate * processes):
            raise ValueError(
                f"batch must be a multiple of accumulate x processes, but came as {batch}, with "
                f"accumulate {accumulate} and {processes} processes"
            )
        self.items = items
        self.batch = batch
        self.steps = steps
        self.seed = seed
        self.accumulate = accumulate
        self.rank = rank
        self.share = batch // (accumulate * processes)
        self.start = 0
        self._pass: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        """Micro-batches of the whole run: Trainer counts steps by it, from the first one."""
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        part = self.batch // self.accumulate
        for step in range(self.start, self.steps):
            for number in range(self.accumulate):
                first = step * self.batch + number * part + self.rank * self.share
                yield [self.item(position) for position in range(first, first + self.share)]

    def item(self, position: int) -> int:
        number, place = divmod(position, self.items)
        if self._pass is None or self._pass[0] != number:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._pass = number, torch.randperm(self.items, generator=generator)
        return int(self._pass[1][place])
