"""The kernels and filters of `mercer bench` by name: the registry, and two compositions."""

from __future__ import annotations

from dataclasses import dataclass

from .. import filters, kernels, own, parse
from ..dispatch.rules import KINDS
from ..filters import Filter
from ..kernels import RBF, Exponential, Kernel
from ..kernels.entry import Build


@dataclass(frozen=True)
class Measured:
    """A kernel that is measured; `kind` says what a backend computes for it, as in rules.py."""

    kind: str
    build: Build


def _kernels() -> dict[str, Measured]:
    """By kind, in the order of KINDS; the first of a kind represents it."""
    # Bandwidths are near sqrt(D), where normal features lie about sqrt(2 D) apart.
    found = {
        "product": Measured("several", lambda h, d: Exponential() * Exponential(on="position")),
        "sum": Measured("mixed", lambda h, d: RBF(d**0.5, heads=h) + Exponential()),
    }
    for cls in kernels.KERNELS:
        if cls.entry is not None and cls.entry.bench is not None:
            name, build = cls.entry.bench
            found[name] = Measured(cls.entry.kind, build)
    return dict(sorted(found.items(), key=lambda item: KINDS.index(item[1].kind)))


KERNELS = _kernels()
FILTERS = {f.__name__.lower(): f for f in filters.FILTERS if f.entry and f.entry.text}


def one_of_each_kind() -> list[str]:
    """The first kernel of every kind."""
    firsts: dict[str, str] = {}
    for name, measured in KERNELS.items():
        firsts.setdefault(measured.kind, name)
    return list(firsts.values())


def is_text(name: str) -> bool:
    """Whether this is the text of a kernel and not its name."""
    return "(" in name


def build_kernel(name: str, heads: int, dim: int) -> Kernel:
    """A kernel by its name, or by its text, whose files the command line has named."""
    if name in KERNELS:
        return KERNELS[name].build(heads, dim)
    return parse.kernel(name, own.sources(name))


def build_filter(text: str, shrink: float = 1.0) -> Filter:
    """A filter from its name and numbers, such as window:1024; `shrink` divides the numbers."""
    name, *numbers = text.split(":")
    if name not in FILTERS:
        raise _wrong(text)
    cls = FILTERS[name]
    assert cls.entry is not None
    defaults = list(cls.entry.numbers.values())
    if not defaults.count(None) <= len(numbers) <= len(defaults):
        raise _wrong(text)
    try:
        given = [int(number) for number in numbers]
    except ValueError:
        raise ValueError(f"--filter {text!r} needs whole numbers after {name}") from None
    given = [max(1, round(n / shrink)) if n > 0 else n for n in given]
    return cls(*given, *defaults[len(given) :])


def _wrong(text: str) -> ValueError:
    *others, last = [_usage(name, cls) for name, cls in FILTERS.items()]
    return ValueError(f"--filter must be {', '.join(others)} or {last}, got {text!r}")


def _usage(name: str, cls: type[Filter]) -> str:
    """How a filter is written, such as window:LEFT[:RIGHT]."""
    assert cls.entry is not None
    numbers = cls.entry.numbers.items()
    return name + "".join(f":{n.upper()}" if v is None else f"[:{n.upper()}]" for n, v in numbers)
