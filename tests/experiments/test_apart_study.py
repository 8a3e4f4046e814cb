"""When prefill apart from decode pays: the study's bookkeeping by hand, and a small whole of it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from twinserve.experiments.apart import main as study
from twinserve.experiments.apart.main import OBJECTIVES, requests_of, run_point
from twinserve.experiments.study.study import Scale
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "docs" / "results" / "apart" / "loads"


def rows(kept: dict[str, tuple[float, ...]]) -> pd.DataFrame:
    """Shares of each fleet by seed, the same of all objectives."""
    return pd.DataFrame(
        [
            {"prompt": 256, "load": 0.5, "fleet": fleet, "seed": seed}
            | {f"{name}_kept": share for name in OBJECTIVES}
            for fleet, shares in kept.items()
            for seed, share in enumerate(shares)
        ]
    )


def test_gains_are_paired_by_seed_and_judged_by_their_interval():
    """Seeds differ by far more than fleets do, and yet it is told who keeps more."""
    together = (0.2, 0.5, 0.8)
    found = study.gains(
        rows(
            {
                "4": together,
                "1P3D": tuple(share + 0.1 for share in together),
                "2P2D": tuple(share - 0.1 for share in together),
                "3P1D": (0.5, 0.2, 0.8),
            }
        )
    )
    mine = found[found.objective == "soon"].set_index("fleet")
    assert mine.verdict.to_dict() == {"1P3D": study.PAYS, "2P2D": study.LOSES, "3P1D": study.SAME}
    assert mine.gain.tolist() == pytest.approx([0.1, -0.1, 0.0])
    assert set(study.best(found).fleet) == {"1P3D"}


def test_loads_stretch_the_same_requests():
    hardware = resolve_hardware(SimulationConfig(profile="llama-3.1-8b@h100"))
    low, high = (requests_of(2048, load, 1, hardware) for load in (0.3, 0.9))
    assert np.array_equal(low.prompt_tokens, high.prompt_tokens)
    assert low.arrival_s == pytest.approx(3 * high.arrival_s)


@pytest.mark.nightly
def test_decode_replicas_alone_have_shorter_gaps_under_long_prompts():
    """That is what prefill apart is for: no prompt is computed between two tokens."""
    together, apart = (run_point(8192, fleet, 0.6, 0) for fleet in ("4", "2P2D"))
    assert apart["tpot_p90_s"] < together["tpot_p90_s"]
    assert apart["transfer_s"] > 0 == together["transfer_s"]


def test_the_kept_results_are_whole_and_the_page_shows_what_is_significant():
    points = pd.read_csv(KEPT / "points.csv")
    assert len(points) == len(study.GRID(Scale()))
    report = study.TEXT(study.best(study.gains(points)))
    assert report == (KEPT / "report.md").read_text()
    page = (ROOT / "docs" / "kv_transfer.md").read_text()
    tables = report.split("\n\n")[1:]
    assert len(tables) == 2 * len(OBJECTIVES)
    for title, table in zip(tables[::2], tables[1::2], strict=True):
        assert ("pays" in table or "loses" in table) == (table.strip() in page), title
