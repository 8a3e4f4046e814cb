"""What a policy believes that an application or a request will need. Its own knowledge: never the
simulator's truth, unless an oracle is asked for.

`mlp`            Justitia's (Yang et al., Sec. IV-B): a small network a class, on TF-IDF of the
                 input text
(predictors_mlp.py)
`class-mean`     the mean of the class's training samples, whatever the text: what a network must
                 beat
`perfect`        the truth, as an ablation; the engine must hand it over (`truth`)
`oracle-length`  the truth, as a bound: what any predictor could be worth at most; `oracle` for
                 short. Every policy that predicts lengths has this name for it, and run.json says
                 that it was used

`error` adds noise of a chosen size to the others; `perfect,error=4.52` is a predictor with the
relative error that the paper's Table II reports of DistilBERT.
"""

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from twinserve.formats import parse_json
from twinserve.policies.base import Options, RequestPredictor, Truth
from twinserve.policies.errors import PolicyError
from twinserve.policies.requests import Application, RequestTable

Cost = Callable[[int, int], int]
FIRST_GUESS_TOKENS = 256  # output of a request about which nothing at all is known


def kv_token_time(p: int, d: int) -> int:
    """KV token-time of a request with p prompt and d output tokens: p + 1, .., p + d tokens, an
    iteration each (Justitia, eq. 1, exact: the paper prints d^2/2 for d(d+1)/2).
    Token-iterations."""
    return p * d + d * (d + 1) // 2


def compute_tokens(p: int, d: int) -> int:
    """VTC's cost of a request, p + 2d (Justitia/C)."""
    return p + 2 * d


COSTS: dict[str, Cost] = {"memory": kv_token_time, "compute": compute_tokens}


# without scikit-learn, of the extra `learn`
NO_NETWORK = (
    "demands are predicted by the mean of each class: the network that Justitia has for it needs "
    "scikit-learn (pip install 'twinserve[learn]')"
)


def usual_predictor() -> Literal["mlp", "class-mean"]:
    """`mlp`, or `class-mean` where scikit-learn is not installed. Imports nothing."""
    return "mlp" if find_spec("sklearn") else "class-mean"


ORACLE = "oracle-length"
# so that run.json has one name
OracleByShortName = BeforeValidator(lambda name: ORACLE if name == "oracle" else name)


class DemandOptions(Options):
    """predictor  see above; by default `mlp`, without scikit-learn `class-mean`, which is said
    error      mean relative error of the noise that is put on each prediction; 0: none. A bound has
               none
    seed       of that noise, and of training (samples, first weights, order)
    training   JSONL file of earlier applications to learn from, {"kind", "text", "stages":
               [[[prompt, output], ..], ..]} a line, tokens; none: samples of the nine classes as
               the trace `apps` draws them
    """

    predictor: Annotated[
        Literal["mlp", "class-mean", "perfect", "oracle-length"], OracleByShortName
    ] = Field(default_factory=usual_predictor)
    error: float = Field(0.0, ge=0.0, le=100.0)
    seed: int = Field(0, ge=0)
    training: str | None = None

    @property
    def notice(self) -> str:
        chosen = "predictor" in self.model_fields_set or self.predictor == "mlp"
        return "" if chosen else NO_NETWORK

    @field_validator("error")
    @classmethod
    def _a_bound_has_none(cls, error: float, others: ValidationInfo) -> float:
        if error and others.data.get("predictor") == ORACLE:
            raise ValueError(
                f"{ORACLE} is a bound and has no error; write predictor=perfect,error={error:g}"
            )
        return error


class Predictor(RequestPredictor):
    """Predicts by class means; the others build on it."""

    reads_texts = False  # of applications

    def __init__(self, options: DemandOptions) -> None:
        if options.training is not None:
            read_training(options.training)  # refused here, whether or not an application comes
        self.options = options
        self._noise = _spread_of(options.error)
        self._ended, self._ended_tokens = 1, FIRST_GUESS_TOKENS  # requests without a class

    def prepare(self, kinds: Iterable[str], cost: Cost) -> None:
        """Learn what there is to learn of these classes now, and not at their first application.
        Raises PolicyError."""
        for kind in sorted(kinds):
            self._mean_cost(kind, cost)

    def application(self, application: Application, cost: Cost) -> int | None:
        """Demand of a whole application, >= 1, in the unit of `cost`; None if nothing is known of
        its class."""
        demand = self._application(application, cost)
        return None if demand is None else self._blurred(demand, application.name)

    def output_tokens(self, row: int, requests: RequestTable, kind: str | None = None) -> int:
        """Tokens that a request will emit, >= 1. kind: of its application, if any."""
        return self._blurred(self._output_tokens(row, requests, kind), requests.ids[row])

    def expected_output(
        self, row: int, requests: RequestTable, kind: str | None = None
    ) -> float | None:
        return self.output_tokens(row, requests, kind)

    def total_over_part(self, kind: str, stage: int, cost: Cost) -> float | None:
        """What applications of a class that have this stage cost over what they cost up to its end,
        in earlier ones; None: there are none."""
        return _total_over_part(kind, *self._source, stage, cost)

    def ended(self, output_tokens: int, kind: str | None) -> None:
        """A request ended with so many output tokens. Those of no class, or of one about which
        nothing was learned, are predicted by their mean so far."""
        if kind is None or not _stage_means(kind, *self._source):
            self._ended += 1
            self._ended_tokens += output_tokens

    # -- without noise -----------------------------------------------------------------------------
    def _application(self, application: Application, cost: Cost) -> float | None:
        return self._mean_cost(application.kind, cost)

    def _output_tokens(self, row: int, requests: RequestTable, kind: str | None) -> float:
        if kind is not None:
            means = _stage_means(kind, *self._source)
            if means:
                return means[min(int(requests.stage[row]), len(means) - 1)]
        return self._ended_tokens / self._ended

    @property
    def _source(self) -> tuple[str | None, int]:
        return self.options.training, self.options.seed

    def _mean_cost(self, kind: str | None, cost: Cost) -> float | None:
        return None if kind is None else _mean_cost(kind, *self._source, cost)

    def _blurred(self, value: float, name: str) -> int:
        """With the error model's noise, a function of (seed, name): every policy errs in the same
        way."""
        if self._noise:
            key = (0xE7707, zlib.crc32(name.encode()))
            rng = np.random.default_rng(np.random.SeedSequence(self.options.seed, spawn_key=key))
            value *= math.exp(self._noise * rng.standard_normal())
        return max(1, round(value))


