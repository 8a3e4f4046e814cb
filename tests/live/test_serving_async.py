"""Our asynchronous scheduler class, driven as vLLM's engine drives it: a step is scheduled before
the output of the one before it is known. Model outputs are made up, since vLLM's CPU workers cannot
run ahead."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.identity.build_vllm import _model_config
from tests.identity.real_scheduler import _vllm_hasher
from tests.identity.release import with_own_rules

pytestmark = [pytest.mark.live]

SIZE, SEATS, LONGEST, EOS = 16, 10, 320, 7
CASES = {
    "vllm": ({"policy": "vllm"}, 60),
    "bros": (
        {"policy": "bros", "profile": "llama-3.1-8b@h100", "slo_ttft_s": 0.4, "slo_tpot_s": 0.2},
        60,
    ),
    "bidirectional": (
        {
            "policy": "bros:kv=bidirectional",
            "profile": "llama-3.1-8b@h100",
            "slo_ttft_s": 0.4,
            "slo_tpot_s": 0.2,
        },
        130,
    ),
    "fit": (
        {
            "policy": "bros:chunk=fit,kv=paged",
            "profile": "llama-3.1-8b@h100",
            "slo_ttft_s": 0.4,
            "slo_tpot_s": 0.2,
            "prefix_caching": True,
        },
        130,
    ),
    "round-robin": ({"policy": "round-robin:chunk=50"}, 60),
}


def make_scheduler(options: dict, blocks: int):
    import torch
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from twinserve.backends.live.serving.scheduler import PolicyAsyncScheduler

    config = VllmConfig(
        model_config=_model_config(LONGEST),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SEATS,
            max_num_batched_tokens=96,
            max_model_len=LONGEST,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=SIZE, enable_prefix_caching=True),
        additional_config=with_own_rules(options),
    )
    config.cache_config.num_gpu_blocks = blocks + 1
    config.scheduler_config.async_scheduling = True  # vLLM's CPU platform turns it off
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    return PolicyAsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=SIZE,
        log_stats=False,
    )


class Engine:
    """Two batches under way at most, as in vLLM's step_with_batch_queue."""

    def __init__(self, scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.now = 0.0  # seconds; what is planned by time is the same on every machine
        scheduler.now = lambda: self.now
        self.rng = random.Random(seed)
        self.queue: deque = deque()
        self.requests: dict = {}
        self.hasher = _vllm_hasher(SIZE)
        self.aborted: set[str] = set()

    def send(self, prompt: list[int], output_tokens: int, stop: bool) -> str:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        name = f"r{len(self.requests):04d}"
        stops = [EOS] if stop else []
        parameters = SamplingParams(
            max_tokens=output_tokens, ignore_eos=True, temperature=0.0, stop_token_ids=stops
        )
        self.requests[name] = Request(
            name, prompt, parameters, None, arrival_time=0.0, block_hasher=self.hasher
        )
        self.scheduler.add_request(self.requests[name])
        return name

    def hang_up(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.aborted.add(name)

    def step(self) -> None:
        self.now += 0.004
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            # what the model will give: a token for all whose text is computed to its end
            ends = {n: not self.requests[n].is_prefill_chunk for n in output.num_scheduled_tokens}
            self.queue.append((output, ends))
            if len(self.queue) < 2 and output.total_num_scheduled_tokens:
                return
        if self.queue:
            self.take_output()

    def take_output(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        output, ends = self.queue.popleft()
        names = list(ends)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: i for i, name in enumerate(names)},
                sampled_token_ids=[
                    [self.rng.randrange(40)] if ends[name] else [] for name in names
                ],
            ),
        )
        self.scheduler.decider.check()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_the_engine_does_what_is_planned_ahead(vllm, case, seed):
    options, blocks = CASES[case]
    scheduler = make_scheduler(options, blocks)
    engine, rng = Engine(scheduler, seed), random.Random(seed)
    shared = [rng.randrange(40, 900) for _ in range(96)]
    while len(engine.requests) < 120 or scheduler.has_requests() or engine.queue:
        if len(engine.requests) < 120 and rng.random() < 0.3:
            prompt = shared[: SIZE * rng.randrange(7)] + [
                rng.randrange(40, 900) for _ in range(rng.randrange(1, 120))
            ]
            ended = [r for r in engine.requests.values() if r.is_finished()]
            if ended and rng.random() < 0.4:
                prompt = [*rng.choice(ended).all_token_ids, *prompt[:20]]
            engine.send(prompt[: LONGEST - 90], rng.randrange(1, 80), stop=rng.random() < 0.5)
        if rng.random() < 0.03 and (
            open_ := [n for n, r in engine.requests.items() if not r.is_finished()]
        ):
            engine.hang_up(rng.choice(open_))
        engine.step()
        assert scheduler.steps < 20_000
    assert scheduler.drift == 0, scheduler.first_drift
    assert scheduler.decider.restarts == 0
    assert scheduler.decider.rows == {}
    early = [r for r in engine.requests.values() if r.stop_reason == EOS]
    full = [
        r for n, r in engine.requests.items() if n not in engine.aborted and r.stop_reason is None
    ]
    assert len(early) > 10
    assert len(full) > 10
    assert all(
        r.num_output_tokens == min(r.max_tokens, LONGEST - r.num_prompt_tokens) for r in full
    )
    assert engine.aborted
    stats = scheduler.stats
    assert (stats.arrived, stats.aborted) == (120, len(engine.aborted))
    assert stats.finished == 120 - len(engine.aborted)
    assert stats.preempted > 0
    if scheduler.decider.core.ledger.prefix_caching:
        assert stats.hit_tokens > 0


def test_a_synchronous_engine_is_refused(vllm):
    from twinserve.backends.live.serving.engine import unsupported

    scheduler = make_scheduler({"policy": "vllm"}, 60)
    config = scheduler.vllm_config
    assert "--no-async-scheduling" in unsupported(config, asynchronous=False)
    assert unsupported(config, asynchronous=True) == ""
    config.scheduler_config.async_scheduling = False
    assert "--async-scheduling" in unsupported(config, asynchronous=True)
    assert unsupported(config, asynchronous=False) == ""
