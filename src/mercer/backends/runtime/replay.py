"""Calls that ran once, repeated: what they allocated and started, without deciding it all anew.

What a call of the fused kernels does follows from shapes, strides, types, alignment and options
alone, and to work that out may take the host longer than the GPU takes for the rest. So when a
call comes for the second time, all that it asks of torch and of Triton is noted while it runs
(notes.py); later calls repeat the notes with tensors of their own.

What this must meet: a tape keeps no tensor of the call that it was made from; a call that reads
numbers from a tensor, such as a seed, or tensors that were not given, is never repeated; what is
large is given back after its last use, as by the call itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from . import launch as launches
from .record import About, Described, Notes, Op, Start, Value

ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class Untaped(Enum):
    """Why a call that came before has no tape."""

    ONCE = "it came once, as calls with a cache that grows do: notes would not pay"
    NEVER = "it cannot be repeated"


# How many keys are known before all are forgotten.
MOST = 4096
_tapes: dict[tuple[Any, ...], Tape | Untaped] = {}
# For tests, and to see what it brings.
enabled = True


def play(
    name: str,
    options: Any,
    tensors: Sequence[Tensor | None],
    run: Callable[..., Sequence[Any]],
) -> list[Any]:
    """run(*tensors), or what an earlier call with such tensors and options did."""
    # A part of a call that is being noted is noted with it.
    if not enabled or launches.listening():
        return list(run(*tensors))
    places = [0 if x is None else x.data_ptr() for x in tensors]
    key = (
        name, options,
        *[None if x is None else (x.dtype, x.device, x.shape, x.stride()) for x in tensors],
        # Triton, and the copy engine, tell apart what begins at a multiple of 16 bytes.
        *[place & 15 for place in places],
    )  # fmt: skip
    tape = _tapes.get(key)
    if type(tape) is Tape:
        return tape(tensors)
    if tape is Untaped.ONCE:
        # An error leaves no tape.
        found, _tapes[key] = _record(tensors, run)
        return found
    found = list(run(*tensors))
    if tape is None:
        if len(_tapes) >= MOST:
            _tapes.clear()
        _tapes[key] = Untaped.ONCE
    return found


class View(NamedTuple):
    """Part of a tensor, or all of it in another form, whatever it was that gave it."""

    root: int
    number: int


def _record(
    tensors: Sequence[Tensor | None], run: Callable[..., Sequence[Any]]
) -> tuple[list[Any], Tape | Untaped]:
    # Two arguments may be one tensor here and two in a later call.
    given = [None if x is None else x.detach() for x in tensors]
    notes = Notes(given)
    with notes, launches.heard(notes.start):
        found = list(run(*given))
    results = notes.replaced(found)
    return found, Untaped.NEVER if notes.problem else Tape(len(given), notes, results)


class Tape:
    """The steps of a call, with numbers for tensors."""

    def __init__(self, given: int, notes: Notes, results: list[Any]) -> None:
        self.given, self.results = given, results
        self.about = notes.about
        self.device = next((x.device for x in self.about if x is not None), None)
        self.held: set[int] = set()  # tensors that steps make
        self.laid: dict[int, int] = {}  # an allocation and the view that takes its place
        self.steps: list[Callable[[list[Any]], None]] = []
        self._compile(list(self._viewed(notes.steps)))

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        device = self.device
        if device is None or device.type != "cuda":
            return self._run(tensors)
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._run(tensors)
        return self._run(tensors)

    def _run(self, tensors: Sequence[Tensor | None]) -> list[Any]:
        more = len(self.about) - self.given
        values: list[Any] = [*tensors, *[None] * more]
        for step in self.steps:
            step(values)
        return [values[x.number] if type(x) is Value else x for x in self.results]

    def _viewed(self, steps: Iterable[Op | Start]) -> Iterator[Op | Start | View]:
        """With views straight from what they are views of: torch's own operators take longer."""
        for step in steps:
            views = [] if isinstance(step, Start) else self._views(step)
            if views:
                yield from views
            else:
                yield step

    def _views(self, op: Op) -> list[View]:
        """What an operation gives, if that is nothing but views."""
        if op.function._schema.is_mutable or op.function in ALLOCATIONS:
            return []
        views = []
        for x in op.out:
            about = self.about[x.number] if isinstance(x, Value) else None
            root = None if about is None else self.about[about.root]
            if about is None or root is None or about.root == x.number or root.dtype != about.dtype:
                return []
            views.append(View(about.root, x.number))
        return views

    def _compile(self, steps: list[Op | Start | View]) -> None:
        kept = self._needed(steps)
        last = {number: n for n, step in enumerate(steps) for number in self._touched(step)}
        stay = {x.number for x in self.results if isinstance(x, Value)}
        stay |= {*range(self.given), *self._roots(stay)}
        standing = set(self.laid.values())
        for n, step in enumerate(steps):
            if isinstance(step, Start):
                self.steps.append(_launch(step))
            elif not kept[n]:
                pass
            elif isinstance(step, View):
                self.held.add(step.number)
                self.steps.append(_view(step, self.about[step.number]))
            else:
                self._op(step)
            done = [m for m in self._touched(step) if last[m] == n and m not in stay]
            # What stands for an allocation lives as long as its memory is used.
            done = [self.laid.get(m, m) for m in done if m not in standing]
            if held := [m for m in done if m in self.held]:
                self.steps.append(_forget(held))

    def _roots(self, numbers: Iterable[int]) -> set[int]:
        return {about.root for n in numbers if (about := self.about[n]) is not None}

    def _touched(self, step: Op | Start | View) -> set[int]:
        """What a step reads, and what that is a view of."""
        reads = _reads(step)
        return {*reads, *self._roots(reads)}

    def _needed(self, steps: list[Op | Start | View]) -> list[bool]:
        """Which operations must run."""
        tensors = {x.number for x in self.results if isinstance(x, Value)}
        kept = [False] * len(steps)
        for n in reversed(range(len(steps))):
            step = steps[n]
            if isinstance(step, Start):
                tensors |= set(_reads(step))
                continue
            if isinstance(step, View):
                if step.number in tensors:
                    kept[n] = True
                    tensors.add(step.root)
                continue
            out = {x.number for x in step.out if isinstance(x, Value)}
            if step.function in ALLOCATIONS:
                kept[n] = bool(out & tensors)
            elif step.function._schema.is_mutable or out & tensors:
                kept[n] = True
                tensors |= set(_reads(step))
        # A view of all of an allocation is allocated itself, if nothing else asks for that.
        return self._direct(steps, kept)

    def _direct(self, steps: list[Op | Start | View], kept: list[bool]) -> list[bool]:
        readers: dict[int, list[int]] = {}
        for n, step in enumerate(steps):
            asks = isinstance(step, Start) or kept[n]
            asks = asks and not (isinstance(step, Op) and step.function in ALLOCATIONS)
            for number in _reads(step) if asks else ():
                readers.setdefault(number, []).append(n)
        asked = {x.number for x in self.results if isinstance(x, Value)}
        for n, step in enumerate(steps):
            if not (isinstance(step, Op) and kept[n] and step.function in ALLOCATIONS):
                continue
            (number,) = (x.number for x in step.out)
            users = readers.get(number, [])
            view = steps[users[0]] if len(users) == 1 and number not in asked else None
            if not isinstance(view, View):
                continue
            base, other = self.about[number], self.about[view.number]
            assert base is not None
            assert other is not None
            if base.whole and other.whole and not other.offset:
                self.laid[number] = view.number
                kept[users[0]] = False
        return kept

    def _op(self, step: Op) -> None:
        if step.function not in ALLOCATIONS:
            self.held |= {x.number for x in step.out if isinstance(x, Value)}
            self.steps.append(_repeat(step))
            return
        (number,) = (x.number for x in step.out)
        shown = self.laid.get(number, number)
        about = self.about[shown]
        assert about is not None
        self.held.add(shown)
        self.steps.append(_allocate(about, shown))


