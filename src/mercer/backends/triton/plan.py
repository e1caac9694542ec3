"""Plans of the fused kernels: what follows from shapes, strides and options, computed once.

Block sizes are in block_sizes.py, kernels are chosen in select.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import Launch
from .codes import EACH, FLAT, GENERAL, IDENTITY, PLAIN, POLY, POWER, RATIONAL, SPLIT_QUERIES
from .filters import Clause
from .layout import next_power_of_two, readable_rows, strides_of, tma_readable
from .static import Slot, Static, one_sided, part_of_one


class Bias(NamedTuple):
    """The bias on the logits: a table, or queries times rows, or nothing."""

    table: Tensor | None = None  # [B or 1, H, Q, 2c + 1]
    asking: Tensor | None = None  # [B, H, Q, D]
    # [1 or H, 2c + 1, D], or c + 1 rows of the distances i - j from 0 on, if no query looks ahead.
    rows: Tensor | None = None


@dataclass(eq=False)
class Inputs:
    """The tensors of one call, in lists with one entry for each slot."""

    q: list[Tensor]
    k: list[Tensor]
    v: Tensor
    scale: list[Tensor]
    row: list[Tensor]
    col: list[Tensor]
    bias: Bias
    lengths: Tensor | None
    ids: Tensor | None
    seed: Tensor | None

    @classmethod
    def of(
        cls, tensors: tuple[Tensor, ...], bias: Bias, lengths: Tensor | None, ids: Tensor | None,
        seed: Tensor | None,
    ) -> Inputs:  # fmt: skip
        """From q, k, v, scale, row and col one after the other.

        Features are made to lie side by side in memory, and small tensors contiguous.
        """
        n = len(tensors) // 5
        features = [readable_rows(x) for x in tensors[: 2 * n + 1]]
        small = [x.contiguous() for x in tensors[2 * n + 1 : 4 * n + 1]]
        return cls(
            features[:n], features[n : 2 * n], features[2 * n], small[:n], small[n:],
            list(tensors[4 * n + 1 : 5 * n + 1]), bias, lengths, ids, seed,
        )  # fmt: skip


class Numbers(NamedTuple):
    """Numbers formed from the inputs before a kernel starts, and kept for the backward."""

    col0: Tensor
    col1: Tensor
    row0: Tensor
    row1: Tensor
    columns: Tensor  # the first slot's numbers per key as columns of a product, or as they are
    band: Tensor  # the table's values for all pairs within its reach, or empty


class Rows(NamedTuple):
    """Numbers per query for the passes of the backward."""

    grad_out: Tensor
    lse2: Tensor  # log_mass to the base 2
    delta: Tensor  # <dO, O> - dlog_mass
    grad_lse: Tensor  # dlog_mass
    counters: Tensor  # of every head, and one more: see `counters`


def counters(like: Tensor) -> Tensor:
    """Memory for the tickets of the pass over keys, from its first head on.

    A second pass, of the second slot, has those of the next head, or one more.
    """
    return like.new_empty(like.shape[0] * like.shape[1] + 1, dtype=torch.int32)


@dataclass(eq=False)
class Plan:
    """Everything that follows from shapes, strides and options."""

    static: Static
    device: torch.device
    dtype: torch.dtype
    strides: tuple[int, ...]
    widths: tuple[int, int, int]  # of the two slots' features and of the values
    num_keys: int
    constants: dict[str, Any]
    spread: bool  # numbers per key are columns, in place of the second slot's keys
    aligned: tuple[bool, ...]  # whether TMA can read the two q, the two k, v, a band
    bounded: bool  # the first slot is a distance, with no number per key beside it
    launches: dict[Any, Launch] = field(default_factory=dict)

    @property
    def still(self) -> bool:
        """Whether no running maximum is needed: weights of distances are at most 1.

        Not in float16, where they underflow.
        """
        return self.bounded and self.dtype != torch.float16

    def numbers(self, seed: Tensor | None) -> tuple[int | float, ...]:
        s = self.static
        drawn = 0 if seed is None else int(seed) % 2**31
        return (
            *self.strides, s.shape[2], self.num_keys, s.first, *self.widths, drawn,
            s.slots[0].number, s.slots[-1].number, s.dropout_p,
        )  # fmt: skip


_plans: dict[tuple[Any, ...], Plan] = {}


def plan(x: Inputs, static: Static, ready: Numbers) -> Plan:
    """The plan of a call; those with the same shapes share one."""
    read = (*x.q, *x.k, x.v, ready.columns, ready.col0, ready.col1)
    options = [y for y in (ready.band, x.lengths, x.ids) if y is not None]
    parts: list[Any] = [static, x.v.device, x.lengths is None]
    # Triton and TMA tell apart addresses that are divisible by 16 and others.
    for y in (*read, *options):
        parts += (y.dtype, y.shape, y.stride(), y.data_ptr() % 16)
    for y in (*x.scale, *x.row, *x.col):
        parts += (y.numel(), y.data_ptr() % 16)
    key = tuple(parts)
    found = _plans.get(key)
    if found is None:
        if len(_plans) > 4096:
            _plans.clear()
        found = _plans[key] = _make(x, static, ready)
    return found


def _make(x: Inputs, static: Static, ready: Numbers) -> Plan:
    slots = static.slots
    batch, heads, _ = static.shape
    c0, c1, row0, row1, columns, band = ready
    two, spread = len(slots) == 2, columns.dim() == 4
    # Summed terms share their features.
    more = two and not static.summed
    q0, q1, k0, k1, v = x.q[0], x.q[-1], x.k[0], columns if spread else x.k[-1], x.v
    widths = (q0.shape[-1], q1.shape[-1], v.shape[-1])
    e0, e1, dv = (next_power_of_two(w) for w in widths)
    strides = [s for y in (q0, k0, q1, k1, v) for s in strides_of(y, batch)]
    strides += [s for y in (c0, c1) for s in strides_of(y, batch)[:2]]
    strides.append(0 if x.ids is None or x.ids.shape[0] == 1 else x.ids.stride(0))
    strides += [0 if y.numel() == 1 else 1 for y in (x.scale[0], x.scale[-1])]
    strides += [*strides_of(band, batch)[:2], band.shape[-1]]
    strides += [heads, *(heads // y.shape[1] for y in (k0, k1, v))]
    (has0, of0), (has1, of1) = (_per_key(y, static) for y in (c0, c1))
    strides += [of0, of1]
    form, same = _form(static, v.dtype)
    constants = {
        "E0": e0,
        "E1": e1 if more else 0,
        "V": dv,
        "LINK0": slots[0].link,
        "LINK1": slots[-1].link,
        "PARAM0": slots[0].param,
        "PARAM1": slots[-1].param,
        "MODE0": slots[0].mode,
        "MODE1": slots[-1].mode,
        "LOG0": slots[0].log,
        "LOG1": slots[-1].log,
        "HAS_COL0": has0,
        "HAS_COL1": two and has1,
        "HAS_ROW0": row0.numel() > 0,
        "HAS_ROW1": two and row1.numel() > 0,
        "CLIP": static.clip,
        "SIDED": one_sided(static.filter),
        "FILTER": tuple(clause.numbers() for clause in static.filter),
        "SIMPLE": static.simple,
        "FORM": form,
        "SAME": same,
        "EVEN": widths[0] == e0 and widths[2] == dv and (not more or widths[1] == e1),
        "DROPOUT": static.dropout_p > 0.0,
        "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32",
    }
    aligned = tuple(tma_readable(y) for y in (q0, q1, k0, k1, v, band))
    return Plan(
        static, v.device, v.dtype, tuple(strides), widths, v.shape[2], constants, spread, aligned,
        bounded=slots[0].norm and not x.col[0].numel(),
    )  # fmt: skip


def _per_key(col: Tensor, static: Static) -> tuple[int, int]:
    """Whether there are numbers per key, True or EACH, and how many heads share a number."""
    _, heads, num_queries = static.shape
    if col.dim() < 3:
        return False, 1
    if static.grouped and col.shape[1] > heads:
        return EACH, heads * num_queries // col.shape[1]
    return True, heads // col.shape[1]


def _form(static: Static, dtype: torch.dtype) -> tuple[int, bool]:
    """FORM (see codes.py), and whether two slots are parts of one dot product."""
    first, *others = static.slots
    table = static.clip >= 0
    same = bool(others) and part_of_one(static)
    if others and not same:
        return GENERAL, False
    if first.link == IDENTITY and (first.number > 0 if first.mode == 0 else first.norm):
        return PLAIN, same
    if first.link == POWER and not table:
        return POLY, same
    # In float16 weights underflow unless they are divided by their largest.
    flat = first.link == RATIONAL and first.param == 1.0 and not table and dtype != torch.float16
    return (FLAT if flat else GENERAL), same


# Keys beyond a table's reach get their own launches from MANY_KEYS keys on, if that is CUT times the
# reach. On an H200 this is faster at 8192 keys and 128 times, slower at 2048 and 32, and at 1024 and 64.
CUT, MANY_KEYS = 64, 8192


def cut_at_reach(static: Static, num_keys: int) -> list[Static]:
    """The call within a table's reach, and beyond it where a causal filter shows that.

    Beyond its reach a table only shifts log_mass, so that plain kernels do most of the work.
    """
    clip = static.clip
    if clip < 0 or len(static.filter) != 1 or not static.simple:
        return [static]
    (clause,) = static.filter
    if not clause.causal or 0 <= clause.left < clip or clause.gap:
        return [static]
    near = static._replace(filter=(clause._replace(left=clip - 1),))
    if num_keys <= clip:
        return [near]
    plain = len(static.slots) == 1 and static.slots[0].link == IDENTITY and not static.sums_again
    if not plain or static.shape[2] <= SPLIT_QUERIES or num_keys < max(MANY_KEYS, CUT * clip):
        return [static]
    return [near, static._replace(filter=(clause._replace(gap=clip),), clip=-1)]


def sees_all(clause: Clause, static: Static, num_keys: int) -> bool:
    """Whether a query sees all keys before it that are within a table's reach."""
    near = clause.left < 0 or clause.left >= min(static.clip, num_keys) - 1
    old = clause.memory < 0 or static.first <= clause.memory
    others = any((clause.stride, clause.fixed, clause.padding, clause.documents, clause.gap))
    return clause.causal and near and old and clause.right < 0 and not others


# The number of keys from which storing the gradients of all pairs pays.
STORED = 512


def stores(p: Plan) -> bool:
    """Whether the pass over keys may store the gradients of all pairs, so that queries need none.

    That holds for one dot product and a band with all pairs that a causal filter shows.
    """
    static, (slot, *others) = p.static, p.static.slots
    plain = not (others or slot.link or slot.mode or slot.norm or slot.saves)
    plain = plain and not (p.constants["HAS_COL0"] or static.dropout_p)
    whole = static.simple and STORED <= p.num_keys <= static.clip
    seen = whole and all(sees_all(clause, static, p.num_keys) for clause in static.filter)
    return plain and seen and p.aligned[5]


def key_parts(slots: tuple[Slot, ...], wide: bool) -> tuple[int, ...]:
    """The PART of each pass over keys: both slots at once (0), or one after the other if wide (1, 2).

    A second slot whose keys have no gradient, such as positions, needs no pass.
    """
    *_, last = slots
    if len(slots) == 2 and not (last.keys or last.wants or last.saves):
        return (1,)
    return (1, 2) if len(slots) == 2 and wide else (0,)
