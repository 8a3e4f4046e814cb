"""How far a run's results move with the uncertainty of step times and front end.

The same requests run again with step times off by the expected error
(`twinserve.profiles.evidence`). Decodes and prompts are each longer or shorter, in all four
combinations: a policy may gain when both err in one direction and lose otherwise. With a front end,
runs follow with a fast host, a slow host and chats, unless the settings name these. A metric's
range covers all these runs. The range is no confidence interval: an error between the two ends can
move a metric further.

Policies are fitted to the step times of their run, as on a real engine. Objectives, arrivals and KV
memory stay the same.

For a fleet, `--spare` compares the run with one without failures and one with another replica (N +
1), over the same requests.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from twinserve.policies.registry import PolicySpec
from twinserve.profiles.evidence import ExpectedErrors, described, expected_errors
from twinserve.profiles.front_end import with_options
from twinserve.profiles.profile import Profile
from twinserve.sim.results.files import RunResult
from twinserve.sim.results.metrics_requests import percentile_name
from twinserve.sim.results.options import MetricsOptions
from twinserve.sim.results.paths import lookup
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.setup.front_end import parse_front_end
from twinserve.sim.setup.hardware import most_decodes
from twinserve.sim.setup.inputs import Inputs
from twinserve.sim.setup.run import PLAIN, Report, run_policy

_SIDES = {"slow": 1, "fast": -1}
_OF_CLASS = (
    *(f"{q}_{m}_ms" for m in ("ttft", "tpot", "e2el") for q in ("mean", "p50", "p90", "p99")),
    *("normalized_latency_ms", "ttft_attainment", "tpot_attainment", "every_gap_attainment"),
    *("e2el_attainment", "slo_attainment", "request_goodput", "request_throughput"),
)
_FURTHER = """classes.be.window_request_throughput classes.be.window_total_token_throughput
classes.rt.rejected classes.be.rejected applications.mean_jct_s applications.p90_jct_s
total_token_throughput output_throughput unfinished timed_out rejected failed never_sent
wasted_output_tokens duration kv.peak_use kv.prefix_hit_rate kv.host_hit_rate
kv.preemptions.recompute kv.preemptions.swap scheduler.mean_batch speculation.acceptance_rate
speculation.mean_acceptance_length failures.failed failures.late failures.discarded_output_tokens
failures.lost_kv_tokens failures.mean_recovery_s failures.max_recovery_s failures.not_recovered
autoscaling.gpu_hours autoscaling.mean_replicas autoscaling.most_replicas autoscaling.started
autoscaling.drained autoscaling.turns"""
# Where the main metrics stand in summary.json.
METRICS = (
    *(f"classes.rt.{name}" for name in _OF_CLASS),
    *(f"classes.be.{name}" for name in _OF_CLASS),
    *_FURTHER.split(),
)


@dataclass(frozen=True)
class StepsOff:
    """Wrong step times: factors on whole decodes, and on the prompts' share of a step."""

    label: str
    decode: float
    prefill: float

    def of(self, profile: Profile) -> Profile:
        """Return `profile` with these step times. Host time counts as part of the decodes."""
        return profile.scaled(step=self.decode, prefill=self.prefill / self.decode)


def corners(decode: float, prefill: float) -> list[StepsOff]:
    """Return all combinations of longer and shorter by these relative errors, 0 not varied."""

    def factors(error: float) -> dict[str, float]:
        return (
            {side: (1.0 + error) ** sign for side, sign in _SIDES.items()} if error else {"": 1.0}
        )

    return [
        StepsOff(", ".join(_said(d, "decodes") + _said(p, "prompts")), of_decodes, of_prompts)
        for d, of_decodes in factors(decode).items()
        for p, of_prompts in factors(prefill).items()
        if d or p
    ]


def _said(side: str, what: str) -> list[str]:
    return [f"{what} {side}"] if side else []


def with_steps_off(inputs: Inputs, off: StepsOff) -> Inputs:
    """Return the same requests on hardware with these step times."""
    hardware = inputs.hardware
    profile = off.of(hardware.profile)
    model = profile.model(hardware.limits.max_num_seqs)
    return replace(inputs, hardware=replace(hardware, profile=profile, model=model))


def run_with_steps_off(
    inputs: Inputs,
    spec: PolicySpec,
    errors: ExpectedErrors,
    report: Report | None = None,
    options: MetricsOptions = PLAIN,
    begin: Callable[[str], None] = lambda label: None,
) -> Iterator[RunResult]:
    """Run one policy in each of the corners, one after another; begin(label) before each."""
    for off in corners(errors.decode.error, errors.prefill.error):
        begin(f"{spec.label}, {off.label}")
        yield run_policy(with_steps_off(inputs, off), spec, report, options)


def with_front_ends_off(inputs: Inputs) -> list[tuple[str, Inputs]]:
    """Return a label and the same requests for each front-end value left open."""
    front_end, text = inputs.front_end, inputs.config.front_end
    if front_end is None or front_end.threads is None:
        return []
    low, high = front_end.host_factors
    found = []
    for label, options in (
        (f"host factor {low:.3g}", {"host_factor": low}),
        (f"host factor {high:.3g}", {"host_factor": high}),
        ("chats", {"chat": "true"}),
    ):
        other = with_options(text, options)
        if other is not None and parse_front_end(other)[1] != parse_front_end(text)[1]:
            config = inputs.config.model_copy(update={"front_end": other})
            found.append((label, replace(inputs, config=config)))
    return found


