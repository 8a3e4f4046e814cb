"""Terms fitted to measurements of a server. The "server" is a simulation of other hardware, so that
what should come out is known: the latencies of loads that were not measured."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.commands import status
from tests.sim.benched import bench as vllm_bench_of
from tests.sim.benched import queued
from twinserve.profiles.front_end import load_front_end
from twinserve.profiles.profile import load_profile
from twinserve.sim.cli.main import BAD_INPUT, main
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import run_policy
from twinserve.sim.twin import serving_fit
from twinserve.sim.twin.queues import queue_of, steady_stretch
from twinserve.sim.twin.served import Served, of_run
from twinserve.sim.twin.server_fit import queue_notices
from twinserve.sim.twin.serving_fit import (
    AS_IT_IS,
    Fitted,
    Load,
    Terms,
    TooFewRequestsError,
    blocks,
    fit,
)
from twinserve.traces.readers.formats import read_measurement

PROFILE = "llama-3.1-8b@h100"
LENGTHS = "random_input_len=800,random_output_len=100,random_range_ratio=0.6"
SLOWER = Terms(decode=1.5, prefill=0.7, host_step_s=1e-3)


def load(rate: float, requests: int = 60) -> str:
    return f"vllm:request_rate={rate},num_prompts={requests},{LENGTHS}"


def served_by(terms: Terms, trace: str, seed: int = 0):
    """A run on hardware with these terms."""
    settings = {"profile": PROFILE, "slo": "none", "host_time": "none", "seed": seed}
    inputs = resolve(SimulationConfig(trace=trace, **settings))
    profile = terms.on(inputs.hardware.profile)
    model = profile.model(inputs.hardware.limits.max_num_seqs)
    hardware = replace(inputs.hardware, profile=profile, model=model)
    return run_policy(replace(inputs, hardware=hardware), inputs.policies[0])


def means(result) -> np.ndarray:
    served = of_run("run", result)
    return np.array([np.nanmean(served.latencies[name]) for name in ("ttft", "tpot", "e2el")])


def command(capsys, *words: str) -> tuple[int, str]:
    return status(main, ["calibrate", *words]), "".join(capsys.readouterr())


@pytest.mark.nightly
@pytest.mark.parametrize("terms", [SLOWER, Terms(decode=0.6, host_request_s=1e-4)])
def test_a_profile_fitted_to_two_loads_predicts_a_third(terms, tmp_path, capsys):
    files = []
    for rate in (3, 20):
        files.append(tmp_path / f"at{rate}.json")
        files[-1].write_text(vllm_bench_of(served_by(terms, load(rate), seed=rate)))
    out = tmp_path / "mine.json"
    words = ["--from-serving", *map(str, files), "--profile", PROFILE, "--out", str(out)]
    code, said = command(capsys, *words)
    assert code == 0, said
    found, truth = load_profile(out), means(served_by(terms, load(10), seed=99))
    front = load_front_end(tmp_path / "mine.front_end.json") if "front_end" in said else None
    settings = {"profile": str(out), "slo": "none", "seed": 99}
    inputs = resolve(SimulationConfig(trace=load(10), **settings))
    predicted = means(run_policy(inputs, inputs.policies[0]))
    predicted += np.array([1, 0, 1]) * (front.request_s if front else 0.0)
    assert predicted == pytest.approx(truth, rel=0.1)
    off = np.abs(means(served_by(AS_IT_IS, load(10), seed=99)) / truth - 1)
    assert (off > 0.2).any()  # it was worth it
    assert found.source == "measured" and found.fit_error < 0.1
    assert "requests that the fit had not seen" in said and "up to" in said


@pytest.mark.nightly
def test_a_profile_that_is_right_is_left_as_it_is(tmp_path, capsys):
    file, out = tmp_path / "bench.json", tmp_path / "mine.json"
    file.write_text(vllm_bench_of(served_by(AS_IT_IS, load(8))))
    words = ["--from-serving", str(file), "--profile", PROFILE, "--out", str(out)]
    code, said = command(capsys, *words)
    assert code == BAD_INPUT and "do not improve" in said and not out.exists()


def test_what_was_measured_while_a_queue_grew_is_refused_or_left_out(tmp_path, capsys):
    file, out = tmp_path / "bench.json", tmp_path / "mine.json"
    words = ["--from-serving", str(file), "--profile", PROFILE, "--out", str(out)]
    file.write_text(queued([i / 8 for i in range(200)], service_s=0.2))
    code, said = command(capsys, *words)
    assert code == BAD_INPUT and said.startswith("error: --from-serving") and not out.exists()
    assert "saturated: 8.04 requests arrive a second, the queue grows by 3.03" in said
    assert "measure at a lower rate, or add --saturated" in said
    # 30 s with one request in two seconds' service, then a load that is too much
    early = [i / 3 for i in range(90)]
    file.write_text(queued([*early, *(30 + i / 15 for i in range(600))], service_s=0.15))
    found = read_measurement(file)
    assert queue_of(found)["verdict"] == "saturated"
    assert 20 < steady_stretch(found) <= 31
    assert queue_of(found, steady_stretch(found))["verdict"] == "keeps up"


def test_a_queue_that_cannot_be_judged_is_fitted_and_said(tmp_path):
    """Sixteen requests a second where one is served, for five seconds."""
    file = tmp_path / "bench.json"
    file.write_text(queued([i / 16 for i in range(80)], service_s=1.0))
    (said,) = queue_notices(read_measurement(file), np.inf)
    assert said.startswith("unclear: requests arrive for") and "If the queue grew" in said
    file.write_text(queued([i / 3 for i in range(300)], service_s=0.15))
    assert queue_notices(read_measurement(file), np.inf) == []


def served(ttft: np.ndarray, tpot: np.ndarray) -> Served:
    n = len(ttft)
    return Served(
        "it",
        np.arange(n) * 0.1,
        np.where(np.arange(n) % 2, 100, 900),
        np.full(n, 11),
        {"ttft": ttft, "tpot": tpot, "e2el": ttft + 10 * tpot, "queued": np.full(n, np.nan)},
        np.full(n, "rt", object),
    )


def fake(scale: float = 1.0, n: int = 80) -> Load:
    """A server whose latencies are sums of terms, without any queue; `scale` on all of them."""
    rng = np.random.default_rng(5)
    noise = 1 + 0.01 * rng.standard_normal(n)

    def simulate(terms: Terms) -> Served:
        prompt = np.where(np.arange(n) % 2, 0.01, 0.09) * terms.prefill
        ttft = prompt + terms.request_s + terms.host_step_s
        return served(ttft * scale, (0.02 * terms.decode + terms.host_step_s) * np.full(n, scale))

    found = simulate(Terms(decode=1.4, prefill=0.8, request_s=0.03))
    latencies = {name: values * noise for name, values in found.latencies.items()}
    return Load(replace(found, latencies=latencies), simulate)


def test_terms_that_can_be_told_apart_are_found():
    found = fit([fake()], ("decode", "prefill", "request_s"))
    assert found.terms.decode == pytest.approx(1.4, rel=0.01)
    assert found.terms.prefill == pytest.approx(0.8, rel=0.03)
    assert found.terms.request_s == pytest.approx(0.03, rel=0.03)
    assert found.worth and found.after < 0.01 < found.before
    for name, (low, high) in found.told.items():
        assert low <= getattr(found.terms, name) <= high


def test_a_term_that_is_not_needed_stays_as_it_is():
    found = fit([fake()], ("decode", "prefill", "request_s", "host_request_s"))
    assert "host_request_s" not in found.told and found.terms.host_request_s == 0.0


def test_nothing_is_found_where_nothing_differs():
    same = fake()
    found = fit([replace(same, measured=same.simulate(AS_IT_IS))], ("decode", "prefill"))
    assert found.before == 0.0 and not found.worth


def test_blocks_are_means_of_parts_of_the_requests_in_order():
    ttft = np.arange(80.0) + 1
    found = blocks(served(ttft, ttft), served(ttft, ttft))
    assert found[:, 0] == pytest.approx([11, 31, 51, 71])  # short prompts are the odd ones
    assert found[:, 1] == pytest.approx([10, 30, 50, 70])


def test_too_few_requests_are_told():
    with pytest.raises(TooFewRequestsError):
        fit([fake(n=7)], ("decode",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile", PROFILE], "--out is needed with --from-serving"),
        (["--out", "{tmp}/m.json"], "--profile is needed with --from-serving"),
        (["--out", "{tmp}/m.json", "--profile", PROFILE, "--graphs"], "--graphs: --from-serving"),
        (["--out", "{tmp}/m.json", "--profile", "nobody@h100"], "nobody"),
    ],
)
def test_wrong_options_are_one_line(words, said, tmp_path, capsys):
    file = tmp_path / "bench.json"
    file.write_text(vllm_bench_of(served_by(AS_IT_IS, load(8, 20))))
    given = [word.format(tmp=tmp_path) for word in words]
    code, line = command(capsys, "--from-serving", str(file), *given)
    assert code == BAD_INPUT and said in line and line.count("\n") == 1


def test_a_run_that_has_the_servers_settings_brings_no_requests(tmp_path, capsys, monkeypatch):
    """Its load, pool and limits were of another trace: what is simulated is what was measured."""
    file, config = tmp_path / "bench.json", tmp_path / "run.json"
    result = served_by(AS_IT_IS, load(8, 20))
    file.write_text(vllm_bench_of(result))
    settings = {"profile": PROFILE, "trace": "sharegpt", "load": 0.9, "pool": 4, "requests": 5}
    settings |= {"duration": 9.0, "client_timeout": 0.1, "cap_length": 300, "max_num_seqs": 3}
    config.write_text(json.dumps({"version": 4, "config": settings}))
    simulated: list[Served] = []

    def fitted(loads, names, report):
        simulated.extend(one.simulate(AS_IT_IS) for one in loads)
        return Fitted(AS_IT_IS, {}, 0.0, 0.0, 1)

    monkeypatch.setattr(serving_fit, "fit", fitted)
    words = ["--config", str(config), "--out", str(tmp_path / "m.json")]
    command(capsys, "--from-serving", str(file), *words)
    (found,) = simulated
    sent = result.rows.requests.sort_values("arrival_s")
    assert found.arrival_s == pytest.approx(sent.arrival_s - sent.arrival_s.min(), abs=1e-6)
    assert found.prompt_tokens.tolist() == sent.prompt_tokens.tolist()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("details", "--save-detailed"),
        (0.0, "20 of 20 requests have their first token after 0 s (first request 1: 'ttfts' is 0"),
        (99.0, "20 of 20 requests have their first token after their last one (first request 1: "),
    ],
)
def test_a_result_without_times_is_one_line(change, says, tmp_path, capsys):
    file = tmp_path / "bench.json"
    content = json.loads(vllm_bench_of(served_by(AS_IT_IS, load(8, 20))))
    if change == "details":
        for name in ("input_lens", "output_lens", "ttfts", "itls", "latencies", "errors"):
            del content[name]
    else:
        content["ttfts"] = [change] * 20
    file.write_text(json.dumps(content))
    words = ["--from-serving", str(file), "--profile", PROFILE, "--out", str(tmp_path / "m.json")]
    code, line = command(capsys, *words)
    assert code == BAD_INPUT and says in line and line.count("\n") == 1
    assert "no times to first token" in line and "--save-detailed" in line
