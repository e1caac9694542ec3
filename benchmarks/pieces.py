"""Pieces of the fused kernels that may not be worth their lines: each on and off, in turns.

    python benchmarks/pieces.py [--only sides,flat] [--save FILE]

The pieces are those of "To be measured" in dev/LOG.md. A process with the piece and one without it
compile and capture the same call, then replay it in turns, so both see the same clocks. The table
gives the medians in milliseconds and their ratio. Needs a CUDA GPU with Triton.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import mercer as mc
from mercer.bench.clock import Clock
from mercer.bench.machine import describe
from mercer.bench.workload import Workload
from mercer.table import Table

TURNS = 3


def patch(old: Any, new: Any) -> None:
    """Replace a function in every module of Mercer that has imported it."""
    names = [(m, n) for m in list(sys.modules.values()) if m.__name__.startswith("mercer")
             for n, found in vars(m).items() if found is old]  # fmt: skip
    assert names, old
    for module, name in names:
        setattr(module, name, new)


def no_stored_band() -> None:
    from mercer.backends.triton import plan, run  # noqa: F401

    patch(plan.stores, lambda p: False)


def no_sides() -> None:
    from mercer.backends.triton.hopper import eligible

    sums = eligible.sums
    patch(sums, lambda p, grad: sums(p, grad) and p.constants["MODE0"] < 2)


def no_turning() -> None:
    from mercer.backends.triton import sinusoids

    patch(
        sinusoids.queries,
        lambda f, dtype, scale=1.0: sinusoids.turned(f.c, f.base, scale).to(dtype),
    )


def no_flat() -> None:
    from mercer.backends.triton import codes, plan

    form = plan._form

    def general(static: Any, dtype: torch.dtype) -> tuple[int, bool]:
        found, same = form(static, dtype)
        return (codes.GENERAL if found == codes.FLAT else found), same

    patch(form, general)


def no_pairs() -> None:
    from mercer.backends.polynomial import plan

    plan.SIZES.update({key: sizes._replace(pair=False) for key, sizes in plan.SIZES.items()})


def no_whole_numbers() -> None:
    from mercer.backends.tokenwise import lookup

    patch(
        lookup._sum,
        lambda grads, ids, count: lookup.sum_by_id(
            torch.stack(grads, 2).flatten(0, 1), ids.flatten(), count
        ),
    )


@dataclass(frozen=True)
class Piece:
    """A piece, how to do without it, and the calls that it is for."""

    off: Callable[[], None]
    calls: tuple[tuple[Any, ...], ...]  # kernel, B, H, T, D, filter, backend
    graph: bool = True


AT_64, AT_128, SHORT = (4, 16, 8192, 64), (2, 16, 8192, 128), (16, 12, 1024, 64)
PIECES = {
    "stored-band": Piece(no_stored_band, (("lookup", *SHORT), ("buckets", *SHORT))),
    "sides": Piece(no_sides, (("adaptive", *AT_64),)),
    "turning": Piece(no_turning, (("product", *AT_64), ("relative-sinusoid", 8, 10, 2048, 128))),
    "flat": Piece(no_flat, (("rational", *AT_64), ("rational", *AT_128))),
    "pairs": Piece(no_pairs, (("polynomial", 1, 16, 65536, 64, "causal", "linear"),)),
    "whole-numbers": Piece(no_whole_numbers, (("taps", *SHORT[:3], 3),)),
}  # fmt: skip


def build(call: tuple[Any, ...]) -> Callable[[], object]:
    """Forward and backward of a call in bfloat16."""
    name, batch, heads, length, dim, *rest = call
    place = torch.device("cuda")
    torch.manual_seed(0)
    if name == "taps":
        from mercer.backends.tokenwise.lookup import gather

        table = torch.randn(50257, 2, heads, dim, device=place, requires_grad=True)
        ids = torch.randint(50257, (batch, length), device=place)
        grads = [torch.randn(batch, length, heads, dim, device=place) for _ in range(2)]
        return lambda: torch.autograd.grad(gather(table, ids), table, grads)
    shape = {"batch": batch, "heads": heads, "length": length, "dim": dim}
    work = Workload(
        **shape, dtype=torch.bfloat16, device=place, filter=rest[0] if rest else "causal"
    )
    given = work.inputs(name)
    wanted = list(given.named(parameters=True).values())
    grad = torch.randn(batch, heads, length, given.v.shape[-1], device=place, dtype=torch.bfloat16)
    backend = rest[1] if len(rest) > 1 else "triton"

    def run() -> object:
        out = mc.smooth(
            given.kernel, given.q, given.k, given.v, filter=given.filter, backend=backend
        )
        return torch.autograd.grad(out, wanted, grad, allow_unused=True)

    return run


def serve(pipe: Connection, name: str, call: tuple[Any, ...], off: bool) -> None:
    """Compile the call, then time it whenever asked."""
    try:
        import mercer.backends.tokenwise.lookup
        import mercer.backends.triton.backend
        import mercer.backends.triton.run  # noqa: F401

        piece = PIECES[name]
        if off:
            piece.off()
        run = build(call)
        run()
        torch.cuda.synchronize()
        clock = Clock(torch.device("cuda"), graph=piece.graph)
        pipe.send("ready")
        while pipe.recv() == "time":
            pipe.send(clock.median(run))
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Pieces of the fused kernels, on and off.")
    parser.add_argument("--only", help=f"names of pieces, from {', '.join(PIECES)}")
    parser.add_argument("--save", help="a Markdown file for the table")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(PIECES)
    if unknown := [name for name in names if name not in PIECES]:
        parser.error(f"no piece {unknown[0]!r}; there are {', '.join(PIECES)}")
    start = multiprocessing.get_context("spawn")
    waiting = []
    for name in names:
        for call in PIECES[name].calls:
            pair = []
            for off in (False, True):
                ours, theirs = start.Pipe()
                # Daemons end with this process.
                start.Process(target=serve, args=(theirs, name, call, off), daemon=True).start()
                pair.append(ours)
            waiting.append((name, call, pair))
    said = {id(pipe): pipe.recv() for _, _, pair in waiting for pipe in pair}
    rows: list[tuple[str, ...]] = []
    for name, call, pair in waiting:
        what = f"{call[0]} {'x'.join(map(str, call[1:5]))} {' '.join(call[5:])}".strip()
        failed = [said[id(pipe)] for pipe in pair if said[id(pipe)] != "ready"]
        times: list[list[float]] = [[], []]
        for _ in range(0 if failed else TURNS):
            for pipe, found in zip(pair, times, strict=True):
                pipe.send("time")
                found.append(pipe.recv())
        if failed or not all(isinstance(x, float) for found in times for x in found):
            rows.append((name, what, "", "", str(failed or times)[:80]))
        else:
            on, without = (statistics.median(found) for found in times)
            rows.append((name, what, f"{on:.3f}", f"{without:.3f}", f"{without / on:.3f}"))
        print(*rows[-1], flush=True)
    table = Table(("piece", "call", "ms with", "ms without", "without / with"), tuple(rows))
    print(table)
    if given.save:
        from pathlib import Path

        Path(given.save).write_text(f"{describe(torch.device('cuda'))}\n\n{table}\n")


if __name__ == "__main__":
    main()
