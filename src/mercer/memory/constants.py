"""Tensors that are the same in every call, such as sinusoids of places, kept for the next one.

On a GPU each of the small steps that form them takes the host longer than the device, and a graph
that is captured would take them in every run.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

# How many are kept, of those that are not larger than so many bytes; and how many bytes at most are
# kept for good, for captured graphs.
MOST, LARGEST, FOR_GRAPHS = 16, 2**23, 2**28
# Whether a captured graph can wait for what was told to a stream before: not known of ROCm.
WAITS = torch.version.hip is None


class Kept(NamedTuple):
    """A tensor, and when it lies in memory; None where it does as soon as it is made."""

    tensor: Tensor
    formed: torch.cuda.Event | None


_kept: OrderedDict[tuple[Hashable, ...], Kept] = OrderedDict()
# Those that captured graphs read, whatever stream they were made on.
_for_graphs: dict[tuple[Hashable, ...], Kept] = {}
_lock = threading.Lock()


def constant(key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """make(), or what it gave for the same key before; nobody may write to it or learn it."""
    # Compiled graphs form what they need.
    if torch.compiler.is_compiling():
        return make()
    stream = 0
    # What was made in inference mode cannot take part in a gradient.
    inference = torch.is_inference_mode_enabled()
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            found = _captured((key, device, inference)) if WAITS else None
            return make() if found is None else found
        # Another stream would have to wait for this one.
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    place = (key, device, inference, stream)
    with _lock:
        before = _kept.get(place)
        if before is not None:
            _kept.move_to_end(place)
            return before.tensor
    with torch.no_grad():
        kept = Kept(make(), _now(device))
    if kept.tensor.nbytes <= LARGEST:
        with _lock:
            _kept[place] = kept
            if len(_kept) > MOST:
                _kept.popitem(last=False)
    return kept.tensor


def _now(device: torch.device) -> torch.cuda.Event | None:
    """What a stream of the device has been told to do by now, for others to wait for."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(external=WAITS)
    event.record(torch.cuda.current_stream(device))
    return event


def _captured(place: tuple[Hashable, ...]) -> Tensor | None:
    """One that was made before, for a graph that is captured; None if there is none.

    The graph may run as long as the process does, so it is never let go, and each run waits until
    it has been formed.
    """
    with _lock:
        found = _for_graphs.get(place)
        if found is None:
            found = next((kept for at, kept in _kept.items() if at[:-1] == place), None)
            held = sum(kept.tensor.nbytes for kept in _for_graphs.values())
            if found is None or held + found.tensor.nbytes > FOR_GRAPHS:
                return None
            _for_graphs[place] = found
    if found.formed is not None:
        torch.cuda.current_stream(found.tensor.device).wait_event(found.formed)
    return found.tensor
