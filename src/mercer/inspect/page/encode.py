"""A report as small JSON: most numbers are whole millionths, and names stand once.

What is large on a page is the vocabulary, the token kernels and the rows. They are flat lists of
whole numbers, which deflate makes small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..curves import Curves
from ..largest import LargestRows
from ..report import Report
from ..tokens import Tokens

MILLION = 1_000_000
# The most points of a curve.
POINTS = 400


def encode(report: Report, decimals: int = 6) -> dict[str, Any]:
    """The values that the scripts of the page read, with so many decimals of token kernels."""
    layers = _layers(report)
    number = {name: n for n, name in enumerate(layers)}
    words, ids = _text(report)
    return {
        "title": report.title,
        "facts": [list(fact) for fact in report.facts],
        "notes": list(report.notes),
        "layers": layers,
        "words": words,
        "ids": ids,
        "context": report.context,
        "unit": report.unit,
        "first": report.first,
        "has_text": bool(report.words),
        "heads": [
            {
                "layer": number[one.layer], "head": one.head, "kernel": one.kernel,
                "bandwidth": _short(one.bandwidth), "start": _short(one.start),
                "neighbours": _short(one.neighbours), "visible": _short(one.visible),
                "self": _short(one.self_weight), "first": _short(one.first_weight),
                "distance": _short(one.distance), "far": list(one.far),
                "shares": _millionths(one.shares),
            }
            for one in report.heads or ()
        ],
        "positions": [
            {
                "layer": number[one.layer], "head": one.head, "kernel": one.kernel,
                "distances": list(one.distances), "log": _millionths(one.log_weight),
                "spread": _millionths(one.spread),
            }
            for one in report.positions or ()
        ],
        "spreads": [
            {
                "layer": number[one.layer], "head": one.head,
                "quantiles": [_short(x) for x in one.quantiles],
                "widest": [[word, _short(s)] for word, s in one.widest],
                "narrowest": [[word, _short(s)] for word, s in one.narrowest],
            }
            for one in report.spreads or ()
        ],
        "rows": _rows(report.rows, number),
        "tokens": _tokens(report.tokens, decimals),
        "tags": [
            {
                "tag": one.tag, "tokens": one.tokens, "mean": one.mean, "spread": one.spread,
                "direction": one.direction, "published": one.published,
                "most": list(one.most), "least": list(one.least),
            }
            for one in report.tags or ()
        ],
        "corpus": report.corpus,
        "curves": _curves(report.curves),
    }  # fmt: skip


def _layers(report: Report) -> list[str]:
    """The names of all layers, in order."""
    tables = (report.heads, report.positions, report.spreads, report.rows)
    return list(dict.fromkeys(one.layer for table in tables for one in table or ()))


def _text(report: Report) -> tuple[list[str], list[int]]:
    """The words, and the text in numbers of words.

    Without token kernels only the words of the text are kept.
    """
    if report.tokens is not None:
        return [one.text for one in report.tokens], list(report.ids)
    kept = {id: n for n, id in enumerate(dict.fromkeys(report.ids))}
    return [report.words[id] for id in kept], [kept[id] for id in report.ids]


def _rows(rows: LargestRows | None, number: dict[str, int]) -> dict[str, Any] | None:
    """Places, and for each layer, head and place: key, weight, key, weight, …, rest."""
    if not rows:
        return None
    places = list(dict.fromkeys(row.place for row in rows))
    heads: dict[int, dict[int, list[list[int]]]] = {}
    for row in rows:
        flat = []
        for key, weight in zip(row.keys, row.weights, strict=True):
            flat += [key, *_millionths([weight])]
        each = heads.setdefault(number[row.layer], {}).setdefault(row.head, [])
        each.append([*flat, *_millionths([row.rest])])
    return {
        "places": places,
        "most": max(len(row.keys) for row in rows),
        "layers": [
            {"layer": layer, "heads": [each[h] for h in sorted(each)]}
            for layer, each in heads.items()
        ],
    }


def _tokens(tokens: Tokens | None, decimals: int) -> dict[str, Any] | None:
    """Columns: the taps of all tokens, one after the other, and the deviations as they are.

    Taps are whole numbers from `low` on, of `width` digits each, without anything between them.
    """
    if tokens is None:
        return None
    tags = sorted({one.tag for one in tokens if one.tag is not None})
    place = {tag: n for n, tag in enumerate(tags)}
    taps = _whole((tap for one in tokens for tap in one.kernel), 10**decimals)
    low = min(taps, default=0)
    width = len(str(max(taps, default=0) - low))
    return {
        "size": len(tokens[0].kernel) if tokens else 0,
        "decimals": decimals,
        "low": low,
        "width": width,
        "taps": "".join(f"{tap - low:0{width}}" for tap in taps),
        "deviation": _millionths(float(f"{one.deviation:.4g}") for one in tokens),
        "count": [one.count for one in tokens] if any(one.count for one in tokens) else None,
        "tags": tags,
        "tag": [-1 if one.tag is None else place[one.tag] for one in tokens] if tags else None,
    }


def _curves(curves: Curves | None) -> list[dict[str, Any]]:
    found = []
    for curve in curves or ():
        # Evenly spread points, with the first and the last.
        most = len(curve.steps) - 1
        chosen = range(most + 1)
        if most >= POINTS:
            chosen = [round(n * most / (POINTS - 1)) for n in range(POINTS)]  # type: ignore[assignment]
        found.append(
            {
                "name": curve.name, "unit": curve.unit,
                "steps": [curve.steps[n] for n in chosen],
                "values": [_short(curve.values[n]) for n in chosen],
            }
        )  # fmt: skip
    return found


def _short(x: float | None) -> float | None:
    """Five digits; None for what JSON does not have."""
    return None if x is None or not math.isfinite(x) else float(f"{x:.5g}")


def _millionths(numbers: Iterable[float]) -> list[int]:
    return _whole(numbers, MILLION)


def _whole(numbers: Iterable[float], unit: int) -> list[int]:
    return [round(x * unit) if math.isfinite(x) else 0 for x in numbers]
