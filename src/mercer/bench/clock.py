"""Time and memory of a call: the median of repeats, after warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Seconds of warm-up on a GPU, whose clocks rise under load, and of all repeats together.
WARM, TOTAL = 0.2, 1.0
FEWEST, MOST = 3, 30


@dataclass(frozen=True)
class Clock:
    """Times calls on a device; with no number of repeats, as many as fit into about a second."""

    device: torch.device
    repeats: int | None = None
    graph: bool = False  # time replays of a captured CUDA graph

    def median(self, run: Callable[[], object]) -> float:
        """Milliseconds."""
        seconds = self._warm(run)
        if self.graph and self._cuda:
            run = self._captured(run)
            seconds = self._warm(run)
        repeats = self.repeats or max(FEWEST, min(MOST, int(TOTAL / max(seconds, 1e-9))))
        times = self._events(run, repeats) if self._cuda else self._wall(run, repeats)
        return statistics.median(times)

    def peak(self, run: Callable[[], object]) -> int | None:
        """Peak bytes of a call beyond those allocated before it; None on a CPU."""
        if not self._cuda:
            return None
        self._wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        self._wait()
        return torch.cuda.max_memory_allocated(self.device) - before

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def _warm(self, run: Callable[[], object]) -> float:
        """Seconds of one call, once everything is compiled."""
        run()
        self._wait()
        start = time.perf_counter()
        calls, spent = 0, 0.0
        while calls == 0 or (self._cuda and spent < WARM):
            run()
            self._wait()
            calls += 1
            spent = time.perf_counter() - start
        return spent / calls

    def _captured(self, run: Callable[[], object]) -> Callable[[], object]:
        """The launches of a call as a CUDA graph, replayed without host overhead."""
        with torch.cuda.device(self.device):
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run()
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                run()
        return graph.replay

    def _events(self, run: Callable[[], object], repeats: int) -> list[float]:
        # Calls are queued back to back, so host overhead shows only if the device waits for the
        # host.
        with torch.cuda.device(self.device):
            pairs = [
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
                for _ in range(repeats)
            ]
            for start, end in pairs:
                start.record()
                run()
                end.record()
            self._wait()
            return [start.elapsed_time(end) for start, end in pairs]

    def _wall(self, run: Callable[[], object], repeats: int) -> list[float]:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return times
