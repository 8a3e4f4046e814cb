"""What tests of `twinserve route` need: its libraries, which the extra `test` brings."""

import os

import pytest

from twinserve.backends.live.route.settings import require_libraries
from twinserve.backends.live.versions import LiveEngineError


@pytest.fixture(scope="session")
def http() -> None:
    """Skips without them; fails instead where TWINSERVE_REQUIRE_ROUTE is set."""
    wanted = bool(os.environ.get("TWINSERVE_REQUIRE_ROUTE"))
    try:
        require_libraries(events=wanted)  # modules about these are skipped without a word
    except LiveEngineError as error:
        if wanted:
            pytest.fail(f"{error} (TWINSERVE_REQUIRE_ROUTE is set)")
        pytest.skip(str(error))
