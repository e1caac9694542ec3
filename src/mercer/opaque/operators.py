"""Opaque operators for compiled graphs, with less overhead per call than torch's own decorator.

`torch.library.custom_op` checks in every call whether outputs share memory with inputs. That check
takes longer than the rest of the call, so the tests do it once (`torch.library.opcheck`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Must live as long as the process: its operators are removed with it.
LIBRARY = torch.library.Library("mercer", "FRAGMENT")


def operator(run: Callable[..., Any]) -> Any:
    """mercer::NAME of an annotated function; it must not write to or return its inputs."""
    name = run.__name__
    LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=()))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.mercer, name).default


def fake(of: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the shapes and dtypes of an operator's outputs."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(of.name(), run, lib=LIBRARY)
        return run

    return register


def learns(of: Any, backward: Callable[..., Any], save: Callable[..., Any]) -> None:
    """Register the gradient of an operator."""
    torch.library.register_autograd(of.name(), backward, setup_context=save, lib=LIBRARY)
