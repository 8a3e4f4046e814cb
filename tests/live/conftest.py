"""The live tests need what the identity tests need: a vLLM installation."""

from tests.identity.conftest import vllm  # noqa: F401 - a fixture
