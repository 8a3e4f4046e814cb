"""`twinserve plan`: brute force agrees, nothing cheaper is passed over, bad questions end in one
line."""

import json
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import refused, status
from tests.examples import examples
from tests.sim.planned import MODEL, settings, write_trace
from twinserve.profiles.profile import derive_profile, save_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli.main import main
from twinserve.sim.plan.candidates import candidates
from twinserve.sim.plan.document import described
from twinserve.sim.plan.planner import Plan, Question, make_plan
from twinserve.sim.plan.prices import read_prices
from twinserve.sim.plan.show import foot_lines, head_lines, memory_of, warnings
from twinserve.sim.plan.start import serve_arguments
from twinserve.sim.plan.trial import TrialSpec, run_trial
from twinserve.sim.report.html import write_report
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.sweep.executors import InThisProcess
from twinserve.traces.workload import WorkloadError

PRICES = "gpu,usd_per_hour\na100-40g,1\nl40s,0.7\nh100,2.5\n"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "t.csv", count=80, rate=40.0)


def plan(trace: str, slo: str, prices: str = PRICES, **further) -> Plan:
    asked = {"gpus": ("a100-40g",), "tp": (1,), "most_gpus": 6, **further}
    question = Question(**{"model": MODEL, "traces": (trace,), "slo": slo, **asked})
    return make_plan(question, read_prices(prices, "prices"), InThisProcess())


def by_brute_force(trace: str, slo: str, profile: str, most: int, **further) -> list[bool]:
    """Whether 1, 2, ... replicas keep the objectives on the whole trace."""
    given = settings(trace, slo, **further) | {"profile": profile}
    return [
        run_trial(TrialSpec(given | {"replicas": n}, early=False)).keeps for n in range(1, most + 1)
    ]


@pytest.mark.slow
@examples(8)
@given(
    ttft_ms=st.sampled_from([50, 70, 80, 100, 120, 200]),
    tpot_ms=st.sampled_from([14, 16, 17, 20, 40]),
    percentile=st.sampled_from([50, 90, 99]),
)
def test_brute_force_finds_the_same_number(trace, ttft_ms, tpot_ms, percentile):
    slo = f"ttft p{percentile} < {ttft_ms} ms, tpot p{percentile} < {tpot_ms} ms"
    keeps = by_brute_force(trace, slo, f"{MODEL}@a100-40g", 6)
    (row,) = plan(trace, slo).rows
    if any(keeps):
        # where more is not always better, a smaller one than was found may do; it is said then
        assert keeps[row.replicas - 1] and (row.replicas == 1 or not keeps[row.replicas - 2])
        assert row.replicas == keeps.index(True) + 1 or keeps != sorted(keeps)
        assert row.at_least == row.replicas and row.usd_per_hour == row.replicas
    else:
        assert row.status in ("never", "too few") and row.usd_per_hour is None


