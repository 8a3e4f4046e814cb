"""What the live tests need: a vLLM installation, and a tiny model."""

from pathlib import Path

import pytest

from tests.identity.conftest import vllm  # noqa: F401 - a fixture
from twinserve.backends.live.engine.tiny_model import write_model


@pytest.fixture(scope="session")
def model(vllm, tmp_path_factory) -> Path:  # noqa: F811
    return write_model(tmp_path_factory.mktemp("tiny_llama"))
