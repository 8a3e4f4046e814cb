"""The nine classes of LLM applications of Justitia's evaluation (Yang et al., Sec. V-A) as task
graphs.

The paper names the classes and their sources and gives no lengths beyond Fig. 4. The graphs are
ours, in the shape of the cited methods. These are map and reduce, claims checked one by one, a plan
and its steps, an agent with a growing prompt, votes over samples, and scored merges. Lengths make
the classes small, medium or large on average as in the paper: below 1 minute, 1 to 10, above 10.
This holds alone on an A100-PCIe-40G with 50 ms an iteration. No request exceeds 2,000 tokens, as
LLaMA-7B's context is 2,048.

The mix of the paper also names a tenth class, "CG", among the medium ones; its list of classes does
not. It is left out.

A text is a bag of words: topics, words for a thorough or a brief answer, words for many or few
things, and words without meaning. `difficulty` and `breadth` are functions of the text alone. The
demand of an application is drawn after its text, given these two. So a predictor that sees only
words can learn the demand, up to what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Return about `mean_words` words: 40 % topical, 15 % on the answer's length, 15 % numbers."""
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


LONGEST = 2000  # tokens of a request, prompt and output
TOKENS_A_WORD = 4 / 3
_TRAINING = 0x7121  # keeps samples for training apart from those of workloads with the same seed

Stage = list[tuple[int, int]]  # (prompt tokens, output tokens) of each request


@dataclass(frozen=True)
class Sample:
    """An application: class, input text, and the requests that it needed, by stage."""

    kind: str
    text: str
    stages: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def requests(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens), in order of stages."""
        return [request for stage in self.stages for request in stage]


class _Draw:
    """Lengths and counts given a text: what the text says, times noise."""

    def __init__(self, text: str, effects: TopicEffects, rng: np.random.Generator) -> None:
        self.rng = rng
        self.words = round(len(text.split()) * TOKENS_A_WORD)  # tokens of the text
        self._longer = np.exp(0.35 * difficulty(text, effects) + 0.12 * rng.standard_normal())
        self._wider = np.exp(0.45 * breadth(text, effects) + 0.08 * rng.standard_normal())

    def count(self, typical: float) -> int:
        return max(1, round(typical * self._wider))

    def one(self, prompt: float, output: float) -> tuple[int, int]:
        """A request: its output depends on the text, its prompt is given."""
        return self._requests(np.array([prompt]), output)[0]

    def several(self, n: int, prompt: float, output: float) -> Stage:
        """n requests with prompts of about the same length."""
        return self._requests(prompt * self.rng.uniform(0.9, 1.1, n), output)

    def _requests(self, prompts: np.ndarray, output: float) -> Stage:
        drawn = output * self._longer * np.exp(0.25 * self.rng.standard_normal(len(prompts)))
        outputs = np.clip(np.rint(drawn), 4, LONGEST // 2).astype(np.int64)
        prompts = np.clip(np.rint(prompts), 16, LONGEST - outputs).astype(np.int64)
        return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _equations(d: _Draw) -> list[Stage]:
    """EV (FacTool): find the equations of a solution, check each."""
    return [[d.one(320 + d.words, 70)], d.several(d.count(4), 380, 60)]


def _facts(d: _Draw) -> list[Stage]:
    """FV (ReAct): queries (prompts of 360-380 tokens: Fig. 4b), then thoughts that see all
    before."""
    stages, seen = [[(int(d.rng.integers(360, 381)), d.one(0, 45)[1])]], 380 + d.words
    for _ in range(d.count(3)):
        prompt, output = d.one(seen, 65)
        stages.append([(prompt, output)])
        seen = prompt + output + 120
    return stages


def _code(d: _Draw) -> list[Stage]:
    """CC (FacTool): claims about a program, a test for each, a judgement of each."""
    n = d.count(3)
    return [[d.one(300 + d.words, 80)], d.several(n, 420, 130), d.several(n, 560, 40)]


def _household(d: _Draw) -> list[Stage]:
    """ALFWI (ReAct): act, observe, act: the prompt keeps all of it."""
    stages, seen = [], 420 + d.words
    for _ in range(d.count(8)):
        prompt, output = d.one(seen, 28)
        stages.append([(prompt, output)])
        seen = prompt + output + 45
    return stages


def _knowledge(d: _Draw) -> list[Stage]:
    """KBQAV (FacTool): claims of an answer, queries for each, a verdict on each."""
    n = d.count(4)
    return [[d.one(340 + d.words, 90)], d.several(n, 280, 35), d.several(n, 760, 70)]


def _plan(d: _Draw) -> list[Stage]:
    """PE (HuggingGPT): a plan, its steps one after another, the answer."""
    stages = [[d.one(450 + d.words, 240)]]
    stages += [[d.one(650 * d.rng.uniform(0.8, 1.2), 300)] for _ in range(d.count(8))]
    return [*stages, [d.one(900, 220)]]


def _samples(d: _Draw) -> list[Stage]:
    """SC (self-consistency): reasoning paths side by side; the vote needs no inference."""
    return [d.several(d.count(18), 220 + d.words, 800)]


def _summary(d: _Draw) -> list[Stage]:
    """MRS (LangChain): a summary of every part, then of four summaries, until one is left."""
    stages = [d.several(d.count(140), 1250, 380)]
    while (left := len(stages[-1])) > 1:
        below = stages[-1]
        groups = [below[i : i + 4] for i in range(0, left, 4)]
        stages.append([d.one(120 + sum(output for _, output in group), 330) for group in groups])
    return stages


def _merge(d: _Draw) -> list[Stage]:
    """DM (Graph of Thoughts): merges, scores; the best merged again, scored; the last merge."""
    n = d.count(110)
    again = max(1, n // 4)
    first, second = d.several(n, 1150, 520), d.several(again, 1250, 520)
    return [
        first,
        [d.one(250 + output, 30) for _, output in first],
        second,
        [d.one(250 + output, 30) for _, output in second],
        [d.one(1300, 480)],
    ]


@dataclass(frozen=True)
class AppClass:
    """size: small, medium or large; words: of a typical input; graph: stages, by a text's draw."""

    kind: str
    size: str
    words: int
    graph: Callable[[_Draw], list[Stage]]


CLASSES = (
    AppClass("EV", "small", 70, _equations),
    AppClass("FV", "small", 50, _facts),
    AppClass("CC", "small", 110, _code),
    AppClass("ALFWI", "small", 60, _household),
    AppClass("KBQAV", "small", 80, _knowledge),
    AppClass("PE", "medium", 90, _plan),
    AppClass("SC", "medium", 80, _samples),
    AppClass("DM", "large", 150, _merge),
    AppClass("MRS", "large", 150, _summary),
)
KINDS = tuple(c.kind for c in CLASSES)
_EFFECTS_OF = tuple(TopicEffects.of(number) for number in range(len(CLASSES)))


def draw(kind: str, rng: np.random.Generator) -> Sample:
    """An application of a class: first its text, then, given the text, its requests."""
    number = KINDS.index(kind)
    app = CLASSES[number]
    text = draw_text(rng, app.words)
    stages = app.graph(_Draw(text, _EFFECTS_OF[number], rng))
    return Sample(kind, text, tuple(tuple(stage) for stage in stages))


def training_samples(kind: str, count: int = 100, seed: int = 0) -> list[Sample]:
    """Return earlier runs of a class for a predictor (Sec. IV-B: 100); none is in a workload."""
    key = (_TRAINING, KINDS.index(kind))
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
    return [draw(kind, rng) for _ in range(count)]
