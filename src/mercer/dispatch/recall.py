"""Calls that came before: told by what decides them, they are not worked out again.

What a call must be checked for, how its kernel is lowered and which backend runs follow from the
attributes of the kernel, from the filter, and from shapes, dtypes and devices of tensors. To work
that out may take the host as long as the GPU takes for the rest. So when a call comes for the
second time, and runs as one function of a backend on nothing but tensors that it was given or that
its kernel has, it is kept: later calls hand their own tensors to that function.

What this must meet: nothing here looks at the numbers in a tensor, and no tensor of a call is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..backends.runtime import replay as tapes
from ..backends.runtime.launch import INTERPRETED
from ..backends.triton.filters import PATTERNS
from ..filters import Filter
from ..kernels import (
    RBF,
    AdaptiveRBF,
    ALiBi,
    Buckets,
    Cosine,
    Exponential,
    Kernel,
    Laplace,
    Lookup,
    Matern,
    Polynomial,
    Product,
    RationalQuadratic,
    RelativeSinusoid,
    Sum,
)
from ..term.derived import Formed, Repeatable
from ..term.features import Features, Input
from ..term.mix import Smoothed

Option = str | float | None
OPTIONS = frozenset({str, float, int, bool, type(None)})
PLAIN = frozenset({Tensor, nn.Parameter})
# What every module has; of that, only tensors and modules matter.
COMMON = frozenset(nn.Module().__dict__)
# How many calls are known before all are forgotten.
MOST = 1024

_known: dict[tuple[Any, ...], Recipe | Unkept] = {}


class Unkept(Enum):
    """Why a call that came before is not kept."""

    ONCE = "it came once, as calls with a cache that grows do"
    NEVER = "it formed tensors of its own, or was more than one function"


class Call(NamedTuple):
    """What decides a call, and the tensors that it is about."""

    key: tuple[Any, ...]
    tensors: list[Any]
    # The attributes whose ids are in the key: while they are held, nothing else has these ids.
    held: list[object]


class Recipe(NamedTuple):
    """The function that a call ran, and where its tensors come from."""

    function: Callable[..., Any]
    options: Any
    sources: tuple[Source | None, ...]
    held: list[object]

    def __call__(self, tensors: list[Tensor]) -> Any:
        """What the function gives."""
        given = [None if source is None else source(tensors) for source in self.sources]
        return self.function(self.options, *given)


# From the tensors of a call, one that its function takes.
Source = Callable[[list[Tensor]], Tensor]
# What of a module decides how it is lowered, put into facts, tensors and attributes to be held;
# False if that is not known.
Reader = Callable[[Any, list[Any], list[Any], list[object]], bool]


def look(
    kernel: Kernel, q: Input, k: Input, v: Tensor, filter: Filter, *options: Option,
    more: tuple[Tensor | None, ...] = (),
) -> Call | None:  # fmt: skip
    """The call, if it is of a kind that can be kept; nothing is checked yet.

    `more`: tensors besides queries, keys and values.
    """
    if type(v) not in PLAIN or not (v.is_cuda or INTERPRETED) or type(filter) not in PATTERNS:
        return None
    off = torch.compiler.is_compiling() or not tapes.enabled
    if off or torch.is_autocast_enabled(v.device.type):
        return None
    # Of what type they are counts, too: True is 1, but not everywhere welcome where 1 is.
    types = [type(option) for option in options]
    if not OPTIONS.issuperset(types):
        return None
    facts: list[Any] = [torch.is_grad_enabled(), filter, *options, *types]
    facts += [x is None for x in more]
    tensors: list[Any] = [v, *[x for x in more if x is not None]]
    for features in (q, k):
        if type(features) is Features:
            facts.append(tuple(features))
            tensors += features.tensors()
        else:
            facts.append(None)
            tensors.append(features)
    held: list[object] = []
    if not read(kernel, facts, tensors, held):
        return None
    ids = []
    for x in tensors:
        if type(x) not in PLAIN or x.layout is not torch.strided:
            return None
        facts += (x.dtype, x.device, x.shape, x.stride(), x.requires_grad)
        ids.append(id(x))
    # Queries that are the keys are another call than queries that only look like them.
    facts += map(ids.index, ids)
    return Call(tuple(facts), tensors, held)


def read(module: nn.Module, facts: list[Any], tensors: list[Any], held: list[object]) -> bool:
    """By the reader of its kind."""
    reader = READERS.get(type(module))
    return reader is not None and reader(module, facts, tensors, held)


def _attributes(
    module: nn.Module, facts: list[Any], tensors: list[Any], held: list[object]
) -> bool:
    facts.append(type(module))
    own = [value for name, value in module.__dict__.items() if name not in COMMON]
    facts += map(id, own)
    held += own
    for group in (module._parameters, module._buffers):
        if group:
            tensors += [x for x in group.values() if x is not None]
    for child in module._modules.values():
        if child is None or not read(child, facts, tensors, held):
            return False
    return True


# Kernels of which a call may be kept: no attribute of theirs changes but by being set anew.
READERS: dict[type, Reader] = dict.fromkeys(
    (
        Exponential, Polynomial, RBF, Laplace, Matern, RationalQuadratic, AdaptiveRBF, ALiBi,
        Cosine, Lookup, Buckets, RelativeSinusoid, Product, Sum, nn.ModuleList,
    ),
    _attributes,
)  # fmt: skip


def find(call: Call) -> Recipe | None:
    found = _known.get(call.key)
    return found if type(found) is Recipe else None


def keep(call: Call, result: Smoothed) -> None:
    """The call has run, and `find` did not find it."""
    before = _known.get(call.key)
    if before is None:
        if len(_known) >= MOST:
            _known.clear()
        _known[call.key] = Unkept.ONCE
    elif before is Unkept.ONCE:
        _known[call.key] = _recipe(call, result)


def _recipe(call: Call, result: Smoothed) -> Recipe | Unkept:
    if not isinstance(result, Repeatable):
        return Unkept.NEVER
    again = result.again
    sources: list[Source | None] = []
    for x in again.tensors:
        source = None if x is None else _source(x, call.tensors)
        if x is not None and source is None:
            return Unkept.NEVER
        sources.append(source)
    return Recipe(again.function, again.options, tuple(sources), call.held)


def _source(x: Tensor | Formed, tensors: list[Tensor]) -> Source | None:
    if isinstance(x, Formed):
        function = x.function
        parts = [part for y in x.tensors if (part := _source(y, tensors)) is not None]
        if len(parts) < len(x.tensors):
            return None
        return lambda given: function(*[part(given) for part in parts])
    for number, y in enumerate(tensors):
        if x is y:
            return itemgetter(number)
        if x._base is y and x.numel() == y.numel() == 1:
            shape = x.shape
            return lambda given, number=number: given[number].view(shape)  # type: ignore[misc]
    # What is empty is the same for all.
    return None if x.numel() or x.requires_grad else lambda given: x
