"""How tensors of a call are formed from others, for a call that is repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .mix import Smoothed


class Formed(NamedTuple):
    """A tensor as a function of others, which depends on nothing else."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | Formed, ...]


class Again(NamedTuple):
    """How a call ran, if that was one function: function(options, *tensors)."""

    function: Callable[..., Any]
    options: Any
    tensors: tuple[Tensor | Formed | None, ...]


class Repeatable(Smoothed):
    """The same, with how it was run."""

    again: Again

    @staticmethod
    def of(out: Tensor, log_mass: Tensor | None, again: Again) -> Repeatable:
        found = Repeatable(out, log_mass)
        found.again = again
        return found
