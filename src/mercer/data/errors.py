"""Errors of data."""

from __future__ import annotations

import importlib
from typing import Any


class DataError(ValueError):
    """Data that cannot be used; the message names the file and, for text, the line."""


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
