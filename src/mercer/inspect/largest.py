"""The largest weights of many rows: what a page holds of the rows of a text.

Rows are formed for some tokens at a time, and only their largest weights are kept, so memory does
not grow with rows times keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from .calls import Batch, Seen, watch
from .records import Records
from .rows import TOGETHER, row_weights


@dataclass(frozen=True, kw_only=True)
class LargestRow:
    """The largest weights of one row.

    Attributes:
        layer, head: the name of the layer in the model, and the number of the head.
        place: of the token that looks, counted from the beginning of the sequence.
        keys, weights: the places it looks at, with their weights, the largest first.
        rest: the sum of all other weights.
    """

    layer: str
    head: int
    place: int
    keys: tuple[int, ...]
    weights: tuple[float, ...]
    rest: float


class LargestRows(Records[LargestRow]):
    """A row for each layer, head and token."""


def largest(
    model: nn.Module,
    batch: Batch,
    places: Sequence[int],
    *,
    most: int = 8,
    sequence: int = 0,
    progress: Callable[[str], None] | None = None,
) -> LargestRows:
    """The `most` largest weights of the rows of these tokens, in every layer and head.

    Args:
        model, batch, sequence: as for `rows`; layers whose keys are of another sequence are left
            out.
        places: of the tokens that look, counted from 0.
        most: how many weights of each row are kept.
        progress: called with the name of each layer when it is read.
    """
    if not places or min(places) < 0:
        raise ValueError(f"places must be one or more numbers from 0 on, got {list(places)}")
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    found: dict[str, list[LargestRow]] = defaultdict(list)

    def look(seen: Seen) -> None:
        if not seen.own:
            return
        end = seen.first_query + seen.sizes[2]
        here = [n for n in places if seen.first_query <= n < end]
        for begin in range(0, len(here), TOGETHER):
            part = here[begin : begin + TOGETHER]
            weights = row_weights(seen, [n - seen.first_query for n in part], sequence)
            # By size, for weights may be below 0.
            order = weights.abs().sort(dim=-1, descending=True, stable=True).indices[..., :most]
            kept = weights.gather(-1, order)
            rest = weights.sum(-1) - kept.sum(-1)
            for h in range(weights.shape[0]):
                for n, place in enumerate(part):
                    pairs = zip(order[h, n].tolist(), kept[h, n].tolist(), strict=True)
                    some = [(k + seen.first_key, w) for k, w in pairs if w]
                    found[seen.name].append(
                        LargestRow(
                            layer=seen.name, head=h, place=place,
                            keys=tuple(k for k, _ in some), weights=tuple(w for _, w in some),
                            rest=float(rest[h, n]),
                        )
                    )  # fmt: skip
        if progress is not None:
            progress(seen.name)

    watch(model, batch, look)
    return LargestRows(tuple(row for each in found.values() for row in each))
