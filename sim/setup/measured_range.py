"""Whether a run stayed within what its profile was measured with."""

from __future__ import annotations

from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.profile import Profile
from twinserve.sim.results.steps import Steps


def most_decodes(steps: Steps) -> int:
    """In one step."""
    return int(steps.first("decode_requests").max()) if len(steps) else 0


def outside(profile: Profile, steps: Steps) -> list[str]:
    """That a run had more requests at once than its profile was measured with."""
    most, known = most_decodes(steps), profile.most_requests
    if known is None or most <= known:
        return []
    seconds, decodes = steps.seconds(), steps.first("decode_requests").repeat(steps.lengths)
    share = seconds[decodes > known].sum() / seconds.sum()
    error = expected_errors(profile, decodes=most).decode
    return [
        f"profile {profile.name} was measured with up to {known:,} requests at once; here up to "
        f"{most:,} decode, and more than {known:,} in {share:.0%} of the time: expected error of "
        f"decodes {error.error:.0%}, not {expected_errors(profile).decode.error:.0%}"
    ]