class Oracle(Predictor):
    """The truth."""

    needs_truth = True

    def prepare(self, kinds: Iterable[str], cost: Cost) -> None:
        self._told()

    def _told(self) -> Truth:
        if self.truth is None:
            raise PolicyError(
                f"predictor={self.options.predictor}: this engine does not know what requests "
                "will need; choose another"
            )
        return self.truth

    def _application(self, application: Application, cost: Cost) -> float | None:
        requests = self._told().application(application.group)
        return None if requests is None else sum(cost(p, d) for p, d in requests.tolist())

    def _output_tokens(self, row: int, requests: RequestTable, kind: str | None) -> float:
        known = self._told().output_tokens(requests.ids[row])
        return super()._output_tokens(row, requests, kind) if known is None else known


def make_predictor(options: DemandOptions) -> Predictor:
    """A new predictor. scikit-learn is imported when `mlp` is first asked about a class."""
    if options.predictor == "mlp":
        from twinserve.policies.parts.predictors_mlp import TextPredictor

        return TextPredictor(options)
    return Oracle(options) if options.predictor in ("perfect", ORACLE) else Predictor(options)


# -- training samples ------------------------------------------------------------------------------
@lru_cache(maxsize=256)
def samples_of(kind: str, training: str | None, seed: int) -> tuple:
    """Earlier applications of a class (`traces.apps.classes.Sample`); empty if there are none.
    Raises PolicyError."""
    from twinserve.traces.apps.classes import KINDS, training_samples

    if training is not None:
        return read_training(training).get(kind, ())
    return tuple(training_samples(kind, seed=seed)) if kind in KINDS else ()


@lru_cache(maxsize=8)
def read_training(path: str) -> dict[str, tuple]:
    """Samples by class from a JSONL file as `DemandOptions.training` describes it. Raises
    PolicyError with one line."""
    from twinserve.traces.apps.classes import Sample

    found: dict[str, list] = defaultdict(list)
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"training={path}: cannot be read ({error}); give a JSONL file") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            stages = tuple(
                tuple((_tokens(p), _tokens(d)) for p, d in stage) for stage in entry["stages"]
            )
            kind, text = entry["kind"], entry["text"]
            if not (isinstance(kind, str) and isinstance(text, str) and stages and all(stages)):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise PolicyError(
                f'training={path}: line {number} is not {{"kind": .., "text": .., '
                '"stages": [[[prompt, output], ..], ..]} with texts and tokens >= 1; fix or '
                "remove it"
            ) from None
        found[kind].append(Sample(kind, text, stages))
    if not found:
        raise PolicyError(
            f"training={path}: no samples in it; give earlier applications, one a line"
        )
    return {kind: tuple(samples) for kind, samples in found.items()}


def _tokens(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError
    return value


@lru_cache(maxsize=256)
def _mean_cost(kind: str, training: str | None, seed: int, cost: Cost) -> float | None:
    costs = costs_of(samples_of(kind, training, seed), cost)
    return float(np.mean(costs)) if costs else None


def costs_of(samples: Iterable, cost: Cost) -> list[int]:
    """What each sample cost, all its requests together."""
    return [sum(cost(p, d) for p, d in sample.requests) for sample in samples]


@lru_cache(maxsize=256)
def _stage_means(kind: str, training: str | None, seed: int) -> list[float]:
    """Mean output tokens of the requests of each stage; of later stages, those of samples that have
    them."""
    outputs: defaultdict[int, list[int]] = defaultdict(list)
    for sample in samples_of(kind, training, seed):
        for stage, requests in enumerate(sample.stages):
            outputs[stage] += [d for _, d in requests]
    return [float(np.mean(outputs[stage])) for stage in range(len(outputs))]


@lru_cache(maxsize=256)
def _total_over_part(
    kind: str, training: str | None, seed: int, stage: int, cost: Cost
) -> float | None:
    those = [one for one in samples_of(kind, training, seed) if len(one.stages) > stage]
    part = sum(cost(p, d) for one in those for some in one.stages[: stage + 1] for p, d in some)
    return sum(costs_of(those, cost)) / part if part else None


# -- the error model -------------------------------------------------------------------------------
def mean_relative_error(sigma: float) -> float:
    """E|e^(sigma z) - 1| for a standard normal z: the mean relative error of a log-normal factor
    with median 1."""
    return math.exp(sigma * sigma / 2) * math.erf(sigma / math.sqrt(2))


@lru_cache(maxsize=64)
def _spread_of(error: float) -> float:
    """sigma of the log-normal factor whose mean relative error is `error`."""
    if not error:
        return 0.0
    from scipy.optimize import brentq

    return float(brentq(lambda sigma: mean_relative_error(sigma) - error, 0.0, 5.0))
