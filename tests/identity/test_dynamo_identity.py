"""Our router `dynamo-kv` beside Dynamo's own (ai-dynamo 1.4.2), in a replay that Dynamo makes of a
trace. Ours is fed the real one's picks and events; what both say each candidate costs is compared.

Where several workers cost the least the real one takes any of them. How often is counted.
"""

from dataclasses import dataclass

import pytest

from tests.identity.dynamo_router import BLOCK, Pick, replayed, trace
from tests.parameters import mostly_nightly
from tests.sim.routing import Scene, prompt
from twinserve.sim.fleet.routers import dynamo
from twinserve.sim.fleet.routers.dynamo import DynamoKv
from twinserve.sim.fleet.routers.registry import parse_router

pytestmark = pytest.mark.slow
WORKERS = 4
EXACT = 0.00051  # costs are logged with three digits
SETTINGS = {
    "defaults": ("dynamo-kv", {}),
    "half the credit": ("dynamo-kv:credit=0.5", {"overlap_score_credit": 0.5}),
    "weights": (
        "dynamo-kv:credit=0.25,scale=2,request_weight=1.5",
        {
            "overlap_score_credit": 0.25,
            "prefill_load_scale": 2.0,
            "decode_active_request_weight": 1.5,
        },
    ),
}


@dataclass
class Found:
    """picks; costs: candidates' costs that are the real ones; best: picks that cost the least of
    all here too; ties: picks where several do; computing: picks while some worker had a prompt to
    compute."""

    picks: int = 0
    costs: int = 0
    best: int = 0
    ties: int = 0
    computing: int = 0


def compared(picks: list[Pick], router: DynamoKv, told: bool = False) -> Found:
    """told: what is cached the real one says, as where memory is short and KV blocks go. Otherwise
    ours finds it out: a prompt's blocks can be found from its admission on."""
    scene, found, requests = Scene(router, WORKERS, blocks=10**6, block=BLOCK), Found(), {}
    if told:
        router._prefixes = Told(router._prefixes)
    for what, at in in_time(picks):
        pick = picks[at]
        if what == "sent":
            request = requests[at] = prompt(*pick.blocks, tokens=pick.tokens, block=BLOCK)
            if told:
                router._prefixes.cached = [round(blocks) for blocks in pick.cached]
            note(found, pick, router.costs(request, scene.view))
            found.computing += any(a.prefill_tokens for a in router._active.values())
            scene.view.in_flight[pick.worker] += 1
            router.on_dispatched(request, pick.worker)
        elif what == "admitted" and pick.blocks:
            scene.stored(pick.worker, *pick.blocks)
        elif what == "first":
            scene.first_token(requests[at], pick.worker)
        elif what == "ended":
            scene.end(requests[at], pick.worker)
    return found


def in_time(picks: list[Pick]) -> list[tuple[str, int]]:
    """What happened, in its order: at one instant first tokens and ends come before arrivals."""
    events = []
    for at, pick in enumerate(picks):
        events += [
            (pick.first_s, 0, at, "first"),
            (pick.ended_s, 1, at, "ended"),
            (pick.sent_s, 2, at, "sent"),
            (pick.admitted_s, 3, at, "admitted"),
        ]
    return [(what, at) for _, _, at, what in sorted(events)]


def note(found: Found, pick: Pick, costs: list[float]) -> None:
    least = min(costs)
    found.picks += 1
    found.costs += sum(abs(a - b) < EXACT for a, b in zip(costs, pick.costs, strict=True))
    found.best += costs[pick.worker] - least < EXACT
    found.ties += sum(cost - least < EXACT for cost in costs) > 1


class Told:
    """Prefixes of which the real router says how much is where."""

    def __init__(self, prefixes) -> None:
        self._prefixes, self.cached = prefixes, [0] * WORKERS

    def matched(self, request, view):
        return dict(enumerate(self.cached))

    def matched_at(self, request, replica, view):
        return self.cached[replica]

    def __getattr__(self, name):
        return getattr(self._prefixes, name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    kept: dict[tuple, list[Pick]] = {}

    def run(setting: str, num_blocks: int = 200_000) -> tuple[list[Pick], DynamoKv]:
        text, options = SETTINGS[setting]
        if (setting, num_blocks) not in kept:
            file = trace(tmp_path_factory.mktemp("dynamo") / "trace.jsonl", 1_000, seed=1)
            kept[setting, num_blocks] = replayed(file, WORKERS, num_blocks, **options)
        return kept[setting, num_blocks], parse_router(text).build()

    return run


@pytest.mark.parametrize("setting", mostly_nightly(SETTINGS, "weights"))
def test_every_candidate_of_1_000_picks_costs_what_dynamo_says(runs, setting):
    found = compared(*runs(setting))
    assert found.picks == found.best == 1_000
    assert found.costs == 1_000 * WORKERS
    assert found.ties < 50 and found.computing > 500


def test_costs_are_dynamos_where_memory_is_short_too(runs):
    picks, ours = runs("defaults", num_blocks=1_500)
    found = compared(picks, ours, told=True)
    assert found.picks == found.best == 1_000
    assert found.costs == 1_000 * WORKERS
    # blocks did go: ours, which nobody tells, believes in more of them
    assert compared(picks, runs("defaults")[1]).costs < 1_000 * WORKERS


# -- differences that would be seen ----------------------------------------------------------------
class CreditOfActive(DynamoKv):
    """The credit counts for prompts under way too."""

    def on_dispatched(self, request, replica):
        super().on_dispatched(request, replica)
        active = self._active[replica]
        more = (1 - self.options.credit) * (request.prompt_tokens - active.prefill[request])
        active.prefill[request] += more
        active.prefill_tokens += more


class UntilTheEnd(DynamoKv):
    """A prompt counts as one to compute after its first token too."""

    def on_first_token(self, request, replica):
        pass


class WithoutSharing(DynamoKv):
    """Blocks that requests share count for each."""

    def costs(self, request, view):
        least = super().costs(request, view)
        shared = [self._active[i].new(*dynamo._blocks(request, BLOCK)) for i in view.up]
        return [
            cost + request.prompt_tokens // BLOCK - new
            for cost, new in zip(least, shared, strict=True)
        ]


class WholePrompts(DynamoKv):
    """What is cached of a prompt under way is not taken off."""

    def on_dispatched(self, request, replica):
        super().on_dispatched(request, replica)
        active = self._active[replica]
        active.prefill_tokens += request.prompt_tokens - active.prefill[request]
        active.prefill[request] = request.prompt_tokens


BREAKS = (CreditOfActive, UntilTheEnd, WithoutSharing, WholePrompts)


@pytest.mark.parametrize("wrong", BREAKS)
def test_a_difference_from_dynamo_would_be_seen(runs, wrong):
    picks, right = runs("half the credit")
    found = compared(picks, wrong(right.options))
    assert found.costs < 1_000 * WORKERS - 100
    assert found.best < 1_000
