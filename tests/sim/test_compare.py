"""Simulated beside measured: the "measurement" is a simulation of other hardware, so that what
differs, and why, is known."""

import json
from dataclasses import replace
from html import unescape

import numpy as np
import pandas as pd
import pytest

from tests import commands
from tests.sim.benched import LOAD, bench, queued, run_of
from twinserve.sim.cli.main import main
from twinserve.sim.report.html import write_report
from twinserve.sim.results.export import bench_result
from twinserve.sim.results.files import write_run
from twinserve.sim.twin import compare
from twinserve.sim.twin.compare_report import run_again
from twinserve.sim.twin.queues import queue_of
from twinserve.sim.twin.served import LATENCIES, Served, of_measurement, of_run
from twinserve.sim.twin.stability import Nudge, parts_beside
from twinserve.traces.readers.formats import read_bytes, read_measurement


@pytest.fixture(scope="module")
def base():
    return run_of()


@pytest.fixture
def measured(tmp_path):
    def make(result, name="bench.json", **changes):
        (tmp_path / name).write_text(bench(result, **changes))
        return of_measurement(read_measurement(tmp_path / name))

    return make


def row(rows, metric, statistic):
    return next(r for r in rows if (r.metric, r.statistic) == (metric, statistic))


def test_a_run_is_no_different_from_itself(base, measured):
    theirs, ours = [measured(base)], [of_run("run", base)]
    rows = compare.table(theirs, ours)
    assert compare.error([r for r in rows if r.metric != "itl"], 0) < 1e-9
    assert compare.parting(compare.windows(theirs, ours), 0) is None
    apart = compare.distance("ttft", theirs, ours[0])
    assert apart.measured == pytest.approx(apart.simulated, abs=0.05)


def test_slower_decodes_are_seen_in_tpot_and_not_in_lengths(base, measured):
    rows = compare.table([measured(run_of(decode=1.5))], [of_run("run", base)])
    assert row(rows, "tpot", "mean").errors()[0] == pytest.approx(1 / 1.5 - 1, abs=0.08)
    assert row(rows, "prompt", "mean").errors()[0] == row(rows, "output", "p90").errors()[0] == 0
    found = compare.distance("tpot", [measured(run_of(decode=1.5))], of_run("run", base))
    assert found.simulated - found.measured > 0.5


def test_the_place_where_a_run_parts_is_where_its_times_do(base, measured):
    content = json.loads(bench(base))
    late = [t - 700 > 1.5 for t in content["start_times"]]
    slow = [t * (3 if x else 1) for t, x in zip(content["ttfts"], late, strict=True)]
    theirs, ours = [measured(base, ttfts=slow)], [of_run("run", base)]
    window = compare.parting(compare.windows(theirs, ours, 0.5), 0)
    assert window.metric == "ttft" and 1.0 <= window.start_s <= 1.5


def test_what_repeats_differ_by_is_no_parting(base, measured):
    ours = [of_run("run", base)]
    slower = run_of(decode=1.3)
    one, other = measured(slower, "a.json"), measured(run_of(decode=0.7), "b.json")
    assert compare.parting(compare.windows([one], ours), 0) is not None
    both = compare.windows([one, other], ours)
    assert compare.parting([w for w in both if w.metric == "tpot"], 0) is None
    assert row(compare.table([one, other], ours), "tpot", "mean").spread > 0.4


