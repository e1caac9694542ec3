"""The step of a whole language model, every system against softmax attention, in one run.

    python benchmarks/steps.py [--lengths 1024,4096] [--tokens 16384] [--jobs 6] [--save]

A step is forward, backward and AdamW, of GPT-2's small shape with 50257 tokens, without dropout:
compiled and in bfloat16 by autocast on a GPU, as it is and in float32 on a CPU. The yardstick is
vaswani2017 on torch's SDPA, timed first and last; a ratio is to the mean of the two. A compiled
model whose loss is not that of the same model uncompiled gets no time. With --jobs, so many models
are compiled in parallel processes; then each is timed while the others wait.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mercer.bench.clock import Clock
from mercer.bench.machine import describe, device_name, slug
from mercer.bench.report import figure, write
from mercer.models import KernelLM, presets
from mercer.systems import SYSTEMS

RESULTS = Path(__file__).parent.parent / "results" / "steps"
YARDSTICK = "vaswani2017 on SDPA"
# Beside the systems of the papers: the same with a Gaussian kernel, one bandwidth a head.
RBF = "vaswani2017 with RBF"


@dataclass
class Row:
    """A system at a length."""

    length: int
    system: str
    step_ms: float | None = None
    ratio: float | None = None
    tokens_per_second: float | None = None
    memory_mib: float | None = None
    parameters: int | None = None
    problem: str | None = None


def make(name: str, options: argparse.Namespace, length: int) -> KernelLM:
    """The model of a row, with weights from one seed."""
    fields: dict = {"system": name}
    if name == YARDSTICK:
        fields = {"system": "vaswani2017", "backend": "sdpa"}
    elif name == RBF:
        heads = presets.lm(options.preset).num_heads
        fields = {"system": "vaswani2017", "kernel": f"RBF(heads={heads})"}
    elif name == "parmar2018":
        # Its places are those of an image: as many as there are tokens.
        fields["system_options"] = {"height": length, "width": 1}
    fields |= {"dropout": 0.0, "attention_dropout": 0.0, "context_length": length}
    torch.manual_seed(0)
    return KernelLM(presets.lm(options.preset, **fields)).to(options.device)


def measure(
    name: str,
    options: argparse.Namespace,
    length: int,
    clock: Clock,
    wait: Callable[[], object] = lambda: None,
) -> Row:
    """A row; `wait` is called when all is ready for the clock."""
    row = Row(length=length, system=name)
    try:
        model = make(name, options, length)
        row.parameters = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=options.cuda or None)
        ids = torch.randint(
            model.config.vocab_size, (max(1, options.tokens // length), length),
            device=options.device,
        )  # fmt: skip
        half = torch.autocast(options.device, torch.bfloat16, enabled=options.cuda)

        def loss() -> torch.Tensor:
            with half if options.cuda else contextlib.nullcontext():
                return model(input_ids=ids, labels=ids).loss

        if not options.eager:
            with torch.no_grad():
                want = loss().item()
            model.compile_parts(dynamic=False)
            found = loss().item()
            if not abs(found - want) < 0.02 * abs(want):
                row.problem = f"compiled, its loss is {found:.4f} and not {want:.4f}"
                return row

        def step() -> None:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        step()
        wait()
        row.step_ms = clock.median(step)
        row.tokens_per_second = ids.numel() / row.step_ms * 1e3
        if (peak := clock.peak(step)) is not None:
            row.memory_mib = peak / 2**20
    except torch.OutOfMemoryError:
        row.problem = "out of memory"
    except (RuntimeError, ValueError) as error:
        row.problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        model = optimizer = None
        torch._dynamo.reset()
        gc.collect()
        if options.cuda:
            torch.cuda.empty_cache()
    return row


def work(line: Any, options: argparse.Namespace) -> None:
    """A worker process: gets a name and a length, says when it is ready, waits to be timed."""
    clock = Clock(torch.device(options.device), options.repeats)

    def wait() -> None:
        line.send(None)
        line.recv()

    while (task := line.recv()) is not None:
        name, length = task
        line.send(measure(name, options, length, clock, wait))


def side_by_side(tasks: list[tuple[str, int]], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of all tasks: a round is compiled in parallel and timed one by one."""
    context = multiprocessing.get_context("spawn")
    lines = []
    for _ in range(min(options.jobs, len(tasks))):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, options), daemon=True).start()
        lines.append(ours)
    for first in range(0, len(tasks), options.jobs):
        busy = list(zip(lines, tasks[first : first + options.jobs], strict=False))
        for line, task in busy:
            line.send(task)
        # A row instead of "ready" means a problem.
        try:
            found = [line.recv() for line, _ in busy]
        except EOFError:
            names = ", ".join(name for _, (name, _) in busy)
            raise SystemExit(
                f"a process died while {names} were compiled, perhaps out of memory: "
                "try fewer --jobs or --tokens"
            ) from None
        for (line, _), row in zip(busy, found, strict=True):
            if row is None:
                line.send(None)
                row = line.recv()
            yield row
    for line in lines:
        line.send(None)