def check_error_bars(inputs: Inputs) -> None:
    """Check before any run. Raises SettingsError for the pools of a fleet file, ProfileError for a
    profile whose step times have no known error."""
    if inputs.pools:
        raise SettingsError("--error-bars changes the step times of one profile; drop --fleet")
    errors = expected_errors(inputs.hardware.profile)
    for off in corners(errors.decode.error, errors.prefill.error):
        off.of(inputs.hardware.profile)
    for _, other in with_front_ends_off(inputs):
        _ = other.delays  # its times may be absurd at the ends of the range


def add_error_bars(
    inputs: Inputs,
    spec: PolicySpec,
    result: RunResult,
    report: Report | None = None,
    options: MetricsOptions = PLAIN,
    begin: Callable[[str], None] = lambda label: None,
    errors: ExpectedErrors | None = None,
) -> None:
    """Run the corners of `spec`; add ranges (`error_bars`) to the summary, errors to run.json.
    errors: by default the profile's expected errors. Raises as `check_error_bars`."""
    check_error_bars(inputs)
    most = most_decodes(result.rows.step_columns)
    errors = errors or expected_errors(inputs.hardware.profile, decodes=most)
    others = list(run_with_steps_off(inputs, spec, errors, report, options, begin))
    front_ends = with_front_ends_off(inputs)
    for label, other in front_ends:
        begin(f"{spec.label}, {label}")
        others.append(run_policy(other, spec, report, options))
    result.summary["error_bars"] = ranges([result.summary, *(o.summary for o in others)])
    result.config["error_bars"] = described(errors)
    if front_ends:
        result.config["error_bars"]["front_end"] = ", ".join(label for label, _ in front_ends)


def ranges(summaries: Iterable[Mapping]) -> dict[str, list[float]]:
    """Return metric -> [low, high] over the summaries, for metrics that any summary has."""
    summaries = list(summaries)
    asked = [percentile_name(q) for s in summaries[:1] for q in s.get("percentiles", ())]
    further = [
        f"classes.{service_class}.{name}_{metric}_ms"
        for service_class in ("rt", "be")
        for metric in ("ttft", "tpot", "e2el")
        for name in asked
    ]
    found = {
        path: [float(v) for s in summaries if (v := lookup(s, path)) is not None]
        for path in dict.fromkeys([*METRICS, *further])
    }
    bars = {path: [min(values), max(values)] for path, values in found.items() if values}
    return bars | _of_verdicts(summaries)


def _of_verdicts(summaries: Sequence[Mapping]) -> dict[str, list[float]]:
    """Return objectives.N for the N-th objective: 1 if met, 0 if not."""
    lists = [summary.get("objectives", ()) for summary in summaries]
    bars = {}
    for number, one in enumerate(zip(*lists, strict=True)):
        met = [float(verdict["met"]) for verdict in one if verdict["met"] is not None]
        if met:
            bars[f"objectives.{number}"] = [min(met), max(met)]
    return bars


def said_of_bars(inputs: Inputs, decodes: int = 0) -> str:
    """Describe the ranges of a table in one line. decodes: most decodes at once in the runs."""
    errors = expected_errors(inputs.hardware.profile, decodes=decodes)
    front_end = "".join(f"; {label}" for label, _ in with_front_ends_off(inputs))
    off = f"step times off by the expected error: {errors}{front_end}"
    return f"low and high: {off} (docs/profiles.md)"


WITHOUT, ONE_MORE = "without_failures", "one_more_replica"
_WHOLE = ("completed", "failed", "timed_out", "p99_ttft_ms", "mean_ttft_ms", "mean_tpot_ms")
_ATTAINMENT = "slo_attainment"


def check_beside(inputs: Inputs) -> None:
    """Raise SettingsError if nothing fails, or if an autoscaler sets the number of replicas."""
    if inputs.failures is None:
        raise SettingsError("--spare: nothing fails; give --failures or --mttf")
    if inputs.config.autoscale is not None:
        raise SettingsError(
            "--spare: an autoscaler sets the number of replicas; drop --spare or --autoscale"
        )


def add_beside(
    inputs: Inputs,
    spec: PolicySpec,
    result: RunResult,
    report: Report | None = None,
    options: MetricsOptions = PLAIN,
    begin: Callable[[str], None] = lambda label: None,
) -> None:
    """Add `failures.beside` to the summary: without failures, and with one more replica."""
    found: dict[str, dict[str, Any]] = {}
    runs = {WITHOUT: replace(inputs, failures=None), ONE_MORE: with_one_more(inputs)}
    found["this_run"] = kept(result)
    for name, changed in runs.items():
        begin(f"{spec.label} {name.replace('_', ' ')}")
        found[name] = kept(run_policy(changed, spec, report, options))
    result.summary["failures"]["beside"] = found


def with_one_more(inputs: Inputs) -> Inputs:
    """Return the same requests for a fleet with one more replica (of each pool). The new replica
    has the last index, so that failures strike the same replicas. The rates set by `--load` stay.
    """
    config = inputs.config.model_copy(update={"replicas": inputs.config.replicas + 1})
    if not inputs.pools:
        return replace(inputs, config=config)
    more = tuple(
        replace(p, config=p.config.model_copy(update={"replicas": 1})) for p in inputs.pools
    )
    return replace(inputs, pools=inputs.pools + more)


def kept(result: RunResult) -> dict[str, Any]:
    """Return the compared numbers: ends, latencies of completed requests, attainment by class."""
    summary = result.summary
    found = {name: summary[name] for name in _WHOLE}
    for name, part in summary["classes"].items():
        found[f"{name}_attainment"] = part.get(_ATTAINMENT)
    return found
