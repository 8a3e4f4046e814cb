"""Speculative decoding in whole runs: what a user asks for is what happens, and nothing else is."""

from dataclasses import replace

import numpy as np
import pytest

from tests.identity.drafts import OurDrafts
from tests.identity.protocol import EngineSettings
from tests.sim.harness import Affine, same_rows
from tests.sim.troubled import troubled
from twinserve.backends.acceptance import Acceptance, rates_of_length
from twinserve.policies.drafting import Drafting
from twinserve.policies.errors import PolicyError
from twinserve.policies.registry import parse_policy
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.speculative import (
    NgramDrafter,
    SpeculativeModel,
    VerifyingComposition,
    head_bytes,
)
from twinserve.profiles.step_times import choose
from twinserve.sim.results.files import read_run, write_run
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.timeline import trace_events
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import resolve
from twinserve.sim.setup.run import Simulation, run_simulation
from twinserve.sim.setup.speculation import parse_speculation
from twinserve.traces.workload import PrefixBlocks, Workload

STEP = Affine(base=1.0, prefill=0.0, decode=0.0, context=0.0)
SMALL = {
    "trace": "poisson", "rate": 20.0, "requests": 25, "cap_length": 150, "slo": "none",
    "profile": "llama-3.1-8b@h100", "step_times": "roofline", "offline": True,
    "async_scheduling": True,
}  # fmt: skip
TIGHT = {"num_blocks": 40, "max_num_seqs": 12, "max_num_batched_tokens": 64}


def simulation(workload=None, model=None, **settings) -> Simulation:
    inputs = resolve(SimulationConfig(**(SMALL | settings)))
    hardware = inputs.hardware if model is None else replace(inputs.hardware, model=model)
    inputs = replace(inputs, workload=workload or inputs.workload, hardware=hardware)
    return Simulation(inputs, inputs.policies[0])


def run(*args, **settings):
    return run_simulation(simulation(*args, **settings))


def one(output_tokens: int) -> Workload:
    return Workload.build([0.0], [8], [output_tokens])


# -- how many tokens a step gives ------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("right", "output_tokens", "steps", "tpot_s"),
    [
        (1.0, 9, 3, 2 / 8),  # the prompt gives one, then twice three drafts and one more
        (1.0, 6, 3, 2 / 5),  # the last step gives one: what was right behind it is nobody's
        (0.0, 6, 6, 1.0),  # nothing is right, nothing is gained
    ],
)
def test_a_step_gives_the_right_drafts_and_one_token(
    right, output_tokens, steps, tpot_s, asynchronous
):
    result = run(
        one(output_tokens),
        STEP,
        speculate=f"k=3,method=ngram,acceptance={right}",
        async_scheduling=asynchronous,
    )
    summary = result.summary
    assert result.rows.requests["output_tokens"].tolist() == [output_tokens]
    assert summary["mean_ttft_ms"] == 1000.0
    assert summary["mean_tpot_ms"] == pytest.approx(1000 * tpot_s)
    # as vLLM's benchmark counts: one gap for what came together
    assert summary["mean_itl_ms"] == 1000.0
    assert result.rows.gaps["count"].sum() == steps - 1
    # asynchronously one step more may have begun for a request that had ended
    assert steps <= summary["scheduler"]["steps"] <= steps + asynchronous
    assert summary["speculation"]["acceptance_rate"] == right
    assert summary["speculation"]["mean_acceptance_length"] == 1 + 3 * right


@pytest.mark.parametrize(("asynchronous", "alone"), [(False, 3), (True, 4)])
def test_drafts_are_as_many_as_the_last_step_has_rows_for(asynchronous, alone):
    """A second request comes in the third step: 3 drafts alone, then one of each."""
    rows = run(
        Workload.build([0.0, 2.5], [8, 8], [30, 12]), STEP, async_scheduling=asynchronous,
        speculate="k=3,method=eagle,rates=1/1/1,batches=1-1:3/2-9:1",
    ).rows  # fmt: skip
    assert rows.steps["draft_tokens"].tolist()[: alone + 3] == [0, *[3] * alone, 2, 2]


def test_the_mean_length_is_what_was_asked_for():
    summary = run(requests=100, speculate="k=4,method=ngram,length=2.6").summary
    assert summary["speculation"]["mean_acceptance_length"] == pytest.approx(2.6, abs=0.05)


