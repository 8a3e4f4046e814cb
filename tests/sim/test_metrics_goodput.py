"""What `--goodput` takes, and what it says to what it does not take."""

from __future__ import annotations

import pytest

from twinserve.sim.results.metrics import GoodputError, parse_goodput


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["ttft:500", "tpot:50"], {"ttft": 500.0, "tpot": 50.0}),
        (["ttft:500 e2el:2.5e3"], {"ttft": 500.0, "e2el": 2500.0}),
        (["tpot:50,ttft:0"], {"tpot": 50.0, "ttft": 0.0}),
    ],
)
def test_pairs_are_read(given, read):
    assert parse_goodput(given) == read


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "no objective; write NAME:MILLISECONDS"),
        (" , ", "no objective; write NAME:MILLISECONDS"),
        ("tttf:500", "did you mean ttft?"),
        ("TPOT:500", "did you mean tpot?"),
        ("itl:500", "did you mean tpot?"),
        ("e2e:500", "did you mean e2el?"),
        ("xyzzy:500", "there are ttft, tpot, e2el"),
        ("ttft=500", "write NAME:MILLISECONDS"),
        ("ttft:", "no number"),
        ("ttft:0.5s", "no number"),
        ("ttft:-1", "0 or more"),
        ("ttft:nan", "finite"),
        ("ttft:1 ttft:2", "given twice"),
    ],
)
def test_an_error_is_one_line_that_helps(given, says):
    with pytest.raises(GoodputError) as raised:
        parse_goodput([given])
    message = str(raised.value)
    assert says in message and message.startswith("--goodput") and "\n" not in message
