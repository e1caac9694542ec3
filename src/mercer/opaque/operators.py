"""Opaque operators for compiled graphs, which cost a call less than torch's own decorator does.

`torch.library.custom_op` looks at every call whether outputs share memory with inputs, which takes
longer than all the rest; the tests ask it once (`torch.library.opcheck`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Kept for as long as the process lives: with it, its operators would go.
LIBRARY = torch.library.Library("mercer", "FRAGMENT")


def operator(run: Callable[..., Any]) -> Any:
    """mercer::NAME of an annotated function, which neither changes nor gives back what comes in."""
    name = run.__name__
    LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.mercer, name).default


def fake(of: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What an operator gives, without its numbers."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(of.name(), run, lib=LIBRARY)
        return run

    return register


def learns(of: Any, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """The gradient of an operator."""
    torch.library.register_autograd(of.name(), backward, setup_context=save, lib=LIBRARY)
