"""The regimes in which policy `vllm` is compared with vLLM's scheduler (single engines, engines
with drafts, prefill apart from decode, a host tier of KV blocks), and many seeds of each:

    python -m tests.identity.regimes --of apart --steps 100000 --out remote-identity.json

The file has, by regime, the steps, how many differ, where the first one does, and how often each
phenomenon has happened. Exit code 1 where a step differs, or a phenomenon has not happened.
"""

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
from tests.identity.compare import compare as compare_single
from tests.identity.draft_scenarios import drafted
from tests.identity.drafts import compare_drafts
from tests.identity.leases import LeasingOurs, LeasingReal
from tests.identity.offload import TIER_REGIMES, TierRegime, compare_tiers
from tests.identity.protocol import Scenario
from tests.identity.remote import RemoteOurs, RemoteReal
from twinserve.backends.live.versions import installed_vllm
from twinserve.traces.write import write_atomically

CLASSES = ("preemption", "priority", "mixed", "partial_chunks")
LEAVING = 0.08  # of the steps, clients
_ON_D = (
    "loads", "pending", "arrived", "failed", "failed with a local hit", "aborted while pending",
    "aborted when it had come", "preempted after a load", "short of blocks",
)  # fmt: skip
_ON_P = (
    "kept", "fetched, or not wanted", "lease renewed", "lease over", "lease over while asked for",
    "asked for too late", "heartbeats", "decode engine dies", "preempted",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Regime:
    """recompute  what follows a failed load (`kv_load_failure_policy`)"""

    side: str
    asynchronous: bool
    recompute: bool = True

    @property
    def name(self) -> str:
        policy = ("recompute" if self.recompute else "fail",) if self.side == "decode" else ()
        scheduling = "asynchronous" if self.asynchronous else "synchronous"
        return ", ".join((self.side, scheduling, *policy))

    @property
    def phenomena(self) -> tuple[str, ...]:
        if self.side == "prefill":
            return (*_ON_P, *(("preempted, its token on the way",) * self.asynchronous))
        ahead = ("no victim, since computed", "freed a step later") * self.asynchronous
        return (*_ON_D, *(("ended by a failed load",) * (not self.recompute)), *ahead)


REGIMES = tuple(
    regime
    for asynchronous in (True, False)
    for regime in (
        Regime("decode", asynchronous, recompute=True),
        Regime("decode", asynchronous, recompute=False),
        Regime("prefill", asynchronous),
    )
)


def compare(regime: Regime, generate: str, seed: int, mutation=None) -> tuple[Report, Counter]:
    """mutation  of our side"""
    scenario = getattr(scenarios, generate)(seed)
    made: list[RemoteReal] = []
    if regime.side == "decode":
        make = lambda settings: RemoteReal(settings, recompute=regime.recompute)  # noqa: E731
        ours = lambda settings: RemoteOurs(settings, mutation, regime.recompute)  # noqa: E731
    else:
        scenario = _prompts_alone(scenario)
        make, ours = LeasingReal, lambda settings: LeasingOurs(settings, mutation)
    settings = dataclasses.replace(scenario.settings, async_scheduling=regime.asynchronous)

    def real(settings):
        made.append(make(settings))
        return made[0]

    report = run_identity(settings, scenario.requests, ours, leaving=LEAVING, make_real=real)
    seen = made[0].seen
    seen["preempted"] += report.preemptions
    seen["preempted, its token on the way"] += report.in_flight_preemptions
    return report, seen


def _prompts_alone(scenario: Scenario) -> Scenario:
    """One token each, and half the memory: what is kept fills it."""
    requests = [dataclasses.replace(r, output_tokens=1) for r in scenario.requests]
    settings, longest = scenario.settings, max(r.prompt_tokens for r in requests) + 1
    size = settings.block_tokens
    blocks = max(settings.num_blocks // 2, -(-longest // size) + 1)
    settings = dataclasses.replace(
        settings, num_blocks=blocks, max_model_len=min(settings.max_model_len, blocks * size)
    )
    return dataclasses.replace(scenario, settings=settings, requests=requests)


# -- single engines, and drafts --------------------------------------------------------------------
SINGLE = ("preemption", "prefix_eviction", "partial_chunks", "priority", "mixed")
LEAVES = 0.05  # of the steps, clients, in every third seed
KINDS = {
    f"{name}, {'asynchronous' if asynchronous else 'synchronous'}": (name, asynchronous)
    for name in SINGLE
    for asynchronous in (False, True)
}
# regime -> classes of scenarios, and whether scheduling is asynchronous
DRAFTS = {
    "preemption": (("preemption",), False),
    "chunks": (("partial_chunks",), False),
    "prefix cache": (("prefix_eviction", "mixed"), False),
    "priority": (("priority",), False),
    "asynchronous": (
        ("preemption", "partial_chunks", "prefix_eviction", "priority", "mixed"),
        True,
    ),
}


def leaving(seed: int) -> float:
    return LEAVES if seed % 3 == 2 else 0.0


def run_single(name: str, steps: int) -> dict:
    generate, asynchronous = KINDS[name]

    def one(generate: str, seed: int) -> tuple[Report, Counter]:
        report = compare_single(generate, seed, 1, leaving(seed), asynchronous)
        return report, Counter()

    found, _, _ = accumulated(one, (generate,), steps)
    return {"class": generate, "scheduling": name.rpartition(" ")[2]} | found


def run_drafts(name: str, steps: int) -> dict:
    classes, asynchronous = DRAFTS[name]

    def one(generate: str, seed: int) -> tuple[Report, Counter]:
        report, drafts = compare_drafts(
            drafted(generate, seed, asynchronous), leaving=leaving(seed)
        )
        return report, drafts

    found, total, drafts = accumulated(one, classes, steps)
    counters = dataclasses.asdict(total.counters) | drafts
    return {"regime": name} | found | {"counters": counters}


# -- many seeds ------------------------------------------------------------------------------------
def accumulated(
    one: Callable[[str, int], tuple[Report, Counter]], classes: Sequence[str], steps: int
) -> tuple[dict, Report, Counter]:
    """As many seeds of each class of scenarios as `steps` take; the first step that differs ends
    it."""
    total, seen = Report(), Counter()
    for seed in itertools.count():
        for generate in classes:
            report, more = one(generate, seed)
            if report.mismatches:
                report.first_mismatch = f"{generate}, seed {seed}: {report.first_mismatch}"
            total += report
            seen += more
        if total.steps >= steps or total.mismatches:
            break
    found = {name: getattr(total, name) for name in ("requests", "steps", "mismatches")}
    return {"seeds": seed + 1} | found | {"first_mismatch": total.first_mismatch}, total, seen


def run(regime: Regime | TierRegime, steps: int, compare: Callable = compare) -> dict:
    """compare: of the regime's set."""
    one = lambda generate, seed: compare(regime, generate, seed)  # noqa: E731
    found, _, seen = accumulated(one, CLASSES, steps)
    seen = {name: seen[name] for name in regime.phenomena}
    return {"regime": regime.name} | found | {"seen": seen}


# set -> by name of a regime, what runs it for so many steps
SETS: dict[str, dict[str, Callable[[int], dict]]] = {
    "single": {name: partial(run_single, name) for name in KINDS},
    "drafts": {name: partial(run_drafts, name) for name in DRAFTS},
    "apart": {regime.name: partial(run, regime) for regime in REGIMES},
    "tiers": {one.name: partial(run, one, compare=compare_tiers) for one in TIER_REGIMES},
}


def wrong(found: dict) -> list[str]:
    """One line for each thing that is, of the file's content."""
    lines = []
    for part in found.get("regimes") or found["classes"]:
        name = part.get("regime") or f"{part['class']}, {part['scheduling']}"
        if part["mismatches"] or not part["steps"]:
            lines.append(f"{name}: {part['mismatches']} of {part['steps']} steps differ")
        never = [seen for seen, times in part.get("seen", {}).items() if not times]
        lines += [f"{name}: {seen!r} has not happened" for seen in never]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", choices=SETS, default="apart", help="which set of regimes")
    parser.add_argument("--steps", type=int, default=100_000, help="at least, of each regime")
    parser.add_argument("--only", action="append", metavar="REGIME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    given = parser.parse_args()
    known, rows = SETS[given.of], []
    if unknown := {*(given.only or ())} - {*known}:
        parser.error(f"no regime {min(unknown)!r}; there are {', '.join(map(repr, known))}")
    for name in given.only or known:
        rows.append(known[name](given.steps))
        print(f"{name}: {rows[-1]['steps']} steps, {rows[-1]['mismatches']} differ", flush=True)
        found = {
            "vllm": installed_vllm(),
            "command": f"python -m tests.identity.regimes --of {given.of} --steps {given.steps}",
            **{key: sum(row[key] for row in rows) for key in ("steps", "mismatches")},
            "classes" if given.of == "single" else "regimes": rows,
        }
        write_atomically(given.out, (json.dumps(found, indent=2) + "\n").encode())
    lines = wrong(found)
    print("\n".join(lines) or "all of it held")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
