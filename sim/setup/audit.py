"""Check that a policy, a router or a trace reader keeps its contract.

`check_policy`, `check_router` and `check_reader` take one line in a test. `Auditor` watches the
engine of a run of your own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.own_code import fault
from twinserve.policies.base import Policy
from twinserve.policies.errors import PolicyError
from twinserve.policies.plan import StepOutcome, StepPlan
from twinserve.policies.registry import PolicySpec, ledger_names, parse_policy
from twinserve.policies.requests import State
from twinserve.sim.engine.core import EngineCore
from twinserve.sim.fleet.replica import Role
from twinserve.sim.fleet.request import Request
from twinserve.sim.fleet.routers.base import Router, Verdict
from twinserve.sim.fleet.routers.registry import RouterSpec, parse_router
from twinserve.sim.fleet.view import FleetView
from twinserve.sim.results.files import RunRows
from twinserve.sim.setup.config import PAPERS_ENGINE, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import Simulation
from twinserve.traces.readers.formats import read_bytes
from twinserve.traces.readers.options import ReadOptions, TraceReader
from twinserve.traces.workload import BestEffortPool, PrefixBlocks, Workload, WorkloadError

# Memory for about a fifth of the requests, so that most of them lose theirs some time; 38 blocks
# hold the longest one.
CROWDED = SimulationConfig(
    num_blocks=40,
    block_tokens=8,
    host_blocks=60,
    max_num_seqs=8,
    max_num_batched_tokens=304,
    slo="none",
    **PAPERS_ENGINE,
)


PATIENCE_S = 0.3  # after which clients leave, where they do: many are served, and many are not


class AuditError(AssertionError):
    """A broken rule: one line with the rule, the run and the time."""


class Auditor:
    """Check every plan and every outcome of one engine from now on.

    longest  prompt and output tokens of the longest request, to check `Policy.step_tokens`
    recount  recount the whole ledger twice a step

    Raises AuditError at the first broken rule, and LedgerError if an account does not add up.
    """

    def __init__(self, core: EngineCore, longest: int | None = None, recount: bool = True) -> None:
        self.core = core
        self.longest = longest
        self.recount = recount
        self.plans = 0
        self._plan, self._complete = core.plan, core.complete
        core.plan, core.complete = self.plan, self.complete
        self._began, self._begin_step = False, core.ledger.begin_step
        core.ledger.begin_step = self._begin

    def _begin(self) -> None:
        self._began = True
        self._begin_step()

    def plan(self, now: float) -> StepPlan:
        core, requests = self.core, self.core.requests
        before = requests.state.copy()
        away = {row for row, landing in core.ready_s.items() if landing > now}
        self._began = False
        plan = self._plan(now)
        self.plans += 1
        rows, tokens = plan.rows, plan.tokens
        begun = self._began or not len(rows)
        self._ask(begun, now, "planned without ledger.begin_step(), which must come first")
        self._ask(len(rows) == len(tokens), now, "the plan's rows and tokens differ in length")
        self._ask(len(np.unique(rows)) == len(rows), now, "a row is granted twice", rows)
        self._ask(bool((tokens >= 1).all()), now, "a grant of 0 tokens", rows[tokens < 1])
        state = requests.state[rows]
        self._ask(
            bool((state == State.RUNNING).all()),
            now,
            "a grant to a row without KV",
            rows[state != State.RUNNING],
        )
        lacks = requests.known_tokens(rows) - requests.computed_tokens[rows]
        lacks += requests.draft_tokens[rows]
        if core.padding:
            lacks += core.padding * np.isin(rows, [row for row, _ in plan.admitted])
        self._ask(
            bool((tokens <= lacks).all()),
            now,
            "a grant of more tokens than the row has left to compute",
            rows[tokens > lacks],
        )
        room = core.ledger.slack_tokens(rows)
        self._ask(bool((room >= tokens).all()), now, "a grant without memory", rows[room < tokens])
        absent = np.asarray(core.ledger.missing_tokens(rows)) > 0
        self._ask(not absent.any(), now, "a grant on KV that is on the host", rows[absent])
        early = [row for row in rows.tolist() if row in away]
        self._ask(not early, now, "a grant before the row's transfer has completed", early)
        self._transitions(plan, before, now)
        if self.longest is not None:
            most = core.policy.step_tokens(self.longest)
            said = (
                f"{int(tokens.sum())} tokens in a step, and step_tokens({self.longest}) "
                f"promises at most {most}"
            )
            self._ask(int(tokens.sum()) <= most, now, said)
        self.counts_hold(now)
        return plan

    def _transitions(self, plan: StepPlan, before: np.ndarray, now: float) -> None:
        """Check that each request was in the state that its transition in the plan needs."""
        lost = {row for row, _ in plan.preempted}
        for what, rows, state in (
            ("preempted without KV", list(lost), State.RUNNING),
            (
                "admitted a row that was not waiting",
                [row for row, _ in plan.admitted if row not in lost],
                State.WAITING,
            ),
            (
                "swapped in a row that was not swapped out",
                [r for r in plan.swapped_in if r not in lost],
                State.SWAPPED,
            ),
            ("fetched for a row that was not waiting", [r for r, _ in plan.fetched], State.WAITING),
            ("began a row without KV", plan.begun, State.RUNNING),
        ):
            self._ask(
                all(before[row] == state for row in rows),
                now,
                what,
                [r for r in rows if before[r] != state],
            )

    def complete(self, plan: StepPlan, outcome: StepOutcome) -> np.ndarray:
        gaps = self._complete(plan, outcome)
        end = float(outcome.ends_s[-1])
        held = self.core.ledger.held_blocks
        kept = [row for row in outcome.finished if held(row) and row not in self.core.kept]
        self._ask(not kept, end, "a row that has ended holds memory", kept)
        self.counts_hold(end)
        return gaps

    def counts_hold(self, now: float) -> None:
        """Check that the ledger adds up, and that the engine's counts match the request table."""
        if self.recount:
            self.core.ledger.check()
        state = self.core.requests.state
        self._ask(
            self.core.active == int((state != State.FINISHED).sum()), now, "requests are lost"
        )
        holding = int((state == State.RUNNING).sum())
        self._ask(
            self.core.holding == holding,
            now,
            "admissions, preemptions and swap-ins of the plans do not add up",
        )

    def _ask(self, holds: bool, now: float, rule: str, rows: Iterable[int] = ()) -> None:
        if holds:
            return
        ids = self.core.requests.ids
        names = ", ".join(ids[int(row)] for row in rows)
        raise AuditError(
            f"plan {self.plans}, at {now:.6f} s: {rule}{f' ({names})' if names else ''}"
        )


