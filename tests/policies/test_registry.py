"""Names to classes: lazily, with one line for whoever mistypes one."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from twinserve.policies import registry
from twinserve.policies.base import EngineLimits, Policy
from twinserve.policies.kv.base import KvLedger
from twinserve.policies.registry import (
    PolicySpec,
    RegistryError,
    ledger_class,
    ledger_names,
    parse_policy,
    policy_class,
    policy_names,
)


def test_every_name_leads_to_a_class_that_bears_it():
    assert {"bros", "preemptive-wait", "round-robin", "vllm", "vllm-v0"} <= set(policy_names())
    for name in policy_names():
        assert issubclass(policy_class(name), Policy) and policy_class(name).name == name
        assert policy_class(name).default_kv in ledger_names()
    for name in ledger_names():
        assert issubclass(ledger_class(name), KvLedger) and ledger_class(name).name == name


def test_importing_the_registry_imports_no_policy_and_no_engine():
    code = (
        "import sys, twinserve.policies.registry as r; r.policy_names(); r.parse_policy('vllm'); "
        "print(sorted(m for m in sys.modules if m in ('torch', 'vllm', 'twinserve.policies.bros')))"
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


class Theirs(Policy):
    name = "theirs"

    def on_arrival(self, row, requests): ...

    def on_finish(self, row): ...

    def plan(self, view, ledger): ...


@pytest.fixture
def other_packages(monkeypatch):
    """Entry points as if another package had been installed."""
    points = [
        EntryPoint("theirs", f"{__name__}:Theirs", registry.POLICY_GROUP),
        EntryPoint("bros", f"{__name__}:Theirs", registry.POLICY_GROUP),
        EntryPoint("gone", "no_such_module:Policy", registry.POLICY_GROUP),
        EntryPoint("number", "math:pi", registry.POLICY_GROUP),
    ]
    module = sys.modules[__name__]
    monkeypatch.setitem(sys.modules, __name__, module)
    monkeypatch.setattr(
        registry, "entry_points", lambda group: [p for p in points if p.group == group]
    )


def test_policies_of_other_packages(other_packages):
    assert "theirs" in policy_names()
    assert policy_class("theirs") is Theirs
    assert policy_class("bros") is not Theirs  # our names cannot be taken
    with pytest.raises(RegistryError, match=r"no policy 'thers' \(did you mean 'theirs'\?\)"):
        policy_class("thers")


def test_broken_policies_of_other_packages(other_packages):
    with pytest.raises(RegistryError, match="'gone' of another package cannot be loaded from no_s"):
        policy_class("gone")
    with pytest.raises(RegistryError, match="'number' of another package: math:pi is not a Policy"):
        policy_class("number")
