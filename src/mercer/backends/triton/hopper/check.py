"""Whether a Hopper kernel may be used: it compiles here and agrees with the portable kernel.

Gluon changes with every Triton, so this is found out and not read from a version. Each kind of kernel
is checked once per process and device, by a small call like the first one that would use it. Where it
fails, the portable kernel runs, one warning says so, and `explain` repeats why.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.device import INTERPRETED, on_hopper
from ..plan import Inputs, Plan
from ..static import Static

# Queries and keys of a check: half of a program's keys at the end, and enough for a table whose pairs
# are stored. Where there are more keys than queries, so many more.
LENGTH, MORE, BATCH = 576, 128, 2
# How far the results of the two kernels may differ, in units of the last place. Each element of the
# gradient of a scale is one sum over a whole head, in which large numbers cancel.
APART, APART_SCALE = 4.0, 16.0

# A call of the portable code: returns its outputs, or with True its gradients.
Outcome = Callable[[Inputs, Static, bool], list[Tensor]]


class Kind(NamedTuple):
    """The unit of a check: each kind is checked once per process."""

    way: str  # "forward", "keys", "stores" or "sums"
    device: torch.device
    dtype: torch.dtype
    widths: tuple[int, int, int]

    def __str__(self) -> str:
        sizes = " + ".join(str(n) for n in self.widths[:2] if n)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.way} ({sizes} features, {self.widths[2]} values, {dtype})"


def kind_of(way: str, p: Plan) -> Kind:
    c = p.constants
    return Kind(way, p.device, p.dtype, (c["E0"], c["E1"], c["V"]))


# Why a kind may not be used, or None if it may.
_answers: dict[Kind, str | None] = {}
_warned: set[torch.device] = set()
_lock = threading.RLock()
_local = threading.local()


def there(device: torch.device) -> bool:
    """Whether the GPU has the features that these kernels need."""
    return on_hopper(device) and not INTERPRETED


def checking() -> str | None:
    """During a check, the only way that this thread may use; "" for the portable kernels."""
    return getattr(_local, "way", None)


def allows(way: str, x: Inputs, p: Plan, outcome: Outcome) -> bool:
    """Whether the kernels of this way may be used for a call; runs the check the first time."""
    only = checking()
    if only is not None:
        return only == way
    if not there(p.device):
        return False
    kind = kind_of(way, p)
    if kind in _answers:
        return _answers[kind] is None
    if _must_not_run(p.device):
        return False
    with _lock:
        if kind not in _answers:
            why = _disagrees(way, x, p.static, outcome)
            if why is None:
                _answers[kind] = None
            else:
                refuse(kind, why)
    return _answers[kind] is None


def completed(way: str, p: Plan, start: Callable[..., Any], *given: Any) -> list[Any] | None:
    """[start(*given)], or None if it does not compile; then this kind is no longer used.

    A kind has many variants, and a check compiles one of them.
    """
    try:
        return [start(*given)]
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        if checking() is not None:
            raise
        refuse(kind_of(way, p), _short(error))
        return None


def refuse(kind: Kind, why: str) -> None:
    """Use the portable kernel for this kind from now on; warns the first time."""
    with _lock:
        _answers[kind] = why
        if kind.device in _warned:
            return
        _warned.add(kind.device)
    warnings.warn(
        f"The Hopper kernel {kind} is not used on {kind.device}: {why}. The portable Triton kernel "
        "runs, which is slower; mc.explain says what runs.",
        stacklevel=2,
    )


def reason(device: torch.device) -> str:
    """Which kernels run on a device, and why, for `explain`."""
    if not there(device):
        return "portable Triton kernels; the others are for Hopper GPUs"
    known = {kind: why for kind, why in list(_answers.items()) if kind.device == device}
    refused = [f"not {kind}: {why}" for kind, why in known.items() if why is not None]
    agree = ", which agree with the portable ones here" if len(known) > len(refused) else ""
    if not known:
        agree = ", which the first call compares with the portable ones"
    return "; ".join([f"Hopper kernels where there is one{agree}", *refused])


def _must_not_run(device: torch.device) -> bool:
    """Whether a check is not possible now: a graph is captured, or a call is traced."""
    if torch.compiler.is_compiling():
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _disagrees(way: str, x: Inputs, static: Static, outcome: Outcome) -> str | None:
    """Why the kernels of a way may not be used, or None if they agree with the portable ones."""
    try:
        with torch.no_grad(), _Poisoned():
            small, of = _small_call(x, static)
            with _only(""):
                want = outcome(small, of, way != "forward")
            with _only(way):
                got = outcome(small, of, way != "forward")
            return _apart(got, want, x.v.dtype, static.shape[1])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return _short(error)


@contextlib.contextmanager
def _only(way: str) -> Iterator[None]:
    before, _local.way = checking(), way
    try:
        yield
    finally:
        _local.way = before


class _Poisoned(TorchDispatchMode):
    """New memory is filled with NaN or large numbers, so that reads before writes show."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "new_empty"):
            floating = out.dtype.is_floating_point
            out.fill_(float("nan") if floating else torch.iinfo(out.dtype).max // 2)
        return out


def _small_call(x: Inputs, static: Static) -> tuple[Inputs, Static]:
    """A short call like this one: random features and values, the call's own scales."""
    batch, heads, queries = static.shape
    batch, keys = min(batch, BATCH), x.v.shape[2]
    # With the same divisibility by 16 as in the call: Triton specialises for it.
    rows = LENGTH + queries % 16
    columns = rows if keys == queries else LENGTH + keys % 16 + MORE * (keys > queries)
    device = x.v.device
    draw = torch.Generator(device).manual_seed(0)

    def drawn(y: Tensor, length: int) -> Tensor:
        first, heads, width = min(y.shape[0], batch), y.shape[1], y.shape[3]
        by_tokens = y.stride(1) < y.stride(2)
        shape = (first, length, heads, width) if by_tokens else (first, heads, length, width)
        out = torch.randn(shape, generator=draw, device=device).to(y.dtype)
        return out.transpose(1, 2) if by_tokens else out

    def part(y: Tensor, length: int) -> Tensor:
        return _cycled(y[:batch], 2, length) if y.dim() >= 3 else y

    bias = x.bias
    if bias.table is not None:
        bias = bias._replace(table=part(bias.table, rows))
    if bias.asking is not None:
        bias = bias._replace(asking=drawn(bias.asking, rows))
    small = replace(
        x,
        q=[drawn(y, rows) for y in x.q],
        k=[drawn(y, columns) for y in x.k],
        v=drawn(x.v, columns),
        scale=[part(y, rows) for y in x.scale],
        row=[part(y, rows) for y in x.row],
        col=[part(y, columns) for y in x.col],
        bias=bias,
        lengths=None if x.lengths is None else x.lengths[:batch].clamp(max=columns - 37),
        ids=None if x.ids is None else _cycled(x.ids[:batch], 1, columns),
    )
    return small, static._replace(shape=(batch, heads, rows))


def _cycled(x: Tensor, dim: int, length: int) -> Tensor:
    """The first so many along a dimension; from the start again where there are fewer."""
    places = torch.arange(length, device=x.device) % max(1, x.shape[dim])
    return x.index_select(dim, places)


def _apart(got: list[Tensor], want: list[Tensor], dtype: torch.dtype, heads: int) -> str | None:
    """The difference of two results in words, if it is larger than rounding explains."""
    unit = torch.finfo(dtype).eps
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        a, b = a.float(), b.float()
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return f"result {n} has other numbers that are not finite than the portable kernel's"
        a, b = a[finite], b[finite]
        most = unit * (APART_SCALE if b.numel() <= heads else APART)
        error, size = (a - b).norm().item(), b.norm().item()
        if error > most * size + 1e-5 * b.numel() ** 0.5:
            return f"result {n} is {error / max(size, 1e-30):.1e} from the portable kernel's"
    return None


def _short(error: Exception) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first.strip()[:200]}"
