"""Originals come from the folders of TWINSERVE_TRACES; without them their tests skip, or fail if
required.
"""

import os

import pytest

from twinserve.traces import catalog
from twinserve.traces.download import find_local, search_folders


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A function from a trace's name to the path of its original file."""
    nowhere = tmp_path_factory.mktemp("no-cache")

    def path_of(name):
        path = find_local(catalog.resolve(name), search_folders(), nowhere)
        if path is None:
            reason = f"{name} is in no folder of TWINSERVE_TRACES"
            if os.environ.get("TWINSERVE_REQUIRE_TRACES"):
                pytest.fail(reason)
            pytest.skip(reason)
        return path

    return path_of


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No search path, an empty cache, and a network that must not be touched."""
    monkeypatch.delenv("TWINSERVE_TRACES", raising=False)
    monkeypatch.setenv("TWINSERVE_CACHE", str(tmp_path / "cache"))

    def no_network(*args, **kwargs):
        raise OSError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    return tmp_path
