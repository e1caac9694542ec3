"""Fused kernels on the GPU: any term of one or two factors, forward and backward, any filter.

What this must meet: memory linear in T, but for tables and for at most 2 GiB while a backward runs
(hopper.py); no silent TF32; the number per key, scales, rows and tables in float32, each with its
gradient and without atomics; feature parts read where they lie.
The kernels are in triton_kernels.py and triton_backward.py, in one opaque operator each way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...opaque.operators import fake, learns, operator
from ...term.biases import Scored
from ...term.factors import BEND, Apart, Factor, LogScale, Steered
from ...term.layout import repeat
from ...term.links import Link, Matern12, Matern32, Matern52, Power, Rational
from ...term.mix import Smoothed
from ...term.sinusoids import TURNS
from .. import Task
from ..runtime.launch import INTERPRETED
from . import plan as triton_plan
from . import run as triton_launch
from . import steering as triton_steer
from . import tables as bands
from .block_sizes import are_few
from .plan import NO_LOG, Bias, Inputs, Log, Numbers, Slot, Static, Steer, expanded, parse
from .slots import AsGiven, Joined, slots_of, summands, widths_of

name = "triton"
INSTALLED = importlib.util.find_spec("triton") is not None
MAX_WIDTH = 256
# Of a table that comes as numbers; and the pairs within reach of any: 8 GiB in half precision.
MAX_DISTANCES, MAX_PAIRS = 4097, 2**32
LINKS: dict[type, int] = {Power: 1, Rational: 2, Matern12: 3, Matern32: 4, Matern52: 5}


def refuses(task: Task) -> str | None:
    """Why the fused kernels cannot run this term, or None."""
    if (why := _unavailable(task.device.type)) is not None:
        return why
    if task.v.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, and came with {task.v.dtype}"
    if 0 in (task.batch, task.num_queries, task.num_keys):
        return "there is nothing to smooth: an empty batch or sequence"
    if task.batch * task.heads > 65535:
        return "there are more than 65535 heads in the batch"
    if task.term.signed:
        return "its weights may be negative"
    unknown = [link for link in task.term.links if type(link) not in LINKS]
    if unknown:
        return f"it has no kernel for the link {unknown[0].formula}"
    if not task.term.factors:
        return "it needs a dot product, and the term is a table alone"
    widths = widths_of(task.term)
    if isinstance(widths, str):
        return widths
    bias = task.term.relative
    if bias is not None and not isinstance(bias, Scored) and 2 * bias.clip + 1 > MAX_DISTANCES:
        return f"its table has more than {MAX_DISTANCES} distances"
    if (pairs := _pairs(task)) > MAX_PAIRS:
        return f"its table reaches {pairs:,} pairs, more than {MAX_PAIRS:,}"
    widest = max(*widths, task.v.shape[-1])
    if widest > MAX_WIDTH:
        return f"a part has {widest} features, more than {MAX_WIDTH}"
    rule = task.clauses
    return rule if isinstance(rule, str) else None


def memory(task: Task) -> int:
    """Bytes beyond the inputs and the output: scales, rows, log_mass and the table."""
    rows = task.batch * task.heads * task.num_queries
    return 12 * rows + _pairs(task) * bands.dtype_of(task.v.dtype).itemsize


def _pairs(task: Task) -> int:
    """Of a table, with those that fill up its lines."""
    if (bias := task.term.relative) is None:
        return 0
    width = bands.width_of(bias.clip, task.filter.causal, task.num_keys)
    return task.batch * task.heads * task.num_queries * width


def _unavailable(device: str) -> str | None:
    # The device first: on a CPU the answer is the same with Triton and without.
    if device != "cuda" and not INTERPRETED:
        return f"it runs on CUDA, not on {device}"
    return None if INSTALLED else "Triton is not installed"


def run(task: Task) -> Smoothed:
    return _run(task, slots_of(task.term, task.v.dtype, task.learns))


def run_all(tasks: Sequence[Task]) -> list[Smoothed]:
    """Terms of a sum: one by one, or two at once, so that keys are read once for both."""
    found, left = [], list(tasks)
    while left:
        first = left.pop(0)
        both = _together(first, left[0]) if left else None
        if both is not None:
            left.pop(0)
        found.append(run(first) if both is None else both)
    return found


def _together(first: Task, second: Task) -> Smoothed | None:
    """Two terms of the same features in one pass over keys: for few queries, if nothing learns."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not are_few(first.num_queries, first.num_keys):
        return None
    slots = summands(first.term, second.term)
    return None if slots is None else _run(first, slots, summed=True)


