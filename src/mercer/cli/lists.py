"""The commands `mercer systems`, `kernels` and `filters`: what there is, as a table."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import systems, table
from . import listing

Plain = Annotated[bool, typer.Option("--plain", help="One line each, for a pipe.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def show_systems(plain: Plain = False, as_json: Json = False) -> None:
    """Print the table of systems: feature space, kernel, value function, set filter.

    *Symmetric* and *valid* (positive semi-definite) are about the kernel with its projections:
    separate projections of queries and keys make both no. *Lowers to* says what a backend has to
    compute: most kernels are one dot product.
    """
    caption = "lowers to: for 8 heads of 64 features"
    _print(systems.table(), plain, as_json, caption, ("symmetric", "valid"))


def show_kernels(plain: Plain = False, as_json: Json = False) -> None:
    """Print the table of kernels: weight, parameters, and the backends that run each here.

    A kernel is given as `--kernel 'RBF(2.0)'`, if *as text* is yes; kernels add and multiply.
    *Backends* are those that train it on this machine under a causal filter, the one that runs by
    itself first. `reference` runs every kernel.
    """
    _print(listing.kernels(_device()), plain, as_json, _caption(), ("as text",))


def show_filters(plain: Plain = False, as_json: Json = False) -> None:
    """Print the table of filters: which keys a query sees, and the backends that run each here.

    A filter is given as `--filter 'Causal() & Window(64, 0)'`, if *as text* is yes; filters join
    by `&` and `|`. *Backends* are those that train softmax attention with it on this machine.
    """
    _print(listing.filters(_device()), plain, as_json, _caption(), ("as text",))


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _caption() -> str:
    return (
        f"backends: in training on {_device()}, the one that runs by itself first; in brackets: "
        "with some parameters"
    )


def _print(
    rows: table.Table, plain: bool, as_json: bool, caption: str, narrow: tuple[str, ...]
) -> None:
    if as_json:
        typer.echo(json.dumps(list(rows), indent=2))
        return
    if plain:
        typer.echo(str(rows))
        return
    console = Console()
    first, *others = rows.columns
    if console.width < 120:
        # Too narrow for all columns: one block a row.
        wide = max(map(len, others)) + 2
        for row in rows:
            console.print(f"[bold]{escape(row[first])}[/]")
            for column in others:
                console.print(f"  {column:<{wide}}{escape(row[column])}", highlight=False)
        console.print(f"[dim]{escape(caption)}[/]", highlight=False)
        return
    table = Table(caption=caption, caption_justify="left")
    for column in rows.columns:
        table.add_column(column, no_wrap=column == first or column in narrow)
    for cells in rows.rows:
        table.add_row(*map(escape, cells))
    console.print(table)


COMMANDS: dict[str, Any] = {
    "systems": show_systems,
    "kernels": show_kernels,
    "filters": show_filters,
}
