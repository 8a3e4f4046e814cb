"""What one engine stores on the host, and loads from there: the scheduler side of vLLM's
OffloadingConnector, for one group of layers with full attention.

Source: vLLM 0.32, `kv_connector/v1/offloading/scheduler.py` (`OffloadingConnectorScheduler`).

- Full chunks of what a request computes are stored as they fill, prompt and output, one job a
  request a step. A store that finds the tier full is tried again with the request's next step.
- A request without KV asks for what follows its device hit. It waits while a chunk of the answer is
  still being written, or is being loaded for another one, or while transfers of its own go on.
- Blocks being stored stay in memory as long as their request does. If it has ended, or is
  preempted, they may be taken by others: then the step that would write there waits for the store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinserve.policies.kv.offload.store import Access, Found, HostStore
from twinserve.policies.plan import StepPlan

if TYPE_CHECKING:
    from twinserve.policies.kv.offload.ledger import TieredLedger


@dataclass(slots=True, eq=False)
class Job:
    """One transfer. tokens: whose KV moves. upto: of a load, tokens computed when it has landed."""

    number: int
    row: int
    keys: list[int]
    slots: list[int]
    store: bool
    blocks: list[int]
    tokens: int
    upto: int = 0


@dataclass(slots=True)
class Jobs:
    """What a plan begins. flush: numbers of stores that its step waits for."""

    loads: list[Job] = field(default_factory=list)
    stores: list[Job] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores or self.flush)


@dataclass(slots=True, eq=False)
class _Request:
    """keys: of its full chunks, as far as they are known. blocks: device blocks that it was seen
    with. stored: leading chunks that need no further store. upto: tokens of its text to store when
    it has ended."""

    access: Access = field(default_factory=Access)
    keys: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    jobs: dict[int, Job] = field(default_factory=dict)
    stored: int = 0
    loaded: int = 0
    upto: int = 0
    ended: bool = False


class Offloading:
    """blocks_per_chunk  device blocks that the tier keeps as one
    prompt_only  no output is stored
    names        added to names of text that no other request shares: engines that share a store
                 give the same ones to other texts
    loading      keys under way to the device
    counts       how often what happened, on this engine
    """

    def __init__(
        self,
        ledger: TieredLedger,
        store: HostStore,
        blocks_per_chunk: int = 1,
        prompt_only: bool = False,
        names: int = 0,
    ) -> None:
        self.ledger, self.store = ledger, store
        self.blocks_per_chunk, self.prompt_only, self.names = blocks_per_chunk, prompt_only, names
        self.chunk_tokens = blocks_per_chunk * ledger.block_tokens
        self.loading: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.jobs: dict[int, Job] = {}
        self._requests: dict[int, _Request] = {}
        self._next = 0
        self._begun: list[Job] = []  # loads of the plan being made
        self._taken: set[int] = set()  # blocks that the plan being made gave to a row
        self._fences: dict[int, set[int]] = {}  # block that may be taken -> jobs that read it
        self._ended: list[int] = []  # rows, since the last plan

    # -- what the policy asks ----------------------------------------------------------------------
    def lookup(self, row: int, hit_tokens: int) -> int | None:
        """Tokens behind the first `hit_tokens` that can be loaded for a row without KV; None: ask
        again with the next plan."""
        request = self._requests.setdefault(row, _Request())
        request.blocks.clear()
        counts = self.counts
        if request.jobs:
            counts["waits for its own"] += 1
            return None
        self._name(row, request)
        size, first = self.chunk_tokens, hit_tokens // self.chunk_tokens
        last = min(self._text(row) // size, len(request.keys))
        if last * size - hit_tokens < size:
            return 0
        end, pending = first, False
        for key in request.keys[first:last]:
            found = self.store.lookup(key)
            if found is Found.MISS:
                break
            pending |= found is Found.PENDING
            end += 1
        loaded = end * size - hit_tokens
        if end == first:
            return 0
        if pending:
            counts["waits for a store"] += 1
            return None
        if loaded < size:
            return 0
        if self.loading and any(key in self.loading for key in request.keys[first:end]):
            counts["waits for a load"] += 1
            return None
        return loaded

    def load(self, row: int, hit_tokens: int, tokens: int) -> None:
        """The row has blocks for `tokens` tokens behind the first `hit_tokens`, which `lookup` has
        found: load them."""
        request, size, upto = self._requests[row], self.chunk_tokens, hit_tokens + tokens
        blocks = self.ledger.blocks_of(row).tolist()
        self._taken.update(blocks)
        keys = request.keys[hit_tokens // size : upto // size]
        request.stored, request.loaded = upto // size, upto
        slots = self.store.pin(keys, request.access)
        into = blocks[hit_tokens // self.ledger.block_tokens :]
        job = self._job(row, request, keys, slots, False, into, tokens, upto)
        self._begun.append(job)
        self.loading.update(keys)
        self.counts["loads"] += 1
        self.counts["loaded tokens"] += tokens

    def loaded(self, row: int) -> int:
        """Tokens that the row has with its last load."""
        return self._requests[row].loaded

    def ended(self, row: int, computed: int) -> None:
        """The row has ended, with KV of `computed` tokens of its text. Its blocks may be taken from
        now on."""
        request = self._requests.setdefault(row, _Request())
        request.upto = computed
        request.ended = True
        self._name(row, request)
        self.ledger.forget(row)
        self._ended.append(row)
        for job in request.jobs.values():
            if job.store:
                self._fence(job)

    def follows(self, row: int) -> bool:
        """Return whether it has the row, and has not heard of its end."""
        request = self._requests.get(row)
        return request is not None and not request.ended

    # -- a plan has been made ----------------------------------------------------------------------
    def begin(self, plan: StepPlan) -> Jobs:
        """The jobs of a plan whose rows have their memory."""
        made = Jobs(self._begun, [], set())
        computed = self.ledger.table.computed_tokens
        joined = dict(plan.admitted)
        granted = list(zip(plan.rows.tolist(), plan.tokens.tolist(), strict=True))
        again = {row for row, _ in plan.preempted}
        for row, _ in granted:
            self._see_blocks(row, row in joined)
        for row in again:
            if (request := self._requests.get(row)) is not None and request.jobs:
                made.flush.update(request.jobs)
        made.flush.update(n for b in self._taken if b in self._fences for n in self._fences[b])
        for row, tokens in granted:
            before = joined[row] if row in joined else int(computed[row])
            self._store(row, self._requests[row], before + tokens, made)
        ended = sorted(self._ended)
        for row in ended:
            self._store(row, self._requests[row], self._requests[row].upto, made)
        for row in ended:  # use counts when all have stored
            request = self._requests[row]
            self.store.ended(request.access, request.keys)
            if not request.jobs:
                del self._requests[row]
        self._ended, self._begun, self._taken = [], [], set()
        self.counts["stores waited for"] += len(made.flush)
        return made

    def _see_blocks(self, row: int, joined: bool) -> None:
        request = self._requests.setdefault(row, _Request())
        if joined:
            request.blocks.clear()
        if self.ledger.held_blocks(row) > len(request.blocks):
            fresh = self.ledger.blocks_of(row)[len(request.blocks) :].tolist()
            request.blocks += fresh
            self._taken.update(fresh)
        self._name(row, request)

    def _store(self, row: int, request: _Request, tokens: int, made: Jobs) -> None:
        tokens = min(tokens, self._text(row))
        if self.prompt_only:
            tokens = min(tokens, int(self.ledger.table.prompt_tokens[row]))
        chunks = min(
            tokens // self.chunk_tokens,
            len(request.blocks) // self.blocks_per_chunk,
            len(request.keys),
        )
        if chunks <= request.stored:
            return
        first = request.stored
        before = self.store.counts["evicted"]
        slots = self.store.reserve(request.keys[first:chunks], request.access)
        if slots is None:
            self.counts["full"] += 1
            return
        self.counts["evicted"] += self.store.counts["evicted"] - before
        request.stored = chunks
        if not slots:
            return
        size, blocks = self.blocks_per_chunk, []
        for i in range(first, chunks):
            if request.keys[i] in slots:
                blocks += request.blocks[i * size : (i + 1) * size]
        keys = list(slots)
        amount = len(keys) * self.chunk_tokens
        job = self._job(row, request, keys, list(slots.values()), True, blocks, amount)
        made.stores.append(job)
        self.counts["stores"] += 1
        self.counts["stored tokens"] += amount
        if request.ended:
            self._fence(job)
            if not self._taken.isdisjoint(blocks):
                made.flush.add(job.number)

    def steady(self, plan: StepPlan, jobs: Jobs) -> bool:
        """Whether steps like this one, which are all that happens, would begin no transfer and wait
        for none: only decodes, and no output is stored."""
        if jobs or self._fences or not self.prompt_only or plan.chunked:
            return False
        size, prompts = self.chunk_tokens, self.ledger.table.prompt_tokens
        rows = plan.rows.tolist()
        return all(self._requests[row].stored >= int(prompts[row]) // size for row in rows)

    # -- a transfer has ended ----------------------------------------------------------------------
    def complete(self, job: Job) -> None:
        request = self._requests[job.row]
        if job.store:
            self.store.written(job.keys)
        else:
            self.store.unpin(job.keys)
            self.loading.difference_update(job.keys)
        if job.store and request.ended:
            self._unfence(job)
        del self.jobs[job.number], request.jobs[job.number]
        if request.ended and not request.jobs and job.row not in self._ended:
            del self._requests[job.row]

    def fail(self) -> None:
        """The engine has failed. What it was writing is lost, what it was reading may leave."""
        for job in self.jobs.values():
            if job.store:
                self.store.lost(job.keys)
            else:
                self.store.unpin(job.keys)
        self.jobs.clear()
        self._requests.clear()

    # -- bookkeeping -------------------------------------------------------------------------------
    def _text(self, row: int) -> int:
        """Tokens of the row that are known."""
        table = self.ledger.table
        return int(table.known_tokens(row) - table.in_flight[row])

    def _name(self, row: int, request: _Request) -> None:
        """Keys of chunks that have become known: a chunk's is the name of its last block."""
        size = self.blocks_per_chunk
        have, full = len(request.keys), self._text(row) // self.chunk_tokens
        if full <= have:
            return
        ledger = self.ledger
        for name in ledger.names(row, full * size)[(have + 1) * size - 1 :: size].tolist():
            own = name >= ledger.shared_contents
            request.keys.append(name + self.names if own else name)

    def _job(
        self,
        row: int,
        request: _Request,
        keys: list[int],
        slots: list[int],
        store: bool,
        blocks: list[int],
        tokens: int,
        upto: int = 0,
    ) -> Job:
        job = Job(self._next, row, keys, slots, store, blocks, tokens, upto)
        self._next += 1
        self.jobs[job.number] = request.jobs[job.number] = job
        return job

    def _fence(self, job: Job) -> None:
        for block in job.blocks:
            self._fences.setdefault(block, set()).add(job.number)

    def _unfence(self, job: Job) -> None:
        for block in job.blocks:
            jobs = self._fences[block]
            jobs.remove(job.number)
            if not jobs:
                del self._fences[block]

    # -- auditor -----------------------------------------------------------------------------------
    def problems(self) -> Iterable[str]:
        """What does not add up between jobs and the store, one line each."""
        for job in self.jobs.values():
            for key in job.keys:
                chunk = self.store.eviction.get(key)
                if chunk is None or chunk.ready == job.store or chunk.slot not in job.slots:
                    yield f"chunk {key} of job {job.number} is not on the host as it should be"
        fenced = {number for jobs in self._fences.values() for number in jobs}
        if not fenced <= self.jobs.keys():
            yield "a block waits for a transfer that has ended"
