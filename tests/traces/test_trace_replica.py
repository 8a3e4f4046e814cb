"""The embedded replicas against what they stand in for.

The targets are measured numbers of the originals (statistics() on them); where the originals are at
hand, the last test measures them again.
"""

import hashlib
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from tests.traces.workload_strategies import assert_same
from twinserve.traces import catalog, download
from twinserve.traces.generators.fit_replica import fit_mooncake, fit_plain
from twinserve.traces.generators.replica import FILES, replica, tables
from twinserve.traces.generators.synth import synth
from twinserve.traces.load import fetch, load_trace
from twinserve.traces.readers.columns import check_workload
from twinserve.traces.readers.formats import read_file
from twinserve.traces.stats import statistics
from twinserve.traces.verbs import list_traces
from twinserve.traces.workload import WorkloadError

MOONCAKE = {
    "rows": 12_031, "span_s": 3536.999, "rate_per_s": 3.40, "gap_cv": 3.03, "moments": 1180,
    "per_moment": (10.2, 28),
    "prompt": {"mean": 12_035, "p50": 6_909, "p90": 27_367, "p99": 85_400, "max": 126_195},
    "output": {"mean": 342.6, "p50": 350, "p90": 597, "p99": 1_118.5, "max": 2_000},
    "hits": {"1000000": 0.0533, "3000000": 0.1361, "10000000": 0.2852, "unlimited": 0.3664},
    "distinct_blocks": 182_790,
}  # fmt: skip


def check_against_mooncake(s, length=0.05, hit=0.025):
    assert s["rows"] == MOONCAKE["rows"]
    assert s["span_s"] == pytest.approx(MOONCAKE["span_s"], abs=0.5)
    assert s["rate_per_s"] == pytest.approx(MOONCAKE["rate_per_s"], rel=0.005)
    assert s["gap_cv"] == pytest.approx(MOONCAKE["gap_cv"], rel=0.05)
    assert s["arrival_moments"] == MOONCAKE["moments"]
    assert s["per_moment"]["mean"] == pytest.approx(MOONCAKE["per_moment"][0], abs=0.01)
    assert s["per_moment"]["max"] == MOONCAKE["per_moment"][1]
    for column in ("prompt", "output"):
        for key, value in MOONCAKE[column].items():
            assert s[f"{column}_tokens"][key] == pytest.approx(value, rel=length), (column, key)
    for size, rate in MOONCAKE["hits"].items():
        assert s["lru_hit_rate"][size] == pytest.approx(rate, abs=hit), size
    assert s["distinct_blocks"] == pytest.approx(MOONCAKE["distinct_blocks"], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("seed", mostly_nightly([0, 1, 2, 1234], 0))
def test_mooncake_replica_has_the_statistics_of_the_original(seed):
    w = replica("mooncake:conversation", seed)
    check_workload(w)
    assert w.provenance.replica
    check_against_mooncake(statistics(w))


@pytest.mark.slow
def test_its_seed_fixes_the_replica():
    first = replica("mooncake:conversation", 7)
    assert_same(first, replica("mooncake:conversation", 7))
    other = replica("mooncake:conversation", 8)
    assert (first.prompt_tokens != other.prompt_tokens).mean() > 0.9


@pytest.mark.slow
def test_conversations_grow():
    # What makes hits: a prompt that shares more than the system block extends an earlier, shorter
    # one.
    w = replica("mooncake:conversation")
    first_owner, deep = {}, 0
    for row in range(len(w)):
        ids = w.prefix.of(row).tolist()
        known = sum(1 for b in ids if b in first_owner)
        assert all(b in first_owner for b in ids[:known])  # sharing is a prefix
        if known > 1:
            deep += 1
            assert w.arrival_s[first_owner[ids[known - 1]]] < w.arrival_s[row]
        for b in ids[known:]:
            first_owner[b] = row
    assert deep / len(w) == pytest.approx(0.387, abs=0.01)


@pytest.mark.parametrize("seed", [0, 5])
def test_azure_replica(seed):
    w = replica("azure-2023:conv", seed)
    check_workload(w)
    s = statistics(w)
    assert s["rows"] == 19_366
    assert s["rate_per_s"] == pytest.approx(5.53, rel=0.01)
    assert s["gap_cv"] == pytest.approx(1.09, rel=0.05)
    for key, value in {"mean": 1155, "p50": 1020, "p99": 4142}.items():
        assert s["prompt_tokens"][key] == pytest.approx(value, rel=0.05)
    for key, value in {"mean": 211, "p50": 129, "p99": 601}.items():
        assert s["output_tokens"][key] == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("name", FILES)
def test_tables_are_small_and_hold_no_rows(name):
    # A few dozen quantiles a column: far too few numbers to hold thousands of recorded rows.
    numbers = sum(np.size(v) for v in tables(name).values() if not isinstance(v, str))
    assert 20 * numbers < 2 * tables(name)["rows"]


@pytest.mark.slow
@pytest.mark.traces
def test_the_tables_are_those_of_the_original(original):
    w = read_file(original("mooncake:conversation"))
    check_against_mooncake(statistics(w), length=0.001, hit=0.0001)
    assert fit_mooncake(w) == tables("mooncake:conversation")
    azure = read_file(original("azure-2023:conv"))
    assert fit_plain(azure) == tables("azure-2023:conv")


# -- names, the search path, the cache, the download, and the replica when all of them fail --------
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    b"2023-11-16 18:15:50.9951690,396,109"
)


