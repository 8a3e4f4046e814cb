"""Where settings come from: flags, over those of a former run, over those of a preset."""

from __future__ import annotations

import json
from pathlib import Path

from ..profiles.catalog import nearest
from ..traces.synth import is_synthetic
from .config import PRESETS, SettingsError, SimulationConfig

# What belongs to a trace of one kind and is refused for the other.
_OF_GENERATED = ("rate", "duration")
_OF_RECORDED = ("rate_scale", "window", "raw_arrivals")


def with_defaults(config: SimulationConfig, preset: str | None = None, file: Path | None = None) -> SimulationConfig:
    """The settings that `config` names, over those of the run.json `file`, over those of `preset`.

    A preset's or a file's settings for generated arrivals go where a recorded trace is named instead of theirs, and the
    other way round. Raises SettingsError for an unknown preset, or a file that is no run.json.
    """
    given = {name: getattr(config, name) for name in config.model_fields_set}
    base: dict = {}
    if preset is not None:
        if preset not in PRESETS:
            raise SettingsError(f"--preset {preset!r} is unknown{nearest(preset, PRESETS)}; there is: {', '.join(PRESETS)}")
        base.update(PRESETS[preset])
    if file is not None:
        base.update(from_file(file))
    unwanted: tuple[str, ...] = ()
    if "trace" in given:
        unwanted = ("format", *(_OF_RECORDED if is_synthetic(config.trace) else _OF_GENERATED))
    if "load" in given:
        unwanted += ("rate", "rate_scale")
    elif given.get("rate") or given.get("rate_scale"):
        unwanted += ("load",)
    for name in unwanted:
        base.pop(name, None)
    return SimulationConfig(**{**base, **given})


def from_file(file: Path) -> dict:
    """The settings in a run.json. Raises SettingsError."""
    try:
        stored = json.loads(file.read_text())
        settings = stored["config"]
        if not isinstance(settings, dict):
            raise KeyError("config")
    except FileNotFoundError:
        raise SettingsError(f"--config {file}: there is no such file; name a run.json") from None
    except OSError as error:
        raise SettingsError(f"--config {file}: cannot be read ({error.strerror}); name a run.json") from None
    except (ValueError, KeyError, TypeError):
        raise SettingsError(f"--config {file}: this is not a run.json (no settings under 'config')") from None
    unknown = set(settings) - set(SimulationConfig.model_fields)
    if unknown:
        raise SettingsError(f"--config {file}: unknown setting {min(unknown)!r}; was it written by another version?")
    return settings
