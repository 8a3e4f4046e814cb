"""The part of a steered server that needs no vLLM: arrivals, plans, ends and hang-ups in any order
leave request table, policy and ledger conserved."""

import random

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.examples import examples
from twinserve.backends.live.serving.attributes import RequestAttributes
from twinserve.backends.live.serving.decider import Decider, EngineState
from twinserve.backends.live.serving.options import EngineFacts, build_core, read_options
from twinserve.policies.requests import RequestClass

SIZE = 4  # tokens a block
POLICIES = {
    "vllm": {"policy": "vllm"},
    "priority": {"policy": "vllm:scheduling=priority"},
    "v0": {"policy": "vllm-v0:max_num_batched_tokens=64"},
    "bros": {"policy": "bros:chunk=8", "profile": "llama-3.1-8b@h100"},
    "round-robin": {"policy": "round-robin:chunk=8,kv=paged", "prefix_caching": True},
    "preemptive-wait": {"policy": "preemptive-wait"},
    "justitia": {"policy": "justitia:predictor=class-mean"},
    "srjf": {"policy": "srjf:predictor=class-mean"},
    "vllm-sjf": {"policy": "vllm-sjf"},
    "parrot": {"policy": "parrot"},
}


def decider_for(name: str) -> Decider:
    blocks = 38 if name == "round-robin" else 16  # half of the former is kept apart
    facts = EngineFacts(blocks, SIZE, 6, 24, 48, 1024, True)
    return Decider(build_core(read_options(POLICIES[name]), facts), slo_ttft_s=0.2, slo_tpot_s=0.1)


class Engine:
    """What vLLM would do: it computes what it is granted, and gives each request a token when it
    has caught up."""

    def __init__(self, decider: Decider, seed: int) -> None:
        self.decider = decider
        self.rng = random.Random(seed)
        self.texts: dict[str, list[int]] = {}
        self.left: dict[str, int] = {}  # output tokens
        self.computed: dict[str, int] = {}
        self.cached: set[tuple] = set()  # texts up to a block's end that were computed at some time
        self.prompts: dict[str, int] = {}  # tokens
        self.told: list[int] = []  # tokens of each whole answer
        self.arrived = self.ended = self.aborted = 0
        self.hits = self.misses = 0  # admissions that found what was planned, and less
        self.now = 0.0

    def hashes(self, name: str) -> list[tuple]:
        text = self.texts[name]
        return [tuple(text[:end]) for end in range(SIZE, len(text) + 1, SIZE)]

    def arrive(self) -> None:
        name = f"r{self.arrived:03d}"
        self.arrived += 1
        shared = list(range(SIZE * self.rng.randrange(4)))
        other = self.rng.choice(list(self.texts.values()) or [[]])
        start = self.rng.choice([shared, other[:30]])
        self.texts[name] = [
            *start,
            *(self.rng.randrange(9) for _ in range(self.rng.randrange(1, 9))),
        ]
        self.left[name], self.prompts[name] = self.rng.randrange(1, 8), len(self.texts[name])
        service_class = RequestClass(self.rng.randrange(2))
        app = self.rng.choice([None, "a", "b"])
        said = (
            {"app": app, "app_class": "CC", "app_requests": self.rng.choice([None, 3])}
            if app
            else {}
        )
        attributes = RequestAttributes(service_class, **said)
        self.decider.submit(
            name,
            len(self.texts[name]),
            attributes,
            self.now,
            self.rng.randrange(3),
            self.hashes(name),
        )

    def hang_up(self) -> None:
        if self.left:
            self.forget(self.rng.choice(sorted(self.left)))
            self.aborted += 1

    def forget(self, name: str) -> None:
        del self.left[name]
        self.decider.abort(name, self.now)

    def step(self, disturb: bool = False) -> int:
        """Plan and execute; returns the number of grants. disturb: somebody hangs up while the step
        runs, and one grant is not executed."""
        self.now += 0.01
        planned = self.decider.plan(self.now)
        for name, _ in planned.preempted:
            self.computed[name] = 0
        if not planned.grants:
            return 0
        skipped = self.rng.choice(list(planned.grants)) if disturb else None
        if disturb:
            self.hang_up()
        emitted, ended, states = set(), set(), {}
        for name, tokens in planned.grants.items():
            if name not in self.left:
                continue
            text = self.texts[name]
            if name in planned.hits:
                found = sum(text in self.cached for text in self.hashes(name)) * SIZE
                self.computed[name] = min(planned.hits[name], found)
                self.misses += self.computed[name] < planned.hits[name]
                self.hits += self.computed[name] > 0
            if name != skipped:
                self.computed[name] += tokens
                assert self.computed[name] <= len(text)
                self.cached.update(h for h in self.hashes(name) if len(h) <= self.computed[name])
                if self.computed[name] == len(text):
                    emitted.add(name)
                    text.append(self.rng.randrange(9))
                    self.left[name] -= 1
            if self.left[name]:
                states[name] = EngineState(self.computed[name], len(text), self.hashes(name))
            else:
                ended.add(name)
                del self.left[name]
                self.ended += 1
                self.told.append(len(text) - self.prompts.get(name, len(text)))
        self.decider.complete(self.now, emitted, ended, states)
        self.decider.check()
        return len(planned.grants)

    def drain(self) -> None:
        for _ in range(5000):
            if not self.left:
                return
            self.step()
        raise AssertionError(f"{len(self.left)} requests wait for ever")


