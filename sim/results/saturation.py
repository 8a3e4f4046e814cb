"""Whether a run keeps up with its arrivals. If not, means depend on the trace's length.

A growing queue differs from a fluctuating one in its gains over ten equal parts of the arrival
time: the total gain is compared with the gains' spread. For a random walk, the sum of ten
independent gains is Student's t with nine degrees of freedom. The queue of a system that keeps up
is bounded, so its gains cancel, and the test errs on the safe side. The verdicts are checked
against queueing theory in tests/sim/test_saturation.py.
"""

from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

Verdict = Literal["keeps up", "saturated", "sheds", "unclear"]
PARTS = 10
# Student's t with nine degrees of freedom (no scipy here: its import takes longer than most runs).
T_GROWS = 3.250  # one-sided, 0.5 %: how rarely a queue without drift may be called a growing one
T_RANGE = 2.262  # two-sided, 5 %: the range that is given with the growth
LEAST_SHARE = 0.01  # of the arrivals: a queue that gains less in a window does not matter
STEADY_SHARE = 0.02  # a queue that gained more than this was not seen to be steady
TOLD_SHARE = 0.10  # an overload of this size must have been visible before a queue is called steady
FILLING = 3.0  # mean service times until the system holds what it will hold
EARLY_SHARES, FIRST = (0.1, 0.03, 0.01), 20  # of the requests, and at least so many
FEWEST = 50  # arrivals in the window


@dataclass(frozen=True)
class Saturation:
    """Result of `saturation`; rates in requests/s, over the window.

    verdict     keeps up; saturated: the queue grows; sheds: requests end unserved; unclear: see
                `reason`
    begin_s, end_s   the window on the run's clock: after the system has filled, to the last arrival
    arrived_per_s, served_per_s, growth_per_s   growth: of the requests in the system
    growth_range_per_s   half width of the growth's 95 % range
    in_system   requests in the system at the last arrival
    lost_share  share of the window's requests that ended early
    """

    verdict: Verdict
    reason: str
    begin_s: float | None = None
    end_s: float | None = None
    arrived_per_s: float | None = None
    served_per_s: float | None = None
    growth_per_s: float | None = None
    growth_range_per_s: float | None = None
    in_system: int | None = None
    lost_share: float | None = None


def saturation(
    arrival: np.ndarray, scheduled: np.ndarray, ended: np.ndarray, lost: np.ndarray
) -> dict | None:
    """Return `saturation` of a class in summary.json, for outside arrivals (no closed loop; a
    session or application is one request). Seconds, NaN if a request was never scheduled or has not
    ended; early ends as bool[n]. None without a rate: no requests, or all at once."""
    if not len(arrival) or not arrival.max() > arrival.min():
        return None
    return asdict(_judged(arrival, scheduled, ended, lost))


def _judged(
    arrival: np.ndarray, scheduled: np.ndarray, ended: np.ndarray, lost: np.ndarray
) -> Saturation:
    first, last = float(arrival.min()), float(arrival.max())
    span = last - first
    filled = max(0.1 * span, FILLING * _early_service_s(arrival, scheduled, ended))
    leaves = np.where(np.isnan(ended), np.inf, ended)
    if filled <= 0.5 * span:
        return _of_growth(arrival, leaves, lost, first + filled, last)
    # The system still fills: what it holds must grow, and so may the queue that it will keep.
    return Saturation(
        "unclear",
        f"requests arrive for {span:.3g} s, too short to judge a system whose first requests took "
        f"{filled / FILLING:.3g} s each",
    )


def _early_service_s(arrival: np.ndarray, scheduled: np.ndarray, ended: np.ndarray) -> float:
    """Return mean seconds from scheduling to end of the first requests: the service time before
    there is a queue. The least of several counts of first requests, since later ones may have been
    preempted."""
    order = np.argsort(arrival, kind="stable")
    service = (ended - scheduled)[order]
    counts = {max(int(share * len(service)), min(FIRST, len(service))) for share in EARLY_SHARES}
    means = [
        float(known.mean())
        for count in sorted(counts)
        if len(known := service[:count][~np.isnan(service[:count])])
    ]
    return min(means, default=0.0)


def _bounded_spread(held: np.ndarray) -> float:
    """Return the spread of the gain of a queue that fluctuates about a line: √2 times the spread
    about the line, doubled. A random walk stays closer to its fitted line than it wanders."""
    at = np.arange(len(held))
    line = np.polynomial.polynomial.polyfit(at, held, 1)
    about = held - np.polynomial.polynomial.polyval(at, line)
    return 2.0 * np.sqrt(2.0 * float(np.sum(np.square(about))) / (len(held) - 2))


def _of_growth(
    arrival: np.ndarray, ended: np.ndarray, lost: np.ndarray, begin_s: float, end_s: float
) -> Saturation:
    """Judge by the growth of the system's requests from begin_s to end_s. ended: inf if not."""
    edges = np.linspace(begin_s, end_s, PARTS + 1)
    came = np.searchsorted(np.sort(arrival), edges, "right")
    held = came - np.searchsorted(np.sort(ended), edges, "right")
    gains = np.diff(held)
    seconds, arrived = end_s - begin_s, int(came[-1] - came[0])
    if arrived < FEWEST:
        return Saturation("unclear", f"only {arrived} requests after the system has filled")
    inside = (arrival > begin_s) & (arrival <= end_s)
    served = int(((ended > begin_s) & (ended <= end_s) & ~lost).sum())
    spread = float(gains.std(ddof=1)) * np.sqrt(PARTS)
    gain = float(held[-1] - held[0])
    least, most = gain - T_GROWS * spread, gain + T_RANGE * min(spread, _bounded_spread(held))
    lost_share = float(lost[inside].mean())
    if least > 0 and gain > LEAST_SHARE * arrived:
        verdict, reason = "saturated", "the queue grows for as long as requests arrive"
    elif lost_share >= LEAST_SHARE:
        verdict, reason = "sheds", f"{lost_share:.1%} of the requests end early"
    elif gain <= STEADY_SHARE * arrived and most < TOLD_SHARE * arrived:
        verdict, reason = "keeps up", "the queue does not grow"
    else:
        verdict = "unclear"
        share = min(most / arrived, 1.0)
        reason = f"a queue that grows by {share:.0%} of the arrivals might look the same"
    return Saturation(
        verdict,
        reason,
        begin_s,
        end_s,
        arrived / seconds,
        served / seconds,
        gain / seconds,
        T_RANGE * spread / seconds,
        int((arrival <= end_s).sum() - (ended <= end_s).sum()),
        lost_share,
    )
