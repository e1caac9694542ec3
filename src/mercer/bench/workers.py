"""A process that runs one job after the other and is replaced when it dies.

A crash on a GPU ends the process or makes its CUDA context unusable. So jobs that may crash run in
another process. Starting one takes seconds, so a healthy process takes the next job.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Messages of errors that make a CUDA context unusable.
POISONED = ("CUDA error", "illegal memory access", "illegal instruction", "unspecified launch")
# How many characters of a dead process's output are kept.
TAIL = 400


@dataclass(frozen=True)
class Reply:
    """The outcome of a job: "done", "failed", "crashed" or "hung", with its message."""

    status: str
    said: str
    seconds: float


class Worker:
    """Runs `target`, "module:function", on dictionaries and returns its result as text."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._process: subprocess.Popen[str] | None = None
        self._errors: Any = None

    def run(self, job: dict[str, Any], timeout: float) -> Reply:
        """The job's reply. After a crash or a timeout, the next job gets a new process."""
        started = time.monotonic()
        process = self._start()
        timer = threading.Timer(timeout, process.kill)
        timer.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        seconds = time.monotonic() - started
        if not line:
            code, said = process.wait(), self._tail()
            self.close()
            if seconds >= timeout:
                return Reply("hung", f"no reply in {timeout:.0f} s; {said}", seconds)
            return Reply("crashed", f"exit code {code}; {said}", seconds)
        status, said = json.loads(line)
        if status == "crashed":
            self.close()
        return Reply(status, said, seconds)

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                # A pipe to a dead process cannot be flushed.
                with contextlib.suppress(OSError):
                    stream.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        # Closed with the process.
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mercer.bench.workers", self.target],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        return self._process

    def _tail(self) -> str:
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - TAIL))
        return str(self._errors.read()).strip()


def serve(target: str) -> None:
    """Run jobs from stdin and write their replies to stdout, until stdin ends."""
    # Keep output of jobs out of the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, name = target.split(":")
    function = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        status, said = attempt(function, json.loads(line))
        replies.write(json.dumps([status, said]) + "\n")
        replies.flush()
        if status == "crashed":
            # A normal exit would use the CUDA context again.
            os._exit(1)


def attempt(function: Callable[..., str], job: dict[str, Any]) -> tuple[str, str]:
    """("done", what it returned), or how it failed."""
    try:
        return "done", function(**job)
    except AssertionError as error:
        return "failed", str(error)
    except Exception as error:
        said = "".join(traceback.format_exception_only(error)).strip()[-TAIL:]
        poisoned = any(text in str(error) for text in POISONED)
        return "crashed" if poisoned else "failed", said


if __name__ == "__main__":
    serve(sys.argv[1])
