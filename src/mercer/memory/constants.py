"""A cache of tensors that depend on shapes alone, such as sinusoids of places.

Each takes several small kernels, whose launches cost more than their work. Without the cache, a
captured CUDA graph would run them at every replay.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

# The cache holds MOST tensors of at most LARGEST bytes each. Tensors that captured graphs read are
# never freed; they may take FOR_GRAPHS bytes in all.
MOST, LARGEST, FOR_GRAPHS = 16, 2**23, 2**28
# Whether a captured graph can wait for an event that was recorded before it; not tested on ROCm.
WAITS = torch.version.hip is None


class Kept(NamedTuple):
    """A tensor, and the event after which it can be read; None on a CPU."""

    tensor: Tensor
    formed: torch.cuda.Event | None


_kept: OrderedDict[tuple[Hashable, ...], Kept] = OrderedDict()
# The tensors that captured graphs read, of all streams.
_for_graphs: dict[tuple[Hashable, ...], Kept] = {}
_lock = threading.Lock()


def constant(key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """make(), or its result for the same key in an earlier call; nothing may write to it."""
    # A compiled graph forms the tensor itself.
    if torch.compiler.is_compiling():
        return make()
    stream = 0
    # A tensor made in inference mode cannot be saved for a backward.
    inference = torch.is_inference_mode_enabled()
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            found = _captured((key, device, inference)) if WAITS else None
            return make() if found is None else found
        # One entry for each stream, so that no stream waits for another.
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
    """An event after all work that the current stream has by now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(external=WAITS)
    event.record(torch.cuda.current_stream(device))
    return event


def _captured(place: tuple[Hashable, ...]) -> Tensor | None:
    """A cached tensor for the graph that is being captured; None if there is none.

    The graph may run as long as the process does, so the tensor is never freed. Each replay waits
    until the tensor has been formed.
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
