"""Which tokens of a sequence each process has.

The sequence is cut into equal chunks. Balanced, process r of n has chunks r and 2 n - 1 - r of 2 n
(head and tail), so that under a causal filter all processes have the same work. Otherwise it has
chunk r of n.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .collectives import gather

Exchange = Literal["gather", "ring"]


class Chunk(NamedTuple):
    """The places from first to stop."""

    first: int
    stop: int


class Split:
    """A sequence of `length` tokens among the processes of a group.

    Args:
        mesh: a DeviceMesh of one dimension, or a process group.
        length: of the whole sequence; the number of chunks divides it.
        balanced: head and tail for each process, for causal filters.
        exchange: how keys and values come to the queries: "gather" brings them all to every
            process. "ring" passes them on: a process holds its own, those that it reads, and those
            that arrive.
    """

    def __init__(
        self,
        mesh: DeviceMesh | ProcessGroup,
        length: int,
        *,
        balanced: bool = True,
        exchange: Exchange = "gather",
    ) -> None:
        if isinstance(mesh, DeviceMesh):
            if mesh.ndim != 1:
                raise ValueError(
                    f"mesh must have one dimension, got {mesh.ndim}: give one of them, such as "
                    "mesh['context']"
                )
            mesh = mesh.get_group()
        elif not isinstance(mesh, ProcessGroup):
            raise ValueError(
                f"mesh must be a DeviceMesh or a process group, got {type(mesh).__name__}"
            )
        if exchange not in get_args(Exchange):
            raise ValueError(f"exchange must be 'gather' or 'ring', got {exchange!r}")
        self.group, self.rank, self.size = mesh, dist.get_rank(mesh), dist.get_world_size(mesh)
        self.length, self.balanced, self.exchange = length, balanced, exchange
        number = self.size * (2 if balanced else 1)
        if not isinstance(length, int) or length < 1 or length % number:
            raise ValueError(
                f"a sequence split among {self.size} processes needs a length that is a multiple "
                f"of {number}, got {length!r}"
            )
        self.step = length // number

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Those of a process, in the order in which its tensors hold them."""
        numbers = (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)
        return tuple(Chunk(n * self.step, (n + 1) * self.step) for n in numbers)

    @property
    def own(self) -> tuple[Chunk, ...]:
        """The chunks of this process."""
        return self.chunks(self.rank)

    @property
    def share(self) -> int:
        """How many tokens a process has."""
        return self.length // self.size

    def rows(self, n: int) -> tuple[int, int]:
        """From where to where the own chunk n is in tensors of this process."""
        return n * self.step, (n + 1) * self.step

    def places(self, device: torch.device | str | None = None) -> Tensor:
        """Where the tokens of this process stand, [length / size]."""
        return self.cut(torch.arange(self.length, device=device), 0)

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of this process of a tensor that all have."""
        if x.dim() <= dim or x.shape[dim] != self.length:
            raise ValueError(
                f"the split sequence has {self.length} tokens in dimension {dim}, but x is "
                f"{list(x.shape)}"
            )
        return torch.cat([x.narrow(dim, c.first, self.step) for c in self.own], dim)

    def join(self, x: Tensor, dim: int = 1) -> Tensor:
        """The whole of the parts of all processes; collective. Gradients are summed for each."""
        return self.join_all([x], dim)[0]

    def join_all(self, tensors: list[Tensor], dim: int = 1) -> list[Tensor]:
        """The same for several tensors."""
        for x in tensors:
            self.check(x, dim)
        chunks = [(c, r, n) for r in range(self.size) for n, c in enumerate(self.chunks(r))]
        return [
            torch.cat(
                [parts[r].narrow(dim, n * self.step, self.step) for _, r, n in sorted(chunks)], dim
            )
            for parts in gather(self.group, *tensors)
        ]

    def check(self, x: Tensor, dim: int) -> None:
        """Raise ValueError if this is not the part of a process."""
        if not isinstance(x, Tensor) or x.dim() <= dim:
            came = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"the tokens must be in dimension {dim} of a tensor, got {came}")
        if x.shape[dim] != self.share:
            raise ValueError(
                f"each process must have {self.share} of the {self.length} tokens in dimension "
                f"{dim}, got {list(x.shape)}"
            )

    def reduce_gradients(self, module: nn.Module) -> None:
        """Sum the gradients of shared parameters over the processes, after a backward; collective.

        DDP and FSDP2 do this by themselves.
        """
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"reduce_gradients takes a module with parameters, got {type(module).__name__}"
            )
        for x in module.parameters():
            if x.requires_grad:
                x.grad = torch.zeros_like(x) if x.grad is None else x.grad
                dist.all_reduce(x.grad, group=self.group)

    def __repr__(self) -> str:
        return f"Split({self.length} tokens among {self.size} processes, {self.exchange})"
