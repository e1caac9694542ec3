"""Launches of the passes in triton_taps.py; the same calls as in plain_taps.py.

At usual sizes attention takes a third of a millisecond, so a call must not cost the host much:
grids, strides and constants are worked out once for a key of shapes, strides and options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..runtime.launch import Launch
from ..triton.plan import room
from .plain import Call, Near, Pair
from .taps import visible

RULES = {"none": 0, "left": 1, "truncate": 2, "shrink": 3}
# By the kernel: places of a block, for up to 64 features, and warps; wider rows take fewer places.
SIZES = {"convolve": (32, 8), "merge": (16, 2), "pulls": (32, 4), "backward": (16, 4)}
# Rows of taps of a program, and numbers of it where it sums over heads.
TAP_ROWS, HEAD_SUMS = 64, 1024
# How many programs look for the largest gradient.
PROGRAMS = 64

Numbers = tuple[int | float, ...]
Made = tuple[tuple[int, int], Numbers, dict[str, Any]]
_launches: dict[Any, tuple[Launch, Numbers]] = {}


def _start(key: tuple[Any, ...], tensors: tuple[Tensor, ...], make: Callable[[], Made]) -> None:
    """Start the kernel that the key begins with; `make` gives grid, numbers and constants.

    All tensors begin at a multiple of 16 bytes, or the key says it: Triton compiles for that.
    """
    found = _launches.get(key)
    if found is None:
        from . import kernels as triton_taps

        if len(_launches) > 4096:
            _launches.clear()
        grid, numbers, constants = make()
        _, warps = SIZES.get(key[0], (0, 4))
        launch = Launch(getattr(triton_taps, key[0]), (*grid, 1), constants, {"num_warps": warps})
        found = _launches[key] = (launch, numbers)
    found[0](tensors, found[1])


def _readable(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _whole(x: Tensor) -> Tensor:
    return _readable(x.contiguous())


def _kind(x: Tensor) -> tuple[Any, ...]:
    return x.device, x.dtype, x.shape, x.stride()


def _size(kernel: Tensor | None) -> torch.Size | None:
    """Kernels are in float32, one after the other."""
    return None if kernel is None else kernel.shape


def _grid(name: str, x: Tensor) -> tuple[int, tuple[int, int]]:
    """Places of a block, and the grid over x, [B, H, T, D]."""
    rows = max(8, SIZES[name][0] * 64 // max(64, room(x.shape[3])))
    return rows, (-(-x.shape[2] // rows), x.shape[0] * x.shape[1])


def _target(kernel: Tensor | None, call: Call, letter: str, names: str = "RSCL") -> dict[str, int]:
    """Constants of the kernels on keys or values; a negative reach says that there are none."""
    size = 1 if kernel is None else kernel.shape[-1]
    reach = -1 if kernel is None else size // 2
    last = visible(call.boundary, max(reach, 0), None)[1]
    known = {"R": reach, "S": size, "C": (1 + call.cut) * size, "L": last}
    return {name + letter: known[name] for name in names}


def _per_head(kernel: Tensor | None) -> int:
    return 0 if kernel is None or kernel.shape[2] == 1 else kernel.shape[2]


def _rule(call: Call) -> dict[str, Any]:
    return {"P": call.cut, "RULE": RULES[call.boundary]}


def _taps(taps: Tensor, call: Call) -> dict[str, Any]:
    """Constants of passes over taps."""
    size = taps.shape[-1]
    known = {"R": size // 2, "S": size, "SP": 1 << (size - 1).bit_length()}
    return known | _rule(call) | {"NORMAL": call.temperature is not None}


def _rate(call: Call) -> float:
    return 1.0 if call.temperature is None else 1.0 / call.temperature


def kernels(pair: Pair, call: Call, wide: torch.dtype) -> Pair:
    keys, values = (None if x is None else _by_rows(x) for x in pair)
    if keys is not None and values is not None and _kind(keys) == _kind(values):
        return _kernels(keys, values, call, wide)
    first = None if keys is None else _kernels(keys, None, call, wide)[0]
    return first, None if values is None else _kernels(values, None, call, wide)[0]


def _by_rows(taps: Tensor) -> Tensor:
    """Taps [B, T, H, S] of which batch and place are one axis, such as every other row of them."""
    if taps.is_contiguous():
        return taps
    batch, length, _, size = taps.shape
    even = batch == 1 or taps.stride(0) == length * taps.stride(1)
    return taps if even and (size == 1 or taps.stride(3) == 1) else taps.contiguous()


def _kernels(
    taps: Tensor, other: Tensor | None, call: Call, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of one target, or of two that are alike: one launch."""
    shape, two = (*taps.shape[:3], 1 + call.cut, taps.shape[-1]), other is not None
    out = taps.new_empty(shape, dtype=wide)
    more = taps.new_empty(shape, dtype=wide) if two else out
    other = taps if other is None else other

    def make() -> Made:
        heads, count = taps.shape[2], taps.numel() // taps.shape[-1]
        numbers = (count, heads, taps.stride(1), taps.stride(2), _rate(call))
        return (-(-count // TAP_ROWS), 1 + two), numbers, _taps(taps, call) | {"BM": TAP_ROWS}

    # Rows of a table may begin anywhere.
    places = (taps.data_ptr() % 16, other.data_ptr() % 16)
    _start(("kernels", *_kind(taps), two, *places, call), (taps, other, out, more), make)
    return out, more


def kernels_backward(grads: Pair, kernels: Pair, pair: Pair, call: Call) -> Pair:
    """`grads` have all heads, [B, T, H, 1 + P, S]: they are summed here where they share taps."""
    keys, values = (
        None if d is None or w is None or u is None else (d, w, u)
        for d, w, u in zip(grads, kernels, pair, strict=True)
    )
    if keys is not None and values is not None:
        taps, more = keys[2], values[2]
        if taps.shape == more.shape and taps.dtype == more.dtype:
            return _kernels_backward(keys, values, call)
    first = None if keys is None else _kernels_backward(keys, keys, call)[0]
    return first, None if values is None else _kernels_backward(values, values, call)[0]


Learned = tuple[Tensor, Tensor, Tensor]  # the gradient of kernels, the kernels, and their taps


def _kernels_backward(one: Learned, other: Learned, call: Call) -> tuple[Tensor, Tensor]:
    (grad, kernel, taps), two = one, other is not one
    out = taps.new_empty(taps.shape)
    more = taps.new_empty(taps.shape) if two else out

    def make() -> Made:
        count, tap_heads = taps.numel() // taps.shape[-1], taps.shape[2]
        heads = grad.shape[2] // tap_heads
        constants = _taps(taps, call) | {"HP": 1 << (heads - 1).bit_length()}
        rows = min(TAP_ROWS, max(1, HEAD_SUMS // (constants["HP"] * constants["SP"])))
        numbers = (count, heads, tap_heads, taps.shape[1], _rate(call))
        return (-(-count // rows), 1 + two), numbers, constants | {"BM": rows}

    key = ("kernels_backward", taps.device, taps.dtype, taps.shape, grad.shape, two, call)
    _start(key, (grad, other[0], kernel, other[1], out, more), make)
    return out, more


def convolve(
    k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies also of what has no kernels, all finite; and where a block first was not.

    Without a copy, flash attention's backward would multiply its zeros by what is not finite.
    """
    k, v = _readable(k), _readable(v)
    kt, vt = k.new_empty(k.shape), v.new_empty(v.shape)
    rows, grid = _grid("convolve", k)
    bad = k.new_empty((grid[1], grid[0]), dtype=torch.int32)

    def make() -> Made:
        numbers = (
            *k.stride()[:3], *v.stride()[:3], *k.shape[1:], _per_head(keys), _per_head(values)
        )  # fmt: skip
        targets = _target(keys, call, "K") | _target(values, call, "V") | _rule(call)
        return grid, numbers, targets | {"D": room(k.shape[3]), "BM": rows}

    key = ("convolve", *_kind(k), v.stride(), _size(keys), _size(values), call)
    weights = (k if keys is None else keys, v if values is None else values)
    _start(key, (k, v, *weights, kt, vt, bad), make)
    return kt, vt, bad


def merge(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    far: Tensor | None, far_lse: Tensor | None, bad: Tensor | None, call: Call,
) -> tuple[Tensor, Near]:  # fmt: skip
    q, k, v = _readable(q), _readable(k), _readable(v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    scores = q.new_empty((*q.shape[:3], call.cut), dtype=torch.float32)
    given = out if far is None else far
    far_lse = lse if far_lse is None else far_lse.contiguous()
    blocks = 1 if bad is None else bad.shape[1]

    def make() -> Made:
        rows, grid = _grid("merge", q)
        numbers = (
            *(s for x in (q, k, v, given, out) for s in x.stride()[:3]), *q.shape[1:],
            _per_head(keys), _per_head(values), blocks, call.scale,
        )  # fmt: skip
        targets = _target(keys, call, "K", "RSC") | _target(values, call, "V", "RSC")
        return grid, numbers, targets | _rule(call) | {
            "HAS_FAR": far is not None, "CAUSAL": call.causal,
            "BLOCKS": 1 << (blocks - 1).bit_length(), "D": room(q.shape[3]), "BM": rows,
        }  # fmt: skip

    key = (
        "merge", *_kind(q), k.stride(), v.stride(), given.stride(), far is None, _size(keys),
        _size(values), call,
    )  # fmt: skip
    weights = (k if keys is None else keys, v if values is None else values)
    _start(
        key,
        (q, k, v, *weights, given, far_lse, lse if bad is None else bad, out, lse, scores),
        make,
    )
    return out, Near(lse, far_lse, scores)


def backward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    grad: Tensor, out: Tensor, lse: Tensor | None, scores: Tensor | None,
    far: tuple[Tensor, Tensor, Tensor] | None, call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    q, k, v, grad, out = (_readable(x) for x in (q, k, v, grad, out))
    batch, heads, length, width = q.shape
    cut, rule = call.cut, _rule(call)
    wk, wv = k if keys is None else keys, v if values is None else values
    blank = q if scores is None else scores
    lse = blank if lse is None else lse
    alone = cut == 1 and call.boundary == "shrink"
    shares, pulls = blank, blank
    if cut and not alone:
        shares, pulls = torch.empty_like(blank), torch.empty_like(blank)

        def make_pulls() -> Made:
            rows, grid = _grid("pulls", q)
            strides = (s for x in (v, grad, out) for s in x.stride()[:3])
            numbers = (*strides, *q.shape[1:], _per_head(values))
            constants = _target(values, call, "V", "RSC") | rule
            return grid, numbers, constants | {"D": room(width), "BM": rows}

        key = ("pulls", *_kind(v), grad.stride(), out.stride(), _size(values), call)
        _start(key, (v, wv, grad, out, lse, blank, shares, pulls), make_pulls)
    dk, dv = torch.empty_like(q), torch.empty_like(q)
    dq = torch.empty_like(q) if cut or far is None else far[0]
    far_q, far_k, far_v = (q, k, v) if far is None else (_readable(x) for x in far)
    dkeys, dvalues = (
        None if w is None else w.new_empty(batch, length, heads, *w.shape[3:])
        for w in (keys, values)
    )

    def make() -> Made:
        rows, grid = _grid("backward", q)
        tensors = (q, k, v, grad, out, far_q, far_k, far_v, dv)
        numbers = (
            *(s for x in tensors for s in x.stride()[:3]), *q.shape[1:], _per_head(keys),
            _per_head(values), call.scale,
        )  # fmt: skip
        return grid, numbers, _target(keys, call, "K") | _target(values, call, "V") | rule | {
            "NORMAL": call.temperature is not None, "HAS_FAR": far is not None, "ALONE": alone,
            "D": room(width), "BM": rows,
        }  # fmt: skip

    own: tuple[Any, ...] = (
        "backward", *_kind(q), k.stride(), v.stride(), grad.stride(), out.stride(), far is None,
        far_q.stride(), far_k.stride(), far_v.stride(), _size(keys), _size(values), call,
    )  # fmt: skip
    tensors = (
        q, k, v, wk, wv, grad, out, lse, blank, shares, pulls, far_q, far_k, far_v, dq, dk, dv,
        blank if dkeys is None else dkeys, blank if dvalues is None else dvalues,
    )  # fmt: skip
    _start(own, tensors, make)
    return dq, dk, dv, dkeys, dvalues


def take(table: Tensor, ids: Tensor) -> list[Tensor]:
    """Rows of a table [vocab, targets, H, S] by id, [B, T, H, S] for each target."""
    # A layer's share of a table that several have: whole but for what lies between its rows.
    if not table[0].is_contiguous():
        table = _whole(table)
    ids, vocab, (targets, *shape) = _whole(ids), table.shape[0], table.shape[1:]
    out = [table.new_empty(*ids.shape, *shape) for _ in range(targets)]
    count = out[0].numel()
    _start(
        ("take", ids.device, table.dtype, ids.dtype, table.shape, table.stride(0), count,
         table.data_ptr() % 16),
        (table, ids, out[0], out[-1]),
        lambda: ((-(-count // 256), 1), (count, count // ids.numel(), vocab, table.stride(0)),
                 {"TARGETS": targets, "BM": 256}),
    )  # fmt: skip
    return out


def sum_by_id(grads: list[Tensor], ids: Tensor, vocab: int) -> Tensor:
    """The gradient of a table [vocab, targets, H, S] from those of its rows, [B, T, H, S] each.

    Sums are of whole numbers, so that they are the same bits in any order, and need no sorting.
    """
    first, last, ids = _whole(grads[0]), _whole(grads[-1]), _whole(ids)
    count, rows, targets = first.numel(), ids.numel(), len(grads)
    out = first.new_empty(vocab, targets, *first.shape[2:])
    cells = out.numel()
    sums = ids.new_empty(cells, dtype=torch.int64)
    peaks = first.new_empty(PROGRAMS, dtype=torch.float32)
    # As many gradients as there are rows may meet in one sum, which must stay below 2^62.
    bits = 62 - (rows - 1).bit_length()
    kind = (ids.device, first.dtype, ids.dtype, count, rows, cells, targets)
    _start(
        ("clear", *kind), (first, last, peaks, sums),
        lambda: ((PROGRAMS, 1), (count, cells), {"TARGETS": targets, "BM": 1024}),
    )  # fmt: skip
    _start(
        ("scatter", *kind), (first, last, ids, peaks, sums),
        lambda: ((-(-count // 256), 1), (count, count // rows, bits),
                 {"TARGETS": targets, "PROGRAMS": PROGRAMS, "BM": 256}),
    )  # fmt: skip
    _start(
        ("gathered", *kind), (peaks, sums, out),
        lambda: ((-(-cells // 1024), 1), (cells, bits), {"PROGRAMS": PROGRAMS, "BM": 1024}),
    )  # fmt: skip
    return out
