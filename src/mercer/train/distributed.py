"""The processes of a run: ranks, agreement, and sharding of the model.

Processes come from torchrun or accelerate. Gradients are averaged by DDP, which accelerate wraps
around the model, or the model is sharded by FSDP2 (`fully_shard`), on GPUs and on CPUs alike.
Beside both, processes may share their sequences (`mercer.parallel`).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")


class Elsewhere(RuntimeError):
    """The main process failed; this one ends, too."""


@dataclass(frozen=True)
class Team:
    """All processes of a run, seen from this one."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, numbers: Sequence[float | Tensor]) -> Tensor:
        """Each number summed over all processes; collective."""
        far = any(isinstance(n, Tensor) and n.device.type != "cpu" for n in numbers)
        if far:
            total = torch.stack([torch.as_tensor(n, device=self.device).double() for n in numbers])
        else:
            total = self.put([float(n) for n in numbers])
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def put(self, numbers: list[float]) -> Tensor:
        """Copy numbers to the device without synchronising."""
        held = torch.tensor(numbers, dtype=torch.float64)
        if self.device.type != "cuda":
            return held.to(self.device)
        return held.pin_memory().to(self.device, non_blocking=True)

    def tell(self, work: Callable[[], T]) -> T:
        """Run it in the main process; all get its result or its failure; collective."""
        if self.size == 1:
            return work()
        answer: list[Any] = [None, None]
        failed: Exception | None = None
        if self.main:
            try:
                answer[0] = work()
            except Exception as error:
                failed, answer[1] = error, str(error)
        dist.broadcast_object_list(answer, src=0)
        if failed is not None:
            raise failed
        if answer[1] is not None:
            raise Elsewhere(answer[1])
        found: T = answer[0]
        return found

    def deal(self, items: int, batch: int) -> Iterator[tuple[list[int], bool]]:
        """Batches of items for this process, and whether they count.

        All processes get the same number of batches, since a sharded model needs all of them.
        Processes without a batch get the first items again, which do not count.
        """
        starts = list(range(0, items, batch))
        for turn in range(-(-len(starts) // self.size)):
            number = turn * self.size + self.rank
            start = starts[number] if number < len(starts) else 0
            yield list(range(start, min(start + batch, items))), number < len(starts)


class Watch:
    """Shares after each step, over all processes: a bad loss, a signal, the time.

    On a GPU the result is read one step later, so that steps do not synchronise.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.lag = 0 if team.device.type == "cpu" else 1
        self._posted: collections.deque[tuple[int, Tensor, Any]] = collections.deque()

    def post(self, step: int, loss: Tensor, norm: Tensor, signal: int, seconds: float) -> None:
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        numbers = self.team.put([0.0, signal, seconds])
        numbers[0] = bad
        work = None
        if self.team.size > 1:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, async_op=True)
        self._posted.append((step, numbers, work))

    def read(self, *, everything: bool = False) -> Iterator[tuple[int, bool, int, float]]:
        """(step, bad loss, signal, seconds) of each step whose result is there."""
        while len(self._posted) > (0 if everything else self.lag):
            step, numbers, work = self._posted.popleft()
            if work is not None:
                work.wait()
            bad, signal, seconds = numbers.tolist()
            yield step, bool(bad), int(signal), seconds


class Spread(nn.Module):
    """A sharded model. Trainer takes it for wrapped already, so it does not wrap it in DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def sync(self, now: bool) -> None:
        """Whether the next backward sums gradients over the processes."""
        self.module.set_requires_gradient_sync(now)  # type: ignore[operator]


def sharing(team: Team, number: int) -> DeviceMesh | None:
    """The `number` processes that share their sequences with this one; None for one; collective."""
    if team.size % number:
        raise ValueError(
            f"context_parallel {number} does not divide the number of processes of the run, "
            f"{team.size}: torchrun --nproc-per-node {number} -m mercer train lm …"
        )
    if number == 1:
        return None
    shape = (team.size // number, number)
    mesh = init_device_mesh(team.device.type, shape, mesh_dim_names=("data", "context"))
    return mesh["context"]


def spread(model: nn.Module, team: Team) -> None:
    """Shard a model in place over all processes, each layer as one unit."""
    from torch.distributed.fsdp import fully_shard

    if team.size == 1 or not dist.is_initialized():
        raise ValueError(
            "fsdp needs several processes: torchrun --nproc-per-node 8 -m mercer train …"
        )
    mesh = init_device_mesh(team.device.type, (team.size,))
    # Class names of the layers, as transformers models give them.
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    # Modules that layers share, such as token kernels, are sharded with the model as a whole.
    own = collections.Counter(id(p) for layer in layers for p in set(layer.parameters()))
    known = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    outside = {p for p in model.parameters() if own[id(p)] > 1 or known[id(p)] > 1}
    for layer in layers:
        shared = {p for p in layer.parameters() if p in outside}
        fully_shard(layer, mesh=mesh, ignored_params=shared)
    fully_shard(model, mesh=mesh)
