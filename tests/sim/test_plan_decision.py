"""What a plan says to buy, at which prices, and the script that starts it."""

import datetime
import json
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from tests.commands import refused, status
from tests.sim.planned import write_trace
from twinserve.profiles.gpu_labels import gpu_of_label
from twinserve.profiles.gpus import GPUS
from twinserve.sim.cli.main import main
from twinserve.sim.plan.candidates import Candidate, candidates
from twinserve.sim.plan.decision import decide, decision_lines
from twinserve.sim.plan.planner import Closer, Row
from twinserve.sim.plan.prices import load_prices, read_prices
from twinserve.sim.plan.start import FILES, LABELS, emitted, serve_arguments, start_script
from twinserve.sim.serve_line.settings import from_vllm
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware


def row(gpu: str, usd: float | None, n: int, fast, slow, answers="meets", tp: int = 1) -> Row:
    """With sizes from `n` on, of these answers."""
    names = ("gpu", "tp", "policy", "router", "usd_per_hour")
    candidate = SimpleNamespace(**dict(zip(names, (gpu, tp, "vllm", "random", usd), strict=True)))
    sizes = tuple(
        SimpleNamespace(replicas=n + i, answer=answer) for i, answer in enumerate(answers.split())
    )
    closer = Closer(sizes, None, fast, slow, "12 %", None, 1, 8 * n)  # type: ignore[arg-type]
    asked: Candidate = candidate  # type: ignore[assignment]
    return Row(asked, "enough", n, usd_per_hour=usd and usd * n, closer=closer)


def plan(*rows: Row, priced: bool = True, survive: int = 0):
    question = SimpleNamespace(survive=survive, policies=("vllm",))
    return SimpleNamespace(rows=rows, priced=priced, question=question)


L40S, H100 = row("l40s", 1.09, 3, 2, 4), row("h100", 3.49, 1, 1, 1)


@pytest.mark.parametrize(
    ("rows", "bought"),
    [
        ((L40S, H100), (H100, 1)),  # four at 4.36 are dearer than one at 3.49
        ((L40S, row("h100", 4.5, 1, 1, 1)), (L40S, 3)),
        ((row("l40s", 1.09, 3, 2, None), H100), (H100, 1)),  # never enough, if steps take longer
        ((row("l40s", 1.0, 2, 2, 3, "undecided meets"), H100), (0, 3)),
        ((row("l40s", 1.0, 2, 2, 3, "undecided undecided"), H100), (0, 2)),
        ((row("l40s", 1.0, 2, 2, 2, "undecided undecided meets"), H100), (H100, 1)),
    ],
)
def test_it_is_cheapest_by_the_number_that_the_range_needs(rows, bought):
    best, first = decide(plan(*rows))
    assert first.row is rows[0]
    assert best.row is (rows[0] if bought[0] == 0 else bought[0]) and best.replicas == bought[1]


def test_without_a_price_gpus_decide():
    rows = row("l40s", None, 3, 2, 4), row("h100", None, 1, 1, 2, tp=2)
    assert decide(plan(*rows, priced=False))[0].row is rows[0]  # 4 GPUs and 4: the first
    assert "$" not in " ".join(decision_lines(plan(*rows, priced=False)))


def test_it_is_said_with_the_reason():
    assert decision_lines(plan(L40S, H100)) == [
        "Buy 1 H100 (1 x TP1): $3.49 an hour, about $2,550 a month; 1 replica if step times are "
        "off",
        "Not the first row: 3 L40S (3 x TP1) at $3.27 may need 4 replicas, $4.36, if steps take "
        "longer by the expected error",
    ]
    (line,) = decision_lines(plan(row("h100", 3.49, 5, 4, 6, tp=2), survive=1))
    assert line.startswith("Buy 10 H100 (5 x TP2, one may fail): $17.45 an hour")
    assert line.endswith("; 4 to 6 replicas if step times are off")
    assert decision_lines(plan()) == []


