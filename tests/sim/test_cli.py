"""The commands from end to end: every kind of bad input ends as one line and a non-zero exit, and
what a run writes is what a replay or a --config of it gives again."""

import builtins
import gc
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic_core import SchemaError

from tests.commands import status
from tests.parameters import mostly_nightly
from twinserve.sim.cli import entry
from twinserve.sim.cli.main import main, simulate_main
from twinserve.traces.load import load_trace

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
    ("--router nearest", "no router 'nearest'; there are class-aware, conductor"),
    ("--prefix-caching --kv bidirectional", "no prefix caching"),
    ("--step-times measured", "measure them with `twinserve calibrate`"),
    ("--step-times operators --profile qwen3-8b@rtx4090", "choose --step-times roofline"),
    ("--step-times table", "--step-times"),
    ("--front-end vlm", "no front end 'vlm'"),
    ("--front-end nosuch.json", "nosuch.json: cannot be read"),
    ("--seed -1", "--seed"),
    ("--seed 1 --seed 2", "is given twice"),
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
    ("--num-blocks 3", "--cap-length 48"),
    ("--block-tokens 7", "do not nest"),
    ("--block-tokens 9999999", "tokens, less than one block"),
    ("--slo ttft=0,tpot=1", "'ttft=0' is not understood"),
    ("--slo ttft=1,ttft=2", "given twice"),
    ("--slo ttft=1", "lacks tpot"),
    ("--profile nosuch", "unknown profile"),
    ("--preset nosuch", "bros-hybrid"),
    ("--config /", "cannot be read"),
    ("--config /nosuch/run.json", "no such file"),
    ("--goodput", "no objective"),
    ("--goodput=", "no objective"),
    ("-p justitia:training=nosuch.jsonl", "training=nosuch.jsonl: cannot be read"),
    ("--foo", "Unknown option: --foo. (see --help)"),
    ("--polcy vllm", "Did you mean --policy?"),
    ("--goodput ttft:nan", "finite"),
    ("--goodput ttft=500", "words of --slo"),
    ("--slo ttft:500", "what --goodput takes"),
    ("--slo ttft<1", "1 has no unit"),
    ("--warmup 30", "there are 30 requests, so none is left to measure"),
    ("--warmup 9h", "write a number of requests, as 500, or seconds, as 60s"),
    ("--metrics-every 0", "give the seconds of a window"),
    ("--metrics-every 1e-5", "more than 2,000 windows"),
    ("--percentiles 50,101", "'101' is no percentile"),
    ("--percentiles 50,50", "given twice"),
    ("--overwrite", "--out, --export and --bench-json"),
    ("bros vllm", "Unused Tokens"),
    ("-p vllm-v0:max_num_batched_tokens=100", "is below max_num_seqs (1024)"),
    ("-p vllm-v0 --max-num-seqs 999999", "is below max_num_seqs (999999)"),
    ("-p vllm-v0:max_num_batched_tokens=300 --max-num-seqs 64",
     "set the option max_num_batched_tokens to 611 or more"),
    ("-p vllm -p vllm-v0:max_num_batched_tokens=300 --max-num-seqs 64",
     "the longest request has 611"),
    ("-p vllm:enable_chunked_prefill=false --max-num-batched-tokens 300",
     "set --max-num-batched-tokens to 611 or more"),
    ("-p bros:best_effort=false --pool 4", "drop that option, or the best-effort requests"),
    ("-p bros:kv=paged --prefix-caching", "no prefix is looked up by bros:kv=paged"),
    ("--estimator perfect", "no step times are estimated by vllm"),
    ("-p vllm-v0 -p round-robin -p preemptive-wait --estimator perfect",
     "no step times are estimated"),
    ("-p mlfq:skip_join=false,queues=4 --estimator perfect", "no step times are estimated by mlfq"),
    ("-p echo-bs --estimator perfect", "no step times are estimated by echo-bs"),
    ("-p echo:slo_aware=false,kv_aware=false --estimator roofline", "no step times are estimated"),
    ("-p tgi:waiting_served_ratio=inf",
     "waiting_served_ratio=inf: should be a finite number, at least 0 and at most 1000000"),
    ("--timeline", "--out"),
    ("--decisions --replicas 2 --out x", "writes the plans of one engine; drop --replicas"),
    ("-p vllm -p bros --export x.jsonl", "give one --policy"),
    ("--export /", "is a folder"),
    ("--export /dev/null/x.jsonl", "cannot be written"),
    ("--out /", "root folder"),
    ("--nosuch", "Unknown option"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "said"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_flag_is_one_line_and_exit_2(capsys, trace, flags, said):
    code, out, err = run(capsys, simulate_main, "--trace", trace, "-q", *flags.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and said in err


def test_a_warm_up_windows_and_verdicts_are_printed(capsys, trace):
    asked = ("--warmup", 10, "--metrics-every", 0.5, "--percentiles", "50,99.9")
    slo = ("--slo", "ttft p90 < 100 s, tpot mean < 1 us")
    code, out, err = run(capsys, simulate_main, "-t", trace, "-q", *asked, *slo)
    shown = {" ".join(line.split()) for line in out.splitlines()}
    assert (code, err) == (0, "")
    assert any(line.startswith("TTFT mean / p50 / p99.9, ms") for line in shown)
    assert "rt: TTFT p90 < 100 s kept" in shown
    assert any(line.startswith("rt: TPOT mean < 1 us missed (") for line in shown)
    assert "10 requests that arrived before are left out" in " ".join(out.split())
    assert any(line.startswith("from, s requests in/s out/s in system") for line in shown)


def test_running_out_of_memory_is_one_line(capsys, trace, monkeypatch):
    """No setting does so by itself: blocks that are never used take no memory."""

    def full(*_, **__):
        raise MemoryError("Unable to allocate 7.28 PiB")

    monkeypatch.setattr("twinserve.sim.setup.run.run_each", full)
    code, out, err = run(capsys, simulate_main, "--trace", trace, "-q")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "too large for this machine: Unable to allocate 7.28 PiB; choose a smaller" in err


def test_the_largest_number_of_blocks_is_simulated(capsys, trace):
    flags = ("--trace", trace, "-q", "--num-blocks", 10**15)
    code, out, err = run(capsys, simulate_main, *flags)
    assert (code, err) == (0, "") and "completed" in out


@pytest.mark.slow
def test_help_lists_no_setting_as_a_positional(capsys):
    for command, words in ((simulate_main, ("--help",)), (main, ("simulate", "--help"))):
        code, out, _ = run(capsys, command, *words)
        usage = next(line for line in out.splitlines() if line.startswith("Usage"))
        assert code == 0 and usage.split()[-1] == "[OPTIONS]"
        assert "--num-blocks" in out and not re.search(r"^\W*[A-Z][A-Z-]+ --", out, re.MULTILINE)


def test_an_export_replaces_nothing_unasked_and_its_source_never(capsys, tmp_path, trace):
    before = Path(trace).read_bytes()
    target = tmp_path / "target.jsonl"
    target.write_text("mine")
    for path, flags, said in (
        (trace, (), "would replace the trace that is read"),
        (trace, ("--overwrite",), "would replace the trace that is read"),
        (target, (), "is there already"),
    ):
        code, out, err = run(
            capsys, simulate_main, "--trace", trace, "-q", "--export", path, *flags
        )
        assert (
            (code, out, err.count("\n")) == (2, "", 1)
            and said in err
            and err.startswith("error: --export ")
        )
    assert (Path(trace).read_bytes(), target.read_text()) == (before, "mine")
    assert (
        run(capsys, simulate_main, "--trace", trace, "-q", "--export", target, "--overwrite")[0]
        == 0
    )
    assert len(load_trace(target)) == 30


@pytest.mark.slow
def test_several_policies_do_not_write_below_a_run(capsys, tmp_path, trace):
    """`report runs` would show the run in it and none of those below."""
    out, given = tmp_path / "runs", ("--trace", trace, "-q", "--out", tmp_path / "runs")
    assert run(capsys, simulate_main, *given)[0] == 0
    for flags in ((), ("--overwrite",)):
        code, _, err = run(capsys, simulate_main, *given, "-p", "vllm", "-p", "bros", *flags)
        assert (code, err.count("\n")) == (2, 1) and "is the folder of one run" in err
    assert not (out / "bros").exists()
    code, _, err = run(capsys, simulate_main, *given)
    assert code == 2 and "--overwrite" in err


@pytest.mark.slow
def test_a_comparison_that_was_killed_goes_on(capsys, tmp_path, trace):
    out, both = tmp_path / "runs", ("-p", "vllm", "-p", "bros")
    given = ("--trace", trace, "-q", "--out", out, *both)
    assert run(capsys, simulate_main, *given)[0] == 0
    stays, gone = out / "vllm", out / "bros"
    before = {file: file.read_bytes() for file in [*stays.iterdir(), gone / "requests.parquet"]}
    shutil.rmtree(gone)
    code, _, err = run(capsys, simulate_main, *given)
    assert code == 2 and "already holds a run" in err and "--resume" in err
    code, shown, _ = run(capsys, simulate_main, *given, "--resume")
    assert code == 0 and "vllm" in shown and "bros" in shown
    assert {file: file.read_bytes() for file in before} == before  # its times as well
    for flags, said in (
        (("--seed", "3"), "the run there has another --seed; name another"),
        (("--warmup", "3"), "has another metrics"),
        (("--timeline",), "is without --timeline"),
        (("--overwrite",), "--resume keeps the runs that --out holds; drop --overwrite"),
    ):
        code, _, err = run(capsys, simulate_main, *given, "--resume", *flags)
        assert (code, err.count("\n")) == (2, 1) and said in err
    assert run(capsys, simulate_main, "--trace", trace, "--resume")[0] == 2


@pytest.mark.slow
def test_a_column_of_a_comparison_runs_again_without_the_settings_of_the_others(
    capsys, tmp_path, trace
):
    given = ("--trace", trace, "-q", "--estimator", "perfect")
    assert (
        run(capsys, simulate_main, *given, "-p", "vllm", "-p", "bros", "--out", tmp_path / "both")[
            0
        ]
        == 0
    )
    for name in ("vllm", "bros"):
        one = tmp_path / "both" / name
        assert (
            run(
                capsys, simulate_main, "--config", one / "run.json", "-q", "--out", tmp_path / name
            )[0]
            == 0
        )
        for file in ("run.json", "requests.parquet"):
            assert (tmp_path / name / file).read_bytes() == (one / file).read_bytes()


@pytest.mark.parametrize("verb", ["synth TARGET --requests 3", "convert TRACE TARGET"])
def test_trace_files_are_replaced_only_if_told_to(capsys, tmp_path, trace, verb):
    target = tmp_path / "there.jsonl"
    target.write_text("mine")
    words = verb.replace("TARGET", str(target)).replace("TRACE", trace).split()
    code, out, err = run(capsys, main, "trace", *words)
    assert (
        (code, out, err.count("\n")) == (2, "", 1)
        and "is there already" in err
        and "--overwrite" in err
    )
    assert target.read_text() == "mine"
    assert run(capsys, main, "trace", *words, "--overwrite")[0] == 0
    assert len(load_trace(target)) in (3, 30)


@pytest.mark.parametrize("verb", ["scale llama-3.1-8b@l40s --step 1.1", "build qwen2.5-14b h100"])
def test_profiles_are_written_where_they_load_and_replaced_only_if_told_to(capsys, tmp_path, verb):
    target = tmp_path / "there.json"
    target.write_text("mine")
    for out, said in (
        (target, "is there already"),
        (tmp_path / "a.txt", "ends in .json"),
        (tmp_path, "is a folder"),
    ):
        code, shown, err = run(capsys, main, "profiles", *verb.split(), "--out", out)
        assert (code, shown, err.count("\n")) == (2, "", 1) and said in err
    assert target.read_text() == "mine" and list(tmp_path.iterdir()) == [target]


def test_a_scaled_profile_replaces_another_with_overwrite(capsys, tmp_path):
    target = tmp_path / "there.json"
    target.write_text("mine")
    assert (
        run(
            capsys,
            main,
            "profiles",
            "scale",
            "llama-3.1-8b@l40s",
            "--out",
            target,
            "--step",
            2,
            "--overwrite",
        )[0]
        == 0
    )
    code, out, _ = run(capsys, main, "profiles", "show", target)
    assert code == 0 and json.loads(out)["step_scale"]["step"] == 2


def test_a_converted_trace_is_never_its_own_target(capsys, trace):
    code, _, err = run(capsys, main, "trace", "convert", trace, trace, "--overwrite")
    assert code == 2 and "would replace the trace that is read" in err


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("trace inspect nosuch", "unknown trace"),
        ("trace convert nosuch x.jsonl", "unknown trace"),
        ("trace synth x.jsonl --rate nan", "rate nan"),
        ("trace synth x.jsonl --rate inf", "rate inf is not a finite number above 0"),
        ("trace synth / --overwrite", "is a folder"),
        ("trace synth x.jsonl --rate 1e-308 --requests 3", "raise rate"),
        ("trace synth x.jsonl --rate 1e308", "lower rate, count or duration"),
        (f"trace synth x.jsonl --requests {'9' * 400}", "lower rate, count or duration"),
        ("trace inspect /dev/null", "not a regular file"),
        ("profiles show nosuch", "unknown profile"),
        ("profiles show x@h100", "there are llama-7b, "),
        ("profiles show llama-3.1-8b@tpu", "unknown GPU 'tpu'; there are "),
        ("profiles fit nosuch.csv", "nosuch.csv: cannot be read (No such file or directory)"),
        (
            "profiles scale llama-3.1-8b@h100 --step 1e308 --out x.json",
            "factor 1e+308 of step must be positive, from 0.001 to",
        ),
        ("calibrate --model tiny --out x.txt", "ends in .json"),
        ("calibrate --front-end --model tiny --out x.txt", "ends in .json"),
        ("calibrate --front-end --model tiny", "--out is needed"),
        ("calibrate --front-end --model tiny --out x.json --graphs", "--graphs: is for the steps"),
        ("calibrate --front-end --from-steps x.csv", "--front-end: --from-steps starts no engine"),
        ("report /nosuch --out r.html", "no such folder"),
        ("report /dev/null --out r.html", "is a file; give the --out folder"),
    ],
)
def test_wrong_verb_input_is_one_line(capsys, tmp_path, monkeypatch, verb, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, main, *verb.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    assert not list(tmp_path.iterdir())


def test_priority_beyond_64_bits_is_refused(capsys, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 5, "priority": ' + f"{2**70}}}\n"
    )
    code, _, err = run(capsys, simulate_main, "--trace", path, "-q")
    assert code == 2 and "'priority'" in err


def test_huge_length_cap_changes_nothing(capsys, trace):
    plain = run(capsys, simulate_main, "--trace", trace, "--json")
    assert run(capsys, simulate_main, "--trace", trace, "--json", "--cap-length", 10**20) == plain


@pytest.mark.slow
def test_export_and_config_repeat_the_run(capsys, tmp_path, trace):
    first, replay, again = (tmp_path / name for name in ("first", "replay", "again"))
    exported = tmp_path / "exported.jsonl"
    given = ("--trace", trace, "-p", "bros", "--pool", 3, "-q")
    assert run(capsys, simulate_main, *given, "--out", first, "--export", exported)[0] == 0
    assert (
        run(capsys, simulate_main, "--trace", exported, "-p", "bros", "-q", "--out", replay)[0] == 0
    )
    assert run(capsys, simulate_main, "--config", first / "run.json", "-q", "--out", again)[0] == 0
    for name in ("requests.parquet", "steps.parquet", "gaps.parquet", "summary.json"):
        assert (
            (first / name).read_bytes()
            == (replay / name).read_bytes()
            == (again / name).read_bytes()
        )
    assert (first / "run.json").read_bytes() == (again / "run.json").read_bytes()
    code, _, err = run(capsys, simulate_main, "--trace", exported, "--pool", 3, "-q")
    assert code == 2 and "drop --pool" in err


@pytest.mark.slow
def test_json_is_the_summary_and_policies_share_a_table(capsys, trace):
    code, out, err = run(capsys, simulate_main, "--trace", trace, "--json")
    (one,) = json.loads(out)["runs"]
    assert code == 0 and err == "" and one["label"] == "vllm" and one["completed"]
    assert one["notices"] == []
    _, out, _ = run(capsys, simulate_main, "--trace", trace, "--json", "--engine-version", "0.19")
    assert "KV blocks are derived" in json.loads(out)["runs"][0]["notices"][0]
    code, out, _ = run(
        capsys, simulate_main, "--trace", trace, "--json", "-p", "vllm", "-p", "bros"
    )
    found = json.loads(out)
    assert code == 0 and found["version"] == 1
    assert [run["label"] for run in found["runs"]] == ["vllm", "bros"] and found["runs"][0] == one
    code, out, _ = run(capsys, simulate_main, "--trace", trace, "-q", "-p", "vllm", "-p", "bros")
    assert code == 0 and out.split("\n")[0].split() == ["vllm", "bros"]


@pytest.mark.parametrize(
    ("command", "module"),
    [
        (main, "cyclopts"),
        (simulate_main, "cyclopts"),
        (simulate_main, "twinserve.sim.setup.inputs"),
    ],
)
def test_ctrl_c_while_modules_load_is_one_line(capsys, monkeypatch, command, module):
    load, words = builtins.__import__, ["simulate"] * (command is main)

    def interrupted(name, *more, **named):
        if name == module:
            raise KeyboardInterrupt
        return load(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    code, out, err = run(capsys, command, *words, "-t", "fixed:5,5", "--requests", "3", "-q")
    assert (code, out, err.count("\n")) == (130, "", 1) and err.startswith("error: interrupted")


@pytest.mark.parametrize("command", [entry.twinserve, entry.simulate])
def test_ctrl_c_before_there_is_a_command_is_one_line(capsys, monkeypatch, command):
    load = builtins.__import__

    def interrupted(name, *more, **named):
        if name == "twinserve.sim.cli":
            raise KeyboardInterrupt
        return load(name, *more, **named)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    monkeypatch.setattr(gc, "set_threshold", lambda *_: None)  # this process goes on
    code, out, err = run(capsys, lambda _: command())
    assert (code, out, err.count("\n")) == (130, "", 1) and err.startswith("error: interrupted")


def test_nothing_loads_before_ctrl_c_has_an_answer():
    code = "import sys; before = set(sys.modules); import twinserve.sim.cli.entry\n"
    code += "print(*sorted(set(sys.modules) - before))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = ["twinserve", "twinserve.sim", "twinserve.sim.cli", "twinserve.sim.cli.entry"]
    assert said.stdout.split() == ours


@pytest.mark.slow
def test_simulate_ends_at_once_and_loses_nothing(tmp_path):
    code = "import atexit, sys, weakref; from twinserve.sim.cli.entry import simulate\n"
    code += "atexit.register(print, 'at exit', file=sys.stderr)\n"
    code += "class Kept: pass\n"
    code += "kept = Kept(); kept.itself = kept; Kept.__del__ = lambda _: print('taken apart')\n"
    code += "simulate()"

    def said(*words):
        words = [sys.executable, "-c", code, *"-p vllm -t fixed:5,5 -q".split(), *words]
        return subprocess.run(words, capture_output=True, text=True)

    done = said("--requests", "3", "--out", str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (0, "at exit\n")
    assert "requests completed" in done.stdout and "taken apart" not in done.stdout
    assert (tmp_path / "out" / "summary.json").is_file()
    wrong = said("--requests", "-3")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: ")


@pytest.mark.parametrize(("cause", "code"), [("KeyboardInterrupt", 130), ("_Terminated", 143)])
def test_a_signal_while_models_are_built_is_still_one(cause, code, monkeypatch, capsys):
    def app(given=None):
        raise SchemaError(f"Error building `model` serializer:\n  SchemaError: ...\n  {cause}: ")

    monkeypatch.setattr("twinserve.sim.cli.main.twinserve_app", app)
    assert status(main, ["profiles"]) == code and "SchemaError" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_nightly(["SIGINT", "SIGTERM"], "SIGTERM"))
def test_a_killed_run_leaves_nothing(tmp_path, name):
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from twinserve.sim.cli import main; from twinserve.sim.setup import run\n"
        "call = main._call; main._call = lambda *said: (print('ready', flush=True), call(*said))\n"
        "main.simulate_main()"
    )
    flags = "--trace fixed:2000,400 --duration 900 -p bros --pool 64 -q --out".split()
    started = subprocess.Popen(
        [sys.executable, "-c", code, *flags, str(tmp_path / "out")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    started.stdout.readline()
    time.sleep(0.7)
    started.send_signal(getattr(signal, name))
    _, err = started.communicate(timeout=120)
    assert started.returncode == {"SIGINT": 130, "SIGTERM": 143}[name]
    assert err.count("\n") == 1 and "interrupted" in err
    assert not list(tmp_path.iterdir())
