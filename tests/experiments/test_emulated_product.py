"""The product of workloads on which vLLM's loop is compared: its order, its file, its table."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from twinserve.backends.live.versions import LiveEngineError
from twinserve.experiments.validation import emulated as product_of
from twinserve.sim.setup.config import SettingsError


def compared(steps: int, fault: str = "") -> SimpleNamespace:
    requests = SimpleNamespace(recomputes=np.array([1, 2]))
    simulated = SimpleNamespace(rows=SimpleNamespace(requests=requests))
    errors = {"ttft": -0.2, "tpot": 0.1}
    return SimpleNamespace(
        steps=(steps, steps), simulated=simulated, errors=lambda: errors, fault=fault
    )


def test_the_first_cells_are_a_sample_that_repeats():
    cells = product_of.product(0)
    assert len(cells) == len(set(cells)) == 7200
    assert cells == product_of.product(0) != product_of.product(1)
    for axis in product_of.Cell.__dataclass_fields__:
        assert {getattr(cell, axis) for cell in cells[:100]} == {
            getattr(cell, axis) for cell in cells
        }


def test_scarce_memory_holds_few_requests_and_each_of_them():
    cell = next(cell for cell in product_of.product(0) if cell.scarce and cell.pool == 0)
    inputs = cell.inputs(20)
    longest = (inputs.workload.prompt_tokens + inputs.workload.output_tokens).max()
    blocks, size = inputs.hardware.num_blocks, inputs.hardware.block_tokens
    assert longest <= blocks * size <= product_of.SCARCE * longest + size


@pytest.mark.slow
def test_cells_that_are_in_the_file_are_not_run_again(tmp_path, monkeypatch, capsys):
    asked = []

    def compare(inputs, spec):
        asked.append(spec.label)
        if len(asked) == 3:
            raise SettingsError("no room")
        return compared(10)

    monkeypatch.setattr(product_of, "compare_emulated", compare)
    monkeypatch.setattr(product_of, "installed_vllm", lambda: "0.32.0")
    out = tmp_path / "cells.csv"
    product_of.emulated(out=out, cells=4, requests=4, part="1/2")
    assert len(asked) == 2 and "-0.2" not in capsys.readouterr().out
    with pytest.raises(LiveEngineError, match="1 of 4 cells differ"):
        product_of.emulated(out=out, cells=4, requests=4)
    assert len(asked) == 4
    table = pd.read_csv(out, keep_default_na=False)
    assert sorted(table.differs) == ["", "", "", "error: no room"]
    assert table.preemptions.sum() == 9 and table.error_pct.max() == 0.2
    assert product_of.summary(table)[["cells", "steps", "differ"]].sum().tolist() == [4, 30, 1]
    with pytest.raises(SettingsError, match="write 1/2"):
        product_of.emulated(out=out, part="2")
