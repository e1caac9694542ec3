"""Distances between models as a matrix and a tree of average linkage."""

from __future__ import annotations

from typing import Any

from ..style import Distances


def encode_distances(distances: Distances) -> dict[str, Any]:
    """The names, the matrix, and the joins of the tree."""
    return {
        "names": list(distances.names),
        "matrix": [[float(f"{x:.5g}") for x in row] for row in distances.matrix.tolist()],
        "joins": join(distances),
    }


def join(distances: Distances) -> list[list[float]]:
    """[a, b, height] for each join: the nearest two groups, by their mean distance.

    Groups 0 to N - 1 are the models; join n makes the group N + n.
    """
    matrix = distances.symmetric().matrix.clamp(min=0).tolist()
    groups = {n: [n] for n in range(len(matrix))}
    found: list[list[float]] = []
    while len(groups) > 1:
        pairs = [(a, b) for a in groups for b in groups if a < b]
        height, a, b = min((_mean(matrix, groups[a], groups[b]), a, b) for a, b in pairs)
        groups[len(matrix) + len(found)] = groups.pop(a) + groups.pop(b)
        found.append([a, b, float(f"{height:.5g}")])
    return found


def _mean(matrix: list[list[float]], a: list[int], b: list[int]) -> float:
    return sum(matrix[i][j] for i in a for j in b) / (len(a) * len(b))