def test_classes_stand_beside_each_other(base):
    def half(served):
        names = np.array(["rt", "be"] * (len(served) // 2), object)
        return Served(**{**vars(served), "service_class": names})

    side = half(of_run("run", base))
    assert {r.service_class for r in compare.table([side], [side])} == {"all", "rt", "be"}


@pytest.mark.slow
def test_a_term_is_named_only_where_its_run_came_closer(base, measured):
    found = list(run_again(base, [measured(run_of(decode=1.2))], server=False))
    best = min(found, key=lambda one: one.error)
    assert (best.term, best.change) == ("step times", "decodes 20 % longer")
    assert best.closer and best.error < best.before / 3
    worse = [one for one in found if one.change == "decodes 20 % shorter"]
    assert len(worse) == 1 and not worse[0].closer
    assert not any(one.closer for one in found if one.term == "memory")


def test_the_measured_load_can_be_simulated(base):
    workload = read_bytes(bench(base).encode(), "f")
    assert workload.prompt_tokens.tolist() == base.rows.requests["prompt_tokens"].tolist()


@pytest.fixture
def on_disk(base, tmp_path):
    write_run(tmp_path / "run", base)
    (tmp_path / "bench.json").write_text(bench(run_of(decode=1.5)))
    late = json.loads(bench(base, latencies=[1e-3] * len(base.rows.requests)))
    (tmp_path / "late.json").write_text(json.dumps(late))
    return tmp_path


def status(*words) -> int:
    return commands.status(main, words)


@pytest.mark.slow
def test_it_is_said_first_which_side_was_overloaded(on_disk, capsys):
    long = run_of(trace="fixed:100,6", rate=8.0, requests=400)  # keeps up
    write_run(on_disk / "long", long)
    for service_s, says in ((0.25, "only the measured server is overloaded"), (0.05, "")):
        (on_disk / "queued.json").write_text(queued([i / 8 for i in range(400)], service_s))
        assert status("compare", on_disk / "long", on_disk / "queued.json") == 0
        shown = capsys.readouterr().out
        assert ("overloaded" in shown) == bool(says) and says in shown
        assert not says or "the queue grows by 4" in shown.partition("| class")[0]
    slow = run_of(trace="fixed:3000,6", rate=60.0, requests=600)
    write_run(on_disk / "slow", slow)
    assert status("compare", on_disk / "slow", on_disk / "queued.json") == 0
    assert "only the simulation is overloaded" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_shows_and_writes_both_sides(on_disk, capsys):
    out = on_disk / "out"
    words = ("compare", on_disk / "run", on_disk / "bench.json", "--out", out)
    assert status(*words) == 0
    shown = capsys.readouterr().out
    said = "run does not agree with the measurement: latencies are 31.6% off on average"
    assert said in shown.partition("\n")[0]
    assert "| all | TPOT | mean | 4.77 ms | - | 3.17 ms | -33.5% |" in shown
    assert "furthest apart" in shown
    assert "One measurement" in shown and "first differs from the measurement" in shown
    document = json.loads((out / "compare.json").read_text())
    page = write_report([out], out.parent / "page.html").read_text()
    assert f"twinserve compare --out {out} {on_disk / 'run'} {on_disk / 'bench.json'}" in page
    assert "measured bench.json" in page and 'data-key="compared-ttft"' in page
    assert {row["metric"] for row in document["rows"]} >= {"ttft", "tpot", "itl", "e2el"}
    assert (out / "cdf.png").read_bytes().startswith(b"\x89PNG")
    assert status(*words) == 2 and "--overwrite" in capsys.readouterr().err
    assert f"<h3>{document['verdicts'][0]}" in unescape(page) and said in document["verdicts"][0]
    assert status(*words[:3], "--json") == 0
    found = json.loads(capsys.readouterr().out)
    (run,) = found["runs"]
    assert run["verdict"] == document["verdicts"][0] and run["error"] == pytest.approx(
        0.316, abs=1e-3
    )
    assert run["label"] == str(on_disk / "run") and found["version"] == 1
    assert [one["error"] for one in run["numbers"]] == [r["errors"][0] for r in document["rows"]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "no measured file"),
        (["bench.json"], "no run's folder"),
        (["run", "missing.json"], "missing.json: no such file or folder"),
        (["run", "late.json"], "the two sides share no metric"),
        (["run", "bench.json", "--metrics-every", "-1"], "give the seconds of a window"),
        (["run", "bench.json", "--metrics-every", "1e-9"], "more than 2,000 windows"),
    ],
)
def test_what_is_missing_is_said_in_a_line(words, says, on_disk, capsys):
    paths = [w if w.startswith("-") else str(on_disk / w) for w in words[:2]]
    assert status("compare", *paths, *words[2:]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_file_without_requests_is_compared_by_what_it_states(base, tmp_path):
    result = bench_result("vllm", run_of(decode=1.5))
    stated = {name: value for name, value in result.items() if not isinstance(value, list)}
    (tmp_path / "s.json").write_text(json.dumps(stated))
    theirs, ours = of_measurement(read_measurement(tmp_path / "s.json")), of_run("run", base)
    rows = compare.table([theirs], [ours])
    for metric, statistic in (("ttft", "mean"), ("tpot", "p50"), ("itl", "p90"), ("e2el", "p99")):
        name = {"p50": "median"}.get(statistic, statistic)
        measured = row(rows, metric, statistic).measured
        assert measured == pytest.approx(result[f"{name}_{metric}_ms"] / 1000)
    assert row(rows, "output", "mean").errors() == (0.0,)
    assert row(rows, "throughput", "output tokens/s").measured == result["output_throughput"]


def test_histograms_are_compared_by_their_buckets(base, tmp_path):
    from tests.traces.measured_files import prometheus

    (tmp_path / "p.json").write_text(prometheus())
    theirs = of_measurement(read_measurement(tmp_path / "p.json"))
    rows = compare.table([theirs], [of_run("run", base, server=True)])
    assert row(rows, "ttft", "mean").measured == pytest.approx(2.3 / 9)
    assert row(rows, "ttft", "p50").measured == pytest.approx(0.09)
    assert compare.distance("ttft", [theirs], of_run("run", base)) is not None


def by_hand(latencies_s: list[float], output: list[int], **more) -> Served:
    """A request a second."""
    n = len(output)
    latencies = {name: np.array(latencies_s) for name in LATENCIES}
    sizes = np.full(n, 10), np.array(output)
    return Served("x", np.arange(float(n)), *sizes, latencies, np.full(n, "rt"), **more)


def test_numbers_by_hand():
    throughput = "throughput", "output tokens/s"
    partly = by_hand([2.0, 2.0, 2.0, 4.0], [4, 8, -1, 12])
    whole = replace(partly, output_tokens=np.array([4, 8, 4, 12]))
    assert compare.number(partly, "output", "mean") == 8  # of those that are known
    assert compare.number(whole, *throughput) == 28 / 7
    for unknown in (partly, replace(whole, torn=True)):
        assert np.isnan(compare.number(unknown, *throughput))
    same = compare.distance("ttft", [whole], whole)
    assert same.measured == same.simulated
    late = replace(whole, latencies=whole.latencies | {"queued": whole.latencies["queued"] * 9})
    assert compare.error(compare.table([whole], [late]), 0) == 0  # a wait is no latency
    eleven = by_hand([1.0] * 11, [2] * 11)
    windows = compare.windows([eleven], [eleven], 5.0)
    assert [w.requests for w in windows if w.metric == "ttft"] == [5, 6]  # the last one is closed
    assert compare.windows([eleven], [eleven], 4.0) == []  # fewer than five
    twice = replace(eleven, latencies={name: v * 2 for name, v in eleven.latencies.items()})
    spread = row(compare.table([eleven, twice], [eleven]), "ttft", "mean").spread
    assert spread == pytest.approx(1 / 1.5)


def test_a_server_counts_from_when_the_engine_got_a_request():
    run = run_of(front_end="vllm", client_timeout=0.14)
    server, rows = of_run("run", run, server=True), run.rows.requests
    done = rows["finished"]
    assert 0 < server.failed == (~done).sum() < len(rows)
    from_engine = (rows["last_token_s"] - rows["engine_arrival_s"])[done]
    np.testing.assert_allclose(server.latencies["e2el"], from_engine)
    alone = of_run("run", run_of(trace=LOAD.replace("random_output_len=40", "random_output_len=1")))
    assert np.isnan(alone.latencies["tpot"]).all()


def test_factors_of_a_live_run_make_up_its_time(base):
    """Steps priced a fifth above the simulated ones, of which our loop is a part, and measured
    twice as long."""
    steps = base.rows.steps
    seconds = steps["end_s"] - steps["start_s"]
    live = pd.DataFrame({"predicted_s": seconds * 1.2, "measured_s": seconds * 2.4})
    loop_s = 0.1 * seconds.mean()
    found = parts_beside(base, base, live, 0, loop_s)
    assert found.engine == pytest.approx(2) and found.work == pytest.approx(1.2 / 0.9)
    assert found.work * found.engine * found.outside == pytest.approx(2.4)
    quick = parts_beside(base, base, live / 24, 0)  # requests are there, steps are not
    came, ended = (np.sort(base.rows.requests[name]) for name in ("arrival_s", "ended_s"))
    idle_s = sum(max(b - a, 0.0) for a, b in zip(ended[:-1], came[1:], strict=True))
    busy_s = ended[-1] - came[0] - idle_s
    assert idle_s > 0
    assert quick.work * quick.engine * quick.outside == pytest.approx(busy_s / seconds.sum())


def test_a_nudge_moves_a_schedule_by_more_than_what_it_did():
    assert not Nudge("longer", 0.1, 0.14, 0.14).moved and Nudge("noise", 0.0, 0.06, 0.0).moved


def test_a_queue_is_that_of_known_ends_and_failed_requests_leave_at_once(tmp_path):
    (tmp_path / "q.json").write_text(queued([i / 8 for i in range(400)], 0.1))
    found = read_measurement(tmp_path / "q.json")
    assert queue_of(found)["verdict"] == "keeps up"
    every, seldom = (np.arange(400) % n == 0 for n in (8, 16))
    assert queue_of(replace(found, e2el_s=np.where(every, np.nan, found.e2el_s))) is None
    known = replace(found, e2el_s=np.where(seldom, np.nan, found.e2el_s))
    assert queue_of(known)["verdict"] == "keeps up"
    failed = replace(found, errors=["gone" * bool(n % 2) for n in range(400)])
    late = replace(failed, e2el_s=np.where(np.arange(400) % 2, 1e3, found.e2el_s))
    assert queue_of(late) == queue_of(failed)
