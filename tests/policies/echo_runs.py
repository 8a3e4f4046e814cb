"""Echo in small runs: its ladder, its ledgers, an estimator that can be added up by hand."""

from contextlib import contextmanager
from unittest import mock

from tests.policies import policy_runs
from twinserve.policies.parts.estimators import ModelEstimator
from twinserve.policies.registry import ledger_class
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.bros import SwapTimeModel
from twinserve.profiles.forms.echo import EchoModel

LADDER = ("echo-bs", "echo-bs-e", "echo-bs-e-s", "echo")


def estimator_of(model: StepTimeModel) -> ModelEstimator:
    """Believes the model; transfers are of no matter."""
    return ModelEstimator(model, SwapTimeModel(1e-9))


# Prompts take 0.2 s a token, decodes 0.4 s and 1 ms for each token of the longest context; an
# iteration with both takes the mean of the two. So c prompt tokens beside short decodes take about
# 0.1 c + 0.2 s. (What a stepper executes lasts a second, whatever was estimated.)
BY_HAND = estimator_of(
    EchoModel(alpha=0.0, beta=0.2, c=0.0, gamma=0.001, delta=0.0, lambda_=0.5, decode_base_s=0.4)
)


def ledger_of(kind: str, table, blocks: int, size: int, host: int = 0, shared: int = 0):
    """Also of kind `task-aware` and `paged-rc`."""
    if kind in ("paged-rc", "task-aware"):
        return ledger_class(kind)(table, blocks, size, host, shared_contents=shared)
    return _ledger_of(kind, table, blocks, size, host, shared)


_ledger_of = policy_runs.ledger_of


@contextmanager
def echo_ledgers():
    """Small runs know Echo's ledgers."""
    with mock.patch.object(policy_runs, "ledger_of", ledger_of):
        yield
