"""The measurement of what the live front adds."""

from __future__ import annotations

import asyncio
import os
import time

import pandas as pd
import pytest

from twinserve.experiments.route.main import ADDED, STUDY
from twinserve.experiments.study.command import GridOptions


def test_what_is_added_is_a_difference_of_means():
    def row(clients: int, way: str, repeat: int, ms: float) -> dict:
        return {"clients": clients, "way": way, "seed": repeat, "token_p50_ms": ms}

    table = pd.DataFrame(
        [row(5, "direct", 0, 1.0), row(5, "followed", 0, 4.0), row(9, "direct", 0, 2.0)]
        + [row(5, "direct", 1, 3.0), row(5, "followed", 1, 6.0), row(9, "followed", 0, 2.5)]
    )
    found = ADDED(table).set_index(["clients", "way"])
    assert found.loc[(5, "followed"), "+token_p50_ms"] == 3.0
    assert found.loc[(9, "followed"), "+token_p50_ms"] == 0.5
    assert found.loc[(5, "direct"), "token_p50_ms"] == 2.0


@pytest.mark.nightly
def test_a_short_measurement(tmp_path):
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("computing time of processes is read from /proc")
    pytest.importorskip("aiohttp")
    STUDY.command(("latency",), GridOptions(quick=True, seeds=1, out=tmp_path))
    table = pd.read_csv(tmp_path / "latency" / "points.csv")
    assert table["way"].tolist() == ["direct", "followed", "passed through"]
    assert (table["failed"] == 0).all() and (table["requests"] > 20).all()
    assert (table["token_p50_ms"] > 0).all() and (table["first_p50_ms"] >= 20).all()


@pytest.mark.parametrize("status", [200, 503])
def test_pieces_may_end_within_a_stamp(status):
    """And what has no answer has no time to one."""
    pytest.importorskip("aiohttp")
    from aiohttp import web

    from twinserve.experiments.route.clients import load

    async def answer(request: web.Request) -> web.StreamResponse:
        if status != 200:
            await asyncio.sleep(0.02)
            assert request.transport is not None
            request.transport.abort()
        found = web.StreamResponse()
        await found.prepare(request)
        stamps = (b'data: {"text": " %d"}\n\n' % time.monotonic_ns() for _ in range(2))
        whole = b"".join(stamps) + b"data: [DONE]\n\n"
        for i in range(0, len(whole), 17):
            await found.write(whole[i : i + 17])
            await asyncio.sleep(0.002)
        return found

    async def test():
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await load([f"http://127.0.0.1:{runner.addresses[0][1]}"], 1, 2, 0.01, 0.3)
        finally:
            await runner.cleanup()

    seen = asyncio.run(test())
    if status == 200:
        assert seen.failed == 0 and len(seen.on_the_way_s) == 2 * len(seen.first_s) > 0
    else:
        assert seen.failed > 0 and not seen.first_s and not seen.on_the_way_s
