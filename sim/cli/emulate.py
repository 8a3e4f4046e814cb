"""`twinserve emulate`: a real vLLM server whose GPU is a profile."""

from typing import Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import Flag, Whole


def emulate(
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    profile: str = "llama-3.1-8b@h100",
    host: str = "127.0.0.1",
    port: Whole = 8000,
    policy: Annotated[str | None, Parameter(name=["--policy", "-p"])] = None,
    tokenizer: str | None = None,
    num_blocks: Whole | None = None,
    max_num_seqs: Whole | None = None,
    max_num_batched_tokens: Whole | None = None,
    max_model_len: Whole | None = None,
    no_async_scheduling: Flag = False,
    no_prefix_caching: Flag = False,
    replicas: Whole = 1,
    router: Annotated[str, Parameter(name=["--router", "-r"])] = "least-requests",
) -> None:
    """Start a real vLLM server on an emulated GPU, with the step times of a profile.

    API server, scheduler, block pool and metrics are vLLM's. There are no weights, and tokens have
    no meaning. The server runs until SIGTERM or Ctrl-C. Needs vLLM; its CPU build is enough
    (docs/emulate.md).

    For example:

    $ twinserve emulate --profile llama-3.1-8b@h100 --port 8000
    $ twinserve emulate --profile llama-3.1-70b@h100:tp4 -p bros:chunk=fit -- --api-key secret
    $ twinserve emulate --profile qwen3-8b@l40s --replicas 2 --router vllm-dp

    Args:
        arguments: After `--`: further arguments of `vllm serve`.
        profile: Model and GPU, as of simulate: a name, or a .json file.
        host: Where to listen.
        port: Where to listen. Servers of a fleet have the ports behind it, of this host.
        policy: Policy that schedules, as of simulate; by default vLLM's own scheduler.
        tokenizer: Folder of the model's tokenizer; by default one of English words is made.
        num_blocks: KV blocks that requests can use, instead of the profile's.
        max_num_seqs: Requests in a batch, instead of the profile's.
        max_num_batched_tokens: New tokens in a step, instead of the profile's.
        max_model_len: Tokens of the longest request, instead of the profile's.
        no_async_scheduling: Plan a step after the previous one has ended.
        no_prefix_caching: Do not cache prefixes.
        replicas: Servers, each with a GPU of its own; `twinserve route` stands before several.
        router: As of route.
    """
    from twinserve.backends.live.emulate.serve import serve
    from twinserve.sim.setup.config import SimulationConfig

    config = SimulationConfig(
        profile=profile,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        async_scheduling=not no_async_scheduling,
        prefix_caching=False if no_prefix_caching else None,
        replicas=replicas,
        router=router,
    )
    serve(config, host, port, policy, tokenizer, arguments)