def compare(rows: list[Row]) -> None:
    """Ratios to the mean of the yardsticks of each length."""
    for length in {row.length for row in rows}:
        here = [row for row in rows if row.length == length]
        sticks = [row.step_ms for row in here if row.system.startswith(YARDSTICK) and row.step_ms]
        for row in here:
            if sticks and row.step_ms:
                row.ratio = row.step_ms / (sum(sticks) / len(sticks))


def tell(row: Row) -> str:
    if row.problem:
        return f"  {row.system:30s} {row.problem}"
    ratio = "" if row.ratio is None else f"{row.ratio:7.3f} x"
    return (
        f"  {row.system:30s} {row.step_ms:9.2f} ms {row.tokens_per_second:12,.0f} tokens/s{ratio}"
    )


def as_markdown(about: dict, rows: list[Row]) -> str:
    versions = ", ".join(f"{name} {text}" for name, text in about["versions"].items() if text)
    lines = [
        f"`{about['command']}`",
        "",
        f"{about['device']}, {versions}, {about['dtype']}, "
        f"{'uncompiled' if about['eager'] else 'compiled'}, preset {about['preset']}, "
        f"{about['tokens']} tokens a step, commit {about['commit']}, {about['date']}",
    ]
    for length in dict.fromkeys(row.length for row in rows):
        lines += ["", f"## {length} tokens a sequence", ""]
        lines += ["| system | step ms | ratio | tokens/s | memory MiB | parameters |"]
        lines += ["|---|---|---|---|---|---|"]
        for row in rows:
            if row.length == length and row.problem:
                lines.append(f"| {row.system} | {row.problem} | | | | |")
            elif row.length == length:
                ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
                lines.append(
                    f"| {row.system} | {figure(row.step_ms)} | {ratio} | "
                    f"{row.tokens_per_second:,.0f} | {figure(row.memory_mib)} | "
                    f"{row.parameters:,} |"
                )
    lines += ["", " ".join((__doc__ or "").split("\n\n")[2].split())]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--preset", default="gpt2-small")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--tokens", type=int, default=16384, help="in a step")
    parser.add_argument("--systems", default="all", help="some of: " + ", ".join([*SYSTEMS, "rbf"]))
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--jobs", type=int, default=1, help="models to compile side by side")
    parser.add_argument(
        "--repeats", type=int, help="timed steps; about a second of them by default"
    )
    parser.add_argument("--save", action="store_true", help="write results/steps/DEVICE.{json,md}")
    parser.add_argument("--output", type=Path, help="write there instead, without an ending")
    options = parser.parse_args(arguments)
    options.cuda = options.device.startswith("cuda")
    device = torch.device(options.device)
    asked = [*SYSTEMS, "rbf"] if options.systems == "all" else options.systems.split(",")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    names = [RBF if name == "rbf" else name for name in asked]
    clock = Clock(device, options.repeats)
    about = {"command": _command(options)} | describe(device)
    about["versions"] = {**about["versions"], "transformers": version("transformers")}
    about |= {
        "dtype": "bfloat16" if options.cuda else "float32",
        "preset": options.preset, "tokens": options.tokens, "eager": options.eager,
    }  # fmt: skip
    stem = options.output or RESULTS / slug(device_name(device))
    rows: list[Row] = []
    lengths = list(map(int, options.lengths.split(",")))
    tasks = [(name, length) for length in lengths for name in [YARDSTICK, *names, YARDSTICK]]
    alone = (measure(name, options, length, clock) for name, length in tasks)
    for row in side_by_side(tasks, options) if options.jobs > 1 else alone:
        if not any(before.length == row.length for before in rows):
            count = max(1, options.tokens // row.length)
            print(f"\n{row.length} tokens a sequence, {count} sequences a step")
        again = any(row.system == before.system and row.length == before.length for before in rows)
        row.system += ", again" if again else ""
        rows.append(row)
        compare(rows)
        print(tell(row), flush=True)
        if options.save or options.output:
            stem.parent.mkdir(parents=True, exist_ok=True)
            data = about | {"rows": [asdict(row) for row in rows]}
            write(stem.with_name(stem.name + ".json"), json.dumps(data, indent=1) + "\n")
            write(stem.with_name(stem.name + ".md"), as_markdown(about, rows))
    slow = [row for row in rows if row.ratio is not None]
    if slow:
        worst = max(slow, key=lambda row: row.ratio or 0.0)
        print(f"\nthe slowest: {worst.system}, {worst.ratio:.3f} x at {worst.length}")
    return rows


def _command(options: argparse.Namespace) -> str:
    shown = ["device", "preset", "lengths", "tokens", "systems", "jobs", "repeats"]
    given = [f"--{n} {getattr(options, n)}" for n in shown if getattr(options, n) is not None]
    flags = [f"--{n}" for n in ("eager", "save") if getattr(options, n)]
    return " ".join(["python benchmarks/steps.py", *given, *flags])


if __name__ == "__main__":
    main()