# -- which drafts are right ------------------------------------------------------------------------
def test_rates_by_position_are_those_said():
    rates, draws = [0.8, 0.6, 0.15], 40_000
    found = Acceptance(rates, seed=3)
    keys = np.array([found.key(f"r{i}") for i in range(200)], np.uint64).repeat(draws // 200)
    positions = np.tile(7 * np.arange(draws // 200), 200)
    right = found.right(keys, positions, np.full(draws, 3))
    seen = [(right > i).mean() for i in range(3)]
    assert seen == pytest.approx(rates, abs=4 * np.sqrt(0.25 / draws))


def test_a_mean_length_has_the_least_spread():
    assert rates_of_length(2.4, 3) == pytest.approx([1.0, 0.4, 0.0])
    assert rates_of_length(1.0, 2) == [0.0, 0.0] and rates_of_length(3.0, 2) == [1.0, 1.0]


@pytest.mark.slow
def test_draws_depend_on_request_and_position_alone():
    """Neither batches, nor memory, nor when a plan is made change which drafts are right."""
    settings = {"speculate": "k=2,method=ngram,acceptance=0.6", "prefix_caching": False}
    runs = [
        run(**settings, max_num_seqs=seats, async_scheduling=asynchronous)
        for seats, asynchronous in ((64, False), (64, True), (3, True))
    ]
    said = [one.summary["speculation"] for one in runs]
    assert said[0] == said[1] == said[2]
    assert said[0] != run(**settings, seed=1).summary["speculation"]


def test_what_pads_a_new_request_is_counted_once():
    """The second prompt of 33 finds 32 in the cache: its first step is as long as a decode."""
    same = PrefixBlocks(np.array([0, 1, 0, 1]), np.array([0, 2, 4]), 16)
    two = Workload.build([0.0, 2.5], [33, 33], [9, 2], prefix=same)
    given = {"speculate": "k=3,method=ngram,acceptance=0", "async_scheduling": False}
    result = run(two, STEP, prefix_caching=True, block_tokens=16, **given)
    steps, requests = result.rows.steps, result.rows.requests
    assert requests["hit_tokens"].tolist() == [0, 32]
    assert steps["prefill_tokens"].sum() == 33 and steps["draft_tokens"].sum() == 3 * (8 + 2)
    computed = 33 + 4 * (8 + 2)
    assert result.summary["scheduler"]["mean_step_tokens"] * len(steps) == pytest.approx(computed)


@pytest.mark.parametrize(("longest", "granted"), [(36, 1), (37, 4)])
def test_nothing_pads_a_request_that_could_become_too_long(longest, granted):
    """32 tokens are found, one is computed, three pad it, and one is emitted."""
    settings = EngineSettings(8, 4, 64, longest, enable_prefix_caching=True, draft_tokens=3)
    ours = OurDrafts(settings)
    ours.submit("r0", 33, 1, np.array([0, 1, 2]))
    ours.step()
    ours.submit("r1", 33, 1, np.array([0, 1, 3]))
    assert ours.step().scheduled == {"r1": granted}


def test_tokens_later_than_their_objective_are_counted_with_drafts():
    given = {"speculate": "k=3,method=ngram,acceptance=0", "async_scheduling": False}
    late = [
        run(replace(one(6), slo_tpot_s=np.array([bound])), STEP, **given).rows.requests
        for bound in (0.5, 2.0)
    ]
    assert [rows["late_tokens"].tolist() for rows in late] == [[5], [0]]


# -- what stays as it was --------------------------------------------------------------------------
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_fast_path_is_exact_with_drafts(asynchronous):
    settings = {"speculate": "k=3,acceptance=0.7", "async_scheduling": asynchronous, **TIGHT}
    fast, exact = (run(**settings, exact=exact).rows for exact in (False, True))
    assert fast.steps["preempted_recompute"].sum() > 0
    same_rows(fast, exact)


def test_a_run_without_drafts_says_nothing_of_them():
    result = run()
    assert "speculation" not in result.summary and "draft_tokens" not in result.rows.steps
    assert "drafting" not in result.config["limits"]


@pytest.mark.slow
@pytest.mark.parametrize("migrates", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_troubled_fleet_with_drafts(asynchronous, migrates):
    """Clients leave, replicas come, drain and fail; some of them speculate."""
    spec = parse_policy("vllm")
    settings = {"step_times": "roofline", "async_scheduling": asynchronous}
    for drafts in ("k=3,method=ngram,acceptance=0.6", "k=2,method=eagle,acceptance=0.9"):
        _, rows = troubled(spec, 6, migrates=migrates, speculate=drafts, **settings)
        assert rows.steps["accepted_tokens"].sum() > 0


def test_a_run_on_disk_has_what_was_verified(tmp_path):
    result = run(speculate="k=3,acceptance=0.7", client_timeout=0.2)
    write_run(tmp_path / "out", result)
    found = read_run(tmp_path / "out")
    assert found.rows.steps["accepted_tokens"].sum() > 0
    assert found.summary["speculation"] == result.summary["speculation"]
    assert summarise(found.rows)["speculation"] == result.summary["speculation"]


def test_the_timeline_shows_what_steps_verified():
    rows = run(speculate="k=3,acceptance=0.7").rows
    drawn = [e["args"].get("draft tokens", 0) for e in trace_events(rows) if e.get("cat") == "step"]
    assert sum(drawn) == rows.steps["draft_tokens"].sum() > 0


# -- memory and time -------------------------------------------------------------------------------
def blocks(speculate: str | None) -> int:
    return resolve(SimulationConfig(**SMALL, speculate=speculate)).hardware.num_blocks


def test_a_drafter_takes_its_weights_and_kv_out_of_memory():
    own = blocks(None)
    assert blocks("k=3,method=ngram,acceptance=0.7") == own
    head = blocks("k=3,method=eagle,acceptance=0.7")
    assert 0.9 * own < head < own * 32 / 33  # KV of a layer more than the model's 32


def test_a_model_with_modules_drafts_with_them():
    settings = SMALL | {"profile": "deepseek-v3@h200:tp8"}
    hardware = resolve(
        SimulationConfig(**settings, speculate="k=1,method=mtp,acceptance=0.8")
    ).hardware
    assert hardware.profile.llm.mtp_modules == 1 and hardware.num_blocks > 0


def test_verification_reads_kv_once_and_multiplies_all_tokens():
    model = choose("llama-3.1-8b@h100", "roofline").profile.model(256)
    resident = np.full(8, 4000)
    verify = VerifyingComposition(
        8, 32_000, 4000, verify_new=np.full(8, 4), verify_resident=resident, drafters=8, drafts=3
    )
    decode = model.step_seconds(StepComposition(8, 32_000, 4000))
    seconds = SpeculativeModel(model, NgramDrafter()).step_seconds(verify)
    assert decode < seconds < 1.2 * decode  # four tokens a row, where weights and KV dominate
    many = replace(
        verify, decode_requests=512, verify_new=np.full(512, 4), verify_resident=np.full(512, 100)
    )
    alone = model.step_seconds(StepComposition(512, 51_200, 100))
    assert SpeculativeModel(model, NgramDrafter()).step_seconds(many) > 1.8 * alone


def test_a_draft_model_takes_memory_and_time_of_the_same_gpus():
    settings = {"profile": "llama-3.1-70b@h100:tp4", "requests": 5}
    model = "method=draft_model,draft=llama-3.1-8b@h100:tp4"
    runs = [
        run(**settings, speculate=f"k=3,acceptance=0.7,{method}")
        for method in ("method=ngram", model)
    ]
    free, dear = (one.summary["mean_itl_ms"] for one in runs)
    assert free < dear < 2 * free
    free, less = (one.config["kv"]["num_blocks"] for one in runs)
    assert less < free * 80 / (80 + 32)  # KV of 32 layers beside that of 80
    assert runs[1].summary["speculation"] == runs[0].summary["speculation"]


def test_a_head_has_the_targets_experts_and_format_where_it_comes_with_it():
    """DeepSeek-V3's report (Sec. 2.2) and its files: one MTP layer of 256 experts in FP8."""
    llm = choose("deepseek-v3@h200:tp8", "roofline").profile.llm
    layer = (llm.weight_bytes - 2 * llm.head_parameters * llm.dtype_bytes) / llm.layers
    assert head_bytes(llm, "mtp") == pytest.approx(layer, rel=0.1)  # three layers are dense
    assert head_bytes(llm, "eagle") < 0.2 * head_bytes(llm, "mtp")
    dense = choose("llama-3.1-8b@h100", "roofline").profile.llm
    assert head_bytes(dense, "eagle") == head_bytes(dense, "mtp")


def test_a_draft_model_has_the_kv_type_of_the_target():
    model = "k=3,acceptance=0.7,method=draft_model,draft=llama-3.1-8b@h100"
    wide, narrow = (
        resolve(SimulationConfig(**SMALL, speculate=model, kv_cache_dtype=kind)).hardware.num_blocks
        for kind in ("auto", "fp8")
    )
    assert 2 * wide <= narrow <= 2 * wide + 1


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ("", "3 drafts a request by ngram, 2.75 tokens a step"),
        (",batches=1-8:1", "1 drafts a request by ngram, 1.80 tokens a step"),
        (",batches=1-8:3/9-9:0", "0 to 3 drafts a request, by batch size, by ngram, up to 2.75 "),
    ],
)
def test_the_banner_says_what_batch_sizes_make_of_it(batches, said):
    given = f"k=3,method=ngram,rates=0.8/0.6/0.35{batches}"
    assert said in parse_speculation(given).describe(asynchronous=False)


def test_ngrams_are_those_of_the_gpu_where_plans_are_made_ahead():
    """vLLM 0.32 (`config/vllm.py`) turns asynchronous scheduling off for `ngram`."""
    ngram = parse_speculation("k=3,method=ngram,acceptance=0.7")
    assert "by ngram_gpu," in ngram.describe(asynchronous=True)
    assert "by ngram," in ngram.describe(asynchronous=False)


def test_methods_take_what_vllm_says():
    assert Drafting.of("ngram", 3) == Drafting(3)
    assert Drafting.of("draft_model", 3) == Drafting(3, lookahead=3, slots=1)
    assert Drafting.of("eagle", 3) == Drafting.of("mtp", 3) == Drafting(3, 3, 0, True)
    by_batch = Drafting.of("ngram", 4, (4, 4, 1))
    assert [by_batch.after(rows) for rows in (1, 2, 3, 100)] == [4, 4, 1, 1]


# -- who can, and what is refused ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("k=3", "give one of acceptance=0.7"),
        ("k=3,acceptance=0.7,length=2", "give one of acceptance=0.7"),
        ("acceptance=0.7", "k"),
        ("k=0,acceptance=0.7", "at least 1"),
        ("k=3,acceptance=1.7", "at most 1"),
        ("k=3,acceptance=0.7,methd=ngram", "did you mean 'method'"),
        ("k=2,rates=0.5/0.6", "none above the one before it"),
        ("k=3,rates=0.5/0.4", "write 3 shares"),
        ("k=2,length=3.5", "a step has 3 tokens"),
        ("k=2,acceptance=0.5,batches=2-4:1", "rise from 1"),
        ("k=2,acceptance=0.5,method=draft_model", "say which model drafts"),
        ("k=2,acceptance=0.5,draft=llama-3.1-8b@h100", "draft is for method=draft_model"),
        ("k=2,acceptance=0.5,method=ngram,cost=0.1", "cost is for method=eagle and mtp"),
        ("k=2,acceptance=0.5,method=draft_model,draft=llama-3.1-8b@h100:tp4", "same ranks"),
        ("k=2,acceptance=0.5,method=draft_model,draft=qwen2.5-14b@h100", "vocabulary"),
        ("k=2,acceptance=0.5,method=draft_model,draft=llama-3.1-8b@h100:pp2", "drop :dpN and :ppN"),
        ("k=2,acceptance=0.5,method=draft_model,draft=llama-9b@h100", "unknown model 'llama-9b'"),
        ("k=2,acceptance=0.5,method=mtp", "llama-3.1-8b has no MTP modules"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(given, said):
    with pytest.raises(SettingsError) as error:
        resolve(SimulationConfig(**SMALL, speculate=given))
    assert said in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).startswith("--speculate")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"shared_prefix": True}, "--shared-prefix"),
        ({"policy": ("vllm:kv=paged-rc",)}, "use kv=paged"),
        ({"profile": "llama-3.1-8b@h100:pp2", "async_scheduling": False}, "pipeline stages"),
    ],
)
def test_what_does_not_go_together_is_refused(more, said):
    with pytest.raises((SettingsError, PolicyError), match=said):
        run(**({"speculate": "k=3,acceptance=0.7"} | more))


def test_an_older_release_is_refused():
    with pytest.raises(PolicyError, match=r"release=0\.29"):
        run(speculate="k=3,acceptance=0.7", policy=("vllm:release=0.29",))
