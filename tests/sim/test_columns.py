"""The compiled book-keeping of a step changes a table as its plain twin does, to the last bit."""

import copy

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.native import plain
from twinserve.policies.requests import RequestTable

compiled = pytest.importorskip("twinserve.native.columns", reason="kernels are not compiled here")


def table_of(rng: np.random.Generator, n: int) -> RequestTable:
    table = RequestTable()
    for i in range(n):
        prompt, output = int(rng.integers(1, 20)), int(rng.integers(0, 3))
        table.submit(
            f"r{i}",
            arrival_s=rng.random(),
            prompt_tokens=prompt,
            output_tokens=output,
            computed_tokens=prompt + output - int(rng.integers(0, 3)),
            in_flight=int(rng.integers(0, 2)),
            slo_tpot_s=rng.choice([np.nan, 0.05, 0.1]),
            last_token_s=rng.random() if output else np.nan,
            service_class=int(rng.random() < 0.3),
            state=int(rng.random() < 0.8),
        )
    return table


@pytest.mark.parametrize("seed", mostly_nightly(range(20), *range(2)))
def test_each_function_does_as_its_twin(seed):
    rng = np.random.default_rng(seed)
    ours = table_of(rng, 30)
    theirs = copy.deepcopy(ours)
    theirs._publish()  # its columns are views of its own data

    def same(name: str, *given):
        """Both answer alike, and leave the tables alike; given: behind the table."""
        one = getattr(compiled, name)(ours, *given)
        other = getattr(plain, name)(theirs, *given)
        np.testing.assert_equal(one, other)
        for column in ours._data:
            np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
        return one

    for _ in range(30):
        rows = rng.permutation(30)[: rng.integers(1, 30)]
        if rng.random() < 0.3:
            rows = rows[::-1]  # a view with a stride of its own
        tokens = rng.integers(1, 3, len(rows))
        some, computed, wanted = same("lacking", rows)
        same("decoding", rows, tokens)
        same("decoding", some, wanted)
        same("decoding", rows, tokens, True)
        same("decoding", some, np.ones_like(wanted), True)
        emitting = same("emitting", rows, tokens)
        emitted = rows[emitting]
        same("leaving", rows, emitting, ours.output_tokens + rng.integers(1, 5, 30))
        same("pooled", rows, tokens, emitting, rng.permutation(rows)[:1].tolist())
        same("in_state", rows, int(rng.integers(0, 2)))
        same("best_effort", rows)
        same("advance", rows, tokens, int(rng.integers(1, 4)))
        finished = rng.permutation(emitted)[: rng.integers(0, 3)].tolist()
        kept = same("begin", rows, tokens, emitted, finished, rng.random())
        same("unshow", emitted, kept)
        ends = np.cumsum(rng.choice([0.04, 0.05, 0.06, 0.2], rng.integers(1, 9)))
        gaps = same("book", emitted, ends) if len(emitted) else np.zeros(0)
        for of in (gaps, gaps[:1].repeat(len(gaps))):
            classes = ours.service_class
            one, other = (each.split_gaps(emitted, of, classes) for each in (compiled, plain))
            np.testing.assert_equal(one, other)


def test_rows_that_the_table_does_not_have_are_an_error():
    table = table_of(np.random.default_rng(1), 3)
    for row in (3, -1):
        with pytest.raises(IndexError):
            compiled.emitting(table, np.array([row]), np.array([1]))
    with pytest.raises(ValueError):
        compiled.emitting(table, np.array([1]), np.array([1, 1]))
    with pytest.raises(TypeError):
        compiled.emitting(table, np.array([1.0]), np.array([1]))


def test_columns_are_published_as_by_the_twin():
    ours, theirs = RequestTable(), RequestTable()
    for size in (0, 1, 16):
        compiled.publish(ours, ours._data, size)
        plain.publish(theirs, theirs._data, size)
        for name, column in ours._data.items():
            shown, other = getattr(ours, name), getattr(theirs, name)
            assert shown.base is column and (shown.dtype, len(shown)) == (other.dtype, size)
            assert shown.flags.writeable and shown.flags.c_contiguous
            np.testing.assert_array_equal(shown, other)
    with pytest.raises(ValueError, match="17 places"):
        compiled.publish(ours, ours._data, 17)
