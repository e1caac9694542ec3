"""Reads compiled kernels for registers that change while a matrix product may still read them.

    python benchmarks/hazards.py [--kernels rbf,lookup] [--filters causal] [--widths 64,128]

On Hopper a WGMMA reads its operands asynchronously, so the program must wait for it before it
writes to them. Triton should ensure that, and in 3.6 does not always (dev/LOG.md). This script
compiles the fused kernels for Hopper, without a GPU, and follows the machine code twice through
each loop: registers that a WGMMA in flight reads must not be written before a wait for it. Branches
are treated as not taken, so a finding needs a closer look.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mercer as mc
from mercer.backends.triton.hopper import eligible, launch
from mercer.bench.catalogue import KERNELS
from mercer.bench.workload import Workload
from mercer.testing.compiling import compiled

HEADS, LENGTH = 2, 300
# Besides the kernels of `mercer bench`: a table that reaches all pairs, and polynomials by states,
# of which there are some from so many places on.
EVERYWHERE, LINEAR, STATES = "lookup-all", "linear", 4500
BASES = {EVERYWHERE: "lookup", LINEAR: "polynomial"}
NAMES = (*KERNELS, *BASES)


class Findings:
    """Findings in compiled kernels."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.found: list[str] = []
        self.case = ""

    def read(self, name: str, kernel: Any) -> None:
        if kernel.hash in self.seen:
            return
        self.seen.add(kernel.hash)
        if found := sorted(set(overwritten(machine_code(kernel.asm["cubin"])))):
            self.found.append(f"{self.case}: {name}, {len(found)} times, as in: {found[0]}")
            print(self.found[-1], flush=True)


def machine_code(cubin: bytes) -> str:
    import triton as compiler

    tool = Path(compiler.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def overwritten(code: str) -> Iterator[str]:
    """Instructions in loops that write registers a product may still read."""
    for body in loops(code):
        # One entry for each group of products, with the registers that they read.
        flying: list[set[int]] = []
        group: set[int] = set()
        for line in body * 2:
            name, _, rest = re.sub(r"^@!?U?P\w+ ", "", line).partition(" ")
            if name.startswith("HGMMA"):
                if operand := re.match(r"R\d+, R(\d+),", rest):
                    first = int(operand[1])
                    group |= set(range(first, first + 4))
                if "gsb0" in rest:
                    flying.append(group)
                    group = set()
            elif name.startswith("WARPGROUP.DEPBAR"):
                left = int(rest.split(",")[1], 16)
                flying = flying[len(flying) - left :] if left < len(flying) else flying
            elif written(name, rest) & set().union(*flying):
                yield line


def loops(code: str) -> Iterator[list[str]]:
    """The instructions of each loop, from the target of a backward branch to the branch."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for text in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", text):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", text):
            lines.append(instruction[1])
    for n, line in enumerate(lines):
        back = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if back and labels.get(back[1], n + 1) <= n:
            body = lines[labels[back[1]] : n + 1]
            # A loop over others is not one of products.
            if any("HGMMA" in x for x in body) and len(body) < 3000:
                yield body


def written(name: str, rest: str) -> set[int]:
    """The registers that an instruction writes."""
    if name.startswith(("ST", "RED", "SYNCS", "BAR", "ISETP", "FSETP", "LDGSTS")):
        return set()
    if not (first := re.match(r"R(\d+)(?=[.,]|$)", rest)):
        return set()
    wide = 2 if ".64" in name or "WIDE" in name else 1
    if ".128" in name or name.endswith("M88.4"):
        wide = 4
    return set(range(int(first[1]), int(first[1]) + wide))


def run(name: str, shown: str, width: int) -> None:
    """One call, forward and backward."""
    workload = Workload(
        batch=1, heads=HEADS, length=STATES if name == LINEAR else LENGTH, dim=width,
        dtype=torch.bfloat16, device=torch.device("cpu"), filter=shown,
    )  # fmt: skip
    given = workload.inputs(BASES.get(name, name))
    if name == EVERYWHERE:
        rows = torch.nn.Parameter(torch.randn(2 * LENGTH + 1, width))
        given = replace(given, kernel=mc.Exponential() * mc.Lookup(rows))
    backend = LINEAR if name == LINEAR else "triton"
    out = mc.smooth(given.kernel, given.q, given.k, given.v, filter=given.filter, backend=backend)
    wanted = [x for x in given.named(parameters=True).values() if x.requires_grad]
    torch.autograd.grad(out.float().square().sum(), wanted, allow_unused=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", default=",".join(NAMES))
    parser.add_argument(
        "--filters", default="causal,full,window:70:30,window:70", help="as of `mercer bench`"
    )
    parser.add_argument("--widths", default="64,128")
    options = parser.parse_args()
    names = options.kernels.split(",")
    if unknown := sorted(set(names) - set(NAMES)):
        parser.error(f"no kernel is called {', '.join(unknown)}; there are {', '.join(NAMES)}")
    findings = Findings()
    # As with many heads, of which some are not the last.
    launch.ROUNDS = launch.LAST = 0
    for name in names:
        for shown in options.filters.split(","):
            # States know no windows.
            if name == LINEAR and shown not in ("causal", "full"):
                continue
            for width in map(int, options.widths.split(",")):
                findings.case = f"{name}, {shown}, width {width}"
                # In two passes, as for few keys, and in one.
                for many in (math.inf, 1):
                    eligible.MANY_KEYS = many
                    with compiled(90, findings.read):
                        run(name, shown, width)
        print(f"{name}: {len(findings.seen)} kernels so far", flush=True)
    count = len(findings.found)
    print(f"{len(findings.seen)} kernels, {count} to look at")
    raise SystemExit(1 if count else 0)


if __name__ == "__main__":
    main()
