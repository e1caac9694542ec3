"""Functions whose result torch.compile takes as a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def is_constant(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without its import of torch's compiler.

    That takes longer than the rest of `import mercer`. The tests compare the mark with torch's own.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
