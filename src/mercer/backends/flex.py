"""torch's FlexAttention: a term of one dot product, with any filter, yours too.

What this must meet: it runs compiled or raises, since uncompiled it forms all pairs; the number per
key, scales, rows and tables are captured in float32; and no captured tensor needs a gradient, which
torch gathers by atomics, slowly and never twice the same.

Dynamo counts compilations by code object and gives up at a limit. So every structure (link, what is
captured, kind of filter, dtype, widths) has a code object of its own; at the limit we raise.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..filters import Full
from ..term.layout import at_least, join, repeat
from ..term.links import Link, Matern12, Matern32, Matern52, Power, Rational
from ..term.mix import Smoothed
from ..term.term import Term
from . import Task

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

name = "flex"
INSTALLED = importlib.util.find_spec("triton") is not None
LINKS = (Power, Rational, Matern12, Matern32, Matern52)
# What its kernels take; narrower features and values are filled up with zeros.
MIN_WIDTH, MAX_WIDTH = 16, 256
# How often one structure may be compiled: for other lengths, with and without gradients, and so on.
VARIANTS = 32
COMPILER = "inductor"
MASKS = 16
# How many queries at a time are asked whether they see a key that is not finite.
ROWS = 1024


def refuses(task: Task) -> str | None:
    """Why FlexAttention cannot run this term, or None."""
    return (
        _refuses_term(task)
        or _refuses_place(task)
        or _refuses_gradient(task)
        or _refuses_another_variant(task)
    )


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: features, what is captured, and the blocks' list."""
    width = max(MIN_WIDTH, sum(f.width for f in task.term.factors))
    tokens = task.num_queries + task.num_keys
    bias = task.term.relative
    each = 1 if bias is None or not bias.per_query else task.num_queries
    captured = 3 * tokens + (0 if bias is None else each * (2 * bias.clip + 1))
    blocks = math.ceil(task.num_queries / 128) * math.ceil(task.num_keys / 128)
    features = tokens * width * task.v.dtype.itemsize
    return task.batch * task.heads * (features + 4 * captured) + 16 * blocks * task.batch


