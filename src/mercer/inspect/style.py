"""Corpora as points: their token kernels, or how often they use each word, and their distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..names import suggest
from ..nn import TokenKernels

Metric = Literal["euclidean", "manhattan", "cosine", "correlation"]
METRICS = ("euclidean", "manhattan", "cosine", "correlation")


@dataclass(frozen=True)
class Features:
    """One row of numbers for each corpus, [N, F] in float64."""

    names: tuple[str, ...]
    values: Tensor

    def __post_init__(self) -> None:
        _check(self.names, self.values)


@dataclass(frozen=True)
class Distances:
    """Row n: how far corpus n is from each corpus, [N, N] in float64."""

    names: tuple[str, ...]
    matrix: Tensor

    def __post_init__(self) -> None:
        _check(self.names, self.matrix)
        if self.matrix.shape[1] != len(self.names):
            raise ValueError(f"distances must be [N, N], got {list(self.matrix.shape)}")

    def symmetric(self) -> Distances:
        """The mean of both directions, and 0 from a corpus to itself."""
        both = (self.matrix + self.matrix.mT) / 2
        return Distances(self.names, both - torch.diag(both.diagonal()))


def _check(names: Sequence[str], values: Tensor) -> None:
    if values.dim() != 2 or values.shape[0] != len(names):
        raise ValueError(f"{len(names)} names need as many rows, got {list(values.shape)}")
    if len(set(names)) < len(names):
        raise ValueError(f"names must differ, got {', '.join(names)}")
    if not bool(values.isfinite().all()):
        raise ValueError("all numbers must be finite")


@torch.no_grad()
def kernel_features(
    tables: Mapping[str, TokenKernels],
    ids: Sequence[int],
    *,
    of: Literal["kernels", "deviations"] = "kernels",
) -> Features:
    """The kernels of these tokens, or their deviations, side by side.

    Args:
        tables: the token kernels of each corpus, of one vocabulary, size and shape.
        ids: the tokens to compare: those that all corpora have seen, as `shared_ids` gives them.
        of: "kernels": all taps; "deviations": |kernel - Dirac|.
    """
    if of not in ("kernels", "deviations"):
        raise ValueError(f"no {of!r}; {suggest(str(of), ('kernels', 'deviations'))}")
    shapes = {name: tuple(tokens.weight.shape) for name, tokens in tables.items()}
    if len(set(shapes.values())) != 1:
        said = "; ".join(f"{name}: {list(shape)}" for name, shape in shapes.items()) or "none"
        raise ValueError(f"the tables must have one shape, got {said}")
    (vocab, *_) = next(iter(shapes.values()))
    if not len(ids) or not 0 <= min(ids) <= max(ids) < vocab:
        raise ValueError(f"ids must be one or more of the {vocab} tokens, got {len(ids)} ids")
    rows = []
    for tokens in tables.values():
        values = tokens.kernels().double() if of == "kernels" else tokens.deviations()
        rows.append(values.cpu()[list(ids)].flatten())
    return Features(tuple(tables), torch.stack(rows))


def shared_ids(counts: Mapping[str, Tensor], minimum: int = 5) -> list[int]:
    """The tokens that every corpus has `minimum` times or more; counts as `count_ids` gives."""
    if not counts:
        raise ValueError("counts of one corpus or more are needed")
    least = torch.stack([torch.as_tensor(count) for count in counts.values()]).amin(0)
    ids: list[int] = (least >= minimum).nonzero()[:, 0].tolist()
    return ids


def word_frequencies(counts: Mapping[str, Tensor], most: int = 300) -> Features:
    """The frequencies of the `most` frequent tokens of all corpora, each in standard deviations.

    With `distances(…, "manhattan")` this is Burrows's Delta, the usual measure of style.
    """
    if len(counts) < 2:
        raise ValueError(f"two corpora or more are needed, got {len(counts)}")
    table = torch.stack([torch.as_tensor(c, dtype=torch.float64) for c in counts.values()])
    totals = table.sum(1, keepdim=True)
    if not bool((totals > 0).all()):
        raise ValueError(f"the corpus {list(counts)[int(totals[:, 0].argmin())]!r} has no tokens")
    shares = table / totals
    # Every corpus counts alike, however long it is; of equal tokens the first are taken.
    order = shares.mean(0).sort(descending=True, stable=True).indices[:most]
    chosen = shares[:, order]
    spread = chosen.std(0)
    varies = spread > 0
    return Features(tuple(counts), (chosen - chosen.mean(0))[:, varies] / spread[varies])


def distances(features: Features, metric: Metric = "euclidean") -> Distances:
    """How far each corpus is from each other, per feature where that has a meaning.

    "euclidean" is the root of the mean square, "manhattan" the mean, "cosine" 1 - cos, and
    "correlation" 1 - Pearson's r.
    """
    if metric not in METRICS:
        raise ValueError(f"no metric {metric!r}; {suggest(str(metric), METRICS)}")
    x = features.values.double()
    if metric in ("cosine", "correlation"):
        x = x - x.mean(1, keepdim=True) if metric == "correlation" else x
        norms = x.norm(dim=1, keepdim=True)
        if not bool((norms > 0).all()):
            name = features.names[int(norms[:, 0].argmin())]
            raise ValueError(f"{metric} needs features that vary, but those of {name!r} do not")
        x = x / norms
        matrix = (1 - x @ x.mT).clamp(min=0)
        matrix = matrix - torch.diag(matrix.diagonal())
    else:
        rows = [(x - row).abs() for row in x]
        power = 2 if metric == "euclidean" else 1
        matrix = torch.stack([row.pow(power).mean(1).pow(1 / power) for row in rows])
    return Distances(features.names, matrix)
