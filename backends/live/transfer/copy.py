"""The worker's side of swapping: copies between the KV tensors and host memory, by order of the
scheduler.

    out    compute lane: gather slots into staging memory   ->  out lane: staging to host
    back   back lane: host to staging   ->  compute lane: scatter into slots

The model's lane waits for gathers and scatters (device to device), never for a copy out, and for a
copy back only when its step needs it. Staging memory is a ring of buffers, two a direction; large
copies go through it piece by piece, so that the link and the gathers overlap and device memory
stays bounded.

A lane is a queue of work: a CUDA stream on a GPU; on a CPU work is done at once. A mark is a place
in a lane: another lane can wait for it, and marks give times.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from twinserve.backends.live.transfer.host import Copies, Orders
from twinserve.backends.live.transfer.layout import SlotTable, expand
from twinserve.policies.plan import DEVICE, HOST, Place


class Mark(Protocol):
    def done(self) -> bool:
        """Whether the lane has come past it."""

    def seconds_since(self, earlier: Mark) -> float:
        """Seconds from `earlier` to here; both must be done."""


class Lane(Protocol):
    def run(self, work: Callable[[], Any]) -> None:
        """Queue `work`."""

    def mark(self) -> Mark:
        """A mark after all work queued so far."""

    def wait(self, mark: Mark) -> None:
        """Let work queued from now on start only when `mark` is passed."""


class Instant:
    """A mark in a lane that does its work at once."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def seconds_since(self, earlier: Instant) -> float:
        return self.at - earlier.at


class InlineLane:
    """Does its work at once."""

    def run(self, work: Callable[[], Any]) -> None:
        work()

    def mark(self) -> Instant:
        return Instant()

    def wait(self, mark: Mark) -> None:
        pass


class CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()

    def seconds_since(self, earlier: CudaMark) -> float:
        return earlier.event.elapsed_time(self.event) / 1000


class CudaLane:
    """A CUDA stream of its own; None: the current one when work is queued, the model's."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream or torch.cuda.current_stream()

    def run(self, work: Callable[[], Any]) -> None:
        with torch.cuda.stream(self.stream):
            work()

    def mark(self) -> CudaMark:
        return CudaMark(self.stream)

    def wait(self, mark: CudaMark) -> None:
        self.stream.wait_event(mark.event)


def lanes_for(device: torch.device) -> tuple[Lane, Lane, Lane]:
    """(the lane that computes, one for copies to the host, one for copies from it)."""
    if device.type == "cuda":
        streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return CudaLane(), CudaLane(streams[0]), CudaLane(streams[1])
    lane = InlineLane()
    return lane, lane, lane


STAGING_BYTES = 256 << 20  # in all four buffers


@dataclass
class TransferReport:
    """What the copies to one place in one step took on one worker.

    order    number of the orders (host.Orders)
    target   HOST or DEVICE, from the other one
    seconds  from the start of the first copy to the end of the last one
    held_s   of these, how long the model's lane was kept from computing
    """

    order: int
    target: Place
    tokens: int
    nbytes: int
    seconds: float
    held_s: float


@dataclass
class _Buffer:
    memory: torch.Tensor  # words[rows, width]
    used: Mark | None = None  # when its last user is done with it


@dataclass(eq=False)
class _Transfer:
    """Begin and end of a transfer (first two), and of its work in the model's lane."""

    order: int
    target: Place
    tokens: int
    begin: Mark
    end: Mark
    held: tuple[Mark, Mark]


