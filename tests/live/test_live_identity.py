"""The real engine - scheduler, model, KV tensors, sampled tokens - takes the decisions that policy
`vllm` takes on the paged ledger, step for step; and what it computes survives preemption.

The tests of one engine share one recorded run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.identity.mutations import RULES, MutationMisses, mutations
from tests.identity.protocol import EngineSettings
from tests.live.engine import LiveEngine, Output
from tests.live.replay import first_mismatch
from tests.live.workload import Recording, make_requests, record
from tests.parameters import mostly_nightly
from twinserve.backends.live.engine import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.live]

CONVERSATIONS, SEED = 80, 1
_SMALL = {
    "num_blocks": 40,  # 1,280 tokens: a third of what the ten seats would fill
    "block_tokens": 32,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 96,
    "max_model_len": 448,
    "enable_prefix_caching": True,
}
SETTINGS = {
    "fcfs": EngineSettings(**_SMALL),
    "priority": EngineSettings(
        **_SMALL,
        policy="priority",
        long_prefill_token_threshold=48,
        watermark=0.0745,  # 3 blocks of 41, the null block counted; it would be 2 of 40
    ),
}
# Rules that a run cannot show: they are off, or apply to the other queue.
NOT_SHOWN = {"fcfs": {"chunk cap", "watermark"}, "priority": {"resumption order"}}

# Float32 sums taken in another order may turn an argmax whose margin is smaller than this, and may
# move a logprob by less than that. (As measured on x86 with one thread, they moved nothing.)
TIE = 1e-4
LOGPROB_TOLERANCE = 1e-3


@dataclass
class Live:
    engine: LiveEngine
    recording: Recording

    def alone(self, name: str, prompt: list[int], output_tokens: int) -> Output:
        """The answer to `prompt` with the engine to itself and nothing cached."""
        engine = self.engine
        engine.forget_prefixes()
        engine.submit(name, prompt, output_tokens)
        while engine.unfinished:
            assert not engine.step().preempted
        return engine.outputs.pop(name)


@pytest.fixture(scope="module", params=mostly_nightly(SETTINGS, "fcfs"))
def live(request, vllm, tmp_path_factory) -> Iterator[Live]:
    settings = SETTINGS[request.param]
    with contextlib.closing(
        LiveEngine(settings, tiny_model.write_model(tmp_path_factory.mktemp("tiny_llama")))
    ) as engine:
        yield Live(
            engine, record(engine, make_requests(settings, conversations=CONVERSATIONS, seed=SEED))
        )


def test_every_decision_is_ours(live, record_testsuite_property, capsys):
    seen = live.recording.summary()
    policy = live.recording.settings.policy
    for name, value in seen.items():
        record_testsuite_property(f"live.{policy}.{name}", value)
    with capsys.disabled():
        print(f"\nlive vLLM engine, {policy}: " + ", ".join(f"{k} {v}" for k, v in seen.items()))
    assert first_mismatch(live.recording) == ""
    assert seen["steps"] >= 300
    assert seen["preemptions"] >= 20
    assert seen["evictions"] >= 100
    for name in ("partial_chunks", "hit_tokens", "resumed_hit_tokens", "duplicates"):
        assert seen[name] > 0, name
    # a later turn found blocks that hold an earlier answer: real tokens, not known beforehand
    assert seen["answer_hit_tokens"] > 0
    assert (seen["middle_victims"] > 0) == (policy == "priority")


@pytest.mark.nightly
def test_a_broken_rule_of_ours_would_show(live):
    policy = live.recording.settings.policy
    caught = set()
    for mutation in mutations("ours"):
        try:
            caught |= {mutation.rule} if first_mismatch(live.recording, mutation) else set()
        except MutationMisses:
            continue  # a rule of the other policy's queue
    assert caught >= set(RULES) - NOT_SHOWN[policy]


def test_answers_are_those_of_an_undisturbed_run(live):
    recording = live.recording
    granted, found = work(recording)
    victims = recording.victims
    recomputed = ties = compared = 0
    for number, sent in enumerate(recording.submitted):
        name, output_tokens = sent.request.name, sent.request.output_tokens
        if name not in victims and number % 3:
            continue
        output = recording.outputs[name]
        assert len(output.tokens) == output_tokens
        verdict = same_answer(live.alone(f"{name}.alone", sent.prompt, output_tokens), output)
        assert verdict in ("same", "tie"), f"{name}: {verdict}"
        ties += verdict == "tie"
        compared += 1
        needed = len(sent.prompt) + output_tokens - 1  # the last token is never computed
        recomputed += granted[name] + found[name] > needed
    assert recomputed >= 15  # requests that computed part of their text twice
    assert compared - ties >= 0.95 * compared


def work(recording: Recording) -> tuple[dict[str, int], dict[str, int]]:
    """By request: tokens granted over the whole run, and tokens found cached at the first
    admission."""
    granted: dict[str, int] = {}
    found: dict[str, int] = {}
    for step in recording.steps:
        for name, tokens in step.scheduled.items():
            granted[name] = granted.get(name, 0) + tokens
        for name, hit in step.hits.items():
            found.setdefault(name, hit)
    return granted, found


def same_answer(alone: Output, output: Output) -> str:
    """'same', 'tie' (they part where the best two tokens are as good as equal), or the fault."""
    for position, (a, b) in enumerate(zip(alone.tokens, output.tokens, strict=True)):
        if a != b:
            margin = alone.margin(position)
            return "tie" if margin < TIE else f"token {position} is {b}, alone {a} by {margin:.2g}"
        moved = abs(alone.logprob(position) - output.logprob(position))
        if moved > LOGPROB_TOLERANCE:
            return f"the logprob of token {position} moved by {moved:.2g}"
    return "same"


def test_the_model_does_not_babble(live):
    """Constant or repeating answers would make the comparison of tokens above prove nothing."""
    outputs = live.recording.outputs
    assert min(len(set(output.tokens)) for output in outputs.values()) > 8
    assert len({token for output in outputs.values() for token in output.tokens}) > 256
    answers = {
        tuple(s.prompt): outputs[s.request.name].tokens[:16] for s in live.recording.submitted
    }
    assert len({tuple(answer) for answer in answers.values()}) == len(answers)


def test_one_corrupted_kv_slot_changes_the_answer(live):
    """So equal answers do mean that every request read its own KV."""
    import torch

    engine = live.engine
    prompt = live.recording.submitted[0].prompt
    undisturbed = live.alone("undisturbed", prompt, 40)
    engine.forget_prefixes()
    engine.submit("corrupted", prompt, 40)
    emitted = 0
    while emitted < 8:
        before = [tensor.clone() for tensor in engine.kv_tensors]
        emitted += engine.step().scheduled == {"corrupted": 1}  # a decode step: it writes one slot
    for tensor, old in zip(engine.kv_tensors, before, strict=True):
        slot = tensor != old
        tiny = tiny_model.MODELS["tiny"]
        assert int(slot.sum()) == 2 * tiny.kv_heads * tiny.head_dim
        tensor[slot] = 4 * torch.flip(tensor[slot], (0,))
    while engine.unfinished:
        engine.step()
    corrupted = engine.outputs.pop("corrupted")
    parted = next(
        i
        for i, (a, b) in enumerate(zip(undisturbed.tokens, corrupted.tokens, strict=True))
        if a != b
    )
    # one token came of the prompt, one of each decode step before the slot was written over
    assert parted >= emitted + 1
    moved = abs(undisturbed.margin(emitted + 1) - corrupted.margin(emitted + 1))
    assert moved > LOGPROB_TOLERANCE
    engine.forget_prefixes()
