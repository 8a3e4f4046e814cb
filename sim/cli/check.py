"""`twinserve check`: a measured server at another rate, and whether to believe the prediction."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twinserve.sim.cli.options import Engine, Flag, Json, Quiet
from twinserve.sim.cli.progress import RunProgress


def check(
    bench: Annotated[list[Path], Parameter(negative="")],
    *,
    profile: str | None = None,
    at: str = "1x",
    config: Path | None = None,
    num_blocks: Annotated[int | None, Engine] = None,
    block_tokens: Annotated[int | None, Engine] = None,
    max_num_seqs: Annotated[int | None, Engine] = None,
    max_step_tokens: Annotated[
        int | None, Parameter(name=["--max-step-tokens", "--max-num-batched-tokens"]), Engine
    ] = None,
    max_model_len: Annotated[int | None, Engine] = None,
    saturated: Flag = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict a measured server at another rate, with a verdict on the prediction.

    The command fits the profile to the measurement and simulates the first file's requests at the
    other rate, also with step times off by their expected error.

    For example:

    $ twinserve check bench.json --profile llama-3.1-8b@h100 --at 2x

    Args:
        bench: Results of vllm bench serve --save-detailed, or other files with times of single
            requests; several files are loads of the same server. A result without single requests
            is compared by its means and percentiles.
        profile: The profile to begin with; take one of similar hardware.
        at: Factor on the measured rate of requests, such as 2x; on the clients of a closed loop.
        config: A run.json with the server's settings.
        num_blocks: KV blocks of the server.
        block_tokens: Tokens of one of its KV blocks.
        max_num_seqs: Its largest batch.
        max_step_tokens: Most tokens of one of its steps.
        max_model_len: Longest request in tokens.
        saturated: Fit all of a file, even if the server's queue grew.
        as_json: Print verdict and table as JSON and nothing else.
        quiet: No progress.
    """
    from twinserve.sim.results.files import dump_json
    from twinserve.sim.twin.predicted import predict

    settings = {
        "profile": profile,
        "num_blocks": num_blocks,
        "block_tokens": block_tokens,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_step_tokens,
        "max_model_len": max_model_len,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    with RunProgress(shown=not (quiet or as_json)) as progress:
        told = (progress.simulations, progress.report, progress.begin)
        found = predict(bench, settings, at, config, saturated, *told)
    if as_json:
        sys.stdout.write(dump_json(found.document()))
        return
    print(found.verdict)
    print("\n".join(["", *found.lines()]).rstrip())
