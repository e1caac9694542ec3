"""A kernel inside a layer of another library.

Requirements: the layer's own weights keep their names; the numbers of the kernel stay in float32
when the model is cast, and keep their values when it comes from the meta device; a checkpoint that
was written without Mercer loads strictly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from .. import parse
from ..filters import Filter, Full
from ..kernels import Kernel
from ..own import Trust
from ..smoother import smooth
from .moving import kept


class KernelHost(nn.Module):
    """Attention with a kernel of its own: [B, H, Q, D], [B, H, K, D], [B, H, K, V] -> [B, H, Q, V].

    A checkpoint without one of its numbers leaves all of them as they are.
    """

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel = kernel
        self._start = copy.deepcopy(dict(kernel.state_dict()))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, filter: Filter = Full(), dropout_p: float = 0.0
    ) -> Tensor:
        return smooth(self.kernel, q, k, v, filter=filter, dropout_p=dropout_p)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Set the numbers that the kernel started with."""
        for name, x in self.kernel.state_dict().items():
            x.copy_(self._start[name])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        return super()._apply(kept(fn), recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        own = f"{prefix}kernel."
        if not any(name.startswith(own) for name in state_dict):
            state_dict.update({own + name: x for name, x in self.kernel.state_dict().items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)


def own_kernel(
    kernel: str | Kernel, heads: int | None, dim: int | None, where: str, trust: Trust = None
) -> Kernel:
    """A copy of the kernel for a layer with so many heads of so many features.

    ValueError where it does not fit, with `where` as the name of the layer.
    """
    # Models are often built on the meta device, where no bandwidth can be read.
    with torch.device("cpu"):
        if isinstance(kernel, str):
            kernel = parse.kernel(kernel, trust)
        if not isinstance(kernel, Kernel):
            raise ValueError(
                f'a kernel must be text such as "RBF(heads=8)" or a Kernel, got {kernel!r}'
            )
        parts = sorted(kernel.query_parts - {"content"})
        if parts:
            raise ValueError(
                f"{kernel!r} reads the part {parts[0]!r}, which the layers of this model do not "
                "have: their queries and keys are one part, content"
            )
        own = copy.deepcopy(kernel)
        if heads and dim:
            x = next(own.parameters(), torch.zeros(())).new_zeros(1, heads, 1, dim)
            try:
                with torch.no_grad():
                    own.log_weight(x.float(), x.float())
            except ValueError as error:
                raise ValueError(
                    f"{kernel!r} does not fit {where}, which has {heads} heads of "
                    f"{dim} features: {error}"
                ) from None
    return own
