"""A call of `smooth`, checked. Errors say what was expected and what was given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import Task
from ..filters import Filter
from ..filters.placed import hides_later, place
from ..filters.places import Places, read_places
from ..kernels import Kernel
from ..term.features import Features, Input
from ..term.layout import accumulator, repeat
from .choose import NAMES


@dataclass(kw_only=True, eq=False)
class Problem:
    """The checked arguments of a call."""

    kernel: Kernel
    q: Features
    k: Features
    v: Tensor
    filter: Filter
    batch: int
    dropout_p: float
    log_mass: bool
    causal: bool  # whether no query sees a key at a later place
    places: Places | None = None  # where they are said
    # Features and values that were not finite are zero, and marked here. So gradients stay finite.
    bad_queries: Tensor | None = None  # [B or 1, H, Q]
    bad_keys: Tensor | None = None  # [B or 1, H, K]

    def cleaned(self) -> Problem:
        """The same problem with NaN and infinity set to zero and marked."""
        q, k, v, heads = self.q, self.k, self.v, self.q.heads
        if not _may_be_broken(q, k, v):
            return self
        q, bad_queries = _cleaned(q, heads)
        k, bad_keys = _cleaned(k, heads)
        bad_keys = bad_keys | repeat(_broken(v), v.shape[0], heads)
        v = torch.where(v.isfinite(), v, 0.0)
        return replace(self, q=q, k=k, v=v, bad_queries=bad_queries, bad_keys=bad_keys)

    def tasks(self, seed: Tensor | None = None) -> tuple[Task, ...]:
        """The kernel, lowered: one task for each term."""
        terms = self.kernel.terms(self.q, self.k)
        num_queries, num_keys = self.q.length, self.k.length
        return tuple(
            Task(
                term=term.resolve(num_queries, num_keys, causal=self.causal),
                v=self.v,
                filter=self.filter,
                batch=self.batch,
                heads=self.q.heads,
                num_queries=num_queries,
                dropout_p=self.dropout_p,
                seed=seed,
                log_mass=self.log_mass or len(terms) > 1,
                bad_queries=self.bad_queries,
                bad_keys=self.bad_keys,
            )
            for term in terms
        )


def prepare(
    kernel: Kernel,
    q: Input,
    k: Input,
    v: Tensor,
    filter: Filter,
    dropout_p: float,
    log_mass: bool,
    backend: str,
    places: object = None,
) -> Problem:
    """Check the arguments of a call; raise ValueError if they do not fit together."""
    if not isinstance(kernel, Kernel):
        raise ValueError(f"kernel must be a Kernel, got {type(kernel).__name__}")
    _check_whole()
    check_options(filter, backend, dropout_p)
    q, k = _features("q", q), _features("k", k)
    v = _features("v", v).part("content")
    if k.length != v.shape[2]:
        raise ValueError(f"k and v must have one length, but k has {k.length} and v {v.shape[2]}")
    parts, batch = (*q.tensors(), *k.tensors()), v.shape[0]
    if any(x.shape[:2] != v.shape[:2] for x in parts):
        _check_heads(q, k, v)
        batch = _batch(q, k, v)
    if any(x.device != v.device for x in (*parts, *_tensors_of(kernel))):
        _refuse_devices(kernel, q, k, v)
    device = v.device.type
    if torch.is_autocast_enabled(device) and v.dtype != torch.float64:
        lower = torch.get_autocast_dtype(device)
        q, k, v = q.to(lower), k.to(lower), v.to(lower)
    _check_dtypes(q, k, v)
    causal, filter = filter.causal, filter.to(v.device)
    said = read_places(places, batch, q.length, k.length, v.device)
    if said is not None:
        _check_kernel(kernel)
        causal = hides_later(filter)
        if causal and backend != "reference":
            said = said.without_later_keys()
            k, v = k.rows(0, said.num_keys), v[:, :, : said.num_keys]
        filter = place(filter, said, v.device)
        if said.shift != 0:
            q, k = q.at(said.q), k.at(said.k)
    filter.check(batch, q.length, k.length)
    if filter.heads is not None and filter.heads != q.heads:
        raise ValueError(
            f"{filter!r} was made for {filter.heads} heads, but the queries have {q.heads}"
        )
    return Problem(
        kernel=kernel, q=q, k=k, v=v, filter=filter, batch=batch,
        dropout_p=float(dropout_p), log_mass=log_mass, causal=causal, places=said,
    )  # fmt: skip


def _check_whole() -> None:
    """Raise under torch's `context_parallel()`, which puts a function in place of torch's own."""
    if str(F.scaled_dot_product_attention.__module__).startswith("torch.distributed."):
        raise ValueError(
            "under torch's context_parallel() a process has a part of each sequence, and this call "
            "would see that part alone: use mercer.parallel.smooth, without context_parallel()"
        )


def _check_kernel(kernel: Kernel) -> None:
    if kernel.relative and not kernel.placed:
        raise ValueError(
            f"{kernel!r} reads i - j, but does not know places that are said: read them from "
            "`Features.places`, and set `placed = True` in its class"
        )


def check_options(filter: object, backend: str, dropout_p: float) -> None:
    """Raise ValueError for options that are wrong for any input."""
    if not isinstance(filter, Filter):
        raise ValueError(f"filter must be a Filter, got {type(filter).__name__}")
    if backend not in NAMES:
        raise ValueError(f"backend must be one of {', '.join(NAMES)}, got {backend!r}")
    if not (isinstance(dropout_p, int | float) and 0 <= dropout_p < 1):
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")


@torch.no_grad()
def _may_be_broken(q: Features, k: Features, v: Tensor) -> bool:
    # Reading the data would synchronise with the GPU, and a graph has no branches.
    if torch.compiler.is_compiling() or v.device.type != "cpu":
        return True
    # A sum is finite only if all its parts are; one pass without a copy.
    tensors = (*q.tensors(), *k.tensors(), v)
    return not all(bool(x.sum(dtype=accumulator(x.dtype)).isfinite()) for x in tensors)


def _cleaned(x: Features, heads: int) -> tuple[Features, Tensor]:
    """Features with zeros in place of NaN and infinity, and a mask of them, [B or 1, H, T]."""
    bad = [repeat(_broken(part), part.shape[0], heads) for part in x.tensors()]
    return x.each(lambda part: torch.where(part.isfinite(), part, 0.0)), reduce(or_, bad)


def _broken(x: Tensor) -> Tensor:
    return ~x.isfinite().all(-1)


def _features(name: str, x: object) -> Features:
    try:
        return Features.of(x)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _named(q: Features, k: Features, v: Tensor) -> list[tuple[str, Tensor]]:
    """Every tensor, under its name in the user's call."""
    named = [(f"q.{n}" if n != "content" else "q", x) for n, x in q.items()]
    named += [(f"k.{n}" if n != "content" else "k", x) for n, x in k.items()]
    return [*named, ("v", v)]


