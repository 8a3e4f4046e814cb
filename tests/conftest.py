"""What all tests share: how many examples property tests draw, and less work beside the tests."""

import gc
import os

# Before numpy is imported: threads of BLAS wait for each other where all cores are busy with tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from tests.examples import load_profile

load_profile()


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: each full collection would look at all of them again. And
    Hypothesis times each collection, of which there are many."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
