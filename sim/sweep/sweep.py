"""A sweep: an executor runs it; each result is kept when its run ends, with failures apart."""

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from twinserve.policies.registry import ledger_class, parse_policy
from twinserve.profiles.profile import load_profile
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.front_end import parse_front_end
from twinserve.sim.setup.objectives import parse_objectives
from twinserve.sim.setup.run import PLAIN
from twinserve.sim.sweep.combinations import Run
from twinserve.sim.sweep.executors import Workers, completed
from twinserve.sim.sweep.one import failure, one_run
from twinserve.sim.sweep.points import (
    KEPT,
    Kept,
    Store,
    content_digest,
    sources_digest,
    traces_digest,
)
from twinserve.sim.sweep.repeats import Repeat
from twinserve.traces.load import existing, has_name
from twinserve.traces.readers.sidecar import path_of


def _named(trace: str) -> None:
    if not has_name(trace):
        existing(trace)


def check_names(config: SimulationConfig) -> None:
    """Raise RegistryError, ProfileError, WorkloadError or SettingsError for an unknown policy,
    ledger, router, profile, fleet, autoscaler, trace, failure file or option."""
    for text in config.policy:
        _policy(text)
    if config.kv is not None:
        _ledger(config.kv)
    _router(config.router)
    if config.fleet is not None:
        _fleet(config.fleet)
    if config.failures is not None:
        _failures(config.failures)
    if config.autoscale is not None:
        _scaler(config.autoscale)
    _profile(config.profile)
    _trace(config.trace)
    parse_objectives(config.slo)
    parse_front_end(config.front_end)


@cache
def _failures(given: str) -> None:
    from twinserve.sim.setup.failures import read_failures

    read_failures(given)


@cache
def _scaler(text: str) -> None:
    from twinserve.sim.fleet.scaling import parse_scaler

    parse_scaler(text)


@cache
def _fleet(given: str) -> None:
    from twinserve.sim.setup.fleet_file import read_fleet  # YAML is for those that need it

    read_fleet(given)


# A sweep asks the same names of hundreds of runs; errors are not kept.
_policy, _ledger, _router, _profile, _trace = map(
    cache, (parse_policy, ledger_class, parse_router, load_profile, _named)
)


Item = TypeVar("Item")

ONCE = Repeat()
_WORK = "sweep"  # tells its files from those of a study in the same folder
_LOCK = "lock"


class Sweep:
    """The runs of a sweep and their results in the folder `out`.

    any_version   reuse results of other code versions
    retry_failed  repeat failed runs
    options       further metrics of each run
    repeat        how the runs of a combination differ
    error_bars    four more runs each, with step times off; SettingsError for a fleet file
    """

    def __init__(
        self,
        runs: Sequence[Run],
        out: Path,
        any_version: bool = False,
        retry_failed: bool = False,
        options: MetricsOptions = PLAIN,
        error_bars: bool = False,
        repeat: Repeat = ONCE,
    ) -> None:
        if error_bars and any(run.config.fleet is not None for run in runs):
            raise SettingsError("--error-bars changes the step times of one profile; drop --fleet")
        self.options = options
        self.error_bars = error_bars
        self.repeat = repeat
        self.runs = runs
        self.out = out
        self._sources = sources_digest(one_run)
        self._store = Store.of(out, self._sources, traces_digest(), any_version)
        self._digests = [digest_of(run.config, options, error_bars, repeat.blocks) for run in runs]
        self.kept: dict[str, Kept] = {}
        for digest in self._digests:
            found = self._store.read(digest)
            if found is not None and not (retry_failed and found.failed is not None):
                self.kept[digest] = found

    def todo(self) -> list[Run]:
        """Return the missing runs, in order."""
        return [
            run
            for run, digest in zip(self.runs, self._digests, strict=True)
            if digest not in self.kept
        ]

    def results(self) -> list[tuple[Run, Kept]]:
        """Return the kept results, in the order of the runs."""
        return [
            (run, self.kept[digest])
            for run, digest in zip(self.runs, self._digests, strict=True)
            if digest in self.kept
        ]

    def run(self, make: Callable[[int], Workers], report: Callable[[int, int], None]) -> None:
        """Run what is missing, and keep each result at once.

        make    an executor for so many runs; called only if a run is missing
        report  called with completed and failed runs, at the start and after each

        Raises SettingsError, WorkloadError.
        """
        pairs = zip(self.runs, self._digests, strict=True)
        missing = [(run, digest) for run, digest in pairs if digest not in self.kept]
        calls = {
            digest: (
                run.config.model_dump(mode="json"),
                self._sources,
                self.options,
                self.error_bars,
                self.repeat.blocks,
            )
            for run, digest in spread(missing)
        }
        failed = sum(kept.failed is not None for kept in self.kept.values())
        report(len(self.kept), failed)
        if not calls:
            return
        self._store.check_writable()
        with _alone_in(self.out / KEPT):
            self._store.clear_torn()
            for digest, future in completed(make(len(calls)), one_run, calls):
                error = future.exception()
                result = future.result() if error is None else Kept([], _lost(error))
                self.kept[digest] = self._store.write(digest, result)
                failed += result.failed is not None
                report(len(self.kept), failed)


