"""The same requests before two real `vllm serve` behind the front and in the simulator, one server
killed in both."""

from __future__ import annotations

import shlex
import sys

import pandas as pd
import pytest

from twinserve.backends.live.serving.process import CPU_ENGINE, VLLM, named_vllm
from twinserve.experiments.serving.predict import SEEN
from twinserve.experiments.serving.server import (
    BLOCK_TOKENS,
    NAME,
    ON_A_CPU,
    any_cpu,
    bench,
    calibrate,
    engine_arguments,
    start,
    write_small,
)

# two servers, three starts: four minutes
pytestmark = [pytest.mark.nightly, pytest.mark.live, pytest.mark.alone]

NEAR = 0.5  # on a machine that does other things
REQUESTS = 30


def test_a_killed_server_live_and_simulated(vllm, tmp_path):
    """Nothing fails in either, requests of the dead server move in both, both servers get requests,
    and TPOT is near, or as near as two live runs are to each other."""
    pytest.importorskip("aiohttp")
    from twinserve.experiments.route.twin import beside, twin

    model, profile = write_small(tmp_path), tmp_path / "mine.json"
    begin = any_cpu(model, tmp_path / "any.json")
    (tmp_path / "server").mkdir()
    server = start(tmp_path / "server", model, engine_arguments())
    try:
        server.wait(420)  # on a machine that may do other things
        bench(server, tmp_path / "warm.json", SEEN, 7)
        seen = bench(server, tmp_path / "seen.json", SEEN, 11)
    finally:
        server.stop()
    if not calibrate([seen], begin, profile):
        profile = begin
    front = profile.with_suffix(".front_end.json")
    named = f"PYTHONPATH={named_vllm(tmp_path / 'named')}:{':'.join(sys.path[1:])}"
    environment = {**CPU_ENGINE, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    words = ["env", named, *(f"{key}={value}" for key, value in environment.items())]
    words += [*VLLM, "serve", str(model), "--host", "127.0.0.1", "--port", "{port}"]
    words += ["--served-model-name", NAME, *ON_A_CPU, "--no-enable-prefix-caching"]
    command = shlex.join([*words, *engine_arguments()])
    settings = {"requests": REQUESTS, "rate": 3.0, "cap_length": 250, "block_tokens": BLOCK_TOKENS}
    settings |= {"host_time": "none", "front_end": str(front) if front.exists() else "none"}
    rows = twin(2, str(profile), server=command, kill_at_s=4.0, down_s=1.0, **settings)
    said = beside(pd.DataFrame(rows)).to_string()
    table = pd.DataFrame(rows).set_index("run")
    assert not table[["other views", "other picks"]].fillna(0).any(axis=None)
    assert (table["failed"] == 0).all()
    assert (table["moved"] > 0).all()
    assert (table[["sent to 1", "sent to 2"]] > 0).all(axis=None)
    assert (table[["sent to 1", "sent to 2"]].sum(axis=1) == REQUESTS + table["moved"]).all()
    live, simulated = table["tpot mean, ms"].iloc[:-1], table["tpot mean, ms"].iloc[-1]
    off, spread = abs(simulated / live.mean() - 1), (live.max() - live.min()) / live.mean()
    assert off <= max(NEAR, spread), said
    print(said)  # pytest -s shows it
