"""Justitia's demand predictor: TF-IDF of the input text and a small network for each class of
applications (Yang et al., Sec. IV-B, Fig. 6). Needs scikit-learn (extra `learn`), imported at the
first class that is asked about.

The paper: four layers, the first in proportion to the average input, 100 samples a class, mean
squared error with L2 regularisation by gradient descent. Our choices for open points: half as many
neurons in the first layer as an input has words on average; half as many in each of the next two;
one output. The logarithm of the cost is learned, scaled to mean 0 and deviation 1: costs of a class
spread over an order of magnitude. The relative error counts; term counts are damped (1 + log) and
vectors not normalised, or a text's length would be lost; 200 epochs with a penalty of 10, of five
settings the best on other samples than those that errors are reported of (docs/justitia.md).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from twinserve.policies.errors import PolicyError
from twinserve.policies.parts.predictors import Cost, Predictor, costs_of, samples_of
from twinserve.policies.requests import Application

NEURONS_A_WORD = 0.5
LEAST_NEURONS = 8
MIN_SAMPLES = 20
L2, EPOCHS = 10.0, 200


class TextPredictor(Predictor):
    """Applications by their text; those without one, and classes with fewer than 20 samples, by the
    class's mean."""

    reads_texts = True

    def prepare(self, kinds: Iterable[str], cost: Cost) -> None:
        for kind in sorted(kinds):
            self._model(kind, cost)

    def _application(self, application: Application, cost: Cost) -> float | None:
        if application.text:
            model = self._model(application.kind, cost)
            if model is not None:
                return model.predict(application.text)
        return super()._application(application, cost)

    def _model(self, kind: str | None, cost: Cost) -> CostModel | None:
        return None if kind is None else train(kind, *self._source, cost)


class CostModel:
    """The trained predictor of one class: text in, cost out."""

    def __init__(self, texts: list[str], costs: list[int], seed: int) -> None:
        text_to_vector, network = _scikit_learn()
        self._vectors = text_to_vector(sublinear_tf=True, norm=None)
        features = self._vectors.fit_transform(texts).toarray()
        self._scale = float(np.sqrt((features**2).mean())) or 1.0
        target = np.log(costs)
        self._mean, self._deviation = float(target.mean()), float(target.std()) or 1.0
        words = np.mean([len(text.split()) for text in texts])
        first = max(LEAST_NEURONS, round(NEURONS_A_WORD * float(words)))
        self.layers = (first, max(LEAST_NEURONS, first // 2), max(LEAST_NEURONS, first // 4))
        self._network = network(
            hidden_layer_sizes=self.layers,
            alpha=L2,
            learning_rate_init=3e-3,
            max_iter=EPOCHS,
            random_state=seed % 2**32,
        )
        with warnings.catch_warnings():
            # that it might gain from more epochs: their number is chosen
            warnings.simplefilter("ignore")
            self._network.fit(features / self._scale, (target - self._mean) / self._deviation)

    def predict(self, text: str) -> float:
        """Cost, at most e^4 standard deviations from what the class usually costs."""
        features = self._vectors.transform([text]).toarray() / self._scale
        normal = float(np.clip(self._network.predict(features)[0], -4.0, 4.0))
        return math.exp(self._mean + self._deviation * normal)


@lru_cache(maxsize=128)
def train(kind: str, training: str | None, seed: int, cost: Cost) -> CostModel | None:
    """The model of a class, trained once in a process; None with fewer than 20 samples. Raises
    PolicyError without scikit-learn."""
    samples = samples_of(kind, training, seed)
    if len(samples) < MIN_SAMPLES:
        return None
    return CostModel([sample.text for sample in samples], costs_of(samples, cost), seed)


def _scikit_learn():
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.neural_network import MLPRegressor
    except ImportError as error:
        raise PolicyError(
            f"predictor=mlp needs scikit-learn ({error}): pip install 'twinserve[learn]', "
            "or choose predictor=class-mean"
        ) from None
    return TfidfVectorizer, MLPRegressor