@pytest.mark.parametrize("name", POLICIES)
@examples(60, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(
        st.sampled_from(["arrive", "arrive", "hang_up", "step", "step", "step", "disturb"]),
        max_size=60,
    ),
    seed=st.integers(0, 2**16),
)
def test_everything_is_conserved(name, events, seed):
    decider = decider_for(name)
    engine = Engine(decider, seed)
    for event in events:
        if event == "disturb":
            engine.step(disturb=True)
        else:
            getattr(engine, event)()
        decider.check()
    engine.drain()
    decider.check()
    assert decider.rows == {}
    assert decider.core.active == decider.core.holding == 0
    assert engine.arrived == engine.ended + engine.aborted


@pytest.mark.parametrize("name", POLICIES)
def test_a_faithful_engine_needs_no_restart(name):
    engine = Engine(decider_for(name), seed=3)
    for _ in range(60):
        if engine.rng.random() < 0.5:
            engine.arrive()
        if engine.rng.random() < 0.1:
            engine.hang_up()
        engine.step()
    engine.drain()
    assert engine.decider.restarts == engine.misses == 0
    assert engine.ended > 10
    assert engine.hits > 0 or not getattr(engine.decider.core.ledger, "prefix_caching", False)
    predicted = engine.decider.predictions
    if engine.decider.core.policy.predictor is None:
        assert predicted.requests == 0
    else:
        assert predicted.requests == engine.ended
        assert predicted.output_tokens == sum(engine.told)
        assert predicted.missed_tokens > 0


def test_an_answer_is_found_by_the_prompt_that_quotes_it():
    decider = decider_for("vllm")
    engine = Engine(decider, seed=0)
    decider.submit("first", 3, RequestAttributes(), 0.0)
    engine.texts["first"], engine.left["first"] = [1, 2, 3], 6
    engine.drain()
    # 9 tokens, of which 3 were the prompt
    engine.texts["second"], engine.left["second"] = engine.texts["first"], 1
    decider.submit("second", 9, RequestAttributes(), engine.now, 0, engine.hashes("second"))
    assert decider.plan(1.0).hits == {"second": 8}


def test_names_of_texts_that_are_nowhere_are_dropped():
    decider = decider_for("vllm")
    texts = decider.texts
    texts._most = 40
    engine = Engine(decider, seed=1)
    for i in range(60):
        engine.texts[f"x{i}"], engine.left[f"x{i}"] = [100 + i] * 12, 1
        decider.submit(f"x{i}", 12, RequestAttributes(), engine.now, 0, engine.hashes(f"x{i}"))
        engine.drain()
    assert len(texts._id_of) <= 43
    engine.texts["again"], engine.left["again"] = [159] * 12, 1
    decider.submit("again", 12, RequestAttributes(), engine.now, 0, engine.hashes("again"))
    assert decider.plan(9.0).hits == {"again": 8}


def test_defaults_for_objectives_are_for_real_time_requests_without():
    decider = decider_for("vllm")
    decider.submit("a", 5, RequestAttributes(), 0.0)
    decider.submit("b", 5, RequestAttributes(slo_ttft_s=3.0), 0.0)
    decider.submit("c", 5, RequestAttributes(RequestClass.BEST_EFFORT), 0.0)
    requests = decider.core.requests
    assert requests.slo_ttft_s[:2].tolist() == [0.2, 3.0]
    assert requests.slo_tpot_s[:2].tolist() == [0.1, 0.1]
    assert str(requests.slo_ttft_s[2]) == "nan"


def test_a_step_that_was_planned_ahead_begins_when_the_one_before_it_ended():
    """What a policy measures of it, and what it sees of the tokens under way, rest on that."""
    facts = EngineFacts(16, SIZE, 6, 24, 48, 1024, False)
    decider = Decider(build_core(read_options(POLICIES["vllm"]), facts, asynchronous=True))
    starts, core = [], decider.core
    core.policy.on_outcome = lambda outcome: starts.append(outcome.start_s)
    decider.submit("a", 6, RequestAttributes(), 0.0)
    assert decider.plan(1.0).grants == {"a": 6} and decider.plan(1.0).grants == {"a": 1}
    assert decider.complete(3.0, {"a"}, set(), {"a": EngineState(6, 7, ())}) == ""
    assert core.requests.last_token_s[0] == 3.0  # of the step that begins now
    assert decider.plan(3.0).grants == {"a": 1}
    assert decider.complete(4.0, {"a"}, set(), {"a": EngineState(7, 8, ())}) == ""
    assert starts == [1.0, 3.0]