def check_policy(
    policy: str | type[Policy] | PolicySpec,
    kv: Sequence[str] | None = None,
    seeds: Iterable[int] = range(5),
    config: SimulationConfig = CROWDED,
) -> int:
    """Run `policy` over small random workloads with too little memory, on each ledger of `kv`
    (default: all ledgers).

    policy  as on the command line, or a class, or a spec
    config  sizes of the engine, profile, estimator

    Check that every plan keeps the rules of `Auditor`; that every request ends with all its tokens
    and gives its memory back; that a second run, with single steps or with `valid_for`, gives the
    same rows to the last bit. A policy with `on_withdraw` also runs with clients that give up after
    `PATIENCE_S`. A policy that takes part in asynchronous scheduling also runs with that.

    Returns the number of plans checked. Raises AuditError with policy, ledger and seed.
    """
    spec = _spec(policy)
    plans = 0
    for name in kv or ledger_names():
        for seed in seeds:
            for asynchronous in (False, True) if spec.policy.asynchronous else (False,):
                settings = config.model_copy(update={"async_scheduling": asynchronous})
                where = (
                    f"policy {spec.label} on ledger {name}, seed "
                    f"{seed}{', asynchronous' if asynchronous else ''}"
                )
                try:
                    plans += _check_run(_inputs(settings, replace(spec, kv=name), seed))
                except (AssertionError, PolicyError) as error:
                    raise AuditError(f"{where}: {error}") from error
    return plans


def _spec(policy: str | type[Policy] | PolicySpec) -> PolicySpec:
    if isinstance(policy, PolicySpec):
        return policy
    return parse_policy(policy) if isinstance(policy, str) else PolicySpec(policy.name, own=policy)


def _inputs(config: SimulationConfig, spec: PolicySpec, seed: int) -> Inputs:
    return Inputs(config, crowd(seed), resolve_hardware(config), (spec,), ())


def _check_run(inputs: Inputs) -> int:
    plans = _check_served(inputs)
    if inputs.policies[0].policy.withdraws():
        impatient = inputs.config.model_copy(update={"client_timeout": PATIENCE_S})
        plans += _check_served(replace(inputs, config=impatient))
    return plans


