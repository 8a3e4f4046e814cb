"""The request table's declaration of its columns."""

from types import GenericAlias
from typing import Annotated, Any

import numpy as np
import pytest

from twinserve.policies.requests import _declared


@pytest.mark.parametrize(
    "array",
    [
        GenericAlias(np.ndarray, (tuple[Any, ...], np.dtype[np.int64])),  # NDArray up to NumPy 2.4
        GenericAlias(np.ndarray, (np.int64,)),  # from 2.5 on: an alias with a parameter of its own
    ],
)
def test_a_column_has_its_type_however_numpy_spells_arrays(array):
    assert _declared(Annotated[array, -1]) == (np.int64, -1)
