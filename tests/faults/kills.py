"""An attack: a run is killed with -9 at random moments, up to four times, and goes on each time.

It ends with the weights and the journal of the run to which nothing happened, to the last bit.
"""

import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults.small_run import arguments, outcome, place

LONGEST = 120


def start(folder: Path) -> subprocess.Popen[str]:
    given = [*arguments(folder, folder.parent / "cache"), "--resume"]
    return subprocess.Popen(
        [sys.executable, "-m", "mercer", "train", *given],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> None:
    said, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, f"exit code {process.returncode}: {said[-300:]}"
    assert "Traceback" not in said, said[-300:]


@functools.cache
def undisturbed() -> tuple[Path, float]:
    """The folder of a run that nothing happened to, and its seconds."""
    began = time.monotonic()
    finish(start(folder := place() / "run"))
    return folder, time.monotonic() - began


def attack(seed: int, device: str = "cpu") -> str:
    """Kills, then the end; AssertionError says what differs."""
    choose = random.Random(seed)
    whole, seconds = undisturbed()
    waits = [choose.uniform(0.2, 1.0) * seconds for _ in range(choose.randint(1, 4))]
    said = f"killed after {', '.join(f'{wait:.2f}' for wait in waits)} s"
    with tempfile.TemporaryDirectory(prefix="mercer-kill-") as name:
        folder = Path(name) / "run"
        for wait in waits:
            process = start(folder)
            try:
                process.wait(wait)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            assert process.returncode in (0, -signal.SIGKILL), f"{said}: {process.returncode}"
        finish(start(folder))
        weights, journal = outcome(folder)
        wanted, lines = outcome(whole)
        assert weights == wanted, f"{said}: other weights"
        assert journal == lines, f"{said}: another journal"
    return said
