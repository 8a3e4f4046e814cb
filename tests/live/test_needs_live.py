"""The installed vLLM has what the twin needs, or says so before anything is built."""

import pytest

from tests.identity.release import installed_release, installed_rules
from twinserve.backends.live.needs import NEEDS, missing
from twinserve.backends.live.versions import KNOWN, installed_vllm
from twinserve.policies.baselines.vllm import RULES

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.usefixtures("vllm")]


@pytest.mark.parametrize("use", NEEDS)
def test_a_release_that_is_known_to_work_has_all_that_is_needed(use):
    if use not in KNOWN.get(installed_vllm(), ()):
        pytest.skip(f"vLLM {installed_vllm()} is not known to work for {use}")
    assert missing(use) == []


def test_the_installed_release_follows_rules_that_policy_vllm_has():
    assert RULES[installed_release()] == installed_rules()
