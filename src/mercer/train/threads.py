"""How many CPU threads a run takes.

By default as many as there are CPUs that this process may use (affinity, and the quota of its
control group), less those that are busy with other work when the run starts, at least one, and
never more than torch's own number, which follows OMP_NUM_THREADS. The number is stored with the
settings, so that a resumed run has it again: results can differ in their last bits between numbers
of threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

# How long the CPUs are watched, in seconds.
LOOK = 0.1
QUOTA = Path("/sys/fs/cgroup/cpu.max")
STAT = Path("/proc/stat")


def choose_threads() -> tuple[int, str | None]:
    """The number of threads, and a line on it if other work takes CPUs."""
    most = min(torch.get_num_threads(), read_quota() or os.cpu_count() or 1)
    cpus = find_cpus()
    # Where one thread is all that there can be, there is nothing to watch.
    busy = round(count_busy(cpus)) if min(most, len(cpus)) > 1 else 0
    number = max(1, min(most, len(cpus) - busy))
    if number == min(most, len(cpus)):
        return number, None
    return number, (
        f"{busy} of {len(cpus)} CPUs are busy with other work: training with {number} "
        f"thread{'' if number == 1 else 's'}; --threads changes it"
    )


def find_cpus() -> set[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def read_quota() -> int | None:
    """The CPUs that the control group pays for; None for no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = QUOTA.read_text().split()
        return max(1, math.ceil(int(quota) / int(period)))
    return None


def count_busy(cpus: set[int]) -> float:
    """How many of the CPUs are at work right now; 0 where the system does not say."""
    try:
        first = _read_times(cpus)
        time.sleep(LOOK)
        second = _read_times(cpus)
    except (OSError, ValueError, IndexError):
        return 0.0
    busy = 0.0
    for before, after in zip(first, second, strict=True):
        passed = [b - a for a, b in zip(before, after, strict=True)]
        # The fourth and fifth numbers count idle time, and waiting for disks.
        busy += 1 - (passed[3] + passed[4]) / sum(passed) if sum(passed) > 0 else 0.0
    return busy


def _read_times(cpus: set[int]) -> list[list[int]]:
    """The ticks of each CPU, by kind."""
    rows = (line.split() for line in STAT.read_text().splitlines())
    wanted = {f"cpu{number}" for number in cpus}
    return [[int(x) for x in row[1:9]] for row in rows if row and row[0] in wanted]


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch with so many threads; restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
