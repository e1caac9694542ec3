"""Tensors that are the same in every call, such as sinusoids of places, kept for the next one.

On a GPU each of the small steps that form them takes the host longer than the device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

# How many are kept, of those that are not larger than so many bytes.
MOST, LARGEST = 16, 2**23

_kept: OrderedDict[Hashable, Tensor] = OrderedDict()
_lock = threading.Lock()


def constant(key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """make(), or what it gave for the same key before; nobody may write to it or learn it."""
    # Compiled graphs form what they need; captured ones must, since they outlive what is kept.
    if torch.compiler.is_compiling():
        return make()
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        # Another stream would have to wait for this one.
        stream = torch.cuda.current_stream(device).cuda_stream
    # What was made in inference mode cannot take part in a gradient.
    key = (key, device, stream, torch.is_inference_mode_enabled())
    with _lock:
        found = _kept.get(key)
        if found is not None:
            _kept.move_to_end(key)
            return found
    with torch.no_grad():
        found = make()
    if found.numel() * found.dtype.itemsize <= LARGEST:
        with _lock:
            _kept[key] = found
            if len(_kept) > MOST:
                _kept.popitem(last=False)
    return found
