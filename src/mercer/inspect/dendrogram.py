"""Distances between corpora as a tree, in a PNG or an SVG."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from .style import Distances

# Okabe and Ito's colours, which are safe for colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
FORMATS = (".png", ".svg")


def draw_dendrogram(
    distances: Distances,
    path: str | os.PathLike[str],
    *,
    labels: Mapping[str, str] | None = None,
    linkage: Literal["average", "single", "complete"] = "average",
    title: str = "",
) -> Path:
    """Write the tree in which the nearest corpora are joined first; equal input, equal bytes.

    Args:
        distances: both directions count alike.
        path: a .png or .svg; it is replaced in one step.
        labels: names are coloured by their label.
        linkage: how far two groups are apart: the mean, least or largest distance.
        title: above the tree.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a dendrogram is written as {' or '.join(FORMATS)}, got {path.name}")
    if linkage not in ("average", "single", "complete"):
        raise ValueError(f"linkage must be average, single or complete, got {linkage!r}")
    if len(distances.names) < 2:
        raise ValueError(f"two corpora or more are needed, got {len(distances.names)}")
    import matplotlib
    from matplotlib.figure import Figure
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    # Distances of perplexity may be slightly below zero.
    matrix = distances.symmetric().matrix.clamp(min=0).numpy()
    tree = hierarchy.dendrogram(
        hierarchy.linkage(squareform(matrix, checks=False), linkage),
        labels=list(distances.names), no_plot=True,
    )  # fmt: skip
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "mercer"}):
        figure = Figure(
            figsize=(8, max(2.0, 0.24 * len(distances.names) + 1)), layout="constrained"
        )
        axes = figure.subplots()
        for across, along in zip(tree["dcoord"], tree["icoord"], strict=True):
            axes.plot(across, along, color="#444444", linewidth=1.2)
        axes.set_yticks([10 * n + 5 for n in range(len(tree["ivl"]))], tree["ivl"])
        axes.yaxis.tick_right()
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(left=max(map(max, tree["dcoord"])) * 1.02 or 1.0, right=0)
        axes.set_ylim(0, 10 * len(tree["ivl"]))
        axes.set_xlabel("distance")
        axes.spines[["top", "left", "right"]].set_visible(False)
        if labels is not None:
            kinds = list(dict.fromkeys(labels.get(name, "") for name in distances.names))
            for tick in axes.get_yticklabels():
                n = kinds.index(labels.get(tick.get_text(), ""))
                tick.set_color(COLOURS[n % len(COLOURS)])
        if title:
            axes.set_title(title, loc="left")
        kind = path.suffix.lower()[1:]
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            # Without the date a figure of the same numbers has the same bytes.
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            figure.savefig(temporary, dpi=150, format=kind, metadata=metadata)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path