@pytest.fixture
def server():
    """A web server on this machine: `.content`, `.cut` (bytes promised but not sent), `.url`,
    `.asked`.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked += 1
            self.send_response(self.server.status)
            self.send_header("Content-Length", str(len(self.server.content) + self.server.cut))
            self.end_headers()
            self.wfile.write(self.server.content)

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.content, http.cut, http.status, http.asked = AZURE, 0, 200, 0
        http.url = f"http://127.0.0.1:{http.server_port}/trace.csv"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.fixture
def code_trace(monkeypatch, server):
    """azure-2023:code, served from here, its hash being that of our content."""
    digest = hashlib.sha256(AZURE).hexdigest()
    info = replace(catalog.BY_NAME["azure-2023:code"], url=server.url, sha256=digest)
    monkeypatch.setitem(catalog.BY_NAME, info.name, info)
    monkeypatch.delenv("TWINSERVE_TRACES", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return info


def test_a_trace_is_downloaded_once(code_trace, server, tmp_path):
    seen = []
    w = load_trace(
        "azure-2023:code",
        cache_dir=tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert len(w) == 2 and w.provenance.name == "azure-2023:code"
    assert w.provenance.sha256 == code_trace.sha256 and not w.provenance.replica
    assert seen[-1] == (len(AZURE), len(AZURE))
    assert_same(w, load_trace("azure-2023:code", cache_dir=tmp_path))
    assert server.asked == 1
    assert [p.name for p in tmp_path.iterdir()] == [code_trace.files[0]]


def test_a_broken_cache_entry_is_fetched_again(code_trace, server, tmp_path):
    (tmp_path / code_trace.files[0]).write_bytes(AZURE[:50])
    assert len(load_trace("azure-2023:code", cache_dir=tmp_path)) == 2
    assert server.asked == 1


def test_wrong_content_is_refused(code_trace, server, tmp_path):
    server.content = AZURE + b"\n"
    with pytest.raises(WorkloadError, match="not the expected"):
        fetch("azure-2023:code", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cut", "status"), [(10, 200), (0, 404), (0, 500)])
def test_a_failed_download_leaves_nothing(code_trace, server, tmp_path, cut, status):
    server.cut, server.status = cut, status
    with pytest.raises(download.NotReachable):
        fetch("azure-2023:code", cache_dir=tmp_path)
    with pytest.raises(WorkloadError, match="no embedded replica.*put azure_llm_2023_code.csv"):
        load_trace("azure-2023:code", cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_offline_asks_nobody(code_trace, server, tmp_path):
    with pytest.raises(WorkloadError, match="offline"):
        load_trace("azure-2023:code", cache_dir=tmp_path, offline=True)
    assert server.asked == 0


@pytest.mark.parametrize("form", [str, lambda p: [p], lambda p: f"/nowhere:{p}", lambda p: p])
def test_the_search_path_comes_first(code_trace, server, tmp_path, form):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / code_trace.files[1]).write_bytes(AZURE)
    path = fetch("azure-2023:code", search_path=form(folder), cache_dir=tmp_path)
    assert path == folder / code_trace.files[1] and server.asked == 0


def test_the_environment_names_the_search_path(code_trace, server, tmp_path, monkeypatch):
    (tmp_path / code_trace.files[0]).write_bytes(AZURE)
    monkeypatch.setenv("TWINSERVE_TRACES", str(tmp_path))
    assert len(load_trace("azure-2023:code", cache_dir=tmp_path / "c")) == 2
    where = {row["name"]: row["where"] for row in list_traces(cache_dir=tmp_path / "c")}
    assert where["azure-2023:code"] == str(tmp_path / code_trace.files[0])
    assert where["mooncake:conversation"] == "replica"
    assert where["mooncake:toolagent"] == "download"
    assert where["lmsys"] == "generated"


def test_other_content_under_the_name_is_an_error(code_trace, tmp_path):
    (tmp_path / code_trace.files[0]).write_bytes(AZURE + b"\n")
    with pytest.raises(WorkloadError, match="is not that of azure-2023:code.*remove it, or give"):
        load_trace("azure-2023:code", search_path=tmp_path, cache_dir=tmp_path / "c")
    assert "unusable" in {r["where"].split(":")[0] for r in list_traces(tmp_path, tmp_path / "c")}
    assert len(load_trace(tmp_path / code_trace.files[0])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_without_a_network_the_replica_stands_in(nowhere, name):
    w = load_trace(name, seed=1)
    assert w.provenance.replica and w.provenance.name == name
    assert len(w) == catalog.BY_NAME[name].rows
    assert len(w.provenance.notices) == 1 and "replica" in w.provenance.notices[0]
    assert_same(w, load_trace(name, seed=1, offline=True))


def test_a_cache_that_cannot_be_written_is_no_reason_to_stop(nowhere, monkeypatch):
    (nowhere / "file").write_text("")
    monkeypatch.setenv("TWINSERVE_CACHE", str(nowhere / "file" / "below"))
    assert load_trace("azure-2023:conv").provenance.replica


@pytest.mark.slow
def test_ticks_are_spread_unless_told_otherwise(nowhere):
    spread = load_trace("mooncake")
    raw = load_trace("mooncake", raw_arrivals=True)
    assert spread.provenance.transforms == ("spread-ticks(tick=3s, seed=0)",)
    assert raw.provenance.transforms == ()
    assert spread.prompt_tokens.tolist() == raw.prompt_tokens.tolist()
    gain = spread.arrival_s - raw.arrival_s
    assert (gain >= 0).all() and gain.max() < 3.1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mooncak", "did you mean 'mooncake'"),
        ("sharegtp", "did you mean 'sharegpt'"),
        ("azure-2023:covn", "did you mean 'azure-2023:conv'"),
        ("zzz", "names: mooncake,"),
        ("some/where.jsonl", "no such file"),
        ("where.csv", "no such file"),
        ("/", "a folder"),
        ("x" * 5000, "unknown trace"),
        ("a\0b", "unknown trace"),
        ("fixed:3", "fixed:PROMPT,OUTPUT"),
    ],
)
def test_unknown_names_are_one_helpful_line(nowhere, name, hint):
    with pytest.raises(WorkloadError) as e:
        load_trace(name)
    assert hint in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("mooncake", {"rate": 2.0}),
        ("mooncake", {"count": 5}),
        ("mooncake", {"format": "azure"}),
        ("mooncake", {"block_tokens": 16}),
        ("sharegpt", {"format": "mooncake"}),
        ("sharegpt", {"time_unit": "ms"}),
    ],
)
def test_settings_that_would_be_ignored_are_refused(nowhere, name, setting):
    with pytest.raises(WorkloadError, match="does not take"):
        load_trace(name, **setting)


def test_generated_names(nowhere):
    assert_same(
        load_trace("lmsys", rate=3, count=9, seed=2), synth("lmsys", rate=3, count=9, seed=2)
    )
    assert set(load_trace("fixed:7,8", count=2).prompt_tokens) == {7}
    with pytest.raises(WorkloadError, match="nothing to fetch"):
        fetch("poisson")
    with pytest.raises(WorkloadError, match="unknown trace"):
        fetch("nothing")


def test_calendar_clocks_start_at_zero(tmp_path):
    path = tmp_path / "t.jsonl"
    row = '{"timestamp": %d, "input_length": 3, "output_length": 1}\n'
    path.write_text(row % 1_700_000_000_000 + row % 1_700_000_002_500)
    w = load_trace(path)
    assert w.arrival_s.tolist() == [0.0, 2.5]
    assert w.provenance.transforms == ("rebase(start=1700000000.0s)",)


@pytest.mark.traces
def test_the_original_by_name(original, tmp_path):
    folder = original("mooncake").parent
    w = load_trace("mooncake", search_path=folder, cache_dir=tmp_path, offline=True)
    info = catalog.BY_NAME["mooncake:conversation"]
    assert not w.provenance.replica and w.provenance.sha256 == info.sha256
    assert len(w) == info.rows
