"""Both sides of the comparison with speculative decoding: the real scheduler is fed drafts, of
which as many are right as both sides compute from request and position."""

import hashlib
from collections import Counter

import numpy as np

from tests.identity.compare import Report, run_identity
from tests.identity.mutations import Mutation
from tests.identity.ours import OurScheduler
from tests.identity.protocol import EngineSettings, Observed
from tests.identity.real_scheduler import RealScheduler
from tests.sim.stepper import Stepper
from twinserve.policies.baselines.vllm import Release
from twinserve.policies.drafting import Drafting, DraftingLimits
from twinserve.policies.plan import StepOutcome, StepPlan, Verified
from twinserve.sim.engine.drafting import DraftingCore


def right_drafts(name: str, position: int, drafts: int, rate: float) -> int:
    """How many leading drafts are right, of those for the output tokens of request `name` from
    `position` on. The same whoever asks, and when."""
    right = 0
    while right < drafts:
        digest = hashlib.blake2b(f"{name}.{position + right}".encode(), digest_size=4).digest()
        if int.from_bytes(digest) >= rate * 2**32:
            break
        right += 1
    return right


class DraftedScheduler(RealScheduler):
    """vLLM's scheduler with a fake model that drafts, and a fake target that verifies.

    drafts  how often what speculation is about has happened:
            drafted, accepted, rejected  draft tokens of booked steps
            cut_drafts       a row verified fewer drafts than it had: budget, cap or longest request
            padded           admitted rows that got drafts which cannot be right
            rejected_in_preemption  drafts rejected in steps that had a victim
            rejected_of_victims     of steps under way when the row itself was preempted
            trimmed          tokens beyond a request's last one, in the middle of an accepted run
            wasted           rows scheduled once more in the step after the one in which they ended
            at_longest       rows left with fewer drafts, or none, by the longest request
    """

    def __init__(self, settings: EngineSettings, mutation: Mutation | None = None, **rest) -> None:
        super().__init__(settings, mutation=mutation, **rest)
        self.drafts: Counter[str] = Counter()
        self._given: dict[str, int] = {}  # tokens that the model has made, by request
        self._latest: dict[str, int] = {}  # of these, in its last step
        self._rejected: dict[str, int] = {}  # by the step under way
        self._count_stats()

    def _count_stats(self) -> None:
        """vLLM's own numbers, as its metrics get them."""
        make = self.scheduler.make_spec_decoding_stats

        def note(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
            self.drafts["drafted"] += num_draft_tokens
            self.drafts["accepted"] += num_accepted_tokens
            self.drafts["rejected"] += num_draft_tokens - num_accepted_tokens
            return make(stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

        self.scheduler.make_spec_decoding_stats = note

    def submit(self, request_id: str, *args, **kwargs) -> None:
        super().submit(request_id, *args, **kwargs)
        self._given[request_id] = 0

    def step(self) -> Observed:
        self._before = {request.request_id for request in self.scheduler.running}
        self._ahead = {r.request_id: r.num_computed_tokens for r in self.scheduler.running}
        return super().step()

    def _sampled(self, plan):
        output = super()._sampled(plan)
        drafted = plan.scheduled_spec_decode_tokens
        rejected = {}
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if not tokens:
                continue
            drafts = len(drafted.get(name, ()))
            self._count_cut(name, drafts)
            right = 0
            if name in self._before:
                rate = self.settings.draft_rate
                right = right_drafts(name, self._given[name], drafts, rate)
            else:
                self.drafts["padded"] += drafts > 0
            tokens += range(tokens[0] + 1, tokens[0] + 1 + right)
            self._next_output[name] += right
            self._given[name] += right + 1
            self._latest[name] = right + 1
            rejected[name] = drafts - right
        self._count_rejected(rejected)
        return output

    def _count_cut(self, name: str, drafts: int) -> None:
        if name in self._before and drafts < self.settings.draft_tokens:
            self.drafts["cut_drafts"] += 1
            first = self._ahead[name]
            room = self.settings.max_model_len - 1 - first
            self.drafts["at_longest"] += room < 1 + self.settings.draft_tokens

    def _count_rejected(self, rejected: dict[str, int]) -> None:
        if self._victims:
            self.drafts["rejected_in_preemption"] += sum(rejected.values())
        for victim in self._victims:
            self.drafts["rejected_of_victims"] += self._rejected.get(victim, 0)
        self._rejected = rejected if self.settings.async_scheduling else {}

    def _execute(self, plan) -> tuple[str, ...]:
        under_way = dict(plan.num_scheduled_tokens)
        requests = self.scheduler.requests
        limits = {name: requests[name].max_tokens for name in requests}
        finished = super()._execute(plan)
        for name in finished:
            wasted = self.settings.async_scheduling and name in under_way
            made = self._given[name] - (self._latest[name] if wasted else 0)
            self.drafts["trimmed"] += made > limits[name]
            self.drafts["wasted"] += wasted
        if not self.settings.async_scheduling:
            self._draft(plan)
        return finished

    def _draft(self, plan) -> None:
        from vllm.v1.outputs import DraftTokenIds

        names = list(plan.num_scheduled_tokens)
        if names:
            drafts = [[7] * plan.num_spec_tokens_to_schedule for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))


class CountingCore(DraftingCore):
    """Counts the drafts that it books, and the right ones, as vLLM's `SpecDecodingStats` does."""

    drafted = accepted = 0

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        gaps = super().complete(plan, outcome)
        self.drafted += int(outcome.verified.drafted.sum())
        self.accepted += int(outcome.verified.accepted.sum())
        return gaps


class DraftingStepper(Stepper):
    """A stepper whose rows get as many tokens as `right_drafts` says."""

    def __init__(self, core, rate: float) -> None:
        self._over(core)
        self.rate = rate

    def _outcome(self, plan: StepPlan) -> StepOutcome:
        emitting = self.core.emitting(plan)
        rows, requests = plan.rows[emitting], self.requests
        lacking = requests.known_tokens(rows) - requests.computed_tokens[rows]
        drafted = plan.tokens[emitting] - lacking  # wrong ones of padding included
        able = np.minimum(drafted, requests.draft_tokens[rows])
        right = [
            right_drafts(requests.ids[row], int(requests.output_tokens[row]), drafts, self.rate)
            for row, drafts in zip(rows.tolist(), able.tolist(), strict=True)
        ]
        accepted = np.array(right, np.int64)
        left = np.array([self._outputs[r] for r in rows.tolist()], np.int64)
        left -= requests.output_tokens[rows]
        tokens = np.minimum(accepted + 1, left)
        finished = rows[tokens == left].tolist()
        start, self._steps = float(self._steps), self._steps + 1
        verified = Verified(tokens, drafted, accepted, left == 1)
        return StepOutcome(start, np.array([start + 1.0]), rows, finished, verified)


def drafting_of(settings: EngineSettings) -> Drafting:
    by_batch: list[int] = []
    for first, last, drafts in settings.drafts_by_batch:
        by_batch += [by_batch[-1]] * (first - 1 - len(by_batch)) if by_batch else []
        by_batch += [drafts] * (last - len(by_batch))
    return Drafting.of(settings.draft_method, settings.draft_tokens, tuple(by_batch) or None)


class OurDrafts(OurScheduler):
    """Policy `vllm` with drafts behind the `Side` protocol."""

    def __init__(
        self, settings: EngineSettings, mutation: Mutation | None = None, release: Release = "0.32"
    ) -> None:
        super().__init__(settings, mutation, release)

    def made(self, limits: dict, options: dict, policy: str, ledger_class) -> DraftingStepper:
        from twinserve.policies.baselines.vllm import VllmOptions
        from twinserve.policies.baselines.vllm_drafts import VllmDrafts
        from twinserve.policies.kv.paged.drafted import DraftedLedger
        from twinserve.policies.requests import RequestTable

        settings, requests = self.settings, RequestTable()
        drafting = drafting_of(settings)
        size, caching = settings.block_tokens, settings.enable_prefix_caching
        ledger = DraftedLedger(requests, settings.num_blocks, size, prefix_caching=caching)
        ledger.look_ahead(drafting, settings.max_model_len)
        made = VllmDrafts(DraftingLimits(**limits, drafting=drafting), VllmOptions(**options))
        core = CountingCore(requests, made, ledger, drafting, settings.async_scheduling)
        return DraftingStepper(core, settings.draft_rate)


def compare_drafts(
    scenario, make=OurDrafts, leaving: float = 0.0, max_steps: int | None = None
) -> tuple[Report, Counter]:
    """One scenario on the real scheduler and on `make`; vLLM's counts of drafts must be ours."""
    sides: list = []

    def keep(kind):
        def made(settings):
            sides.append(kind(settings))
            return sides[-1]

        return made

    report = run_identity(
        scenario.settings,
        scenario.requests,
        keep(make),
        leaving=leaving,
        max_steps=max_steps,
        make_real=keep(DraftedScheduler),
    )
    real, ours = sides
    if isinstance(ours, OurDrafts) and not report.mismatches:
        core = ours.stepper.core
        said, booked = (
            (real.drafts["drafted"], real.drafts["accepted"]),
            (core.drafted, core.accepted),
        )
        if said != booked:
            report.mismatches = 1
            report.first_mismatch = f"drafts and right ones: vLLM {said}, ours {booked}"
    return report, real.drafts