def _reads(step: Op | Start | View) -> list[int]:
    """The numbers of the tensors that a step takes."""
    if isinstance(step, Start):
        return [(x.base if isinstance(x, Described) else x).number for x in step.args]
    if isinstance(step, View):
        return [step.root]
    leaves, _ = tree_flatten((step.args, step.options), is_leaf=lambda x: isinstance(x, Value))
    return [x.number for x in leaves if isinstance(x, Value)]


def _allocate(about: About, shown: int) -> Callable[..., None]:
    shape, stride, dtype, device, *_ = about
    empty = torch.empty_strided

    def step(values: list[Any]) -> None:
        values[shown] = empty(shape, stride, dtype=dtype, device=device)

    return step


def _view(view: View, about: About | None) -> Callable[..., None]:
    assert about is not None
    root, number = view
    shape, stride, offset = about.shape, about.stride, about.offset // about.dtype.itemsize

    def step(values: list[Any]) -> None:
        x = values[root]
        values[number] = x.as_strided(shape, stride, x.storage_offset() + offset)

    return step


def _repeat(op: Op) -> Callable[..., None]:
    function, args, options, out = op
    targets = [x.number if isinstance(x, Value) else None for x in out]

    def step(values: list[Any]) -> None:
        found = function(*_filled(args, values), **_filled(options, values))
        leaves = [found] if isinstance(found, Tensor) else tree_flatten(found)[0]
        for target, x in zip(targets, leaves, strict=True):
            if target is not None:
                values[target] = x

    return step


def _filled(x: Any, values: list[Any]) -> Any:
    """Arguments with tensors for numbers."""
    kind = type(x)
    if kind is Value:
        return values[x.number]
    if kind is tuple or kind is list:
        return kind([_filled(y, values) for y in x])
    return {k: _filled(y, values) for k, y in x.items()} if kind is dict else x


def _launch(start: Start) -> Callable[..., None]:
    launch, args, numbers = start

    def step(values: list[Any]) -> None:
        tensors = []
        for x in args:
            if type(x) is Described:
                like = object.__new__(type(x.like))
                like.__dict__.update(x.like.__dict__, base=values[x.base.number])
                tensors.append(like)
            else:
                tensors.append(values[x.number])
        launch(tuple(tensors), numbers)

    return step


def _forget(numbers: list[int]) -> Callable[..., None]:
    def step(values: list[Any]) -> None:
        for number in numbers:
            values[number] = None

    return step
