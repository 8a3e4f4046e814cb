"""LayerKV in small runs: the layer-wise ledger with several layers, and everything checked around
each step."""

from tests.moves import way
from tests.policies.policy_runs import MODEL, Desk, run_core, watch
from twinserve.backends.links import PcieLink, evenly
from twinserve.policies.base import EngineLimits
from twinserve.policies.kv.layerwise.ledger import LayerwiseLedger
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.layerkv.lengths import LengthRange
from twinserve.policies.parts.estimators import LinearEstimator
from twinserve.policies.registry import parse_policy
from twinserve.policies.requests import RequestTable
from twinserve.profiles.forms.bros import BrosLinearModel, PhaseCost, SwapTimeModel
from twinserve.sim.engine.core import EngineCore

LAYERS = 4


class Truth:
    """Output lengths by request id."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.output_tokens = lengths.get


# A prompt takes 1 s a token, a decode step 1 s, a layer of four a quarter of a second a token on
# the link.
BY_HAND = LinearEstimator(
    BrosLinearModel(PhaseCost(1.0, 0.0, 0.0), PhaseCost(0.0, 0.0, 1.0)),
    SwapTimeModel(seconds_per_byte=1.0),
)


class Between:
    """Every output is predicted to be of `lower` to `upper` tokens."""

    needs_truth = False

    def __init__(self, lower: float = 10, median: float = 15, upper: float = 20) -> None:
        self.range = LengthRange(lower, median, upper)

    def predict(self, row, requests) -> LengthRange:
        return self.range

    def observe(self, prompt_tokens, output_tokens) -> None:
        pass


class LayerDesk(Desk):
    """With four layers. All is checked after every step, which takes 1 s."""

    def __init__(
        self, policy: str, blocks: int, host: int = 100, estimator=BY_HAND, predictor=None
    ) -> None:
        super().__init__(policy, blocks, host=host, estimator=estimator)
        self.policy.predictor = predictor or Between()

    def _ledger(self, kind: str, blocks: int, host: int) -> LayerwiseLedger:
        return LayerwiseLedger(self.table, blocks, 4, host, LAYERS)

    def moves(self) -> list[tuple]:
        """(name, direction, tokens, layers, who waits) of the last plan."""
        names = self.table.ids
        return [(names[m.row], way(m), m.tokens, m.layers, m.hold.value) for m in self.plan.moves]

    def resident(self, *names: str) -> list[int]:
        return [self.ledger.resident_layers(self.table.ids.index(name)) for name in names]


def simulate(
    workload,
    policy: str = "layerkv",
    blocks: int = 40,
    *,
    kind: str = "layerwise",
    size: int = 4,
    host: int = 0,
    layers: int = LAYERS,
    limits: EngineLimits | None = None,
    bytes_per_s: float = 1e9,
    model=MODEL,
    estimator=None,
    fast: bool = True,
    check: bool = False,
    asynchronous: bool = False,
    seen=None,
    allreduces=None,
):
    """Run to the end. Returns steps, gaps and requests as frames, and the engine. seen(plan, core)
    is given every plan. allreduces: seconds of a step's all-reduces on the link, by its
    composition."""
    limits = limits or EngineLimits(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, kv_bytes_per_token=40_000
    )
    table = RequestTable()
    if kind == "layerwise":
        ledger = LayerwiseLedger(table, blocks, size, host, layers=layers)
    else:
        ledger = PagedLedger(table, blocks, size, host, prefix_caching=False)
    estimator = estimator or LinearEstimator(
        BrosLinearModel.fit(model), SwapTimeModel(1 / bytes_per_s)
    )
    core = EngineCore(table, parse_policy(policy).build(limits, estimator), ledger, asynchronous)
    predictor = core.policy.predictor
    if predictor is not None and predictor.needs_truth:
        predictor.truth = Truth(
            dict(zip(workload.ids, workload.output_tokens.tolist(), strict=True))
        )
    if check or seen:
        watch(core, seen)
    link = PcieLink(bytes_per_s, sharing=core.policy.traits.link_sharing or evenly)
    more = {"layers": layers, "fast": fast, "allreduces": allreduces}
    return run_core(workload, core, model, link, limits, **more)
