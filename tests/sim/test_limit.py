"""`twinserve limit`: the largest load that is kept, as a run of every load finds it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from tests.commands import status
from tests.parameters import mostly_nightly
from tests.sim.planned import GPU, MODEL, write_trace
from twinserve.sim.cli.main import BAD_INPUT, main
from twinserve.sim.plan import limit as limits
from twinserve.sim.plan.limit import Limit, Limits, Load, Ran, find_limits, load_at, place_of
from twinserve.sim.plan.limit_show import broken
from twinserve.sim.plan.trial import Kept, Trial
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.sweep.executors import InThisProcess

PROFILE = f"{MODEL}@{GPU}"
SLO = "ttft p90 < 500 ms, tpot p90 < 40 ms"


def config(trace: str, **further) -> SimulationConfig:
    return SimulationConfig(**{"trace": trace, "slo": SLO, "profile": PROFILE, **further})


def found(*configs: SimulationConfig, draws: int = 1, closed: bool = False) -> Limits:
    named = [({"n": i}, one) for i, one in enumerate(configs)]
    return find_limits(named, draws, closed, InThisProcess(), lambda done, left: None)


def every_place(one: Limit, made: Limits, places: range) -> dict[int, bool]:
    """Which loads of the grid are kept, each run by itself."""
    kept = {}
    for place in places:
        search = limits._point(one.setting, made.objectives, made.closed, {}, place)
        loads = next(search)
        with pytest.raises(StopIteration) as end:
            search.send([limits.run_load(load) for load in loads])
        kept[place] = end.value.value.kept
    return kept


# What is asked, of a server of one GPU: its seats, its budget, a policy, two kinds of objectives.
TINY = [
    ({}, False),
    ({"max_num_seqs": 4}, False),
    ({"max_num_seqs": 16, "max_num_batched_tokens": 512}, False),
    ({"num_blocks": 200}, False),
    ({"policy": ("sarathi",)}, False),
    ({"slo": "e2el p80 < 2 s"}, False),
    ({"slo": "ttft p50 < 400 ms"}, False),
    ({"replicas": 2, "max_num_seqs": 8}, False),
    ({"slo": "e2el p50 < 600 ms"}, True),
    ({"slo": "e2el p90 < 1 s", "max_num_seqs": 6}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("further", "closed"), mostly_nightly(TINY, TINY[1], TINY[8]))
def test_a_run_of_every_load_finds_the_same_limit(tmp_path, further, closed):
    count = 80 if closed else 60
    trace = write_trace(tmp_path / "t.csv", count=count)
    made = found(config(trace, **further), closed=closed)
    (one,) = made.limits
    assert one.load is not None and not one.open
    place = place_of(one.load, closed)
    if closed:
        kept = every_place(one, made, range(1, count // limits.A_CLIENT + 1))
    else:
        kept = every_place(one, made, range(place - 60, place + 61, 20))
        kept |= every_place(one, made, range(place - 2, place + 4))
    assert max(k for k, ok in kept.items() if ok) == place
    assert all(ok for k, ok in kept.items() if k <= place)
    assert one.breaks is not None and broken(one.breaks)
    assert one.breaks.load == load_at(place + 1, closed)
    ends = (one.low or 0.0, one.load, one.high)
    assert list(ends) == sorted(ends)


# -- the command -----------------------------------------------------------------------------------
SERVER = ("--from-vllm", "vllm serve Qwen/Qwen3-8B --max-num-seqs 8 --enable-lora", "--gpu", "h100")
REQUESTS = ("-t", "sharegpt", "--requests", "24", "--workers", "1", "-q")


def said(capsys, *words: str) -> tuple[int, str, str]:
    return status(main, ["limit", *words]), *capsys.readouterr()


@pytest.mark.parametrize(("keeps", "grows", "unclear"), [(9.0, 20.0, 30.0), (9.0, 5.0, 2.0)])
def test_a_load_whose_queue_grows_is_none_that_is_kept(
    tmp_path, monkeypatch, keeps, grows, unclear
):
    """Of runs by a formula: rates up to which objectives are kept, and queues do not grow and are
    clear."""

    def by_formula(load: Load) -> Ran:
        ok = load.rate <= keeps
        kept = Kept(100, 100 * ok, ((10, 10 * ok),) * 10, 0.1)
        said = (
            "saturated" if load.rate > grows else "unclear" if load.rate > unclear else "keeps up"
        )
        return Ran(Trial(ok, False, (), (kept,)), (said, ""), {"x": load.rate})

    monkeypatch.setattr(limits, "run_load", by_formula)
    trace = write_trace(tmp_path / "t.csv", count=60)
    (one,) = found(config(trace, slo="ttft p90 < 1 s")).limits
    for load, rate in ((one.load, min(keeps, grows)), (one.low, min(keeps, grows, unclear))):
        place = place_of(load, False)
        assert load_at(place, False) == load <= rate < load_at(place + 1, False)
    assert one.high == one.load and one.point.numbers == {"x": one.load}


def test_numbers_of_a_load_are_those_of_its_judged_time():
    requests = SimpleNamespace(
        arrival=np.arange(4.0), finished=np.array([True, True, True, False]),
        service_class=np.full(4, "rt"), last=np.array([0.9, 1.5, 9.0, np.nan]),
        output=np.array([400, 6, 1, 7]), ttft=np.array([9.0, 1.0, 3.0, 9.0]),
        tpot=np.array([9.0, 0.5, 0.0, np.nan]), e2el=np.array([9.0, 2.0, 4.0, np.nan]),
    )  # fmt: skip
    numbers = limits._numbers(requests, 1.0, 3.0)
    assert (numbers["output_tokens_per_s"], numbers["requests_per_s"]) == (6 / 2, 1 / 2)
    medians = [numbers[f"median_{name}_s"] for name in ("ttft", "tpot", "e2el")]
    assert medians == [2.0, 0.5, 3.0] and numbers["tokens_per_s_user"] == 2.0


@pytest.mark.slow
def test_two_gpus_under_the_words_of_one_server(tmp_path, capsys):
    words = (*SERVER, *REQUESTS, "--grid", "gpu=h100,l40s", "--slo", "ttft p90 < 2 s")
    code, out, err = said(capsys, *words, "--out", str(tmp_path / "found"))
    assert code == 0, err
    assert "gpu=h100: " in out and "at " in out and "--enable-lora is not simulated" in out
    text = json.loads((tmp_path / "found" / "limit.json").read_text())
    h100, l40s = text["limits"]
    assert h100["config"]["profile"] == "qwen3-8b@h100"
    assert l40s["config"]["profile"] == "qwen3-8b@l40s"
    assert h100["config"]["max_num_seqs"] == l40s["config"]["max_num_seqs"] == 8
    assert h100["load"] > 1.5 * l40s["load"] > 0
    assert h100["breaks"]["by"] and h100["breaks"]["load"] > h100["load"]
    loads = [point["load"] for point in h100["points"]]
    assert loads == sorted(loads) and min(loads) < 0.2 * h100["load"]
    ahead = [(p["tokens_per_s_user"], p["tokens_per_s_gpu"]) for p in text["front"]]
    assert sorted(ahead) == ahead and sorted(ahead, key=lambda p: -p[1]) == ahead
    assert {p.name for p in (tmp_path / "found").iterdir()} == {
        "limit.json", "ttft.png", "front.png"
    }  # fmt: skip


@pytest.mark.slow
def test_seeds_are_judged_together_and_the_same_command_says_the_same(capsys):
    words = (*SERVER, *REQUESTS, "--slo", "e2el p80 < 4 s", "--concurrency", "--json")
    one, again, two = (said(capsys, *words, "--seeds", n)[1] for n in "112")
    assert one == again
    assert json.loads(two)["runs"] >= 1.5 * json.loads(one)["runs"]


def test_an_objective_that_no_load_keeps(capsys):
    code, out, _ = said(capsys, *SERVER, *REQUESTS, "--slo", "tpot p90 < 1 ms")
    assert code == 0 and "not even 0.000997 requests/s" in out and "kept by 0.0%" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--slo", "ttft < 1 s"), "write a percentile"),
        ((), "give --slo"),
        (("--slo", "ttft p90 < 1 s", "--load", "0.5"), "--load sets the rate"),
        (("--slo", "ttft p90 < 1 s", "--pool", "8"), "--pool"),
        (("--slo", "ttft p90 < 1 s", "--seeds", "0"), "--seeds 0"),
        (("--slo", "ttft p90 < 1 s", "--grid", "slo=none,ttft"), "--grid slo"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(capsys, words, line):
    code, _, err = said(capsys, *SERVER, *REQUESTS, *words)
    assert code == BAD_INPUT and line in err and len(err.strip().splitlines()) == 1
