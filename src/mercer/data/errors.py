"""Errors of data."""

from __future__ import annotations

import importlib
from typing import Any

# as for numpy's seeds of 64 bits
LARGEST_SEED = 2**63 - 1


class DataError(ValueError):
    """Data that cannot be used; the message names the file and, for text, the line."""


def check_whole(name: str, value: object, least: int, most: int) -> None:
    """Raise ValueError for a value that is not a whole number in this range."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(
            f"{name} must be a whole number from {least} to {most}, got {shorten(value)}"
        )


def check_unnamed(columns: object, source: str) -> None:
    """Raise ValueError for columns of data that has none."""
    if columns is not None:
        raise ValueError(f"{source} has no columns with names, got columns={shorten(columns)}")


def check_columns(columns: object) -> None:
    """Raise ValueError for columns that are not two names; None is right, too."""
    names = columns if isinstance(columns, list | tuple) else ()
    if columns is not None and (len(names) != 2 or not all(isinstance(n, str) for n in names)):
        raise ValueError(f"columns must be two names such as ('a', 'b'), got {shorten(columns)}")


def shorten(value: object) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:70]}…"


def spell(name: str) -> str:
    """A name as a message shows it; with escapes if it has control characters, cut if long."""
    return name if name.isprintable() and len(name) <= 200 else shorten(name)


def need(name: str, extra: str = "train") -> Any:
    """Import the module, or raise an error that says what to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name.partition(".")[0]
        if error.name not in (missing, name):
            raise
        message = f"mercer.data needs {missing} for this: pip install 'mercer[{extra}]'"
        raise ModuleNotFoundError(message, name=missing) from None
