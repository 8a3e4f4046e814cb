"""Hostile invocations of every command, drawn from a number: the same number, the same case.

A case is a command line, and files that stand in its folder beside those of `prepare`. Half of the
cases damage a file that some command reads, a few give measured files odd rows, the others give
options values that nobody means.
"""

import gzip
import json
import random
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.records import FLEET_OF_PUSH, routing_record
from tests.fuzz.rows import COLUMNS, TOOLS, drawn, none_served
from tests.traces.measured_files import FILES as MEASURED
from tests.traces.measured_files import prometheus
from tests.traces.test_trace_bad_input import GOOD
from twinserve.profiles.profile import derive_profile

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
