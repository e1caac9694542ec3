"""Filters of a model's layers, from a pattern of short and long windows."""

from __future__ import annotations

from ..filters import Causal, Filter, Window


def layer_windows(
    pattern: str, num_layers: int, *, short: int, long: int | None = None
) -> list[Filter]:
    """The filter of every layer from a pattern such as "SSSL", repeated over the layers.

    S sees `short` places back, L sees `long` places back, or all of them. The last layer is long,
    whatever the pattern says, as in nanochat.
    """
    if not pattern or set(pattern.upper()) - {"S", "L"}:
        raise ValueError(f"pattern must be made of S and L, such as 'SSSL', got {pattern!r}")
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    kinds: dict[str, Filter] = {
        "S": Window(short, 0),
        "L": Causal() if long is None else Window(long, 0),
    }
    letters = [pattern[n % len(pattern)].upper() for n in range(num_layers - 1)]
    return [kinds[letter] for letter in (*letters, "L")]
