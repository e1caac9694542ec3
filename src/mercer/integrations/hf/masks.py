"""What a query sees: transformers' mask functions as filters.

`see` is registered beside the attention function under one name, so transformers asks it for the
mask of every call. It knows the functions for causal and bidirectional attention, for windows and
packed sequences, and the 2-D mask of padding. For any other function it returns transformers' own
dense mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ...filters import Causal, Documents, Filter, Full, Mask, Window
from ...filters.base import can_read


@dataclass(frozen=True)
class Seen:
    """A filter, as it goes through the model in the place of a mask."""

    filter: Filter
    # Which keys are no padding, [B, K]; None if all are tokens.
    real: Tensor | None = None
    # How many keys are written, where a static cache has more; None: all.
    length: int | None = None


def see(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Seen | Tensor:
    """The mask of a call, as transformers asks for it."""
    parts = _parts(mask_function)
    length: int | None = kv_length
    if parts is not None and any(not _is_placeless(part) for part in parts):
        length = _written(q_length, kv_length, q_offset, kv_offset)
    if parts is None or length is None:
        dense: Tensor = masking_utils.sdpa_mask(  # type: ignore[assignment]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            **options | {"allow_is_causal_skip": False},
        )  # fmt: skip
        return dense
    real = _real(attention_mask, kv_offset, length)
    if real is not None:
        parts.append(Mask(real[:, None, None]))
    return Seen(_join(parts), real, None if length == kv_length else length)


def read(mask: object, module: Any, is_causal: bool | None, num_queries: int, keys: int) -> Seen:
    """What an attention layer was given; ValueError for a mask of unknown origin."""
    if isinstance(mask, Seen):
        return mask
    name = type(module).__name__
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or num_queries == 1:
            return Seen(Full())
        if num_queries == keys:
            return Seen(Causal())
        raise ValueError(
            f"{name} was given {num_queries} queries, {keys} keys and no mask, so it is not known "
            "which keys a query sees"
        )
    if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() == 4:
        return Seen(Mask(mask))
    what = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise ValueError(
        f"{name} was given a mask of unknown origin, {what}: give the model a mask [B, T] of its "
        "tokens, or a boolean mask [B, 1, Q, K], True where a key is visible; numbers that are "
        "added to scores belong to softmax alone"
    )


def _parts(function: Callable[..., Any]) -> list[Filter] | None:
    """The filters that a mask function joins, or None if it is not known."""
    if function is masking_utils.causal_mask_function:
        return [Causal()]
    if function is masking_utils.bidirectional_mask_function:
        return []
    if torch.compiler.is_compiling():
        # What a function of the same graph holds cannot be read there.
        return None
    held = _held(function)
    match getattr(function, "__qualname__", "").split(".<locals>")[0]:
        case "and_masks":
            each = [_parts(part) for part in held["mask_functions"]]
            joined = [part for parts in each if parts is not None for part in parts]
            return None if None in each else joined
        case "sliding_window_overlay":
            return [Window(held["sliding_window"] - 1, -1)]
        case "sliding_window_bidirectional_overlay":
            return [Window(held["sliding_window"], held["sliding_window"])]
        case "packed_sequence_mask_function":
            return [Documents(held["packed_sequence_mask"])]
        case "remap_positions_for_packed_sequence":
            # From transformers 5.23. Places count from the start of each sequence of a packed row,
            # beside the mask of its sequences. The filters above ask only how far i is from j.
            return _parts(held["mask_function"])
    return None


def _held(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function of transformers' own module holds."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return {}
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _is_placeless(part: Filter) -> bool:
    return isinstance(part, Full)


def _written(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int) -> int | None:
    """How many keys there are up to the last query; None if it cannot be read.

    A static cache gives its whole buffer, in which later places are not written yet.
    """
    if isinstance(q_offset, Tensor):
        if not can_read(q_offset):
            return None
        q_offset = int(q_offset)
    length = q_offset + q_length - kv_offset
    return length if q_length <= length <= kv_length else None


def _real(attention_mask: Tensor | None, kv_offset: int, length: int) -> Tensor | None:
    """Which of the keys are tokens, [B, K]; None if all are."""
    padded = masking_utils.prepare_padding_mask(attention_mask, length, kv_offset)
    if padded is None:
        return None
    real = padded[:, kv_offset : kv_offset + length].bool()
    return None if can_read(real) and bool(real.all()) else real


def _join(parts: list[Filter]) -> Filter:
    windows = [part for part in parts if isinstance(part, Window)]
    if len(windows) == 1 and any(isinstance(part, Causal) for part in parts):
        rest = [part for part in parts if not isinstance(part, Causal | Window)]
        parts = [Window(windows[0].left, 0), *rest]
    joined: Filter = parts[0] if parts else Full()
    for part in parts[1:]:
        joined = joined & part
    return joined
