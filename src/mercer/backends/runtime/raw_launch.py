"""Compiled kernels started by addresses, without what Triton's own way there costs the host.

Triton asks for hooks, gathers names of arguments, and encodes descriptors for the copy engine anew
at each start; with some hundred arguments that takes longer than the start itself. Here all but
addresses is worked out once. How its launcher takes arguments is Triton's own business and changes
with it, so this serves the versions that it was run with; for others `starter` gives None, and
`Launch` is used.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from .launch import Launch

CHECKED = ("3.6.",)
# Before a kernel's own arguments: the grid, the stream (at this place), the function, two options,
# room that it might need, its metadata, and hooks with what they are told (from this place on).
STREAM, HOOKS = 3, 10
# Descriptors that are kept of one argument: addresses come again, since torch keeps memory.
MOST = 256

Step = Callable[[list[Any], list[int], int], None]


class Starter:
    """One launch, ready but for the addresses of its tensors."""

    def __init__(self, launch: Launch, function: Any, makers: list[Any], hooks: Any) -> None:
        self.launch, self.function, self.makers, self.hooks = launch, function, makers, hooks

    def bind(self, where: list[tuple[int, int]], numbers: tuple[int | float, ...]) -> Step:
        """The step of a tape; `where` has the tensor and the offset of each address."""
        compiled, run = self.launch.compiled, self.launch.compiled.run
        fixed: list[Any] = [
            *self.launch.grid, 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl,
            None, None, compiled.packed_metadata, None, None, None,
        ]  # fmt: skip
        plain: list[tuple[int, int, int]] = []
        described: list[tuple[int, int, int, Maker, dict[int, Any]]] = []
        for (root, offset), make in zip(where, self.makers, strict=True):
            if make is None:
                plain.append((len(fixed), root, offset))
                fixed.append(0)
            else:
                described.append((len(fixed), root, offset, make, {}))
                fixed += [None, *make.rest]
        fixed += [*numbers, *self.launch.constants.values()]
        function, hooks = self.function, self.hooks

        def step(values: list[Any], addresses: list[int], stream: int) -> None:
            args = fixed.copy()
            args[STREAM] = stream
            for at, root, offset in plain:
                args[at] = addresses[root] + offset
            for at, root, offset, make, kept in described:
                address = addresses[root] + offset
                found = kept.get(address)
                if found is None:
                    if len(kept) >= MOST:
                        kept.clear()
                    found = kept[address] = make(address)
                args[at] = found
            enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
            if enter.calls or leave.calls:
                told = compiled.launch_metadata(self.launch.grid, stream, *args[HOOKS + 3 :])
                args[HOOKS : HOOKS + 3] = told, enter, leave
            function(*args)

        return step


class Maker:
    """Encodes one descriptor for an address."""

    def __init__(self, like: Any, about: Any, encode: Callable[..., list[Any]]) -> None:
        self._like, self._about, self._encode = like, about, encode
        self.rest = [*like.shape, *like.strides]

    def __call__(self, address: int) -> Any:
        like = self._like
        base = SimpleNamespace(data_ptr=lambda: address)
        arg = SimpleNamespace(
            base=base, shape=like.shape, strides=like.strides, padding=like.padding
        )
        return self._encode(arg, self._about)[0]


def starter(launch: Launch, likes: list[Any]) -> Starter | None:
    """For a launch that has been compiled; `likes` has a descriptor for each argument, or None."""
    import triton

    if not triton.__version__.startswith(CHECKED) or launch.compiled is None:
        return None
    from triton.backends.nvidia import driver

    run = launch.compiled.run
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    function = run.launch
    makers: list[Maker | None] = [None] * len(likes)
    described = [n for n, like in enumerate(likes) if like is not None]
    if described:
        # Around the function itself there is one that encodes descriptors.
        names = function.__code__.co_freevars
        cells = dict(zip(names, (cell.cell_contents for cell in function.__closure__), strict=True))
        function, about = cells["launcher"], cells["tensordesc_meta"]
        if sorted(cells["tensordesc_indices"]) != described or None in about:
            return None
        for n, each in zip(described, about, strict=True):
            makers[n] = Maker(likes[n], each, driver.make_tensordesc_arg)
    return Starter(launch, function, makers, triton.knobs.runtime)