def _run(task: Task, slots: list[Factor], summed: bool = False) -> Smoothed:
    learns, compiling = task.learns, torch.compiler.is_compiling()
    dtype = task.v.dtype
    rule = task.clauses
    assert not isinstance(rule, str)
    none = task.v.new_empty(0, dtype=torch.float32)
    shape = (task.batch, task.heads, task.num_queries)
    scales, rows, cols, facts = [], [], [], []
    steer: Steer | None = None
    weights: list[Tensor] = []
    for n, f in enumerate(slots):
        number, mode, scale, log = 1.0, 0, none, NO_LOG
        # One slot at most, of those that are steered, is steered within the call.
        free = steer is None and not compiling
        if isinstance(f, Steered) and free and triton_steer.by_queries(f, task):
            mode, scale, steer = 2, f.base.log.float(), Steer(n, _bend(f.base), f.reach)
            weights = [f.w.float()]
        elif isinstance(f, Steered) and not compiling:
            mode, scale = 2, triton_steer.steered(f, shape, _bend(f.base), task.v.dtype)
        elif isinstance(f, Apart) and isinstance(f.given, LogScale) and not compiling:
            mode, scale, log = 1, f.given.log.float(), _bend(f.given)
        elif not isinstance(f.scale, Tensor):
            number = float(f.scale)
        elif f.scale.dim() == 4:
            mode, scale = 2, f.scale.float().expand(*shape, 1)[..., 0]
        else:
            mode, scale = 1, f.scale.float().reshape(-1)
        norm = isinstance(f, Apart)
        counts = summed or f.link is not None
        row = none if norm or not counts or f.row is None else _full(f.row, shape)
        col = none if norm or f.col is None else f.col.float()
        if isinstance(f, Joined):
            norm, col = True, f.extra.float()
        scales.append(scale)
        rows.append(row)
        cols.append(col)
        link, param = (0, 0.0) if f.link is None else _code(f.link)
        wants, keys = learns and f.learned.scale, learns and f.learned.k
        saves = learns and col.requires_grad
        unit = isinstance(f, AsGiven)
        facts.append(Slot(link, param, mode, number, norm, wants, saves, log, keys, unit))
    bias, clip = _bias(task, shape, triton_plan.one_sided(rule.numbers))
    q = [_of_all_heads(f.q.to(dtype), task.heads) for f in slots]
    k = [f.k.to(dtype) for f in slots]
    given = (*q, *k, task.v, *scales, *rows, *cols, *weights)
    static = Static(
        tuple(facts), rule.numbers, rule.simple, task.dropout_p, learns, rule.first,
        triton_plan.by_tokens(q[0]), clip, shape, steer, summed=summed,
    )  # fmt: skip
    data = (rule.lengths, rule.ids, task.seed)
    if compiling:
        out, lse, _, _ = fused(list(given), *bias, *data, static.text(), static.sizes())
    else:
        out, lse = _call(static, *data, *bias, *given)
    if task.log_mass and not summed:
        plain = [f.row for f in task.term.factors if f.link is None and f.row is not None]
        if plain:
            return Smoothed(out, sum(plain, lse))
    return Smoothed(out, lse)


def _bias(task: Task, shape: tuple[int, int, int], sided: bool) -> tuple[Bias, int]:
    """The term's table, or what it is the product of, and how far it reaches; -1 for none.

    `sided`: no key comes after its query.
    """
    bias = task.term.relative
    if bias is None:
        return Bias(), -1
    if isinstance(bias, Scored) and bias.clip > 0:
        asking = _of_all_heads(bias.q.to(task.v.dtype), task.heads)
        asking = expanded(asking, task.batch, *asking.shape[1:])
        rows = bias.past() if sided else bias.rows
        rows = rows if rows.dtype == task.v.dtype else rows.float()
        return Bias(asking=asking, rows=rows), bias.clip
    table = _full_table(shape, bias.table)
    return Bias(table=table), table.shape[-1] // 2


