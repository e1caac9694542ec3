"""`explain`: the formula, its terms, what cancels, the backend, and why others do not run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .backends import Task
from .dispatch import choose as dispatch
from .dispatch.problem import Problem, prepare
from .filters import Filter, Full
from .filters.places import Where
from .kernels import Kernel
from .term.biases import QueryTable, Relative
from .term.factors import Factor
from .term.features import Input
from .term.term import Term


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """How a call of `smooth` runs; `print` it."""

    formula: str
    filter: str
    shape: str
    terms: tuple[str, ...]
    widths: tuple[int, ...]
    cancelled: tuple[str, ...]
    backend: str
    because: str
    refusals: dict[str, str]
    memory: int
    vicinity: str = ""
    kernels: str = ""
    places: str = ""

    def __str__(self) -> str:
        lines = [f"kernel    {self.formula}", f"filter    {self.filter}", f"shape     {self.shape}"]
        if self.vicinity:
            lines.insert(1, f"vicinity  {self.vicinity}")
        if self.places:
            lines.append(f"places    {self.places}")
        for n, term in enumerate(self.terms):
            lines.append(f"{'lowers to' if n == 0 else '        +'} {term}")
        if not self.terms:
            lines.append("lowers to nothing: the kernel has no terms")
        lines += [f"cancels   {what}" for what in self.cancelled]
        lines.append(f"backend   {self.backend}: {self.because}")
        if self.kernels:
            lines.append(f"runs      {self.kernels}")
        lines += [f"not       {name}: {why}" for name, why in self.refusals.items()]
        lines.append(f"memory    {_bytes(self.memory)} beyond the inputs and the output")
        return "\n".join(lines)


def explain(
    kernel: Kernel,
    q: Input,
    k: Input,
    v: Tensor,
    *,
    filter: Filter = Full(),
    backend: str = "auto",
    dropout_p: float = 0.0,
    return_log_mass: bool = False,
    places: Where | None = None,
) -> Explanation:
    """Which backend `smooth` would run with these arguments, why, and how the kernel lowers."""
    problem = prepare(kernel, q, k, v, filter, dropout_p, return_log_mass, backend, places)
    tasks = problem.tasks()
    choice = dispatch.choose(tasks, backend)
    return Explanation(
        formula=repr(kernel),
        filter=repr(filter),
        shape=_shape(problem),
        terms=tuple(describe(task.term) for task in tasks),
        widths=tuple(width(task.term) for task in tasks),
        cancelled=tuple(what for task in tasks for what in _cancelled(task)),
        backend=choice.name,
        because=str(choice),
        refusals=dispatch.refusals(tasks, choice.name),
        memory=_memory(problem, tasks, choice.name),
        kernels=dispatch.kernels(tasks, choice.name),
        places="" if problem.places is None else str(problem.places),
    )


def width(term: Term) -> int:
    """Features of the dot products, numbers per key included."""
    return sum(f.width + f.keyed for f in term.factors)


def describe(term: Term) -> str:
    """One line for a term: its dot products, links and biases."""
    plain = [f for f in term.factors if f.link is None]
    parts = []
    if plain:
        parts.append(f"exp({_dot(plain)})")
    parts += [f"{f.link.formula} of s = {_dot([f])}" for f in term.factors if f.link is not None]
    for bias in term.biases:
        assert isinstance(bias, Relative), bias
        each = "query" if isinstance(bias, QueryTable) or bias.per_query else "head"
        parts.append(f"exp(table of {2 * bias.clip + 1} distances for each {each})")
    if term.log_weight is not None:
        parts.insert(0, "a weight for each head" if term.log_weight.numel() > 1 else "a weight")
    return " * ".join(parts) or "1"


def _dot(factors: list[Factor]) -> str:
    widths = " + ".join(str(f.width) for f in factors if f.width)
    keyed = sum(f.keyed for f in factors)
    parts = [f"a dot product of {widths} features"] if widths else []
    if keyed:
        parts.append(f"{'one number' if keyed == 1 else f'{keyed} numbers'} per key")
    return " + ".join(parts)


def _cancelled(task: Task) -> list[str]:
    plain = [f for f in task.term.factors if f.link is None and f.has_row]
    kept = ", kept for log_mass only" if task.log_mass else ""
    found = [f"what depends on the query alone, in the normaliser{kept}"] if plain else []
    if task.term.log_weight is not None:
        found.append(f"the weight of the term, in its normaliser{kept}")
    return found


def _shape(problem: Problem) -> str:
    q, k, v = problem.q, problem.k, problem.v
    parts = ", ".join(f"{name} {x.shape[-1]}" for name, x in q.items())
    heads = f"H {q.heads}" + (f" (keys {k.heads})" if k.heads != q.heads else "")
    return (
        f"B {problem.batch}, {heads}, Q {q.length}, K {k.length}, {parts}, V {v.shape[-1]}, "
        f"{str(v.dtype).removeprefix('torch.')} on {v.device}"
    )


def _memory(problem: Problem, tasks: tuple[Task, ...], name: str) -> int:
    if name != "reference":
        return max(dispatch.BACKENDS[name].memory(task) for task in tasks)
    pairs = problem.batch * problem.q.heads * problem.q.length * problem.k.length
    # Weights, shares and logits; a distance kernel also holds the differences of all features.
    features = max(x.shape[-1] for x in problem.q.tensors())
    return pairs * (3 + features) * problem.v.dtype.itemsize


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
