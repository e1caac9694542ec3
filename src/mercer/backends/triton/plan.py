"""Plans: what follows from shapes and options alone, worked out once for the fused kernels.

What kernels they need is in launches.py, block sizes are in triton_sizes.py.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.launch import INTERPRETED, Launch
from .block_sizes import EACH, FLAT, PLAIN, POLY, SPLIT_QUERIES

# How a kernel forms a scale from what it reads: as it is (0), or exp(-2 (x + offset)), with x as it
# is (1) or bent beyond low and high (2): (kind, offset, low, high, bend).
Log = tuple[int, float, float, float, float]
NO_LOG: Log = (0, 0.0, 0.0, 0.0, 1.0)


class Slot(NamedTuple):
    """One factor with features."""

    link: int  # 0 for the identity
    param: float
    mode: int  # the scale is a number (0), a tensor of heads (1) or of queries (2)
    number: float
    norm: bool  # the numbers per key, and inside a link per query, are -|x|^2 / 2
    wants: bool  # the scale has a gradient
    saves: bool  # the number per key that came has a gradient
    log: Log = NO_LOG
    keys: bool = True  # the keys have a gradient
    unit: bool = False  # few queries and their keys are to be taken to length 1, by the kernel


class Steer(NamedTuple):
    """A slot whose queries steer their own scales, how these are formed, and how far they reach.

    Its scale is the logarithm of the base; the weights come last among the tensors.
    """

    slot: int
    bend: Log
    reach: float


class Static(NamedTuple):
    """All that is no tensor."""

    slots: tuple[Slot, ...]
    filter: tuple[tuple[int, ...], ...]
    simple: bool
    dropout_p: float
    trains: bool
    first: int
    tokens: bool  # outputs and gradients lie token by token, [B, T, H, D] in memory
    clip: int  # how far a table reaches each way; -1 without one
    shape: tuple[int, int, int]  # batch, heads, queries
    steer: Steer | None = None
    grouped: bool = False  # queries are heads of a group, all at the last place
    summed: bool = False  # slots are terms, of the same features, whose weights add up

    def text(self) -> str:
        """What has no size, for operators, which take numbers, text and tensors."""
        slots = tuple(tuple(slot) for slot in self.slots)
        return repr((slots, self.filter, self.simple, self.dropout_p, self.trains))

    def sizes(self) -> list[int]:
        """The rest: a compiled graph may leave these open."""
        return [self.first, int(self.tokens), self.clip, *self.shape]

    @property
    def precise(self) -> bool:
        """Whether a gradient needs <dO, O> better than the output is stored.

        Those of scales and of numbers per key do: they are small differences of large sums.
        """
        return self.trains and any(slot.wants or slot.saves for slot in self.slots)


def parse(text: str, sizes: list[int]) -> Static:
    """What `text` and `sizes` said."""
    first, tokens, clip, batch, heads, num_queries = sizes
    slots, filter, simple, dropout_p, trains = _parsed(text)
    shape = (batch, heads, num_queries)
    return Static(slots, filter, simple, dropout_p, trains, first, bool(tokens), clip, shape)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    slots, *rest = ast.literal_eval(text)
    return tuple(Slot(*slot) for slot in slots), *rest


class Bias(NamedTuple):
    """What is added to the logarithms of the weights; one of the two, or nothing."""

    table: Tensor | None = None  # [B or 1, H, Q, 2c + 1]
    asking: Tensor | None = None  # [B, H, Q, D]
    # [1 or H, 2c + 1, D], or c + 1 rows of distances i - j from 0 on, where there are no others.
    rows: Tensor | None = None


@dataclass(frozen=True)
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
        """From q, k, v, scale, row and col one after the other."""
        n = len(tensors) // 5
        q, k, rest = tensors[:n], tensors[n : 2 * n], tensors[2 * n + 1 :]
        scale, row, col = (list(rest[m * n : (m + 1) * n]) for m in range(3))
        return cls(list(q), list(k), tensors[2 * n], scale, row, col, bias, lengths, ids, seed)

    def readable(self) -> Inputs:
        """With features side by side in memory, and the small tensors contiguous."""
        q, k = [readable_rows(x) for x in self.q], [readable_rows(x) for x in self.k]
        scale, row = ([x.contiguous() for x in xs] for xs in (self.scale, self.row))
        v = readable_rows(self.v)
        return Inputs(q, k, v, scale, row, self.col, self.bias, self.lengths, self.ids, self.seed)


class Numbers(NamedTuple):
    """What is formed from the inputs before a kernel starts, and kept for the backward."""

    col0: Tensor
    col1: Tensor
    row0: Tensor
    row1: Tensor
    columns: Tensor  # the first slot's numbers per key as columns of a product, or as they are
    tops: Tensor  # the largest |v| of each block of keys, where the forward says it, or empty
    band: Tensor  # what a table says of the pairs within its reach, or empty


class Rows(NamedTuple):
    """What the passes of the backward have of every query."""

    grad_out: Tensor
    lse2: Tensor  # log_mass to the base 2
    delta: Tensor  # <dO, O> - dlog_mass
    grad_lse: Tensor  # dlog_mass
    counters: Tensor  # of every head, and one more: see `counters`


def counters(like: Tensor) -> Tensor:
    """Room for tickets that programs of the pass over keys draw, by the head that it begins with.

    A second pass, of the second slot, has those of the next head, or one more.
    """
    return like.new_empty(like.shape[0] * like.shape[1] + 1, dtype=torch.int32)


@dataclass(eq=False)
class Plan:
    """What follows from shapes, strides and options."""

    static: Static
    device: torch.device
    dtype: torch.dtype
    strides: tuple[int, ...]
    widths: tuple[int, int, int]  # of the two slots' features and of the values
    num_keys: int
    constants: dict[str, Any]
    spread: bool  # numbers per key are columns, in place of the second slot's keys
    aligned: tuple[bool, ...]  # whether the copy engine can read the two q, the two k, v, a band
    bounded: bool  # the first slot is a distance, with no number per key beside it
    launches: dict[Any, Launch] = field(default_factory=dict)

    @property
    def still(self) -> bool:
        """No weight of a distance is above 1; float16 has too few numbers far below it."""
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
    key = (
        static, x.v.dtype, x.v.device, *(y.shape for y in read), *(y.stride() for y in read),
        x.lengths is None, *((y.dtype, y.shape, y.stride()) for y in options),
        *(y.numel() for y in (*x.scale, *x.col)),
        # Triton, and the copy engine, tell apart what begins at a multiple of 16 bytes.
        *(y.data_ptr() % 16 for y in (*read, *x.scale, *x.row, *options)),
    )  # fmt: skip
    found = _plans.get(key)
    if found is None:
        if len(_plans) > 4096:
            _plans.clear()
        found = _plans[key] = _make(x, static, ready)
    return found


def _make(x: Inputs, static: Static, ready: Numbers) -> Plan:
    slots = static.slots
    batch, heads, _ = static.shape
    c0, c1, row0, row1, columns, _, band = ready
    two, spread = len(slots) == 2, columns.dim() == 4
    # Terms that add up have their features in common.
    more = two and not static.summed
    q0, q1, k0, k1, v = x.q[0], x.q[-1], x.k[0], columns if spread else x.k[-1], x.v
    widths = (q0.shape[-1], q1.shape[-1], v.shape[-1])
    e0, e1, dv = (room(w) for w in widths)
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
        "FILTER": static.filter,
        "SIMPLE": static.simple,
        "FORM": form,
        "SAME": same,
        "EVEN": widths[0] == e0 and widths[2] == dv and (not more or widths[1] == e1),
        "DROPOUT": static.dropout_p > 0.0,
        "PRECISION": "ieee" if v.dtype == torch.float32 else "tf32",
    }
    aligned = tuple(copies(y) for y in (q0, q1, k0, k1, v, band))
    return Plan(
        static, v.device, v.dtype, tuple(strides), widths, v.shape[2], constants, spread, aligned,
        bounded=slots[0].norm and not x.col[0].numel(),
    )  # fmt: skip


def _per_key(col: Tensor, static: Static) -> tuple[int, int]:
    """Whether there are numbers per key, True or EACH, and how many heads share one."""
    _, heads, num_queries = static.shape
    if col.dim() < 3:
        return False, 1
    if static.grouped and col.shape[1] > heads:
        return EACH, heads * num_queries // col.shape[1]
    return True, heads // col.shape[1]


def one_sided(filter: tuple[tuple[int, ...], ...]) -> bool:
    """Whether no key that is seen comes after its query."""
    return all(clause[0] for clause in filter)


def part_of_one(static: Static) -> bool:
    """Whether slots are parts of one dot product."""
    number = static.slots[0].number
    return not static.summed and all(
        s.link == 0 and s.mode == 0 and s.number == number and not s.norm for s in static.slots
    )


def _form(static: Static, dtype: torch.dtype) -> tuple[int, bool]:
    """How the weights are formed, and whether two slots are parts of one dot product."""
    first, *others = static.slots
    table = static.clip >= 0
    same = bool(others) and part_of_one(static)
    if others and not same:
        return 0, False
    if first.link == 0 and (first.number > 0 if first.mode == 0 else first.norm):
        return PLAIN, same
    if first.link == 1 and not table:
        return POLY, same
    # float16 has too few small numbers for weights that are not divided by their largest.
    flat = first.link == 2 and first.param == 1.0 and not table and dtype != torch.float16
    return (FLAT if flat else 0), same


def room(width: int) -> int:
    """The features of a block: a power of two."""
    return max(16, 1 << (width - 1).bit_length())


def strides_of(x: Tensor, batch: int) -> tuple[int, int, int]:
    """Of batch, head and place; a batch of 1 is read again for each."""
    if x.dim() < 3:
        return 0, 0, 0
    b = 0 if x.shape[0] == 1 and batch > 1 else x.stride(0)
    return b, x.stride(1), x.stride(2)


def expanded(x: Tensor, *shape: int) -> Tensor:
    """x of that shape: a view, which has a step backward of its own, only where it must be one."""
    return x if x.shape == shape else x.expand(shape)


def readable_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned_copy(x: Tensor, tokens: bool = False) -> Tensor:
    """Contiguous, or contiguous token by token, and from a multiple of 16 bytes on."""
    if tokens:
        return aligned_copy(x.transpose(1, 2)).transpose(1, 2)
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def empty(like: Tensor, batch: int, heads: int, length: int, width: int, tokens: bool) -> Tensor:
    """[B, H, T, width], head by head or token by token in memory."""
    if tokens:
        return like.new_empty(batch, length, heads, width).transpose(1, 2)
    return like.new_empty(batch, heads, length, width)


def by_tokens(x: Tensor) -> bool:
    """Whether [B, H, T, D] lies token by token in memory; a few queries are not worth it."""
    if x.shape[1] == 1 or x.shape[2] <= SPLIT_QUERIES:
        return False
    # Dynamo does not compare strides that depend on a length.
    compiling = torch.compiler.is_compiling()
    return not x.is_contiguous() if compiling else x.stride(1) < x.stride(2)


def copies(x: Tensor) -> bool:
    """Whether the copy engine can read x: on Hopper and later, in multiples of 16 bytes."""
    if not (INTERPRETED or copying(x.device)) or x.data_ptr() % 16 or x.dim() != 4:
        return False
    size = x.dtype.itemsize
    strides = zip(x.stride()[:3], x.shape[:3], strict=True)
    return all(d == 1 or (s > 0 and s * size % 16 == 0) for s, d in strides)


@lru_cache(maxsize=16)
def copying(device: torch.device) -> bool:
    """Whether a GPU has a copy engine: Hopper and later."""
    return torch.cuda.get_device_capability(device)[0] >= 9


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 16
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def describe(x: Tensor, rows: int, width: int) -> Any:
    """x for the copy engine, in blocks of rows."""
    shape, (b, h, t, _) = list(x.shape), x.stride()
    # The stride of a dimension of 1 is never used, but must be a multiple of 16 bytes.
    strides = [b if shape[0] > 1 else 16, h if shape[1] > 1 else 16, t if shape[2] > 1 else 16, 1]
    found: Any = object.__new__(_descriptor())
    # What its own constructor would check, `copies` has checked.
    found.base, found.shape, found.strides = x, shape, strides
    found.block_shape, found.padding = [1, 1, rows, width], "zero"
    return found


@lru_cache(maxsize=1)
def _descriptor() -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor


# Keys beyond a table's reach get launches of their own where there are so many keys, and so many times
# its reach: on an H200 faster at 8192 keys and 128 times, slower at 2048 and 32, and at 1024 and 64.
CUT, MANY_KEYS = 64, 8192


def cut_at_reach(static: Static, num_keys: int) -> list[Static]:
    """The same call within a table's reach, and beyond it where a causal filter shows that.

    Beyond it there is no table but a shift of log_mass: plain kernels do the most of the work.
    """
    clip = static.clip
    if clip < 0 or len(static.filter) != 1 or not static.simple:
        return [static]
    ((causal, left, right, *middle, gap),) = static.filter
    if not causal or 0 <= left < clip or gap:
        return [static]
    near = static._replace(filter=((causal, clip - 1, right, *middle, gap),))
    if num_keys <= clip:
        return [near]
    plain = len(static.slots) == 1 and static.slots[0].link == 0
    if not plain or static.shape[2] <= SPLIT_QUERIES or num_keys < max(MANY_KEYS, CUT * clip):
        return [static]
    return [near, static._replace(filter=((causal, left, right, *middle, clip),), clip=-1)]


def sees_all(clause: tuple[int, ...], static: Static, num_keys: int) -> bool:
    """Whether a query sees all keys before it that are within a table's reach."""
    causal, left, right, memory, *others = clause
    near = left < 0 or left >= min(static.clip, num_keys) - 1
    old = memory < 0 or static.first <= memory
    return bool(causal) and near and old and right < 0 and not any(others)


# Keys from which on it pays to store the gradients of all pairs.
STORED = 512


def stores(p: Plan) -> bool:
    """Whether the pass over keys may store the gradients of all pairs, so that queries need none.

    That is where a band has all pairs that a causal filter shows, of one dot product.
    """
    static, (slot, *others) = p.static, p.static.slots
    plain = not (others or slot.link or slot.mode or slot.norm or slot.saves)
    plain = plain and not (p.constants["HAS_COL0"] or static.dropout_p)
    whole = static.simple and STORED <= p.num_keys <= static.clip
    seen = whole and all(sees_all(clause, static, p.num_keys) for clause in static.filter)
    return plain and seen and p.aligned[5]


def key_parts(slots: tuple[Slot, ...], wide: bool) -> tuple[int, ...]:
    """The parts of a pass over keys: both slots at once, or one after the other where they are wide.

    A second slot whose keys have no gradient, such as places, needs none.
    """
    *_, last = slots
    if len(slots) == 2 and not (last.keys or last.wants or last.saves):
        return (1,)
    return (1, 2) if len(slots) == 2 and wide else (0,)
