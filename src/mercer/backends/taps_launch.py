"""Launches of the passes in triton_taps.py; the same calls as in plain_taps.py.

At usual sizes attention takes a third of a millisecond, so a call must not cost the host much:
grids, strides and constants are worked out once for a key of shapes, strides and options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..taps import visible
from .plain_taps import Call, Near, Pair
from .triton_plan import Launch, room

RULES = {"none": 0, "left": 1, "truncate": 2, "shrink": 3}
# Places of a block, by the kernel, for up to 64 features; wider rows fill the registers.
SIZES = {"convolve": 64, "merge": 32, "pulls": 32, "backward": 32}
# How many programs look for the largest gradient.
PROGRAMS = 64

Numbers = tuple[int | float, ...]
_launches: dict[Any, tuple[Launch, Numbers]] = {}


def _start(
    key: tuple[Any, ...], tensors: tuple[Tensor, ...],
    make: Callable[[], tuple[tuple[int, int], Numbers, dict[str, Any]]],
) -> None:  # fmt: skip
    """Start the kernel that the key begins with; `make` gives grid, numbers and constants.

    All tensors begin at a multiple of 16 bytes: Triton compiles for that, and the key is silent.
    """
    found = _launches.get(key)
    if found is None:
        from . import triton_taps

        if len(_launches) > 4096:
            _launches.clear()
        grid, numbers, constants = make()
        kernel = getattr(triton_taps, key[0])
        launch = Launch(kernel, (*grid, 1), constants, {"num_warps": 4})
        found = _launches[key] = (launch, numbers)
    found[0](tensors, found[1])


def _readable(x: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _whole(x: Tensor) -> Tensor:
    return _readable(x.contiguous())


def _kind(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype)


def _grid(name: str, x: Tensor, *widths: int) -> tuple[int, tuple[int, int]]:
    """Places of a block, and the grid over x, [B, H, T, …]."""
    rows = max(8, SIZES[name] * 64 // max(64, *(room(width) for width in widths)))
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


def _small(taps: Tensor, call: Call) -> tuple[int, tuple[int, int], float, dict[str, Any]]:
    """How many rows of taps there are, the grid, 1 / T and the constants."""
    size, count = taps.shape[-1], taps.numel() // taps.shape[-1]
    constants = {
        "R": size // 2, "S": size, "SP": 1 << (size - 1).bit_length(), "P": call.cut,
        "RULE": RULES[call.boundary], "NORMAL": call.temperature is not None, "BM": 128,
    }  # fmt: skip
    rate = 1.0 if call.temperature is None else 1.0 / call.temperature
    return count, (-(-count // 128), 1), rate, constants


def kernels(pair: Pair, call: Call, wide: torch.dtype) -> Pair:
    keys, values = (None if taps is None else _kernels(taps, call, wide) for taps in pair)
    return keys, values


def _kernels(taps: Tensor, call: Call, wide: torch.dtype) -> Tensor:
    taps = _whole(taps)
    out = taps.new_empty(*taps.shape[:3], 1 + call.cut, taps.shape[-1], dtype=wide)

    def make() -> tuple[tuple[int, int], Numbers, dict[str, Any]]:
        count, grid, rate, constants = _small(taps, call)
        return grid, (count, rate), constants

    _start(("kernels", taps.device, taps.shape, taps.dtype, call), (taps, out), make)
    return out


def kernels_backward(grads: Pair, kernels: Pair, pair: Pair, call: Call) -> Pair:
    """`grads` have all heads, [B, T, H, 1 + P, S]: they are summed here where they share taps."""
    found: list[Tensor | None] = []
    for grad, kernel, taps in zip(grads, kernels, pair, strict=True):
        if grad is None or kernel is None or taps is None:
            found.append(None)
        else:
            found.append(_kernels_backward(grad, kernel, taps, call))
    return found[0], found[1]


def _kernels_backward(grad: Tensor, kernel: Tensor, taps: Tensor, call: Call) -> Tensor:
    out = taps.new_empty(taps.shape)

    def make() -> tuple[tuple[int, int], Numbers, dict[str, Any]]:
        count, grid, rate, constants = _small(taps, call)
        return grid, (count, grad.shape[2] // taps.shape[2], rate), constants

    key = ("kernels_backward", taps.device, taps.shape, taps.dtype, grad.shape, call)
    _start(key, (grad, kernel, out), make)
    return out


def convolve(
    k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies also of what has no kernels, all finite; and where a block first was not."""
    k, v = _readable(k), _readable(v)
    kt, vt = k.new_empty(k.shape), v.new_empty(v.shape)
    _, (blocks, many) = _grid("convolve", k, k.shape[-1], v.shape[-1])
    bad = k.new_empty((many, blocks), dtype=torch.int32)

    def make() -> tuple[tuple[int, int], Numbers, dict[str, Any]]:
        (_, heads, length, width), wide = k.shape, v.shape[-1]
        rows, grid = _grid("convolve", k, width, wide)
        numbers = (
            *k.stride()[:3], *v.stride()[:3], heads, length, width, wide, _per_head(keys),
            _per_head(values),
        )  # fmt: skip
        targets = _target(keys, call, "K", "RCL") | _target(values, call, "V", "RCL")
        return grid, numbers, targets | {"D": room(width), "V_": room(wide), "BM": rows}

    key = ("convolve", k.device, _kind(k), _kind(v), _kind(keys), _kind(values), call)
    tensors = (k, v, k if keys is None else keys, v if values is None else values, kt, vt, bad)
    _start(key, tensors, make)
    return kt, vt, bad


