"""Our scheduler class in a vLLM engine of this process: what it plans is what vLLM does, however
requests end."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.identity.release import with_own_rules
from tests.parameters import mostly_nightly
from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep

pytestmark = [pytest.mark.slow, pytest.mark.live]

SCHEDULER = "twinserve.backends.live.serving.scheduler.PolicyScheduler"
BLOCKS, SEATS, SIZE, LONGEST = 40, 10, 32, 448
# Who keeps prefixes by vLLM's rules, or none, has the engine's pool to the block; the others' pool
# never binds. Whole prompts of bros do not go into one step of this engine (96 tokens), so their
# plans take several.
CASES = {
    "vllm": ({"policy": "vllm"}, BLOCKS),
    "bros": (
        {"policy": "bros", "profile": "llama-3.1-8b@h100", "slo_ttft_s": 0.4, "slo_tpot_s": 0.2},
        BLOCKS,
    ),
    "bidirectional": (
        {
            "policy": "bros:kv=bidirectional",
            "profile": "llama-3.1-8b@h100",
            "slo_ttft_s": 0.4,
            "slo_tpot_s": 0.2,
        },
        2 * BLOCKS + SEATS,
    ),
    "fit": (
        {
            "policy": "bros:chunk=fit,kv=paged",
            "profile": "llama-3.1-8b@h100",
            "slo_ttft_s": 0.4,
            "slo_tpot_s": 0.2,
            "prefix_caching": True,
        },
        2 * BLOCKS + SEATS,
    ),
    "round-robin": ({"policy": "round-robin:chunk=50"}, BLOCKS),
}


class Served:
    """The engine, its scheduler, and what its requests were told."""

    def __init__(self, case: str, model) -> None:
        options, blocks = CASES[case]
        settings = LiveSettings(
            model,
            blocks,
            SIZE,
            SEATS,
            96,
            LONGEST,
            prefix_caching=True,
            scheduler=SCHEDULER,
            extra={"additional_config": {"clients": "trusted", **with_own_rules(options)}},
        )
        self.engine = VllmEngine(settings)
        self.core = self.engine._client.engine_core
        self.scheduler = self.engine.scheduler
        self.decider = self.scheduler.decider
        self.stats = self.scheduler.stats
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.sent = 0

    def send(
        self, prompt: list[int], output_tokens: int, attributes: dict | None = None, **sampling
    ) -> str:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        name = f"r{self.sent:04d}"
        self.sent += 1
        values = {
            "temperature": 0.0,
            "ignore_eos": True,
            "detokenize": False,
            "max_tokens": output_tokens,
            **sampling,
        }
        self.engine._client.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=SamplingParams(**values, extra_args=attributes),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )
        self.answers[name] = []
        return name

    def hang_up(self, name: str) -> None:
        self.engine._client.abort_requests([name])
        self.reasons[name] = "hung up"
        self.decider.check()

    @property
    def open(self) -> list[str]:
        return [name for name in self.answers if name not in self.reasons]

    def step(self) -> None:
        if not self.scheduler.has_requests():
            return
        self.engine.step(PlannedStep())
        self.decider.check()

    def drain(self) -> None:
        for _ in range(4000):
            if not self.scheduler.has_requests():
                assert not self.open
                assert self.decider.rows == {}
                return
            self.step()
        raise AssertionError(f"{self.open} do not end")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write_model(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(scope="module", params=mostly_nightly(CASES, "vllm", "bros", "fit"))
def served(request, vllm, model) -> Iterator[Served]:
    served = Served(request.param, model)
    collect = served.engine.step

    def step(planned):
        answer = collect(planned)
        for name, tokens in answer.tokens.items():
            served.answers[name] += tokens
        for name in answer.finished:
            served.reasons[name] = "finished"
        return answer

    served.engine.step = step
    try:
        yield served
    finally:
        served.engine.close()


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1, tiny_model.VOCAB) for _ in range(tokens)]


def test_the_engine_does_what_is_planned(served):
    rng = random.Random(5)
    shared, prompts, lengths = text(rng, 128), {}, {}
    before = served.stats.preempted
    while len(prompts) < 70 or served.open:
        if len(prompts) < 70 and rng.random() < 0.4:
            prompt = shared[: SIZE * rng.randrange(5)] + text(rng, rng.randrange(1, 150))
            told = [
                name
                for name, reason in served.reasons.items()
                if reason == "finished" and name in prompts
            ]
            if told and rng.random() < 0.4:  # a later turn: it quotes an answer
                turn = rng.choice(told)
                prompt = prompts[turn] + served.answers[turn] + text(rng, 9)
            attributes = {
                "class": rng.choice(["rt", "be"]),
                "priority": rng.randrange(3),
                "app": rng.choice("ab"),
            }
            tokens = rng.randrange(1, 60)
            name = served.send(prompt[: LONGEST - 60], tokens, attributes)
            prompts[name], lengths[name] = prompt[: LONGEST - 60], tokens
        if served.open and rng.random() < 0.03:
            served.hang_up(rng.choice(served.open))
        served.step()
    served.drain()
    assert served.scheduler.drift == 0, served.scheduler.first_drift
    assert served.decider.restarts == 0
    finished = [name for name in prompts if served.reasons[name] == "finished"]
    assert all(len(served.answers[name]) == lengths[name] for name in finished)
    assert len(finished) > 30
    assert len(finished) < len(prompts)  # somebody did hang up
    assert served.stats.preempted > before
    assert served.decider.core.ledger.num_blocks == BLOCKS
    if served.decider.core.ledger.prefix_caching:
        assert served.stats.hit_tokens > 1000
    assert (
        served.stats.arrived == served.stats.finished + served.stats.aborted + served.stats.refused
    )


def test_a_stop_token_ends_a_request(served):
    prompt = text(random.Random(7), 40)
    whole = served.send(prompt, 30)
    served.drain()
    stop = next(
        token
        for i, token in enumerate(served.answers[whole])
        if i > 2 and token not in served.answers[whole][:i]
    )
    short = served.send(prompt, 30, stop_token_ids=[stop])
    served.drain()
    end = served.answers[whole].index(stop) + 1
    assert served.answers[short] == served.answers[whole][:end]
    assert served.scheduler.drift == 0


def test_hanging_up_at_every_stage(served):
    rng = random.Random(9)
    waiting = [served.send(text(rng, 200), 30) for _ in range(14)]
    served.hang_up(waiting[0])  # nobody has told the policy of it
    served.step()
    served.hang_up(waiting[1])  # its prompt is half done, or it waits
    served.hang_up(waiting[-1])
    while not any(served.answers[name] for name in served.open):
        served.step()
    # in the middle of its answer
    served.hang_up(next(name for name in served.open if served.answers[name]))
    served.drain()
    assert served.scheduler.drift == 0, served.scheduler.first_drift


def test_hanging_up_while_the_step_runs(served):
    """The engine hears of it between the step's plan and its outcome."""
    rng = random.Random(11)
    names = [served.send(text(rng, 20), 20) for _ in range(4)]
    for _ in range(6):
        served.step()
    served.core.aborts_queue.put_nowait([names[1]])
    served.step()
    served.reasons[names[1]] = "hung up"
    served.drain()
    assert served.scheduler.drift == 0
    assert all(len(served.answers[name]) == 20 for name in names if name != names[1])


