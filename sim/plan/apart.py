"""Prefill apart from decode beside a fleet of equal replicas: with how few of the same GPUs it
keeps the same objectives."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from twinserve.policies.registry import ledger_class, parse_policy
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.closer import Sized, drawn
from twinserve.sim.plan.peaks import Peak
from twinserve.sim.plan.sizes import Size, Trials, on_peaks
from twinserve.sim.plan.staircase import Answer, Split, staircase
from twinserve.sim.plan.trial import Trial
from twinserve.sim.results.options import Objective
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.fleet_file import of_roles
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.offered_load import prompt_seconds, service_seconds
from twinserve.traces.workload import Workload

TIMES = 2  # as many replicas as the aggregated fleet has, at most


@dataclass(frozen=True)
class Apart:
    """The smallest fleet with prefill apart from decode, beside an aggregated one of the same kind.

    aggregated  replicas of that one
    most        replicas of both roles together that were tried at most
    split       None: none of up to `most` keeps the objectives
    sized       of the split: its trials to their ends, on all peaks
    tried       splits, in order
    """

    candidate: Candidate
    aggregated: int
    most: int
    split: Split | None
    sized: Sized | None
    tried: tuple[Split, ...]

    @property
    def gpus(self) -> int | None:
        return None if self.split is None else self.split.total * self.candidate.tp

    @property
    def usd_per_hour(self) -> float | None:
        one = self.candidate.usd_per_hour
        return None if one is None or self.split is None else one * self.split.total


def check_apart(policies: Sequence[str], survive: int) -> None:
    """Raises SettingsError for what prefill apart from decode is not planned with."""
    if survive:
        raise SettingsError(
            "--prefill-decode: replicas that fail are planned for in fleets of equal ones alone; "
            "drop it, or --survive"
        )
    if not any(map(_hands_over, policies)):
        raise SettingsError(
            "--prefill-decode: only policy vllm, with kv=paged, has a decode side; add --policy "
            "vllm, or drop it"
        )


def splits(candidate: Candidate) -> bool:
    """Whether its policy can serve prompts and outputs apart."""
    return _hands_over(candidate.policy)


def _hands_over(policy: str) -> bool:
    spec = parse_policy(policy)
    waits = spec.policy.decodes_for_others() is not None
    return waits and ledger_class(spec.kv_name).hands_over


def smallest_split(
    size: Size, n: int, objectives: Sequence[Objective], draws: int
) -> Generator[Any, Trial, Apart]:
    """Trials, until the smallest fleet of the kind that `size` has is known; `n` aggregated ones
    are enough. Of the split that is found every draw is run to its end."""
    candidate, peaks = size.candidate, size.peaks
    most = min(max(TIMES * n, 2), size.most)
    found, trials = None, {}
    if most >= 2:
        walk = staircase(_guess(candidate.hardware, peaks), most)
        try:
            split = next(walk)
            while True:
                trials[split] = yield from _on_peaks(candidate, peaks, split)
                split = walk.send(_answer(trials[split], objectives))
        except StopIteration as end:
            found = end.value
    sized = None
    if found is not None:
        known = Size(candidate, peaks, 1, 1, most, None, {found.total: trials[found]})
        sized = yield from drawn(known, objectives, found.total, draws, fleet=str(found))
    return Apart(candidate, n, most, found, sized, tuple(trials))


def _on_peaks(candidate: Candidate, peaks: Sequence[Peak], split: Split) -> Trials:
    return on_peaks(candidate, peaks, split.total, fleet=str(split))


def _answer(trials: Sequence[Trial], objectives: Sequence[Objective]) -> Answer:
    late = {objectives[i].metric for trial in trials for i in trial.missed}
    return Answer(all(trial.keeps for trial in trials), of_decode=late == {"tpot"})


def _guess(hardware: Hardware, peaks: Sequence[Peak]) -> Split:
    """Replicas that would be busy all the time with prompts, and with outputs."""
    prefill = decode = 1
    for peak in peaks:
        prompts, outputs = _busy(peak.judged, hardware)
        prefill = max(prefill, math.ceil(prompts / peak.judged.span_s))
        decode = max(decode, math.ceil(outputs / peak.judged.span_s))
    return Split(prefill, decode)


def _busy(load: Workload, hardware: Hardware) -> tuple[float, float]:
    """Seconds of one saturated replica that the prompts take, and the outputs."""
    model = hardware.model
    prompts = float(prompt_seconds(load.prompt_tokens, hardware, model.interval_seconds).sum())
    return prompts, max(service_seconds(load, hardware) - prompts, 0.0)


# -- for people and programs -----------------------------------------------------------------------
def said_of(one: Apart, name: str, verdict: str) -> str:
    """A line. name: of its candidate; verdict: of its split, in words."""
    if one.most < 2:
        return f"  {name}: a split needs 2 replicas, and --most-gpus allows {one.most:,}"
    beside = f"{one.aggregated:,} that do both"
    if one.split is None:
        return f"  {name}: no split of up to {one.most:,} replicas is enough; {beside} are"
    more = one.split.total - one.aggregated
    than = f"{abs(more):,} {'more' if more > 0 else 'fewer'} than" if more else "as many as"
    usd = one.usd_per_hour
    money = "" if usd is None else f", ${usd:,.2f} an hour"
    return f"  {name}: {one.split}, {than} {beside}{money}: {verdict}"


def told_of(one: Apart, sized: dict[str, Any] | None) -> dict[str, Any]:
    """For plan.json. sized: its verdict as that has it."""
    candidate, split = one.candidate, one.split
    return {
        "gpu": candidate.gpu,
        "tp": candidate.tp,
        "policy": candidate.policy,
        "router": candidate.router,
        "aggregated_replicas": one.aggregated,
        "most_replicas": one.most,
        "prefill_replicas": None if split is None else split.prefill,
        "decode_replicas": None if split is None else split.decode,
        "gpus": one.gpus,
        "usd_per_hour": one.usd_per_hour,
        "tried": [str(other) for other in one.tried],
        "sized": sized,
        "fleet": None if split is None else of_roles(*split),
    }