def _check_heads(q: Features, k: Features, v: Tensor) -> None:
    heads = q.heads
    for name, x in _named(q, k, v):
        count = x.shape[1]
        fits = count in (1, heads) if name.startswith("q") else count > 0 and heads % count == 0
        if not fits:
            raise ValueError(
                f"{name} has {count} heads, which does not divide the {heads} heads of q"
                if not name.startswith("q")
                else f"{name} has {count} heads, but the queries have {heads}"
            )


def _batch(q: Features, k: Features, v: Tensor) -> int:
    sizes = {name: x.shape[0] for name, x in _named(q, k, v)}
    batch = v.shape[0] if v.shape[0] != 1 else next((n for n in sizes.values() if n != 1), 1)
    if any(size not in (1, batch) for size in sizes.values()):
        raise ValueError(f"q, k and v must have one batch size, or 1, got {sizes}")
    return batch


def _tensors_of(kernel: Kernel) -> list[Tensor]:
    """Its parameters and buffers. Torch's own generators take several times as long."""
    modules = kernel.modules()
    own = [x for m in modules for x in (*m._parameters.values(), *m._buffers.values())]
    return [x for x in own if x is not None]


def _refuse_devices(kernel: Kernel, q: Features, k: Features, v: Tensor) -> NoReturn:
    devices = {name: str(x.device) for name, x in _named(q, k, v)}
    own = (*kernel.named_parameters(), *kernel.named_buffers())
    devices |= {f"kernel.{name}": str(x.device) for name, x in own}
    raise ValueError(f"q, k, v and the kernel must be on one device, but are on {devices}")


def _check_dtypes(q: Features, k: Features, v: Tensor) -> None:
    if any(x.dtype != v.dtype for x in (*q.tensors(), *k.tensors())):
        dtypes = {name: x.dtype for name, x in _named(q, k, v)}
        raise ValueError(f"q, k and v must have one dtype, got {dtypes}")