def merge(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    far: Tensor | None, far_lse: Tensor | None, bad: Tensor | None, call: Call,
) -> tuple[Tensor, Near]:  # fmt: skip
    q, k, v = _readable(q), _readable(k), _readable(v)
    batch, heads, length, width = q.shape
    wide = v.shape[-1]
    out = torch.empty_like(q) if wide == width else q.new_empty(batch, heads, length, wide)
    lse = q.new_empty((batch, heads, length), dtype=torch.float32)
    scores = q.new_empty((batch, heads, length, call.cut), dtype=torch.float32)
    given = out if far is None else far
    far_lse = lse if far_lse is None else far_lse.contiguous()
    blocks = 1 if bad is None else bad.shape[1]

    def make() -> tuple[tuple[int, int], Numbers, dict[str, Any]]:
        rows, grid = _grid("merge", q, width, wide)
        numbers = (
            *(s for x in (q, k, v, given, out) for s in x.stride()[:3]), heads, length, width, wide,
            _per_head(keys), _per_head(values), blocks, call.scale,
        )  # fmt: skip
        targets = _target(keys, call, "K", "RSC") | _target(values, call, "V", "RSC")
        return grid, numbers, targets | {
            "P": call.cut, "RULE": RULES[call.boundary], "HAS_FAR": far is not None,
            "CAUSAL": call.causal, "BLOCKS": 1 << (blocks - 1).bit_length(), "D": room(width),
            "V_": room(wide), "BM": rows,
        }  # fmt: skip

    key = (
        "merge", q.device, _kind(q), _kind(k), _kind(v), _kind(keys), _kind(values), _kind(far),
        call,
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
    wide, cut, rule = v.shape[-1], call.cut, RULES[call.boundary]
    wk, wv = k if keys is None else keys, v if values is None else values
    blank = q if scores is None else scores
    lse = blank if lse is None else lse
    alone = cut == 1 and call.boundary == "shrink"
    pulls = blank
    if cut and not alone:
        pulls = torch.empty_like(blank)

        def make_pulls() -> tuple[tuple[int, int], Numbers, dict[str, Any]]:
            rows, grid = _grid("pulls", q, wide)
            strides = (s for x in (v, grad, out) for s in x.stride()[:3])
            constants = {"P": cut, "RULE": rule, "V_": room(wide), "BM": rows}
            numbers = (*strides, heads, length, wide, _per_head(values))
            return grid, numbers, _target(values, call, "V", "RSC") | constants

        key = ("pulls", q.device, _kind(v), _kind(grad), _kind(out), _kind(values), call)
        _start(key, (v, wv, grad, out, lse, blank, pulls), make_pulls)
    dk, dv = torch.empty_like(q), torch.empty_like(q)
    dq = torch.empty_like(q) if cut or far is None else far[0]
    far_q, far_k, far_v = (q, k, v) if far is None else (_readable(x) for x in far)
    dkeys, dvalues = (
        None if w is None else w.new_empty(batch, length, heads, *w.shape[3:])
        for w in (keys, values)
    )

    def make() -> tuple[tuple[int, int], Numbers, dict[str, Any]]:
        rows, grid = _grid("backward", q, width, wide)
        tensors = (q, k, v, grad, out, far_q, far_k, far_v, dq, dk, dv)
        numbers = (
            *(s for x in tensors for s in x.stride()[:3]), heads, length, width, wide,
            _per_head(keys), _per_head(values), call.scale,
        )  # fmt: skip
        return grid, numbers, _target(keys, call, "K") | _target(values, call, "V") | {
            "P": cut, "RULE": rule, "HAS_FAR": far is not None, "ALONE": alone, "D": room(width),
            "V_": room(wide), "BM": rows,
        }  # fmt: skip

    own: tuple[Any, ...] = (
        "backward", q.device, _kind(q), _kind(k), _kind(v), _kind(keys), _kind(values), _kind(grad),
        _kind(out), far is None, _kind(far_q), _kind(far_k), _kind(far_v), call,
    )  # fmt: skip
    tensors = (
        q, k, v, wk, wv, grad, out, lse, blank, pulls, far_q, far_k, far_v, dq, dk, dv,
        blank if dkeys is None else dkeys, blank if dvalues is None else dvalues,
    )  # fmt: skip
    _start(own, tensors, make)
    return dq, dk, dv, dkeys, dvalues


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
