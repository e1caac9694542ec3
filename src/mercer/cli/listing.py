"""Tables of what there is: kernels and filters, with what runs them on a device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import reduce
from operator import or_

import torch

from ..explain import explain
from ..filters import FILTERS, Causal, Filter
from ..kernels import KERNELS, Exponential, Kernel
from ..table import Table
from ..testing.cases import Shape, inputs, taking

# A call in training: few numbers, but of a usual width.
HEADS, DIM, LENGTH = 2, 64, 11
SHAPE = Shape(batch=2, heads=HEADS, kv_heads=HEADS, queries=LENGTH, keys=LENGTH, values=DIM)
COLUMNS = ("parameters", "as text", "backends")


def kernels(device: torch.device | str = "cpu") -> Table:
    """Every kernel: its weight, its parameters, and the backends that train it under `Causal()`.

    `reference` runs all of them.
    """
    rows = []
    for kind in KERNELS:
        assert kind.entry is not None
        examples = [build(HEADS, DIM) for build in kind.entry.examples.values()]
        taken = [_taking(kernel, Causal(), device) for kernel in examples]
        rows.append((kind.__name__, _formula(kind), *_last(kind, kind.entry.text, taken)))
    return Table(("kernel", "weight", *COLUMNS), tuple(rows))


def filters(device: torch.device | str = "cpu") -> Table:
    """Every filter: what a query sees, its parameters, and the backends of `Exponential()`."""
    rows = []
    for kind in FILTERS:
        assert kind.entry is not None
        examples = [build() for build in kind.entry.examples.values()]
        taken = [_taking(Exponential(), filter, device) for filter in examples]
        rows.append((kind.__name__, _formula(kind), *_last(kind, kind.entry.text, taken)))
    return Table(("filter", "query i sees key j if", *COLUMNS), tuple(rows))


def _last(kind: Callable[..., object], text: bool, taken: list[list[str]]) -> tuple[str, str, str]:
    # In the order of the registry of backends; what takes some examples alone is in brackets.
    some = reduce(or_, map(dict.fromkeys, taken))
    names = [n if all(n in one for one in taken) else f"({n})" for n in some]
    return _parameters(kind), "yes" if text else "no", ", ".join(names) or "reference alone"


def _taking(kernel: Kernel, filter: Filter, device: torch.device | str) -> list[str]:
    """The backends of a training call, the one that `auto` chooses first."""
    dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    found = taking(kernel, filter, SHAPE, DIM, dtype, str(device))
    q, k, v = inputs(kernel, SHAPE, DIM, dtype, device=str(device))
    for x in (*q.tensors(), *k.tensors(), v):
        x.requires_grad_()
    first = explain(kernel.to(device), q, k, v, filter=filter).backend
    return sorted(found, key=lambda name: name != first)


def _formula(kind: Callable[..., object]) -> str:
    """The first line of the docstring, which is the formula."""
    return (inspect.getdoc(kind) or "").partition("\n")[0].rstrip(".:")


def _parameters(kind: Callable[..., object]) -> str:
    """The arguments, with their defaults."""
    found = []
    for name, one in inspect.signature(kind).parameters.items():
        found.append(name if one.default is one.empty else f"{name}={one.default!r}")
    return ", ".join(found)
