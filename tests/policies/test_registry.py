"""Names to classes: lazily, with one line for whoever mistypes one."""

import subprocess
import sys
import typing
from importlib.metadata import EntryPoint

import pytest

from tests.parameters import mostly_nightly
from twinserve import own_code
from twinserve.policies import registry
from twinserve.policies.base import EngineLimits, Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import (
    PolicySpec,
    ledger_class,
    ledger_names,
    parse_policy,
    policy_class,
    policy_names,
)
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.run import simulate

# enough to fill the memory, best-effort requests beside it
TRAFFIC = {
    "trace": "poisson", "rate": 40.0, "requests": 24, "cap_length": 200, "num_blocks": 90,
    "max_num_seqs": 8, "pool": 2, "offline": True,
}  # fmt: skip
ESTIMATES = {
    "echo": True, "echo-bs": False, "echo-bs:slo_aware=true": True,
    "echo:slo_aware=false,kv_aware=false": False, "layerkv": True,
    "layerkv:slo_aware=false,layer_wise=false": False, "vllm": False, "bros": True,
}  # fmt: skip


def test_every_name_leads_to_a_class_that_bears_it():
    assert {"bros", "preemptive-wait", "round-robin", "vllm", "vllm-v0"} <= set(policy_names())
    for name in policy_names():
        assert issubclass(policy_class(name), Policy) and policy_class(name).name == name
        assert policy_class(name).default_kv in ledger_names()
    for name in ledger_names():
        assert issubclass(ledger_class(name), KvLedger) and ledger_class(name).name == name


@pytest.mark.slow
def test_importing_the_registry_imports_no_policy_and_no_engine():
    code = (
        "import sys, twinserve.policies.registry as r; r.policy_names(); r.parse_policy('vllm'); "
        "print(sorted(m for m in sys.modules if m in ('torch', 'vllm', "
        "'twinserve.policies.bros.policy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_text_becomes_options_of_the_policys_types():
    spec = parse_policy(" bros:chunk=2048, swap=false,kv=paged ")
    assert spec == PolicySpec(
        "bros", {"chunk": 2048, "swap": False}, "paged", "bros:chunk=2048, swap=false,kv=paged"
    )
    assert parse_policy("bros:chunk=none").options == {"chunk": None}
    assert parse_policy("vllm") == PolicySpec("vllm", {}, None, "vllm")
    assert parse_policy("vllm").kv_name == "paged"
    policy = parse_policy("round-robin:batch_size=4").build(EngineLimits())
    assert policy.options.batch_size == 4 and policy.options.chunk is None


@pytest.mark.parametrize(
    "text, message",
    [
        ("bross", "no policy 'bross' (did you mean 'bros'?); there are bros, "),
        ("zzzz", "no policy 'zzzz'; there are bros, "),
        ("", "no policy ''; there are "),
        (
            "bros:chunkk=3",
            "policy 'bros' has no option 'chunkk' (did you mean 'chunk'?); it has base_",
        ),
        ("bros:chunk=x", "policy 'bros', option chunk=x: should be a valid integer"),
        ("bros:chunk=0", "policy 'bros', option chunk=0: should be greater than or equal to 1"),
        (
            "bros:kv=pagd",
            f"no KV ledger 'pagd' (did you mean 'paged'?); there are {', '.join(ledger_names())}",
        ),
        ("bros:", "policy 'bros': expected option=value, not ''"),
        ("bros:chunk", "policy 'bros': expected option=value, not 'chunk'"),
        ("bros:chunk=", "policy 'bros': expected option=value, not 'chunk='"),
        ("bros:chunk=1,chunk=2", "policy 'bros': option 'chunk' is given twice"),
        (
            "vllm-v0:preemption_mode=drop",
            "option preemption_mode=drop: should be 'recompute' or 'swap'",
        ),
    ],
)
def test_mistakes_get_one_line(text, message):
    with pytest.raises(RegistryError) as caught:
        parse_policy(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


NUMBERS = [
    (name, option)
    for name in policy_names()
    for option, field in policy_class(name).Options.model_fields.items()
    if {int, float} & {field.annotation, *typing.get_args(field.annotation)}
]


def taken(name: str, option: str) -> list[str]:
    """Policies with numbers out of the ordinary that are not refused; the others are, by name."""
    found = []
    for value in ("nan", "inf", "-inf", "-1", "1e308", "1e-300", str(10**18), str(10**30)):
        text = f"{name}:{option}={value}"
        try:
            parse_policy(text)
        except RegistryError as error:
            said = str(error)
            assert f"policy {name!r}, option {option}={value}: should be" in said
            assert "\n" not in said
            continue
        assert value not in ("nan", "inf", "-inf", "-1")
        found.append(text)
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_number_out_of_the_ordinary_is_taken_or_refused_by_its_name(name, option):
    """Not finite or negative: refused."""
    taken(name, option)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "option"), mostly_nightly(NUMBERS, *NUMBERS[::8]))