def run(task: Task) -> Smoothed:
    lowered = lower(task)
    heads = lowered.k.shape[1]
    v = task.v
    if heads != v.shape[1] or (task.heads // heads).bit_count() != 1:
        heads = task.heads
    k, v = (repeat(x, task.batch, heads) for x in (lowered.k, v))
    q = repeat(lowered.q, task.batch, task.heads)
    compiled = _compiled(task)
    try:
        out, lse = compiled(
            *(at_least(x, MIN_WIDTH) for x in (q, k, v)),
            lowered,
            _mask(task),
            _asking_for_mass() if task.log_mass else {},
            # No setting of torch turns float32 into TF32 here.
            {"FLOAT32_PRECISION": "'ieee'"} if task.device.type == "cuda" else None,
        )
    except _limit() as error:
        compiled.full = True
        raise RuntimeError(
            f"backend 'flex' was compiled {VARIANTS} times for this kernel and filter, and this "
            "shape needs another time; name another backend, or call torch.compiler.reset()"
        ) from error
    compiled.shapes.add(_shape(task))
    out = out[..., : task.v.shape[-1]]
    if lse is not None:
        for f in task.term.factors:
            lse = lse if f.row is None or f.link is not None else lse + f.row
    spoiled = _spoiled(task)
    if spoiled is not None:
        out = out.masked_fill(spoiled[..., None], math.nan)
        lse = None if lse is None else lse.masked_fill(spoiled, math.nan)
    return Smoothed(out, lse)


def _refuses_term(task: Task) -> str | None:
    term = task.term
    linked = [f for f in term.factors if f.link is not None]
    plain = [f for f in term.factors if f.link is None]
    if term.signed:
        return "its weights may be negative"
    unknown = [link for link in term.links if type(link) not in LINKS]
    if unknown:
        return f"it does not know the link {unknown[0].formula}"
    if len(linked) > 1 or (linked and any(f.width for f in plain)):
        return "it forms one dot product, and the term needs two"
    if sum(f.keyed and f.per_query for f in plain) > (0 if linked else 1):
        return "a bandwidth of each query cannot join other factors"
    width = sum(f.width for f in linked or plain)
    if max(width, task.v.shape[-1]) > MAX_WIDTH:
        widest = max(width, task.v.shape[-1])
        return f"a part has {widest} features, more than {MAX_WIDTH}"
    return None


def _refuses_place(task: Task) -> str | None:
    device = task.device.type
    if (why := _unavailable(device)) is not None:
        return why
    if torch.compiler.is_compiling():
        return "inside torch.compile the limit on compilations is not its own"
    if task.v.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, and came with {task.v.dtype}"
    if 0 in (task.batch, task.num_queries, task.num_keys):
        return "there is nothing to smooth: an empty batch or sequence"
    if task.dropout_p:
        return "it has no dropout"
    if task.log_mass and device == "cpu":
        return "it gives no log_mass on cpu"
    return None


def _unavailable(device: str) -> str | None:
    if device == "cuda":
        return None if INSTALLED else "Triton is not installed"
    if device != "cpu":
        return f"it runs on CUDA and CPU, not on {device}"
    if COMPILER == "inductor" and not torch.cpu._is_avx2_supported():
        return "on cpu torch compiles it with AVX2 only"
    return None


def _refuses_gradient(task: Task) -> str | None:
    if _learns_captured(task.term):
        return (
            "torch gathers the gradient of a number per key, per query or per distance by atomics, "
            "too slowly to use"
        )
    if not task.learns:
        return None
    if task.device.type == "cpu":
        return "torch has no backward for it on cpu"
    if any(isinstance(link, Power) for link in task.term.links):
        return "the gradient of log |s| is not finite where s = 0"
    if torch.are_deterministic_algorithms_enabled():
        return "torch does not promise the same bits for its backward"
    return None


def _refuses_another_variant(task: Task) -> str | None:
    known = _structures.get(_structure(task))
    if known is None or not known.full or _shape(task) in known.shapes:
        return None
    return f"this kernel and filter were compiled {VARIANTS} times, and not for this shape"


def _learns_captured(term: Term) -> bool:
    """Whether a number that a score reads beside the dot product needs a gradient."""
    if term.relative is not None and term.relative.learned:
        return True
    linked = [f.learned for f in term.factors if f.link is not None]
    keyed = [f.learned for f in term.factors if f.link is None and f.keyed]
    return any(x.scale or x.row or x.col for x in linked) or any(x.scale or x.col for x in keyed)


@dataclass(frozen=True)
class Lowered:
    """link(scale_i (<q_i, k_j> + col_j) + row_i) + bias_j + table; without a link, q is scaled."""

    q: Tensor  # [B or 1, H or 1, Q, E]
    k: Tensor  # [B or 1, h, K, E]
    scale: Tensor | None  # [B, H, Q]
    row: Tensor | None  # [B, H, Q]
    col: Tensor | None  # [B, H, K]
    bias: Tensor | None  # [B, H, K]
    table: Tensor | None  # [B, H, Q or 1, distances]
    link: Link | None
    place: Tensor | None  # of the first query, K - Q


def lower(task: Task) -> Lowered:
    """Features of one dot product in the dtype of values, and the numbers around it in float32."""
    dtype, shape = task.v.dtype, (task.batch, task.heads)
    linked = [f for f in task.term.factors if f.link is not None]
    plain = [f for f in task.term.factors if f.link is None]
    scale = row = col = bias = table = place = None
    if linked:
        (f,) = linked
        q, k = f.q.to(dtype), f.k.to(dtype)
        scale = _per_head_and_query(f.scale, task)
        row = None if f.row is None else repeat(f.row.float(), *shape)
        col = None if f.col is None else repeat(f.col.float(), *shape)
    else:
        # One rounding: the scale meets the features in float32.
        parts = [f for f in plain if f.width]
        q = join([(f.q.float() * f.scale).to(dtype) for f in parts] or [_none(task)])
        k = join([f.k.to(dtype) for f in parts] or [_none(task, keys=True)])
    for f in plain:
        if f.col is None:
            continue
        number = repeat(f.col.float(), *shape)
        if f.per_query:
            scale, col = _per_head_and_query(f.scale, task), number
            continue
        number = number * (f.scale[..., 0] if isinstance(f.scale, Tensor) else f.scale)
        bias = number if bias is None else bias + number
    if task.term.table is not None:
        table = repeat(task.term.table.float(), *shape)
        # On the device, so that another length is no reason to compile again.
        place = q.new_full((), task.num_keys - task.num_queries, dtype=torch.int32)
    link = linked[0].link if linked else None
    return Lowered(q, k, scale, row, col, bias, table, link, place)


def _none(task: Task, *, keys: bool = False) -> Tensor:
    length = task.num_keys if keys else task.num_queries
    return task.v.new_zeros(1, task.heads, length, MIN_WIDTH)


def _per_head_and_query(scale: Tensor | float, task: Task) -> Tensor:
    if not isinstance(scale, Tensor):
        scale = task.v.new_full((1, 1, 1, 1), scale, dtype=torch.float32)
    return scale.float().expand(task.batch, task.heads, task.num_queries, 1)[..., 0]


@dataclass
class _Compiled:
    """One structure: its function, what it was compiled for, and whether there can be more."""

    function: Callable[..., tuple[Tensor, Tensor | None]]
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    full: bool = False

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor | None]:
        from torch._dynamo import config

        with config.patch(recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
            return self.function(*arguments)


_structures: dict[tuple[object, ...], _Compiled] = {}


def _compiled(task: Task) -> _Compiled:
    key = _structure(task)
    if key not in _structures:
        # What dynamo learns of changing lengths it keeps by name.
        code = _attend.__code__.replace(co_name=f"attend_{len(_structures)}")
        own = FunctionType(code, _attend.__globals__)
        # On CPU what torch 2.13 generates for any length does not compile: so a length at a time.
        dynamic = False if task.device.type == "cpu" and COMPILER == "inductor" else None
        compiled = torch.compile(own, fullgraph=True, backend=COMPILER, dynamic=dynamic)
        _structures[key] = _Compiled(compiled)
    return _structures[key]


def _structure(task: Task) -> tuple[object, ...]:
    """All that asks for a kernel of its own, whatever the lengths."""
    term = task.term
    bias = term.relative
    rule = re.sub(r"\d+", "#", task.filter.simplify(task.num_queries, task.num_keys).encode([]))
    factors = tuple((f.link, f.width, f.keyed, f.has_row, f.per_query) for f in term.factors)
    heads = task.heads, task.v.shape[1], *(f.k.shape[1] for f in term.factors)
    return (
        factors, None if bias is None else bias.per_query, rule, heads, task.v.shape[-1],
        task.v.dtype, task.device, task.log_mass,
    )  # fmt: skip


def _shape(task: Task) -> tuple[int, ...]:
    bias = task.term.relative
    distances = 0 if bias is None else 2 * bias.clip + 1
    return task.batch, task.num_queries, task.num_keys, distances, int(torch.is_grad_enabled())


def _limit() -> type[Exception]:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return FailOnRecompileLimitHit


def _attend(
    q: Tensor, k: Tensor, v: Tensor, given: Lowered, mask: BlockMask | None, more: dict[str, Any],
    options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What is compiled. Run as it stands it would form all pairs, so it raises."""
    from torch.nn.attention.flex_attention import flex_attention

    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "backend 'flex' was not compiled, and uncompiled it forms all pairs: torch.compile is "
            "switched off"
        )
    scale, row, col, bias, table = given.scale, given.row, given.col, given.bias, given.table
    link, place = given.link, given.place

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
        if table is not None and place is not None:
            clip = (table.shape[-1] - 1) // 2
            away = (i + place - j).clamp(-clip, clip) + clip
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


def _asking_for_mass() -> dict[str, Any]:
    """The argument that asks for log_mass: its name depends on torch's version."""
    from torch.nn.attention import flex_attention as flex

    if "return_aux" in inspect.signature(flex.flex_attention).parameters:
        return {"return_aux": flex.AuxRequest(lse=True)}
    return {"return_lse": True}


_masks: OrderedDict[tuple[object, ...], BlockMask] = OrderedDict()


def _mask(task: Task) -> BlockMask | None:
    """The filter's block mask; those that read no data are kept."""
    rule = task.filter.simplify(task.num_queries, task.num_keys)
    if isinstance(rule, Full):
        return None
    tensors: list[Tensor] = []
    rule.encode(tensors)
    if tensors:
        return rule.block_mask(task.num_queries, task.num_keys, task.device)
    key = rule, task.num_queries, task.num_keys, task.device
    if key not in _masks:
        _masks[key] = rule.block_mask(task.num_queries, task.num_keys, task.device)
        if len(_masks) > MASKS:
            _masks.popitem(last=False)
    _masks.move_to_end(key)
    return _masks[key]


def _spoiled(task: Task) -> Tensor | None:
    """The queries that are not finite or see a key that is not, [B, H, Q]."""
    bad_queries, bad_keys = task.bad_queries, task.bad_keys
    if bad_queries is None or bad_keys is None:
        return None
    # One look at the data is cheaper than a second pass over all pairs.
    if not bool(bad_queries.any() | bad_keys.any()):
        return None
    start = task.num_keys - task.num_queries
    b = torch.arange(task.batch, device=task.device)[:, None, None, None]
    j = torch.arange(task.num_keys, device=task.device)
    hits = []
    for places in torch.arange(start, task.num_keys, device=task.device).split(ROWS):
        seen = torch.as_tensor(task.filter.sees(b, places[:, None], j, start), device=task.device)
        seen = seen.expand(task.batch, 1, len(places), task.num_keys)
        hits.append((seen.float() @ bad_keys.float()[..., None])[..., 0] > 0)
    return bad_queries | torch.cat(hits, -1)
