"""Token kernels over a split sequence: each process convolves its own keys and values.

For that, a chunk gets a halo of the tokens beside it. All but the nearest keys are then a call over
the split sequence. The nearest keys of a query are in its chunk and its halo. Both are mixed by
their masses, as in `tokenwise/split.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends.tokenwise.taps import Convolution
from ..dispatch.problem import prepare
from ..filters import Causal, Earlier, Filter, Full
from ..kernels import Exponential, Kernel
from ..term.features import Features, Input
from ..term.mix import Smoothed, mix
from ..tokenwise.split import Vicinity
from ..tokenwise.taps import (
    Boundary,
    check_boundary,
    check_taps,
    check_temperature,
    num_cut,
)
from .collectives import gather
from .ring import mix_rows
from .smoother import read, solve
from .split import Chunk, Split


def vicinity(
    q: Input,
    k: Input,
    v: Tensor,
    *,
    split: Split,
    key_taps: Tensor | None = None,
    value_taps: Tensor | None = None,
    normalize: float | None = None,
    boundary: Boundary = "shrink",
    kernel: Kernel = Exponential(),
    filter: Filter = Causal(),
    backend: str = "auto",
    dropout_p: float = 0.0,
) -> Tensor:
    """The rows of this process of `mercer.vicinity` over the whole sequence; collective.

    Args:
        q, k, v, split, filter: as in `parallel.smooth`.
        key_taps, value_taps: those of all tokens, [B, length, H or 1, S].
        normalize, boundary, kernel, backend, dropout_p: as in `mercer.vicinity`.
    """
    q, k, v = read(q, k, v, split, filter, backend, dropout_p)
    for name, taps in (("key_taps", key_taps), ("value_taps", value_taps)):
        if isinstance(taps, Tensor) and taps.dim() == 4 and taps.shape[1] != split.length:
            raise ValueError(
                f"{name} must be those of all {split.length} tokens, [B, {split.length}, H or 1, "
                f"S], got {list(taps.shape)}"
            )
        x = k.part("content") if name == "key_taps" else v
        check_taps(name, taps, x, len(v), split.length, q.heads)
    convolution = Convolution(key_taps, value_taps, normalize, boundary)
    check_boundary(boundary)
    check_temperature("normalize", normalize)
    count = num_cut(boundary, filter.causal, convolution.size)
    halo = convolution.size // 2 + max(count - 1, 0)
    _check(split, convolution, halo, filter)
    if count and not kernel.positive and backend == "reference":
        raise ValueError(
            f"{kernel!r} may have negative weights, and backend 'reference' gives no sign of their "
            "sum, which the nearest keys of token kernels need: take backend 'chunked'"
        )
    filter = filter.to(v.device)
    with torch.autocast(v.device.type, enabled=False):
        chunks = with_halo(split, halo, k, v, convolution)
        own = [each.convolved(filter) for each in chunks]
        k = Features(**{n: torch.cat([k.part(n) for k, _ in own], 2) for n in k})
        v = torch.cat([v for _, v in own], 2)
        seen = filter & Earlier(count) if count else filter
        far = solve(kernel, q, k, v, split, seen, backend, dropout_p, count > 0)
        if not count:
            return far.out
        parts = [
            each.near(
                q.rows(*split.rows(n)), kernel, filter.until(split.length, 0), count, dropout_p
            )
            for n, each in enumerate(chunks)
        ]
    out, mass, sign = mix_rows([[part] for part in parts])
    return mix([far, Smoothed(out, mass, None if kernel.positive else sign)]).out


@dataclass(frozen=True, kw_only=True)
class Extended:
    """A chunk with the tokens beside it."""

    chunk: Chunk
    first: int  # the place of the first token, with those beside it
    k: Features
    v: Tensor
    convolution: Convolution  # of these tokens

    def convolved(self, filter: Filter) -> tuple[Features, Tensor]:
        """Keys and values of the chunk, as queries see them that are not near."""
        problem = prepare(Exponential(), self.k, self.k, self.v, Full(), 0.0, False, "auto")
        found = Vicinity(replace(problem, filter=filter), self.convolution, self.first).seen(None)
        rows = self.chunk.first - self.first, self.chunk.stop - self.first
        return found.k.rows(*rows), found.v[:, :, slice(*rows)]

    def near(
        self, q: Features, kernel: Kernel, filter: Filter, count: int, dropout_p: float
    ) -> Smoothed:
        """The `count` nearest keys of each query of the chunk."""
        stop = self.chunk.stop - self.first
        k, v = self.k.rows(0, stop), self.v[:, :, :stop]
        problem = prepare(kernel, q, k, v, Full(), dropout_p, True, "auto")
        convolution = cut_taps(self.convolution, slice(0, stop))
        found = Vicinity(replace(problem, filter=filter), convolution, self.first).near(count)
        if found is None:
            raise ValueError(
                f"token kernels over a split sequence need terms, which {kernel!r} lacks"
            )
        return found


def with_halo(
    split: Split, halo: int, k: Features, v: Tensor, convolution: Convolution
) -> list[Extended]:
    """The own chunks with up to `halo` tokens on both sides; collective."""
    names, tensors = list(k), [*k.tensors(), v]
    pieces = [[x[:, :, slice(*split.rows(n))] for x in tensors] for n in range(len(split.own))]
    edges: tuple[Tensor, ...] = ()
    if halo:
        last = split.step - halo
        sides = [
            torch.cat([part for x in xs for part in (x[:, :, :halo], x[:, :, last:])], 2)
            for xs in zip(*pieces, strict=True)
        ]
        edges = gather(split.group, *sides)
    owner = {c.first: (r, n) for r in range(split.size) for n, c in enumerate(split.chunks(r))}
    chunks = []
    for chunk, piece in zip(split.own, pieces, strict=True):
        before, after = owner.get(chunk.first - split.step), owner.get(chunk.stop)
        wide = []
        for n, x in enumerate(piece):
            parts = [x]
            if halo and before is not None:
                start = (2 * before[1] + 1) * halo
                parts.insert(0, edges[n][before[0]][:, :, start : start + halo])
            if halo and after is not None:
                start = 2 * after[1] * halo
                parts.append(edges[n][after[0]][:, :, start : start + halo])
            wide.append(torch.cat(parts, 2))
        *parts, values = wide
        first = chunk.first - (halo if before is not None else 0)
        taps = cut_taps(convolution, slice(first, first + values.shape[2]))
        k = Features(**dict(zip(names, parts, strict=True)))
        chunks.append(Extended(chunk=chunk, first=first, k=k, v=values, convolution=taps))
    return chunks


def cut_taps(convolution: Convolution, places: slice) -> Convolution:
    """That of some tokens."""
    keys, values = (None if x is None else x[:, places] for x in convolution[:2])
    return convolution._replace(key_taps=keys, value_taps=values)


def _check(split: Split, convolution: Convolution, halo: int, filter: Filter) -> None:
    if halo > split.step:
        raise ValueError(
            f"token kernels of size {convolution.size} read {halo} tokens beside a chunk, but "
            f"{split} has chunks of {split.step}: take fewer processes or a longer sequence"
        )
    if filter.heads is not None:
        raise ValueError(
            f"token kernels need a filter that is the same for all heads, got {filter!r}"
        )
