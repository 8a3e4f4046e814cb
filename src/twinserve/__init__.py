"""One scheduling and KV-cache policy for LLM serving, run by two engines: a simulator and live
vLLM.

    import twinserve as ts

    runs = ts.simulate(["vllm", "bros:chunk=fit"], trace="mooncake", pool=16)
    print(runs)
    runs["vllm"].requests        # a data frame
    runs.plot.cdf("ttft")        # shows itself in a notebook

The packages lie at the top of the repository, where readers look for them; here are links to them,
so that `import twinserve`, installers and type checkers all see one package.
"""

import os

# Nothing that Python has not loaded already: Ctrl-C has no answer yet. Type checkers know the name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from twinserve.errors import TwinserveError
    from twinserve.sim.api.checks import Check, check
    from twinserve.sim.api.comparisons import Comparison, compare
    from twinserve.sim.api.limits import Limits, limit
    from twinserve.sim.api.plans import Plan, plan
    from twinserve.sim.api.plots import Plot
    from twinserve.sim.api.runs import Run, Runs, read_runs, simulate
    from twinserve.sim.api.sweeps import Sweep, sweep

__all__ = [
    "Check",
    "Comparison",
    "Limits",
    "Plan",
    "Plot",
    "Run",
    "Runs",
    "Sweep",
    "TwinserveError",
    "check",
    "compare",
    "limit",
    "plan",
    "read_runs",
    "simulate",
    "sweep",
]

_HERE = os.path.dirname(__file__)
_ROOMS = ("backends", "experiments", "native", "policies", "profiles", "sim", "traces")
_lost = [name for name in _ROOMS if not os.path.isdir(os.path.join(_HERE, name))]
if _lost:
    raise ImportError(
        f"twinserve: {', '.join(_lost)} in {_HERE} should be links to the "
        "folders at the top of the "
        "repository, and this copy was made without them; clone again with git config "
        "core.symlinks true (on Windows: in "
        "developer mode), or pip install a wheel"
    )

# Where a name is: it is loaded when it is asked for, since commands start without most of it.
_PLACES = {
    "errors": ("TwinserveError",),
    "sim.api.checks": ("Check", "check"),
    "sim.api.comparisons": ("Comparison", "compare"),
    "sim.api.limits": ("Limits", "limit"),
    "sim.api.plans": ("Plan", "plan"),
    "sim.api.plots": ("Plot",),
    "sim.api.runs": ("Run", "Runs", "read_runs", "simulate"),
    "sim.api.sweeps": ("Sweep", "sweep"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
