"""Which backend runs: the first that does not refuse, and why each other one did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, cast

from .backends import Task, chunked, linear, sdpa, triton
from .term import Smoothed, mix


class Backend(Protocol):
    """What a backend's module offers."""

    name: str

    def refuses(self, task: Task) -> str | None: ...

    def memory(self, task: Task) -> int: ...

    def run(self, task: Task) -> Smoothed: ...


# In the order in which "auto" tries them; the reference comes last and takes everything.
BACKENDS: dict[str, Backend] = {
    b.name: b for b in cast(tuple[Backend, ...], (triton, sdpa, chunked, linear))
}
NAMES = ("auto", "reference", *BACKENDS)
# Above this, a dense mask costs more than the blocks that chunked can skip.
LARGE_MASK = 2**22


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend that runs, and what decided."""

    name: str
    because: str


def choose(tasks: tuple[Task, ...], backend: str) -> Choice:
    """The named backend, or the first that takes all terms; a named one that cannot raises."""
    if backend == "reference":
        return Choice(name="reference", because="you named it")
    if backend != "auto":
        reason = _refusal(BACKENDS[backend], tasks)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot run this: {reason}")
        return Choice(name=backend, because="you named it")
    for name, candidate in BACKENDS.items():
        if _refusal(candidate, tasks) is None and _reluctance(name, tasks) is None:
            return Choice(name=name, because="the first that does not refuse")
    return Choice(name="reference", because="no other backend takes it")


def _refusal(backend: Backend, tasks: tuple[Task, ...]) -> str | None:
    if not tasks:
        return "the kernel has no lowering: it defines log_weight, but no terms"
    for task in tasks:
        why = backend.refuses(task)
        if why is not None:
            return why
    return None


def _reluctance(name: str, tasks: tuple[Task, ...]) -> str | None:
    """Why `auto` passes over a backend that could run."""
    if name == "triton" and all(sdpa.takes_as_it_is(task) for task in tasks):
        return "SDPA is faster where a term is its own form"
    if name == "sdpa":
        elements = max(sdpa.mask_elements(task) for task in tasks)
        if elements > LARGE_MASK:
            return f"it would need a dense mask of {elements:,} elements"
    if name == "chunked" and all(_long_enough(task) for task in tasks):
        return "at this length, linear time wins"
    return None


def _long_enough(task: Task) -> bool:
    """Where `linear` overtakes `chunked` on a CPU: from 0.6 D V keys on."""
    if linear.refuses(task) is not None:
        return False
    return task.num_keys >= 0.6 * task.term.factors[0].q.shape[-1] * task.v.shape[-1]


def handles_nan(tasks: tuple[Task, ...], name: str) -> bool:
    """Whether it keeps NaN to the rows that see it by itself; if not, it gets cleaned inputs."""
    return name == triton.name or (name == linear.name and all(map(linear.fused, tasks)))


def refusals(tasks: tuple[Task, ...], chosen: str) -> dict[str, str]:
    """Why each backend other than the chosen one does not run."""
    reasons = {}
    for name, backend in BACKENDS.items():
        if name != chosen:
            why = _refusal(backend, tasks) or _reluctance(name, tasks)
            reasons[name] = why or "it could run; another comes first"
    if chosen != "reference":
        reasons["reference"] = "it could run; it is dense and slow, for checking"
    return reasons


def run(tasks: tuple[Task, ...], name: str) -> Smoothed:
    """All terms on one backend, mixed by their masses."""
    return mix([BACKENDS[name].run(task) for task in tasks])
