"""A live engine as a test bench: batches of any composition, each step timed."""

import contextlib
import time
from dataclasses import dataclass

import numpy as np

from twinserve.backends.live.engine.engine import VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.versions import LiveEngineError
from twinserve.policies.plan import Preemption
from twinserve.profiles.composition import StepComposition


@dataclass(frozen=True, slots=True)
class Timing:
    """One step: its work, and seconds. These are wall time around it, and of that in the executor,
    between GPU events (NaN without a GPU), and without a core. The last is NaN if the engine has
    several threads, or waits for a GPU."""

    work: StepComposition
    seconds: float
    exec_s: float
    device_s: float
    off_core_s: float


@dataclass(slots=True)
class _Held:
    prompt: int
    computed: int


class Bench:
    """Requests by name, steps by grants. The engine must run with MeasuringScheduler.

    adopt  contexts are blocks that were never computed (MeasuringScheduler); else they are computed
           first

    A step is timed from the plan to its tokens on the host, as a run on a live engine is. Raises
    LiveEngineError when the engine does something else than planned.
    """

    def __init__(self, engine: VllmEngine, seed: int = 0) -> None:
        self.engine = engine
        self.adopt = engine.scheduler.can_adopt
        self.block_tokens = engine.settings.block_tokens
        self.submit_s: list[float] = []
        self.transfers: list = []  # of swapped KV, as the engine reported them
        self._held: dict[str, _Held] = {}
        self._count = 0
        rng = np.random.default_rng(seed)
        longest = engine.settings.max_model_len
        self._text = rng.integers(1, engine.vocab, 2 * longest + 64).tolist()
        # there is no public way to the executor, nor to abort a request
        self._core = engine._client.engine_core
        self._exec_s = 0.0
        self._events = _gpu_events()
        self._alone = self._events[0] is None and engine.settings.threads == 1
        self._watch_executor()

    @property
    def pool_blocks(self) -> int:
        return self.engine.num_blocks

    def _watch_executor(self) -> None:
        """Time spent in the executor, by wrapping the two calls that a step makes to it."""
        executor, begin, end = self._core.model_executor, *self._events
        for name in ("execute_model", "sample_tokens"):
            call = getattr(executor, name)

            def timed(*args, _call=call, _last=name == "sample_tokens", **kwargs):
                if begin is not None and not _last:
                    begin.record()
                started = time.perf_counter()
                try:
                    return _call(*args, **kwargs)
                finally:
                    self._exec_s += time.perf_counter() - started
                    if end is not None:
                        end.record()

            setattr(executor, name, timed)

    def fill_cache(self, tokens: int) -> None:
        """Compute one prompt of `tokens` and copy its keys and values into every block of the pool:
        what adopted blocks hold shall be like what computed ones do. (A CPU is slower on attention
        weights that round to almost nothing, so zeros or random numbers would measure another
        attention.)"""
        adopt, self.adopt = self.adopt, False
        (name,) = self.hold([tokens], 2)
        (blocks,) = self.engine.scheduler.kv_cache_manager.get_block_ids(name)
        pool = self.pool_blocks + 1  # and vLLM's null block
        tensors = []
        with contextlib.suppress(AttributeError):  # a model runner that keeps its cache elsewhere
            tensors = [t for t in self.engine.kv_tensors if pool in getattr(t, "shape", ())]
        for tensor in tensors:
            dim = tuple(tensor.shape).index(pool)
            some = tensor.index_select(
                dim, _indices(blocks[: tokens // self.block_tokens], tensor.device)
            )
            for start in range(0, pool, some.shape[dim]):
                here = min(some.shape[dim], pool - start)
                tensor.narrow(dim, start, here).copy_(some.narrow(dim, 0, here))
        self.drop([name])
        self.step({})
        self.adopt = adopt

    # -- requests ----------------------------------------------------------------------------------
    def submit(self, prompt_tokens: int, room: int = 2) -> str:
        """A request of `prompt_tokens`; it may emit `room` tokens before it ends."""
        self._count += 1
        name = f"m{self._count:07d}"
        start = (self._count * 7919) % (len(self._text) - prompt_tokens)
        prompt = self._text[start : start + prompt_tokens]
        started = time.perf_counter()
        self.engine.submit(name, prompt, room)
        self.submit_s.append(time.perf_counter() - started)
        self._held[name] = _Held(prompt_tokens, 0)
        return name

    def hold(self, contexts: list[int], room: int) -> list[str]:
        """Requests with a first token and `contexts` tokens each; they may decode `room` - 1
        more."""
        names = [self.submit(context, room) for context in contexts]
        hits = (
            {name: self.whole_blocks(c - 1) for name, c in zip(names, contexts, strict=True)}
            if self.adopt
            else {}
        )
        left = {name: c - hits.get(name, 0) for name, c in zip(names, contexts, strict=True)}
        while left:
            budget, grants = self.engine.settings.max_step_tokens, {}
            for name, tokens in left.items():
                if budget and len(grants) < self.engine.settings.max_num_seqs:
                    grants[name] = min(tokens, budget)
                    budget -= grants[name]
            self.step(grants, {name: hits.pop(name) for name in grants if name in hits})
            left = {
                name: tokens - grants.get(name, 0)
                for name, tokens in left.items()
                if tokens > grants.get(name, 0)
            }
        return names

    def whole_blocks(self, tokens: int) -> int:
        return tokens // self.block_tokens * self.block_tokens

    def drop(self, names: list[str]) -> None:
        """Abort these requests. The engine's worker forgets them with the next step."""
        self._core.abort_requests([name for name in names if name in self._held])
        for name in names:
            self._held.pop(name, None)

    # -- steps -------------------------------------------------------------------------------------
    def step(self, grants: dict[str, int], hits: dict[str, int] | None = None, **moves) -> Timing:
        """One step. hits: uncomputed prefix tokens of joiners. moves: as of PlannedStep."""
        hits = {name: tokens for name, tokens in (hits or {}).items() if tokens}
        for name, tokens in hits.items():
            self._held[name].computed = tokens
        work = self._composition(grants)
        joining = {name: 0 for name in grants if not self._held[name].computed}
        planned = PlannedStep(grants, joining | hits, **moves)
        self._exec_s = 0.0
        on_core, started = time.thread_time(), time.perf_counter()
        answer = self.engine.step(planned)
        seconds, on_core = time.perf_counter() - started, time.thread_time() - on_core
        if grants and (found := answer.scheduled.drift(planned)):
            raise LiveEngineError(
                f"the engine did not run the step that was to be measured: {found}"
            )
        self.transfers += answer.transfers
        for name, tokens in grants.items():
            self._held[name].computed += tokens
        for name in answer.finished:
            self._held.pop(name, None)
        off_core = max(seconds - on_core, 0.0) if self._alone else float("nan")
        return Timing(work, seconds, self._exec_s, self._device_s(bool(grants)), off_core)

    def swap_out(self, name: str, beside: dict[str, int]) -> Timing:
        """Move a request's KV to the host in a step that computes `beside`."""
        return self.step(beside, preempted=((name, Preemption.SWAP),))

    def swap_in(self, name: str, beside: dict[str, int]) -> Timing:
        """Bring a request's KV back in a step in which it decodes."""
        return self.step({**beside, name: 1}, swapped_in=(name,))

    def _composition(self, grants: dict[str, int]) -> StepComposition:
        contexts, new, resident = [], [], []
        for name, tokens in grants.items():
            held = self._held[name]
            if tokens == 1 and held.computed >= held.prompt:
                contexts.append(held.computed)
            else:
                new.append(tokens)
                resident.append(held.computed)
        prefills = np.array(new, np.int64), np.array(resident, np.int64)
        return StepComposition(len(contexts), sum(contexts), max(contexts, default=0), *prefills)

    def _device_s(self, computed: bool) -> float:
        begin, end = self._events
        if begin is None or not computed:
            return float("nan")
        with contextlib.suppress(RuntimeError):
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
        return float("nan")


def _indices(blocks: list[int], device):
    import torch

    return torch.tensor(list(blocks), device=device)


def _gpu_events() -> tuple:
    import torch

    if not torch.cuda.is_available():
        return None, None
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