def _of_all_heads(q: Tensor, heads: int) -> Tensor:
    """Queries of every head; one head for all is copied, as kernels read head by head."""
    return q if q.shape[1] == heads else repeat(q, q.shape[0], heads).contiguous()


def _bend(scale: LogScale) -> Log:
    """How a kernel forms the scale."""
    if scale.bounds is None:
        return (1, scale.offset, 0.0, 0.0, BEND)
    return (2, scale.offset, scale.bounds[0] + BEND, scale.bounds[1] - BEND, BEND)


def _full(row: Tensor, shape: tuple[int, int, int]) -> Tensor:
    return repeat(row, shape[0], shape[1]).float()


def _full_table(shape: tuple[int, int, int], table: Tensor) -> Tensor:
    """Of all heads and queries, reaching one place each way at least: its ends are two columns."""
    return table.float().expand(-1, *shape[1:], max(3, table.shape[-1]))


def _code(link: Link) -> tuple[int, float]:
    param = getattr(link, "degree", getattr(link, "alpha", 0.0))
    return LINKS[type(link)], param


class _Turn(torch.autograd.Function):
    """Coefficients of sinusoids turned by their places, in one pass each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, waves: Tensor) -> Tensor:
        ctx.save_for_backward(waves)
        return _turned(x, waves, 1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (waves,) = ctx.saved_tensors
        return _turned(grad, waves, -1.0), None


def _turned(x: Tensor, waves: Tensor, sign: float) -> Tensor:
    return triton_launch.turn(triton_plan.readable_rows(x), waves, sign)


def _turn(c: Tensor, waves: Tensor) -> Tensor | None:
    if _unavailable(c.device.type):
        return None
    if _derives(c.requires_grad and torch.is_grad_enabled()):
        return _Turn.apply(c, waves)
    return _turned(c, waves, 1.0)


TURNS["cuda"] = _turn


def _call(static: Static, *given: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log_mass; where nothing learns, without what autograd takes of the host."""
    if _derives(static.trains):
        return _Fused.apply(static, *given)
    out, lse, *_ = _start(static, *given)
    return out, lse


def _derives(trains: bool) -> bool:
    """Whether a call may have a derivative: as it trains, or another, which has to be refused."""
    other = forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()
    return trains or other


class _Fused(torch.autograd.Function):
    """The kernels as they run outside of a compiled graph, with less to pay for each call."""

    @staticmethod
    def forward(
        ctx: Any, static: Static, lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None,
        table: Tensor | None, asking: Tensor | None, by: Tensor | None, *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        given = (lengths, ids, seed, table, asking, by, *tensors)
        out, lse, low, *ready = _start(static, *given)
        ctx.static, ctx.count = static, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, low, *ready, *given)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        grad_out = torch.zeros_like(saved[0]) if grad_out is None else grad_out
        grads = _back(ctx.static, grad_out, grad_lse, *saved)
        return None, None, None, None, *_slots_of(grads[ctx.count :]), *grads[: ctx.count]


def _start(
    static: Static, lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, *rest: Any
) -> list[Tensor]:
    """Output, log_mass, what rounding took, `Numbers`, and scales that queries steered.

    `rest` is a bias and the tensors.
    """
    inputs = Inputs.of(rest[3:], Bias(*rest[:3]), lengths, ids, seed)
    scales = [] if static.steer is None else [triton_steer.scaled(static.steer, inputs, rest[-1])]
    out, lse, low, ready = triton_launch.forward(inputs, static)
    return [out, lse, low, *ready._replace(band=bands.kept(ready.band)), *scales]


