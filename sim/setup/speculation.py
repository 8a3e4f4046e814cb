"""The settings of `--speculate`: memory, time, and refused combinations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from twinserve.backends.acceptance import Acceptance, RecordedAcceptance, rates_of_length
from twinserve.policies.base import EngineLimits, Options
from twinserve.policies.drafting import Drafting, DraftingLimits, Method
from twinserve.policies.names import RegistryError, parse_options, validated
from twinserve.policies.parts.estimators import BatchEstimator
from twinserve.policies.parts.verifying import VerifyingLinear, VerifyingModel
from twinserve.policies.registry import policy_for
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.estimates import step_estimate
from twinserve.profiles.forms.speculative import (
    Drafter,
    ModelDrafter,
    NgramDrafter,
    SpeculativeModel,
    head_bytes,
    head_share,
)
from twinserve.profiles.memory import with_fp8_kv
from twinserve.profiles.profile import Profile
from twinserve.profiles.specs import ProfileError
from twinserve.profiles.step_times import choose
from twinserve.sim.results.decisions import FILE, read_log
from twinserve.sim.results.files import ResultsError
from twinserve.sim.setup.config import SettingsError

if TYPE_CHECKING:
    from twinserve.policies.registry import PolicySpec
    from twinserve.sim.setup.config import SimulationConfig
    from twinserve.sim.setup.pools import Pool

MOST_DRAFTS = 32
_FLAG = "--speculate"
_ACCEPTANCE = ("acceptance", "rates", "length", "recorded")  # ways to say which drafts are right
NGRAMS = (5, 5)  # vLLM's, if no length is given (0.32, `config/speculative.py`)


class Speculation(Options):
    """k           drafts a request
    method      the drafter, as vLLM names it
    acceptance  share of drafts that are right if all before them are right
    rates       share of drafts that are right up to each position, as 0.8/0.6/0.45
    length      mean tokens a step, with the least spread
    recorded    folder of a live run: drafts are found, and right, as in its decision log
    lookup      of method=ngram, on live engines: n-gram lengths in tokens, as 2-4
    batches     drafts by requests in a step, as 1-16:3/17-64:1
    draft       profile of the draft model
    cost        of a head: its share of the target's time"""

    k: int = Field(ge=1, le=MOST_DRAFTS)
    method: Method = "eagle"
    acceptance: float | None = Field(None, ge=0, le=1)
    rates: str | None = None
    length: float | None = Field(None, ge=1, le=MOST_DRAFTS + 1)
    recorded: str | None = None
    lookup: str | None = None
    batches: str | None = None
    draft: str | None = None
    cost: float | None = Field(None, ge=0, le=1)

    @property
    def drafting(self) -> Drafting:
        by_batch = None if self.batches is None else _by_batch(self.batches, self.k)
        return Drafting.of(self.method, self.k, by_batch)

    def acceptance_of(self, seed: int) -> Acceptance | RecordedAcceptance:
        """Return the acceptance of drafts. Raises SettingsError without a record, or with other
        drafts in the record; ResultsError for a torn log."""
        if self.recorded is None:
            return Acceptance(self.accepted_rates, seed)
        path = Path(self.recorded) / FILE
        if not path.is_file():
            raise _error(
                f"recorded={self.recorded}: there is no {FILE}; record one with replay --mode free "
                "--decisions --out DIR"
            )
        log = read_log(path)
        try:
            found = log.acceptance()
        except ResultsError as error:
            raise _error(f"recorded={self.recorded}: {error}") from None
        most = parse_speculation(log.run["config"]["speculate"]).k
        if most != self.k:  # which padding shows, too
            raise _error(f"recorded={self.recorded} was recorded with k={most}; give that")
        return found

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the shortest and the longest n-gram in tokens. Raises SettingsError."""
        if self.lookup is None:
            return NGRAMS
        ends = self.lookup.split("-")
        if len(ends) > 2 or not all(end.isdecimal() for end in ends):
            ends = ["0"]
        shortest, longest = int(ends[0]), int(ends[-1])
        if not 0 < shortest <= longest:
            raise _error(f"lookup={self.lookup}: write tokens of the n-grams, as 2-4 or 3")
        return shortest, longest

    @property
    def accepted_rates(self) -> list[float]:
        """Return the share of right drafts up to each position; empty: recorded. Raises
        SettingsError."""
        given = [n for n in _ACCEPTANCE if getattr(self, n) is not None]
        if len(given) != 1:
            raise _error(
                "give one of acceptance=0.7, rates=0.8/0.6/0.45, length=2.4 and recorded=DIR, "
                "to say which drafts are right"
            )
        if self.recorded is not None:
            return []
        if self.acceptance is not None:
            return [self.acceptance ** (i + 1) for i in range(self.k)]
        if self.length is not None:
            if self.length > self.k + 1:
                raise _error(
                    f"length={self.length:g}: a step has {self.k + 1} tokens; give at most that"
                )
            return rates_of_length(self.length, self.k)
        return _rates(str(self.rates), self.k)

    def describe(self, asynchronous: bool) -> str:
        """Return a line for a run's banner."""
        given = self.drafting.by_batch or (self.k,)
        least, most = min(given), max(given)
        drafts, up_to = f"{most} drafts a request", ""
        if least < most:
            drafts, up_to = f"{least} to {most} drafts a request, by batch size,", "up to "
        if self.recorded is not None:
            return (
                f"speculation: up to {most} drafts a request by {self.method}, as they were in "
                f"{self.recorded} (docs/policies.md)"
            )
        mean = 1 + sum(self.accepted_rates[:most])
        # vLLM plans ngram, which looks drafts up on the host, synchronously alone
        method = "ngram_gpu" if asynchronous and self.method == "ngram" else self.method
        return (
            f"speculation: {drafts} by {method}, {up_to}{mean:.2f} tokens a step if none are "
            "cut off (docs/policies.md)"
        )

    def drafter(self, profile: Profile, limits: EngineLimits) -> Drafter:
        """Return the drafter on the hardware of `profile`."""
        if self.method == "ngram":
            return NgramDrafter()
        if self.method == "draft_model":
            return ModelDrafter(self._draft_profile(profile).model(limits.max_num_seqs))
        share = head_share(profile.llm) if self.cost is None else self.cost
        return ModelDrafter(profile.model(limits.max_num_seqs), share)

    def num_blocks(self, profile: Profile, blocks: int, block_tokens: int) -> int:
        """Return the KV blocks left after the drafter's weights; each block also holds the
        drafter's KV. Raises SettingsError if none are left."""
        weights, more = self._memory(profile)
        own = profile.kv_bytes_per_token * block_tokens
        left = int((blocks * own - weights) // (own + more * block_tokens))
        if left < 1:
            raise _error(
                f"the drafter's weights ({weights / 1e9:.1f} GB) leave no KV memory on "
                f"{profile.name}; raise --gpu-memory-utilization or use more ranks"
            )
        return left

    def _memory(self, profile: Profile) -> tuple[float, float]:
        """Return the bytes of the drafter's weights and of its KV a token, over all ranks."""
        if self.method == "ngram":
            return 0.0, 0.0
        if self.method == "draft_model":
            draft = self._draft_profile(profile)
            return draft.llm.weight_bytes, draft.kv_bytes_per_token
        return head_bytes(profile.llm, self.method), profile.kv_bytes_per_token / profile.llm.layers

    def _draft_profile(self, profile: Profile) -> Profile:
        if self.draft is None:
            raise _error("method=draft_model: say which model drafts, as draft=llama-3.1-8b@h100")
        try:
            draft = choose(self.draft, "roofline").profile
            if profile.llm.kv_value_bytes == 1:  # vLLM's drafter has the target's KV type
                draft = with_fp8_kv(draft)
        except ProfileError as error:
            raise _error(f"draft={self.draft}: {error}") from None
        if draft.dp > 1 or draft.pp > 1:
            raise _error(
                f"draft={self.draft}: a draft model with data-parallel ranks or pipeline stages is "
                "not simulated; drop :dpN and :ppN"
            )
        if draft.gpu.name != profile.gpu.name or draft.tp != profile.tp:
            raise _error(
                f"draft={self.draft} is on {draft.tp} x {draft.gpu.name}, the target on "
                f"{profile.tp} x {profile.gpu.name}; give the same, as vLLM runs both on the same "
                "ranks"
            )
        if draft.llm.vocab != profile.llm.vocab:
            raise _error(
                f"draft={self.draft} has {draft.llm.vocab} tokens in its vocabulary, the target "
                f"{profile.llm.vocab}; choose a draft model with the same, as vLLM asks"
            )
        return draft


def parse_speculation(text: str) -> Speculation:
    """Read `k=3,method=eagle,acceptance=0.7`. Raises SettingsError."""
    try:
        given = parse_options(_FLAG, text, text)
        options = Speculation(**validated(_FLAG, Speculation, given))
    except RegistryError as error:
        raise SettingsError(str(error)) from None
    _check_used(options)
    _ = options.drafting, options.accepted_rates, options.lengths  # refused here, not in a run
    return options


def _check_used(options: Speculation) -> None:
    if options.draft is not None and options.method != "draft_model":
        raise _error(f"draft is for method=draft_model, not {options.method}; drop one of them")
    if options.cost is not None and options.method not in ("eagle", "mtp"):
        raise _error(f"cost is for method=eagle and mtp, not {options.method}; drop it")
    for name in ("recorded", "lookup"):
        if getattr(options, name) is not None and options.method != "ngram":
            raise _error(f"{name} is for method=ngram, not {options.method}; drop one of them")
    if options.recorded is not None and options.batches is not None:
        raise _error("batches says how many drafts there are, and recorded, too; drop one of them")


def check_speculation(
    config: SimulationConfig, policies: tuple[PolicySpec, ...], pools: Sequence[Pool] = ()
) -> None:
    """Raise SettingsError if drafts are excluded. policies: of the run; a pool may have its own."""
    for pool in pools:
        try:
            own = policies if pool.spec is None else (pool.spec,)
            _check_together(pool.config, own, pool.role)
        except SettingsError as error:
            raise SettingsError(f"{pool.where}: {error}") from None
    if not pools:
        _check_together(config, policies, "")


def _check_together(config: SimulationConfig, policies: tuple[PolicySpec, ...], role: str) -> None:
    if config.speculate is None:
        return
    if config.shared_prefix:
        raise _error("cannot be simulated with --shared-prefix; drop one of them")
    if config.async_scheduling and parse_speculation(config.speculate).recorded is not None:
        raise _error(
            "recorded drafts were found between two steps, so planning was synchronous; "
            "give --no-async-scheduling"
        )
    if role in ("prefill", "decode"):
        raise _error(
            f"drafts on replicas of the role {role} are not simulated; drop it, or the roles"
        )
    for spec in policies:
        if policy_for("drafts", spec.policy) is None:
            why = spec.policy.traits.no_drafts
            raise _error(f"policy {spec.label} {why}; use vllm, or drop {_FLAG}")
        kv = spec.kv or config.kv or spec.policy.default_kv
        if kv != "paged":
            raise _error(f"the {kv} ledger has no room for drafts; use kv=paged")


def limits_with_drafts(limits: EngineLimits, speculation: Speculation) -> DraftingLimits:
    """Return the limits with drafts. Raises SettingsError if nothing could be scheduled: vLLM 0.32
    does not start (`config/vllm.py`, `_set_max_num_scheduled_tokens`)."""
    budget, slots = limits.max_num_batched_tokens, speculation.drafting.slots
    if budget <= slots:
        raise SettingsError(
            f"--max-num-batched-tokens {budget}: a draft model takes {slots} of them for each "
            f"request of a step, and leaves none to compute; give {slots + 1} or more, as vLLM asks"
        )
    fields = {name: getattr(limits, name) for name in EngineLimits.__dataclass_fields__}
    return DraftingLimits(**fields, drafting=speculation.drafting)


def estimator_with_drafts(
    name: str,
    speculation: Speculation,
    profile: Profile,
    model: StepTimeModel,
    limits: EngineLimits,
) -> BatchEstimator:
    """Return the policies' estimate of steps that verify drafts and make the next ones. name: as in
    `--estimator`; model: the simulator's own, of steps without drafts."""
    drafter, swap = speculation.drafter(profile, limits), profile.swap_model()
    if name in ("paper", "bros"):
        truth = SpeculativeModel(model, drafter)
        return VerifyingLinear.fit(truth, swap, speculation.drafting)
    if name != "perfect":
        model = step_estimate(name, profile, model)
    return VerifyingModel(SpeculativeModel(model, drafter), swap, speculation.drafting)


def check_profile(profile: Profile, speculation: Speculation) -> None:
    """Raise SettingsError for ranks and stages that are not simulated with drafts, and for modules
    that the model lacks: vLLM 0.32 does not start (`config/speculative.py`)."""
    if speculation.method == "mtp" and not profile.llm.mtp_modules:
        raise _error(
            f"method=mtp: {profile.llm.name} has no MTP modules (num_nextn_predict_layers in its "
            "config.json), and vLLM refuses it; give method=eagle, draft_model or ngram"
        )
    if profile.dp > 1:
        raise _error(f"cannot be simulated on the data-parallel ranks of {profile.name}; drop it")
    if profile.pp > 1:
        raise _error(f"cannot be simulated on the pipeline stages of {profile.name}; drop it")


def _rates(text: str, drafts: int) -> list[float]:
    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        rates = []
    falling = all(0.0 <= b <= a <= 1.0 for a, b in zip([1.0, *rates], rates, strict=False))
    if len(rates) != drafts or not falling:
        raise _error(
            f"rates={text}: write {drafts} shares from 0 to 1, none above the one before it, as "
            "0.8/0.6/0.45"
        )
    return rates


def _by_batch(text: str, most: int) -> tuple[int, ...]:
    """Return drafts by batch size; a gap is filled as in vLLM, from smaller batches."""
    found: list[int] = []
    try:
        for part in text.split("/"):
            sizes, drafts = part.split(":")
            first, last = (int(size) for size in sizes.split("-"))
            if not len(found) < first <= last <= 1 << 20 or int(drafts) < 0:
                raise ValueError(part)
            if not found and first != 1:
                raise ValueError(part)
            found += [found[-1]] * (first - 1 - len(found)) if found else []
            found += [min(int(drafts), most)] * (last - len(found))
    except ValueError:
        raise _error(
            f"batches={text}: write ranges of batch sizes that rise from 1, and drafts of each, as "
            "1-16:3/17-64:1"
        ) from None
    return tuple(found)


def _error(said: str) -> SettingsError:
    return SettingsError(f"{_FLAG}: {said}")
