"""Choose the backend: the first one of the fitting rule that does not refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ..backends import Backend, Task, sdpa
from ..backends.chunked import backend as chunked
from ..backends.flex import backend as flex
from ..backends.polynomial import backend as linear
from ..backends.triton import backend as triton
from ..term.mix import Smoothed, mix, weighed
from . import rules

# The order in which "auto" tries them is in rules.json. The reference takes everything.
BACKENDS: dict[str, Backend] = {
    b.name: b for b in cast(tuple[Backend, ...], (triton, sdpa, chunked, linear, flex))
}
NAMES = ("auto", "reference", *BACKENDS)
RULES = rules.read(rules.PATH.read_text(encoding="utf-8"), BACKENDS)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The backend that runs, and why."""

    name: str
    because: str
    rule: rules.Rule | None = None
    family: str = ""

    def __str__(self) -> str:
        decided = f" [{self.family} rule: {self.rule.when}]" if self.rule is not None else ""
        return self.because + decided


def choose(tasks: tuple[Task, ...], backend: str) -> Choice:
    """The named backend, or the one that the rules choose. A named one that cannot run raises."""
    if backend == "reference":
        return Choice(name="reference", because="you named it")
    if backend != "auto":
        reason = _refusal(BACKENDS[backend], tasks)
        if reason is not None:
            raise ValueError(f"backend {backend!r} cannot run this: {reason}")
        return Choice(name=backend, because="you named it")
    return _by_rule(tasks) or Choice(name="reference", because="no other backend takes it")


def _by_rule(tasks: tuple[Task, ...]) -> Choice | None:
    """The first backend that takes all terms, of the first rule that fits and has one."""
    if not tasks:
        return None
    call, family = rules.describe(tasks), rules.family(tasks[0].device)
    refused: list[str] = []
    for rule in RULES[family]:
        if not rule.fits(call):
            continue
        for name in rule.backends:
            if name in refused:
                continue
            if _refusal(BACKENDS[name], tasks) is None:
                because = _because(rule, name)
                return Choice(name=name, because=because, rule=rule, family=family)
            refused.append(name)
    return None


def _because(rule: rules.Rule, name: str) -> str:
    """Why this backend of a rule runs; the rule's own reason is about its first backend."""
    *others, last = ("", *rule.backends[: rule.backends.index(name)])
    if not last:
        return rule.because
    before = f"{', '.join(others[1:])} and {last}" if others[1:] else last
    verb = "come" if others[1:] else "comes"
    return f"{before} {verb} first by the rule and cannot run this; {name} is the next that can"


def _refusal(backend: Backend, tasks: tuple[Task, ...]) -> str | None:
    if not tasks:
        return "the kernel has no lowering: it defines log_weight, but no terms"
    for task in tasks:
        why = backend.refuses(task)
        if why is not None:
            return why
    return None


def kernels(tasks: tuple[Task, ...], name: str) -> str:
    """Which kernels a backend runs, if it has several kinds."""
    return BACKENDS[name].kernels(tasks[0].device) if name in BACKENDS else ""


def refusals(tasks: tuple[Task, ...], chosen: str) -> dict[str, str]:
    """Why each backend other than the chosen one does not run."""
    reasons = {}
    for name, backend in BACKENDS.items():
        if name != chosen:
            reasons[name] = _refusal(backend, tasks) or _passed_over(backend, tasks)
    if chosen != "reference":
        reasons["reference"] = "it could run; it is dense and slow, for checking"
    return reasons


def _passed_over(backend: Backend, tasks: tuple[Task, ...]) -> str:
    elements = tasks[0].mask_elements if backend.dense_mask else 0
    needs = f", with a dense mask of {elements:,} elements" if elements else ""
    return f"it could run{needs}; another comes first"


def run(tasks: tuple[Task, ...], name: str) -> Smoothed:
    """All terms on one backend, mixed by their masses."""
    backend = BACKENDS[name]
    if all(task.term.log_weight is None for task in tasks):
        return mix(backend.run(tasks))
    # One by one: a backend that joins terms does not read their weights.
    each = [(task.term.log_weight, backend.run([task])) for task in tasks]
    return mix([weighed(part, weight) for weight, parts in each for part in parts])
