"""What the stages of a campaign import, imported before anything is measured: a package that is
missing shall not show after minutes on a machine that is lent for minutes."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module, metadata
from pkgutil import iter_modules

from twinserve.errors import worded
from twinserve.policies.registry import ledger_class, parse_policy
from twinserve.sim.setup.config import SettingsError

_CAMPAIGN = "twinserve.experiments.campaign"
_FITS = ("scipy.optimize", "pyarrow.parquet", "twinserve.profiles.profile", f"{_CAMPAIGN}.steps")
_RUNS = ("simpy", *_FITS, f"{_CAMPAIGN}.runs", "twinserve.traces.load")
_ENGINE = (
    "torch",
    "pyarrow.parquet",
    "vllm.engine.arg_utils",
    "vllm.distributed",
    "vllm.v1.engine.llm_engine",
    f"{_CAMPAIGN}.steps",
    "twinserve.backends.live.engine",
    "twinserve.backends.live.measure",
    "twinserve.backends.live.transfer",
)
_SERVER = ("vllm.benchmarks.serve", "uvicorn", "twinserve.backends.live.serving.client")
# not all of backends.live.attention: its `worker` puts the kernels in place of vLLM's own
_KERNEL = ("triton.testing", "twinserve.backends.live.attention.launch")
MODULES = {
    "plan": _RUNS,
    "steps": _ENGINE,
    "swap": _ENGINE,
    "profile": _FITS,
    "validate": (*_ENGINE, *_RUNS),
    "host": (*_ENGINE, f"{_CAMPAIGN}.host"),
    "serve": (*_ENGINE, *_SERVER, f"{_CAMPAIGN}.serve"),
    "kernel": ("torch", *_KERNEL, "twinserve.experiments.attention", f"{_CAMPAIGN}.kernel"),
    "report": (*_RUNS, f"{_CAMPAIGN}.report"),
}
# Names and versions of these stand in every run's run.json.
_DISTRIBUTIONS = ("twinserve", "numpy", "pandas", "simpy")
_VLLM = ("steps", "swap", "validate", "host", "serve")


class MissingError(SettingsError):
    """A stage cannot run here; one line."""


def require(stages: Iterable[str], policies: Iterable[str] = ()) -> None:
    """Import what `stages` import, and the `policies` of the runs among them. Raises MissingError
    for the first that fails, RegistryError for a policy that does not exist."""
    for stage in stages:
        for name in MODULES[stage]:
            _import(stage, name)
        if stage in _VLLM:
            from twinserve.backends.live.versions import LiveEngineError, installed_vllm

            try:
                installed_vllm()
            except LiveEngineError as error:
                raise MissingError(f"stage {stage}: {error}") from None
        if stage in ("plan", "validate", "report"):
            for name in _DISTRIBUTIONS:
                _distribution(stage, name)
            for text in policies:
                spec = parse_policy(text)
                ledger_class(spec.kv_name)


def _import(stage: str, name: str) -> None:
    """Module `name`; of a package of ours every module."""
    try:
        module = import_module(name)
        if name.startswith("twinserve.") and hasattr(module, "__path__"):
            for found in iter_modules(module.__path__):
                if found.name != "__main__":
                    import_module(f"{name}.{found.name}")
    except Exception as error:  # noqa: BLE001 - whatever a package does when it is imported
        missing = getattr(error, "name", None) or name
        said = worded(error)[:200]
        raise MissingError(
            f"stage {stage} needs {missing}, which cannot be imported: {said}"
        ) from (error)


def _distribution(stage: str, name: str) -> None:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        raise MissingError(
            f"stage {stage} needs the installed distribution {name}, for its version: "
            f"pip install {name if name != 'twinserve' else '--no-deps -e .'}"
        ) from None
