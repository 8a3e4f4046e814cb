"""Whatever is typed and whatever a file holds: an answer, or one line that says what is wrong.
Never a traceback, never a hang, nothing left behind."""

import contextlib
import gzip
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.fuzz.rows import COLUMNS, TOOLS, drawn, none_served
from tests.traces.measured_files import FILES as MEASURED
from tests.traces.measured_files import prometheus
from tests.traces.test_trace_bad_input import GOOD
from twinserve.profiles.profile import derive_profile
from twinserve.sim.cli.main import VERBS, main
from twinserve.sim.results.routing import ROUTING

# Hostile invocations of every command, drawn from a number: the same number, the same case.
# A case is a command line, and files that stand in its folder beside those of `prepare`. Half of
# the cases damage a file that some command reads, a few give measured files odd rows, the others
# give options values that nobody means.
# -- a routing record and a fleet file with a push, well formed, to be damaged ---------------------
_IDLE = [0.0, 0, 0, 0, 0]

FLEET_OF_PUSH = """router: least-requests
pools:
  - {name: p, role: prefill, profile: llama-3.1-8b@h100}
  - {name: d, role: decode, profile: llama-3.1-8b@h100}
connector: {transfer: push, push_poll_ms: 1.0, push_timeout_s: 9, lease_s: 30}
local_prefill: llm-d:threshold=512
"""


def routing_record() -> str:
    """The lines of a record of two workers and three requests, as `twinserve route --record` writes
    them before they are compressed."""
    workers = ["http://a:1", "http://b:1"]
    lines: list = [
        {"routing": ROUTING.version, "router": "least-requests", "profile": None,
         "workers": workers},
    ]  # fmt: skip
    for replica in (0, 1):
        lines.append([0.1 * replica, "came", replica, replica, 500, 16, _IDLE])
    loads = [_IDLE, _IDLE]  # as last heard of
    for number in range(3):
        at, replica = 1.0 + number, 0  # the first of equals
        values = {"prompt_tokens": 40 + number, "arrival_s": at}
        view = [[each, 0, loads[each]] for each in (0, 1)]
        loads[replica] = [at, 0, 0, 0, 0]
        lines += [
            [at, "request", number, f"r{number}", values, -1, number, {"16": [number]}],
            [at, "asked", number, [], replica, view],
            [at, "sent", number, replica],
            [at, "heard", replica, True, [number]],
            [at + 0.1, "first token", number, replica],
            [at + 0.2, "measured", replica, loads[replica]],
            [at + 0.3, "ended", number, replica],
        ]
    return "".join(json.dumps(line) + "\n" for line in lines)


RUN, TRACE, STEPS, BENCH = "run", "t.jsonl", "steps.csv", "bench.json"
RECORD = "routing.jsonl.gz"
SMALL = f"-t {TRACE} -q --profile llama-3.1-8b@h100"
PLAN = (
    f"plan --trace {TRACE} --model llama-3.1-8b --gpus h100 --tp 1 --most-gpus 2 --seeds 1 "
    "--workers 1 -q --slo 'ttft p90 < 5 s'"
)
_ROW = '{{"timestamp": {0}, "input_length": 60, "output_length": {1}, "hash_ids": [{2}]}}\n'

