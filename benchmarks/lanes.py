"""Several studies beside each other on one GPU, for so many minutes.

    python benchmarks/lanes.py --minutes 9 --data DATA \
        "tsai-positions-lm tsai-kernels-lm --jobs 5 --seeds 0-2" "tsai-positions --jobs 6"

Each argument is a lane: names of studies, then options of `mercer study` for all of them, and after
a semicolon more of both. The lanes run at once, the studies of a lane one after another. Where
NVIDIA's multi-process service is installed, the processes share the GPU through it. At the end of
the time, or on Ctrl-C, all studies stop as on Ctrl-C: the same command continues. The output of
lane 1 is in runs/lanes/1.log, and so on; a line of each is printed every half minute. --pack FILE
writes the results of all studies, without checkpoints, to one archive, again every half minute.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

from mercer import studies

EVERY = 30.0
# A study saves a checkpoint before it stops.
GRACE = 40.0
# What `mercer study NAME --publish` needs, and the curves of every run.
RESULTS = (
    "worker-*.log", "results*.jsonl", "tuning/*/results*.jsonl", "*.md", "*.png", "*.svg",
    "jobs/*/metrics.jsonl",
)  # fmt: skip


def share_gpu(pipes: Path) -> bool:
    """Start NVIDIA's multi-process service, if it is there; processes find it by its folder."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    pipes.mkdir(parents=True, exist_ok=True)
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(pipes)
    os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(pipes)
    return subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False).returncode == 0


def split_lane(text: str) -> list[tuple[str, list[str]]]:
    """The studies of a lane, each with the options that follow its group."""
    found = []
    for group in text.split(";"):
        words = shlex.split(group)
        first = next((n for n, word in enumerate(words) if word.startswith("-")), len(words))
        found += [(study, words[first:]) for study in words[:first]]
    return found


class Lane(threading.Thread):
    """Studies one after another, until the time is over."""

    def __init__(self, number: int, text: str, data: str | None, until: float) -> None:
        super().__init__()
        self.studies = split_lane(text)
        self.data = data
        self.log = Path("runs", "lanes", f"{number}.log")
        self.until = until

    def run(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a") as log:
            for study, options in self.studies:
                left = self.until - time.monotonic()
                if left < 5:
                    return
                command = [sys.executable, "-m", "mercer", "study", study, *options]
                # A study that draws its data takes none.
                if self.data and studies.load(study).corpus:
                    command += ["--data", self.data]
                print(f"\n$ {shlex.join(command)}", file=log, flush=True)
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                try:
                    code = process.wait(left)
                    print(f"# {study}: exit code {code}", file=log, flush=True)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGTERM)
                    try:
                        process.wait(GRACE)
                    except subprocess.TimeoutExpired:
                        process.kill()

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "")


def pack(path: Path) -> None:
    """The results of all studies in one archive, replaced at once."""
    part = path.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        for folder in sorted(Path("runs").iterdir()):
            for pattern in RESULTS:
                for found in sorted(folder.glob(pattern)):
                    archive.add(found)
    os.replace(part, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Several studies beside each other on one GPU.")
    parser.add_argument("lanes", nargs="+", metavar="LANE", help='such as "recall --jobs 4"')
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so many minutes")
    parser.add_argument("--data", help="the folder of data for all studies")
    parser.add_argument("--pack", type=Path, help="an archive of the results, such as results.tgz")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes - GRACE
    shared = share_gpu(Path("runs", "lanes", "mps").resolve())
    print("processes share the GPU by MPS" if shared else "no MPS: processes take turns")
    lanes = [Lane(n, text, given.data, until) for n, text in enumerate(given.lanes, 1)]
    # Ctrl-C reaches the studies as well; they stop by themselves, and so do the lanes.
    signal.signal(signal.SIGINT, lambda *_: [setattr(lane, "until", 0.0) for lane in lanes])
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGINT))
    started = time.monotonic()
    for lane in lanes:
        lane.start()
    while any(lane.is_alive() for lane in lanes):
        for lane in lanes:
            lane.join(EVERY / len(lanes))
        print(f"{time.monotonic() - started:6.0f} s", *[lane.last_line()[:100] for lane in lanes],
              sep="\n   ", flush=True)  # fmt: skip
        if given.pack:
            pack(given.pack)
    if shared:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


if __name__ == "__main__":
    main()
