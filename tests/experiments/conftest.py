"""A campaign's folder and its trace."""

from pathlib import Path

import pytest

from tests.experiments.campaign_cases import TRACE, measured
from twinserve.experiments.campaign import steps as campaign_steps
from twinserve.experiments.campaign.setup import Store
from twinserve.profiles.measured.samples import Measurement, SwapSample, write_samples


@pytest.fixture
def traces(tmp_path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "mooncake_part.jsonl").write_text(TRACE + "\n")
    return folder


@pytest.fixture
def store(tmp_path) -> Store:
    """A campaign whose steps are there."""
    found = Store(tmp_path / "out")
    facts = measured().provenance
    write_samples(measured(), campaign_steps.raw_path(found, "tiny", False))
    swaps = [
        SwapSample(way, n, 512 * n, 1e-4 + 1e-7 * n)
        for way in ("swap_out", "swap_in")
        for n in (32, 64, 128)
    ]
    write_samples(
        Measurement([], swaps, facts), campaign_steps.raw_path(found, "tiny", False, "-swap")
    )
    found.write(
        {name: facts[name] for name in facts if name != "settings"}, "steps", "machine.json"
    )
    return found
