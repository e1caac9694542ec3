"""Fused kernels on the GPU: any term of one or two factors, forward and backward, any filter.

Requirements: memory linear in T, except for tables and at most 2 GiB during a backward (hopper/); no
silent TF32; numbers per key, scales, rows and tables in float32, each with its gradient and without
atomics; feature parts are read in place, without concatenation.

This file says what runs and turns a term into the tensors of a call. autograd.py runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...term.biases import QueryTable
from ...term.factors import BEND, DistanceFactor, Factor, LogScale, QueryBandwidthFactor
from ...term.layout import repeat
from ...term.learned import UNLEARNED
from ...term.links import Link, Matern12, Matern32, Matern52, Power, Rational
from ...term.mix import Smoothed
from .. import Task
from ..runtime.device import INSTALLED, INTERPRETED
from . import run as passes
from . import steering, tables
from .autograd import call, fused
from .codes import MATERN12, MATERN32, MATERN52, POWER, RATIONAL
from .layout import by_tokens, expanded
from .plan import Bias
from .sinusoids import with_table
from .slots import AsGiven, Joined, slots_of, summands, widths_of
from .static import NO_LOG, Log, Slot, Static, are_few, one_sided

name = "triton"
dense_mask = False
MAX_WIDTH = 256
# Of a table of numbers; and the pairs within reach of any table: 8 GiB in half precision.
MAX_DISTANCES, MAX_PAIRS = 4097, 2**32
LINKS: dict[type, int] = {
    Power: POWER, Rational: RATIONAL, Matern12: MATERN12, Matern32: MATERN32, Matern52: MATERN52,
}  # fmt: skip


def refuses(task: Task) -> str | None:
    """Why the fused kernels cannot run this term, or None."""
    if (why := _unavailable(task.device.type)) is not None:
        return why
    if task.v.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes in float32, got {task.v.dtype}"
    if 0 in (task.batch, task.num_queries, task.num_keys):
        return "the batch or the sequence is empty"
    if task.batch * task.heads > 65535:
        return "there are more than 65535 heads in the batch"
    if task.term.signed:
        return "its weights may be negative"
    unknown = [link for link in task.term.links if type(link) not in LINKS]
    if unknown:
        return f"it has no kernel for the link {unknown[0].formula}"
    task = with_table(task, MAX_WIDTH)
    if not task.term.factors:
        return "it needs a dot product, and the term is a table alone"
    widths = widths_of(task.term)
    if isinstance(widths, str):
        return widths
    bias = task.term.relative
    if bias is not None and bias.places is not None:
        return "its table of distances is for the usual places, and others are said"
    if bias is not None and not isinstance(bias, QueryTable) and 2 * bias.clip + 1 > MAX_DISTANCES:
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
    task = with_table(task, MAX_WIDTH)
    rows = task.batch * task.heads * task.num_queries
    return 12 * rows + _pairs(task) * tables.dtype_of(task.v.dtype).itemsize


def _pairs(task: Task) -> int:
    """The number of pairs of a table's band, with padding."""
    if (bias := task.term.relative) is None:
        return 0
    width = tables.width_of(bias.clip, task.filter.causal, task.num_keys)
    return task.batch * task.heads * task.num_queries * width


def kernels(device: torch.device) -> str:
    """Which kernels run on a device, and why."""
    tier = passes.TIER
    return "portable Triton kernels" if tier is None else str(tier.reason(device))


def _unavailable(device: str) -> str | None:
    # The device first, so that on a CPU the answer does not depend on Triton.
    if device != "cuda" and not INTERPRETED:
        return f"it runs on CUDA, not on {device}"
    return None if INSTALLED else "Triton is not installed"


def keeps_nan(tasks: Sequence[Task]) -> bool:
    """Whether NaN stays in the rows that see it, without cleaned inputs."""
    return True


def run(tasks: Sequence[Task]) -> list[Smoothed]:
    """Terms of a sum: one by one, or two at once, so that keys are read once for both."""
    found, left = [], list(tasks)
    while left:
        first = left.pop(0)
        both = _together(first, left[0]) if left else None
        if both is not None:
            left.pop(0)
        found.append(_alone(first) if both is None else both)
    return found


def _alone(task: Task) -> Smoothed:
    task = with_table(task, MAX_WIDTH)
    return _run(task, slots_of(task.term, task.v.dtype, task.learns))


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
    for f in slots:
        number, mode, scale, log = 1.0, 0, none, NO_LOG
        if isinstance(f, QueryBandwidthFactor) and not compiling:
            mode, scale = 2, steering.steered(f, shape, _bend(f.base), task.v.dtype)
        elif isinstance(f, DistanceFactor) and isinstance(f.given, LogScale) and not compiling:
            mode, scale, log = 1, f.given.log.float(), _bend(f.given)
        elif not isinstance(f.scale, Tensor):
            number = float(f.scale)
        elif f.scale.dim() == 4:
            mode, scale = 2, f.scale.float().expand(*shape, 1)[..., 0]
        else:
            mode, scale = 1, f.scale.float().reshape(-1)
        norm = isinstance(f, DistanceFactor)
        counts = summed or f.link is not None
        row = none if norm or not counts or f.row is None else _full(f.row, shape)
        col = none if norm or f.col is None else f.col.float()
        if isinstance(f, Joined):
            norm, col = True, f.extra.float()
        scales.append(scale)
        rows.append(row)
        cols.append(col)
        link, param = (0, 0.0) if f.link is None else _code(f.link)
        learned = f.learned if learns else UNLEARNED
        saves = learns and col.requires_grad
        unit = isinstance(f, AsGiven)
        wants, keys = learned.scale, learned.k
        facts.append(Slot(link, param, mode, number, norm, wants, saves, log, keys, unit))
    bias, clip = _bias(task, shape, one_sided(rule.cases))
    q = [_of_all_heads(f.q.to(dtype), task.heads) for f in slots]
    k = [f.k.to(dtype) for f in slots]
    given = (*q, *k, task.v, *scales, *rows, *cols)
    static = Static(
        tuple(facts), rule.cases, rule.simple, task.dropout_p, learns, rule.first,
        by_tokens(q[0]), clip, shape, summed=summed,
    )  # fmt: skip
    data = (rule.lengths, rule.ids, task.seed)
    if compiling:
        out, lse, _, _ = fused(list(given), *bias, *data, static.text(), static.sizes())
    else:
        out, lse = call(static, *data, *bias, *given)
    if task.log_mass and not summed:
        plain = [f.row for f in task.term.factors if f.link is None and f.row is not None]
        if plain:
            return Smoothed(out, sum(plain, lse))
    return Smoothed(out, lse)


def _bias(task: Task, shape: tuple[int, int, int], sided: bool) -> tuple[Bias, int]:
    """The term's table, or the queries and rows of its product, and its reach; -1 for none.

    `sided`: no key comes after its query.
    """
    bias = task.term.relative
    if bias is None:
        return Bias(), -1
    if isinstance(bias, QueryTable) and bias.clip > 0:
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
