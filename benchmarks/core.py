"""The CPU figures of docs/performance.md: every kernel against eager code.

    python benchmarks/core.py [--save] [--length 4096]

Times are the best of a few runs, in one process; only ratios within a run mean anything. A row
whose output is not right is not timed. Memory is the peak of a fresh process beyond its inputs.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import mercer as mc

HEADS, DIM = 4, 64
RESULTS = Path(__file__).parent.parent / "results" / "core"


def best(run: Callable[[], Tensor], repeats: int) -> tuple[float, float]:
    """Milliseconds of forward, and of forward and backward."""
    run().sum().backward()
    forward, both = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        with torch.no_grad():
            run()
        middle = time.perf_counter()
        run().sum().backward()
        forward.append(middle - start)
        both.append(time.perf_counter() - middle)
    return 1e3 * min(forward), 1e3 * min(both)


def eager_rbf(q: Tensor, k: Tensor, v: Tensor, s: Tensor, mode: str) -> Tensor:
    """RBF attention in eager code: all distances, exp, mask, normalise."""
    distance = torch.cdist(q, k, compute_mode=mode).square()
    weight = torch.exp(-distance / (2 * s[:, None, None] ** 2)).tril()
    return (weight / weight.sum(-1, keepdim=True)) @ v


def rows(length: int) -> dict[str, Callable[[], Tensor]]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    log_s = torch.zeros(HEADS, requires_grad=True)
    exact, by_matmul = "donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist"
    smoothers: dict[str, tuple[mc.Kernel, mc.Filter]] = {
        "RBF, learned bandwidth per head": (mc.RBF(2.0, heads=HEADS), mc.Causal()),
        "AdaptiveRBF": (mc.AdaptiveRBF(DIM, heads=HEADS), mc.Causal()),
        "Exponential * ALiBi": (mc.Exponential() * mc.ALiBi(mc.ALiBi.standard(4)), mc.Causal()),
        "Exponential * Lookup (129 distances)": (
            mc.Exponential() * mc.Lookup(torch.nn.Parameter(torch.randn(129, DIM))),
            mc.Causal(),
        ),
        "Polynomial, degree 2": (mc.Polynomial(), mc.Causal()),
        "RationalQuadratic": (mc.RationalQuadratic(), mc.Causal()),
        "Laplace": (mc.Laplace(), mc.Causal()),
        "Matern 3/2": (mc.Matern(1.5), mc.Causal()),
        "RBF + Exponential": (mc.RBF() + mc.Exponential(), mc.Causal()),
        "RBF in a window of 256": (mc.RBF(), mc.Window(256, 0)),
    }
    table: dict[str, Callable[[], Tensor]] = {
        "softmax, SDPA": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    for name, (kernel, filter) in smoothers.items():
        table[name] = lambda kernel=kernel, filter=filter: mc.smooth(kernel, q, k, v, filter=filter)
        check(name, kernel, filter, q, k, v)
    table["RBF, eager, cdist"] = lambda: eager_rbf(q, k, v, 2 * log_s.exp(), exact)
    table["RBF, eager, cdist by matmul"] = lambda: eager_rbf(q, k, v, 2 * log_s.exp(), by_matmul)
    return table


@torch.no_grad()
def check(name: str, kernel: mc.Kernel, filter: mc.Filter, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise if a short sequence differs from the reference in float64."""
    short = [x[:, :, :128] for x in (q, k, v)]
    got = mc.smooth(kernel, *short, filter=filter)
    double = [x.double() for x in short]
    want = mc.smooth(kernel.double(), *double, filter=filter, backend="reference")
    kernel.float()
    if (got - want).abs().max() > 1e-4:
        sys.exit(f"{name} is wrong by {(got - want).abs().max():.1e}: not timed")


def peak_memory() -> float | None:
    """MB beyond the inputs for polynomial attention over 16384 places, forward and backward."""
    if platform.system() != "Linux":
        return None
    code = """
import re, torch, mercer as mc
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
def run(q, k, v):
    mc.smooth(mc.Polynomial(), q, k, v, filter=mc.Causal(), backend="chunked").sum().backward()
run(*(torch.randn(1, 1, 256, 64, requires_grad=True) for _ in range(3)))
inputs = [torch.randn(1, 1, 16384, 64, requires_grad=True) for _ in range(3)]
open("/proc/self/clear_refs", "w").write("5")  # the peak starts from here
before = peak()
run(*inputs)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout) * 1024 / 1e6


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="write results/core/")
    options = parser.parse_args()

    where = (
        f"{platform.machine()} CPU, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"float32, 1x{HEADS}x{options.length}x{DIM}, causal, commit {commit()}"
    )
    lines = [where, "", "| | forward ms | forward+backward ms | x SDPA |", "|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    measured = {}
    for name, run in rows(options.length).items():
        forward, both = best(run, 1 if "eager" in name else options.repeats)
        measured[name] = {"forward_ms": forward, "forward_backward_ms": both}
        ratio = both / measured["softmax, SDPA"]["forward_backward_ms"]
        lines.append(f"| {name} | {forward:.0f} | {both:.0f} | {ratio:.2f} |")
        print(lines[-1], flush=True)
    extra = peak_memory()
    if extra is not None:
        lines += ["", f"Polynomial, chunked, 1x1x16384x64, forward+backward: {extra:.0f} MB extra."]
        print("\n".join(lines[-2:]))
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        command = "python benchmarks/core.py --save"
        record = {"where": where, "command": command, "rows": measured, "polynomial_16k_mb": extra}
        (RESULTS / "cpu.json").write_text(json.dumps(record, indent=2) + "\n")
        (RESULTS / "cpu.md").write_text("\n".join([f"`{command}`", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
