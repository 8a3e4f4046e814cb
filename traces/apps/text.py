"""Input texts of generated applications, and what a text says about the work that it asks for.

A text is a bag of words from topics, from words that ask for a thorough or a brief answer, from
words that speak of many or of few things, and from words that say nothing. `difficulty` and
`breadth` are functions of the text alone: the demand of an application is drawn after its text,
given these two. So a predictor that sees nothing but words can learn it, up to what is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

TOPICS = (
    "invoice ledger audit budget dividend interest mortgage payroll",
    "symptom dosage surgery clinic vaccine therapy diagnosis patient",
    "statute verdict clause plaintiff treaty appeal lawsuit contract",
    "compiler pointer kernel socket thread parser database pipeline",
    "tensor lemma integral theorem matrix polynomial fraction gradient",
    "glacier rainfall monsoon drought humidity cyclone forecast thermometer",
    "empire dynasty siege parliament revolution colony archive monarch",
    "goalkeeper marathon referee stadium tournament sprint coach medal",
    "enzyme protein genome cell neuron bacteria mutation membrane",
    "violin canvas sculpture opera gallery sonnet rhythm portrait",
)
THOROUGH = "detailed thorough complete exhaustive rigorous careful comprehensive deep"
BRIEF = "brief short quick simple rough concise plain terse"
MANY = "many several all various multiple numerous every each"
FEW = "one single only sole lone alone unique individual"
FILLER = (
    "please given following about between with from that which would could should question "
    "answer text part "
    "item result using based find state explain tell show consider note above below then also"
)

_TOPIC_WORDS = [topic.split() for topic in TOPICS]
_LISTS = [THOROUGH.split(), BRIEF.split(), MANY.split(), FEW.split(), FILLER.split(), *_TOPIC_WORDS]
_TOPIC_OF = {word: i for i, words in enumerate(_TOPIC_WORDS) for word in words}
_LENGTH_OF = {**dict.fromkeys(THOROUGH.split(), 1), **dict.fromkeys(BRIEF.split(), -1)}
_NUMBER_OF = {**dict.fromkeys(MANY.split(), 1), **dict.fromkeys(FEW.split(), -1)}
_EFFECTS = 0x7E87  # of topics on classes: part of the workload's definition, so not of its seed


@dataclass(frozen=True)
class TopicEffects:
    """How much harder, and how much wider, each topic makes the applications of one class;
    float64[topics] in -1 .. 1."""

    difficulty: np.ndarray
    breadth: np.ndarray

    @classmethod
    def of(cls, number: int) -> TopicEffects:
        rng = np.random.default_rng(np.random.SeedSequence(_EFFECTS, spawn_key=(number,)))
        return cls(*rng.uniform(-1, 1, (2, len(TOPICS))))


def draw_text(rng: np.random.Generator, mean_words: int) -> str:
    """A text of about `mean_words` words: 40 % of them topical, 15 % about the answer's length, 15
    % about numbers."""
    count = int(np.clip(rng.lognormal(np.log(mean_words), 0.25), 20, 4 * mean_words))
    topics = rng.dirichlet(np.full(len(TOPICS), 0.4))
    thorough, many = rng.random(2)
    lists = [
        np.where(rng.random(count) < thorough, 0, 1),
        np.where(rng.random(count) < many, 2, 3),
        np.full(count, 4),
    ]
    topical = 5 + rng.choice(len(TOPICS), count, p=topics)
    kind = rng.choice(4, count, p=[0.40, 0.15, 0.15, 0.30])
    chosen = np.choose(kind, [topical, *lists])
    place = rng.random(count)
    words = [
        _LISTS[i][int(u * len(_LISTS[i]))]
        for i, u in zip(chosen.tolist(), place.tolist(), strict=True)
    ]
    return " ".join(words)


def difficulty(text: str, effects: TopicEffects) -> float:
    """How long answers to a text are, on a logarithmic scale: about -2 .. 2, about 0 on average."""
    return _score(text, _LENGTH_OF, effects.difficulty)


def breadth(text: str, effects: TopicEffects) -> float:
    """How many parts its work has, on a logarithmic scale: about -2 .. 2, about 0 on average."""
    return _score(text, _NUMBER_OF, effects.breadth)


def _score(text: str, signs: dict[str, int], topic_effects: np.ndarray) -> float:
    words = text.split()
    signed = [signs[w] for w in words if w in signs]
    topical = [topic_effects[_TOPIC_OF[w]] for w in words if w in _TOPIC_OF]
    return float(sum(signed) / max(1, len(signed)) + sum(topical) / max(1, len(topical)))