def test_bad_attributes_end_that_request_only(served):
    rng = random.Random(13)
    good = served.send(text(rng, 20), 5, {"class": "rt", "slo_ttft_s": 0.3})
    refused = served.stats.refused
    bad = served.send(text(rng, 20), 5, {"class": "gold"})
    served.drain()
    assert len(served.answers[good]) == 5
    assert (served.answers[bad], served.reasons[bad]) == ([], "finished")
    assert served.stats.refused == refused + 1


def test_pausing_and_emptying_the_cache(served):
    from vllm.v1.core.sched.interface import PauseState

    rng = random.Random(15)
    prompt = text(rng, 100)
    first = served.send(prompt, 5)
    served.drain()
    assert served.scheduler.reset_prefix_cache()
    again = served.send(prompt, 5)
    for _ in range(2):
        served.step()
    served.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    so_far = len(served.answers[again])
    served.engine.step(PlannedStep())
    assert len(served.answers[again]) == so_far
    served.scheduler.set_pause_state(PauseState.UNPAUSED)
    served.drain()
    assert served.answers[again] == served.answers[first]
    assert served.scheduler.drift == 0, served.scheduler.first_drift


def test_what_the_engine_does_by_itself_is_counted_and_mended(served):
    """Somebody takes a running request's memory behind the policy's back."""
    prompt = text(random.Random(17), 70)
    alone = served.send(prompt, 40)
    served.drain()
    before, restarts = served.scheduler.drift, served.decider.restarts
    name = served.send(prompt, 40)
    other = served.send(prompt[:50], 10)
    for _ in range(8):
        served.step()
    victim = served.scheduler.requests[name]
    served.scheduler.running.remove(victim)
    served.scheduler._preempt_request(victim, 0.0)
    served.drain()
    assert served.scheduler.drift > before
    assert served.scheduler.first_drift
    assert served.decider.restarts > restarts
    assert served.answers[name] == served.answers[alone]
    assert len(served.answers[other]) == 10