def _check_served(inputs: Inputs) -> int:
    (spec,) = inputs.policies
    single = replace(inputs, config=inputs.config.model_copy(update={"exact": True}))
    audited = Simulation(single, spec)
    auditor = Auditor(audited.engines[0].core, inputs.workload.longest)
    audited.run()
    rows = audited.rows()
    requests = rows.requests
    ended = requests["outcome"].notna() if inputs.config.client_timeout else requests["finished"]
    unfinished = requests.loc[~ended, "request_id"].tolist()
    if unfinished:
        raise AuditError(f"{', '.join(unfinished)} did not end")
    served = requests[requests["finished"]]
    emitted = dict(zip(served["request_id"], served["output_tokens"], strict=True))
    wanted = zip(inputs.workload.ids, inputs.workload.output_tokens.tolist(), strict=True)
    short = [name for name, n in wanted if emitted.get(name, n) != n]
    if short:
        raise AuditError(f"{', '.join(short)} ended with another number of tokens")
    ledger = audited.engines[0].core.ledger
    if ledger.usage().free != ledger.num_blocks:
        raise AuditError(
            f"{ledger.num_blocks - ledger.usage().free} blocks are in use when all requests have "
            "ended"
        )
    again = "a second run gave other rows: the policy is not deterministic"
    _same(rows, _run(single, spec), again)
    at_once = "steps run together gave other rows than single steps: valid_for is too large"
    _same(rows, _run(inputs, spec), at_once)
    return auditor.plans


def _run(inputs: Inputs, spec: PolicySpec) -> RunRows:
    simulation = Simulation(inputs, spec)
    simulation.run()
    return simulation.rows()


def _same(ours: RunRows, theirs: RunRows, said: str) -> None:
    for table in ("requests", "steps", "gaps"):
        try:
            pd.testing.assert_frame_equal(
                getattr(ours, table), getattr(theirs, table), check_exact=True, obj=table
            )
        except AssertionError as error:
            raise AuditError(f"{said} ({' '.join(str(error).split())})") from None


def check_router(
    router: str | type[Router] | RouterSpec,
    seeds: Iterable[int] = range(5),
    replicas: Sequence[int] = (1, 2, 5),
    config: SimulationConfig = CROWDED,
) -> int:
    """Run small random workloads on fleets of so many `replicas`, with requests placed by `router`.

    router  as on the command line, or a class, or a spec

    Check that the router answers with an index of `view.up` or a Verdict and does not change the
    view; that every request ends; that a second run gives the same rows, as does a run with hidden
    output lengths.

    Returns the number of answers checked. Raises AuditError with router, fleet and seed.
    """
    if isinstance(router, str):
        spec = parse_router(router)
    else:
        spec = router if isinstance(router, RouterSpec) else RouterSpec(router.name, own=router)
    answers = 0
    for number in replicas:
        for seed in seeds:
            settings = config.model_copy(update={"replicas": number})
            inputs = _inputs(settings, parse_policy("vllm"), seed)
            try:
                answers += _check_placed(inputs, spec)
            except (AssertionError, ValueError) as error:
                where = f"router {spec.name} on {number} replicas, seed {seed}"
                raise AuditError(f"{where}: {fault(error) or error}") from error
    return answers


def _check_placed(inputs: Inputs, spec: RouterSpec) -> int:
    rows, answers = _placed(inputs, spec, hidden=False)
    left = rows.requests.loc[rows.requests["outcome"].isna(), "request_id"].tolist()
    if left:
        raise AuditError(f"{', '.join(left)} did not end")
    again = "a second run gave other rows: the router is not deterministic"
    _same(rows, _placed(inputs, spec, hidden=False)[0], again)
    blind = "with hidden output lengths the router gave other rows: routers must not use them"
    _same(rows, _placed(inputs, spec, hidden=True)[0], blind)
    return answers


