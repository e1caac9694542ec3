"""Attack Mercer for as long as you say, and print what was tried, survived and failed.

    make soak MINUTES=60
    python tests/faults/soak.py --minutes 60 --only compositions,texts --jobs 2
    python tests/faults/soak.py --only flips --seed 1234 --count 1        # one attack again

An attack is a function of one number: all it does follows from that seed. Attacks run in processes
of their own, which are replaced when they die or hang. Failures are printed as they come, each with
the command that repeats it. The end prints a table; the exit code is 1 if an attack failed.
"""

import argparse
import itertools
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mercer.bench.workers import Worker

TARGET = "faults.{}:attack"
# Seconds after which an attack counts as hung.
ATTACKS = {"compositions": 300, "texts": 300, "flips": 120, "kills": 600}


class Soak:
    """Hands out seeds until the time or the count is over, and keeps score."""

    def __init__(self, names: list[str], seed: int, minutes: float, count: int | None) -> None:
        self.names, self.count = names, count
        self.end = time.monotonic() + 60 * minutes
        self.seeds = {name: itertools.count(seed) for name in names}
        self.turns = itertools.cycle(names)
        self.score: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []
        self.lock = threading.Lock()
        self.drawn = 0
        self.stopped = False

    def draw(self) -> tuple[str, int] | None:
        """The next attack and its seed, or None at the end."""
        with self.lock:
            enough = self.count is not None and self.drawn >= self.count * len(self.names)
            if self.stopped or enough or time.monotonic() > self.end:
                return None
            name = next(self.turns)
            self.drawn += 1
            return name, next(self.seeds[name])

    def attack(self, device: str) -> None:
        """Attack until the end, with a process for each kind of attack."""
        workers = {name: Worker(TARGET.format(name)) for name in self.names}
        while (drawn := self.draw()) is not None:
            name, seed = drawn
            reply = workers[name].run({"seed": seed, "device": device}, ATTACKS[name])
            with self.lock:
                self.score[name, reply.status] += 1
                if reply.status != "done" and not self.stopped:
                    again = f"python tests/faults/soak.py --only {name} --seed {seed} --count 1"
                    said = " ".join(reply.said.split())
                    self.failures.append(f"{name} {reply.status}: {said}\n    again: {again}")
                    print(self.failures[-1], flush=True)
        for worker in workers.values():
            worker.close()

    def table(self, seconds: float) -> str:
        lines = [f"{'attack':<14}{'tried':>8}{'survived':>10}{'failed':>8}"]
        for name in self.names:
            survived = self.score[name, "done"]
            failed = sum(self.score[name, status] for status in ("failed", "crashed", "hung"))
            lines.append(f"{name:<14}{survived + failed:>8}{survived:>10}{failed:>8}")
        return "\n".join([*lines, f"in {seconds / 60:.1f} minutes"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; 10 by default")
    parser.add_argument("--count", type=int, help="so many attacks of each kind at most")
    parser.add_argument("--only", default=",".join(ATTACKS), help=f"some of {', '.join(ATTACKS)}")
    parser.add_argument("--seed", type=int, help="the first seed; by default from the clock")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="of compositions: cpu or cuda")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(ATTACKS)):
        parser.error(f"there is no attack {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    seed = int(time.time()) if args.seed is None else args.seed
    jobs = min(args.jobs, args.count * len(names)) if args.count else args.jobs
    # Workers import the attacks from this folder.
    here = str(Path(__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    soak, started = Soak(names, seed, args.minutes, args.count), time.monotonic()
    print(f"seeds from {seed}, {jobs} at a time; Ctrl-C ends it", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(soak.attack, args.device) for _ in range(jobs)]
        try:
            while not all(job.done() for job in running):
                time.sleep(0.5)
        except KeyboardInterrupt:
            soak.stopped = True
        for job in running:
            job.result()
    print(soak.table(time.monotonic() - started))
    return int(bool(soak.failures))


if __name__ == "__main__":
    sys.exit(main())
