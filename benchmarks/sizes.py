"""Time block sizes of the fused kernels on this GPU: the source of SIZES in block_sizes.py.

    python benchmarks/sizes.py rbf,laplace [--dims 64,128] [--length 8192] [--only queries]

Each of the three kernels is compiled for every candidate, in parallel, then timed alone on a causal
call in bfloat16: every block size as it is, with its registers bounded, and with operands held in
registers. Rows are sorted by time, with registers and spills. Candidates that do not compile or fit
are reported.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from typing import Any

import torch

import mercer as mc
from mercer.backends.runtime import launch as launches
from mercer.backends.triton import layout
from mercer.backends.triton.block_sizes import Sizes
from mercer.bench.clock import Clock
from mercer.bench.workload import Workload

KINDS = {"forward": "forward", "backward_keys": "keys", "backward_queries": "queries"}
BLOCKS = {
    "forward": [
        (64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 3),
        (64, 32, 4, 3),
    ],
    "keys": [
        (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (64, 128, 8, 3), (64, 128, 8, 2),
        (32, 128, 8, 3),
    ],
    # With two stages, the ptxas of Triton 3.6 fails here.
    "queries": [
        (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3),
        (128, 32, 8, 3),
    ],
}  # fmt: skip
# Registers and what is held, beside each block size.
HOLDINGS = [(0, 0), (168, 0), (0, 3), (168, 3)]
CANDIDATES = {
    kind: [Sizes(*sizes, *more) for sizes in blocks for more in HOLDINGS]
    for kind, blocks in BLOCKS.items()
}


def capture(kernel: str, dim: int, length: int, heads: int, *, run: bool) -> dict[str, Any]:
    """The three launches of one call with their arguments; they run only if asked to."""
    place = torch.device("cuda")
    shape = {"batch": 2, "heads": heads, "length": length, "dim": dim}
    given = Workload(**shape, dtype=torch.bfloat16, device=place).inputs(kernel)
    found: dict[str, Any] = {}
    real = launches.Launch.__call__

    def keep(launch: launches.Launch, tensors: tuple, numbers: tuple) -> None:
        if (kind := KINDS.get(launch.kernel.__name__)) is not None:
            found[kind] = (launch, tensors, numbers)
        if run:
            real(launch, tensors, numbers)

    launches.Launch.__call__ = keep  # type: ignore[method-assign]
    try:
        options = {"filter": given.filter, "backend": "triton"}
        out = mc.smooth(given.kernel, given.q, given.k, given.v, **options)
        wanted = list(given.named(parameters=True).values())
        torch.autograd.grad(out, wanted, torch.randn_like(out), allow_unused=True)
    finally:
        launches.Launch.__call__ = real  # type: ignore[method-assign]
    return found


def launch_with(kind: str, item: Any, sizes: Sizes) -> tuple[launches.Launch, tuple, tuple]:
    """The same launch with other sizes."""
    launch, tensors, numbers = item
    bm, bn = sizes.queries, sizes.keys
    old = launch.constants["BN" if kind == "keys" else "BM"]
    blocks = -(-launch.grid[0] * old // (bn if kind == "keys" else bm))
    rows = bm if kind == "keys" else bn
    tensors = tuple(
        x if isinstance(x, torch.Tensor)
        else layout.tma_descriptor(x.base, rows, x.block_shape[3])
        for x in tensors
    )  # fmt: skip
    constants = launch.constants | {"BM": bm, "BN": bn, "HELD": sizes.held}
    options = {"num_warps": sizes.warps, "num_stages": sizes.stages}
    if sizes.registers:
        options["maxnreg"] = sizes.registers
    new = launches.Launch(launch.kernel, (blocks, *launch.grid[1:]), constants, options)
    return new, tensors, numbers


def compile_one(job: tuple[str, int, int, str, Sizes]) -> tuple[Any, str]:
    """In another process: the compiled kernel stays in the cache on disk."""
    kernel, dim, heads, kind, sizes = job
    try:
        item = capture(kernel, dim, 512, heads, run=False)[kind]
        launch, tensors, numbers = launch_with(kind, item, sizes)
        launch(tensors, numbers)
        torch.cuda.synchronize()
        return job, f"{launch.compiled.n_regs} registers, {launch.compiled.n_spills} spills"
    # Compilers raise what they like.
    except Exception as error:
        return job, f"fails: {type(error).__name__}: {str(error).splitlines()[0][:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kernels", help="names that `mercer bench` knows, by commas")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--only", choices=CANDIDATES, help="one of the three kernels")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA GPU here")
    kinds = [options.only] if options.only else list(CANDIDATES)
    jobs = [
        (kernel, int(dim), options.heads, kind, sizes)
        for kernel in options.kernels.split(",")
        for dim in options.dims.split(",")
        for kind in kinds
        for sizes in CANDIDATES[kind]
    ]
    workers = max(1, min(len(jobs), (os.cpu_count() or 2) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        notes = dict(pool.imap_unordered(compile_one, jobs))
    clock = Clock(torch.device("cuda"), 20)
    for kernel in options.kernels.split(","):
        for dim in map(int, options.dims.split(",")):
            items = capture(kernel, dim, options.length, options.heads, run=True)
            for kind in kinds:
                rows = []
                for sizes in CANDIDATES[kind]:
                    note = notes[kernel, dim, options.heads, kind, sizes]
                    if note.startswith("fails"):
                        rows.append((float("inf"), f"{tuple(sizes)}: {note}"))
                        continue
                    launch, tensors, numbers = launch_with(kind, items[kind], sizes)
                    ms = clock.median(lambda: launch(tensors, numbers))  # noqa: B023
                    rows.append((ms, f"{tuple(sizes)}: {ms:.3f} ms, {note}"))
                print(f"\n{kernel}, {dim} features, {kind}")
                for _, line in sorted(rows):
                    print(f"  {line}", flush=True)
            del items
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
