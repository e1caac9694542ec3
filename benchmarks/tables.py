"""The GPU figures of README.md and docs/performance.md, from the files of `mercer bench`.

    python benchmarks/tables.py            # rewrite the tables between their markers
    python benchmarks/tables.py --check    # fail if a page and the files differ

A table or a sentence stands between `<!-- table: NAME -->` and `<!-- end of table -->`. Its figures
are the share of the speed of the fastest SDPA softmax, forward and backward, by CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = {
    version: ROOT / "results" / "bench" / f"triton-{version}" / "nvidia-h200-bfloat16-graph.json"
    for version in ("3.6", "3.9")
}
# Shape by shape, what it is called and the kernels of `mercer bench` that stand in a row.
LABELS = {
    "RBF, a learned bandwidth per head": ("rbf",),
    "Exponential * ALiBi": ("alibi",),
    "AdaptiveRBF, a bandwidth per query": ("adaptive",),
    "Exponential * RelativeSinusoid": ("relative-sinusoid",),
    "Exponential * Exponential on positions (Eq. 9)": ("product",),
    "Exponential * Lookup, 129 distances": ("lookup",),
    "Polynomial, degree 2": ("polynomial",),
    "Laplace, Matern, RationalQuadratic": ("laplace", "matern", "rational"),
    "Exponential, our own kernels": ("softmax",),
}
SHAPES = {
    "short": ("4x16x8192x64", "2x16x8192x128"),
    "long": ("8x10x2048x128", "4x16x8192x64", "2x16x8192x128"),
}
# The same machine code measured again, and the rows that a page names.
AGAIN = ROOT / "results/bench/triton-3.9/nvidia-h200-bfloat16-graph-9dfc42e.json"
SENTENCES = {
    "again": {"RBF": "rbf", "ALiBi": "alibi", "AdaptiveRBF": "adaptive"},
    "again-long": {"RBF": "rbf", "ALiBi": "alibi", "AdaptiveRBF": "adaptive", "softmax": "softmax"},
}
PAGES = {
    "README.md": ("short", "again"),
    "docs/performance.md": ("long", "again-long"),
    "docs/findings.md": ("short",),
}


def share(run: dict, kernel: str, shape: str) -> float | None:
    """What a kernel has of SDPA's speed in a run, or None if the run has no such row."""
    found = [r for r in run["rows"] if (r["name"], r["shape"]) == (kernel, shape)]
    return found[0]["forward_backward_of_sdpa"] if found else None


def cell(run: dict, kernels: tuple[str, ...], shape: str) -> str:
    """One figure, or the range of those of several kernels."""
    figures = [x for kernel in kernels if (x := share(run, kernel, shape)) is not None]
    ends = sorted({f"{min(figures):.2f}", f"{max(figures):.2f}"}) if figures else []
    return " to ".join(ends)


def table(name: str) -> str:
    """The rows of all kernels, with a column for each version and shape that has figures."""
    runs = {version: json.loads(path.read_text()) for version, path in RUNS.items()}
    columns = [
        (run, shape)
        for run in runs.values()
        for shape in SHAPES[name]
        if share(run, "rbf", shape) is not None
    ]
    lines = ["| by CUDA graph | " + " | ".join(shape for _, shape in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for what in ("torch", "triton", "commit"):
        found = (run["commit"] if what == "commit" else run["versions"][what] for run, _ in columns)
        lines.append(
            f"| *{what}* | " + " | ".join(f"*{x[:7].split('+')[0]}*" for x in found) + " |"
        )
    for label, kernels in LABELS.items():
        cells = (cell(run, kernels, shape) for run, shape in columns)
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def sentence(name: str) -> str:
    """What the second run gave at the larger width, beside the first in the table."""
    run, shape = json.loads(AGAIN.read_text()), SHAPES["short"][1]
    figures = (
        f"{label} {share(run, kernel, shape):.2f}" for label, kernel in SENTENCES[name].items()
    )
    return f"A second run ({run['commit'][:7]}) at {shape}: {', '.join(figures)}."


def with_tables(text: str) -> str:
    """The text of a page with its tables and sentences written anew."""
    pattern = r"(<!-- table: ([\w-]+) -->\n).*?(\n<!-- end of table -->)"

    def written(found: re.Match[str]) -> str:
        make = sentence if found[2] in SENTENCES else table
        return found[1] + make(found[2]) + found[3]

    return re.sub(pattern, written, text, flags=re.S)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if pages differ")
    options = parser.parse_args(arguments)
    stale = 0
    for page, names in PAGES.items():
        path = ROOT / page
        text = path.read_text()
        assert all(f"<!-- table: {name} -->" in text for name in names), page
        new = with_tables(text)
        if new != text:
            stale = 1
            print(f"{page}: {'differs from the results' if options.check else 'written'}")
            if not options.check:
                path.write_text(new)
    return stale if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
