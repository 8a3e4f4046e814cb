"""What the live twin needs of vLLM is checked before an engine is built, and said in one line."""

import pytest

from twinserve.backends.live import needs
from twinserve.backends.live.needs import Need, require, require_state
from twinserve.backends.live.versions import LiveEngineError

JSON = "json.decoder:JSONDecoder"


@pytest.fixture
def asked(monkeypatch):
    """Let any module stand for vLLM: what is needed of it is given here."""
    monkeypatch.setattr(needs, "installed_vllm", lambda: "0.99.0")
    require.cache_clear()

    def ask(*wanted: Need) -> None:
        monkeypatch.setitem(needs.NEEDS, "engine", wanted)

    yield ask
    require.cache_clear()


@pytest.mark.parametrize(
    ("need", "said"),
    [
        (Need("json.nowhere:Thing"), "json.nowhere"),
        (Need("json.decoder:Nothing"), "json.decoder.Nothing"),
        (Need(f"{JSON}.decodes"), "json.decoder.JSONDecoder.decodes"),
        (Need(f"{JSON}.decode", ("s", "steps")), "json.decoder.JSONDecoder.decode (steps)"),
        (Need(JSON, holds=("decode", "colour")), "json.decoder.JSONDecoder (colour)"),
    ],
)
def test_what_is_missing_is_named_in_one_line_with_what_to_do(asked, need, said):
    asked(Need(JSON), need)
    with pytest.raises(LiveEngineError) as failure:
        require("engine")
    line = str(failure.value)
    assert "\n" not in line and f"vLLM 0.99.0 lacks {said}, which engine needs" in line
    assert "known to work: 0.32.0" in line and "install one of these" in line


def test_further_missing_names_are_counted(asked):
    asked(Need("json:one"), Need("json:two"), Need("json:loads"))
    with pytest.raises(LiveEngineError, match="lacks json.one and 1 more"):
        require("engine")


def test_one_of_two_names_is_enough(asked):
    asked(Need("json:old_name|json:loads"))
    require("engine")


def test_a_function_that_takes_any_name_takes_every_parameter(asked):
    asked(Need("json:loads", ("anything",)), Need(f"{JSON}.decode", ("s",)))
    require("engine")


def test_a_scheduler_without_a_field_is_refused(asked):
    with pytest.raises(LiveEngineError, match="lacks object.running and 9 more"):
        require_state(object())


def test_every_use_names_what_it_needs_and_a_release_that_has_it():
    for use, wanted in needs.NEEDS.items():
        assert wanted and all(need.where.startswith("vllm") for need in wanted)
        assert needs.known_to_work(use)
