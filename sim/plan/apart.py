"""Prefill apart from decode compared with equal replicas: how few of the same GPUs keep the same
objectives.

The walk for the fewest replicas of both roles assumes that more replicas are never worse. Then the
splits that are enough lie above and to the right of a staircase. The walk goes along the diagonal
of splits with one replica less than the best so far, from few prefill replicas to many. A split
that is enough begins the next diagonal. Splits already passed cannot be enough there, since they
would have fewer decode replicas. Like `search.smallest` it is a generator: it yields the split to
try and is sent the answer.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from twinserve.policies.registry import ledger_class, parse_policy, policy_for
from twinserve.sim.plan.candidates import Candidate
from twinserve.sim.plan.closer import FARTHEST, Sized, drawn, steps_off
from twinserve.sim.plan.peaks import Peak
from twinserve.sim.plan.sizes import Size, on_peaks
from twinserve.sim.plan.trial import Trial
from twinserve.sim.results.options import Objective
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.fleet_file import of_roles
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.offered_load import prompt_seconds, service_seconds
from twinserve.traces.workload import Workload


class Split(NamedTuple):
    """Replicas that compute prompts, and replicas that decode."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        """As `--fleet` takes it."""
        return f"{self.prefill}P{self.decode}D"


@dataclass(frozen=True)
class Answer:
    """keeps: the split is enough. of_decode: if not, only tokens after the first are late, so
    prefill replicas are not the cause. Late first tokens can be due to either role: a computed
    prompt waits for memory on its decode replica."""

    keeps: bool
    of_decode: bool = False


Walk = Generator[Split, Answer, Split | None]


def staircase(first: Split, most: int) -> Walk:
    """From `first` up, by what was late, to a split that is enough; then down the staircase.

    most  replicas of both roles together, at most; 2 at least

    Returns a split with the fewest replicas; None if none is enough.
    """
    tried: dict[Split, bool] = {}
    best = yield from _climb(_within(first, most), most, tried)
    total = most if best is None else best.total - 1
    prefill = 1
    while total > prefill:
        split = Split(prefill, total - prefill)
        if not any(_covers(other, split) for other, keeps in tried.items() if not keeps):
            tried[split] = (yield split).keeps
            if tried[split]:
                best, total = split, total - 1
                continue
        prefill += 1
    return best


def _climb(
    split: Split, most: int, tried: dict[Split, bool]
) -> Generator[Split, Answer, Split | None]:
    while True:
        answer = yield split
        tried[split] = answer.keeps
        if answer.keeps:
            return split
        if split.total >= most:
            return None
        more = Split(
            split.prefill + (1 + split.prefill // 2) * (not answer.of_decode),
            split.decode + 1 + split.decode // 2,
        )
        split = _above(split, more, most)


def _above(split: Split, more: Split, most: int) -> Split:
    """`more`, with no more than `most` together and one more than `split` at least."""
    over = more.total - most
    if over <= 0:
        return more
    decode = max(more.decode - over, split.decode)
    return Split(most - decode, decode)


def _within(split: Split, most: int) -> Split:
    """As near to its shares as there is room; one of each at least."""
    split = Split(max(split.prefill, 1), max(split.decode, 1))
    if split.total <= most:
        return split
    prefill = min(max(round(most * split.prefill / split.total), 1), most - 1)
    return Split(prefill, most - prefill)


def _covers(other: Split, split: Split) -> bool:
    return other.prefill >= split.prefill and other.decode >= split.decode


TIMES = 2  # as many replicas as the aggregated fleet has, at most


@dataclass(frozen=True)
class Apart:
    """The smallest fleet with prefill apart from decode, and the aggregated one of the same kind.

    aggregated  the fleets of equal replicas that were looked at, from the smallest that is enough
    most        the most replicas of both roles together that were tried
    split       None: none of up to `most` keeps the objectives
    sized       of the split: its trials to their ends, on all peaks
    tried       splits, in order
    fast, slow  the splits if steps are shorter and longer by the profile's expected error; None:
                not even `farthest` replicas are enough
    """

    candidate: Candidate
    aggregated: tuple[Sized, ...]
    most: int
    split: Split | None
    sized: Sized | None
    tried: tuple[Split, ...]
    fast: Split | None = None
    slow: Split | None = None
    farthest: int = 0

    @property
    def compared(self) -> int | None:
        """Equal replicas with the same answer as the split; None: none that were looked at."""
        if self.sized is None:
            return None
        answer = self.sized.answer
        return next((one.replicas for one in self.aggregated if one.answer == answer), None)

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
            "--prefill-decode: --survive plans for fleets of equal replicas only; drop one of the "
            "two"
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
    waits = policy_for("remote", spec.policy) is not None
    return waits and ledger_class(spec.kv_name).hands_over


def smallest_split(
    size: Size, aggregated: Sequence[Sized], objectives: Sequence[Objective], draws: int
) -> Generator[Any, Trial, Apart]:
    """Trials, until the smallest fleet of the kind that `size` has is known, also with shorter and
    longer steps. aggregated: as of Apart. Of the split that is found every draw is run to its
    end."""
    candidate, peaks = size.candidate, size.peaks
    most = min(max(TIMES * aggregated[0].replicas, 2), size.most)
    first = _guess(candidate.hardware, peaks)
    found, trials = yield from _walk(size, first, most, objectives)
    if found is None:
        return Apart(candidate, tuple(aggregated), most, None, None, tuple(trials))
    known = Size(candidate, peaks, 1, 1, most, None, {found.total: trials[found]})
    sized = yield from drawn(known, objectives, found.total, draws, fleet=str(found))
    farthest = min(FARTHEST * found.total, size.most)
    quick, late = steps_off(candidate, -1), steps_off(candidate, 1)
    fast, _ = yield from _walk(size, found, farthest, objectives, off=quick)
    slow, _ = yield from _walk(size, found, farthest, objectives, off=late)
    fleets, tried = tuple(aggregated), tuple(trials)
    return Apart(candidate, fleets, most, found, sized, tried, fast, slow, farthest)


def _walk(
    size: Size, first: Split, most: int, objectives: Sequence[Objective], **how: Any
) -> Generator[Any, Trial, tuple[Split | None, dict[Split, list[Trial]]]]:
    """Return the end of the staircase from `first`, and each split's trials. how: as of
    `on_peaks`."""
    trials: dict[Split, list[Trial]] = {}
    if most < 2:
        return None, trials
    walk = staircase(first, most)
    try:
        split = next(walk)
        while True:
            fleet = str(split)
            trials[split] = yield from on_peaks(
                size.candidate, size.peaks, split.total, fleet=fleet, **how
            )
            split = walk.send(_answer(trials[split], objectives))
    except StopIteration as end:
        return end.value, trials


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
    if one.split is None:
        beside = f"{one.aggregated[0].replicas:,} that do both"
        return f"  {name}: no split of up to {one.most:,} replicas is enough; {beside} are"
    usd = one.usd_per_hour
    money = "" if usd is None else f", ${usd:,.2f} an hour"
    return f"  {name}: {one.split}, {_than(one)}{money}, steps off {_ends(one)}: {verdict}"


def _than(one: Apart) -> str:
    """Compare its replicas with equal ones that are known as well."""
    assert one.split is not None and one.sized is not None
    beside = one.compared
    if beside is None:
        looked = one.aggregated[0]
        return f"not compared with {looked.replicas:,} that do both ({looked.answer})"
    more = one.split.total - beside
    than = f"{abs(more):,} {'more' if more > 0 else 'fewer'} than" if more else "as many as"
    return f"{than} {beside:,} that do both ({one.sized.answer})"


def _ends(one: Apart) -> str:
    fast, slow = (
        f"> {one.farthest:,} replicas" if split is None else str(split)
        for split in (one.fast, one.slow)
    )
    return fast if fast == slow else f"{fast} to {slow}"


def told_of(one: Apart, sized: dict[str, Any] | None) -> dict[str, Any]:
    """For plan.json. sized: its verdict as that has it."""
    candidate, split = one.candidate, one.split
    return {
        "gpu": candidate.gpu,
        "tp": candidate.tp,
        "policy": candidate.policy,
        "router": candidate.router,
        "aggregated_replicas": one.aggregated[0].replicas,
        "compared_replicas": one.compared,
        "most_replicas": one.most,
        "prefill_replicas": None if split is None else split.prefill,
        "decode_replicas": None if split is None else split.decode,
        "gpus": one.gpus,
        "usd_per_hour": one.usd_per_hour,
        "tried": [str(other) for other in one.tried],
        "sized": sized,
        "steps_fast": None if one.fast is None else str(one.fast),
        "steps_slow": None if one.slow is None else str(one.slow),
        "steps_farthest": one.farthest,
        "fleet": None if split is None else of_roles(*split),
    }
