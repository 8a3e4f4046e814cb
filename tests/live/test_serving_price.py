"""What serving with a policy costs beside vLLM's own scheduler, and what it gains, in counts: no
figure here depends on the machine. docs/serving.md has the seconds."""

import pytest

from twinserve.experiments.serving.flood import HOST_BLOCKS, STOCK, Case, Engine, Flood

pytestmark = [pytest.mark.nightly, pytest.mark.live]

STEP_S = 0.001
# Three times what the memory holds at once; a real-time request every twenty steps.
FLOOD = Flood(best_effort=40, output=80, real_time=12, urgent_output=20, every_s=20 * STEP_S)
CASES = {
    "stock": STOCK,
    "vllm": Case("vllm"),
    "fit": Case("bros:chunk=fit"),
    "reserve": Case("bros:chunk=64,reserve=true"),
    "swapping": Case("bros:chunk=64", host_blocks=HOST_BLOCKS),
    "full": Case("mlfq", host_blocks=24),
}


@pytest.fixture(scope="module")
def runs(vllm, tmp_path_factory) -> dict[str, dict]:
    from twinserve.experiments.serving.served import Clock, Served

    class StepClock(Clock):
        """Every step takes STEP_S seconds: the same steps on any machine."""

        now = 0.0

        def __call__(self) -> float:
            return self.now

        def jump(self, to_s: float) -> None:
            self.now = max(self.now, to_s)

        def stepped(self) -> None:
            self.now += STEP_S

    def blocks(served: Served) -> int:
        if served.case.policy is None:
            return served.engine.num_blocks
        return served.engine.scheduler.decider.core.ledger.num_blocks

    found, folder = {}, tmp_path_factory.mktemp("model")
    for first, *others in (["stock"], ["vllm", "fit", "reserve"], ["swapping"], ["full"]):
        engine = Engine(blocks=64)
        with Served(CASES[first], engine, folder / first, StepClock()) as served:
            for name in (first, *others):
                if name != first:
                    served.serve(CASES[name])
                found[name] = {**served.run(FLOOD, 1), "blocks": blocks(served)}
    return found


def test_a_policy_has_every_block_of_the_engine(runs):
    assert {run["blocks"] for run in runs.values()} == {64}


def test_every_plan_is_carried_out_and_every_answer_is_the_same(runs):
    assert all(run["drift"] == 0 for name, run in runs.items() if name != "full")
    for run in runs.values():
        assert run["answers"] == runs["stock"]["answers"]


def test_policy_vllm_makes_the_steps_of_vllm(runs):
    counts = ("steps", "batch", "preemptions", "computed_again", "ttft_mean_s", "whole_s")
    assert {c: runs["vllm"][c] for c in counts} == {c: runs["stock"][c] for c in counts}


def test_the_flood_takes_few_further_steps(runs):
    for name in ("fit", "reserve", "swapping"):
        assert runs[name]["steps"] < 1.15 * runs["stock"]["steps"], name


def test_real_time_requests_wait_for_few_steps_and_not_for_the_flood(runs):
    for name in ("fit", "reserve", "swapping"):
        assert runs[name]["ttft_mean_s"] < runs["stock"]["ttft_mean_s"] / 40, name
        assert runs[name]["ttft_max_s"] < 30 * STEP_S, name


def test_few_lose_their_memory_and_those_that_swap_compute_little_again(runs):
    stock, swapping = runs["stock"], runs["swapping"]
    assert stock["preemptions"] > 0
    for name in ("fit", "reserve"):
        assert runs[name]["preemptions"] < stock["preemptions"] + 2 * FLOOD.real_time, name
    assert swapping["moved_tokens"] > 0
    assert swapping["computed_again"] < stock["computed_again"] / 2


def test_a_full_host_costs_steps_and_no_server(runs):
    """What comes back in a step lies on the host until it has ended, beside what leaves in it: the
    engine may lack room that the ledger has. Those who find none are computed again."""
    assert runs["full"]["drift"] > 0 and runs["full"]["moved_tokens"] > 0
