"""`twinserve calibrate --from-serving`: terms of a profile from measurements of a server."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from twinserve.profiles.front_end import FrontEnd, save_front_end
from twinserve.profiles.profile import Profile, save_profile
from twinserve.sim.cli.profiles import check_target
from twinserve.sim.cli.progress import RunProgress
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Hardware
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import Simulation
from twinserve.sim.twin import serving_fit
from twinserve.sim.twin.queues import queue_of, queue_words, steady_stretch
from twinserve.sim.twin.served import Served, from_server, of_measurement, of_run
from twinserve.sim.twin.serving_fit import NAMES, Fitted, Load, Terms
from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.formats import read_measurement

# what a run.json says of its requests; here they are the measured ones, as they came
_OF_REQUESTS = (
    *("columns", "raw_arrivals", "rate", "duration", "requests", "rate_scale", "load", "window"),
    *("cap_length", "pool", "client_timeout"),
)
_NOT_TOLD = (
    "KV memory, swapping and prefix hits were not asked of these data; nor how long answers take "
    "from the engine to their client"
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
    """Fit, write `out` and the front end beside it, and say what was found. config: a run.json that
    has the server's settings; settings: those by name that stand over it, `profile` among them;
    saturated: fit all of a file even where its queue grew. Raises SettingsError, WorkloadError,
    ProfileError."""
    front = out.with_suffix(".front_end.json")
    for target in (out, front):
        check_target(target, overwrite)
    found = [_measured(file) for file in files]
    server = _one_side(found)
    until_s = [np.inf if saturated else _steady(one) for one in found]
    given = {**(from_file(config, settings) if config else {}), **settings}
    inputs = [_inputs(one, given) for one in found]
    base = inputs[0].hardware.profile
    names = tuple(
        each
        for each in NAMES
        if (base.knows_host_time or not each.startswith("host"))
        and not (server and each == "request_s")
    )
    with tempfile.TemporaryDirectory(prefix="twinserve-") as scratch:
        file = Path(scratch) / "f.json"
        loads = [
            Load(_early(of_measurement(one), until), partial(_simulated, each, server, file, until))
            for one, each, until in zip(found, inputs, until_s, strict=True)
        ]
        with RunProgress(shown=True) as progress:
            progress.begin("calibrate")
            fitted = _fit(loads, names, progress, found)
    for one, until in zip(found, until_s, strict=True):
        for notice in one.notices:
            print(f"note: {one.path}: {notice}")
        for notice in queue_notices(one, until):
            print(f"note: {one.path}: {notice}")
    print("\n".join(serving_fit.shown(fitted)))
    print(f"{'holds for':>22}  {_range(found, until_s)}")
    print(f"{'unknown':>22}  {_NOT_TOLD}")
    if not fitted.worth:
        raise SettingsError(
            f"{base.name} is not made better by these measurements, so nothing was written; "
            "measure more requests, at another load, or begin with another --profile"
        )
    said = f"{', '.join(one.path for one in found)} ({_range(found, until_s)})"
    under_way = max(_most_under_way(one) for one in _fitted(found, until_s))
    save_profile(_profile(fitted, inputs[0].hardware, said, under_way, name), out)
    again = f"simulate --profile {out}"
    if "request_s" in fitted.told:
        save_front_end(_front_end(fitted, said), front)
        again += f" --front-end {front}"
    if not inputs[0].config.async_scheduling:
        again += " --no-async-scheduling --host-time none"
    print(again)


def _measured(file: Path) -> Measurement:
    found = read_measurement(file)
    if not _timed(found):
        said = "; ".join(found.notices)
        raise SettingsError(
            f"--from-serving {file}: has no times to first token of single requests"
            f"{f' ({said})' if said else ''}; with vllm bench serve, add --save-detailed"
        )
    return found


def queue_notices(found: Measurement, until_s: float) -> list[str]:
    """What is to be known of the measured queue. until_s: of the arrivals that are fitted."""
    queue = queue_of(found)
    if np.isfinite(until_s):
        return [
            f"{queue_words(queue)}; fitted to requests of the first {until_s:.3g} s, when the "
            "server kept up (--saturated takes all)"
        ]
    if queue is None or queue["verdict"] != "unclear":
        return []
    return [
        f"{queue_words(queue)}; all of it is fitted, so if the queue grew the terms hold its wait: "
        "measure for longer"
    ]


def _steady(found: Measurement) -> float:
    """Seconds of arrivals that can be fitted: all, or those before the queue grew."""
    queue = queue_of(found)
    if queue is None or queue["verdict"] != "saturated":
        return np.inf
    until = steady_stretch(found)
    if until is None:
        raise SettingsError(
            f"--from-serving {found.path}: {queue_words(queue)}. Such latencies say how long the "
            "load lasted, not how long a step takes: measure at a lower rate, or add --saturated"
        )
    return until


def _early(served: Served, until_s: float) -> Served:
    return served if np.isinf(until_s) else served.take(served.arrival_s <= until_s)


def _timed(found: Measurement) -> int:
    """Requests with a time to first token."""
    return int((found.served & ~np.isnan(found.ttft_s)).sum()) if len(found) else 0


def _one_side(found: Sequence[Measurement]) -> bool:
    """Whether they were measured in the server."""
    sides = {from_server(one) for one in found}
    if len(sides) > 1:
        raise SettingsError(
            "--from-serving: some files were measured by clients and some by servers; fit them "
            "one by one"
        )
    return sides.pop()


def _inputs(found: Measurement, given: dict) -> Inputs:
    """The measured requests, without objectives, and with no host time but what is fitted."""
    given = {name: value for name, value in given.items() if name not in _OF_REQUESTS}
    always = {"trace": found.path, "format": found.name, "slo": "none"}
    always |= {"host_time": "none", "front_end": "none"}
    if given.get("fleet") is not None or given.get("replicas", 1) != 1:
        raise SettingsError("--config: a fleet; fit one replica by itself")
    inputs = resolve(SimulationConfig(**{**given, **always}))
    served = int(found.served.sum())
    if len(inputs.workload) != served:
        raise SettingsError(
            f"--from-serving {found.path}: {served:,} requests were served, and only "
            f"{len(inputs.workload):,} fit the memory of {inputs.hardware.profile.name}; give the "
            "server's --num-blocks, or another --profile"
        )
    return inputs


def _simulated(inputs: Inputs, server: bool, front: Path, until_s: float, terms: Terms) -> Served:
    """The requests on hardware with these terms, those that arrived until then. front: a file for
    the front end's."""
    hardware = inputs.hardware
    profile = terms.on(hardware.profile)
    model = profile.model(hardware.limits.max_num_seqs)
    config = inputs.config
    if terms.request_s:
        save_front_end(FrontEnd("fitted", terms.request_s, 0.0, 0.0, 0.0), front)
        config = config.model_copy(update={"front_end": str(front)})
    changed = replace(
        inputs, config=config, hardware=replace(hardware, profile=profile, model=model)
    )
    run = Simulation(changed, changed.policies[0])
    run.run()
    # the metrics of a summary are not asked for
    return _early(of_run("run", RunResult(run.rows()), server), until_s)


