"""sum_j <q_i, k_j>^2 v_j in time linear in T, by the features phi of the square.

    <q, k>^2 = <phi(q), phi(k)>
    sum_{j <= i} <q_i, k_j>^2 v_j = phi(q_i) S_i, where S_i = sum_{j <= i} phi(k_j) v_j

phi(x) holds the products x_a x_b, each pair once, except that blocks on the diagonal are full. That
is a fifth more to multiply, but far fewer pieces. The sequence is cut into chunks. The weights
inside a chunk are formed and masked; all earlier chunks come from the state S.

Memory is linear in T, forward and backward: the features and states held at a time are limited. The
past does not depend on the future. Each gradient is a plain sum, so the same input gives the same
bits. All is one opaque operator, so torch.compile does not unroll the loops.

Letters: N key heads of all sequences, G query heads for each, m chunks of c places, F features,
W values. Inside, queries are [N, G, Q, D], keys [N, 1, K, D] and values [N, 1, K, W].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Features that a block of phi multiplies with all features from its first on.
BLOCK = 16
# Numbers held at a time: on CPU few enough to stay in cache, elsewhere 512 MiB.
ELEMENTS_ON_CPU = 2**22
ELEMENTS = 2**27


def chunk_size(dim: int) -> int:
    """Places of a chunk: the more features, the larger a state, so the longer a chunk."""
    return max(128, min(1024, 8 * 2 ** (dim - 1).bit_length()))


def workspace(dim: int, values: int, group: int, device: torch.device) -> tuple[int, int]:
    """How many numbers may be held at a time, and how many one chunk of one key head needs."""
    size, width = chunk_size(dim), sum(h * (dim - a) for a, h, _ in _blocks(dim))
    chunk = size * (1 + group) * (width + size) + 3 * width * values
    return max(chunk, ELEMENTS_ON_CPU if device.type == "cpu" else ELEMENTS), chunk


def features(x: Tensor) -> Tensor:
    """phi(x): the products x_a x_b where b is in the block of a or after it, [..., T, F]."""
    pairs = [x[..., a : a + h, None] * x[..., None, a:] for a, h, _ in _blocks(x.shape[-1])]
    return torch.cat([pair.flatten(-2) for pair in pairs], -1)


def absorb(x: Tensor, v: Tensor) -> Tensor:
    """sum_j phi(x_j) v_j, where pairs that phi has once count twice, [..., F, W]."""
    state = features(x).mT @ v
    for _, h, where in _blocks(x.shape[-1]):
        state[..., where, :].unflatten(-2, (h, -1))[..., h:, :] *= 2
    return state


def _pull(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of x from that of phi(x)."""
    result = torch.zeros_like(x)
    for a, h, where in _blocks(x.shape[-1]):
        block = grad[..., where].unflatten(-1, (h, -1))
        result[..., a : a + h] += (block * x[..., None, a:]).sum(-1)
        result[..., a:] += (block * x[..., a : a + h, None]).sum(-2)
    return result


def _blocks(dim: int) -> Iterator[tuple[int, int, slice]]:
    """For every block of phi: its first feature, its size, and the slice of its products."""
    end = 0
    for first in range(0, dim, BLOCK):
        height = min(BLOCK, dim - first)
        start, end = end, end + height * (dim - first)
        yield first, height, slice(start, end)


