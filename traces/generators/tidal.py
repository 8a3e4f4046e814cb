"""Online arrivals over a day: a tide with a peak at noon and a trough before dawn, and bursts
within minutes.

The shape follows the Echo paper's description (Fig. 2, Sec. 2.2): most requests from 12:00 to
14:00, fewest from 04:00 to 06:00. The peak is about six times the trough, with bursts such as one
around 13:00. The trace itself is not public; the curve between these points and the size of the
bursts are ours.
"""

import math

import numpy as np

from twinserve.traces.generators.synth import MAX_ROWS, SHAPES, paired
from twinserve.traces.workload import Provenance, Workload, WorkloadError

NAME = "tidal"
DAY_S = 86_400.0
# Hour of the day and the rate there, as a part of the peak; straight lines between them.
TIDE = (
    (0.0, 0.45),
    (4.0, 1 / 6),
    (6.0, 1 / 6),
    (9.0, 0.70),
    (12.0, 1.0),
    (14.0, 1.0),
    (18.0, 0.70),
    (21.0, 0.80),
    (24.0, 0.45),
)
BURST_S = 60.0  # a burst of the day lasts about as long


def tide(day_s) -> np.ndarray:
    """The rate at a time of day (seconds), as a part of the peak rate."""
    hours, parts = np.array(TIDE).T
    return np.interp(np.asarray(day_s, float) / 3600.0 % 24.0, hours, parts)


def tidal(
    *,
    peak_rate: float = 1.0,
    duration_s: float = DAY_S,
    start_hour: float = 0.0,
    burstiness: float = 0.3,
    lengths: str = "sharegpt",
    seed: int = 0,
) -> Workload:
    """Online requests with the lengths of `sharegpt` or `lmsys` over one day.

    peak_rate   requests/s at the peak, bursts averaged out
    duration_s  seconds into which the day is pressed; rates stay, so a shorter day has fewer
                requests
    start_hour  hour of the day at time 0
    burstiness  deviation of the rate from the tide, as a part of it: a factor drawn anew for every
                minute of the day (gamma, mean 1); 0: a plain Poisson process along the tide

    Same arguments, same workload. Raises WorkloadError.
    """
    if seed < 0:
        raise WorkloadError(f"seed {seed} is below 0: give a whole number from 0 up")
    for what, value in (("peak rate", peak_rate), ("duration", duration_s)):
        if not 0 < value < math.inf:
            raise WorkloadError(f"{what} {value} is not a finite number above 0")
    if not 0 <= start_hour < 24:
        raise WorkloadError(f"start hour {start_hour} is not within a day: give 0 to 24")
    if not 0 <= burstiness < math.inf:
        raise WorkloadError(f"burstiness {burstiness} is below 0: give 0 or more")
    if lengths not in SHAPES:
        raise WorkloadError(f"unknown lengths '{lengths}': choose from {', '.join(SHAPES)}")
    if peak_rate * duration_s > MAX_ROWS:
        raise WorkloadError(
            f"{peak_rate * duration_s:g} requests are more than {MAX_ROWS}: lower rate or duration"
        )
    gusts, arrivals, sizes = (
        np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0x71, k))) for k in range(3)
    )
    minutes = round(DAY_S / BURST_S)
    factor = np.ones(minutes)
    if burstiness:
        shape = 1 / burstiness**2
        factor = gusts.gamma(shape, 1 / shape, minutes)
    edges = np.linspace(0.0, duration_s, minutes + 1)
    middle = (np.arange(minutes) + 0.5) * BURST_S + start_hour * 3600.0
    expected = peak_rate * tide(middle) * factor * (duration_s / minutes)
    counts = arrivals.poisson(expected)
    starts = np.repeat(edges[:-1], counts)
    at = np.sort(starts + arrivals.random(len(starts)) * (duration_s / minutes))
    if not len(at):
        raise WorkloadError(
            f"no request arrives in {duration_s:g} s at {peak_rate:g}/s: raise either"
        )
    prompt, output = paired(SHAPES[lengths], len(at), sizes)
    said = (
        f"tidal({lengths}, peak_rate={peak_rate:g}, duration={duration_s:g}s, "
        f"start_hour={start_hour:g}, "
        f"burstiness={burstiness:g}, seed={seed})"
    )
    return Workload.build(at, prompt, output, provenance=Provenance(NAME, transforms=(said,)))