def _fit(loads: Sequence[Load], names: Sequence[str], progress: RunProgress, found) -> Fitted:
    def report(simulations: int) -> None:  # how many it takes is not known before
        progress.part(simulations / (simulations + 100), f"{simulations} simulations")

    try:
        return serving_fit.fit(loads, names, report)
    except serving_fit.TooFewRequestsError:
        raise SettingsError(
            f"--from-serving: {sum(map(_timed, found))} requests have a time to first token, too "
            f"few; give {serving_fit.BLOCKS * serving_fit.LEAST} or more with times"
            + "".join(f"; {one.path}: {said}" for one in found for said in one.notices)
        ) from None


def _profile(
    fitted: Fitted, hardware: Hardware, said: str, under_way: int, name: str | None
) -> Profile:
    """With the limits and the memory that the server was said to have. under_way: most requests at
    once of what was fitted."""
    base, limits = hardware.profile, hardware.limits
    profile = fitted.terms.on(base)
    return profile.model_copy(
        update={
            "max_num_seqs": limits.max_num_seqs,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_model_len": limits.max_model_len,
            "block_tokens": hardware.block_tokens,
            "num_gpu_blocks": hardware.num_blocks,
            "name": name or f"{base.name} (from serving)",
            "notes": f"{base.notes} Terms fitted to {said}.".strip(),
            "source": "measured",
            "fit_error": fitted.after,
            "fitted_requests": under_way,
        }
    )


def _front_end(fitted: Fitted, said: str) -> FrontEnd:
    source = f"fitted to {said}; only the sum of both ways can be told from a client's times"
    return FrontEnd("fitted", fitted.terms.request_s, 0.0, 0.0, 0.0, source)


def _fitted(found: Sequence[Measurement], until_s: Sequence[float]) -> list[Served]:
    return [_early(of_measurement(one), until) for one, until in zip(found, until_s, strict=True)]


def _range(found: Sequence[Measurement], until_s: Sequence[float]) -> str:
    fitted = _fitted(found, until_s)
    prompts = np.concatenate([one.prompt_tokens for one in fitted])
    outputs = np.concatenate([one.output_tokens for one in fitted])
    under_way = max(_most_under_way(one) for one in fitted)
    return (
        f"prompts of {prompts.min():,} to {prompts.max():,} tokens, answers of {outputs.min():,} "
        f"to {outputs.max():,}, up to {under_way:,} requests at once"
    )


def _most_under_way(served: Served) -> int:
    begin = served.arrival_s
    end = begin + served.latencies["e2el"]
    known = ~np.isnan(end)
    began = np.arange(1, int(known.sum()) + 1)
    ended = np.searchsorted(np.sort(end[known]), np.sort(begin[known]))
    return int((began - ended).max(initial=1))
