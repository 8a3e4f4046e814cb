"""Measurements of a server, and the profile with the terms that they tell (`serving_fit.py`)."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from twinserve.profiles.front_end import FrontEnd, save_front_end
from twinserve.profiles.profile import Profile, ProfileError
from twinserve.sim.report.metric_names import METRIC_NAMES
from twinserve.sim.results.files import RunResult
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.inputs import Inputs, resolve
from twinserve.sim.setup.presets import from_file
from twinserve.sim.setup.run import Simulation
from twinserve.sim.twin import serving_fit
from twinserve.sim.twin.queues import queue_of, queue_words, steady_stretch
from twinserve.sim.twin.served import OF_REQUESTS, Served, from_server, of_measurement, of_run
from twinserve.sim.twin.serving_fit import NAMES, Fitted, Load, Terms
from twinserve.traces.measurement import Measurement
from twinserve.traces.readers.formats import read_measurement


class NoTimesError(SettingsError):
    """found: the measurement, which has no times of single requests."""

    def __init__(self, said: str, found: Measurement) -> None:
        super().__init__(said)
        self.found = found


@dataclass(frozen=True)
class ServerFit:
    """What was found of a server. found, until_s and inputs have one entry a file.

    until_s   requests that arrived up to here are fitted; infinite: all of the file
    inputs    the file's requests on the profile as it was
    verb      the option or command that asked, for messages
    """

    found: list[Measurement]
    until_s: list[float]
    inputs: list[Inputs]
    fitted: Fitted
    verb: str

    @property
    def error(self) -> float:
        """Mean relative error of means of requests that the terms were not fitted to."""
        return self.fitted.after if self.fitted.worth else self.fitted.before

    def measured(self) -> list[Served]:
        """What was fitted of each file."""
        pairs = zip(self.found, self.until_s, strict=True)
        return [early(of_measurement(one), until) for one, until in pairs]

    def most_under_way(self) -> int:
        """Requests at once of what was fitted."""
        return max(map(_most_under_way, self.measured()))

    def range(self) -> str:
        """For which requests the fit holds."""
        fitted = self.measured()
        prompts = np.concatenate([one.prompt_tokens for one in fitted])
        outputs = np.concatenate([one.output_tokens for one in fitted])
        return (
            f"prompts of {prompts.min():,} to {prompts.max():,} tokens, answers of "
            f"{outputs.min():,} to {outputs.max():,}, up to {self.most_under_way():,} requests at "
            "once"
        )

    def notices(self) -> Iterator[str]:
        for one, until in zip(self.found, self.until_s, strict=True):
            for notice in (*one.notices, *queue_notices(one, until)):
                yield f"{one.path}: {notice}"

    def source(self) -> str:
        return f"{', '.join(one.path for one in self.found)} ({self.range()})"

    def profile(self, name: str | None = None) -> Profile:
        """The fitted profile, or the one that there was if the fit is not worth it. It has the
        server's limits and memory, and the error that was found."""
        hardware = self.inputs[0].hardware
        base, limits = hardware.profile, hardware.limits
        profile, notes = base, base.notes
        if self.fitted.worth:
            profile = self.fitted.terms.on(base)
            notes = f"{base.notes} Terms fitted to {self.source()}."
        return profile.model_copy(
            update={
                "max_num_seqs": limits.max_num_seqs,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_model_len": limits.max_model_len,
                "block_tokens": hardware.block_tokens,
                "num_gpu_blocks": hardware.num_blocks,
                "name": name or f"{base.name} (from serving)",
                "notes": notes.strip(),
                "source": "measured",
                "fit_error": self.error,
                "fitted_requests": self.most_under_way(),
            }
        )

    def front_end(self) -> FrontEnd | None:
        """None: the front end's time is not known."""
        if not self.fitted.worth or "request_s" not in self.fitted.told:
            return None
        source = f"fitted to {self.source()}; a client's times give only the sum of both ways"
        return FrontEnd("fitted", self.fitted.terms.request_s, 0.0, 0.0, source)


def fit_server(
    files: Sequence[Path],
    settings: Mapping,
    config: Path | None = None,
    saturated: bool = False,
    report: Callable[[int], None] = lambda simulations: None,
    verb: str = "--from-serving",
) -> ServerFit:
    """Fit the terms. config: a run.json that has the server's settings; settings: those by name
    that stand over it, `profile` among them; saturated: fit all of a file even where its queue
    grew; report: called with the simulations so far. Raises SettingsError, WorkloadError,
    ProfileError."""
    found = [_measured(file, verb) for file in files]
    server = _one_side(found, verb)
    until_s = [np.inf if saturated else _steady(one, verb) for one in found]
    given = {**(from_file(config, dict(settings)) if config else {}), **settings}
    inputs = [_inputs(one, given, verb) for one in found]
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
            Load(early(of_measurement(one), until), partial(_simulated, each, server, file, until))
            for one, each, until in zip(found, inputs, until_s, strict=True)
        ]
        try:
            fitted = _fit(loads, names, report, found, verb)
        except ProfileError:
            raise beyond(found, inputs, verb) from None
    return ServerFit(found, until_s, inputs, fitted, verb)


