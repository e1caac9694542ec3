"""FlexAttention, compiled: one code object for each structure, and the block masks.

Dynamo counts compilations by code object and gives up at a limit. So every structure (link,
captured tensors, kind of filter, dtype, widths) has its own code object; at the limit we raise.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...filters import Full
from ...term.biases import Relative
from .. import Task
from .lower import Lowered

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


INSTALLED = importlib.util.find_spec("triton") is not None
# How often one structure may be compiled, for example for other lengths or without gradients.
VARIANTS = 32
COMPILER = "inductor"
MASKS = 16


def unavailable(device: str) -> str | None:
    """Why it cannot run on this device, or None."""
    if device == "cuda":
        return None if INSTALLED else "Triton is not installed"
    if device != "cpu":
        return f"it runs on CUDA and CPU, not on {device}"
    if COMPILER == "inductor" and not torch.cpu._is_avx2_supported():
        return "on cpu torch compiles it with AVX2 only"
    return None


def refuses(task: Task) -> str | None:
    """Why the task cannot be compiled once more, or None."""
    known = structures.get(_structure(task))
    if known is None or not known.full or shape_of(task) in known.shapes:
        return None
    return f"this kernel and filter were compiled {VARIANTS} times, and not for this shape"


@dataclass
class Compiled:
    """One structure: its function, and the shapes it was compiled for."""

    function: Callable[..., tuple[Tensor, Tensor | None]]
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    full: bool = False

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        from torch._dynamo import config

        with config.patch(recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
            return self.function(*arguments)


structures: dict[tuple[object, ...], Compiled] = {}


def compiled_for(task: Task) -> Compiled:
    """The function of the structure of this task."""
    key = _structure(task)
    if key not in structures:
        # Dynamo tracks dynamic lengths by the name of the code object.
        code = _attend.__code__.replace(co_name=f"attend_{len(structures)}")
        own = FunctionType(code, _attend.__globals__)
        # On CPU, code of torch 2.13 for dynamic lengths does not compile, so lengths are static.
        dynamic = False if task.device.type == "cpu" and COMPILER == "inductor" else None
        compiled = torch.compile(own, fullgraph=True, backend=COMPILER, dynamic=dynamic)
        structures[key] = Compiled(compiled)
    return structures[key]


def _structure(task: Task) -> tuple[object, ...]:
    """The key of a structure; lengths are not part of it."""
    term = task.term
    bias = term.relative
    rule = re.sub(r"\d+", "#", task.filter.simplify(task.num_queries, task.num_keys).encode([]))
    factors = tuple((f.link, f.width, f.keyed, f.has_row, f.per_query) for f in term.factors)
    heads = task.heads, task.v.shape[1], *(f.k.shape[1] for f in term.factors)
    return (
        factors, None if bias is None else (bias.per_query, _said(bias)), rule, heads,
        task.v.shape[-1],
        task.v.dtype, task.device, task.log_mass,
    )  # fmt: skip


def _said(bias: Relative) -> bool:
    """Whether the place of each query and key is given."""
    return bias.places is not None and bias.places.shift is None


def shape_of(task: Task) -> tuple[int, ...]:
    """The properties for which a structure is compiled again."""
    bias = task.term.relative
    distances = 0 if bias is None else 2 * bias.clip + 1
    return task.batch, task.num_queries, task.num_keys, distances, int(torch.is_grad_enabled())


def limit() -> type[Exception]:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def failed() -> type[Exception]:
    from torch._dynamo.exc import BackendCompilerFailed

    return BackendCompilerFailed


def summary(error: Exception) -> str:
    """How a compiler's message begins; the rest is the graph."""
    return " ".join(str(error).split())[:200]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, given: Lowered, mask: BlockMask | None, more: dict[str, Any],
    options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The function that is compiled. Eager, it would form all pairs, so it raises."""
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "backend 'flex' was not compiled, and uncompiled it forms all pairs: torch.compile is "
            "switched off"
        )
    scale, row, col, bias, table = given.scale, given.row, given.col, given.bias, given.table
    link, place, places = given.link, given.place, given.places

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        s = s.float()
        if link is not None:
            s = s if col is None else s + col[b, h, j]
            s = s if scale is None else s * scale[b, h, i]
            if row is not None:
                s = s + row[b, h, i]
                if link.cusp:
                    # An infinite slope at 0 magnifies rounding, as in blocks.py.
                    s = torch.where(s > -32 * 2.0**-23 * row[b, h, i].abs(), 0.0, s)
            s = link.log(s)
        elif col is not None and scale is not None:
            s = s + scale[b, h, i] * col[b, h, j]
        if bias is not None:
            s = s + bias[b, h, j]
        if table is not None:
            clip = (table.shape[-1] - 1) // 2
            away = i - j if place is None else i + place - j
            if places is not None:
                away = places[0][b, i] - places[1][b, j]
            away = away.clamp(-clip, clip) + clip
            s = s + table[b, h, i if table.shape[2] > 1 else 0, away]
        return s

    plain = link is None and col is None and bias is None and table is None
    result: Any = flex_attention(
        q, k, v, score_mod=None if plain else score, block_mask=mask, scale=1.0,
        enable_gqa=q.shape[1] != k.shape[1], kernel_options=options, **more,
    )  # fmt: skip
    if not more:
        return result, None
    out, mass = result
    return out, mass if isinstance(mass, Tensor) else mass.lse


def asking_for_mass() -> dict[str, Any]:
    """The argument for log_mass; its name depends on torch's version."""
    from torch.nn.attention import flex_attention as flex

    if "return_aux" in inspect.signature(flex.flex_attention).parameters:
        return {"return_aux": flex.AuxRequest(lse=True)}
    return {"return_lse": True}


masks: OrderedDict[tuple[object, ...], BlockMask] = OrderedDict()


def mask_of(task: Task) -> BlockMask | None:
    """The filter's block mask; masks of filters without data are cached."""
    rule = task.filter.simplify(task.num_queries, task.num_keys)
    if isinstance(rule, Full):
        return None
    tensors: list[Tensor] = []
    rule.encode(tensors)
    if tensors:
        return rule.block_mask(task.num_queries, task.num_keys, task.device)
    key = rule, task.num_queries, task.num_keys, task.device
    if key not in masks:
        masks[key] = rule.block_mask(task.num_queries, task.num_keys, task.device)
        if len(masks) > MASKS:
            masks.popitem(last=False)
    masks.move_to_end(key)
    return masks[key]
