"""Launches of the passes in triton_taps.py; the same calls as in plain_taps.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..taps import visible
from .plain_taps import Call, Near
from .triton_plan import Launch, room

RULES = {"none": 0, "left": 1, "truncate": 2, "shrink": 3}
# Places of a block, and warps, by the kernel.
SIZES = {"convolve": (64, 4), "merge": (32, 4), "pulls": (32, 4), "backward": (32, 4)}
# How many programs look for the largest gradient.
PROGRAMS = 64

_launches: dict[tuple[Any, ...], Launch] = {}


def _start(
    name: str, grid: tuple[int, int, int], tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...], constants: dict[str, Any], warps: int = 4,
) -> None:  # fmt: skip
    kinds = [(x.dtype, x.data_ptr() % 16) for x in tensors]
    key = (name, grid, tensors[-1].device, *kinds, *numbers, *constants.values())
    found = _launches.get(key)
    if found is None:
        from . import triton_taps

        if len(_launches) > 4096:
            _launches.clear()
        kernel = getattr(triton_taps, name)
        found = _launches[key] = Launch(kernel, grid, constants, {"num_warps": warps})
    found(tensors, numbers)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _target(kernel: Tensor | None, call: Call, letter: str) -> dict[str, int]:
    """Constants of the kernels on keys or values; a negative reach says that there are none."""
    size = 1 if kernel is None else kernel.shape[-1]
    reach = -1 if kernel is None else size // 2
    last = visible(call.boundary, max(reach, 0), None)[1]
    columns = (1 + call.cut) * size
    return {f"R{letter}": reach, f"S{letter}": size, f"C{letter}": columns, f"L{letter}": last}


def _per_head(kernel: Tensor | None) -> int:
    return 0 if kernel is None or kernel.shape[2] == 1 else kernel.shape[2]


def _shared(size: int, call: Call) -> dict[str, Any]:
    normal = call.temperature is not None
    power = 1 << (size - 1).bit_length()
    return {
        "R": size // 2, "S": size, "SP": power, "P": call.cut, "RULE": RULES[call.boundary],
        "NORMAL": normal, "BM": 128,
    }  # fmt: skip


def kernels(taps: Tensor, call: Call, wide: torch.dtype) -> Tensor:
    taps = taps.contiguous()
    size, count = taps.shape[-1], taps.numel() // taps.shape[-1]
    out = taps.new_empty(*taps.shape[:3], 1 + call.cut, size, dtype=wide)
    rate = 1.0 if call.temperature is None else 1.0 / call.temperature
    _start("kernels", (-(-count // 128), 1, 1), (taps, out), (count, rate), _shared(size, call))
    return out


def kernels_backward(grad: Tensor, kernel: Tensor, taps: Tensor, call: Call) -> Tensor:
    """`grad` has all heads, [B, T, H, 1 + P, S]: they are summed here where they share taps."""
    size, count = taps.shape[-1], taps.numel() // taps.shape[-1]
    out = taps.new_empty(taps.shape)
    rate = 1.0 if call.temperature is None else 1.0 / call.temperature
    _start(
        "kernels_backward", (-(-count // 128), 1, 1), (grad, kernel, out),
        (count, grad.shape[2] // taps.shape[2], rate), _shared(size, call),
    )  # fmt: skip
    return out


def convolve(
    k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, call: Call
) -> tuple[Tensor, Tensor]:
    """Copies also of what has no kernels: what is not finite is marked there."""
    k, v = _readable(k), _readable(v)
    batch, heads, length, width = k.shape
    wide = v.shape[-1]
    kt, vt = k.new_empty(k.shape), v.new_empty(v.shape)
    rows, warps = SIZES["convolve"]
    constants = _target(keys, call, "K") | _target(values, call, "V")
    chosen = {name: constants[name] for name in ("RK", "CK", "LK", "RV", "CV", "LV")}
    _start(
        "convolve", (-(-length // rows), batch * heads, 1),
        (k, v, k if keys is None else keys, v if values is None else values, kt, vt),
        (*_strides(k), *_strides(v), heads, length, width, wide, _per_head(keys),
         _per_head(values)),
        chosen | {"D": room(width), "V_": room(wide), "BM": rows}, warps,
    )  # fmt: skip
    return kt, vt


def merge(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    far: Tensor | None, far_lse: Tensor | None, call: Call,
) -> tuple[Tensor, Near]:  # fmt: skip
    q, k, v = _readable(q), _readable(k), _readable(v)
    batch, heads, length, width = q.shape
    wide = v.shape[-1]
    out = torch.empty_like(q) if wide == width else q.new_empty(batch, heads, length, wide)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    scores = q.new_empty(*q.shape[:3], call.cut, dtype=torch.float32)
    given = out if far is None else far
    far_lse = lse[:, :, :0] if far_lse is None else far_lse.contiguous()
    rows, warps = SIZES["merge"]
    constants = _target(keys, call, "K") | _target(values, call, "V")
    chosen = {name: constants[name] for name in ("RK", "SK", "CK", "RV", "SV", "CV")}
    chosen |= {"P": call.cut, "RULE": RULES[call.boundary], "HAS_FAR": far is not None}
    _start(
        "merge", (-(-length // rows), batch * heads, 1),
        (q, k, v, k if keys is None else keys, v if values is None else values, given,
         far_lse if far is not None else lse, out, lse, scores),
        (*_strides(q), *_strides(k), *_strides(v), *_strides(given), *_strides(out), heads, length,
         width, wide, _per_head(keys), _per_head(values), call.scale),
        chosen | {"D": room(width), "V_": room(wide), "BM": rows}, warps,
    )  # fmt: skip
    return out, Near(lse, far_lse, scores)


def backward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    grad: Tensor, out: Tensor, near: Near, far: tuple[Tensor, Tensor, Tensor] | None, call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    q, k, v, grad = (_readable(x) for x in (q, k, v, grad))
    batch, heads, length, width = q.shape
    wide, cut, rule = v.shape[-1], call.cut, RULES[call.boundary]
    constants = _target(keys, call, "K") | _target(values, call, "V")
    wk, wv = k if keys is None else keys, v if values is None else values
    blank = near.scores
    alone = cut == 1 and call.boundary == "shrink"
    pulls = blank
    if cut and not alone:
        pulls = torch.empty_like(near.scores)
        rows, warps = SIZES["pulls"]
        chosen = {name: constants[name] for name in ("RV", "SV", "CV")}
        _start(
            "pulls", (-(-length // rows), batch * heads, 1),
            (v, wv, grad, out, near.lse, near.scores, pulls),
            (*_strides(v), *_strides(grad), *_strides(out), heads, length, wide, _per_head(values)),
            chosen | {"P": cut, "RULE": rule, "V_": room(wide), "BM": rows}, warps,
        )  # fmt: skip
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dq = torch.empty_like(q) if cut or far is None else far[0]
    from_far = (q, k, v) if far is None else tuple(_readable(x) for x in far)
    dkeys, dvalues = (
        None if w is None else w.new_empty(batch, length, heads, *w.shape[3:])
        for w in (keys, values)
    )
    rows, warps = SIZES["backward"]
    _start(
        "backward", (-(-length // rows), batch * heads, 1),
        (q, k, v, wk, wv, grad, out, near.lse, near.scores, pulls, *from_far, dq, dk, dv,
         blank if dkeys is None else dkeys, blank if dvalues is None else dvalues),
        (*_strides(q), *_strides(k), *_strides(v), *_strides(grad), *_strides(out),
         *(s for x in from_far for s in _strides(x)), *_strides(dq), *_strides(dk), *_strides(dv),
         heads, length, width, wide, _per_head(keys), _per_head(values), call.scale),
        constants | {"P": cut, "RULE": rule, "HAS_FAR": far is not None, "ALONE": alone,
                     "D": room(width), "V_": room(wide), "BM": rows},
        warps,
    )  # fmt: skip
    return dq, dk, dv, dkeys, dvalues


def sum_by_id(grads: list[Tensor], ids: Tensor, table: Tensor) -> Tensor:
    """The gradient of a table [vocab, targets, H, S] from those of its rows, [B, T, H, S] each.

    Sums are of whole numbers, so that they are the same bits in any order, and need no sorting.
    """
    grads, ids = [g.contiguous() for g in grads], ids.contiguous()
    count, rows = grads[0].numel(), ids.numel()
    width = count // rows
    cells = table.numel()
    sums = ids.new_empty(cells, dtype=torch.int64)
    peaks = table.new_empty(PROGRAMS, dtype=torch.float32)
    out = table.new_empty(table.shape)
    # As many gradients as there are may meet in one sum, which must stay below 2^62.
    bits = 62 - (rows - 1).bit_length()
    targets = len(grads)
    pair = (grads[0], grads[-1])
    _start(
        "clear", (PROGRAMS, 1, 1), (*pair, peaks, sums), (count, cells),
        {"TARGETS": targets, "BM": 1024},
    )  # fmt: skip
    _start(
        "scatter", (-(-count // 256), 1, 1), (*pair, ids, peaks, sums), (count, width, bits),
        {"TARGETS": targets, "PROGRAMS": PROGRAMS, "BM": 256},
    )  # fmt: skip
    _start(
        "gathered", (-(-cells // 1024), 1, 1), (peaks, sums, out), (cells, bits),
        {"PROGRAMS": PROGRAMS, "BM": 1024},
    )  # fmt: skip
    return out