# Values that no option takes as they are, and some that one or the other does.
HOSTILE = (
    *("", " ", "-1", "0", "nan", "inf", "-inf", "1e308", "1e-308", "9e19", "1" * 400, "0x10"),
    *("none", "None", "null", "true", "[]", "{}", "[" * 2000, "\N{SNOWMAN}", "\udcff", "a,b", "="),
    *("x:y=z", ":", "a" * 5000, "/", "/dev/null", "/proc/nosuch/x", "..", ".", "~", "*", "--"),
    *("-", "%s", "{0}", "vllm", "bros:chunk=-1", "tp0", "1 2", "5s", "p50", "ttft:1"),
    *("ttft < 1 s", RUN, TRACE),
)
NUMBERS = ("rate", "duration", "requests", "rate-scale", "load", "cap-length", "seed", "pool")
SIZES = ("replicas", "block-tokens", "num-blocks", "host-blocks", "max-num-seqs", "client-timeout")
MORE = ("max-num-batched-tokens", "cold-start")
TEXTS = ("policy", "trace", "format", "profile", "front-end", "router", "kv", "slo", "preset")
WORDS = ("step-times", "estimator", "decision-time", "host-time", "warmup", "percentiles", "config")
LAST = ("speculate", "metrics-every", "goodput", "export", "out")
SIMULATE = (*NUMBERS, *SIZES, *MORE, *TEXTS, *WORDS, *LAST)
LIMIT = f"limit {SMALL} --slo 'ttft p90 < 5 s' --workers 1"
# What is wrong wherever it stands, of options that take a number.
NEVER_NUMBERS = ("", "nan", "inf", "-1", "a,b", "\N{SNOWMAN}", "[]")

# command line, its options
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"simulate {SMALL}", SIMULATE),
    (LIMIT, ("seeds", "grid", "params", "concurrency", "requests", "slo", "workers", "from-vllm")),
    ("trace list", ()),
    ("trace fetch nosuch", ()),
    (f"trace inspect {TRACE} --json", ("format", "seed", "rate")),
    (f"trace convert {TRACE} new.jsonl", ("format", "rate")),
    ("trace synth new.jsonl --requests 3", ("lengths", "rate", "duration", "requests", "seed")),
    ("profiles show llama-3.1-8b@h100", ("step-times",)),
    ("profiles scale llama-3.1-8b@h100 --out new.json", ("step", "prefill", "host", "pcie", "kv")),
    ("profiles build qwen2.5-14b nosuch --out new.json", ("tp", "num-blocks", "max-num-seqs")),
    (f"profiles fit {STEPS}", ("profile", "model", "form", "out")),
    (f"calibrate --from-steps {STEPS}", ("profile", "model", "form", "out")),
    ("calibrate --model nosuch --out new.json", ("engine-arg", "raw", "threads", "num-blocks")),
    (f"replay {RUN} --model nosuch --mode free", ("engine-arg", "pace", "out")),
    (f"replay {RUN} --model nosuch", ("engine-arg", "weights", "steps")),
    ("validate --model nosuch --repeats 0", ("policy", "trace", "profile", "out")),
    (f"sweep {SMALL} --dry-run", (*NUMBERS, *TEXTS, "grid", "params", "link-vars", "seeds")),
    ("report nosuch --out new.html", ("out",)),
    (f"report {RUN} --out new.html", ("out",)),
    (f"trace anonymise {TRACE} new.jsonl", ("format", "jitter", "salt", "columns")),
    ("study nosuch", ("seeds", "workers", "out")),
    (PLAN, ("slo", "gpus", "tp", "seeds", "grow", "lead", "peak", "most-gpus", "prices", "out")),
    (f"reroute {RECORD} --json", ("router", "age", "interval")),
    ("route --worker nosuch", ("kv-events", "router", "profile", "record", "port", "retries")),
    (f"compare {RUN} {BENCH} --out new", ("format", "columns", "metrics-every", "out")),
    (f"check {BENCH} --profile llama-3.1-8b@h100", ("at", "profile", "config", "num-blocks")),
    *((listing, ("json",)) for listing in ("gpus", "models", "policies", "profiles list")),
)
# What reads a file, FILE; and good content to damage.
_PARAMS = '[{"policy": "bros", "load": 0.7}, {"policy": "vllm", "load": 0.5}]'
_CONFIG = '{"version": 4, "config": {"trace": "t.jsonl", "policy": ["vllm"], "rate_scale": 2.0}}'
_FLEET = "router: least-requests\npools:\n  - name: new\n    profile: llama-3.1-8b@h100\n"
_PROFILE = derive_profile("llama-3.1-8b", "h100").model_dump_json()
_MODEL = json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
_PRICES = "gpu,usd_per_hour,provider,product,source,date\nh100,3.5,x,y,z,2026-01-01\n"
_FRONT = '{"version": 1, "name": "x", "request_s": 0.1, "prompt_token_s": 1e-6, "response_s": 0.1}'
READS: tuple[tuple[str, str], ...] = (
    *((f"trace inspect FILE --json --format {name}", text) for name, text in GOOD.items()),
    *(("trace inspect FILE --json", text) for text in GOOD.values()),
    ("sweep -t t.jsonl --params FILE --dry-run", _PARAMS),
    ("simulate -q --config FILE", _CONFIG),
    (f"simulate {SMALL} --front-end FILE", _FRONT),
    (
        f"simulate {SMALL} -p justitia:training=FILE",
        '{"kind": "a", "text": "b", "stages": [[[1, 2]]]}',
    ),
    ("profiles fit FILE", "seconds,decode_requests,decode_context\n" + "0.1,1,5\n0.2,3,9\n" * 6),
    *((f"compare {RUN} FILE --format {name}", text()) for name, text in MEASURED.items()),
    (f"compare {RUN} FILE --format prometheus", prometheus()),
    (f"compare {RUN} FILE --columns arrival=at,prompt=in,output=out", "at,in,out\n0,5,2\n1,9,3\n"),
    (f"simulate -q -t {TRACE} --fleet FILE", _FLEET),
    (f"simulate -q -t {TRACE} --profile FILE", _PROFILE),
    ("profiles show FILE", _PROFILE),
    ("profiles build FILE h100 --out new.json", _MODEL),
    (f"{PLAN} --prices FILE", _PRICES),
    (f"simulate -q -t {TRACE} --fleet FILE", FLEET_OF_PUSH),
    ("reroute FILE.gz --json", routing_record()),
    ("reroute FILE.gz --router round-robin --age 0.5", routing_record()),
)
DAMAGES = (b"\0", b"\xff\xfe", b"[" * 3000, b'{"a":' * 3000, b"NaN", b"1e400", b"-1", b'"', b"\n")
_LINES = (
    b"null", b"9" * 400, b",", b"}", b"\\ud800", b"true", b"\r", b"[]", b"0.5", b"\xf0\x9f\x98\x80",
)  # fmt: skip


