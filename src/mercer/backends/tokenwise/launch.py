"""The passes around flash attention as Triton kernels: plain.py has the same functions.

The kernels are in kernels/convolved.py. Its letters are used here: T places, H heads, P cut kernels, S taps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import launch
from ..triton.layout import next_power_of_two
from .plain import Call, Near, Pair
from .taps import visible

RULES = {"none": 0, "left": 1, "truncate": 2, "shrink": 3}
# Per kernel: places of a block for up to 64 features, and warps. Wider rows take fewer places.
SIZES = {"convolve": (32, 8), "merge": (16, 2), "pulls": (32, 4), "backward": (16, 4)}
# Rows of taps per program, and numbers per program where it sums over heads.
TAP_ROWS, HEAD_SUMS = 64, 1024


def start(
    name: str, grid: tuple[int, int], constants: dict[str, Any], tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
) -> None:  # fmt: skip
    """Start the kernel of this name."""
    from .kernels import convolved

    options = {"num_warps": SIZES.get(name, (0, 4))[1]}
    launch.start(getattr(convolved, name), (*grid, 1), constants, tensors, numbers, options)


def readable(x: Tensor) -> Tensor:
    """x, or a copy that begins at a multiple of 16 bytes and has its last axis in one piece."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _grid(name: str, x: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid over x, [B, H, T, D], and the sizes of a block."""
    width = next_power_of_two(x.shape[3])
    rows = max(8, SIZES[name][0] * 64 // max(64, width))
    return (-(-x.shape[2] // rows), x.shape[0] * x.shape[1]), {"D": width, "BM": rows}


def _strides(*tensors: Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


def _targets(keys: Tensor | None, values: Tensor | None, call: Call, names: str) -> dict[str, int]:
    """Constants of the kernels on keys and on values. A reach of -1: there are none."""
    found: dict[str, int] = {}
    for letter, kernel in (("K", keys), ("V", values)):
        size = 1 if kernel is None else kernel.shape[-1]
        reach = -1 if kernel is None else size // 2
        last = visible(call.boundary, max(reach, 0), None)[1]
        known = {"R": reach, "S": size, "C": (1 + call.cut) * size, "L": last}
        found |= {name + letter: known[name] for name in names}
    return found | {"P": call.cut, "RULE": RULES[call.boundary]}


def _per_head(*kernels: Tensor | None) -> list[int]:
    """How many heads have their own kernels; 0 if all share one."""
    return [0 if x is None or x.shape[2] == 1 else x.shape[2] for x in kernels]


def _taps(taps: Tensor, call: Call) -> dict[str, Any]:
    """Constants of passes over taps."""
    size = taps.shape[-1]
    return {
        "R": size // 2, "S": size, "SP": 1 << (size - 1).bit_length(), "P": call.cut,
        "RULE": RULES[call.boundary], "NORMAL": call.temperature is not None,
    }  # fmt: skip


def _rate(call: Call) -> float:
    return 1.0 if call.temperature is None else 1.0 / call.temperature


def kernels(pair: Pair, call: Call, wide: torch.dtype) -> Pair:
    keys, values = (None if taps is None else _kernels(taps, call, wide) for taps in pair)
    return keys, values


def _by_rows(taps: Tensor) -> Tensor:
    """Taps [B, T, H, S] with batch and place merged into one axis, such as every other row."""
    if taps.is_contiguous():
        return taps
    batch, length, _, size = taps.shape
    even = batch == 1 or taps.stride(0) == length * taps.stride(1)
    return taps if even and (size == 1 or taps.stride(3) == 1) else taps.contiguous()


def _kernels(taps: Tensor, call: Call, wide: torch.dtype) -> Tensor:
    taps = _by_rows(taps)
    out = taps.new_empty((*taps.shape[:3], 1 + call.cut, taps.shape[-1]), dtype=wide)
    count = taps.numel() // taps.shape[-1]
    start(
        "kernels", (-(-count // TAP_ROWS), 1), _taps(taps, call) | {"BM": TAP_ROWS}, (taps, out),
        (count, taps.shape[2], taps.stride(1), taps.stride(2), _rate(call)),
    )  # fmt: skip
    return out


def kernels_backward(grads: Pair, kernels: Pair, pair: Pair, call: Call) -> Pair:
    """`grads` have all heads, [B, T, H, 1 + P, S]; summed here over heads that share taps."""
    keys, values = (
        None if d is None or w is None or u is None else _kernels_backward(d, w, u, call)
        for d, w, u in zip(grads, kernels, pair, strict=True)
    )
    return keys, values


def _kernels_backward(grad: Tensor, kernel: Tensor, taps: Tensor, call: Call) -> Tensor:
    out = taps.new_empty(taps.shape)
    count, tap_heads = taps.numel() // taps.shape[-1], taps.shape[2]
    heads = grad.shape[2] // tap_heads
    constants = _taps(taps, call) | {"HP": 1 << (heads - 1).bit_length()}
    rows = min(TAP_ROWS, max(1, HEAD_SUMS // (constants["HP"] * constants["SP"])))
    start(
        "kernels_backward", (-(-count // rows), 1), constants | {"BM": rows}, (grad, kernel, out),
        (count, heads, tap_heads, taps.shape[1], _rate(call)),
    )  # fmt: skip
    return out


def convolve(
    k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Finite copies, also without kernels, and the first place of each block that was not finite.

    Without copies, flash attention's backward would multiply zeros by NaN or infinity.
    """
    k, v = readable(k), readable(v)
    kt, vt = k.new_empty(k.shape), v.new_empty(v.shape)
    grid, block = _grid("convolve", k)
    bad = k.new_empty((grid[1], grid[0]), dtype=torch.int32)
    start(
        "convolve", grid, _targets(keys, values, call, "RSCL") | block,
        (k, v, k if keys is None else keys, v if values is None else values, kt, vt, bad),
        (*_strides(k, v), *k.shape[1:], *_per_head(keys, values)),
    )  # fmt: skip
    return kt, vt, bad


def merge(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    far: Tensor | None, far_lse: Tensor | None, bad: Tensor | None, call: Call,
) -> tuple[Tensor, Near]:  # fmt: skip
    q, k, v = readable(q), readable(k), readable(v)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    scores = q.new_empty((*q.shape[:3], call.cut), dtype=torch.float32)
    given = out if far is None else far
    far_lse = lse if far_lse is None else far_lse.contiguous()
    blocks = 1 if bad is None else bad.shape[1]
    grid, block = _grid("merge", q)
    flags = {
        "HAS_FAR": far is not None, "CAUSAL": call.causal,
        "BLOCKS": 1 << (blocks - 1).bit_length(),
    }  # fmt: skip
    start(
        "merge", grid, _targets(keys, values, call, "RSC") | flags | block,
        (q, k, v, k if keys is None else keys, v if values is None else values, given, far_lse,
         lse if bad is None else bad, out, lse, scores),
        (*_strides(q, k, v, given, out), *q.shape[1:], *_per_head(keys, values), blocks, call.scale),
    )  # fmt: skip
    return out, Near(lse, far_lse, scores)


def backward(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, values: Tensor | None,
    grad: Tensor, out: Tensor, lse: Tensor | None, scores: Tensor | None,
    far: tuple[Tensor, Tensor, Tensor] | None, call: Call,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    q, k, v, grad, out = (readable(x) for x in (q, k, v, grad, out))
    batch, heads, length, _ = q.shape
    cut = call.cut
    wk, wv = k if keys is None else keys, v if values is None else values
    blank = q if scores is None else scores
    lse = blank if lse is None else lse
    alone = cut == 1 and call.boundary == "shrink"
    shares, pulls = blank, blank
    if cut and not alone:
        shares, pulls = torch.empty_like(blank), torch.empty_like(blank)
        grid, block = _grid("pulls", q)
        constants = _targets(keys, values, call, "RSC")
        constants = {n: x for n, x in constants.items() if not n.endswith("K")}
        start(
            "pulls", grid, constants | block, (v, wv, grad, out, lse, blank, shares, pulls),
            (*_strides(v, grad, out), *q.shape[1:], *_per_head(values)),
        )  # fmt: skip
    dk, dv = torch.empty_like(q), torch.empty_like(q)
    dq = torch.empty_like(q) if cut or far is None else far[0]
    far_q, far_k, far_v = (q, k, v) if far is None else (readable(x) for x in far)
    dkeys, dvalues = (
        None if w is None else w.new_empty(batch, length, heads, *w.shape[3:])
        for w in (keys, values)
    )
    flags = {"NORMAL": call.temperature is not None, "HAS_FAR": far is not None, "ALONE": alone}
    grid, block = _grid("backward", q)
    start(
        "backward", grid, _targets(keys, values, call, "RSCL") | flags | block,
        (q, k, v, wk, wv, grad, out, lse, blank, shares, pulls, far_q, far_k, far_v, dq, dk, dv,
         blank if dkeys is None else dkeys, blank if dvalues is None else dvalues),
        (*_strides(q, k, v, grad, out, far_q, far_k, far_v, dv), *q.shape[1:],
         *_per_head(keys, values), call.scale),
    )  # fmt: skip
    return dq, dk, dv, dkeys, dvalues
