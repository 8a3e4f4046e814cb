"""The order of settings: flags override a former run, which overrides a preset."""

from collections.abc import Container
from pathlib import Path
from typing import Any

from twinserve.formats import parse_json
from twinserve.own_code import file_sha256
from twinserve.policies.registry import parse_policy
from twinserve.profiles.catalog import nearest
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.files import present_run
from twinserve.sim.setup.config import KV_SIZES, PRESETS, SettingsError, SimulationConfig
from twinserve.traces.generators.synth import is_synthetic

# What belongs to a trace of one kind and is refused for the other.
_OF_GENERATED = ("rate", "duration")
_OF_RECORDED = ("rate_scale", "window", "raw_arrivals")


def with_defaults(
    config: SimulationConfig, preset: str | None = None, file: Path | None = None
) -> SimulationConfig:
    """Put the settings that `config` names over those of the run.json `file`, over those of
    `preset`.

    Settings of the preset or the file for generated arrivals are dropped if `config` names a
    recorded trace, and vice versa. Raises SettingsError for an unknown preset, or a file that is no
    run.json.
    """
    return over(defaults(preset, file, config.model_fields_set), config)


def defaults(preset: str | None, file: Path | None, given: Container[str] = ()) -> dict:
    """Put the settings of the run.json `file` over those of `preset`. given: settings that override
    both. Raises SettingsError."""
    base: dict = {}
    if preset is not None:
        if preset not in PRESETS:
            raise SettingsError(
                f"--preset {preset!r} is unknown{nearest(preset, PRESETS)}; there is: "
                f"{', '.join(PRESETS)}"
            )
        base.update(PRESETS[preset])
    if file is not None:
        base.update(from_file(file, given))
    return base


def over(base: dict, config: SimulationConfig) -> SimulationConfig:
    """Put the settings that `config` names over those of `base` (see `defaults`)."""
    base = dict(base)
    given = {name: getattr(config, name) for name in config.model_fields_set}
    unwanted: tuple[str, ...] = ()
    if "trace" in given:
        unwanted = _OF_RECORDED if is_synthetic(config.trace) else _OF_GENERATED
        unwanted += ("format", "columns")
    if "load" in given:
        unwanted += ("rate", "rate_scale")
    elif given.get("rate") or given.get("rate_scale"):
        unwanted += ("load",)
    if any(given.get(name) is not None for name in KV_SIZES):
        unwanted += KV_SIZES
    if "fleet" in given or "replicas" in given:  # one says how many the other did
        unwanted += ("replicas", "fleet")
    if given.get("fleet") is not None:  # it may say its router
        unwanted += ("router",)
        if "router" in given:
            _check_one_router(given["fleet"], given["router"])
    for name in unwanted:
        base.pop(name, None)
    return SimulationConfig(**{**base, **given})


def _check_one_router(fleet: str, router: str) -> None:
    """Raise SettingsError if the file names another router than the flags."""
    from twinserve.sim.setup.fleet_file import read_fleet  # YAML is for those that need it

    file = read_fleet(fleet)
    if file.settings.router not in (None, router):
        raise SettingsError(
            f"{file.where}: router: {file.settings.router!r}, and --router {router!r}; keep one of "
            "them"
        )


def from_file(file: Path, given: Container[str] = ()) -> dict:
    """Return the settings in a run.json. Raises SettingsError if a file of its policies or its
    router has changed, unless that setting is `given` anew."""
    try:
        document = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"--config {file}: there is no such file; name a run.json") from None
    except OSError as error:
        raise SettingsError(
            f"--config {file}: cannot be read ({error.strerror}); name a run.json"
        ) from None
    except ValueError:
        document = None
    stored, settings = {}, None
    if isinstance(document, dict):
        stored = present_run(document, f"--config {file}", SettingsError)
        settings = stored.get("config")
    if not isinstance(settings, dict):
        raise SettingsError(f"--config {file}: this is not a run.json (no settings under 'config')")
    unknown = set(settings) - set(SimulationConfig.model_fields)
    if unknown:
        raise SettingsError(
            f"--config {file}: unknown setting {min(unknown)!r} (of another version?); drop it"
        )
    try:
        SimulationConfig(**settings)
    except SettingsError as error:
        raise SettingsError(f"--config {file}: {error}") from None
    if "policy" not in given:
        check_policy_file(stored)
    if "router" not in given:
        check_router_file(stored)
    if "fleet" not in given and "replicas" not in given:
        check_pool_files(stored)
        check_prefill_router_file(stored)
    if "format" not in given and "trace" not in given:
        check_reader_file(stored)
    return settings


def _told(run: dict, part: str, name: str) -> Any:
    """Return a field of a part of run.json, or None."""
    found = run.get(part)
    return found.get(name) if isinstance(found, dict) else None


def check_policy_file(run: dict) -> None:
    """Raise SettingsError if run.json's policy file has changed, RegistryError if it is gone."""
    if then := _told(run, "policy", "file_sha256"):
        text = run["config"]["policy"][0]
        _same_file("policy", text, then, file_sha256(parse_policy(text).policy))


def check_pool_files(run: dict) -> None:
    """Check the policies of the fleet file's pools in the same way."""
    pools = _told(run, "fleet", "pools")
    for pool in pools if isinstance(pools, list) else []:
        then = pool.get("policy_file_sha256") if isinstance(pool, dict) else None
        if then is not None:
            text = pool["policy"]
            _same_file("policy", text, then, file_sha256(parse_policy(text).policy), "fleet")


def check_router_file(run: dict) -> None:
    """Check the router's file in the same way."""
    if then := _told(run, "fleet", "router_file_sha256"):
        text = run["config"]["router"]
        _same_file("router", text, then, file_sha256(parse_router(text).router))


def check_prefill_router_file(run: dict) -> None:
    """Check the file of the prefill router in the same way, if that router is another one."""
    if then := _told(run, "fleet", "prefill_router_file_sha256"):
        from twinserve.sim.setup.fleet_file import read_fleet  # YAML is for those that need it

        text = read_fleet(run["config"]["fleet"]).settings.prefill_router
        if text is not None:
            _same_file("router", text, then, file_sha256(parse_router(text).router), "fleet")


def check_reader_file(run: dict) -> None:
    """Check the file of the trace's reader in the same way."""
    if then := _told(run, "trace", "reader_file_sha256"):
        from twinserve.traces.readers.options import reader_sha256  # few runs need it

        text = run["config"]["format"]
        _same_file("format", text, then, reader_sha256(text))


def _same_file(kind: str, text: str, then: str, now: str | None, flag: str = "") -> None:
    if now != then:
        raise SettingsError(
            f"{kind} {text}: its file has changed since that run (sha256 was {str(then)[:12]}...); "
            f"put it back, or simulate it as it is now with --{flag or f'{kind} {text}'}"
        )
