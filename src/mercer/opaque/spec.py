"""Frozen dataclasses as text and back.

A custom operator takes tensors, numbers and strings, never objects. Links and filters must still
reach it, so they travel as text: `Power(degree=2)`, `And(filters=(Padding(lengths=t0), …))`.

Text is never evaluated: the grammar is calls of registered names with literal arguments. Tensors
travel beside the text, so they stay in the graph. A user's subclass works without registration,
even if it has the name of one of ours.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import Tensor


class Spec:
    """A frozen dataclass that can be written as text; subclasses are known by their name."""

    registry: ClassVar[dict[str, type[Spec]]] = {}
    spec_name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        name = cls.__name__
        # A notebook cell that runs again replaces its class. Another class gets another name.
        while name in Spec.registry and _origin(Spec.registry[name]) != _origin(cls):
            name += "_"
        cls.spec_name = name
        Spec.registry[name] = cls
        if "__repr__" not in cls.__dict__:
            # That of dataclasses asks for the thread, which torch.compile cannot trace. Texts such
            # as why a backend does not run are part of a compiled call.
            cls.__repr__ = Spec.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        shown = [f for f in fields(self) if f.repr]  # type: ignore[arg-type]
        given = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in shown)
        return f"{type(self).__qualname__}({given})"

    def encode(self, tensors: list[Tensor]) -> str:
        """`Name(field=value, …)`; tensors are appended to the list and written as t0, t1, …"""
        values = [
            f"{field.name}={_encode(getattr(self, field.name), tensors)}"
            for field in fields(self)  # type: ignore[arg-type]
        ]
        return f"{self.spec_name}({', '.join(values)})"


def _origin(cls: type[Spec]) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _encode(value: object, tensors: list[Tensor]) -> str:
    if isinstance(value, Tensor):
        tensors.append(value)
        return f"t{len(tensors) - 1}"
    if isinstance(value, Spec):
        return value.encode(tensors)
    if isinstance(value, tuple):
        return "(" + "".join(f"{_encode(item, tensors)}, " for item in value) + ")"
    return repr(value)


def decode(text: str, tensors: Sequence[Tensor] = ()) -> Any:
    """The object (or tuple of objects) that `encode` wrote."""
    return _decode(ast.parse(text, mode="eval").body, tensors)


def _decode(node: ast.expr, tensors: Sequence[Tensor]) -> Any:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
            found = Spec.registry[name]
            # The object was checked when the user made it; here it is only rebuilt.
            rebuilt = object.__new__(found)
            for keyword in keywords:
                assert keyword.arg is not None
                object.__setattr__(rebuilt, keyword.arg, _decode(keyword.value, tensors))
            return rebuilt
        case ast.Name(id=name):
            return tensors[int(name[1:])]
        case ast.Tuple(elts=items):
            return tuple(_decode(item, tensors) for item in items)
        case _:
            return ast.literal_eval(node)
