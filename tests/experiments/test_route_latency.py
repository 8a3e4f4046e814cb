"""The measurement of what the live front adds."""

from __future__ import annotations

import os

import pandas as pd
import pytest

from twinserve.experiments.route.main import added, main


def test_what_is_added_is_a_difference_of_means():
    def row(clients: int, way: str, repeat: int, ms: float) -> dict:
        return {"clients": clients, "way": way, "repeat": repeat, "token_p50_ms": ms}

    table = pd.DataFrame(
        [row(5, "direct", 0, 1.0), row(5, "followed", 0, 4.0), row(9, "direct", 0, 2.0)]
        + [row(5, "direct", 1, 3.0), row(5, "followed", 1, 6.0), row(9, "followed", 0, 2.5)]
    )
    found = added(table).set_index(["clients", "way"])
    assert found.loc[(5, "followed"), "+token_p50_ms"] == 3.0
    assert found.loc[(9, "followed"), "+token_p50_ms"] == 0.5
    assert found.loc[(5, "direct"), "token_p50_ms"] == 2.0


@pytest.mark.slow
def test_a_short_measurement(tmp_path, capsys):
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("computing time of processes is read from /proc")
    pytest.importorskip("aiohttp")
    arguments = ["--clients", "8", "--tokens", "5", "--pace", "0.02", "--seconds", "2"]
    out = tmp_path / "latency.csv"
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--repeats", "1", "--out", str(out)])
        raise SystemExit(0)
    assert not end.value.code
    table = pd.read_csv(out)
    assert table["way"].tolist() == ["direct", "followed", "passed through"]
    assert (table["failed"] == 0).all() and (table["requests"] > 20).all()
    assert (table["token_p50_ms"] > 0).all() and (table["first_p50_ms"] >= 20).all()


def test_a_measurement_of_nothing(capsys):
    pytest.importorskip("aiohttp")
    with pytest.raises(SystemExit) as end:
        main(["--tokens", "0"])
    assert end.value.code == 2 and capsys.readouterr().err.startswith("error: give numbers")