def spread(items: Sequence[Item]) -> list[Item]:
    """Reorder the items so that the first ones come from all parts of the list. Their durations
    then predict the others', though costs vary along the list."""
    digits = max(len(items) - 1, 1).bit_length()
    order = (int(f"{at:0{digits}b}"[::-1], 2) for at in range(1 << digits))
    return [items[at] for at in order if at < len(items)]


def _lost(error: BaseException) -> str:
    return f"the worker ended in the middle of the run, out of memory perhaps ({failure(error)})"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Raise SettingsError if another process sweeps in this folder. The lock ends with it."""
    with open(folder / _LOCK, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SettingsError(
                f"--out {folder.parent}: another sweep is running there; wait for it, or name "
                "another folder"
            ) from None
        yield


# -- digests ---------------------------------------------------------------------------------------
def digest_of(
    config: SimulationConfig,
    options: MetricsOptions = PLAIN,
    error_bars: bool = False,
    blocks: int = 0,
) -> str:
    """Return a digest of a run's settings, named files' content, and metrics options."""
    settings = config.model_dump(mode="json")
    if settings["columns"] is None:  # came later: points kept before it was there are found
        del settings["columns"]
    said = [_WORK, settings, contents_of(settings), asdict(options), *["error bars"] * error_bars]
    said += [f"{blocks} blocks"] * bool(blocks)
    text = json.dumps(said, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def contents_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return sha256 by path of the named files: traces and their sidecars, profiles, policies,
    fleets and their files, and files in options."""
    texts = [
        text
        for value in settings.values()
        for text in (value if isinstance(value, list) else [value])
        if isinstance(text, str)
    ]
    if settings.get("fleet") is not None:
        from twinserve.sim.setup.fleet_file import read_fleet  # YAML is for those that need it

        texts += read_fleet(settings["fleet"]).settings.names
    paths = {word: Path(word).expanduser() for text in texts for word in _words(text)}
    paths |= {f"{word} beside": Path(path_of(path)) for word, path in paths.items()}
    return {word: content_digest(path) for word, path in sorted(paths.items()) if _is_file(path)}


def _words(text: str) -> set[str]:
    """Return the parts of a setting that may be a path: the whole, a part that ends in `.py`, an
    option's value, a profile's model."""
    in_file = re.match(r".+?\.py(?=:|$)", text)
    values = (part.rpartition("=")[2] for part in text.split(","))
    model, at, _ = text.rpartition("@")  # a config.json, or the folder that holds it
    of_model = [model, f"{model}/config.json", f"{model}/hf_quant_config.json"] if at else []
    return {text, *values, *([in_file[0]] if in_file else []), *of_model} - {""}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long or with a null character
        return False
