"""Two vLLM engines, each in a process of its own, hand real KV over: they decide as their simulated
replicas do, and answer as one engine would."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.live.apart import BLOCK, recorded
from twinserve.backends.live.apart.engine import Process
from twinserve.backends.live.apart.host import Part
from twinserve.backends.live.apart.shelf import shared_folder
from twinserve.backends.live.engine.engine import LiveSettings
from twinserve.backends.live.engine.tiny_model import VOCAB, write_model
from twinserve.sim.twin.apart import Recorded, run_apart

pytestmark = [pytest.mark.slow, pytest.mark.live]
LEASE = 30.0


@pytest.fixture(scope="module")
def folder(vllm):
    with shared_folder() as name:
        write_model(Path(name) / "model")
        yield Path(name)


class Damage:
    """Other values in one block of one prompt, while the prefill engine keeps it: of a request that
    completes, and whose text nobody shares."""

    def __init__(self, run: Recorded, kv: Path) -> None:
        self.run, self.kv = run, kv
        self.damaged = ""

    def __call__(self, name: str, params: dict) -> None:
        if not self.damaged and name in self._fit():
            from twinserve.backends.live.apart.shared import attach

            about = json.loads((self.kv / f"{params['remote_engine_id']}.json").read_text())
            for layer in about["layers"].values():
                attach(layer)[params["remote_block_ids"][0]] += 1.0
            self.damaged = name

    def _fit(self) -> set[str]:
        events = self.run.events
        completed = {n for e in events if e.replica and e.what == "end" for n in e.value}
        asked = {e.request: e.value for e in events if e.what == "submit" and not e.replica}
        first = {n: tuple(one.prefix[:1]) for n, one in asked.items() if one.prefix is not None}
        texts = list(first.values())
        alone = {n for n, text in first.items() if text and texts.count(text) == 1}
        return {n for n in alone & completed if asked[n].prompt_tokens > 64}


def test_engines_decide_as_simulated_and_a_damaged_block_alone_changes_an_answer(folder):
    """Memory is short, requests are preempted, prompts are cached in part on the decode engine, and
    clients leave."""
    run = recorded(requests=32, client_timeout=0.15, num_blocks=18)
    damage = Damage(run, folder / "kv")
    settings = LiveSettings(folder / "model", None, 0, 0, 0, 0)
    found = run_apart(run, settings, folder / "kv", on_kept=damage)
    assert found.differing == 0, found.first
    assert found.steps["prefill"] > 20 and found.steps["decode"] > 200 and found.polls > 0
    seen = found.seen
    assert seen["handed over"] == seen["loads"] == 32
    for what in ("preempted on decode", "left decode", "prefix hits of loads"):
        assert seen[what] > 0, what
    assert len(found.tokens) > 10
    assert damage.damaged and found.other_answers == [damage.damaged]
    assert not found.held


@pytest.fixture(scope="module")
def pair(folder):
    settings = LiveSettings(folder / "model", 40, BLOCK, 8, 128, 448)
    parts = [
        Part(name, role, folder / "pair", LEASE, True)
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    ]
    engines = [Process(settings, part) for part in parts]
    try:
        for engine in engines:
            assert engine.wait() == VOCAB
        yield engines
    finally:
        for engine in engines:
            engine.close()


def prompt(seed: int, tokens: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(1, VOCAB, tokens).tolist()


def answer(engine: Process, name: str, now: float) -> list[int]:
    """Stepped to the end of the request."""
    tokens: list[int] = []
    for _ in range(100):
        engine.step(now)
        ended = engine.end(now)
        tokens += ended.tokens.get(name, [])
        if name in ended.finished:
            return tokens
    raise AssertionError(f"{name} does not end")


def handed_over(engine: Process, name: str, seed: int, now: float) -> dict:
    engine.submit(name, prompt(seed), 1, now, {"do_remote_decode": True})
    engine.step(now)
    return engine.end(now).handed_over[name]


def free_at(engine: Process, now: float) -> int:
    """Blocks, when the engine has heard what happened until `now`."""
    engine.step(now)
    engine.end(now)
    left = engine.step(now).free_blocks
    engine.end(now)
    return left


def test_leases_run_out_are_renewed_and_loads_fail_or_are_given_up(pair):
    """Last of all the prefill engine dies. Times are those of the engines' common clock."""
    p, d = pair
    d.submit("own", prompt(1), 12, 0.0, None)
    expected = answer(d, "own", 0.0)  # computes its prompt itself

    params = handed_over(p, "late", 1, 0.0)
    assert free_at(p, LEASE - 1) == 36  # nobody asks
    assert free_at(p, LEASE) == 40
    d.submit("late", prompt(1), 12, LEASE, params)
    assert not d.step(LEASE).grants
    assert not d.land("late")
    d.end(LEASE)
    assert answer(d, "late", LEASE) == expected  # computed anew

    params = handed_over(p, "renewed", 1, 100.0)
    d.submit("renewed", prompt(1), 12, 125.0, params)  # with a heartbeat: 20 s more
    d.step(125.0)
    d.end(125.0)
    assert free_at(p, 140.0) == 36
    assert d.land("renewed")
    assert answer(d, "renewed", 141.0) == expected
    assert free_at(p, 141.0) == 40  # fetched

    d.submit("left", prompt(2), 12, 200.0, handed_over(p, "left", 2, 200.0))
    d.step(200.0)
    d.end(200.0)
    d.abort("left")
    assert free_at(d, 200.0) == 36 and free_at(p, 200.0) == 36  # the copy is under way
    assert d.land("left")
    assert free_at(d, 200.0) == 40 and free_at(p, 200.0) == 40

    d.submit("unasked", prompt(2), 12, 300.0, handed_over(p, "unasked", 2, 300.0))
    d.abort("unasked")  # before it has blocks
    assert free_at(p, 300.0) == 40

    params = handed_over(p, "orphan", 1, 400.0)
    p.kill()
    d.submit("orphan", prompt(1), 12, 400.0, params)
    d.step(400.0)
    assert not d.land("orphan")
    d.end(400.0)
    assert answer(d, "orphan", 400.0) == expected
