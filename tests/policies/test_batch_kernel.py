"""What the compiled kernel says of many rows is what its plain twin says, to the last bit."""

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.native import plain_batch
from twinserve.policies.requests import RequestTable

compiled = pytest.importorskip("twinserve.native.batch", reason="kernels are not compiled here")


@pytest.mark.parametrize("seed", mostly_nightly(range(20), *range(6)))
def test_each_function_does_as_its_twin(seed):
    rng = np.random.default_rng(seed)
    table = RequestTable()
    for i in range(30):
        prompt, output = int(rng.integers(1, 20)), int(rng.integers(0, 3))
        table.submit(
            f"r{i}",
            arrival_s=rng.random(),
            prompt_tokens=prompt,
            output_tokens=output,
            computed_tokens=prompt + output - int(rng.integers(1, 9)),
            slo_ttft_s=rng.choice([np.nan, 0.5]),
            slo_tpot_s=rng.choice([np.nan, 0.05, 0.1]),
            last_token_s=rng.random() if output else np.nan,
            in_flight=int(output and rng.integers(0, 2)),
        )

    def same(name: str, *given):
        ours, theirs = (getattr(module, name)(*given) for module in (compiled, plain_batch))
        np.testing.assert_equal(ours, theirs)
        return ours

    for _ in range(20):
        rows = rng.permutation(30)[: rng.integers(0, 30)]
        if rng.random() < 0.3:
            rows = rows[::-1]  # a view with a stride of its own
        same("due", table, rows)
        same("residual", table, rows, rng.random(), rng.choice([0.0, 0.1]))
        same("split", table, rows, rng.integers(0, 3, len(rows)))
        prefill, new, context = same("next_tokens", table, rows, int(rng.integers(0, 5)))
        same("growth", rng.integers(0, 30, len(rows)), int(rng.integers(1, 40)), 8)
        swapped = rng.integers(0, 3, len(rows)) * 1000
        for step in (1, 2, -1):
            same("totals", *(column[::step] for column in (prefill, new, context, swapped)))
        cut = int(rng.integers(0, len(rows) + 1))
        for limit in (0, 3, int(new.sum())):
            same("within", new[cut:], limit, new[:cut])


def test_columns_that_do_not_fit_are_an_error():
    one, two = np.ones(1, np.int64), np.ones(2, np.int64)
    with pytest.raises(ValueError):
        compiled.totals(one > 0, two, two, two)
    with pytest.raises(TypeError):
        compiled.totals(two, two, two, two)
    with pytest.raises(IndexError):
        compiled.due(RequestTable(), np.array([3]))
