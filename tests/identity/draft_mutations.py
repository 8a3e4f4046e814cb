"""Rules of speculation, broken on our side (paths from `drafts.OurDrafts`)."""

from __future__ import annotations

from dataclasses import dataclass

from tests.identity.mutations import Mutation

_CORE = "stepper.core"


@dataclass(frozen=True)
class DraftWitness:
    """Where a break must show: class and seed of `draft_scenarios.drafted`."""

    name: str
    seed: int
    asynchronous: bool = False


def _broken(
    name: str, rule: str, witness: DraftWitness, *edits: tuple[str, str, str, str]
) -> tuple[Mutation, DraftWitness]:
    return Mutation(name, rule, (witness.name, witness.seed), edits), witness


# Of seeds modulo 3, 0 has n-grams, 1 a draft model, 2 a head; every fourth, from 3 on, drafts by
# batch size.
DRAFT_MUTATIONS = (
    _broken(
        "keeps rejected tokens as computed",
        "rejection",
        DraftWitness("preemption", 1),
        (_CORE, "_book", "requests.known_tokens(here) - 1", "requests.computed_tokens[here]"),
    ),
    _broken(
        "counts one token in flight where drafts are verified",
        "placeholder",
        DraftWitness("preemption", 1, True),
        (
            _CORE,
            "begin",
            "requests.in_flight[going_on] = shown",
            "requests.in_flight[going_on] = 1",
        ),
    ),
    _broken(
        "plans rows once more that are sure to end",
        "length limit",
        DraftWitness("preemption", 1, True),
        (
            _CORE,
            "begin",
            "rows[~verified.certain], 1 + verified.drafted[~verified.certain]",
            "rows, 1 + verified.drafted",
        ),
    ),
    _broken(
        "takes it that all drafts are right when it looks for ends",
        "length limit",
        DraftWitness("preemption", 1, True),
        (
            _CORE,
            "begin",
            "sure = rows[verified.certain]",
            "verified.certain |= np.isin(rows, outcome.finished); sure = rows[verified.certain]",
        ),
    ),
    _broken(
        "gives rows that have ended a token",
        "wasted step",
        DraftWitness("preemption", 1, True),
        (_CORE, "emitting", "& (requests.state[rows] != FINISHED)", ""),
    ),
    _broken(
        "keeps the drafts of a victim",
        "victim's drafts",
        DraftWitness("preemption", 1),
        (_CORE, "_forget_drafts", "self.requests.draft_tokens[row] = 0", "pass"),
    ),
    _broken(
        "publishes a block whose tokens are not verified",
        "publication",
        DraftWitness("preemption", 1, True),
        (
            "ledger",
            "_known_blocks",
            "(table.known_tokens(rows) - table.in_flight[rows])",
            "table.known_tokens(rows)",
        ),
    ),
    _broken(
        "publishes the room for drafts as text",
        "publication",
        DraftWitness("partial_chunks", 2),
        (
            "ledger",
            "admit",
            "self._publish(row, tokens //",
            "self._publish(row, self._room(tokens) //",
        ),
    ),
    _broken(
        "leaves no room for the drafter's KV of a running row",
        "lookahead",
        DraftWitness("preemption", 1),
        ("ledger", "grow", "self._room(tokens)", "tokens"),
    ),
    _broken(
        "leaves no room for the drafter's KV of a new row",
        "lookahead",
        DraftWitness("preemption", 1),
        ("ledger", "admit", "self._room(tokens)", "tokens"),
    ),
    _broken(
        "leaves room beyond the longest request",
        "lookahead",
        DraftWitness("preemption", 1),
        (
            "ledger",
            "_room",
            "np.minimum(tokens + self._ahead, self._longest)",
            "tokens + self._ahead",
        ),
    ),
    _broken(
        "trusts the block before a head's first token",
        "hit rule",
        DraftWitness("preemption", 5),
        ("ledger", "_usable", "hit - self.block_tokens if", "hit if"),
    ),
    _broken(
        "forgets the slots of a draft model in the budget",
        "token budget",
        DraftWitness("partial_chunks", 1),
        ("policy", "_grant_running", "self._slots", "0"),
    ),
    _broken(
        "forgets the slots of admitted rows",
        "token budget",
        DraftWitness("partial_chunks", 4),
        ("policy", "_admit_waiting", "self._slots", "0"),
    ),
    _broken(
        "verifies drafts beyond the longest request",
        "longest request",
        DraftWitness("preemption", 1),
        ("policy", "_wanted", "max_model_len - 1 - computed", "max_model_len - computed"),
    ),
    _broken(
        "cuts no draft off where the budget ends",
        "token budget",
        DraftWitness("priority", 5),
        ("policy", "_grant_running", "kept = last + (left > slots)", "kept = last"),
    ),
    _broken(
        "does not pad",
        "padding",
        DraftWitness("preemption", 1),
        ("policy", "_pads", "return self._drafting.pads and", "return False and"),
    ),
    _broken(
        "pads beside prompts",
        "padding",
        DraftWitness("preemption", 1),
        ("policy", "_pads", "and not self._prompts", ""),
    ),
    _broken(
        "has as many drafts whatever the batch",
        "drafts by batch",
        DraftWitness("preemption", 7),
        (_CORE, "_book", "self.drafting.after(self._batch)", "self.drafting.tokens"),
    ),
    _broken(
        "goes by the batch before, asynchronously",
        "drafts by batch",
        DraftWitness("preemption", 7, True),
        (_CORE, "begin", "self.drafting.after(len(plan.rows))", "self.drafting.after(self._batch)"),
    ),
)
