"""A run whose steps a live vLLM engine executes, otherwise as a simulation."""

import time
from dataclasses import replace
from pathlib import Path

from twinserve.backends.counts import not_made
from twinserve.backends.live.engine.backend import LiveBackend
from twinserve.backends.live.engine.drafting import DraftingLiveBackend
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.prompts import PromptTexts
from twinserve.backends.speculating import SpeculatingBackend
from twinserve.policies.base import Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.plan import DEVICE, HOST
from twinserve.policies.registry import PolicySpec, ledger_class
from twinserve.policies.requests import End
from twinserve.sim.engine.clock import Clock
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.replicas import simulated_backend
from twinserve.sim.setup.run import Report, Simulation, describe
from twinserve.sim.setup.speculation import parse_speculation
from twinserve.sim.twin.replay import parting, tokens_of


def check_live_drafts(speculate: str | None, asynchronous: bool) -> None:
    """Raises SettingsError for `--speculate` of a run whose drafts a live engine does not make."""
    if speculate is None:
        return
    given = parse_speculation(speculate)
    if given.method != "ngram":
        raise SettingsError(
            f"--speculate: an engine in this process drafts by n-grams alone, not by "
            f"{given.method}; simulate with method=ngram, or drop it"
        )
    if given.batches is not None:
        raise SettingsError(
            "--speculate: an engine in this process has one number of drafts for all batch sizes; "
            "drop batches"
        )
    if asynchronous:
        raise SettingsError(
            "--speculate: vLLM looks n-grams up between two steps, and asynchronous scheduling "
            "leaves no time for that; give --no-async-scheduling"
        )


def with_drafts(settings: LiveSettings, run: dict) -> LiveSettings:
    """Add drafts to `settings` of the run in run.json: most of each request, n-gram lengths, and
    room for drafts in a step and after the longest request. Raises SettingsError as
    `check_live_drafts`."""
    speculate = run["config"].get("speculate")
    if speculate is None:
        return settings
    check_live_drafts(speculate, run["config"]["async_scheduling"])
    given = parse_speculation(speculate)
    return replace(
        settings,
        drafts=given.k,
        lookup=given.lengths,
        # Drafts behind the longest request, and behind them as many again: where one request
        # leaves less, vLLM looks nothing up and gives its whole batch drafts of token 0 (0.32,
        # `v1/worker/gpu_model_runner.py`, `_input_fits_in_drafter`)
        max_model_len=settings.max_model_len + 2 * given.k,
        # vLLM admits a request to a step that has room for it and its padding alone
        max_step_tokens=settings.max_step_tokens + given.k,
    )


