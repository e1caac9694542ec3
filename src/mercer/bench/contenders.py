"""The contenders: this library on one of its backends, or a peer."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ..explain import explain
from ..smoother import smooth
from .workload import Inputs


class Contender:
    """Something that smooths; `kernel` names what it computes."""

    name: str
    kernel: str
    backend: str = ""
    # Whether it computes gradients of the kernel's parameters, too.
    trains: bool = True
    # Whether keys may have fewer heads than queries.
    groups: bool = True

    def smooth(self, given: Inputs) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define smooth(given)")

    def exact(self, given: Inputs) -> Tensor:
        """The dense formula of `smooth`: the check runs it in float64 and in the dtype."""
        return smooth(
            given.kernel, given.q, given.k, given.v, filter=given.filter, backend="reference"
        )

    def precise(self, given: Inputs) -> Tensor:
        """The same in float64, for more keys than a dense matrix allows."""
        return self.exact(given)

    def settle(self, given: Inputs, *, forward_only: bool) -> dict[Contender, bool]:
        """The contenders to check, each with whether it is forward only.

        Raises ValueError with a refusal.
        """
        return {self: forward_only}


class Peer(Contender):
    """Another implementation of the same formula."""

    key: str
    trains = False
    groups = False

    def available(self, device: torch.device) -> str | None:
        """Why it cannot run on this device, or None."""
        return None


@dataclass(frozen=True)
class Ours(Contender):
    """A kernel of the catalogue on a backend of this library."""

    kernel: str
    backend: str = "auto"

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.kernel

    def smooth(self, given: Inputs) -> Tensor:
        return smooth(
            given.kernel, given.q, given.k, given.v, filter=given.filter, backend=self.backend
        )

    def precise(self, given: Inputs) -> Tensor:
        return smooth(
            given.kernel, given.q, given.k, given.v, filter=given.filter, backend="chunked"
        )

    def settle(self, given: Inputs, *, forward_only: bool) -> dict[Contender, bool]:
        # `auto` may choose different backends for inference and training.
        settled: dict[Contender, bool] = {}
        for training in (False,) if forward_only else (False, True):
            with torch.set_grad_enabled(training):
                explanation = explain(
                    given.kernel,
                    given.q,
                    given.k,
                    given.v,
                    filter=given.filter,
                    backend=self.backend,
                )
            if given.v.device.type == "cpu":
                refuse_to_swap(explanation.memory)
            settled[Ours(self.kernel, explanation.backend)] = not training
        return settled


def refuse_to_swap(needed: int) -> None:
    """Raise ValueError if a CPU's memory is too small: it would swap without an error."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there / 2:
        raise ValueError(
            f"it would need {needed / 2**30:.0f} GiB, but this machine has {there / 2**30:.0f} GiB"
        )
