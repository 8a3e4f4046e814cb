"""The collector is left as it was found, whatever happens meanwhile."""

import gc

import pytest
from twinserve.sim.garbage import collected_seldom


def test_it_is_left_as_it_was():
    before = gc.get_threshold(), gc.isenabled()
    with pytest.raises(ZeroDivisionError), collected_seldom():
        assert gc.get_threshold()[0] > 10_000 and gc.get_freeze_count() > 0
        with collected_seldom():
            pass
        assert gc.get_freeze_count() > 0  # the inner one thaws nothing of the outer one's
        raise ZeroDivisionError
    assert (gc.get_threshold(), gc.isenabled()) == before and gc.get_freeze_count() == 0
