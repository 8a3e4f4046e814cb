"""What a front recorded, decided again by the simulated fleet's router: same views, same picks."""

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.commands import status
from tests.parameters import mostly_nightly
from tests.route.fronts import Scene, prompts_of, scene
from twinserve.backends.live.route.fleet import RoutedFleet
from twinserve.backends.live.route.measured import KvMemory
from twinserve.sim.cli.main import main
from twinserve.sim.fleet.routers.registry import parse_router, router_names
from twinserve.sim.results.files import ResultsError
from twinserve.sim.results.routing import Routing, RoutingWriter, read_routing
from twinserve.sim.twin.reroute import AGES_S, Rerouted, reroute

pytestmark = pytest.mark.usefixtures("http")
ROUTERS = [name for name in router_names() if name not in ("conductor", "dynamo-kv")]
ROUTERS += ["dynamo-kv:index=approximate,temperature=0.5", "sglang:balance_abs=2"]
SLOW = {"pace_s": 0.004, "poll_s": 0.03, "health_s": 0.05}
SLOW |= {"health_timeout_s": 5.0, "retries": 9}  # a busy machine is no dead worker


def command(*words: str) -> object:
    """Its exit status."""
    return status(main, words)


def decided(record: Routing, router: str | None = None, **signals: float) -> Rerouted:
    spec = parse_router(router or record.router)
    return reroute(record, (spec.build(), spec.build()), **signals)


async def traffic(made: Scene, count: int = 60) -> None:
    """Requests of a few conversations, some of which are best-effort, while loads change."""

    async def one(i: int) -> None:
        await asyncio.sleep(i * 0.006)
        text = " ".join(f"w{(i % 7) * 3 + j}" for j in range(30 + i))
        for worker in made.workers:
            worker.waiting = (i * 7 + worker.port) % 5
        body = {"prompt": text, "max_tokens": 3 + i % 9, "stream": i % 2 == 0}
        headers = {"X-Session-Id": f"s{i % 7}"} if i % 3 else None
        body["vllm_xargs"] = {"class": "be" if i % 4 == 0 else "rt"}
        url = f"{made.url}/v1/completions"
        async with made.session.post(url, json=body, headers=headers) as answer:
            await answer.read()
            assert answer.status == 200

    await asyncio.gather(*(one(i) for i in range(count)))


@contextlib.asynccontextmanager
async def recorded(path: Path, **settings) -> AsyncIterator[Scene]:
    async with scene(3, **{**SLOW, **settings}, record=path) as made:
        yield made
        assert not path.exists()  # it is there when it is whole


@pytest.mark.slow
@pytest.mark.parametrize("router", mostly_nightly(ROUTERS, *ROUTERS[::3]))
async def test_the_simulated_router_sees_and_says_what_the_live_one_did(router, tmp_path):
    """A worker is lost and comes back meanwhile."""
    path = tmp_path / "new" / "routing.jsonl.gz"
    async with recorded(path, router=router, clients="trusted") as made:
        await traffic(made)
        await made.workers[1].die()
        await traffic(made, 20)
        await made.workers[1].start()
        await made.until(lambda: made.front.fleet.up == [0, 1, 2])
        await traffic(made, 20)
    record = read_routing(path)
    found = decided(record)
    assert (found.other_views, found.other_choices, found.first_other) == (0, 0, "")
    assert found.asked >= 100 and found.picks["live"] == found.picks["again"]
    assert len(found.picks["live"]) > 1
    assert b" w" not in gzip.decompress(path.read_bytes())  # no text of prompts
    came = [event.fields["worker"] for event in record.events if event.kind == "came"]
    assert sorted(came[:3]) == [0, 1, 2] and came[3:] == [1]
    assert sum(one.picks for one in found.modelled.values()) == found.asked
    assert len(found.ttft_s) >= 100 and min(found.ttft_s) > 0
    assert [path.name for path in path.parent.iterdir()] == [path.name]