def blocks_of_drafts(speculate: str | None, requests: int, block_tokens: int) -> int:
    """Return the most KV blocks that drafts of so many requests take, padding too."""
    if speculate is None:
        return 0
    return requests * -(-parse_speculation(speculate).k // block_tokens)


_WIDE_TABLE = 2048  # blocks


class WallClock(Clock):
    """A clock that does not run ahead of the wall's: what is due later is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.monotonic()

    def wall_s(self) -> float:
        """Seconds since the run began, as the wall clock has it."""
        return time.monotonic() - self._started

    def restart(self) -> None:
        """Time begins now: what took long before the first event does not count."""
        self._started = time.monotonic()

    def step(self) -> None:
        ahead = self.peek() - self.wall_s()
        if 0 < ahead < float("inf"):
            time.sleep(ahead)
        super().step()

    def reach(self, time_s: float, priority: int) -> bool:
        """False: each event is waited for."""
        return False


def check_synchronous(asynchronous: bool, physical: bool) -> None:
    """Raise SettingsError for a run that plans ahead on a physical layout. The plan changes slots,
    and the engine would execute the step before on the slots of the step after."""
    if asynchronous and physical:
        raise SettingsError(
            "--physical: a plan moves KV, and asynchronous scheduling makes the next plan before "
            "the step has ended; give --no-async-scheduling"
        )


class LiveRun(Simulation):
    """One policy on one live engine.

    wall  True: requests arrive in wall time, and everything that takes time counts. False: the
          clock advances by the measured time of each step and jumps over idle time.
    predicted  the clock advances by the time that the profile predicts for each step, as in a
               simulation: the same
          decisions, made again and carried out (not with `wall`)
    texts     token ids of the prompts; by default drawn from the run's seed
    decisions  keep every plan, for a decision log
    """

    def __init__(
        self,
        inputs: Inputs,
        spec: PolicySpec,
        engine: VllmEngine,
        report: Report | None = None,
        wall: bool = True,
        texts: PromptTexts | None = None,
        predicted: bool = False,
        decisions: bool = False,
    ) -> None:
        if inputs.config.replicas != 1:
            raise SettingsError("--replicas: one live engine is one replica; drop it")
        if inputs.pools:
            raise SettingsError("--fleet: one live engine is one replica; drop it")
        if (changing := inputs.config.changes_replicas) is not None:
            raise SettingsError(f"{changing}: one live engine is one replica that stays; drop it")
        if inputs.config.shared_prefix and not predicted:
            raise SettingsError("--shared-prefix: a live engine's own attention reads KV; drop it")
        check_live_drafts(inputs.config.speculate, inputs.config.async_scheduling)
        if inputs.front_end is not None:
            raise SettingsError("--front-end: an engine in this process has none; drop it")
        check_synchronous(inputs.config.async_scheduling, engine.settings.physical)
        self.live = engine
        self.wall, self.predicted = wall, predicted
        self.answers = []
        self._texts = texts or PromptTexts(
            engine.vocab, inputs.hardware.block_tokens, inputs.config.seed
        )
        clock = WallClock() if wall else Clock()
        self._wall_s = clock.wall_s if wall else None
        super().__init__(inputs, spec, report, decisions, clock=clock, backend=self._live_backend)
        if engine.settings.physical:
            self.backend.lay_out(self.engines[0].core.ledger)

    @property
    def backend(self) -> LiveBackend:
        return self.engines[0].backend

    def _live_backend(
        self, inputs: Inputs, spec: PolicySpec, policy: Policy, ledger: KvLedger
    ) -> LiveBackend:
        twin = simulated_backend(inputs, spec, policy, ledger)
        twin.fast = False
        parts = ledger.table, self.live
        if isinstance(twin, SpeculatingBackend):
            backend = DraftingLiveBackend(*parts, twin, self._texts, self._wall_s)
        else:
            backend = LiveBackend(*parts, twin, self._texts, self._wall_s)
        backend.on_answer = self.answers.append
        backend.predicted = self.predicted
        return backend

    def described(self) -> dict:
        """Return for run.json: the engine, and its deviations from the plans."""
        engine = self.live
        scheduler = engine.scheduler
        described = describe(self.inputs, self.spec, self.engines[0])
        copied = {
            way: {
                "bytes": sum(size for to, size, _ in self.backend.transfers if to == target),
                "seconds": sum(took for to, _, took in self.backend.transfers if to == target),
            }
            for way, target in (("d2h", HOST), ("h2d", DEVICE))
        }
        return {
            "vllm": engine.version,
            "model": str(engine.settings.model),
            "num_blocks": engine.num_blocks,
            "memory": "physical"
            if engine.settings.physical or owns_pool(described)
            else "accounted",
            "pace": "predicted" if self.predicted else "wall" if self.wall else "measured",
            "steps": scheduler.steps,
            "drift": scheduler.drift,
            **self._drafted(),
            "first_drift": scheduler.first_drift,
            "parted": self.parted(),
            "copied": copied,  # really, by the engine; the rows have what the ledger accounts for
            "not_made": not_made(self.backend.twin.moved, engine.settings.physical),
        }

    def _drafted(self) -> dict:
        if self.inputs.config.speculate is None:
            return {}
        shortest, longest = self.live.settings.lookup
        return {"drafts": {"most": self.live.settings.drafts, "lookup": [shortest, longest]}}

    def parted(self) -> str:
        """The first deviation from the plan, or incomplete answer, in a line; empty if none."""
        requests, expected = self.engines[0].core.requests, self.backend.expected
        whole = {
            request.id: expected[request.id] for request in requests if request.end == End.COMPLETED
        }
        return parting(self.live.scheduler, whole, tokens_of(self.answers))

    def _advance(self) -> None:
        if self.wall:
            self.clock.restart()
        super()._advance()


def owns_pool(run: dict) -> bool:
    """Return whether vLLM's own block pool equals the ledger's in the run of run.json; otherwise
    memory is accounted next to a larger pool."""
    return run["policy"]["name"] == "vllm" and run["kv"]["ledger"] == "paged"


def blank_settings(**options) -> LiveSettings:
    """Settings of which only `options` are known; the sizes come from the run."""
    return LiveSettings(Path(), None, 0, 0, 0, 0, **options)


def live_settings(inputs: Inputs, spec: PolicySpec, settings: LiveSettings) -> LiveSettings:
    """`settings` with the sizes that a run of `spec` needs."""
    workload = inputs.workload
    longest = workload.longest
    engine = Simulation(inputs, spec).engines[0]
    step_tokens = engine.core.policy.step_tokens(longest)
    size = inputs.hardware.block_tokens
    text = workload.prompt_tokens + workload.output_tokens
    blocks = int((-(-text // size)).sum()) + (
        0 if workload.pool is None else workload.pool.batch * -(-longest // size)
    )
    blocks += blocks_of_drafts(inputs.config.speculate, len(text), size)
    return settings_for(describe(inputs, spec, engine), longest, step_tokens, settings, blocks)


def settings_for(
    run: dict,
    longest: int,
    step_tokens: int,
    settings: LiveSettings,
    most_blocks: int | None = None,
) -> LiveSettings:
    """`settings` with the sizes that the run described by run.json needs: a pool and host memory
    for all that the ledger can hold. longest: prompt and output tokens of the longest request;
    step_tokens: new tokens of the longest step; most_blocks: KV blocks of all requests together,
    which bounds both."""
    kv, limits = run["kv"], run["limits"]
    if settings.physical:
        if ledger_class(kv["ledger"]).knows_layers:
            return layer_settings(run, longest, step_tokens, settings, most_blocks)
        return physical_settings(run, longest, step_tokens, settings)
    # Policy vllm is vLLM's own, so its pool is the ledger's to the block. Others allocate in
    # another order, or lay KV out as vLLM does not: their pool must never bind, and the ledger's
    # account is the one that counts.
    exact = owns_pool(run)
    device, host = kv["num_blocks"], kv["host_blocks"]
    ledger = ledger_class(kv["ledger"])
    whole = ledger.whole_blocks(device, host)
    bound = most_blocks or whole + host
    # On a GPU vLLM's runner keeps a seat for every request that holds memory, paused ones too.
    seats = limits["max_num_seqs"] if exact else 4 * limits["max_num_seqs"]
    # Beside what is in use there is room for what the ledger has cached: where both give up what
    # was used longest ago, as much again, and otherwise every text.
    keeps_texts = kv["prefix_caching"] and not ledger.evicts_by_last_use
    cached = bound if keeps_texts else device if kv["prefix_caching"] else 0
    sized = replace(
        settings,
        num_blocks=device if exact else min(whole, bound) + cached,
        block_tokens=kv["block_tokens"],
        max_num_seqs=seats,
        max_step_tokens=max(step_tokens, seats),  # vLLM wants a token for each seat
        max_model_len=longest + 1,  # vLLM keeps one token's room for what it samples
        prefix_caching=kv["prefix_caching"],
        keeps_texts=keeps_texts,
        # What is back on paper, or comes back in this step, is on the host until the step has
        # been made: as much as the device holds, beside what the ledger counts.
        swap_blocks=0 if exact or not host else min(host + whole, bound),
    )
    return with_drafts(sized, run)


def physical_settings(
    run: dict, longest: int, step_tokens: int, settings: LiveSettings
) -> LiveSettings:
    """As `settings_for`, for an engine on which the ledger's layout is made real: device and host
    have what the ledger has, to the block. Raises SettingsError for a ledger that has no layout of
    its own."""
    kv, limits = run["kv"], run["limits"]
    if kv["ledger"] != "bidirectional":
        raise SettingsError(
            f"--physical lays KV out as ledger bidirectional or layerwise does, and policy "
            f"{run['label']} runs on {kv['ledger']}: drop it, or add kv=bidirectional to the policy"
        )
    size, blocks = kv["block_tokens"], -(-longest // kv["block_tokens"])
    # A best-effort request may lie in many blocks of few tokens each. Its table has room for the
    # worst case in a small pool, and in a large one for as much as costs the worker little.
    widest = min(kv["num_blocks"], longest, max(_WIDE_TABLE, 4 * blocks))
    return replace(
        settings,
        num_blocks=kv["num_blocks"],
        block_tokens=size,
        max_num_seqs=limits["max_num_seqs"],
        max_step_tokens=max(step_tokens, limits["max_num_seqs"]),
        max_model_len=max(longest + 1, widest * size),
        prefix_caching=False,
        swap_blocks=kv["host_blocks"],
    )


def layer_settings(
    run: dict,
    longest: int,
    step_tokens: int,
    settings: LiveSettings,
    most_blocks: int | None = None,
) -> LiveSettings:
    """Return `physical_settings` for the layer-wise ledger: a page for each cell and host memory of
    its size. Staging pages hold one layer of all that a step can stream."""
    kv, limits = run["kv"], run["limits"]
    size, seats = kv["block_tokens"], limits["max_num_seqs"]
    device, host = kv["num_blocks"], kv["host_blocks"]
    layers = run["profile"]["llm"]["layers"]
    streamed = min(device + host, seats * -(-longest // size), most_blocks or device + host)
    return replace(
        settings,
        num_blocks=device,
        block_tokens=size,
        max_num_seqs=4 * seats,  # on a GPU paused requests keep a seat
        max_step_tokens=max(step_tokens, 4 * seats),
        max_model_len=longest + 1,
        prefix_caching=False,
        swap_blocks=host,
        layers=layers,
        staging=max(streamed, layers),
    )
