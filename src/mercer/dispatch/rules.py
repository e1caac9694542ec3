"""Which backends `auto` tries, and in which order: measured rules, in rules.json.

For each family of devices there is a list of rules. A rule has conditions and a list of
backends to try. The first rule that fits decides; if all its backends refuse, the next. The last
rule of a family always fits. The file is meant to be edited by hand; `mercer bench --tune --write`
adds rules measured on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends import Task
from ..opaque.constant import is_constant
from ..term.layout import accumulator
from ..term.links import Power
from ..term.term import Term

PATH = Path(__file__).with_name("rules.json")
# hopper: CUDA of capability 9; cuda: every other GPU; cpu: everything else.
FAMILIES = ("cpu", "hopper", "cuda")
# What a backend has to compute for a term; see `kind_of`.
KINDS = ("plain", "keyed", "adaptive", "several", "table", "power", "link", "mixed")


class Call(NamedTuple):
    """The properties of a call that conditions of rules compare."""

    kind: str
    half: bool
    gradient: bool
    log_mass: bool
    queries: int
    keys: int
    features: int  # of the widest part
    values: int
    mask: int  # elements of the dense mask that SDPA would need


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Conditions (None: no condition), backends to try, and where that was measured."""

    kind: str | None = None
    half: bool | None = None
    gradient: bool | None = None
    log_mass: bool | None = None
    at_most_queries: int | None = None
    at_least_keys: int | None = None
    at_least_keys_per_dv: float | None = None  # keys / (features * values)
    at_least_features: int | None = None
    at_least_mask: int | None = None
    at_most_mask: int | None = None
    backends: tuple[str, ...]
    because: str

    def fits(self, call: Call) -> bool:
        return (
            (self.kind is None or self.kind == call.kind)
            and (self.half is None or self.half == call.half)
            and (self.gradient is None or self.gradient == call.gradient)
            and (self.log_mass is None or self.log_mass == call.log_mass)
            and (self.at_most_queries is None or call.queries <= self.at_most_queries)
            and (self.at_least_keys is None or call.keys >= self.at_least_keys)
            and (
                self.at_least_keys_per_dv is None
                or call.keys >= self.at_least_keys_per_dv * call.features * call.values
            )
            and (self.at_least_features is None or call.features >= self.at_least_features)
            and (self.at_least_mask is None or call.mask >= self.at_least_mask)
            and (self.at_most_mask is None or call.mask <= self.at_most_mask)
        )

    @property
    def conditions(self) -> dict[str, Any]:
        """All conditions, by name."""
        names = [f.name for f in fields(self) if f.name not in ("backends", "because")]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def when(self) -> str:
        """The conditions in words."""
        said = [f"{name.replace('_', ' ')} {value}" for name, value in self.conditions.items()]
        return ", ".join(said) or "always"


Table = dict[str, tuple[Rule, ...]]


def family(device: torch.device) -> str:
    """The family of a device, which selects the rules."""
    if device.type != "cuda":
        return "cpu"
    return _family_of_gpu(-1 if device.index is None else device.index)


@is_constant
def _family_of_gpu(index: int) -> str:
    return _family_of_capability(index)


@lru_cache(maxsize=64)
def _family_of_capability(index: int) -> str:
    major, _ = torch.cuda.get_device_capability(None if index < 0 else index)
    return "hopper" if major == 9 and torch.version.hip is None else "cuda"


def describe(tasks: tuple[Task, ...]) -> Call:
    """The terms of a call as the rules see them."""
    task = tasks[0]
    kinds = {kind_of(task.term) for task in tasks}
    return Call(
        kind=kinds.pop() if len(kinds) == 1 else "mixed",
        half=accumulator(task.v.dtype) != task.v.dtype,
        gradient=any(task.learns for task in tasks),
        log_mass=task.log_mass,
        queries=task.num_queries,
        keys=task.num_keys,
        features=max([0, *(f.width for task in tasks for f in task.term.factors)]),
        values=task.v.shape[-1],
        mask=task.mask_elements,
    )


def kind_of(term: Term) -> str:
    """What a backend has to compute for a term, one of KINDS."""
    wide = [f for f in term.factors if f.width]
    if term.links:
        if len(wide) != 1 or len(term.factors) != 1 or term.biases:
            return "mixed"
        return "power" if isinstance(term.links[0], Power) else "link"
    if term.biases:
        return "table"
    if len(wide) > 1:
        return "several"
    if any(f.keyed and f.per_query for f in term.factors):
        return "adaptive"
    single = len(term.factors) == 1 and not term.factors[0].keyed
    return "plain" if single and not isinstance(term.factors[0].scale, Tensor) else "keyed"


def read(text: str, backends: Collection[str]) -> Table:
    """The table from JSON; raises ValueError for unknown names."""
    raw = json.loads(text)
    if tuple(raw) != FAMILIES:
        raise ValueError(f"rules must have the families {FAMILIES}, but have {tuple(raw)}")
    table = {name: tuple(_rule(entry, backends) for entry in raw[name]) for name in FAMILIES}
    for name, rules in table.items():
        if not rules or rules[-1].conditions:
            raise ValueError(f"the last rule of {name} must have no conditions")
    return table


def _rule(entry: dict[str, Any], backends: Collection[str]) -> Rule:
    try:
        rule = Rule(**{**entry, "backends": tuple(entry["backends"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"this rule cannot be read: {entry}: {error}") from None
    if rule.kind is not None and rule.kind not in KINDS:
        raise ValueError(f"a rule's kind must be one of {KINDS}, but is {rule.kind!r}")
    unknown = [name for name in rule.backends if name not in backends]
    if unknown or not rule.backends:
        raise ValueError(f"a rule's backends must be among {tuple(backends)}, but are {unknown}")
    return rule


def write(table: Table) -> str:
    """The table as JSON, each rule in three lines: when, what, why."""
    families = []
    for name, rules in table.items():
        entries = ",\n".join(as_entry(rule) for rule in rules)
        families.append(f'  "{name}": [\n{entries}\n  ]')
    return "{\n" + ",\n".join(families) + "\n}\n"


def as_entry(rule: Rule) -> str:
    """One rule as the file holds it."""
    conditions = json.dumps(rule.conditions)[1:-1]
    lines = [conditions] if conditions else []
    lines += [f'"backends": {json.dumps(rule.backends)}', f'"because": {json.dumps(rule.because)}']
    return "    {" + ",\n     ".join(lines) + "}"


def put_first(table: Table, name: str, rules: Iterable[Rule]) -> Table:
    """The table with these rules first. They replace rules that differ in sizes only."""
    new = tuple(rules)
    scopes = [_scope(rule) for rule in new]
    kept = tuple(rule for rule in table[name] if _scope(rule) not in scopes)
    # Rules for few queries go before those for any number.
    return {**table, name: tuple(sorted(new + kept, key=lambda r: r.at_most_queries is None))}


def _scope(rule: Rule) -> dict[str, Any]:
    sizes = ("at_least_keys", "at_least_features")
    return {key: value for key, value in rule.conditions.items() if key not in sizes}
