"""An engine on paper: carries out planned steps as vLLM does, and counts who holds what. Refuses
what no engine could do."""

from dataclasses import dataclass, field

from twinserve.backends.live.engine.planned import EngineRequests, PlannedStep
from twinserve.backends.live.transfer.host import HostKv
from twinserve.policies.plan import Preemption
from twinserve.sim.results.decisions import DecisionLog
from twinserve.sim.twin.replay import planned_step


@dataclass
class PaperEngine:
    """block_tokens, host_blocks: its sizes. Its device has room for all.

    held      request -> tokens on the device
    told      request -> tokens emitted
    fullest   blocks in use at once, at most; shared ones count for each request
    """

    block_tokens: int
    host_blocks: int
    requests: dict[str, tuple[int, int]]  # prompt and output tokens
    held: dict[str, int] = field(default_factory=dict)
    told: dict[str, int] = field(default_factory=dict)
    fullest: int = 0

    def __post_init__(self) -> None:
        self.host = HostKv(self.host_blocks * self.block_tokens, self.block_tokens)

    def step(self, planned: PlannedStep) -> list[str]:
        """Carry it out. Returns who got its last token. Raises AssertionError at what cannot be,
        HostFull where the host is too small."""
        for name, kind in planned.preempted:
            tokens = self.held.pop(name)
            if kind is Preemption.SWAP:
                self.host.swap_out(name, self._blocks(tokens), tokens)
        for name in planned.forgotten:
            assert self.host.held(name), f"{name} has no copy to forget"
            self.host.drop(name)
        for name in planned.swapped_in:
            self.held[name] = tokens = self.host.swap_in(name)
            self.host.resumed(name, self._blocks(tokens), tokens)
        for name, hit in planned.hits.items():
            assert name not in self.held and not self.host.held(name), f"{name} begins anew"
            self.held[name] = hit
        for name, tokens in planned.grants.items():
            self.held[name] += tokens
        self.host.take_orders()
        self.fullest = max(self.fullest, sum(len(self._blocks(n)) for n in self.held.values()))
        ended = [name for name in planned.grants if self._emits(name)]
        for name in ended:
            del self.held[name]
        return ended

    def _emits(self, name: str) -> bool:
        """The step may give it a token, and that may be its last."""
        (prompt, output), told = self.requests[name], self.told.get(name, 0)
        assert self.held[name] <= prompt + told, f"{name} computes tokens that nobody knows"
        if self.held[name] == prompt + told:
            self.told[name] = told + 1
        return self.told.get(name) == output

    def _blocks(self, tokens: int) -> list[int]:
        return list(range(-(-tokens // self.block_tokens)))


def on_paper(log: DecisionLog, host_blocks: int) -> PaperEngine:
    """The engine after the whole of `log`."""
    names = [request.id for request in log.requests]
    requests = {r.id: (r.prompt_tokens, r.most_output_tokens) for r in log.requests}
    engine = PaperEngine(log.run["kv"]["block_tokens"], host_blocks, requests)
    on_engine = EngineRequests(names)
    for step in log.steps:
        for row in step.withdrawn:
            on_engine.forget(names[row])
            engine.held.pop(names[row], None)
            engine.host.drop(names[row])
        for name in engine.step(planned_step(step, on_engine)):
            on_engine.forget(name)
    engine.host.check()
    return engine
