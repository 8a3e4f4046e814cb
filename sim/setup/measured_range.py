"""Whether a run stayed within what its profile was measured with."""

from __future__ import annotations

import pandas as pd

from twinserve.profiles.evidence import expected_errors
from twinserve.profiles.profile import Profile


def most_decodes(steps: pd.DataFrame) -> int:
    """In one step."""
    return int(steps["decode_requests"].max()) if len(steps) else 0


def outside(profile: Profile, steps: pd.DataFrame) -> list[str]:
    """That a run had more requests at once than its profile was measured with."""
    most, known = most_decodes(steps), profile.most_requests
    if known is None or most <= known:
        return []
    seconds = steps["end_s"] - steps["start_s"]
    share = seconds[steps["decode_requests"] > known].sum() / seconds.sum()
    error = expected_errors(profile, decodes=most).decode
    return [
        f"profile {profile.name} was measured with up to {known:,} requests at once; here up to "
        f"{most:,} decode, and more than {known:,} in {share:.0%} of the time: expected error of "
        f"decodes {error.error:.0%}, not {expected_errors(profile).decode.error:.0%}"
    ]