@pytest.mark.slow
async def test_old_signals_differ_from_polls_that_just_came(tmp_path):
    path = tmp_path / "routing.jsonl.gz"
    async with recorded(path, router="vllm-dp", poll_s=0.02) as made:
        await traffic(made)
    record = read_routing(path)
    near = decided(record)
    polls = [event.at_s for event in record.events if event.kind == "measured"]
    # one of each replica in turn; the front sleeps no less than it is told to
    assert 0.015 < near.signals.interval_s < polls[-1] - polls[0]
    assert 0 <= near.signals.age_s < polls[-1] - polls[0]
    far = decided(record, age_s=near.signals.age_s + 0.5, interval_s=near.signals.interval_s + 0.2)
    total = {id(one): sum(d.views for d in one.modelled.values()) for one in (near, far)}
    assert total[id(far)] > total[id(near)]
    assert total[id(far)] > 20 and sum(d.choices for d in far.modelled.values()) > 0
    assert max(far.modelled) <= len(AGES_S)


async def test_kv_events_are_recorded_too(tmp_path):
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    from tests.route.test_kv_events import IDS, heard, knows, stored

    path = tmp_path / "routing.jsonl.gz"
    async with heard(record=path, router="llm-d:index=exact") as (made, (one, two)):
        await one.publish(stored(IDS[0]))
        await two.publish(stored(IDS[1]))
        await knows(made, 0, 10)
        await knows(made, 1, 10)
        for i in range(6):
            assert (await made.post(prompt=IDS[i % 2]))[0] == 200
    record = read_routing(path)
    found = decided(record)
    assert (found.asked, found.other_views, found.other_choices) == (6, 0, 0)
    assert found.picks["live"] == {"0": 3, "1": 3}
    deaf = [event for event in record.events if event.kind != "heard"]
    without = decided(Routing(record.router, None, record.workers, deaf))
    assert without.other_choices > 0  # it is what events say that decides


async def test_the_command(tmp_path, capsys):
    path = tmp_path / "routing.jsonl.gz"
    async with recorded(path, router="least-requests") as made:
        await traffic(made, 30)
    command("reroute", str(path))
    said = capsys.readouterr().out
    assert "as heard: 0 other views, 0 other picks" in said and "age of signal" in said
    command("reroute", str(path), "--json", "--router", "session", "--age", "0.3")
    document = json.loads(capsys.readouterr().out)
    assert document["other_picks"] > 0 and document["other_views"] == 0
    assert document["simulated_signals"]["age_s"] == 0.3
    assert sum(document["picks"]["live"].values()) == document["asked"] >= 30
    assert command("reroute", str(path), "--router", "dynamo-kv") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has no KV events" in said
    lines = gzip.decompress(path.read_bytes()).splitlines()
    asked = [i for i, line in enumerate(lines) if b',"asked",' in line][-1]
    entry = json.loads(lines[asked])
    entry[4] = (entry[4] + 1) % 3
    path.write_bytes(gzip.compress(b"\n".join([*lines[:asked], json.dumps(entry).encode()])))
    assert command("reroute", str(path)) == 1
    said = capsys.readouterr()
    assert "1 other picks" in said.out
    assert said.err.count("\n") == 1 and "the pick at" in said.err


@pytest.mark.parametrize(
    "content",
    [None, b"", b"[]", b'{"routing": 1}', b"x"],
    ids=["nothing", "an empty archive", "a list", "no columns", "text"],
)
def test_what_is_no_record(content, tmp_path):
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(b"" if content is None else gzip.compress(content))
    with pytest.raises(ResultsError, match="torn, or not a routing record") as error:
        read_routing(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ResultsError, match="there is no routing record"):
        read_routing(tmp_path / "none")


def test_a_request_is_noted_once_for_the_sizes_of_kv_blocks():
    fleet = RoutedFleet(parse_router("least-requests").build(), 2, lambda: 1.0)
    noted: list[tuple] = []
    fleet.note = lambda at_s, kind, *fields: noted.append((kind, *fields))
    prompts = prompts_of()
    old, new = (prompts.request(name, {"prompt": list(range(64))}, 0.0, []) for name in "ab")
    fleet.came(0, KvMemory(100, 16))
    for _ in range(3):  # it is held, say
        fleet.choose(old)
    fleet.came(1, KvMemory(100, 32))
    for request in (old, new, new):
        fleet.choose(request)
    said = [(fields[0], list(fields[-1])) for kind, *fields in noted if kind == "request"]
    assert said == [(0, [16]), (0, [16, 32]), (1, [16, 32])]
    assert [kind for kind, *_ in noted].count("asked") == 6


