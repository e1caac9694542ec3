"""What is patched, as it stands in a model's config under `mercer`: texts and numbers.

    {"version": 1, "kernels": {"0": "RBF(heads=9)"}, "token_kernels": {"size": 3, …}}

Requirement: a config comes from other people. Kernels are parsed, never evaluated; whatever is
unknown or of another type is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ... import parse
from ...kernels import Kernel
from ...nn import TokenKernels
from ...storage import stored

VERSION = 1
# Of the token kernels of one token: more than 100 layers of 100 heads with kernels of size 3.
MOST_TAPS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Table:
    """The arguments of token kernels."""

    vocab_size: int
    size: int
    on: str
    heads: int | None
    layers: int | list[int] | None
    temperature: float | None
    boundary: str
    start: float

    @classmethod
    def of(cls, tokens: TokenKernels) -> Table:
        found = {f.name: getattr(tokens, f.name) for f in fields(cls)}
        layers = found["layers"]
        return cls(**found | {"layers": list(layers) if isinstance(layers, tuple) else layers})

    def build(self) -> TokenKernels:
        each = len(self.layers) if isinstance(self.layers, list) else self.layers
        taps = (each or 1) * len(self.on) * (self.heads or 1) * self.size
        if taps > MOST_TAPS:
            raise ValueError(
                f"the config's token kernels have {taps:,} taps for each token, more than "
                f"{MOST_TAPS:,}"
            )
        given: dict[str, Any] = asdict(self)
        return TokenKernels(**given)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The kernels of the patched layers by their numbers, and the token kernels."""

    version: int = VERSION
    kernels: dict[str, str | None] = field(default_factory=dict)
    token_kernels: dict[str, Any] | None = None

    @classmethod
    def of(cls, kernels: Mapping[int, Kernel], tokens: TokenKernels | None) -> Spec:
        """What a model has now; None for a kernel that has no text."""
        return cls(
            kernels={str(number): _text(kernel) for number, kernel in kernels.items()},
            token_kernels=None if tokens is None else asdict(Table.of(tokens)),
        )

    @classmethod
    def read(cls, values: object) -> Spec:
        """From a config; ValueError for whatever does not belong there."""
        try:
            _check_names(cls, values)
            spec = stored.make(cls, values)
            if spec.version != VERSION:
                raise ValueError(f"its version is {spec.version}, and this Mercer reads {VERSION}")
            for number in spec.kernels:
                if not (number.isascii() and number.isdigit()):
                    raise ValueError(f"{number!r:.40} is no number of a layer")
            if spec.token_kernels is not None:
                _check_names(Table, spec.token_kernels)
                stored.make(Table, spec.token_kernels)
            return spec
        except ValueError as error:
            raise ValueError(f"the config's entry 'mercer' cannot be read: {error}") from None

    def write(self) -> dict[str, Any]:
        return asdict(self)

    def texts(self) -> dict[int, str]:
        """The kernels by number; ValueError where one has no text."""
        found = {int(number): text for number, text in self.kernels.items() if text is not None}
        if len(found) < len(self.kernels):
            raise ValueError("a kernel of the config's entry 'mercer' has no text form")
        return found

    def build_tokens(self) -> TokenKernels | None:
        if self.token_kernels is None:
            return None
        return stored.make(Table, self.token_kernels).build()


def _check_names(kind: type, values: object) -> None:
    known = [f.name for f in fields(kind)]
    unknown = [name for name in values if name not in known] if isinstance(values, dict) else []
    if unknown:
        raise ValueError(f"it has {unknown[0]!r:.40}, which is none of {', '.join(known)}")


def _text(kernel: Kernel) -> str | None:
    try:
        return parse.write(kernel)[0]
    except ValueError:
        return None
