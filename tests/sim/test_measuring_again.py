"""A calibration on an engine whose steps others slow at chosen times: what it measures again, when
it stops, and what it keeps. The bench is a stand-in with a clock of its own; tests/live has real
ones."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from twinserve.backends.live.engine.engine import LiveSettings
from twinserve.backends.live.measure import measure as measuring
from twinserve.backends.live.measure.bench import Timing
from twinserve.backends.live.measure.kept import Kept
from twinserve.backends.live.measure.measure import QUICK, Effort
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.measured.fit import fit_steps
from twinserve.profiles.measured.samples import Measurement, read_samples, write_samples
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import write_run
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate

SETTINGS = LiveSettings(Path(), 500, 32, 8, 256, 512)
FOREVER = replace(QUICK, limit_s=1e9)


def truth(work: StepComposition) -> float:
    return (
        1e-3
        + 2e-5 * float(work.decode_requests + work.prefill_new.sum())
        + 1e-7 * work.decode_context
        + 2e-8 * float((work.prefill_new * work.prefill_resident).sum())
    )


class FakeBench:
    """Steps take what `truth` says, with a jitter of 3 %, times `slow(now)`. lost: what is more
    than that was spent off the core."""

    adopt, block_tokens, pool_blocks = True, 32, 500

    def __init__(self, slow=lambda now: 1.0, lost: bool = False) -> None:
        self.engine = SimpleNamespace(settings=SETTINGS)
        self.slow, self.lost, self.now = slow, lost, 0.0
        self.submit_s, self.transfers, self.steps = [1e-5], [], 0
        self._rng, self._held = np.random.default_rng(0), {}

    def fill_cache(self, tokens: int) -> None:
        self.now += 0.1

    def submit(self, prompt: int, room: int = 2) -> str:
        name = f"m{len(self._held)}"
        self.submit_s.append(1e-5)
        self._held[name] = [prompt, 0]
        return name

    def hold(self, contexts: list[int], room: int) -> list[str]:
        names = [self.submit(context) for context in contexts]
        for name in names:
            self._held[name][1] = self._held[name][0]
        return names

    def drop(self, names: list[str]) -> None:
        """Names are never used twice."""

    def step(self, grants: dict, hits: dict | None = None) -> Timing:
        self.steps += 1
        held = {name: self._held[name] for name in grants}
        for name, tokens in (hits or {}).items():
            held[name][1] = tokens
        decodes = [c for name, (p, c) in held.items() if c >= p and grants[name] == 1]
        new = [(grants[name], c) for name, (p, c) in held.items() if c < p]
        work = StepComposition(
            len(decodes),
            sum(decodes),
            max(decodes, default=0),
            np.array([n for n, _ in new], np.int64),
            np.array([c for _, c in new], np.int64),
        )
        for name, tokens in grants.items():
            held[name][1] += tokens
        usual = truth(work) * self._rng.lognormal(0, 0.03)
        seconds = usual * self.slow(self.now)
        self.now += seconds
        return Timing(
            work, seconds, 0.5 * usual, float("nan"), seconds - usual if self.lost else 0.0
        )


def run(bench: FakeBench, effort: Effort = FOREVER) -> measuring._Run:
    found = measuring._Run(bench, effort, 0, lambda share, text: None, now=lambda: bench.now)
    found.measure()
    found.over = True
    return found


def spells(*times: tuple[float, float], by: float = 2.5):
    return lambda now: by if any(a <= now < b for a, b in times) else 1.0


@pytest.fixture(scope="module")
def quiet() -> measuring._Run:
    return run(FakeBench())


@pytest.mark.parametrize("lost", [True, False], ids=["without the core", "slowed on it"])
def test_what_was_disturbed_is_measured_again_until_it_is_settled(quiet, lost):
    whole = quiet.bench.now
    noisy = run(FakeBench(spells((0.3 * whole, 2.8 * whole)), lost))
    assert noisy.again > 0 and noisy.unsettled() == [] and noisy.partial() == ""
    assert len(noisy.steps) < 3 * len(quiet.steps)  # once only a few points are left, only they
    ours, theirs = (fit_steps(r.steps) for r in (noisy, quiet))
    assert ours.fit.disturbed > 0.2 > theirs.fit.disturbed
    works = [s.work for s in quiet.steps]
    error = [abs(ours.step_seconds(work) / theirs.step_seconds(work) - 1) for work in works]
    assert np.mean(error) < 0.05  # 2.5 times as long were those that others slowed


def test_where_others_never_cease_it_ends_and_says_what_is_left(quiet):
    noisy = run(FakeBench(lambda now: 1.5 if now < 0.2 else 4.0, lost=True))
    assert len(noisy.steps) < (FOREVER.again / FOREVER.rounds + 2) * len(quiet.steps)
    left = noisy.unsettled()
    assert fit_steps(noisy.steps).fit.unsettled == len(left) > 5 and noisy.partial() == ""


def test_whatever_the_limit_there_is_a_table():
    cut = run(FakeBench(), replace(FOREVER, limit_s=1e-6, whole_round=False))
    assert len({s.point for s in cut.steps}) < 15 and fit_steps(cut.steps).fit.points > 4


def test_by_default_the_first_round_is_finished():
    cut = run(FakeBench(), replace(FOREVER, limit_s=1e-3))
    assert cut.rounds == 1 and {s.round for s in cut.steps} == {0}
    assert "1 of 3 rounds over all points" in cut.partial()


def test_what_is_kept_when_it_breaks_off_can_be_read(tmp_path):
    """The engine dies in the midst of a round."""
    bench, path = FakeBench(), tmp_path / "raw.parquet"
    found = measuring._Run(bench, FOREVER, 0, lambda share, text: None, now=lambda: bench.now)
    keep = Kept(found, {"seed": 0}, lambda so_far: write_samples(so_far, path))
    step = bench.step

    def dying(grants, hits=None):
        if len(found.steps) > 300:
            raise KeyboardInterrupt
        return step(grants, hits)

    bench.step = dying
    with pytest.raises(KeyboardInterrupt):
        found.measure()
    keep.now()
    read: Measurement = read_samples(path)
    assert len(read.steps) == len(found.steps) > 300
    assert "stopped before the end" in read.provenance["partial"]
    assert [p.name for p in tmp_path.iterdir()] == ["raw.parquet"]


def test_nothing_is_kept_of_the_warm_up(tmp_path):
    bench = FakeBench()
    found = measuring._Run(bench, FOREVER, 0, lambda share, text: None, now=lambda: bench.now)
    kept: list[Measurement] = []
    Kept(found, {}, kept.append).now()
    assert kept == []


@pytest.mark.slow
def test_every_report_of_a_run_with_such_a_profile_says_so(quiet, tmp_path):
    model = fit_steps(quiet.steps)
    noisy = replace(model.fit, disturbed=0.4, unsettled=2, partial="1 of 3 rounds over all points")
    for fit, said in ((noisy, True), (model.fit, False)):
        folder = tmp_path / str(said)
        profile = load_profile("llama-3.1-8b@h100").model_copy(
            update={"step_model": replace(model, fit=fit), "source": "measured"}
        )
        save_profile(profile, folder / "p.json")
        config = SimulationConfig(
            policy=("vllm",), trace="fixed:8,2", rate=9.0, requests=3,
            profile=str(folder / "p.json"), async_scheduling=False,
        )  # fmt: skip
        (result,) = simulate(config).values()
        write_run(folder / "run", result)
        page = write_report([folder / "run"], folder / "page.html").read_text()
        for text in (" ".join(result.config["notices"]), page.split("<pre")[0]):
            assert ("other programs disturbed 40% of the measured time; 2 points" in text) is said
            assert ("cut short: 1 of 3 rounds over all points" in text) is said
