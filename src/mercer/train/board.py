"""TensorBoard's events, written line by line.

torch's SummaryWriter writes in a thread of its own, so a full disk would end in a traceback.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from .folder import naming
from .settings import Settings


class Board:
    """Numbers and texts of a run, as an event file in a folder."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
            from torch.utils.tensorboard import summary
        except ImportError:
            raise ValueError(
                "--tensorboard needs tensorboard: pip install 'mercer[train]'"
            ) from None
        self._event: Any = Event
        self._writer: Any = RecordWriter
        self._summary: Any = summary
        self._settings = settings
        # Made by the first line, so that a start that fails leaves none.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self.path = folder / name

    def note(self, step: int, numbers: dict[str, Any]) -> None:
        """Add the numbers and texts of a line of the journal."""
        events = [] if self.path.exists() else self._start()
        for name, value in numbers.items():
            title = name.replace("eval_", "eval/") if "eval_" in name else f"train/{name}"
            make = self._summary.text if isinstance(value, str) else self._summary.scalar
            events.append({"summary": make(title, value), "step": step})
        with naming(self.path), open(self.path, "ab") as file:
            for parts in events:
                event = self._event(wall_time=time.time(), **parts)
                self._writer(file).write(event.SerializeToString())

    def _start(self) -> list[dict[str, Any]]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self._summary.text("settings", self._settings.as_json())
        return [{"file_version": "brain.Event:2"}, {"summary": text, "step": 0}]
