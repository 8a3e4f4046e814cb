"""Make vLLM use the bidirectional backend. Nothing is imported from vLLM until a function is
called.

    EngineArgs(..., attention_backend=BACKEND_NAME, worker_extension_cls=WORKER_EXTENSION)

The extension is what reaches a worker in another process: importing it there registers the backend.
In the engine's own process `register()` does.
"""

_BACKEND = f"{__package__}.backend.BidirectionalBackend"
BACKEND_NAME = "CUSTOM"
WORKER_EXTENSION = f"{__package__}.worker.AttentionExtension"


def _place():
    """Return the platform's name for its backend: a CPU engine always takes CPU_ATTN."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return (
        AttentionBackendEnum.CPU_ATTN if current_platform.is_cpu() else AttentionBackendEnum.CUSTOM
    )


def _forget_choices() -> None:
    from vllm.v1.attention import selector

    # engines built earlier in this process chose by what was there then
    selector._cached_get_attn_backend.cache_clear()


def register() -> None:
    """Engines built in this process now use the backend (on a GPU: if asked for BACKEND_NAME)."""
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(_place(), _BACKEND)
    _forget_choices()


def unregister() -> None:
    """Engines built from now on use vLLM's own backends again."""
    _place().clear_override()
    _forget_choices()