@dataclass
class Case:
    """words: of the command line; files: content by name, in the working folder; refused: whether
    the command must refuse it."""

    words: list[str]
    files: dict[str, bytes] = field(default_factory=dict)
    refused: bool = False


def prepare(folder: Path) -> None:
    """What all cases find in their folder, but for the folder of a run."""
    rows = (_ROW.format(i * 50, 2 + i % 3, i % 4) for i in range(8))
    (folder / TRACE).write_text("".join(rows))
    head = "seconds,decode_requests,decode_context\n"
    steps = "".join(f"{0.01 + i / 1e3},{i},{i * 90}\n" for i in range(1, 20))
    (folder / STEPS).write_text(head + steps)
    (folder / BENCH).write_text(MEASURED["vllm-bench"]())
    (folder / RECORD).write_bytes(gzip.compress(routing_record().encode(), mtime=0))


def draw(number: int, run: Path) -> Case:
    """The case of this number; run: a folder of results, to be damaged."""
    rng = random.Random(number)
    kind = rng.random()
    if kind < 0.45:
        command, content = rng.choice(READS)
        damaged = _damaged(rng, content.encode())
        name = "fuzzed.json"
        words = shlex.split(command.replace("FILE", name))
        if "FILE.gz" in command:  # within the compressed file, or that file itself
            whole = rng.random() < 0.8
            text = damaged if whole else content.encode()
            packed = gzip.compress(text, mtime=0)
            name, damaged = f"{name}.gz", packed if whole else _damaged(rng, packed)
        return Case(words, {name: damaged})
    if kind < 0.55:
        names = sorted(f.name for f in run.iterdir() if f.suffix in (".json", ".parquet", ".gz"))
        name = rng.choice(names)
        damaged = _damaged(rng, (run / name).read_bytes(), at_start=True)
        command = rng.choice(["report RUN --out new.html", "replay RUN --model nosuch"])
        return Case(command.replace("RUN", RUN).split(), {f"{RUN}/{name}": damaged})
    if kind < 0.65:
        return _odd_rows(rng)
    return _options(rng)