def _near(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """The sum over keys whose weights are formed."""
    s = q @ k.mT
    s = s if hidden is None else s.masked_fill_(hidden, 0.0)
    return s.square_() @ v


def _near_grads(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, hidden: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients for q, k and v."""
    s = q @ k.mT
    s = s if hidden is None else s.masked_fill_(hidden, 0.0)
    ds = (grad @ v.mT).mul_(s).mul_(2)
    return ds @ k, ds.mT @ q, s.square_().mT @ grad


def _plus(state: Tensor | None, more: Tensor) -> Tensor:
    return more if state is None else state + more


def _advance(
    state: Tensor | None, x: Tensor, v: Tensor, *, back: bool = False, last: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """The state before each chunk, [N, m, F, W], and after all, [N, F, W]."""
    count = x.shape[1]
    if count == 1:
        found = None if state is None else state[:, None]
        return found, None if last else _plus(state, absorb(x, v)[:, 0])
    sums = absorb(x, v)
    each = torch.zeros_like(sums)
    for n in reversed(range(count)) if back else range(count):
        if state is not None:
            each[:, n] = state
        state = _plus(state, sums[:, n])
    return each, state


def _regroup(x: Tensor, count: int) -> Tensor:
    """[N, G, m c, E] -> [N, m, G c, E] for count m, and back for count G."""
    return x.unflatten(2, (count, -1)).transpose(1, 2).flatten(2, 3)


def slices(first: int, stop: int, size: int) -> list[slice]:
    return [slice(n, min(n + size, stop)) for n in range(first, stop, size)]


class Walk:
    """The chunks of a few key heads, and the states between them."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
        self.q, self.k, self.v, self.causal = q, k, v, causal
        (count, self.group, queries, dim), keys = q.shape, k.shape[2]
        self.start, self.size = keys - queries, chunk_size(dim)
        most, chunk = workspace(dim, v.shape[-1], self.group, q.device)
        many = self.size * max(1, most // (chunk * max(count, 1)))
        # With few queries or keys, forming all weights is less work than a state.
        self.direct = min(queries, keys) <= self.size
        self.side = max(self.size, most // (4 * max(count * self.group * min(queries, keys), 1)))
        # The keys that all queries see, and the queries, whole chunks first.
        self.far = slices(0, self.start if causal else keys, many)
        whole = queries // self.size * self.size
        self.rows = slices(0, whole, many) + slices(whole, queries, many)

    def tiles(self) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """All pairs without a state: slices of queries and keys, and the mask of hidden pairs."""
        for rows in slices(0, self.q.shape[2], self.side):
            for cols in slices(0, self.k.shape[2], self.side):
                visible = not self.causal or cols.stop <= rows.start + self.start + 1
                yield rows, cols, None if visible else self.hidden(rows, cols)

    def hidden(self, rows: slice, cols: slice) -> Tensor:
        """j > i, the same for all query heads, [G c, c]."""
        i = torch.arange(rows.start, rows.stop, device=self.q.device) + self.start
        j = torch.arange(cols.start, cols.stop, device=self.q.device)
        return (j > i[:, None]).repeat(self.group, 1)

    def beside(self, rows: slice) -> tuple[slice, int, Tensor]:
        """The keys in the chunks of these queries, how many chunks, and what each hides."""
        first, length = rows.start + self.start, rows.stop - rows.start
        count = max(1, length // self.size)
        size = length // count
        hidden = self.hidden(slice(rows.start, rows.start + size), slice(first, first + size))
        return slice(first, first + length), count, hidden

    def state(self) -> Tensor | None:
        """The state of the far keys, [N, F, W]."""
        state = None
        for cols in self.far:
            state = _plus(state, absorb(self.k[:, 0, cols], self.v[:, 0, cols]))
        return state

    def forward(self, out: Tensor) -> None:
        q, k, v = self.q, self.k, self.v
        if self.direct:
            out.zero_()
            for rows, cols, hidden in self.tiles():
                part = _near(_regroup(q[:, :, rows], 1), k[:, :, cols], v[:, :, cols], hidden)
                out[:, :, rows] += _regroup(part, self.group)
            return
        state = self.state()
        for rows in self.rows:
            if not self.causal:
                assert state is not None
                out[:, :, rows] = features(q[:, :, rows]) @ state[:, None]
                continue
            cols, count, hidden = self.beside(rows)
            qs = _regroup(q[:, :, rows], count)
            ks, vs = _regroup(k[:, :, cols], count), _regroup(v[:, :, cols], count)
            part = _near(qs, ks, vs, hidden)
            found, state = _advance(state, ks, vs, last=rows is self.rows[-1])
            if found is not None:
                part += features(qs) @ found
            out[:, :, rows] = _regroup(part, self.group)

    def backward(self, grad: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        q, k, v = self.q, self.k, self.v
        if self.direct:
            for x in (dq, dk, dv):
                x.zero_()
            for rows, cols, hidden in self.tiles():
                qs, gs = _regroup(q[:, :, rows], 1), _regroup(grad[:, :, rows], 1)
                near = _near_grads(qs, k[:, :, cols], v[:, :, cols], gs, hidden)
                dq[:, :, rows] += _regroup(near[0], self.group)
                dk[:, :, cols] += near[1]
                dv[:, :, cols] += near[2]
            return
        state = self.state()
        for rows in self.rows:
            if not self.causal:
                assert state is not None
                dq[:, :, rows] = _pull(q[:, :, rows], grad[:, :, rows] @ state[:, None].mT)
                continue
            cols, count, hidden = self.beside(rows)
            qs, gs = _regroup(q[:, :, rows], count), _regroup(grad[:, :, rows], count)
            ks, vs = _regroup(k[:, :, cols], count), _regroup(v[:, :, cols], count)
            near = _near_grads(qs, ks, vs, gs, hidden)
            found, state = _advance(state, ks, vs, last=rows is self.rows[-1])
            if found is not None:
                near[0].add_(_pull(qs, gs @ found.mT))
            dq[:, :, rows] = _regroup(near[0], self.group)
            dk[:, :, cols], dv[:, :, cols] = _regroup(near[1], 1), _regroup(near[2], 1)
        self.backward_keys(grad, dk, dv)

    def backward_keys(self, grad: Tensor, dk: Tensor, dv: Tensor) -> None:
        """The gradients of keys and values from later chunks: the same walk from the end."""
        q, k, v = self.q, self.k, self.v
        state: Tensor | None = None
        for rows in reversed(self.rows):
            cols, count, _ = self.beside(rows) if self.causal else (rows, 1, None)
            qs, gs = _regroup(q[:, :, rows], count), _regroup(grad[:, :, rows], count)
            last = rows.start == 0 and not self.far
            found, state = _advance(state, qs, gs, back=True, last=last)
            if self.causal and found is not None:
                ks, vs = _regroup(k[:, :, cols], count), _regroup(v[:, :, cols], count)
                dk[:, :, cols] += _regroup(_pull(ks, vs @ found.mT), 1)
                dv[:, :, cols] += _regroup(features(ks) @ found, 1)
        for cols in self.far:
            assert state is not None
            dk[:, 0, cols] = _pull(k[:, 0, cols], v[:, 0, cols] @ state.mT)
            dv[:, 0, cols] = features(k[:, 0, cols]) @ state
