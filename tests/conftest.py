"""What all tests share: how many examples property tests draw, and less work beside the tests."""

import gc
import os

# Before numpy is imported: threads of BLAS wait for each other where all cores are busy with tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from tests.examples import load_profile

load_profile()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: each full collection would look at all of them again. And
    Hypothesis times each collection, of which there are many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def _few_to_look_at():
    """Sweeps and studies collect between runs. What earlier modules left would be looked at each
    time: a second, at the end of the suite."""
    gc.collect()
    gc.freeze()
