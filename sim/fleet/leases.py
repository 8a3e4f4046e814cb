"""How long a prefill replica keeps the KV of a prompt that was not fetched: a lease, which the
decode replica that is going to fetch it renews by heartbeats.

Source: vLLM 0.32, `nixl/base_scheduler.py` (`build_connector_meta`: an engine sends one heartbeat
for all that it waits for), `nixl/base_worker.py` (`_handle_heartbeat` and
`_reap_expired_send_leases`). Two differences: vLLM sends and looks once a step, and its first
heartbeat to an engine that it has not met only shakes hands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Heartbeats:
    """Of one decode replica: one for all KV that it waits for, `every_s` after the last one; the
    first at once."""

    every_s: float
    _waits_for: int = 0
    _last_s: float = -math.inf

    def begin(self, now: float) -> None:
        """It waits for one more prompt's KV."""
        self._go_on(now)
        if not self._waits_for and now - self._last_s >= self.every_s:
            self._last_s = now
        self._waits_for += 1

    def end(self, now: float) -> None:
        """For one less, and no heartbeat goes out for that any more."""
        self._go_on(now, but_now=True)
        self._waits_for -= 1

    def last_s(self, now: float, but_now: bool = False) -> float:
        """When the latest one was sent, `now` included or not; minus infinity: none was."""
        self._go_on(now, but_now)
        return self._last_s

    def _go_on(self, now: float, but_now: bool = False) -> None:
        if self._waits_for:
            since = (now - self._last_s) / self.every_s
            beats = math.ceil(since) - 1 if but_now else math.floor(since)
            self._last_s += self.every_s * max(beats, 0)


@dataclass(slots=True)
class Lease:
    """expires_s    unless a heartbeat comes; as of the time when its last one was counted
    extension_s  for so long a heartbeat renews it, at least
    """

    expires_s: float
    extension_s: float
    _beats: Heartbeats | None = None  # of the requests that wait for it
    _since_s: float = math.nan

    @property
    def tracked(self) -> bool:
        return self._beats is not None

    def renewed_by(self, beats: Heartbeats) -> bool:
        return self._beats is beats

    def track(self, beats: Heartbeats, now: float) -> None:
        """A decode replica waits for the KV from now on."""
        beats.begin(now)
        self._beats, self._since_s = beats, now

    def let_go(self, now: float) -> None:
        """It waits for it no more."""
        if self._beats is not None:
            self.renew(now, but_now=True)
            self._beats.end(now)
            self._beats = None

    def renew(self, now: float, but_now: bool = False) -> float:
        """When it runs out (seconds), with the heartbeats that have come; one of this instant
        counts, or not."""
        if self._beats is not None:
            last_s = self._beats.last_s(now, but_now)
            if last_s >= self._since_s:
                self.expires_s = max(self.expires_s, last_s + self.extension_s)
        return self.expires_s
