"""What traffic adds to the tables of repeated steps: found in noisy samples, kept in files."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from twinserve.profiles.composition import STEADY, Churn, StepComposition
from twinserve.profiles.measured.fit import fit_steps
from twinserve.profiles.measured.model import TrafficTimes
from twinserve.profiles.measured.samples import (
    TRAFFIC,
    Measurement,
    StepSample,
    read_samples,
    write_samples,
)

KNOWN = TrafficTimes(
    step_s=4e-5, request_s=3e-6, join_s=4e-4, change_s=1e-4, swap_out_s=6e-4, swap_in_s=3e-4,
    swap_out_token_s=4e-6,
)  # fmt: skip


def repeated() -> list[StepSample]:
    """A machine's grid: time linear in all that counts, no noise."""
    found, point = [], 0
    for n in (1, 2, 4, 8, 16):
        for context in (16, 64, 256):
            work = StepComposition(n, n * context, context)
            found += [
                StepSample("decode", point, r, work, 8e-4 + 2e-5 * n + 1e-8 * n * context)
                for r in range(3)
            ]
            point += 1
    for new in (16, 64, 256):
        work = StepComposition(0, 0, 0, np.array([new]), np.array([0]))
        found += [StepSample("prefill", point, r, work, 1e-3 + 6e-6 * new) for r in range(3)]
        point += 1
    return found


def traffic(
    known: TrafficTimes, seed: int = 0, noise: float = 0.03, held_up: float = 0.0
) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    model = fit_steps(repeated())
    found = []
    for i in range(1200):
        n = int(rng.integers(1, 16))
        kind = rng.choice(
            ["steady", "changed", "join", "out", "in"], p=[0.7, 0.12, 0.1, 0.04, 0.04]
        )
        churn = {
            "steady": STEADY,
            "changed": Churn(changed=True),
            "join": Churn(joined=1, changed=True),
            "out": Churn(
                swapped_out=1 + i % 2, swapped_out_tokens=int(rng.integers(1, 600)), changed=True
            ),
            "in": Churn(
                joined=1, swapped_in=1, swapped_in_tokens=int(rng.integers(1, 600)), changed=True
            ),
        }[kind]
        prompt = (np.array([100]), np.array([0])) if kind == "join" else ()
        work = StepComposition(n, n * 100, 100, *prompt, churn=churn)
        seconds = (model.repeated_seconds(work) + known.seconds(n, churn)) * (
            1 + noise * rng.standard_normal()
        )
        seconds += 0.1 if rng.random() < held_up else 0.0
        found.append(StepSample(TRAFFIC, 10**6 + i % 3, i % 3, work, seconds, off_core_s=0.0))
    return found


@pytest.mark.parametrize("held_up", [0.0, 0.005])
def test_known_terms_are_found(held_up):
    model = fit_steps(repeated() + traffic(KNOWN, held_up=held_up))
    for name, within in (
        ("step_s", 1e-5),
        ("request_s", 1e-6),
        ("join_s", 4e-5),
        ("change_s", 2e-5),
    ):
        assert getattr(model.traffic, name) == pytest.approx(getattr(KNOWN, name), abs=within), name
    assert model.traffic.swap_out_s == pytest.approx(KNOWN.swap_out_s, rel=0.1)
    assert model.traffic.swap_out_token_s == pytest.approx(KNOWN.swap_out_token_s, rel=0.1)
    assert (
        model.traffic.swap_in_s == pytest.approx(KNOWN.swap_in_s, rel=0.35)
        and model.traffic.swap_in_token_s < 4e-7
    )
    assert model.fit.traffic_steps == 1200
    if not held_up:
        # the noise itself
        assert model.fit.traffic_error == pytest.approx(0.03 * (2 / np.pi) ** 0.5, rel=0.2)
        assert abs(model.fit.traffic_total_error) < 0.01


def test_the_tables_are_of_repeated_steps_whatever_traffic_does():
    alone, both = fit_steps(repeated()), fit_steps(repeated() + traffic(KNOWN))
    assert replace(both, traffic=None, fit=None) == replace(alone, fit=None)
    assert (
        alone.traffic is None
        and alone.fit.traffic_error is None
        and not alone.watches_churn
        and both.watches_churn
    )


def test_runs_of_decodes_are_single_steps_bit_for_bit():
    model = fit_steps(repeated() + traffic(KNOWN))
    run = model.decode_run_seconds(5, 700, 200, 40)
    assert run.tolist() == [
        model.step_seconds(StepComposition(5, 700 + 5 * j, 200 + j)) for j in range(40)
    ]


def test_churn_comes_back_from_the_file_and_older_files_have_none(tmp_path):
    samples = traffic(KNOWN)[:50]
    write_samples(Measurement(samples, [], {"a": 1}), tmp_path / "s.parquet")
    assert [s.work.churn for s in read_samples(tmp_path / "s.parquet").steps] == [
        s.work.churn for s in samples
    ]
    table = pq.read_table(tmp_path / "s.parquet")
    churn = [
        "joined", "swapped_out", "swapped_in", "swapped_out_tokens", "swapped_in_tokens", "changed",
    ]  # fmt: skip
    # they have no version either
    old = table.drop_columns(churn).replace_schema_metadata({"twinserve": '{"a": 1}'})
    pq.write_table(old, tmp_path / "old.parquet")
    assert {s.work.churn for s in read_samples(tmp_path / "old.parquet").steps} == {STEADY}
