"""When KV blocks on their way to and from a host tier arrive. Bytes, seconds.

Source: vLLM 0.32, `kv_connector/v1/offloading/worker.py`, `v1/kv_offload/cpu/gpu_worker.py`,
`v1/worker/gpu/kv_connector.py` (`post_forward`).

- Loads are queued behind the forward pass of their step, whose stream they wait for: they go on
  beside the steps after it. A plan that computes nothing begins them at once.
- Stores are queued when the next step begins: sampling shall not wait for them. Each direction is a
  queue of its own.
- A step that would write where a store reads waits until that has landed (`flush`).
"""

from __future__ import annotations

from twinserve.backends.ports import Port, send
from twinserve.policies.kv.offload.connector import Job, Jobs

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