def on_profile(inputs: Inputs, profile: Profile, front_end: str | None) -> Inputs:
    """The same requests on other hardware. front_end: a file of its times; None: none is there."""
    hardware = replace(
        inputs.hardware, profile=profile, model=profile.model(inputs.hardware.limits.max_num_seqs)
    )
    config = inputs.config
    if front_end is not None:
        config = config.model_copy(update={"front_end": front_end})
    return replace(inputs, config=config, hardware=hardware)


def early(served: Served, until_s: float) -> Served:
    """Requests that arrived until then."""
    return served if np.isinf(until_s) else served.take(served.arrival_s <= until_s)


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
        f"{queue_words(queue)}; the whole file is fitted. If the queue grew, the terms include "
        "its wait: measure for longer"
    ]


def _measured(file: Path, verb: str) -> Measurement:
    found = read_measurement(file)
    if not _timed(found):
        said = "; ".join(found.notices)
        if "--save-detailed" not in said:
            cure = "measure again with them, as vllm bench serve --save-detailed writes"
            said = f"{said}; {cure}" if said else cure
        raise NoTimesError(
            f"{verb} {file}: has no times to first token of single requests: {said}", found
        )
    return found


def _steady(found: Measurement, verb: str) -> float:
    """Seconds of arrivals that can be fitted: all, or those before the queue grew."""
    queue = queue_of(found)
    if queue is None or queue["verdict"] != "saturated":
        return np.inf
    until = steady_stretch(found)
    if until is None:
        raise SettingsError(
            f"{verb} {found.path}: {queue_words(queue)}. Such latencies say how long the "
            "load lasted, not how long a step takes: measure at a lower rate, or add --saturated"
        )
    return until


def _timed(found: Measurement) -> int:
    """Requests with a time to first token."""
    return int((found.served & ~np.isnan(found.ttft_s)).sum()) if len(found) else 0


def _one_side(found: Sequence[Measurement], verb: str) -> bool:
    """Whether they were measured in the server."""
    sides = {from_server(one) for one in found}
    if len(sides) > 1:
        raise SettingsError(
            f"{verb}: some files were measured by clients and some by servers; fit them one by one"
        )
    return sides.pop()


def _inputs(found: Measurement, given: dict, verb: str) -> Inputs:
    """The measured requests, without objectives, and with no host time but what is fitted."""
    given = {name: value for name, value in given.items() if name not in OF_REQUESTS}
    always = {"trace": found.path, "format": found.name, "slo": "none"}
    always |= {"host_time": "none", "front_end": "none"}
    if given.get("fleet") is not None or given.get("replicas", 1) != 1:
        raise SettingsError("--config: a fleet; fit one replica by itself")
    inputs = resolve(SimulationConfig(**{**given, **always}))
    served = int(found.served.sum())
    if len(inputs.workload) != served:
        raise SettingsError(
            f"{verb} {found.path}: {served:,} requests were served, and only "
            f"{len(inputs.workload):,} fit the memory of {inputs.hardware.profile.name}; give the "
            "server's --num-blocks, or another --profile"
        )
    return inputs


def _simulated(inputs: Inputs, server: bool, front: Path, until_s: float, terms: Terms) -> Served:
    """Return requests until then on hardware with these terms. front: file for the front end's."""
    if terms.request_s:
        save_front_end(FrontEnd("fitted", terms.request_s, 0.0, 0.0), front)
    changed = on_profile(
        inputs, terms.on(inputs.hardware.profile), str(front) if terms.request_s else None
    )
    run = Simulation(changed, changed.policies[0])
    run.run()
    # the metrics of a summary are not asked for
    return early(of_run("run", RunResult(run.rows()), server), until_s)


def _fit(
    loads: Sequence[Load],
    names: Sequence[str],
    report: Callable[[int], None],
    found: Sequence[Measurement],
    verb: str,
) -> Fitted:
    try:
        return serving_fit.fit(loads, names, report)
    except serving_fit.TooFewRequestsError:
        raise SettingsError(
            f"{verb}: {sum(map(_timed, found))} requests have a time to first token, too "
            f"few; give {serving_fit.BLOCKS * serving_fit.LEAST} or more with times"
            + "".join(f"; {one.path}: {said}" for one in found for said in one.notices)
        ) from None


def beyond(found: Sequence[Measurement], inputs: Sequence[Inputs], verb: str) -> SettingsError:
    """Return an error with the measured time that is furthest from the simulated ones."""
    said = []
    for one, load in zip(found, inputs, strict=True):
        run = _simulated(load, False, Path(), np.inf, serving_fit.AS_IT_IS)
        for metric, measured in (("ttft", one.ttft_s), ("tpot", one.tpot_s)):
            known = float(np.nanmedian(run.latencies[metric]))
            off = np.nan_to_num(np.abs(np.log(measured / known)), nan=-1.0)
            row = int(off.argmax())
            words = f"{METRIC_NAMES[metric]} is {measured[row]:.3g} s, simulated {known:.3g} s"
            said.append((off[row], f"{one.path}: request {row + 1}: {words}"))
    return SettingsError(f"{verb} {max(said)[1]}: too far off to fit; are all times seconds?")


def _most_under_way(served: Served) -> int:
    begin = served.arrival_s
    end = begin + served.latencies["e2el"]
    known = ~np.isnan(end)
    began = np.arange(1, int(known.sum()) + 1)
    ended = np.searchsorted(np.sort(end[known]), np.sort(begin[known]), "right")
    return int((began - ended).max(initial=1))
