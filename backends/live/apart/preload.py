"""What processes of engines are forked from has imported: vLLM, once for all of them."""

import contextlib

with contextlib.suppress(ImportError):  # then the engines say what is missing
    import vllm.distributed.kv_transfer
    import vllm.v1.core.sched.scheduler
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
