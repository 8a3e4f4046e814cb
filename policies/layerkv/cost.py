"""What LayerKV believes: how long a prompt takes (eq. 3), how long a layer's KV is on the link (eq.
4), and how many layers must therefore stay on the device.

The paper has no form for decode steps: its scheduler measures them (`RecentSteps`). The batch
estimator says how much can be moved during one: a measured step that waited for its transfers would
justify as many again.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import overload

import numpy as np

from twinserve.policies.base import EngineLimits
from twinserve.policies.errors import PolicyError
from twinserve.policies.parts.estimators import Batch, BatchEstimator, LinearEstimator
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.forms.layerkv import LayerKvModel
from twinserve.profiles.profile import Profile


@dataclass(frozen=True)
class LayerKvEstimator(LinearEstimator):
    """BROS's form for decode steps; prompts: eqs. 3-4."""

    prompts: LayerKvModel


def layerkv_estimator(profile: Profile, truth: StepTimeModel) -> LayerKvEstimator:
    """Fitted to what `truth` takes on the profile's hardware: alpha from isolated prompts, as the
    paper's profiling does; beta 1, since the profile's link rate is an achieved one."""
    return LayerKvEstimator(
        BrosLinearModel.fit(truth),
        profile.swap_model(),
        LayerKvModel.fit(
            truth, profile.llm, profile.gpu, profile.tp, profile.pcie_bytes_per_s / profile.tp
        ),
    )


class LayerCost:
    """Seconds, by whatever estimator the policy was given.

    layers      of the model
    link_share  of the link's time that is left for KV: less than 1 where all-reduce uses the same
                link (Sec. 3.1.3)
    """

    def __init__(
        self,
        estimator: BatchEstimator | None,
        layers: int,
        limits: EngineLimits,
        link_share: float = 1.0,
    ) -> None:
        if estimator is None:
            raise PolicyError(
                "policy 'layerkv' plans with step times but has no estimator; set "
                "slo_aware=false and layer_wise=false"
            )
        self.layers = layers
        self._prompts = estimator.prompts if isinstance(estimator, LayerKvEstimator) else None
        self._batches = estimator
        self._layer_bytes = limits.kv_bytes_per_token / layers
        self._link_share = link_share

    def prefill_seconds(self, tokens: int) -> float:
        """Eq. 3: a prompt of `tokens` alone."""
        if self._prompts is not None:
            return float(self._prompts.prefill_seconds(tokens))
        return float(self._batches.seconds(_batch(True, np.array([tokens]), np.array([tokens]))))

    @overload
    def layer_seconds(self, tokens: int, layers: int) -> float: ...
    @overload
    def layer_seconds(self, tokens: np.ndarray, layers: int) -> np.ndarray: ...
    def layer_seconds(self, tokens: int | np.ndarray, layers: int) -> float | np.ndarray:
        """Eq. 4: `layers` layers of `tokens` tokens over the link; of int64[n] float64[n], the same
        to the last bit."""
        seconds: float | np.ndarray
        if self._prompts is not None:
            seconds = self._prompts.offload_seconds(tokens, self._prompts.layers - layers)
        elif isinstance(tokens, np.ndarray):
            sizes = (tokens * layers * self._layer_bytes).tolist()
            seconds = np.array([self._batches.swap.seconds(size) for size in sizes], np.float64)
        else:
            seconds = self._batches.swap.seconds(tokens * layers * self._layer_bytes)
        return seconds / self._link_share

    def decode_seconds(self, computed: np.ndarray) -> float:
        """A step in which requests with so many resident tokens decode."""
        return float(self._batches.seconds(_batch(False, np.ones_like(computed), computed + 1)))

    def min_resident_layers(self, tokens: int) -> int:
        """x: the fewest layers to keep so that T_offload <= T_prefill; 0..layers."""
        prefill, layer = self.prefill_seconds(tokens), self.layer_seconds(tokens, 1)
        x = self.layers - min(self.layers, math.floor(prefill / layer))
        while x and self.layer_seconds(tokens, self.layers - x + 1) <= prefill:  # rounding
            x -= 1
        while x < self.layers and self.layer_seconds(tokens, self.layers - x) > prefill:
            x += 1
        return x


def _batch(prefill: bool, new: np.ndarray, context: np.ndarray) -> Batch:
    n = len(new)
    return Batch(np.arange(n), np.full(n, prefill), new, context, np.zeros(n, np.int64))


class RecentSteps:
    """The current TPOT: mean seconds of the last `window` steps that decoded."""

    def __init__(self, window: int) -> None:
        self._seconds: deque[float] = deque(maxlen=window)
        self._tpot: float | None = 0.0

    def add(self, seconds: np.ndarray) -> None:
        self._seconds.extend(seconds.tolist())
        self._tpot = None

    @property
    def tpot(self) -> float:
        """0 before the first one."""
        if self._tpot is None:
            self._tpot = sum(self._seconds) / len(self._seconds)
        return self._tpot
