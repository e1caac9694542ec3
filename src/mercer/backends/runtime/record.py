"""What a call asks of torch and of Triton, noted while it runs, for `tapes.py` to repeat.

A dispatch mode sees what is asked of torch; `Launch` tells what is started. Notes have numbers for
tensors, and keep none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from .launch import Launch


class Value(NamedTuple):
    """The n-th tensor of a call, among arguments and results."""

    number: int


class Op(NamedTuple):
    """Something asked of torch."""

    function: Any
    args: Any
    options: Any
    out: list[Any]  # the leaves of what it gave


class Start(NamedTuple):
    """A kernel with its arguments."""

    launch: Launch
    args: list[Any]
    numbers: tuple[int | float, ...]


class Described(NamedTuple):
    """A tensor for the copy engine."""

    base: Value
    like: Any


class About(NamedTuple):
    """What is known of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    root: int  # the first tensor of the same memory, or itself
    offset: int  # in bytes, from the root's first number
    whole: bool  # it is all of its memory


class Notes(TorchDispatchMode):
    """What a call does."""

    def __init__(self, given: Iterable[Tensor | None]) -> None:
        super().__init__()
        self.steps: list[Op | Start] = []
        self.about: list[About | None] = []
        self.problem = False
        # An object's place may be another's after it; so may its memory's.
        self._numbers: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._first: list[int] = []
        for x in given:
            self._add(x)

    def _add(self, x: Tensor | None, source: int | None = None) -> None:
        """One more tensor, a view of the source, if there is one."""
        number = len(self.about)
        self._first.append(0 if x is None else x.data_ptr())
        if x is None:
            return self.about.append(None)
        self._numbers[id(x)] = number, weakref.ref(x)
        about = None if source is None else self.about[source]
        root = number if about is None else about.root
        offset = x.data_ptr() - self._first[root] if x.numel() else 0
        whole = x.untyped_storage().nbytes() == x.numel() * x.dtype.itemsize
        shape, stride = tuple(x.shape), x.stride()
        self.about.append(About(shape, stride, x.dtype, x.device, root, offset, whole))

    def _number(self, x: Tensor) -> int | None:
        number, found = self._numbers.get(id(x), (None, None))
        return number if found is not None and found() is x else None

    def replaced(self, args: Any) -> Any:
        """Arguments or results with numbers for tensors."""
        return tree_map_only(Tensor, self._value, args)

    def _value(self, x: Tensor) -> Value:
        number = self._number(x)
        self.problem = self.problem or number is None
        return Value(-1 if number is None else number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        leaves, _ = tree_flatten(found)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if not tensors:
            # It may have read numbers, which another call's are not.
            self.problem = True
            return found
        noted, options = self.replaced(args), self.replaced(kwargs)
        for x in tensors:
            if self._number(x) is None:
                self._add(x, self._source(x, args))
        self.steps.append(Op(func, noted, options, self.replaced(leaves)))
        return found

    def _source(self, x: Tensor, args: Any) -> int | None:
        """Which argument shares its memory."""
        memory = x.untyped_storage()._cdata
        others = (y for y in tree_flatten(args)[0] if isinstance(y, Tensor))
        return next((self._number(y) for y in others if y.untyped_storage()._cdata == memory), None)

    def start(
        self, launch: Launch, tensors: Sequence[Any], numbers: tuple[int | float, ...]
    ) -> None:
        """Called by every launch."""
        args: list[Any] = []
        for x in tensors:
            if isinstance(x, Tensor):
                args.append(self._value(x))
            else:
                like = object.__new__(type(x))
                like.__dict__.update(x.__dict__, base=None)
                args.append(Described(self._value(x.base), like))
        self.steps.append(Start(launch, args, numbers))
