"""Times of single kernels: what a campaign's operators are measured with. Needs PyTorch alone."""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

BF16 = torch.bfloat16
L2_BYTES = 240e6  # several times the L2 cache of an H100 (50 MB)


class OutOfTimeError(Exception):
    """The limit is reached."""


class Bench:
    """Times calls and writes rows until `limit_s` seconds have passed."""

    def __init__(self, out: Path, limit_s: float, cpu: bool) -> None:
        self.cpu, self.device = cpu, "cpu" if cpu else "cuda"
        self._end = time.monotonic() + limit_s
        self._file = (out / "operators.csv").open("w", newline="")
        self._table = csv.writer(self._file)
        self._table.writerow("stage what T n k extra us us10 us90 tflops gbs".split())
        self.not_captured: dict[str, int] = {}

    def run(self, stage: Callable[[Bench], None]) -> dict[str, object]:
        """Run `stage`: the seconds it took, and how it ended. What it raises stops it alone."""
        began = time.monotonic()
        try:
            stage(self)
            end = "whole"
        except OutOfTimeError:
            end = "cut at the limit"
        except Exception as error:  # noqa: BLE001 - the other stages have their turn
            end = f"{type(error).__name__}: {str(error)[:300]}"
        return {"seconds": round(time.monotonic() - began, 1), "end": end}

    def randn(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def copies(self, make: Callable[[], torch.Tensor], nbytes: float) -> list[torch.Tensor]:
        """Results of `make`, each of `nbytes`: enough to exceed the L2 cache, at most 24."""
        count = 1 if self.cpu else max(1, min(24, math.ceil(L2_BYTES / max(nbytes, 1))))
        return [make() for _ in range(count)]

    def row(self, stage, what, tokens, n, k, extra, calls, flops=0.0, nbytes=0.0, **how) -> None:
        """Time `calls` and write the row."""
        times = sorted(self.microseconds(calls, **how))
        middle = statistics.median(times)
        low, high = times[len(times) // 10], times[-1 - len(times) // 10]
        rates = (
            f"{flops / middle / 1e6:.2f}" if flops else "",
            f"{nbytes / middle / 1e3:.1f}" if nbytes else "",
        )
        said = (f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}", *rates)
        self._table.writerow([stage, what, tokens, n, k, extra, *said])
        self._file.flush()

    def microseconds(
        self,
        calls: Sequence[Callable[[], object]],
        graph: bool = True,
        target_us: float = 2000.0,
        replays: int = 7,
        most: int = 200,
    ) -> list[float]:
        """Microseconds of one call in each replay of so many calls, at most `most`, that a replay
        takes `target_us`. `calls` do the same on different data, in turn. Raises OutOfTimeError."""
        if time.monotonic() > self._end:
            raise OutOfTimeError
        if self.cpu:
            return [_host_us(calls[0]) for _ in range(3)]
        for call in calls[:2]:
            call()
        began, ended = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        began.record()
        calls[0]()
        ended.record()
        torch.cuda.synchronize()
        once_us = max(began.elapsed_time(ended) * 1e3, 1.0)
        many = max(len(calls), min(most, math.ceil(target_us / once_us)))
        if once_us > 5000.0:
            many, replays = 1, min(replays, 5)
        run = self._captured(calls, many) if graph else None
        if run is None:

            def run() -> None:
                for i in range(many):
                    calls[i % len(calls)]()

        run()
        torch.cuda.synchronize()
        times = []
        for _ in range(replays):
            began.record()
            run()
            ended.record()
            torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) * 1e3 / many)
        return times

    def _captured(self, calls: Sequence[Callable[[], object]], many: int):
        """The replay of a CUDA graph of `many` calls; None if they cannot be captured."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            # torch.cuda.graph() would empty the allocator's cache before each capture
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for i in range(many):
                        calls[i % len(calls)]()
                finally:
                    graph.capture_end()
        except Exception as error:  # noqa: BLE001 - timed without a graph, and said
            name = type(error).__name__
            self.not_captured[name] = self.not_captured.get(name, 0) + 1
            torch.cuda.synchronize()
            return None
        torch.cuda.current_stream().wait_stream(stream)
        return graph.replay


def _host_us(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e6
