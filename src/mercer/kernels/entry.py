"""How a kernel is declared: its class has one `Entry`, and `kernels.KERNELS` lists the classes.

Text (`parse`), the bench, the tests and the table in docs/kernels.md follow from this list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from .base import Kernel

Build = Callable[[int, int], "Kernel"]  # from heads and features of a head


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the rest of the package needs to know about a kernel."""

    kind: str  # what a backend computes for it, one of dispatch.rules.KINDS
    examples: Mapping[str, Build]  # what the tests run over
    text: bool = True  # whether its arguments can be written as text
    # Its name in the bench, and the kernel that is measured; a kernel of positions alone is
    # measured in a product.
    bench: tuple[str, Build] | None = None


def normal(*shape: int) -> nn.Parameter:
    """A parameter of normal numbers, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    return nn.Parameter(torch.randn(*shape, generator=generator))
