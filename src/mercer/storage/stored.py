"""Dataclasses read from stored JSON, with each field checked against its type.

Requirement: a file may be damaged or edited, so neither its types, nor its depth, nor the size of
its numbers are trusted. Whatever is wrong is a ValueError with one sentence.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
DEPTH = 32
LARGEST = 2**63


def parse(text: bytes) -> Any:
    """The values of a JSON text."""
    try:
        found = json.loads(text)
        _check(found, DEPTH)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    return found


def make(kind: type[T], values: Any) -> T:
    """An instance of a dataclass; names that it does not have are left out."""
    if not isinstance(values, dict):
        raise ValueError(f"it must be an object with names and values, got {values!r:.40}")
    hints = typing.get_type_hints(kind)
    found = {}
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        name, hint = entry.name, hints[entry.name]
        if name in values:
            if not _fits(values[name], hint):
                said = getattr(hint, "__name__", None) if isinstance(hint, type) else None
                said = said or str(hint).replace("typing.", "").replace("collections.abc.", "")
                raise ValueError(f"{name} must be {said}, got {values[name]!r:.40}")
            is_tuple = typing.get_origin(hint) is tuple
            found[name] = tuple(values[name]) if is_tuple else values[name]
        elif entry.default is entry.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} is missing")
    return kind(**found)


def read(kind: type[T], path: Path, what: str) -> T:
    """An instance from a file; errors name it and what it should be."""
    try:
        return make(kind, parse(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as {what}: {error}") from None


TOO_DEEP = f"it is nested more than {DEPTH} deep"


def _check(value: Any, depth: int) -> None:
    if isinstance(value, int) and abs(value) > LARGEST:
        raise ValueError("it has a number beyond 64 bits")
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError(TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            _check(item, depth - 1)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of an annotation."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in inner)
    if origin in (dict, Mapping):
        return isinstance(value, dict) and all(_fits(x, inner[1]) for x in value.values())
    if origin is list:
        return isinstance(value, list) and all(_fits(x, inner[0]) for x in value)
    if origin is tuple:
        return isinstance(value, list) and list(map(_fits, value, inner)) == [True] * len(inner)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)