def _placed(inputs: Inputs, spec: RouterSpec, hidden: bool) -> tuple[RunRows, int]:
    """Return the rows of a run, and the number of questions to the router."""
    router, answers = spec.build(), 0
    place = router.place

    def watched(request: Request, stage: Role, view: FleetView) -> int | Verdict:
        nonlocal answers
        answers += 1
        up, length = list(view.up), request.output_tokens
        request.output_tokens = -1 if hidden else length
        answer = place(request, stage, view)
        request.output_tokens = length
        if list(view.up) != up:
            raise AuditError(f"{request.id}: the router changed view.up")
        if not isinstance(answer, Verdict) and answer not in up:
            raise AuditError(
                f"{request.id}: the router answered {answer!r}; give one of view.up, {up}"
            )
        return answer

    router.place = watched  # type: ignore[method-assign]
    simulation = Simulation(inputs, inputs.policies[0], router=router)
    simulation.run()
    return simulation.rows(), answers


def check_reader(
    reader: str | type[TraceReader], file: str | Path, seeds: Iterable[int] = range(50)
) -> int:
    """Read a valid `file`, then damaged copies of the file.

    reader  as after `--format`, or a class

    Check that the file has requests, and that a second reading gives the same. The reader must read
    a damaged copy, or refuse the copy with a WorkloadError.

    Returns the number of refused copies. Raises AuditError with the damage.
    """
    data, path = Path(file).read_bytes(), str(file)
    whole, refused = _read(reader, data, path, "as it is"), 0
    if not isinstance(whole, Workload):
        raise AuditError(f"reader {reader}, {path} as it is: {whole}")
    again = _read(reader, data, path, "again")
    for name in ("arrival_s", "prompt_tokens", "output_tokens"):
        if not np.array_equal(getattr(whole, name), getattr(again, name), equal_nan=True):
            raise AuditError(f"reader {reader}, {path}: a second reading gave another {name}")
    for said, damaged in _damaged(data, seeds):
        refused += not isinstance(_read(reader, damaged, path, said), Workload)
    return refused


def _read(
    reader: str | type[TraceReader], data: bytes, path: str, said: str
) -> Workload | WorkloadError:
    try:
        return read_bytes(data, path, reader, ReadOptions())
    except WorkloadError as error:
        return error
    except Exception as error:
        raise AuditError(
            f"reader {reader}, {path} {said}: {fault(error) or repr(error)}; raise a WorkloadError "
            "that says what is wrong with the file"
        ) from error


def _damaged(data: bytes, seeds: Iterable[int]) -> Iterator[tuple[str, bytes]]:
    """Yield each damage in words, with the damaged content."""
    yield "without content", b""
    yield "cut in the middle", data[: len(data) // 2]
    lines = data.splitlines(keepends=True)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        row, at = int(rng.integers(len(lines))), int(rng.integers(len(data)))
        wrong = bytes(rng.choice([b"x", b"-1", b"nan", b"", b"\xff", b'"', b"1e99"]))
        yield f"with {wrong!r} in place of byte {at}", data[:at] + wrong + data[at + 1 :]
        yield f"without line {row + 1}", b"".join(lines[:row] + lines[row + 1 :])


def crowd(seed: int, requests: int = 24) -> Workload:
    """Return requests of both classes, most within 0.2 s: some with objectives, some with shared
    prefixes, sessions, and a closed loop."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 200, requests)
    output = rng.integers(1, 100, requests)
    real_time = rng.random(requests) < 0.6
    counts = -(-prompt // 8)
    texts = [100 * rng.integers(4) + np.arange(n) for n in counts.tolist()]
    ids = np.unique(np.concatenate(texts), return_inverse=True)[1].astype(np.int64)
    group, stage = np.full(requests, -1), np.zeros(requests, np.int64)
    group[-6:], stage[-3:] = np.tile([0, 1, 2], 2), 1
    arrival = np.sort(rng.choice([0.0, 0.01, 0.05, 0.2], requests) * rng.random(requests))
    return Workload.build(
        np.where(stage > 0, np.nan, arrival),
        prompt,
        output,
        service_class=np.where(real_time, 0, 1).astype(np.int8),
        priority=rng.integers(0, 3, requests),
        slo_ttft_s=np.where(real_time, rng.choice([0.01, 0.1, 1.0], requests), np.nan),
        slo_tpot_s=np.where(real_time, rng.choice([0.005, 0.02, 0.2], requests), np.nan),
        group=group,
        stage=stage,
        delay_s=np.where(stage > 0, 0.01, 0.0),
        group_names=["session-0", "session-1", "session-2"],
        prefix=PrefixBlocks(ids, np.concatenate([[0], np.cumsum(counts)]), 8),
        pool=BestEffortPool(2, (8, 120), (4, 60), seed, until_s=0.3),
    )
