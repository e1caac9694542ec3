"""The order of the data: which items a step sees, whatever the number of processes.

Position p of the stream is item `shuffled(p // n)[p % n]`, with a new permutation for every pass
over the n items. Step s sees the positions from s * batch on, cut into `accumulate` parts, and each
part into one share per process. So a step sees the same items with any number of processes, and a
run can resume at any step without reading earlier data.

Items of different lengths are padded to the longest of their batch. So the items of some fifty
batches are sorted by length and cut into batches, which are shuffled again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

# Batches whose items are sorted together.
POOL = 50


class Stream(Dataset[Any]):
    """Items, pass after pass; each pass is shuffled by the seed and its number.

    Items that have `lengths` come in batches of similar length.
    """

    def __init__(self, items: Any, seed: int, batch: int = 1) -> None:
        if len(items) < 1:
            raise ValueError("there is nothing to train on: the training data is empty")
        self.items = items
        self.seed = seed
        self.batch = batch
        self._number = -1
        self._shuffled = torch.empty(0, dtype=torch.long)  # [items]

    def __getitem__(self, position: int) -> Any:
        number, place = divmod(position, len(self.items))
        if number != self._number:
            self._number, self._shuffled = number, self._shuffle(number)
            # Tell datasets whose items differ between passes, such as random crops.
            if hasattr(self.items, "set_epoch"):
                self.items.set_epoch(number)
        return self.items[int(self._shuffled[place])]

    def _shuffle(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.randperm(len(self.items), generator=generator)
        lengths = getattr(self.items, "lengths", None)
        if lengths is None:
            return order
        # A batch that began in the last pass ends here, and one that begins here may not end.
        first = -number * len(order) % self.batch
        whole = (len(order) - first) // self.batch * self.batch
        pools = order[first : first + whole].split(POOL * self.batch) if whole > 0 else ()
        for pool in pools:
            by_length = pool[torch.as_tensor(lengths)[pool].argsort(stable=True)]
            batches = by_length.view(-1, self.batch)
            pool[:] = batches[torch.randperm(len(batches), generator=generator)].flatten()
        return order


class Order(Sampler[list[int]]):
    """The positions of each micro-batch of one process, from step `start` on."""

    def __init__(
        self, *, batch: int, steps: int, accumulate: int = 1, rank: int = 0, processes: int = 1
    ) -> None:
        if batch % (accumulate * processes):
            raise ValueError(
                f"batch must be a multiple of accumulate x processes, got {batch}, with "
                f"accumulate {accumulate} and {processes} processes"
            )
        self.batch = batch
        self.steps = steps
        self.accumulate = accumulate
        self.rank = rank
        self.share = batch // (accumulate * processes)
        self.start = 0

    def __len__(self) -> int:
        """Micro-batches of the whole run: Trainer counts steps by it, from the first one."""
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[list[int]]:
        part = self.batch // self.accumulate
        for step in range(self.start, self.steps):
            for number in range(self.accumulate):
                first = step * self.batch + number * part + self.rank * self.share
                yield list(range(first, first + self.share))