def _back(
    static: Static, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor,
    low: Tensor, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    """The gradients of tensors and bias; `rest` is what the forward formed and what it got."""
    count, steer = len(Numbers._fields), static.steer
    ready, rest = Numbers(*rest[:count]), rest[count:]
    scale: Any
    scale, rest = (None, rest) if steer is None else (rest[0], rest[1:])
    (lengths, ids, seed), bias = rest[:3], Bias(*rest[3:6])
    inputs = Inputs.of(rest[6:], bias, lengths, ids, seed)
    log = None
    if steer is not None:
        log, inputs.scale[steer.slot] = inputs.scale[steer.slot], scale
    band = bands.again(ready.band, bias, static, inputs.v)
    grads = triton_launch.backward(grad_out, grad_lse, out, lse, low, inputs, static, band, ready)
    if log is not None:
        triton_steer.pass_on(static, grads, inputs.q, rest[-1], log)
    return grads


def _slots_of(grads: list[Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a bias in its order: a table's, or those of queries and rows."""
    if len(grads) == 2:
        return None, grads[0], grads[1]
    return (grads[0] if grads else None), None, None


@operator
def fused(
    tensors: list[Tensor], table: Tensor | None, asking: Tensor | None, rows: Tensor | None,
    lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, static: str, sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The forward for compiled graphs: (out, log_mass, what rounding took from out, the band)."""
    known = parse(static, sizes)
    out, lse, low, *_, band = _start(known, lengths, ids, seed, table, asking, rows, *tensors)
    return out, lse, low, band


@fake(fused)
def _(tensors: list[Tensor], table: Tensor | None, asking: Tensor | None, rows: Tensor | None,
      lengths: Any, ids: Any, seed: Any, static: str, sizes: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    known, v = parse(static, sizes), Inputs.of(tuple(tensors), Bias(), None, None, None).v
    out = triton_plan.empty(v, *known.shape, v.shape[-1], known.tokens)
    lse = v.new_empty(known.shape, dtype=torch.float32)
    low = triton_launch.empty_low(out, triton_launch.keeps_low(known, v))
    band = v.new_empty(0)
    if known.clip >= 0:
        shape = bands.shape_of(Bias(table, asking, rows), known, v.shape[2])
        band = bands.kept(v.new_empty(shape, dtype=bands.dtype_of(v.dtype)))
    return out, lse, low, band


@operator
def fused_backward(
    grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, low: Tensor, band: Tensor,
    tensors: list[Tensor], table: Tensor | None, asking: Tensor | None, rows: Tensor | None,
    lengths: Tensor | None, ids: Tensor | None, seed: Tensor | None, static: str, sizes: list[int],
) -> list[Tensor]:  # fmt: skip
    """The backward for compiled graphs."""
    known, bias = parse(static, sizes), Bias(table, asking, rows)
    inputs = Inputs.of(tuple(tensors), bias, lengths, ids, seed)
    # Of `Numbers` only the band was kept.
    band = bands.again(band, bias, known, inputs.v)
    return triton_launch.backward(grad_out, grad_lse, out, lse, low, inputs, known, band)


@fake(fused_backward)
def _(grad_out: Any, grad_lse: Any, out: Any, lse: Any, low: Any, band: Any, tensors: list[Tensor],
      table: Tensor | None, asking: Tensor | None, rows: Tensor | None, lengths: Any, ids: Any,
      seed: Any, static: str, sizes: list[int]) -> list[Tensor]:  # fmt: skip
    known = parse(static, sizes)
    grads = []
    for n, x in enumerate(tensors):
        features = n <= 2 * len(known.slots) and x.shape[:2] == known.shape[:2]
        # Sums over heads or sequences that share a tensor are contiguous.
        grad = x.new_empty(x.shape)
        if features and known.tokens:
            batch, heads, length, width = x.shape
            grad = triton_plan.empty(x, batch, heads, length, width, True)
        grads.append(grad)
    return grads + [x.new_empty(x.shape) for x in (table, asking, rows) if x is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, table, asking, rows, lengths, ids, seed, ctx.static, ctx.sizes = inputs
    ctx.save_for_backward(*output, table, asking, rows, lengths, ids, seed, *tensors)


def _backward(
    ctx: Any, grad_out: Tensor, grad_lse: Tensor, _low: Any, _band: Any
) -> tuple[Any, ...]:
    out, lse, low, band, *rest = ctx.saved_tensors
    options, tensors = rest[:6], rest[6:]
    grads = fused_backward(
        grad_out, grad_lse, out, lse, low, band, tensors, *options, ctx.static, ctx.sizes
    )
    of_bias = _slots_of(grads[len(tensors) :])
    return grads[: len(tensors)], *of_bias, None, None, None, None, None


learns(fused, _backward, _save)
