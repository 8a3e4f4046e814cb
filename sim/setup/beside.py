"""What a fleet would have kept without its failures, and with one more replica (N + 1): runs beside
the one in question, over the same requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twinserve.policies.registry import PolicySpec
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import PLAIN, Report, run_policy

WITHOUT, ONE_MORE = "without_failures", "one_more_replica"
_WHOLE = ("completed", "failed", "timed_out", "p99_ttft_ms", "mean_ttft_ms", "mean_tpot_ms")
_OF_CLASS = "slo_attainment"


def check_beside(inputs: Inputs) -> None:
    """Raises SettingsError where nothing fails, or one replica more is not defined."""
    if inputs.failures is None:
        raise SettingsError("--spare: nothing fails; give --failures or --mttf")
    if inputs.config.autoscale is not None:
        raise SettingsError(
            "--spare: an autoscaler says how many replicas there are; drop --spare or --autoscale"
        )


def add_beside(
    inputs: Inputs,
    spec: PolicySpec,
    result: RunResult,
    report: Report | None = None,
    options: MetricsOptions = PLAIN,
    begin: Callable[[str], None] = lambda label: None,
) -> None:
    """`failures.beside` of the result's summary: the same policy without failures, and with one
    more replica (of each pool)."""
    found: dict[str, dict[str, Any]] = {}
    runs = {WITHOUT: replace(inputs, failures=None), ONE_MORE: with_one_more(inputs)}
    found["this_run"] = kept(result)
    for name, changed in runs.items():
        begin(f"{spec.label} {name.replace('_', ' ')}")
        found[name] = kept(run_policy(changed, spec, report, options))
    result.summary["failures"]["beside"] = found


def with_one_more(inputs: Inputs) -> Inputs:
    """The same requests for a fleet with one more replica (of each pool). It comes after all
    others, so that failures strike the same requests. What `--load` made of rates stays as it
    is."""
    config = inputs.config.model_copy(update={"replicas": inputs.config.replicas + 1})
    if not inputs.pools:
        return replace(inputs, config=config)
    more = tuple(
        replace(p, config=p.config.model_copy(update={"replicas": 1})) for p in inputs.pools
    )
    return replace(inputs, pools=inputs.pools + more)


def kept(result: RunResult) -> dict[str, Any]:
    """What is compared: ends, latencies of those that completed, and attainment by class."""
    summary = result.summary
    found = {name: summary[name] for name in _WHOLE}
    for name, part in summary["classes"].items():
        found[f"{name}_attainment"] = part.get(_OF_CLASS)
    return found
