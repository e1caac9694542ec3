"""Ctrl-C while the command `mercer` still imports torch: one sentence instead of a traceback.

Python imports the package, and so torch, before the command's own code runs.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from typing import Any

INTERRUPTED = 130


def is_command() -> bool:
    """Whether this process is the command, as `mercer` or as `python -m mercer`."""
    name = sys.argv[0] if getattr(sys, "argv", None) else ""
    return name == "-m" or PurePath(name).stem == "mercer"


def _say(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write("stopped\n")
    raise SystemExit(INTERRUPTED)


# Until `main` does it; other programs that import the package keep their own hook.
if is_command():
    sys.excepthook = _say
