"""KV transfers beside all-reduce on one PCIe link (Sec. 3.1.3): what is left for them, and what they cost the all-reduce."""

from __future__ import annotations

from functools import lru_cache

_ROUNDS = 1000  # all-reduce operations that the shares are averaged over


@lru_cache(maxsize=64)
def beside_allreduce(allreduce_share: float, wait: float, unit: float) -> tuple[float, float]:
    """(share of the link's time that KV transfers get, delay of an all-reduce as a part of its own length).

    Whoever has a sub-unit to send looks first whether the link is in use, and if it is, looks again after `wait`. A sub-unit
    that has begun is not broken off, so the next all-reduce may have to wait for it. There is always more to send.

    allreduce_share  of a step without any KV transfer, 0 <= share < 1
    wait, unit       how long, in lengths of an all-reduce; > 0
    """
    if not allreduce_share:
        return 1.0, 0.0
    computing = 1.0 / allreduce_share - 1.0  # between the end of one all-reduce and the beginning of the next
    check, start = 0.0, 0.0
    sent = delay = 0.0
    for _ in range(_ROUNDS):
        end = start + 1.0
        while check < end:
            check += wait
        due, sending = end + computing, False
        while check < due:
            check += unit
            sent += unit
            sending = True
        start = check if sending else due  # of a check that came too late nothing is under way
        delay += start - due
    return sent / start, delay / _ROUNDS