@pytest.mark.parametrize(("replicas", "tp"), [(1, 1), (5, 2), (3, 8)])
def test_the_script_starts_each_server_once_on_gpus_of_its_own(replicas, tp, tmp_path):
    """With programs in place of vllm and twinserve that say how they were called."""
    for name in ("vllm", "twinserve"):
        said = f'#!/bin/sh\necho "{name} $CUDA_VISIBLE_DEVICES $*"\n'
        (tmp_path / name).write_text(said)
        (tmp_path / name).chmod(0o755)
    commands = [f"vllm serve m --port {8000 + i}" for i in range(replicas)]
    file = tmp_path / "start.sh"
    file.write_text(start_script(commands, tp, "llm-d:prefix=5,age=0.2"))

    def started(*words: str) -> list[str]:
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(
            ["/bin/sh", file, *words], capture_output=True, text=True, check=True, env=env
        )
        return done.stdout.splitlines()

    hosts = -(-replicas * tp // 8)
    servers = [sorted(started(str(host))) for host in range(hosts)]
    assert sum(map(len, servers)) == replicas
    for lines in servers:
        gpus = [gpu for line in lines for gpu in line.split()[1].split(",")]
        assert len(set(gpus)) == len(gpus) == tp * len(lines) and set(gpus) <= set("01234567")
    (router,) = started("router", *(f"host{h}" for h in range(hosts)))
    assert "--router llm-d:prefix=5,age=0.2" in router
    workers = [word.partition("=")[2] for word in router.split() if "worker" in word]
    ports = [
        f"http://host{h}:{line.split()[-1]}" for h, lines in enumerate(servers) for line in lines
    ]
    assert workers == ports


def test_the_table_that_ships_has_a_date_and_a_source_in_every_row():
    prices = load_prices()
    assert {"h100", "h200", "l40s", "a100-80g"} <= set(prices) <= set(GPUS)
    for price in prices.values():
        assert 0.1 < price.usd_per_hour < 50 and price.source.startswith("https://")
        assert datetime.date(2026, 1, 1) <= datetime.date.fromisoformat(price.date)
        assert price.date in str(price) and f"${price.usd_per_hour:g}" in str(price)


def test_a_table_of_ones_own(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text('# ours\n\nusd_per_hour, GPU,product\n 2.5 ,A100,"8x, one node"\n1,h100,\n')
    prices = load_prices(file)
    assert {gpu: p.usd_per_hour for gpu, p in prices.items()} == {"a100-80g": 2.5, "h100": 1.0}
    assert prices["a100-80g"].product == "8x, one node"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("gpu,price\nh100,2\n", "no column usd_per_hour"),
        ("gpu,usd_per_hour,colour\n", "no column 'colour'"),
        ("gpu,usd_per_hour,gpu\n", "gpu is repeated"),
        ("gpu,usd_per_hour\nh100\n", "line 2: has 1 fields"),
        ("gpu,usd_per_hour\n\nh1000,2\n", "line 3: unknown GPU 'h1000'; nearest: h100"),
        ("gpu,usd_per_hour\nh100,two\n", "line 2: usd_per_hour 'two'"),
        ("gpu,usd_per_hour\nh100,-1\n", "line 2: usd_per_hour '-1'"),
        ("gpu,usd_per_hour\nh100,nan\n", "line 2: usd_per_hour 'nan'"),
        ("gpu,usd_per_hour\nh100,inf\n", "line 2: usd_per_hour 'inf'"),
        ("gpu,usd_per_hour\na100,1\na100-80g,2\n", "line 3: a100-80g is listed twice"),
        ('gpu,usd_per_hour\n"h100,1\n', "is no CSV"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(text, says):
    with pytest.raises(SettingsError, match=says) as caught:
        read_prices(text, "--prices p.csv")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--prices p.csv")


# What `plan --emit` writes starts what was recommended: read back, it is the same simulation.
SETTINGS = [
    {},
    {"max_num_seqs": 48, "max_num_batched_tokens": 3072, "gpu_memory_utilization": 0.85},
    {"kv_cache_dtype": "fp8", "enforce_eager": True, "async_scheduling": False},
    {"engine_version": "0.19", "max_model_len": 20_000},
]


def candidate(gpu: str, tp: int, **settings):
    base = SimulationConfig(**settings)
    (one,), _ = candidates(base, "qwen3-8b", [gpu], [tp], ["least-requests"], {}, 4000)
    return one


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_written_reads_back_as_the_same_simulation(tmp_path, kind, settings):
    one = candidate("h100", 2, **settings)
    words = serve_arguments(one, 0, (1.0, None), 4000)
    file = tmp_path / FILES[kind]
    file.write_text(emitted(kind, one, 3, words))
    said = from_vllm(str(file), {} if kind in ("kubernetes", "llm-d") else {"gpu": "h100"})
    eager = "--enforce-eager is not simulated"  # its step times
    assert [w for w in said.warnings if eager not in w] == []
    asked = {"engine_version": settings.get("engine_version")} if kind == "vllm" else {}
    found = SimulationConfig(from_vllm=str(file), gpu="h100", **asked)
    assert found.replicas == (1 if kind == "vllm" else 3)
    assert found.profile == one.config.profile and found.policy == ("vllm",)
    assert found.async_scheduling == one.config.async_scheduling
    back = resolve_hardware(found)
    assert back.kv_tokens == one.hardware.kv_tokens
    theirs, ours = back.limits, one.hardware.limits
    assert (theirs.max_num_seqs, theirs.max_num_batched_tokens) == (
        ours.max_num_seqs,
        ours.max_num_batched_tokens,
    )
    assert back.profile.gpu_memory_utilization == one.hardware.profile.gpu_memory_utilization


@pytest.mark.parametrize(("gpu", "tp"), [("h100", 2), ("mi300x", 1)])
def test_manifests_are_of_the_schemas_of_kubernetes(gpu, tp):
    """With fields that a schema does not have refused."""
    schemas = pytest.importorskip("kubernetes_validate")
    one = candidate(gpu, tp)
    text = emitted("kubernetes", one, 3, serve_arguments(one, 0, (1.0, None), 4000))
    kinds = []
    for document in yaml.safe_load_all(text):
        for release in ("1.31", "1.34"):
            schemas.validate(document, release, strict=True)
        kinds.append(document["kind"])
    assert kinds == ["Deployment", "Service"]
    with pytest.raises(schemas.ValidationError):
        schemas.validate({**document, "specs": {}}, "1.31", strict=True)


def test_labels_are_those_that_are_read():
    assert {gpu_of_label(label) for label in LABELS.values()} == set(LABELS)


@pytest.mark.slow
def test_the_command_writes_it_beside_the_plan(tmp_path, capsys):
    trace = write_trace(tmp_path / "t.csv", rate=60.0)
    words = ["plan", "--model", "qwen3-8b", "-t", trace, "--slo", "ttft p90 < 2 s"]
    words += ["--gpus", "h100", "--tp", "1", "--workers", "1", "-q", "--emit", "kubernetes"]
    assert "--out" in refused(capsys, main, words)
    assert not status(main, [*words, "--out", tmp_path / "p"]), capsys.readouterr().err
    best = json.loads((tmp_path / "p" / "plan.json").read_text())["rows"][0]
    found = SimulationConfig(from_vllm=str(tmp_path / "p" / "kubernetes.yaml"))
    assert found.replicas == best["replicas"] and found.profile == "qwen3-8b@h100"