def test_everybody_is_served_with_a_number_out_of_the_ordinary(name, option):
    """Very large or next to nothing, where that is not refused."""
    for text in taken(name, option):
        run = simulate(SimulationConfig(policy=(text,), **TRAFFIC))[text]
        assert run.rows.requests.finished.all(), text


def test_a_number_out_of_range_is_told_the_range():
    for text, said in (
        (
            "tgi:waiting_served_ratio=inf",
            "waiting_served_ratio=inf: should be a finite number, at least 0 and at most 1000000",
        ),
        (
            "tgi:waiting_served_ratio=-1",
            "waiting_served_ratio=-1: should be at least 0 and at most 1000000",
        ),
        ("mlfq:starve_limit=nan", "starve_limit=nan: should be a finite number, more than 0"),
        ("vllm:watermark=1", "watermark=1: should be at least 0 and less than 1"),
        (f"bros:chunk={10**30}", f"chunk={10**30}: should be less than or equal to 1e+18"),
    ):
        with pytest.raises(RegistryError) as caught:
            parse_policy(text)
        assert str(caught.value).endswith(said)


def test_whether_step_times_are_asked_for_depends_on_options():
    asking = {text: parse_policy(text).uses_estimator for text in ESTIMATES}
    assert asking == ESTIMATES


class Theirs(Policy):
    name = "theirs"

    def on_arrival(self, row, requests): ...

    def on_finish(self, row): ...

    def plan(self, view, ledger): ...


@pytest.fixture
def other_packages(monkeypatch):
    """Entry points as if another package had been installed."""
    points = [
        EntryPoint("theirs", f"{__name__}:Theirs", registry.POLICIES.group),
        EntryPoint("bros", f"{__name__}:Theirs", registry.POLICIES.group),
    ]
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, __name__, module)
    monkeypatch.setattr(
        own_code, "entry_points", lambda group: [p for p in points if p.group == group]
    )


def test_policies_of_other_packages(other_packages):
    assert "theirs" in policy_names()
    assert policy_class("theirs") is Theirs
    assert policy_class("bros") is not Theirs  # our names cannot be taken
    with pytest.raises(RegistryError, match=r"no policy 'thers' \(did you mean 'theirs'\?\)"):
        policy_class("thers")


BROKEN = {
    "raises": ("import nowhere", "cannot be loaded from broken_raises:Mine: No module named 'no"),
    "typo": ("class Mine(:", "cannot be loaded from broken_typo:Mine: invalid syntax"),
    "abstract": (
        "from twinserve.policies.base import Policy\nclass Mine(Policy): name = 'abstract'",
        "broken_abstract:Mine lacks on_arrival, on_finish, plan",
    ),
    "named": (
        "from twinserve.policies.baselines.vllm import VllmPolicy\nclass Mine(VllmPolicy): pass",
        "broken_named:Mine says name = 'vllm'; call both the same",
    ),
    "function": ("def Mine(): ...", "broken_function:Mine is not a Policy"),
}


def test_broken_packages_are_named_where_they_are_asked_for_alone(tmp_path, monkeypatch):
    points = {name: f"broken_{name}:Mine" for name in BROKEN}
    for name, (code, _) in BROKEN.items():
        (tmp_path / f"broken_{name}.py").write_text(code)
    about = tmp_path / "broken-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    lines = [f"[{registry.POLICIES.group}]", *(f"{n} = {where}" for n, where in points.items())]
    (about / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert set(BROKEN) < set(policy_names()) and policy_class("vllm").name == "vllm"
    for name, (_, said) in BROKEN.items():
        with pytest.raises(RegistryError) as error:
            policy_class(name)
        assert str(error.value).startswith(f"policy {name!r} of another package")
        assert said in str(error.value) and "\n" not in str(error.value)
