"""A small training run that attacks damage or kill, and the run to which nothing happened."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path

STEPS = 8
# Logs, evaluations and checkpoints at different steps; dropout, so that random numbers matter.
RUN = [
    "--steps", str(STEPS), "--batch", "4", "--length", "32", "--set", "dropout=0.1",
    "--eval-items", "100", "--log-every", "1", "--eval-every", "3", "--save-every", "2",
]  # fmt: skip
CLOCKS = ("seconds", "tokens_per_second")


@functools.cache
def place() -> Path:
    """A folder with a small text, until this process ends."""
    path = Path(tempfile.mkdtemp(prefix="mercer-soak-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    lines = (f"line {n} has the number {n * n % 97} and no other\n" for n in range(600))
    (path / "small.txt").write_text("".join(lines))
    return path


def arguments(folder: Path, cache: Path) -> list[str]:
    """The options of the run."""
    data = ["--data", str(place() / "small.txt"), "--cache", str(cache)]
    return ["lm", *RUN, *data, "--output", str(folder)]


def outcome(folder: Path) -> tuple[bytes, list[dict[str, object]]]:
    """The weights of a finished run, and its journal without what a clock says."""
    weights = (folder / "model" / "model.safetensors").read_bytes()
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return weights, [{n: x for n, x in r.items() if n not in CLOCKS} for r in lines]