@pytest.mark.nightly
@pytest.mark.parametrize("slo", ["ttft p90 < 80 ms, tpot p90 < 25 ms", "ttft p99 < 150 ms"])
def test_brute_force_finds_no_cheaper_one_among_several(trace, slo):
    kinds = {"gpus": ("a100-40g", "l40s", "h100"), "tp": (1, 2)}
    found = plan(trace, slo, most_gpus=6, **kinds)
    usd = {"a100-40g": 1.0, "l40s": 0.7, "h100": 2.5}
    costs = []
    for gpu in kinds["gpus"]:
        for tp in kinds["tp"]:
            profile = f"{MODEL}@{gpu}" + (f":tp{tp}" if tp > 1 else "")
            keeps = by_brute_force(trace, slo, profile, 6 // tp)
            if any(keeps):
                costs.append((keeps.index(True) + 1) * tp * usd[gpu])
    assert found.best.usd_per_hour == pytest.approx(min(costs))
    every = plan(trace, slo, all_sizes=True, **kinds)
    assert not [row for row in every.rows if row.status == "dearer"]
    assert every.best.candidate.label == found.best.candidate.label
    assert every.best.sized == found.best.sized
    for row in found.rows:
        if row.status == "dearer":
            assert row.candidate.usd_per_hour * row.at_least > found.best.usd_per_hour
            (same,) = [r for r in every.rows if r.candidate.label == row.candidate.label]
            assert same.status != "enough" or same.replicas >= row.at_least


@pytest.mark.nightly
def test_a_stricter_objective_or_a_larger_load_never_needs_less(trace):
    def number(slo="ttft p90 < 80 ms", **further):
        return plan(trace, slo, most_gpus=16, **further).best.replicas

    assert number("ttft p50 < 80 ms") <= number() and number("ttft p90 < 120 ms") <= number()
    assert number("ttft p50 < 90 ms") <= number("ttft p50 < 90 ms", grow=2.0)


@pytest.fixture(scope="module")
def several(trace) -> Plan:
    kinds = {"gpus": ("a100-40g", "h100"), "tp": (1,), "all_sizes": True}
    return plan(trace, "ttft p90 < 90 ms", draws=2, **kinds)


@pytest.mark.slow
def test_every_row_has_its_draws_the_error_of_its_steps_and_its_memory(several):
    rows = [row for row in several.rows if row.status == "enough"]
    assert len(rows) == 2
    for row in rows:
        assert row.closer.draws == 2 and row.sized == row.closer.sizes[0]
        assert (row.closer.fast or 99) <= row.replicas <= (row.closer.slow or 99)
        memory = memory_of(row.sized)
        assert 0 <= memory.exceeded <= 1 and 0 < memory.held_share <= 1
        most = max(trial.peak_kv_share for trial in row.sized.trials)
        assert memory.held_share <= most <= 1


@pytest.mark.slow
def test_a_first_row_that_is_undecided_is_said_aloud_with_what_is_sure(several):
    first = several.best
    said = "\n".join(line for line in warnings(several) if "first row" in line)
    assert bool(said) == (first.sized.answer != "meets")
    sure = [
        (one.replicas * row.candidate.usd_per_hour, one)
        for row in several.rows
        if row.closer
        for one in row.closer.sizes
        if one.answer == "meets"
    ]
    if said and sure:
        assert f"${min(usd for usd, _ in sure):,.2f} an hour" in said
    assert (several.surest is None) == (not sure)
    assert not any("undecided" in line for line in head_lines(several))


@pytest.mark.slow
def test_without_a_price_gpus_decide_and_that_is_said(trace):
    prices = "gpu,usd_per_hour\na100-40g,1\n"
    found = plan(trace, "ttft p90 < 1 s", prices, gpus=("a100-40g", "l40s"), tp=(1, 2))
    assert not found.priced and found.best.gpus == 1
    said = "\n".join(foot_lines(found, read_prices(prices, "prices")))
    assert "$/hour of l40s is not known: ranked by GPUs" in said
    assert "left out: " not in said and "to start 1 A100-40G" in said


@pytest.mark.slow
def test_what_cannot_hold_model_or_request_is_left_out_and_said(tmp_path):
    long = write_trace(tmp_path / "long.csv", count=20, longest=30_000)
    (tmp_path / "long.csv").write_text(
        (tmp_path / "long.csv").read_text() + "2023-11-16 18:00:59.0000000,120000,10\n"
    )
    found = plan(long, "ttft p50 < 60 s", gpus=("t4", "a100-40g", "h100"), tp=(1, 2))
    reasons = {(one.gpu, one.tp): one.reason for one in found.left_out}
    assert "no KV memory" in reasons["t4", 1] or "120,010" in reasons["t4", 1]
    assert "the longest request has 120,010 tokens" in reasons["t4", 2]
    assert ("h100", 2) not in reasons and found.best is not None
    for gpu, tp in reasons:
        config = SimulationConfig(profile=f"{MODEL}@{gpu}" + (f":tp{tp}" if tp > 1 else ""))
        with_room = False
        try:
            with_room = resolve_hardware(config).limits.max_model_len >= 120_010
        except (ProfileError, SettingsError):
            pass
        assert not with_room


def test_where_nothing_is_enough_it_says_why_and_by_how_much(trace):
    alone = plan(trace, "ttft p90 < 1 s, tpot p90 < 1 ms")
    assert alone.best is None and alone.closer is None
    assert alone.rows[0].status == "never" and "over 1 ms" in alone.rows[0].reason
    few = plan(trace, "ttft p99 < 30 ms", most_gpus=1)
    (row,) = few.rows
    assert row.status in ("too few", "never")
    text = "\n".join(foot_lines(few, {}))
    assert "nothing keeps the objectives within --most-gpus 1" in text
    assert "TTFT" in text


@pytest.mark.slow
def test_a_day_beside_offline_work_holds_what_it_says(trace):
    slo = "ttft p90 < 200 ms, tpot p90 < 40 ms"
    found = plan(trace, slo, policies=("echo",), pool=8, most_gpus=8)
    day = found.day
    assert day.replicas >= found.best.replicas and day.offline_tokens_per_day > 0
    assert [share for share, *_ in day.levels] == sorted(share for share, *_ in day.levels)
    given = settings(trace, slo, policy=("echo",), pool=8, rate_scale=1.0, replicas=day.replicas)
    assert run_trial(TrialSpec(given, early=False)).keeps
    if day.replicas > found.best.replicas:
        assert not run_trial(TrialSpec(given | {"replicas": day.replicas - 1})).keeps


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_the_same_numbers(trace, tmp_path, capsys):
    words = ["plan", "--model", MODEL, "--trace", trace, "--slo", "ttft p90 < 80 ms"]
    words += ["--gpus", "a100-40g,l40s", "--tp", "1", "--workers", "1", "--seeds", "2"]
    words += ["--most-gpus", "6"]
    assert not status(main, [*words, "--out", str(tmp_path / "out"), "--quiet"])
    shown = capsys.readouterr().out
    kept = json.loads((tmp_path / "out" / "plan.json").read_text())
    status(main, [*words, "--json"])
    assert json.loads(capsys.readouterr().out) == kept
    best = kept["rows"][0]
    assert best["status"] == "enough" and len(best["commands"]) == best["replicas"]
    assert f"{kept['warnings'][0]}" in shown and "lead, not 300 s after 30 s" in kept["warnings"][0]
    assert f"{best['usd_per_hour']:,.2f}" in shown and best["commands"][0] in shown
    assert shown.startswith(kept["decision"]["lines"][0])
    sizes = kept["closer"]["sizes"]
    assert sizes[0]["replicas"] == best["replicas"] and kept["prices"]["l40s"]["source"] in shown
    below = kept["closer"]["below"]
    assert (below is None) == (best["replicas"] == 1)
    one = [row["status"] for row in kept["rows"]].count("enough") == 1  # a chart of one point
    drawn = () if one else ("pareto.png",)
    files = [*drawn, "plan.json", "start.sh"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == files
    page = write_report([tmp_path / "out"], tmp_path / "p.html").read_text()
    assert kept["warnings"][0] in unescape(page)
    assert all(command in unescape(page) for command in best["commands"])
    errors = best["closer"]["step_time_errors"]
    assert f"step times off by what is expected ({errors}); one alone keeps " in unescape(page)
    assert "twinserve route --router least-requests --worker=" in page
    assert kept["decision"]["lines"][0] in unescape(page) and 'data-key="plan-load"' in page


@pytest.mark.slow
def test_a_plan_is_the_same_every_time(trace):
    kinds = {"gpus": ("a100-40g", "l40s"), "tp": (1, 2)}
    first, again = (plan(trace, "ttft p90 < 80 ms", **kinds) for _ in range(2))
    assert described(first, {}) == described(again, {})


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(trace, capsys):
    words = ["plan", "--model", MODEL, "--trace", trace, "--slo", "ttft p90 < 80 ms", "--json"]
    words += ["--gpus", "a100-40g,l40s", "--tp", "1,2", "--most-gpus", "6"]
    found = []
    for workers in ("1", "2"):
        status(main, [*words, "--workers", workers])
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] and json.loads(found[0])["rows"]


@pytest.mark.nightly
def test_a_plan_for_two_traces_holds_on_both(trace, tmp_path):
    other = write_trace(tmp_path / "o.csv", seed=5, count=60, rate=60.0)
    slo = "ttft p90 < 90 ms"
    alone = [plan(one, slo, most_gpus=12).best.replicas for one in (trace, other)]
    both = plan(trace, slo, most_gpus=12, traces=(trace, other)).best
    assert both.replicas == max(alone) and len(both.sized.attained) == 2


@pytest.mark.parametrize(
    ("further", "error", "says"),
    [
        ({"slo": "none"}, SettingsError, "a plan needs objectives"),
        ({"slo": "ttft < 1 s"}, SettingsError, "say how many requests must keep it"),
        ({"slo": "tpot mean < 1 s"}, SettingsError, "say how many requests must keep it"),
        ({"slo": "ttft p90 < 1"}, SettingsError, "has no unit"),
        ({"slo": "ttft p90 < 1 s; be: e2el p90 < 9 s"}, SettingsError, "real-time requests"),
        ({"gpus": ("h1000",)}, ProfileError, "unknown GPU 'h1000'; nearest: h100"),
        ({"gpus": ("a100", "a100-80g")}, SettingsError, "--gpus: a100-80g is given twice"),
        ({"tp": (0,)}, SettingsError, "--tp 0: is no count"),
        ({"model": "llama-99"}, ProfileError, "unknown model"),
        ({"grow": 0.0}, SettingsError, "--grow 0"),
        ({"grow": float("nan")}, SettingsError, "--grow nan"),
        ({"peak_s": -1.0}, SettingsError, "--peak -1"),
        ({"lead_s": -1.0}, SettingsError, "--lead -1"),
        ({"draws": 0}, SettingsError, "--seeds 0"),
        ({"most_gpus": 0}, SettingsError, "--most-gpus 0"),
        ({"rate": 5.0}, SettingsError, "--rate is for generated traces"),
        ({"traces": ("nowhere.csv",)}, WorkloadError, "nowhere.csv"),
        ({"model": "llama-3.1-70b"}, SettingsError, "no candidate holds llama-3.1-70b"),
        ({"policies": ("nobody",)}, ValueError, "nobody"),
        ({"routers": ("nobody",)}, ValueError, "nobody"),
    ],
)
def test_a_bad_question_is_one_line(trace, further, error, says):
    asked = {"model": MODEL, "traces": (trace,), "slo": "ttft p90 < 1 s", "gpus": ("a100-40g",)}
    question = Question(**{**asked, "tp": (1,), **further})
    with pytest.raises(error, match=says) as caught:
        make_plan(question, {}, InThisProcess())
    assert "\n" not in str(caught.value)


def test_a_profile_of_one_of_several_ranks_is_no_engine_to_plan_with(trace, tmp_path):
    save_profile(derive_profile("qwen3-30b-a3b", "h100", dp=2, ep=True), tmp_path / "own.json")
    question = Question(str(tmp_path / "own.json"), (trace,), "ttft p90 < 1 s")
    with pytest.raises(SettingsError, match="one of 2 data-parallel ranks that share experts"):
        make_plan(question, {}, InThisProcess())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tp", "1,two"], "'two' is no count"),
        (["--gpus", "h100,"], "a name is empty"),
        (["--workers", "0"], "--workers 0"),
        (["--prices", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_bad_words_of_the_command_are_one_line(trace, words, says, capsys):
    words = ["plan", "--model", MODEL, "--trace", trace, "--slo", "ttft p90 < 1 s", *words]
    assert says in refused(capsys, main, words)


def test_what_trials_note_is_told_once(tmp_path):
    file = write_trace(tmp_path / "t.csv", count=40, rate=20.0)
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text + text.splitlines()[-1].rsplit(",", 1)[0] + ",0\n")
    found = plan(file, "ttft p90 < 1 s")
    (said,) = found.notices
    assert "1 rows without prompt or output tokens dropped" in said
    assert [line for line in foot_lines(found, {}) if said in line] == [f"note: {said}"]
    assert described(found, {})["notices"] == [said]


def test_a_server_is_started_for_the_longest_request_however_little_memory_is_sure():
    """gpt-oss-120b has 0 to 1,442 blocks there."""
    base = SimulationConfig(engine_version="0.11", gpu_memory_utilization=0.92)
    (one,), _ = candidates(base, "gpt-oss-120b", ["h100"], [1], ["least-requests"], {}, 520)
    assert one.hardware.least_kv_tokens == 0
    words = serve_arguments(one, 0, (None, None), longest=520)
    assert words[words.index("--max-model-len") + 1] == "520"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "told"), [("vllm", False), ("bros:kv=paged", True)])
def test_an_objective_that_grows_with_the_prompt_is_not_cut_silently(trace, policy, told):
    found = plan(trace, "ttft p90 < max(0.2 s, 9 x prefill)", policies=(policy,))
    said = [line for line in warnings(found) if "vllm_xargs.slo_ttft_s" in line]
    assert bool(said) is told
    assert all("200 ms" in line and "9 x prefill" in line for line in said)


@pytest.mark.slow
def test_the_page_says_how_far_it_was_looked_beyond_doubt(trace, tmp_path):
    """As the table in the terminal does, where no size that was tried is sure."""
    document = described(plan(trace, "ttft p90 < 100 ms"), read_prices(PRICES, "prices"))
    sizes = document["rows"][0]["closer"]["sizes"]
    for one in sizes:
        one["answer"] = "undecided"
    (tmp_path / "plan.json").write_text(json.dumps(document))
    page = write_report([tmp_path], tmp_path / "page.html").read_text()
    assert f">&gt; {max(one['replicas'] for one in sizes)}</td>" in page
