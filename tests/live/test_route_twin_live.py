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


def test_a_killed_server_live_and_simulated(vllm, tmp_path, capsys):
    """Nothing fails in either, requests of the dead server move in both, both servers get requests,
    and TPOT is near, or as near as two live runs are to each other."""
    pytest.importorskip("aiohttp")
    from twinserve.experiments.route.main import main

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
    out = tmp_path / "twin.csv"
    arguments = ["twin", "--server", command, "--profile", str(profile), "--repeats", "2"]
    arguments += ["--requests", str(REQUESTS), "--rate", "3", "--cap-length", "250"]
    arguments += ["--kill-at", "4", "--down", "1", "--set", f"block_tokens={BLOCK_TOKENS}"]
    arguments += ["--set", "host_time=none"]
    if front.exists():
        arguments += ["--front-end", str(front)]
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--out", str(out)])
        raise SystemExit(0)
    assert not end.value.code
    said = capsys.readouterr().out
    assert said.count("0 other views, 0 other picks") == 2
    table = pd.read_csv(out).set_index("run")
    assert (table["failed"] == 0).all()
    assert (table["moved"] > 0).all()
    assert (table[["sent to 1", "sent to 2"]] > 0).all(axis=None)
    assert (table[["sent to 1", "sent to 2"]].sum(axis=1) == REQUESTS + table["moved"]).all()
    live, simulated = table["tpot mean, ms"].iloc[:-1], table["tpot mean, ms"].iloc[-1]
    off, spread = abs(simulated / live.mean() - 1), (live.max() - live.min()) / live.mean()
    assert off <= max(NEAR, spread), said
    print(said)  # pytest -s shows it
