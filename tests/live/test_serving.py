"""Our scheduler classes in a vLLM engine of this process: what they plan is what vLLM does, however
requests end, and also if a step is planned before the last one's tokens are known. The GPU is
emulated, and its steps take no time: what answers say is `test_twin.py`'s."""

import random
from collections.abc import Iterator

import pytest

from tests.identity.release import with_own_rules
from twinserve.backends.live.emulate.model import VOCAB, write_model
from twinserve.backends.live.emulate.settings import EXECUTOR, KEY, WORKER, emulated
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.serving import scheduler_class

pytestmark = [pytest.mark.slow, pytest.mark.live]

PROFILE = "llama-3.1-8b@h100"
BLOCKS, SEATS, SIZE, LONGEST = 40, 10, 32, 448
# Who keeps prefixes by vLLM's rules, or none, has the engine's pool to the block; the others' pool
# never binds. Whole prompts of bros do not go into one step of this engine (96 tokens), so their
# plans take several.
BROS = {"profile": PROFILE, "slo_ttft_s": 0.4, "slo_tpot_s": 0.2}
FIT = {"policy": "bros:chunk=fit,kv=paged", "prefix_caching": True}
CASES = {
    "vllm": ({"policy": "vllm"}, BLOCKS),
    "bros": ({"policy": "bros", **BROS}, BLOCKS),
    "bidirectional": ({"policy": "bros:kv=bidirectional", **BROS}, 2 * BLOCKS + SEATS),
    "fit": ({**FIT, **BROS}, 2 * BLOCKS + SEATS),
    "round-robin": ({"policy": "round-robin:chunk=50"}, BLOCKS),
}


class NoTime:
    """A pace of which no step takes time."""

    def launch(self, seconds: float, goes_on: bool) -> float:
        return 0.0

    def wait(self, end_s: float) -> None:
        pass


class Served:
    """The engine, its scheduler, and what its requests were told."""

    def __init__(self, case: str, asynchronous: bool, folder) -> None:
        options, blocks = CASES[case]
        config = SimulationConfig(
            profile=PROFILE, num_blocks=blocks, block_tokens=SIZE, async_scheduling=asynchronous
        )
        hardware = resolve_hardware(config)
        gpu = emulated(config, hardware).model_dump()
        options = {"clients": "trusted", KEY: gpu, **with_own_rules(options)}
        settings = LiveSettings(
            write_model(folder, hardware.profile.llm, LONGEST, VOCAB),
            blocks,
            SIZE,
            SEATS,
            96,
            LONGEST,
            weights="dummy",
            dtype="bfloat16",
            prefix_caching=True,
            scheduler=scheduler_class(asynchronous),
            extra={
                "worker_cls": WORKER,
                "distributed_executor_backend": EXECUTOR,
                "additional_config": options,
            },
        )
        self.asynchronous = asynchronous
        self.engine = VllmEngine(settings)
        self.engine.worker.pace = NoTime()
        self.core = self.engine._client.engine_core
        self.scheduler = self.engine.scheduler
        self.decider = self.scheduler.decider
        self.stats = self.scheduler.stats
        self.answers: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.sent = 0
        self.now = 0.0  # seconds; what is planned by time is the same on every machine
        self.scheduler.now = lambda: self.now

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
        self.cycle()
        self.decider.check()

    def cycle(self) -> None:
        self.now += 0.004
        answer = self.engine.step(PlannedStep())
        for name, tokens in answer.tokens.items():
            self.answers[name] += tokens
        for name in answer.finished:
            self.reasons[name] = "finished"

    def drain(self) -> None:
        for _ in range(4000):
            if not self.scheduler.has_requests():
                assert not self.open
                assert self.decider.rows == {}
                return
            self.step()
        raise AssertionError(f"{self.open} do not end")


DAILY = [("vllm", False), ("bros", True), ("fit", False), ("fit", True)]
KINDS = [(case, asynchronous) for case in CASES for asynchronous in (False, True)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, id="-".join((kind[0], "ahead" if kind[1] else "in turn")), marks=marks)
        for kind, marks in ((k, () if k in DAILY else pytest.mark.nightly) for k in KINDS)
    ],
)
def served(request, vllm, tmp_path_factory) -> Iterator[Served]:
    served = Served(*request.param, tmp_path_factory.mktemp("model"))
    try:
        yield served
    finally:
        served.engine.close()


def text(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(tokens)]


def test_the_engine_does_what_is_planned(served):
    rng = random.Random(5)
    shared, prompts, lengths, stops = text(rng, 128), {}, {}, {}
    before = served.stats.preempted
    while len(prompts) < 120 or served.open:
        if len(prompts) < 120 and rng.random() < 0.4:
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
            some = rng.sample(range(VOCAB), 200) if rng.random() < 0.5 else []
            name = served.send(prompt[: LONGEST - 60], tokens, attributes, stop_token_ids=some)
            prompts[name], lengths[name], stops[name] = prompt[: LONGEST - 60], tokens, some
        if served.open and rng.random() < 0.03:
            served.hang_up(rng.choice(served.open))
        served.step()
    served.drain()
    assert served.scheduler.drift == 0, served.scheduler.first_drift
    assert served.decider.restarts == 0
    finished = [name for name in prompts if served.reasons[name] == "finished"]
    early = [name for name in finished if len(served.answers[name]) < lengths[name]]
    assert all(served.answers[name][-1] in stops[name] for name in early)
    assert len(finished) > 60 and len(early) > 10
    assert len(finished) < len(prompts)  # somebody did hang up
    assert served.stats.preempted > before
    assert served.decider.core.ledger.num_blocks == BLOCKS
    if served.decider.core.ledger.prefix_caching:
        assert served.stats.hit_tokens > 1000
    assert (
        served.stats.arrived == served.stats.finished + served.stats.aborted + served.stats.refused
    )


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
    if served.asynchronous:  # the step under way
        served.cycle()
        so_far += 1
    served.cycle()
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


def test_an_engine_of_the_other_kind_is_refused(served):
    from twinserve.backends.live.serving.engine import unsupported

    config, ahead = served.scheduler.vllm_config, served.asynchronous
    assert unsupported(config, asynchronous=ahead) == ""
    flag = "--no-async-scheduling" if ahead else "--async-scheduling"
    assert flag in unsupported(config, asynchronous=not ahead)
