"""How many examples property tests draw.

A test says how many it draws at full size. The profile, of TWINSERVE_EXAMPLES, scales all of these:

fast     a seventh: where nothing is said, and in .ci/run; tests/faults shows what that many find
full     as written
nightly  ten times as many, which .ci/nightly draws, other ones each time
a number that many times as many

Where CI is set, Hypothesis draws the same examples each time.
"""

import contextlib
import os

from hypothesis import settings

SCALES = {"fast": 0.15, "full": 1.0, "nightly": 10.0}
AS_WRITTEN = 100  # examples of a profile that scales by one: Hypothesis's own default


def load_profile() -> None:
    """Raises ValueError at a profile that is not there."""
    name = os.environ.get("TWINSERVE_EXAMPLES", "fast")
    try:
        scale = SCALES[name] if name in SCALES else float(name)
        count = round(AS_WRITTEN * scale)
    except (ValueError, OverflowError):
        known = ", ".join(SCALES)
        raise ValueError(f"TWINSERVE_EXAMPLES={name}: should be {known} or a number") from None
    settings.register_profile(name, settings.default, max_examples=max(1, count), deadline=None)
    settings.load_profile(name)
    _draw_no_constants_of_the_sources()


def _draw_no_constants_of_the_sources() -> None:
    """Hypothesis reads the sources of all modules for numbers and strings to draw. That takes each
    worker seconds, and examples then depend on what other tests have imported."""
    with contextlib.suppress(ImportError, AttributeError):  # undocumented: it may move
        from hypothesis.internal.conjecture import providers

        none = providers.Constants()
        providers._get_local_constants = lambda: none


def examples(count: int = AS_WRITTEN, **more) -> settings:
    """Settings of a property test: `count` examples under the profile full, two at least under
    any. more: other settings of Hypothesis."""
    scale = settings.default.max_examples / AS_WRITTEN
    return settings(max_examples=max(2, round(count * scale)), **more)
