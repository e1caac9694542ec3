"""Every fused kernel with every filter on this GPU; one that crashes does not stop the others.

    python benchmarks/matrix.py [--output results/matrix] [--jobs 12] [--seconds 500]

Worker processes take one configuration after the other (mercer.bench.matrix says which) and are
replaced when they die. Results are written at once, to a JSON file and a table in Markdown
named after the device and the versions. A run that is started again with the same file resumes;
--again repeats configurations that did not pass. --only takes part of a configuration's
name: `--only lookup,` or `--only "rbf, causal,"`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mercer.bench.machine import describe, slug
from mercer.bench.matrix import FILTERS, KERNELS, TARGET, Configuration, configurations, job
from mercer.bench.workers import Worker

RESULTS = Path(__file__).parent.parent / "results" / "matrix"
# A first call compiles several kernels, and others compile at the same time.
TIMEOUT = 240.0
GOOD = ("passed", "refused")
SAVE_EVERY = 10.0


class Table:
    """The results of all configurations, stored in files."""

    def __init__(self, path: Path, machine: dict[str, Any], command: str) -> None:
        self.path, self.machine, self.command = path, machine, command
        self.results: dict[Configuration, dict[str, Any]] = {}
        self.lock = threading.Lock()
        self.saved = time.monotonic()

    def read(self, path: Path) -> None:
        """Read the results of an earlier run of the same code on the same machine."""
        if not path.exists():
            return
        found = json.loads(path.read_text())
        same = all(found["machine"][name] == self.machine[name] for name in ("device", "commit"))
        if not same or found["machine"]["versions"] != self.machine["versions"]:
            print(f"{path} is of another machine, commit or version: starting again")
            return
        for entry in found["results"]:
            self.results[Configuration(**entry.pop("configuration"))] = entry

    def add(self, config: Configuration, status: str, said: str, seconds: float) -> None:
        with self.lock:
            self.results[config] = {"status": status, "said": said, "seconds": round(seconds, 1)}
            if status not in GOOD:
                print(f"{status}: {config}: {said}", flush=True)
            if time.monotonic() - self.saved > SAVE_EVERY:
                self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"configuration": asdict(config), **entry})
            for config, entry in self.results.items()
        ]
        head = json.dumps({"machine": self.machine, "command": self.command}, indent=1)[:-2]
        text = head + ',\n "results": [\n' + ",\n".join(lines) + "\n]}\n"
        self.path.write_text(text)
        self.path.with_suffix(".md").write_text(self.markdown())
        self.saved = time.monotonic()

    def markdown(self) -> str:
        """Kernels by filters with numbers of passed configurations, and the failures."""
        versions = self.machine["versions"]
        counts = Counter(entry["status"] for entry in self.results.values())
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        lines = [
            f"# Kernels by filters on {self.machine['device']}",
            "",
            f"torch {versions['torch']}, Triton {versions['triton']}, commit "
            f"{self.machine['commit']}, {self.machine['date']}: `{self.command}`",
            "",
            f"{len(self.results)} configurations: {said}. A cell says how many of its "
            "configurations passed; empty: none was run; none: the fused kernels refuse it.",
            "",
            "| | " + " | ".join(name.replace("|", "\\|") for name in FILTERS) + " |",
            "|---|" + "---|" * len(FILTERS),
        ]
        for kernel in KERNELS:
            cells = [self._cell(kernel, filter) for filter in FILTERS]
            lines.append(f"| {kernel} | " + " | ".join(cells) + " |")
        bad = {c: e for c, e in self.results.items() if e["status"] not in GOOD}
        if bad:
            lines += ["", "## What did not pass", ""]
        for config, entry in bad.items():
            lines.append(f"- {entry['status']}: {config}: {' '.join(entry['said'].split())}")
        return "\n".join(lines) + "\n"

    def _cell(self, kernel: str, filter: str) -> str:
        of = [
            e["status"] for c, e in self.results.items() if (c.kernel, c.filter) == (kernel, filter)
        ]
        passed, refused = of.count("passed"), of.count("refused")
        if len(of) == refused:
            return "none" if of else ""
        text = f"{passed}/{len(of) - refused}"
        return text if passed == len(of) - refused else f"**{text}**"


def run(todo: list[Configuration], table: Table, device: str, jobs: int, seconds: float) -> None:
    """Run the configurations on worker processes while there is time."""
    deadline = time.monotonic() + seconds
    left = iter(todo)
    lock = threading.Lock()

    def work() -> None:
        worker = Worker(TARGET)
        while (rest := deadline - time.monotonic()) > 0:
            with lock:
                config = next(left, None)
            if config is None:
                break
            reply = worker.run(job(config, device), min(TIMEOUT, rest))
            if reply.status == "hung" and rest < TIMEOUT:
                # Killed by --seconds, not by the timeout of the job.
                break
            status, said = reply.status, reply.said
            if status == "done":
                status, _, said = said.partition(": ")
            table.add(config, status, said, reply.seconds)
        worker.close()

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(work) for _ in range(jobs)]:
            done.result()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--resume", type=Path, help="a JSON file to go on from")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--only", action="append", default=[], help="part of a name")
    parser.add_argument("--first", type=int, help="so many configurations at most")
    parser.add_argument("--again", action="store_true", help="repeat what did not pass")
    parser.add_argument("--commit", help="where git cannot say it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--length", type=int, help="another length, to try the runner out")
    parser.add_argument("--dtype", help="another dtype, to try the runner out")
    args = parser.parse_args()

    machine = describe(torch.device(args.device))
    if args.commit:
        machine["commit"] = args.commit
    versions: Any = machine["versions"]
    name = slug(f"{machine['device']} torch {versions['torch']} triton {versions['triton']}")
    path = args.output / f"{name}.json"
    # The folder belongs to the machine that ran this, not to the result.
    given = [x.replace(str(args.output), "results/matrix") for x in sys.argv[1:]]
    table = Table(path, machine, " ".join(["python benchmarks/matrix.py", *given]))
    table.read(args.resume or path)

    todo = configurations()
    if args.length:
        todo = [replace(config, length=args.length) for config in todo]
    if args.dtype:
        todo = list(dict.fromkeys(replace(config, dtype=args.dtype) for config in todo))
    todo = [c for c in todo if not args.only or any(text in str(c) for text in args.only)]
    todo = todo[: args.first]
    known = {c for c, e in table.results.items() if not args.again or e["status"] in GOOD}
    todo = [c for c in todo if c not in known]
    print(f"{len(todo)} configurations to run, {len(known)} known", flush=True)
    started = time.monotonic()
    try:
        run(todo, table, args.device, args.jobs, args.seconds)
    finally:
        table.save()
    done = sum(config in table.results for config in todo)
    print(f"{done} of {len(todo)} in {time.monotonic() - started:.0f} s")
    print(table.markdown())
    return int(any(entry["status"] not in GOOD for entry in table.results.values()))


if __name__ == "__main__":
    sys.exit(main())
