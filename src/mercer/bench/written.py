"""Hand-written peers with torch alone: FlexAttention, and dense eager code."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..backends import Task
from ..backends.chunked.blocks import by_distance
from ..backends.flex import backend as flex
from ..backends.flex.lower import lower
from ..dispatch.problem import prepare
from ..kernels import RBF
from ..term.layout import accumulator
from .contenders import Contender, Peer, refuse_to_swap
from .workload import Inputs

# Kernels of one dot product, without a special peer.
SCORED = (
    "alibi", "adaptive", "product", "relative-sinusoid", "lookup", "buckets", "polynomial",
    "rational", "laplace", "matern",
)  # fmt: skip


class Flex(Peer):
    """Softmax attention by a compiled FlexAttention, with the filter's block mask."""

    key, name, kernel = "flex", "softmax, FlexAttention", "softmax"
    groups = True

    def __init__(self) -> None:
        self.mask = cache(lambda filter, *rest: filter.block_mask(*rest))
        self.compiled: Any = None

    def available(self, device: torch.device) -> str | None:
        return _untrained(device)

    def attend(self, q: Tensor, k: Tensor, given: Inputs, **arguments: Any) -> Tensor:
        if self.compiled is None:
            from torch.nn.attention.flex_attention import flex_attention

            # After a few shapes torch stops compiling and silently runs dense. So reset it for
            # each workload, and make it raise.
            torch.compiler.reset()
            self.compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
        mask = self.mask(given.filter, q.shape[2], k.shape[2], q.device)
        shared = q.shape[1] > k.shape[1]
        out: Tensor = self.compiled(q, k, given.v, block_mask=mask, enable_gqa=shared, **arguments)
        return out

    def smooth(self, given: Inputs) -> Tensor:
        q, k, _ = given.plain
        return self.attend(q, k, given)


class FlexRBF(Flex):
    """RBF by FlexAttention, with the number per key as a captured tensor."""

    key, name, kernel = "flex-rbf", "rbf, FlexAttention with a key bias", "rbf"
    trains, groups = True, False

    def smooth(self, given: Inputs) -> Tensor:
        q, k, _ = given.plain
        precision = bandwidth(given).float() ** -2  # [H]
        bias = -0.5 * precision[:, None] * k.float().square().sum(-1)  # [B, H, K]

        def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + bias[b, h, j]

        scaled = (q.float() * precision[:, None, None]).to(q.dtype)
        return self.attend(scaled, k, given, score_mod=add_bias, scale=1.0)


class FlexScored(Peer):
    """Another kernel by FlexAttention: its terms other than dot products are a score_mod.

    It uses the backend `flex`, which refuses captured tensors that need a gradient, since torch
    sums them by atomics. Here that is allowed: a user would write the same without this library.
    """

    key = "flex-scored"
    trains = True

    def __init__(self, kernel: str) -> None:
        self.kernel, self.name = kernel, f"{kernel}, FlexAttention"

    def available(self, device: torch.device) -> str | None:
        return _untrained(device)

    def settle(self, given: Inputs, *, forward_only: bool) -> dict[Contender, bool]:
        # Checked once on a separate task: what it computes is then not timed, and not part of the
        # autograd graph.
        with torch.no_grad():
            why = flex.refuses(_task(given))
        if why is not None:
            raise ValueError(why)
        return super().settle(given, forward_only=forward_only)

    def smooth(self, given: Inputs) -> Tensor:
        return flex.run([_task(given)])[0].out


class Eager(Peer):
    """RBF in eager code: all distances, exp, mask, normalise."""

    kernel = "rbf"
    trains = True

    def __init__(self, key: str, title: str, *, by_matmul: bool) -> None:
        self.key, self.name, self.by_matmul = key, f"rbf, eager, {title}", by_matmul
        self.mask = cache(lambda filter, *rest: filter.mask(*rest))

    def smooth(self, given: Inputs) -> Tensor:
        q, k, v = given.plain
        wide = accumulator(q.dtype)
        if q.device.type == "cpu":
            refuse_to_swap(6 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * wide.itemsize)
        if self.by_matmul:
            q2, k2 = (x.to(wide).square().sum(-1) for x in (q, k))
            distance = q2[..., None] + k2[..., None, :] - 2 * (q @ k.mT).to(wide)
        else:
            mode = "donot_use_mm_for_euclid_dist"
            distance = torch.cdist(q.to(wide), k.to(wide), compute_mode=mode).square()
        hidden = ~self.mask(given.filter, q.shape[2], k.shape[2], q.device)
        weight = torch.exp(-distance / (2 * bandwidth(given).to(wide)[:, None, None] ** 2))
        weight = weight.masked_fill(hidden, 0.0)
        return (weight / weight.sum(-1, keepdim=True)).to(v.dtype) @ v


class EagerScored(Peer):
    """Another kernel in eager code: all scores, biases and links, mask, softmax."""

    key = "eager-scored"
    trains = True

    def __init__(self, kernel: str) -> None:
        self.kernel, self.name = kernel, f"{kernel}, eager"
        self.mask = cache(lambda filter, *rest: filter.mask(*rest))

    def smooth(self, given: Inputs) -> Tensor:
        task = _task(given)
        size = task.batch * task.heads, task.num_queries, task.num_keys
        if task.device.type == "cpu":
            refuse_to_swap(6 * math.prod(size) * accumulator(task.v.dtype).itemsize)
        x = lower(task)
        scores = (x.q @ x.k.mT).float()
        if x.link is not None:
            scores = scores if x.col is None else scores + x.col[:, :, None]
            scores = scores if x.scale is None else scores * x.scale[..., None]
            scores = x.link.log(scores if x.row is None else scores + x.row[..., None])
        elif x.col is not None and x.scale is not None:
            scores = scores + x.scale[..., None] * x.col[:, :, None]
        if x.bias is not None:
            scores = scores + x.bias[:, :, None]
        if task.term.table is not None:
            j = torch.arange(task.num_keys, device=task.device)
            scores = scores + by_distance(task.term.table.float(), j[-task.num_queries :], j)
        hidden = ~self.mask(given.filter, *size[1:], task.device)
        return torch.softmax(scores.masked_fill(hidden, -math.inf), -1).to(task.v.dtype) @ task.v


def bandwidth(given: Inputs) -> Tensor:
    """s, one per head."""
    assert isinstance(given.kernel, RBF)
    return given.kernel.bandwidth(given.v.shape[-1])


def _task(given: Inputs) -> Task:
    """The single term of its kernel, with its inputs."""
    options = (given.filter, 0.0, False, "flex")
    (task,) = prepare(given.kernel, given.q, given.k, given.v, *options).tasks()
    return task


def _untrained(device: torch.device) -> str | None:
    """Why FlexAttention cannot train on this device."""
    return None if device.type == "cuda" else "torch has no backward for it on CPU"