def _odd_rows(rng: random.Random) -> Case:
    """Rows as tools write them when something went wrong. Some are refused for reasons of the
    command; a file without a served row must be."""
    tool = rng.choice(list(TOOLS))
    rows = [drawn(rng) for _ in range(rng.choice((1, 2, 3, 8, 40)))]
    command = rng.choice(
        (
            f"compare {RUN} FILE --format {tool}",
            f"compare {RUN} {BENCH} FILE",
            f"trace inspect FILE --json --format {tool}",
            f"simulate -q --profile llama-3.1-8b@h100 --trace FILE --format {tool} --slo none",
        )
    )
    if rng.random() < 0.05:  # seconds each
        command = rng.choice(
            (
                "calibrate --from-serving FILE --profile llama-3.1-8b@h100 --out new.json",
                "check FILE --profile llama-3.1-8b@h100 --at 2x -q",
            )
        )
    words = shlex.split(command.replace("FILE", "fuzzed.json"))
    if tool == "csv" and command.startswith(("calibrate", "check")):
        tool = "vllm-bench"  # which knows its columns
    elif tool == "csv":
        words += ["--columns", COLUMNS]
    return Case(words, {"fuzzed.json": TOOLS[tool](rows).encode()}, none_served(rows))


def _options(rng: random.Random) -> Case:
    command, options = rng.choice(COMMANDS) if rng.random() < 0.6 else COMMANDS[0]
    words, refused = shlex.split(command), False
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice((*options, "nosuch"))
        value = rng.choice(HOSTILE)
        refused |= name == "nosuch" or (command == COMMANDS[0][0] and _never(name, value))
        words.append(f"--{name}={value}")
    if rng.random() < 0.1:
        words.insert(rng.randrange(len(words) + 1), rng.choice(HOSTILE))
    return Case(words, {}, refused)


def _never(name: str, value: str) -> bool:
    return name in (*NUMBERS, *SIZES, *MORE) and value in NEVER_NUMBERS


def _damaged(rng: random.Random, content: bytes, at_start: bool = False) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(len(data), 300) + 1 if at_start else len(data) + 1)
        what = rng.random()
        if what < 0.2:
            del data[at:]
        elif what < 0.4:
            del data[at : at + rng.randrange(1, 9)]
        elif what < 0.5 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        else:
            end = at + rng.choice((0, 0, 1, 3))
            data[at:end] = rng.choice((*DAMAGES, *_LINES))
    return bytes(data)


def lay_out(case: Case, folder: Path, run: Path) -> None:
    """The case's files, in a folder that has those of `prepare`."""
    shutil.copytree(run, folder / RUN, dirs_exist_ok=True)
    for name, content in case.files.items():
        (folder / name).write_bytes(content)


LIMIT_S = 30  # of CPU time a case; the longest takes a second
WAITS_S = 600  # until a case that takes no CPU time is taken for one that hangs
CASES, PROCESSES = 1000, 100
CODES = (0, 1, 2)  # 1: a sweep with runs that failed


class Hang(BaseException):
    """Longer than LIMIT_S or WAITS_S; says which, and where that was."""


def _hang(number: int, frame: FrameType | None) -> None:
    limit = f"{LIMIT_S} s of CPU time" if number == signal.SIGPROF else f"{WAITS_S} s"
    at = "" if frame is None else f" at {frame.f_code.co_filename}, line {frame.f_lineno}"
    raise Hang(f"still there after {limit}{at}")


