"""Pictures of the tables on matplotlib's axes, for papers. Needs matplotlib.

Every function takes axes, or makes a figure of its own, and returns the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .dendrogram import COLOURS

if TYPE_CHECKING:
    from .curves import Curves
    from .heads import Heads
    from .positions import DistanceWeights
    from .queries import Spreads
    from .rows import Rows
    from .tokens import TagSummaries, Tokens

# What the numbers of heads are called under a picture.
MEASURES = {
    "neighbours": "effective neighbourhood (tokens)",
    "bandwidth": "bandwidth",
    "self_weight": "weight on self",
    "first_weight": "weight on the first token",
    "distance": "mean distance (tokens)",
}


def plot_heads(heads: Heads, axes: Any = None, *, of: str = "neighbours") -> Any:
    """A map of layers and heads, coloured by one number of `MEASURES`."""
    if of not in MEASURES:
        raise ValueError(f"of must be one of {', '.join(MEASURES)}, got {of!r}")
    axes = _axes(axes)
    layers = list(dict.fromkeys(head.layer for head in heads))
    width = max((head.head for head in heads), default=0) + 1
    grid = [[float("nan")] * width for _ in layers]
    for head in heads:
        value = getattr(head, of)
        if value is not None:
            grid[layers.index(head.layer)][head.head] = value
    image = axes.imshow(grid, cmap="cividis", aspect="auto")
    axes.figure.colorbar(image, ax=axes, label=MEASURES[of])
    axes.set_yticks(range(len(layers)), layers)
    axes.set_xticks(range(width))
    axes.set_xlabel("head")
    return axes


def plot_rows(
    rows: Rows, axes: Any = None, *, layer: int = 0, tokens: Sequence[str] | None = None
) -> Any:
    """The last row of a layer, a line for each head."""
    axes, one = _axes(axes), rows[layer]
    places = range(one.first_key, one.first_key + one.weights.shape[2])
    for h in range(one.weights.shape[0]):
        axes.plot(places, one.weights[h, -1].tolist(), color=_colour(h), label=f"head {h}")
    axes.set_ylabel("weight")
    axes.set_xlabel("place of the key")
    if tokens is not None:
        axes.set_xticks(list(places), [tokens[n] for n in places], rotation=90)
    axes.legend(frameon=False)
    return axes


def plot_distances(weights: DistanceWeights, axes: Any = None, *, layer: str | None = None) -> Any:
    """The factor of positions against the distance, relative to its largest value."""
    axes = _axes(axes)
    layer = weights[0].layer if layer is None and len(weights) else layer
    for one in weights:
        if one.layer == layer:
            top = max(one.log_weight)
            logs = [x - top for x in one.log_weight]
            axes.plot(one.distances, logs, color=_colour(one.head), label=f"head {one.head}")
    axes.set_xlabel("distance i - j (tokens)")
    axes.set_ylabel("log weight, largest = 0")
    axes.legend(frameon=False)
    return axes


def plot_spreads(spreads: Spreads, axes: Any = None) -> Any:
    """The quantiles of bandwidths: a thin line of 90 %, a thick one of 50 %, the median."""
    axes = _axes(axes)
    for n, one in enumerate(spreads):
        low, quarter, half, three, high = one.quantiles
        axes.plot([low, high], [n, n], color=COLOURS[0], linewidth=1)
        axes.plot([quarter, three], [n, n], color=COLOURS[0], linewidth=4)
        axes.plot([half], [n], "o", color=COLOURS[1])
    axes.set_yticks(range(len(spreads)), [f"{one.layer} head {one.head}" for one in spreads])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("bandwidth")
    return axes


def plot_tokens(tokens: Tokens, axes: Any = None, *, most: int = 20) -> Any:
    """The kernels of the most deviating tokens, as strips of taps."""
    axes = _axes(axes)
    chosen = sorted(tokens, key=lambda one: -one.deviation)[:most]
    limit = max((abs(x) for one in chosen for x in one.kernel), default=1.0) or 1.0
    strips = [list(one.kernel) for one in chosen]
    image = axes.imshow(strips, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
    axes.figure.colorbar(image, ax=axes, label="tap")
    p = len(chosen[0].kernel) // 2 if chosen else 0
    axes.set_xticks(range(2 * p + 1), [f"{d:+d}" if d else "0" for d in range(-p, p + 1)])
    axes.set_yticks(range(len(chosen)), [one.text.replace("$", r"\$") for one in chosen])
    axes.set_xlabel("neighbour (tokens)")
    return axes


def plot_tags(tags: TagSummaries, axes: Any = None) -> Any:
    """Means with their standard error, and the published means as rings."""
    axes = _axes(axes)
    for n, one in enumerate(tags):
        error = one.spread / max(one.tokens, 1) ** 0.5
        axes.errorbar([one.mean], [n], xerr=[error], fmt="o", color=COLOURS[0])
        if one.published is not None:
            axes.plot([one.published], [n], "o", markerfacecolor="none", color=COLOURS[1])
    axes.set_yticks(range(len(tags)), [one.tag for one in tags])
    axes.invert_yaxis()
    axes.set_xlabel("mean deviation, |kernel - Dirac|")
    return axes


def plot_curves(
    curves: Curves, axes: Any = None, *, names: Iterable[str] = ("loss", "eval_loss")
) -> Any:
    """Curves over steps; "bandwidth" stands for those of all heads."""
    axes = _axes(axes)
    wanted, drawn = list(names), 0
    for curve in curves:
        if curve.name in wanted or curve.name.split(" ")[0] in wanted:
            axes.plot(curve.steps, curve.values, color=_colour(drawn), label=curve.name)
            axes.set_ylabel(curve.unit or curve.name.split(" ")[0].replace("_", " "))
            drawn += 1
    if not drawn:
        known = dict.fromkeys(curve.name.split(" ")[0] for curve in curves)
        raise ValueError(f"no curve is named {', '.join(wanted)}; there are: {', '.join(known)}")
    axes.set_xlabel("step")
    if drawn <= len(COLOURS):
        axes.legend(frameon=False)
    return axes


def _axes(axes: Any) -> Any:
    if axes is not None:
        return axes
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install matplotlib", name="matplotlib"
        ) from None
    return Figure(layout="constrained").subplots()


def _colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]
