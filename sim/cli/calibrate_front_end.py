"""`twinserve calibrate --front-end`: start an API server before an emulated GPU, and write what
lies between its clients and its engine."""

import os
from collections.abc import Sequence
from pathlib import Path

from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.profiles.front_end import FrontEnd, save_front_end
from twinserve.profiles.measured.front_end import (
    Exchange,
    Load,
    bunched,
    fit_front_end,
    host_factor,
    threads_error,
)
from twinserve.profiles.profile import save_profile
from twinserve.sim.cli.profiles import check_target
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.twin import serving_fit
from twinserve.sim.twin.server_fit import fit_server

MANY = 0.1  # share of bunched answers that is told as a note
MOST_TOKENS = 4096  # of a request, by default
# Of the common words that prompts are made of, and hardly more.
_TOKENS_A_WORD = 2.0
_FEWEST_WORDS, _LOAD_TOKENS = 16, 4096


def calibrate_front_end(
    model: str | None,
    out: Path,
    scratch: Path,
    *,
    name: str | None,
    max_model_len: int | None,
    quick: bool,
    seed: int,
    progress: RunProgress,
) -> None:
    """Measure, write `out`, and say what was found. model: a folder with a tokenizer; scratch: a
    folder for the server's files; others as of `calibrate`."""
    tokenizer = None if model is None else Path(model)
    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").is_file():
        raise LiveEngineError(
            f"--model {model}: no tokenizer_config.json is there; give a model's folder, or drop it"
        )
    longest = max_model_len or MOST_TOKENS
    lengths = prompt_lengths(int(longest / _TOKENS_A_WORD))
    version = installed_vllm()
    from twinserve.backends.live.measure.front_end import measure_front_end

    progress.begin("calibrate")

    def shown(share: float, text: str) -> None:
        if progress.bar:
            progress.bar.update(progress.bar.task_ids[-1], completed=share, state=text)

    busy = os.getloadavg()[0]
    loads, exchanges = measure_front_end(
        scratch,
        tokenizer=tokenizer,
        max_model_len=max(longest, _LOAD_TOKENS),
        lengths=lengths,
        quick=quick,
        seed=seed,
        shown=shown,
    )
    source = (
        f"{len(exchanges)} single requests and {len(loads)} loads, vLLM {version}'s API server "
        f"before an emulated GPU ({os.cpu_count()} cores, load average {busy:.1f} before)"
    )
    front_end = fit_front_end(loads, exchanges, name or "measured", source)
    save_front_end(front_end, out)
    _tell(front_end, loads, exchanges)
    print(out)


def prompt_lengths(room: int) -> list[int]:
    """Return the lengths of prompts in words: powers of four from 16, as many as fit. Raises
    LiveEngineError if only one length fits."""
    lengths, words = [], _FEWEST_WORDS
    while words < room:
        lengths.append(words)
        words *= 4
    if len(lengths) < 2:
        raise LiveEngineError(
            "--max-model-len: is too small for prompts of several lengths; give 256 or more"
        )
    return [*lengths, room] if room > 1.5 * lengths[-1] else lengths


def _tell(front_end: FrontEnd, loads: list[Load], exchanges: list[Exchange]) -> None:
    t = front_end.threads
    print(front_end.describe())
    lines = {
        "a request": f"{1e3 * (t.accept_s + t.submit_s):.2f} ms, "
        f"{1e6 * (t.prompt_token_s + t.detokenise_s):.2f} us a prompt token; "
        f"{1e6 * t.tokenise_s:.2f} us on the tokeniser's thread",
        "outputs": f"{1e3 * t.step_s:.2f} ms a step, {1e6 * t.token_s:.1f} us a token, "
        f"{1e6 * t.chunk_s:.1f} us a message",
        "the client": f"{1e3 * t.client_request_s:.2f} ms a request, {1e6 * t.client_chunk_s:.1f} "
        "us a message",
        "on top": f"{1e3 * front_end.request_s:.2f} ms a request, "
        f"{1e3 * front_end.response_s:.2f} ms a token, at any load",
        "host factor": f"{host_factor(loads):.2f} of the server's thread, over --front-end vllm",
        "threads": f"{threads_error(loads):.1%} off the CPU time of a load",
        "fit": f"{front_end.fit_error:.1%} off single requests, by halves",
    }
    for what, found in lines.items():
        print(f"{what:>18}  {found}")
    together = bunched(exchanges)
    if together > MANY:
        print(
            f"note: {together:.0%} of the answers reached the client nearly in one piece; measure "
            "again on a quiet machine, or as root (the client then has priority)"
        )


_NOT_TOLD = (
    "these data do not cover KV memory, swapping, prefix hits, or the time of answers from the "
    "engine to their client"
)


def calibrate_serving(
    files: Sequence[Path],
    out: Path,
    settings: dict,
    *,
    config: Path | None = None,
    name: str | None = None,
    saturated: bool = False,
    overwrite: bool = False,
) -> None:
    """Fit as `fit_server`, write `out` and the front end next to it, and print the result."""
    front = out.with_suffix(".front_end.json")
    for target in (out, front):
        check_target(target, overwrite)
    with RunProgress(shown=True) as progress:
        progress.begin("calibrate")
        found = fit_server(files, settings, config, saturated, progress.simulations)
    print("\n".join([*(f"note: {n}" for n in found.notices()), *serving_fit.shown(found.fitted)]))
    print(f"{'holds for':>22}  {found.range()}")
    print(f"{'unknown':>22}  {_NOT_TOLD}")
    base = found.inputs[0].hardware.profile
    if not found.fitted.worth:
        raise SettingsError(
            f"these measurements do not improve {base.name}, so nothing was written; "
            "measure more requests, at another load, or begin with another --profile"
        )
    save_profile(found.profile(name), out)
    again = f"simulate --profile {out}"
    if (front_end := found.front_end()) is not None:
        save_front_end(front_end, front)
        again += f" --front-end {front}"
    if not found.inputs[0].config.async_scheduling:
        again += " --no-async-scheduling --host-time none"
    print(again)