@contextlib.contextmanager
def limits():
    """Raises Hang in its body. A machine that others keep busy makes no case longer."""
    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    former = {number: signal.signal(number, _hang) for number in timers}
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, WAITS_S)
    try:
        yield
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, former[number])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Results to be damaged."""
    folder = tmp_path_factory.mktemp("fuzz")
    prepare(folder)
    with contextlib.chdir(folder), pytest.raises(SystemExit):
        main([*f"simulate {SMALL} --no-async-scheduling --decisions --out {RUN}".split()])
    return folder / RUN


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def check(case: Case, code: object, err: str, left: set[str]) -> None:
    """What holds for every case."""
    where = f"{case.words}"[:600]
    assert code in CODES, f"{where}: ended with {code}"
    assert "Traceback" not in err and "Warning" not in err, f"{where}: {err[-600:]}"
    if code == 2:
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and err.rstrip().splitlines()[-1] == lines[0], f"{where}: {err}"
        assert re.search(r": .*\w", lines[0]), f"{where}: an error without a word"
        assert len(lines[0]) < 12_000 and not left, f"{where}: {left}"
    else:
        assert not case.refused, f"{where}: taken"
        hidden = {name for name in left if Path(name).name.startswith(".")}
        assert not hidden, f"{where}: {hidden}"


def executed(case: Case, execute) -> None:
    """Run a case in a folder of its own and check it. execute(words) gives (code, stderr)."""
    with tempfile.TemporaryDirectory(prefix="twinserve-fuzz-") as name:
        folder = Path(name)
        prepare(folder)
        lay_out(case, folder, executed.run)
        before = entries(folder)
        with contextlib.chdir(folder):
            code, err = execute(case.words)
        check(case, code, err, entries(folder) - before)


def in_process(words: list[str]) -> tuple[object, str]:
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    try:
        with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                main(words)
    except SystemExit as end:
        code = end.code or 0
    except (Exception, Hang) as error:
        raise AssertionError(f"{str(words)[:600]}: {error!r}"[:900]) from error
    return code, err.getvalue()


def as_process(words: list[str]) -> tuple[object, str]:
    ended = subprocess.run(
        [sys.executable, "-m", "twinserve.sim.cli.main", *map(os.fsencode, words)],
        capture_output=True,
        timeout=WAITS_S,
    )
    return ended.returncode, ended.stderr.decode("utf-8", "replace")


@pytest.mark.nightly
@given(st.integers(0, 2**63 - 1))
@settings(  # never less than CASES; and a number cannot be shrunk to a simpler case
    max_examples=max(CASES, examples(CASES).max_examples), phases=[Phase.generate]
)
def test_whatever_is_given_ends_in_an_answer_or_one_line(run, number):
    executed.run = run
    executed(draw(number, run), in_process)


@pytest.mark.nightly
def test_so_it_does_in_processes_of_its_own(run):
    executed.run = run
    numbers = random.Random(28)
    for _ in range(PROCESSES):
        case = draw(numbers.getrandbits(63), run)
        if not any("\0" in word for word in case.words):
            executed(case, as_process)


def test_a_number_always_draws_the_same_case(run):
    assert [draw(n, run) for n in range(50)] == [draw(n, run) for n in range(50)]
    assert len({str(draw(n, run)) for n in range(50)}) > 45


def test_every_command_is_drawn():
    drawn = {draw.split()[0] for draw, _ in (*COMMANDS, *READS)}
    # a server, and what prints a fixed text
    beside = {"emulate", "completion"}
    assert set(VERBS) - beside <= drawn, set(VERBS) - drawn


def test_what_is_damaged_is_taken_when_it_is_whole(tmp_path, capsys):
    """Else its cases would test nothing but the first check of a reader."""
    prepare(tmp_path)
    for command, content in READS[-3:]:
        name = "fuzzed.json"
        if "FILE.gz" in command:
            (tmp_path / f"{name}.gz").write_bytes((tmp_path / RECORD).read_bytes())
        (tmp_path / name).write_text(content)
        with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as end:
            main(command.replace("FILE", name).split())
        assert not end.value.code, (command, capsys.readouterr().err)
