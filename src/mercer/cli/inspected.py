"""What `mercer inspect` shows in the terminal: compact tables by rich."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..inspect import Distances, HeadSummary, Report

HEADS: tuple[tuple[str, Callable[[HeadSummary], float | None]], ...] = (
    ("bandwidth", lambda one: one.bandwidth),
    ("start", lambda one: one.start),
    ("neighbours", lambda one: one.neighbours),
    ("distance", lambda one: one.distance),
    ("on self", lambda one: one.self_weight),
    ("on first", lambda one: one.first_weight),
)
MOST = 12
# Terminals from here on have a column for the kernels.
WIDE = 116


def show(report: Report, console: Console) -> None:
    """The tables of one model."""
    console.print(f"[bold]{escape(_visible(report.title))}[/]")
    console.print(escape(", ".join(f"{name} {value}" for name, value in report.facts)))
    for note in report.notes:
        console.print(f"[yellow]{escape(note)}[/]")
    if report.heads:
        _show_heads(report, console)
    if report.tags:
        _show_tags(report, console)
    if report.tokens:
        _show_tokens(report.tokens, console)
    if report.curves:
        ends = []
        for name in ("loss", "eval_loss", "bits_per_byte"):
            curve = report.curves.find(name)
            if curve is not None:
                words = name.replace("eval_", "validation ").replace("_", " ")
                ends.append(f"{words} {curve.values[-1]:.4g}")
        console.print("at the end of training: " + ", ".join(ends))


def show_distances(distances: Distances, console: Console) -> None:
    """The matrix of distances."""
    table = _table("distances of token kernels")
    table.add_column("from")
    for name in distances.names:
        table.add_column(escape(_visible(name)), justify="right")
    for name, row in zip(distances.names, distances.matrix.tolist(), strict=True):
        table.add_row(escape(_visible(name)), *map(_number, row))
    console.print(table)


def _show_heads(report: Report, console: Console) -> None:
    heads: Any = report.heads
    shown = [(name, get) for name, get in HEADS if any(get(one) is not None for one in heads)]
    wide = console.width >= WIDE
    table = _table("heads")
    table.caption = (
        f"neighbours and distance in {report.unit}; on self and on first, the {report.first}, are "
        "shares of the weight"
    )
    short = _shorten([one.layer for one in heads])
    for name in ("layer", "head", *(name for name, _ in shown)):
        table.add_column(name, justify="left" if name == "layer" else "right", no_wrap=True)
    if wide:
        table.add_column("kernel", overflow="fold")
    last = None
    for one in heads:
        layer = "" if one.layer == last else escape(short[one.layer])
        kernel = [escape(one.kernel)] if wide else []
        table.add_row(layer, str(one.head), *(_number(get(one)) for _, get in shown), *kernel)
        last = one.layer
    console.print(table)
    if not wide:
        # A kernel with its heads, where they share it.
        sharing: dict[str, list[str]] = {}
        for one in heads:
            sharing.setdefault(one.kernel, []).append(f"{short[one.layer]} {one.head}")
        for formula, names in sharing.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            console.print(f"{escape(names[0])}{more}: [bold]{escape(formula)}[/]")


def _shorten(names: Sequence[str]) -> dict[str, str]:
    """Names of layers without the parts that they all share at both ends."""
    parts = {name: name.split(".") for name in names}
    for end in (0, -1):
        while len({each[end] for each in parts.values()}) == 1 and all(
            len(each) > 1 for each in parts.values()
        ):
            for each in parts.values():
                each.pop(end)
    return {name: ".".join(each) for name, each in parts.items()}


def _show_tags(report: Report, console: Console) -> None:
    beside = report.corpus is not None
    table = _table("token kernels by part of speech")
    table.add_column("part of speech")
    for name in ("tokens", "deviation", "spread", *(["published"] if beside else [])):
        table.add_column(name, justify="right")
    table.add_column("most")
    for one in report.tags or ():
        numbers = [one.mean, one.spread, *([one.published] if beside else [])]
        table.add_row(one.tag, str(one.tokens), *map(_number, numbers), _words(one.most[:6]))
    console.print(table)


def _show_tokens(tokens: Any, console: Console) -> None:
    table = _table("tokens that deviate most")
    counted = any(one.count is not None for one in tokens)
    names = ["token", *(["count"] if counted else []), "deviation", "direction", "taps"]
    for name in names:
        left = name == "token"
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for one in sorted(tokens, key=lambda one: -one.deviation)[:MOST]:
        count = [str(one.count or 0)] if counted else []
        decimals = 4 if len(one.kernel) <= 3 else 3
        taps = "  ".join(f"{x:.{decimals}f}" for x in one.kernel)
        table.add_row(
            _words([one.text]), *count, _number(one.deviation), _number(one.direction), taps
        )
    console.print(table)


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip


def _words(words: Any) -> str:
    return escape(" ".join(_visible(word) for word in words))


def _visible(text: str) -> str:
    """Control characters would be commands to the terminal."""
    text = text if len(text) <= 24 else f"{text[:23]}…"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"
