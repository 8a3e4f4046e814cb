"""Routers by name, those of other packages too, and the Python of the page on fleets."""

from __future__ import annotations

import inspect
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from pydantic import Field

from twinserve import own_code
from twinserve.policies.base import Options
from twinserve.policies.names import RegistryError
from twinserve.policies.registry import parse_policy
from twinserve.sim.fleet.routers.base import Router
from twinserve.sim.fleet.routers.plain import LeastRequests
from twinserve.sim.fleet.routers.registry import parse_router, router_names
from twinserve.sim.setup.config import SimulationConfig

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


class LastOptions(Options):
    of: int = Field(2, ge=1)


class Last(Router[LastOptions]):
    """The last of the first few."""

    name = "last"
    Options = LastOptions

    def place(self, request, stage, view):
        return view.up[: self.options.of][-1]


@pytest.fixture
def other_packages(monkeypatch):
    """An entry point as if another package had been installed."""
    point = EntryPoint("last", f"{__name__}:Last", "twinserve.routers")
    monkeypatch.setattr(
        own_code, "entry_points", lambda group: [point] if group == point.group else []
    )


def test_every_router_is_found_by_its_name():
    assert "least-requests" in router_names()
    for name in router_names():
        assert parse_router(name).build().name == name
    assert isinstance(parse_router("least-requests").build(), LeastRequests)


def test_routers_of_other_packages_have_options(other_packages):
    assert "last" in router_names()
    assert parse_router("last").build().options.of == 2
    assert parse_router("last:of=3").build().options.of == 3


@pytest.mark.parametrize(
    "text, said",
    [
        ("lest-requests", r"no router 'lest-requests' \(did you mean 'least-requests'\?\)"),
        ("least-requests:of=1",
         "router 'least-requests' has no option 'of'; it has shed_rt, shed_be"),
        ("last:off=1", r"router 'last' has no option 'off' \(did you mean 'of'\?\); it has of"),
        ("last:of=0", "router 'last', option of=0: should be greater than or equal to 1"),
        ("llm-d:events_lost=0.1",
         "router 'llm-d', option events_lost=0.1: index=approximate hears no KV events"),
        ("dynamo-kv:index=approximate,events_age=1", "option events_age=1: index=approximate"),
        ("dynamo-kv:ttl=60", "option ttl=60: index=exact forgets by KV events"),
        ("last:of", r"router 'last': expected option=value, not 'of' \(in 'last:of'\)"),
    ],
)  # fmt: skip
def test_a_wrong_name_or_option_is_one_line(text, said, other_packages):
    with pytest.raises(RegistryError, match=said):
        parse_router(text)


@pytest.mark.parametrize(
    "text", ["dynamo-kv:ttl=60,index=approximate", "llm-d:events_age=0,events_lost=0.1,index=exact"]
)
def test_options_of_the_index_go_with_it_in_any_order(text):
    assert parse_router(text).build()


def test_the_examples_of_the_help_exist():
    examples = re.findall(r"options after a colon: (\S+);", inspect.getsource(SimulationConfig))
    policy, router = examples
    assert parse_policy(policy).given and parse_router(router).build()


def test_the_python_of_the_page_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert "sarathi" in capsys.readouterr().out
