"""The regimes in which prefill apart from decode is compared with vLLM, or a host tier of KV
blocks (tests/identity/offload.py), and many seeds of each:

    python -m tests.identity.regimes --steps 100000 --out docs/results/remote-identity.json
    python -m tests.identity.regimes --of tiers --steps 100000 --out tiers.json

The file has, by regime, the steps, how many differ, and how often each phenomenon has happened.
Exit code 1 where a step differs, or a phenomenon has not happened.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.identity import scenarios
from tests.identity.compare import Report, run_identity
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


SETS: dict[str, tuple[Sequence[Regime | TierRegime], Callable]] = {
    "apart": (REGIMES, compare),
    "tiers": (TIER_REGIMES, compare_tiers),
}


def run(regime: Regime | TierRegime, steps: int, compare: Callable = compare) -> dict:
    """As many seeds of each class of scenarios as `steps` take; the first step that differs ends
    it. compare: of the regime's set."""
    total, seen = Report(), Counter()
    for seed in itertools.count():
        for generate in CLASSES:
            report, more = compare(regime, generate, seed)
            if report.mismatches:
                report.first_mismatch = f"{generate}, seed {seed}: {report.first_mismatch}"
            total += report
            seen += more
        if total.steps >= steps or total.mismatches:
            break
    return {
        "regime": regime.name,
        "seeds": seed + 1,
        "requests": total.requests,
        "steps": total.steps,
        "mismatches": total.mismatches,
        "first_mismatch": total.first_mismatch,
        "seen": {name: seen[name] for name in regime.phenomena},
    }


def wrong(found: dict) -> list[str]:
    """One line for each thing that is, of the file's content."""
    lines = []
    for part in found["regimes"]:
        if part["mismatches"] or not part["steps"]:
            lines.append(f"{part['regime']}: {part['mismatches']} of {part['steps']} steps differ")
        never = [name for name, times in part["seen"].items() if not times]
        lines += [f"{part['regime']}: {name!r} has not happened" for name in never]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--of", choices=SETS, default="apart", help="which set of regimes")
    parser.add_argument("--steps", type=int, default=100_000, help="at least, of each regime")
    parser.add_argument("--only", action="append", metavar="REGIME", help="default: all")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    given = parser.parse_args()
    regimes, compared = SETS[given.of]
    known = {regime.name: regime for regime in regimes}
    if unknown := {*(given.only or ())} - {*known}:
        parser.error(f"no regime {min(unknown)!r}; there are {', '.join(map(repr, known))}")
    found: dict = {"vllm": installed_vllm(), "classes": CLASSES, "regimes": []}
    for name in given.only or known:
        found["regimes"].append(run(known[name], given.steps, compared))
        print("{regime}: {steps} steps, {mismatches} differ".format(**found["regimes"][-1]))
        write_atomically(given.out, (json.dumps(found, indent=2) + "\n").encode())
    lines = wrong(found)
    print("\n".join(lines) or "all of it held")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
