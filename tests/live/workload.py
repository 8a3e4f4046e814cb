"""Seeded requests of token ids: shared system prompts, twins, and later turns of a conversation
that repeat what the engine really answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.identity.protocol import EngineSettings, Observed
from tests.live.engine import LiveEngine, Output
from twinserve.backends.live.engine.tiny_model import VOCAB


@dataclass(frozen=True)
class LiveRequest:
    """after  name of the turn before: the prompt is that one's prompt, its answer and `tokens`
    step   submitted before this engine step; with `after`, that many steps after its end
    """

    name: str
    tokens: list[int] = field(repr=False)
    output_tokens: int
    step: int
    after: str | None = None
    priority: int = 0


@dataclass(frozen=True)
class Submitted:
    """A request as it was really submitted; `arrival` in seconds: one a step, so there are ties."""

    step: int
    request: LiveRequest
    prompt: list[int] = field(repr=False)
    arrival: float


@dataclass
class Recording:
    """A run of the live engine: what went in before which step, what each step decided, what came
    out."""

    settings: EngineSettings
    submitted: list[Submitted]
    steps: list[Observed]
    outputs: dict[str, Output]
    evictions: int
    duplicates: int
    partial_chunks: int

    @property
    def victims(self) -> set[str]:
        return {name for step in self.steps for name in step.preempted}

    def summary(self) -> dict[str, int]:
        """How often what the run is for has happened; tokens where it says so."""
        size = self.settings.block_tokens
        sent = {s.request.name: s for s in self.submitted}
        returning: set[str] = set()
        hits = resumed_hits = answer_hits = middle_victims = 0
        batch: tuple[str, ...] = ()
        for step in self.steps:
            for victim in step.preempted:
                middle_victims += batch[-1] != victim
                batch = tuple(name for name in batch if name != victim)
                returning.add(victim)
            for name, hit in step.hits.items():
                if name in returning:
                    resumed_hits += hit
                    continue
                hits += hit
                before = sent[name].request.after
                if before is not None:
                    answer_hits += max(0, hit - len(sent[before].prompt) // size * size)
            batch = step.running
        return {
            "steps": len(self.steps),
            "requests": len(self.submitted),
            "granted_tokens": sum(sum(step.scheduled.values()) for step in self.steps),
            "preemptions": sum(len(step.preempted) for step in self.steps),
            "middle_victims": middle_victims,
            "evictions": self.evictions,
            "partial_chunks": self.partial_chunks,
            "hit_tokens": hits,
            "resumed_hit_tokens": resumed_hits,
            "answer_hit_tokens": answer_hits,  # text of an earlier answer, found by the next turn
            "duplicates": self.duplicates,
        }


def make_requests(settings: EngineSettings, conversations: int, seed: int) -> list[LiveRequest]:
    """`conversations` first turns, some of them twins, and their later turns.

    No request outgrows `settings.max_model_len`: answers have the length asked for, since no token
    ends one.
    """
    rng = np.random.default_rng(seed)

    def text(tokens: int) -> list[int]:
        return rng.integers(0, VOCAB, tokens).tolist()

    systems = [text(int(rng.integers(40, 150))) for _ in range(3)]
    made: list[LiveRequest] = []

    def add(**values) -> LiveRequest:
        made.append(LiveRequest(f"r{len(made):03d}", priority=int(rng.integers(0, 3)), **values))
        return made[-1]

    step = 0
    for _ in range(conversations):
        step += int(rng.integers(0, 24)) if rng.random() < 0.6 else 0
        shared = systems[int(rng.integers(len(systems)))] if rng.random() < 0.7 else []
        tokens = shared + text(int(rng.integers(8, 130)))
        if rng.random() < 0.4:  # whole blocks: a twin finds all of them, and must leave a token
            tokens = tokens[: max(1, len(tokens) // settings.block_tokens) * settings.block_tokens]
        output = int(rng.integers(16, 100))
        turn = add(tokens=tokens, output_tokens=output, step=step)
        length = len(tokens) + output
        if rng.random() < 0.2:  # the same prompt again, at once or soon
            add(tokens=tokens, output_tokens=output + 8, step=step + int(rng.integers(0, 3)))
        while rng.random() < 0.5:
            fresh, output = text(int(rng.integers(4, 60))), int(rng.integers(16, 60))
            length += len(fresh) + output
            if length > settings.max_model_len:
                break
            pause = int(rng.integers(0, 6))
            turn = add(tokens=fresh, output_tokens=output, step=pause, after=turn.name)
    add(tokens=text(300), output_tokens=16, step=1 << 20)  # alone, long after all others
    return made


def record(engine: LiveEngine, requests: list[LiveRequest]) -> Recording:
    """Run `requests` on `engine` to the last token. Steps in which nothing is unfinished are
    skipped: the clock jumps to the next arrival."""
    scheduler = engine.scheduler
    counted = ("evictions", "duplicates", "partial_chunks")
    start = {name: getattr(scheduler, name) for name in counted}
    due = [(request.step, i) for i, request in enumerate(requests) if request.after is None]
    next_turns: dict[str, list[int]] = {}
    for i, request in enumerate(requests):
        if request.after is not None:
            next_turns.setdefault(request.after, []).append(i)
    prompts: dict[str, list[int]] = {}
    submitted: list[Submitted] = []
    steps: list[Observed] = []
    clock = 0
    while due or engine.unfinished:
        due.sort()
        if not engine.unfinished:
            clock = max(clock, due[0][0])
        while due and due[0][0] <= clock:
            request = requests[due.pop(0)[1]]
            prompt = request.tokens
            if request.after is not None:
                prompt = prompts[request.after] + engine.outputs[request.after].tokens + prompt
            prompts[request.name] = prompt
            submitted.append(Submitted(len(steps), request, prompt, float(clock)))
            engine.submit(
                request.name, prompt, request.output_tokens, request.priority, float(clock)
            )
        steps.append(engine.step())
        for name in steps[-1].finished:
            due += [(clock + requests[i].step, i) for i in next_turns.get(name, ())]
        clock += 1
    return Recording(
        engine.limits,
        submitted,
        steps,
        {s.request.name: engine.outputs[s.request.name] for s in submitted},
        **{name: getattr(scheduler, name) - start[name] for name in counted},
    )
