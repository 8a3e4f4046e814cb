"""The commands from end to end: every kind of bad input ends as one line and a non-zero exit, and what a run writes is
what a replay or a --config of it gives again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from twinserve.sim.cli import main, simulate_main

ROW = '{{"timestamp": {0}, "input_length": 600, "output_length": {1}, "hash_ids": [{2}, {3}]}}\n'


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(ROW.format(i * 50, 5 + i % 7, i % 3, 100 + i) for i in range(30)))
    return str(path)


def run(capsys, command, *arguments):
    """(exit code, stdout, stderr) of a command run in this process."""
    capsys.readouterr()
    code = 0
    try:
        command(list(map(str, arguments)))
    except SystemExit as stop:
        code = stop.code or 0
    return (code, *capsys.readouterr())


WRONG = [
    ("--policy brso", "did you mean 'bros'"),
    ("--policy bros:foo=1", "no option 'foo'"),
    ("--policy bros:chunk=0", "chunk=0"),
    ("-p bros -p bros", "given twice"),
    ("--kv foo", "no KV ledger 'foo'"),
    ("--prefix-caching --kv bidirectional", "no prefix caching"),
    ("--seed -1", "--seed"),
    ("--seed 1 --seed 2", "multiple times"),
    ("--rate 5", "own arrivals"),
    ("--rate-scale inf", "--rate-scale"),
    ("--rate-scale nan", "--rate-scale"),
    ("--rate-scale 1e-300", "later than"),
    ("--rate-scale 1 --load 0.5", "give one of them"),
    ("--load inf", "--load"),
    ("--load 1e-300", "rate factor"),
    ("--window nan 5", "--window"),
    ("--window 0 inf", "--window"),
    ("--window 9 5", "START must be before END"),
    ("--empty-window", "Unknown option"),
    ("--requests 0", "--requests"),
    ("--cap-length 1", "--cap-length"),
    ("--pool 99999999999", "--pool"),
    ("--replicas 1000000000", "--replicas"),
    ("--num-blocks 99999999999999", "too large for this machine"),
    ("--num-blocks 3", "--cap-length 48"),
    ("--block-tokens 7", "do not nest"),
    ("--slo ttft=0,tpot=1", "'ttft=0' is not understood"),
    ("--slo ttft=1,ttft=2", "given twice"),
    ("--slo ttft=1", "lacks tpot"),
    ("--profile nosuch", "unknown profile"),
    ("--preset nosuch", "bros-hybrid"),
    ("--config /", "cannot be read"),
    ("--config /nosuch/run.json", "no such file"),
    ("--goodput", "no objective"),
    ("--goodput ttft:nan", "finite"),
    ("--overwrite", "--out"),
    ("--timeline", "--out"),
    ("-p vllm -p bros --export x.jsonl", "give one --policy"),
    ("--export /", "is a folder"),
    ("--export /dev/null/x.jsonl", "cannot be written"),
    ("--out /", "root folder"),
    ("--nosuch", "Unknown option"),
]


@pytest.mark.parametrize(("flags", "said"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_flag_is_one_line_and_exit_2(capsys, trace, flags, said):
    code, out, err = run(capsys, simulate_main, "--trace", trace, "-q", *flags.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and said in err


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("trace inspect nosuch", "unknown trace"),
        ("trace convert nosuch x.jsonl", "unknown trace"),
        ("trace synth x.jsonl --rate nan", "rate nan"),
        ("profiles show nosuch", "unknown profile"),
        ("report /nosuch --out r.html", "no such folder"),
    ],
)
def test_wrong_verb_input_is_one_line(capsys, tmp_path, monkeypatch, verb, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, main, *verb.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    assert not list(tmp_path.iterdir())


def test_priority_beyond_64_bits_is_refused(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "priority": %d}\n' % 2**70)
    code, _, err = run(capsys, simulate_main, "--trace", path, "-q")
    assert code == 2 and "'priority'" in err


def test_huge_length_cap_changes_nothing(capsys, trace):
    plain = run(capsys, simulate_main, "--trace", trace, "--json")
    assert run(capsys, simulate_main, "--trace", trace, "--json", "--cap-length", 10**20) == plain


def test_export_and_config_repeat_the_run(capsys, tmp_path, trace):
    first, replay, again = (tmp_path / name for name in ("first", "replay", "again"))
    exported = tmp_path / "exported.jsonl"
    given = ("--trace", trace, "-p", "bros", "--pool", 3, "-q")
    assert run(capsys, simulate_main, *given, "--out", first, "--export", exported)[0] == 0
    assert run(capsys, simulate_main, "--trace", exported, "-p", "bros", "-q", "--out", replay)[0] == 0
    assert run(capsys, simulate_main, "--config", first / "run.json", "-q", "--out", again)[0] == 0
    for name in ("requests.parquet", "steps.parquet", "gaps.parquet", "summary.json"):
        assert (first / name).read_bytes() == (replay / name).read_bytes() == (again / name).read_bytes()
    assert (first / "run.json").read_bytes() == (again / "run.json").read_bytes()
    code, _, err = run(capsys, simulate_main, "--trace", exported, "--pool", 3, "-q")
    assert code == 2 and "drop --pool" in err


def test_json_is_the_summary_and_policies_share_a_table(capsys, trace):
    code, out, err = run(capsys, simulate_main, "--trace", trace, "--json")
    assert code == 0 and err == "" and json.loads(out)
    code, out, _ = run(capsys, simulate_main, "--trace", trace, "--json", "-p", "vllm", "-p", "bros")
    assert code == 0 and list(json.loads(out)) == ["bros", "vllm"]
    code, out, _ = run(capsys, simulate_main, "--trace", trace, "-q", "-p", "vllm", "-p", "bros")
    assert code == 0 and out.split("\n")[0].split() == ["vllm", "bros"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_killed_run_leaves_nothing(tmp_path, name):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from twinserve.sim.cli import simulate_main; print('ready', flush=True); simulate_main()"
    flags = "--trace fixed:2000,400 --duration 900 -p bros --pool 64 -q --out".split()
    started = subprocess.Popen(
        [sys.executable, "-c", code, *flags, str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started.stdout.readline()
    time.sleep(0.7)
    started.send_signal(getattr(signal, name))
    _, err = started.communicate(timeout=20)
    assert started.returncode == {"SIGINT": 130, "SIGTERM": 143}[name]
    assert err.count("\n") == 1 and "interrupted" in err
    assert not list(tmp_path.iterdir())