class SlotCopier:
    """Carries out orders on one device.

    table          the KV tensors
    host_tokens    rows of host memory; page-locked if the device is a GPU
    staging_bytes  device memory for copies under way, at least one slot a buffer
    lanes          (compute, out, back); by default those that suit the device

    Raises RuntimeError when the host memory cannot be page-locked.
    """

    def __init__(
        self,
        table: SlotTable,
        host_tokens: int,
        staging_bytes: int = STAGING_BYTES,
        lanes: tuple[Lane, Lane, Lane] | None = None,
    ) -> None:
        self.table = table
        self.compute, self.out, self.back = lanes or lanes_for(table.device)
        self.rows = max(1, min(host_tokens, staging_bytes // (4 * table.slot_bytes)))
        self._rings = {target: self._ring() for target in (HOST, DEVICE)}
        self.host = torch.zeros((host_tokens, table.width), dtype=table.word)
        if table.device.type == "cuda":
            _lock_pages(self.host)
        self._written: dict[int, Mark] = {}  # order -> when its copies out are on the host
        self._read: Mark | None = None  # when all copies back so far have left the host
        self._running: list[_Transfer] = []

    def _ring(self) -> deque[_Buffer]:
        shape = self.rows, self.table.width
        return deque(
            _Buffer(torch.empty(shape, dtype=self.table.word, device=self.table.device))
            for _ in range(2)
        )

    def carry_out(self, orders: Orders) -> None:
        """Queue all copies of one step; call it before the step's forward pass is queued."""
        if orders.out.rows:
            self._copy_out(orders.number, orders.out)
        if orders.back.rows:
            self._copy_back(orders.number, orders.back)

    def _copy_out(self, order: int, copies: Copies) -> None:
        if self._read is not None:
            self.out.wait(self._read)  # rows given up since may still be being read
        begin = self.compute.mark()
        for slots, rows in self._pieces(copies):
            buffer = self._next(HOST)
            staged = buffer.memory[: len(slots)]
            if buffer.used is not None:
                self.compute.wait(buffer.used)
            self.compute.run(
                lambda s=slots, into=staged: self.table.gather(self._on_device(s), into)
            )
            gathered = self.compute.mark()
            self.out.wait(gathered)
            self.out.run(lambda r=rows, source=staged: self._to_host(r, source))
            buffer.used = self.out.mark()
        end = self._written[order] = buffer.used
        held = begin, gathered
        self._running.append(_Transfer(order, HOST, copies.tokens, begin, end, held))

    def _copy_back(self, order: int, copies: Copies) -> None:
        if copies.after in self._written:
            self.back.wait(self._written[copies.after])
        begin, asked = self.back.mark(), self.compute.mark()
        for slots, rows in self._pieces(copies):
            buffer = self._next(DEVICE)
            staged = buffer.memory[: len(slots)]
            if buffer.used is not None:
                self.back.wait(buffer.used)
            self.back.run(lambda r=rows, into=staged: self._from_host(r, into))
            self._read = self.back.mark()
            self.compute.wait(self._read)
            self.compute.run(
                lambda s=slots, source=staged: self.table.scatter(self._on_device(s), source)
            )
            buffer.used = self.compute.mark()
        end, held = buffer.used, (asked, buffer.used)
        self._running.append(_Transfer(order, DEVICE, copies.tokens, begin, end, held))

    def reports(self) -> list[TransferReport]:
        """Transfers that ended since the last call, oldest first. Does not wait."""
        ended = [transfer for transfer in self._running if transfer.end.done()]
        self._running = [transfer for transfer in self._running if transfer not in ended]
        for transfer in ended:
            if transfer.target == HOST:
                del self._written[transfer.order]
        return [
            TransferReport(
                t.order,
                t.target,
                t.tokens,
                t.tokens * self.table.slot_bytes,
                t.end.seconds_since(t.begin),
                t.held[1].seconds_since(t.held[0]),
            )
            for t in ended
        ]

    def close(self) -> None:
        """Wait for copies under way and give the host memory back."""
        if self.table.device.type == "cuda":
            torch.cuda.synchronize(self.table.device)
            torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr())
        self.host = self.host[:0].clone()

    def _pieces(self, copies: Copies) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(device slots, host rows), as many as a buffer takes, until all are given."""
        slots, rows = expand(copies.slots), expand(copies.rows)
        if len(slots) != len(rows):
            raise RuntimeError(f"order to copy {len(slots)} slots to or from {len(rows)} host rows")
        for start in range(0, len(slots), self.rows):
            yield slots[start : start + self.rows], rows[start : start + self.rows]

    def _next(self, target: Place) -> _Buffer:
        ring = self._rings[target]
        ring.rotate(-1)
        return ring[0]

    def _on_device(self, slots: np.ndarray) -> torch.Tensor:
        indices = torch.from_numpy(slots)
        if self.table.device.type == "cuda":
            # from pageable memory the copy would wait for the work queued before it
            indices = indices.pin_memory()
        return indices.to(self.table.device, non_blocking=True)

    def _to_host(self, rows: np.ndarray, source: torch.Tensor) -> None:
        for row, start, count in _runs(rows):
            self.host[row : row + count].copy_(source[start : start + count], non_blocking=True)

    def _from_host(self, rows: np.ndarray, into: torch.Tensor) -> None:
        for row, start, count in _runs(rows):
            into[start : start + count].copy_(self.host[row : row + count], non_blocking=True)


def _runs(rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """(first row, its index in `rows`, how many rows follow one another from there)."""
    starts = np.flatnonzero(np.diff(rows, prepend=rows[0] - 2) != 1)
    for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield int(rows[start]), int(start), int(end - start)


def _lock_pages(memory: torch.Tensor) -> None:
    """Page-lock a host tensor in place (torch would round its size to a power of two)."""
    error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0).value
    if error != 0:
        raise RuntimeError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory cannot be page-locked (CUDA error "
            f"{error}); "
            "give host_tokens less, or raise the limit of locked memory"
        )
