"""What a policy says when it cannot serve a run."""

from twinserve.errors import TwinserveError


class PolicyError(TwinserveError, ValueError):
    """Limits, options or requests that a policy cannot work with: one line that says what to
    change."""
