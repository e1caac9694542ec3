"""The machine and versions of a run."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from .. import __version__

UNKNOWN = "unknown"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine() or UNKNOWN} CPU"


def slug(text: str) -> str:
    """Letters and digits, joined by hyphens: a part of a file's name."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def describe(device: torch.device) -> dict[str, object]:
    """Device, versions, commit and date; None for what is missing."""
    cuda = device.type == "cuda"
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "versions": {
            "mercer": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _installed("triton"),
            "cuda": torch.version.cuda if cuda else None,
            "cudnn": _cudnn() if cuda else None,
            "driver": _driver() if cuda else None,
        },
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str:
    """The commit of this code, marked if files differ from it."""
    here = str(Path(__file__).parent)
    # An installed copy may be inside a checkout of another project.
    if _output("git", "-C", here, "ls-files", "--error-unmatch", "../__init__.py") is None:
        return UNKNOWN
    found = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    if not found:
        return UNKNOWN
    status = ("status", "--porcelain", "--untracked-files=no", ":/src")
    changed = _output("git", "--no-optional-locks", "-C", here, *status)
    return f"{found}-dirty" if changed else found


def _driver() -> str | None:
    query = ("--query-gpu=driver_version", "--format=csv,noheader")
    return (_output("nvidia-smi", *query) or "").split("\n")[0] or None


def _cudnn() -> str | None:
    version = torch.backends.cudnn.version()
    if version is None:
        return None
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The output of a program, or None if it is missing or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
