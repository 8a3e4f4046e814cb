"""KV transfers beside all-reduce on one PCIe link (Sec. 3.1.3): what is left for them, and what
they cost the all-reduce."""

from __future__ import annotations

import math

_LOOKS = 1000  # at a link that is never found free, before that counts as never
_NEGLIGIBLE = 1e-9  # a share of all-reduce that leaves the link to KV transfers
_ROUNDING = 1e-9  # lengths of an all-reduce: what sums of floats are off at most


def beside_allreduce(allreduce_share: float, wait: float, unit: float) -> tuple[float, float]:
    """(share of the link's time that KV transfers get, delay of an all-reduce as a part of its own
    length).

    A sender of a sub-unit looks first whether the link is in use, and if it is, looks again
    after `wait`. A sub-unit that has begun is not broken off, so the next all-reduce may have to
    wait for it. There is always more to send. All-reduces are evenly spread, so that what happens
    between two of them repeats:

    ```
    |all-reduce            | computing                    |all-reduce
    look       look        look                           | due, begins when the last sub-unit has
               been sent
                           |sub-unit|sub-unit|sub-unit|sub-unit|
    ```

    allreduce_share  of a step without any KV transfer, 0 <= share <= 1
    wait, unit       how long, in lengths of an all-reduce; > 0
    """
    if allreduce_share < _NEGLIGIBLE:
        return 1.0, 0.0
    period = 1.0 / allreduce_share  # from one all-reduce to the next
    for looks in range(math.ceil(1.0 / wait - _ROUNDING), _LOOKS):
        waited = looks * wait
        into = waited % period
        if into < 1.0 - _ROUNDING or period - into < _ROUNDING:
            continue  # in the next all-reduce already
        sent = math.ceil((period - into) / unit - _ROUNDING) * unit
        met = math.floor(waited / period) + 1  # all-reduces; only the one after them has to wait
        late = sent - (period - into)
        return sent / (waited + sent), late / met if late > _ROUNDING else 0.0
    return 0.0, 0.0
