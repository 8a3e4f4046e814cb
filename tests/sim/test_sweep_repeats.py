"""How a sweep repeats its combinations: copies have no interval, windows and blocks of time do,
and differences to a baseline are of the same requests."""

import json

import numpy as np
import pandas as pd
import pytest

from tests.commands import status
from tests.sim.planned import write_trace
from twinserve.sim.cli.main import main
from twinserve.sim.sweep import draw
from twinserve.sim.sweep.executors import local
from twinserve.sim.sweep.statistics import half_widths

COMPARED = "-p vllm -p sarathi --rate-scale 3 --profile llama-3.1-8b@l40s --baseline policy=vllm"
TTFT = "classes.rt.mean_ttft_ms"


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr("twinserve.sim.sweep.executors.processes", local)
    monkeypatch.setattr(draw, "write_plots", lambda *_: None)


def sweep(out, *words: str) -> int:
    trace = write_trace(out.parent / "t.csv", count=90)
    return status(main, ["sweep", "-t", trace, *words, "--quiet", "--out", str(out)])


@pytest.mark.slow
@pytest.mark.parametrize("pool", [[], ["--pool", "4"]])
def test_copies_of_recorded_requests_have_no_interval(pool, tmp_path, capsys):
    """With a pool, batch work alone varies: that is not how sure the numbers are."""
    assert sweep(tmp_path / "s", *COMPARED.split(), *pool, "--seeds", "2") == 0
    said = capsys.readouterr().out
    assert "±" not in said and "--repeat windows=5" in said and "requests are the same" in said
    table = pd.read_csv(tmp_path / "s" / "table.csv")
    assert table.same_requests.all() and table[f"{TTFT}_ci"].isna().all()
    assert pd.read_csv(tmp_path / "s" / "differences.csv").ci.isna().all()


@pytest.mark.slow
def test_windows_are_other_requests_and_differences_are_of_the_same(tmp_path, capsys):
    assert sweep(tmp_path / "s", *COMPARED.split(), "--repeat", "windows=3") == 0
    assert "±" in capsys.readouterr().out
    runs = pd.read_parquet(tmp_path / "s" / "runs.parquet")
    assert runs.completed.groupby(runs.policy).sum().tolist() == [90, 90]  # none twice, none lost
    assert runs.requests_sha256.nunique() == runs.window.nunique() == 3
    found = pd.read_csv(tmp_path / "s" / "differences.csv").set_index("number").loc[TTFT]
    vllm, other = (runs[runs.policy == p][TTFT].to_numpy() for p in ("vllm", "sarathi"))
    gains = other - vllm
    half = 4.30265 * gains.std(ddof=1) / np.sqrt(3)  # Student's, two degrees of freedom
    assert (found.difference, found.ci) == pytest.approx((gains.mean(), half), rel=1e-4)
    significant = abs(gains.mean()) > half
    assert found.verdict == ("significant" if significant else "not significant")
    about = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert about["repeat"] == "windows=3" and about["given"]["window"][0] == 0


@pytest.mark.slow
def test_blocks_of_one_run_give_it_an_interval(tmp_path, capsys):
    alone = COMPARED.partition(" --baseline")[0].split()
    assert sweep(tmp_path / "s", *alone, "--repeat", "blocks=9") == 0
    assert "±" in capsys.readouterr().out
    table = pd.read_csv(tmp_path / "s" / "table.csv")
    assert (table.seeds == 1).all() and (table[f"{TTFT}_ci"] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("run_length", [1, 50])
def test_an_interval_by_blocks_is_as_wide_as_means_vary(run_length):
    """Of latencies that stay the same for a while, too: they say less than as many that do not."""
    rng, n = np.random.default_rng(1), 2000

    def latencies() -> np.ndarray:
        return rng.exponential(1.0, n // run_length).repeat(run_length)

    def rows() -> pd.DataFrame:
        at, ttft = np.arange(n, dtype=float), latencies()
        return pd.DataFrame(
            {
                **{"arrival_s": at, "first_token_s": at + ttft, "last_token_s": at + ttft},
                **{"first_scheduled_s": at, "finished": True, "outcome": "completed"},
                **{"service_class": "rt", "prompt_tokens": 9, "output_tokens": 1},
                **{"computed_tokens": 9, "late_tokens": 0, "slo_ttft_s": 2.0, "slo_tpot_s": np.nan},
            }
        )

    means = [latencies().mean() * 1e3 for _ in range(300)]
    halves = [half_widths(rows(), 20)[TTFT] for _ in range(8)]
    assert np.mean(halves) == pytest.approx(1.96 * np.std(means), rel=0.15)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--repeat windows=1", "write windows=5"),
        ("--repeat blocks=5 --seeds 2", "drop one"),
        ("--rate 4 --repeat windows=5", "use --seeds"),
        ("--grid pool=0,4 --baseline poll=0", "did you mean 'pool'"),
        ("--grid pool=0,4 --baseline pool=5", "there are 0, 4"),
        ("--grid pool=0,4 --baseline pool=0 --repeat blocks=5", "; use --repeat windows=5"),
    ],
)
def test_what_cannot_be_repeated_is_one_line(words, said, tmp_path, capsys):
    status(main, ["sweep", "-t", write_trace(tmp_path / "t.csv"), *words.split()])
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