_LOAD = [1.0, 0, 0, 0, 100]
_CAME = [1.0, "came", 0, 0, 100, 16, _LOAD]
_REQUEST = [2.0, "request", 0, "r", {"prompt_tokens": 3}, -1, -1, {"16": []}]
_ASKED = [2.0, "asked", 0, [], 0, [[0, 0, _LOAD]]]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([[1.0, "went", 0]], "'went'"),
        ([[10**400, "failed", 0]], "line 2: failed"),
        ([[1.0, "came", 0, 0, 100, 16, [1.0, 0]]], "line 2: came"),
        ([[1.0, "came", 0, 0, 100, 16, [float("nan"), 0, 0, 0, 1]]], "finite"),
        ([[1.0, "came", 7, 0, 100, 16, _LOAD]], "line 2: came: names what was not recorded before"),
        ([_CAME, [1.5, "failed", 0], [1.6, "failed", 0]], "line 4: failed"),
        ([_CAME, [2.0, "heard", 0, True, [2**50]]], "line 3: heard"),
        ([_CAME, [2.0, "heard", 0, 1, [1]]], "boolean"),
        ([_CAME, [2.0, "request", 0, "r", {}, -1, -1, {}]], "line 3: request"),
        ([_CAME, [2.0, "request", 0, "r", {}, -1, -1, {"x": []}]], "line 3: request"),
        ([_CAME, _ASKED], "line 3: asked"),
        ([_CAME, _REQUEST, [2.0, "asked", 0, [0], 0, [[0, 0, _LOAD]]]], "line 4: asked"),
        ([_CAME, _REQUEST, [2.0, "asked", 0, [], 0, []]], "line 4: asked"),
        ([_CAME, _REQUEST, [2.0, "sent", 0, 9]], "line 4: sent"),
        ([_CAME, _REQUEST, [2.0, "ended", 0, 0]], "line 4: ended"),
    ],
)
def test_events_that_no_front_writes(events, said, tmp_path):
    """One line says where, whatever the router would make of them."""
    path = tmp_path / "r.jsonl.gz"
    head = {"routing": 1, "router": "least-requests", "profile": None, "workers": ["a"]}

    def read(lines: list) -> Routing:
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
        return read_routing(path)

    assert decided(read([head, _CAME, _REQUEST, _ASKED])).other_choices == 0
    with pytest.raises(ResultsError, match="torn, or not a routing record") as error:
        read([head, *events])
    assert said in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(ResultsError, match="valid string"):
        read([{**head, "router": 5}])


def test_a_record_that_is_there_stays(tmp_path, capsys):
    (tmp_path / "r").write_text("mine")
    assert command("route", "--worker", "http://127.0.0.1:9", "--record", str(tmp_path / "r")) == 2
    assert "--overwrite" in capsys.readouterr().err and (tmp_path / "r").read_text() == "mine"


def test_a_record_is_a_file(tmp_path, capsys):
    words = ["--record", str(tmp_path), "--overwrite"]
    assert command("route", "--worker", "http://127.0.0.1:9", *words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "is a folder" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device is always full")
def test_a_disk_that_is_full_at_the_end(tmp_path, monkeypatch):
    """What was held back until then does not fit: nothing is left, and the error names the file."""
    path = tmp_path / "new" / "r"
    opened = gzip.open
    monkeypatch.setattr(gzip, "open", lambda partial, *given, **more: opened("/dev/full", "wb"))
    writer = RoutingWriter(path, "least-requests", None, ["a"])
    writer.note(1.0, "failed", 0)
    with pytest.raises(OSError, match="No space left") as error:
        writer.close()
    assert error.value.filename == str(path) and list(tmp_path.iterdir()) == []


async def test_a_disk_that_is_full_ends_the_record_alone(tmp_path, monkeypatch):
    path = tmp_path / "r"
    async with recorded(path, router="round-robin") as made:
        record = made.front._record
        assert record is not None

        def full(*given: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(record, "note", full)
        await traffic(made, 5)
    assert list(tmp_path.iterdir()) == []
