"""Import what the stages of a campaign need before anything is measured. A missing package must not
show only after minutes on a machine that is lent for minutes."""

from collections.abc import Iterable
from importlib import import_module, metadata
from pkgutil import iter_modules

from twinserve.errors import worded
from twinserve.policies.registry import ledger_class, parse_policy
from twinserve.sim.setup.config import SettingsError

_CAMPAIGN = "twinserve.experiments.campaign"
_LIVE = "twinserve.backends.live"
_FITS = ("scipy.optimize", "pyarrow.parquet", "twinserve.profiles.profile", f"{_CAMPAIGN}.steps")
_RUNS = ("simpy", *_FITS, f"{_CAMPAIGN}.runs", "twinserve.traces.load")
_VLLM = ("vllm.engine.arg_utils", "vllm.distributed", "vllm.v1.engine.llm_engine")
_OURS = (f"{_LIVE}.engine", f"{_LIVE}.measure", f"{_LIVE}.transfer")
_ENGINE = ("torch", "pyarrow.parquet", *_VLLM, f"{_CAMPAIGN}.steps", *_OURS)
MODULES = {
    "plan": _RUNS,
    "steps": _ENGINE,
    "traffic": (*_ENGINE, *_RUNS, "twinserve.sim.twin.calibrate_traffic"),
    "swap": _ENGINE,
    "profile": _FITS,
    "validate": (*_ENGINE, *_RUNS),
    "host": (*_ENGINE, f"{_CAMPAIGN}.host"),
    "report": (*_RUNS, f"{_CAMPAIGN}.report"),
    "free": (*_RUNS, f"{_CAMPAIGN}.free"),
}


def require(stages: Iterable[str], policies: Iterable[str] = ()) -> None:
    """Import what `stages` import, and the `policies` of the runs among them. Raises SettingsError
    for the first that fails, RegistryError for a policy that does not exist."""
    for stage in stages:
        for name in MODULES[stage]:
            _import(stage, name)
        if "torch" in MODULES[stage]:
            from twinserve.backends.live.versions import LiveEngineError, installed_vllm

            try:
                installed_vllm()
            except LiveEngineError as error:
                raise SettingsError(f"stage {stage}: {error}") from None
        if "simpy" in MODULES[stage]:
            try:
                metadata.version("twinserve")  # stands in every run's run.json
            except metadata.PackageNotFoundError:
                raise SettingsError(
                    f"stage {stage} needs the installed distribution twinserve, for its version: "
                    "pip install --no-deps -e ."
                ) from None
            for text in policies:
                ledger_class(parse_policy(text).kv_name)


def _import(stage: str, name: str) -> None:
    """Module `name`; of a package of ours every module."""
    try:
        module = import_module(name)
        if name.startswith("twinserve.") and hasattr(module, "__path__"):
            for found in iter_modules(module.__path__):
                import_module(f"{name}.{found.name}")
    except Exception as error:  # noqa: BLE001 - whatever a package does when it is imported
        missing = getattr(error, "name", None) or name
        raise SettingsError(
            f"stage {stage} needs {missing}, which cannot be imported: {worded(error)[:200]}"
        ) from error
