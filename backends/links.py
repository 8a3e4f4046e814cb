"""The link between device and host memory: two ports, one a direction (a copy engine each, full
duplex). Transfers outlive the step that started them, and are identified by their end. Bytes,
seconds.

GPUs without NVLink send their all-reduces over it too. These are evenly spread over a step's
computing, take both directions, and count from when they begin to when they end. How they and the
transfers share the link is a `Sharing`; over the length of a step it comes to two rates:

- while a step computes, transfers go at `share` of the link's rate;
- while anything is transferred, each all-reduce takes `1 + delay` times as long, and the step is
  longer by that.

Before a step begins, and while it only waits for its transfers, they have the link to themselves. A
transfer that outlives a step goes on at the step's rate: the next steps are unknown when it is
queued, and assumed to be like this one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from twinserve.backends.ports import Port, send
from twinserve.policies.base import Sharing
from twinserve.policies.kv.offload.connector import Job, Jobs
from twinserve.policies.plan import DEVICE, HOST, Place
from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.specs import GpuSpec


def evenly(allreduce_share: float) -> tuple[float, float]:
    """Share the link evenly: a transfer and an all-reduce get half of the rate while both go on."""
    return 1.0 / (1.0 + allreduce_share), 1.0


def allreduces_of(gpu: GpuSpec, model: StepTimeModel) -> Callable[[StepComposition], float] | None:
    """Return the seconds of a step's all-reduces by its composition, if they use PCIe. None with
    NVLink, on one GPU, and for a form of step times without all-reduces (docs/layerkv.md)."""
    if gpu.nvlink_bytes_per_s or not model.allreduce_seconds(StepComposition(1)):
        return None
    return model.allreduce_seconds


@dataclass(frozen=True, slots=True)
class Computing:
    """A step with all-reduces on the link.

    start     when it begins to compute
    until     when it has computed, if transfers go on that long
    share     of the link's time that they get until then
    """

    start: float
    until: float
    share: float

    def landing(self, begin: float, end: float, step_waits: bool) -> float:
        """Return when a transfer arrives that would take from `begin` to `end` > `start` with the
        link to itself."""
        begin = max(begin, self.start)
        work = end - begin
        if step_waits or not self.share:
            beside = max(self.until - begin, 0.0)
            if work >= self.share * beside:
                return max(begin, self.until) + (work - self.share * beside)
        return begin + work / self.share


class PcieLink:
    """bytes_per_s: sustained, each direction, over all ranks. latency_s: of one transfer, while
    others pass. sharing: with all-reduces, if there are any."""

    def __init__(
        self, bytes_per_s: float, latency_s: float = 10e-6, sharing: Sharing = evenly
    ) -> None:
        self.to_host = Port("PCIe to the host", bytes_per_s, latency_s)
        self.to_device = Port("PCIe to the device", bytes_per_s, latency_s)
        self.sharing = sharing
        self._paths = {(DEVICE, HOST): (self.to_host,), (HOST, DEVICE): (self.to_device,)}

    @property
    def free_at(self) -> float:
        """Return when all queued transfers have passed, both ways."""
        return max(self.to_host.free_at, self.to_device.free_at)

    def lose(self, now: float) -> None:
        """The device has failed: its transfers are lost."""
        self.to_host.lose(now)
        self.to_device.lose(now)

    def path(self, source: Place, target: Place) -> tuple[Port, ...]:
        """Return the ports between two places. Raises ValueError if the link does not join them."""
        path = self._paths.get((source, target))
        if path is None:
            raise ValueError(f"no link from {source} to {target}: PCIe joins device and host")
        return path

    def transfer(
        self,
        now: float,
        size: int,
        source: Place,
        target: Place,
        beside: Computing | None = None,
        step_waits: bool = False,
    ) -> float:
        """Queue `size` bytes at `now`; returns when they have arrived. step_waits: the step
        `beside` ends no earlier."""
        path = self.path(source, target)
        if beside is None:
            return send(path, now, size).lands_s

        def passed(port: Port, begin: float, size: int) -> float:
            end = port.passed(begin, size)
            return beside.landing(begin, end, step_waits) if end > beside.start else end

        return send(path, now, size, passed).lands_s

    def landings(self, now: float, moves: Iterable[tuple[int, Place, Place]]) -> list[float]:
        """Return when `moves` (bytes, source, target), queued at `now` one after another, would
        arrive with the link to themselves. Nothing is queued."""
        free_at: dict[Port, float] = {}
        ends = []
        for size, source, target in moves:
            (port,) = self.path(source, target)
            end = port.passed(max(now, free_at.get(port, port.free_at)), size)
            free_at[port] = end
            ends.append(end + port.latency_s)
        return ends

    def computing(self, start: float, seconds: float, allreduce: float) -> Computing:
        """A step that computes from `start`, for `seconds` of which `allreduce` are all-reduces."""
        share, delay = self.sharing(allreduce / seconds)
        return Computing(start, start + (seconds + delay * allreduce), share)

    def computing_seconds(self, start: float, seconds: float, allreduce: float) -> float:
        """Return how long that step takes with the transfers that are queued."""
        busy = self.free_at - start
        if busy <= 0 or not allreduce:
            return seconds
        _, delay = self.sharing(allreduce / seconds)
        most = seconds + delay * allreduce
        return most if busy >= most else seconds + delay * allreduce * (busy / most)


_NO_JOBS = Jobs()


class HostTransfers:
    """to_host, to_device  ports of the link, which other transfers may use, too
    stored_bytes, loaded_bytes  queued so far; waited_s: for which steps have waited for stores
    """

    def __init__(self, to_host: Port, to_device: Port, kv_bytes_per_token: int) -> None:
        self.to_host, self.to_device = to_host, to_device
        self.kv_bytes_per_token = kv_bytes_per_token
        self.stored_bytes = self.loaded_bytes = 0
        self.waited_s = 0.0
        self._deferred: list[Job] = []  # stores of the plan before
        self._lands_s: dict[int, float] = {}  # jobs under way

    @property
    def under_way(self) -> bool:
        return bool(self._lands_s or self._deferred)

    def begin(self, jobs: Jobs | None, now: float) -> tuple[float, list[tuple[Job, float]]]:
        """A step with these jobs begins. Returns when it may compute, and the stores queued now
        with their landings. Its loads are due when it has ended (`load`)."""
        jobs = jobs or _NO_JOBS
        due, self._deferred = self._deferred, []
        for job in jobs.stores:
            (due if job.number in jobs.flush else self._deferred).append(job)
        begun = [(job, self._send(self.to_host, job, now)) for job in due]
        waited = [self._lands_s[n] for n in jobs.flush if n in self._lands_s]  # else it has ended
        start = max(waited, default=now)
        self.waited_s += start - now
        return start, begun

    def load(self, jobs: Jobs, end: float) -> list[tuple[Job, float]]:
        """The step with these jobs ends at the given time. Returns its loads, each with the time at
        which it lands."""
        return [(job, self._send(self.to_device, job, end)) for job in jobs.loads]

    def landed(self, job: Job) -> None:
        del self._lands_s[job.number]

    def _send(self, port: Port, job: Job, now: float) -> float:
        size = job.tokens * self.kv_bytes_per_token
        if job.store:
            self.stored_bytes += size
        else:
            self.loaded_bytes += size
        landing = self._lands_s[job.number] = send((port,), now, size).lands_s
        return landing
