"""Resolve settings into a run's inputs: requests with rate and objectives, hardware, policies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twinserve.policies.base import Policy
from twinserve.policies.names import RegistryError
from twinserve.policies.parts.estimators import BatchEstimator, LinearEstimator, ModelEstimator
from twinserve.policies.registry import PolicySpec, ledger_class, parse_policy
from twinserve.profiles.composition import StepTimeModel
from twinserve.profiles.forms.bros import BrosLinearModel
from twinserve.profiles.front_end import Delays, FrontEnd, Serving
from twinserve.profiles.measured.model import MeasuredModel, noise_lines
from twinserve.profiles.profile import Profile
from twinserve.sim.fleet.routers.registry import parse_router
from twinserve.sim.results.files import POOL_GROUP
from twinserve.sim.results.options import Objective
from twinserve.sim.setup.config import (
    DEFAULT_ROUTER,
    GENERATED_RATE,
    SettingsError,
    SimulationConfig,
)
from twinserve.sim.setup.earlier import Lengths, earlier_lengths
from twinserve.sim.setup.front_end import parse_front_end, serving_of
from twinserve.sim.setup.hardware import READ, Hardware, Sources, resolve_hardware
from twinserve.sim.setup.objectives import of_class, parse_objectives, pool_objectives
from twinserve.sim.setup.offered_load import (
    Machines,
    offered_load_of,
    prompt_seconds,
    service_seconds,
)
from twinserve.sim.setup.pools import (
    HandOver,
    Pool,
    check_longest,
    resolve_hand_over,
    resolve_pools,
)
from twinserve.traces.generators.synth import is_synthetic
from twinserve.traces.load import has_name, load_trace
from twinserve.traces.transform import cap_length, check_fits, head, scale_rate, window, with_pool
from twinserve.traces.workload import BestEffortPool, Workload, WorkloadError

if TYPE_CHECKING:
    from twinserve.sim.fleet.faults import Schedule

GENERATED_SECONDS = 600.0


@dataclass(frozen=True)
class Inputs:
    """Everything that the runs of a comparison share.

    pools    of a fleet file; `hardware` is then that of the first one
    earlier  earlier requests for predictors; None: nothing
    hand_over  how KV goes from prefill to decode pools; None: no such pools
    failures  schedule of failures; None: none
    """

    config: SimulationConfig
    workload: Workload
    hardware: Hardware
    policies: tuple[PolicySpec, ...]
    notices: tuple[str, ...]
    pools: tuple[Pool, ...] = ()
    earlier: Lengths | None = None
    hand_over: HandOver | None = None
    failures: Schedule | None = None

    @property
    def machines(self) -> Machines:
        return _machines(self.config, self.hardware, self.pools)

    @cached_property
    def estimator(self) -> BatchEstimator:
        """The policies' estimate of step times; stateless, so all runs share one."""
        return make_estimator(self.config, self.hardware)

    @cached_property
    def _front_end(self) -> tuple[FrontEnd | None, Serving]:
        front_end, serving = parse_front_end(self.config.front_end)
        profile = self.hardware.profile
        release = self.config.engine_version or profile.engine_version
        return front_end, serving_of(serving, release, profile.llm.name)

    @property
    def front_end(self) -> FrontEnd | None:
        """The front end between clients and engines, or None."""
        return self._front_end[0]

    @cached_property
    def delays(self) -> Delays | None:
        """The front end's times (seconds) on this hardware; None without one."""
        front_end, serving = self._front_end
        return None if front_end is None else front_end.on(serving)

    def front_end_said(self) -> str:
        """The front end's terms in a line; empty without one."""
        front_end, serving = self._front_end
        return "" if front_end is None else front_end.describe(serving)

    def estimator_for(self, policy: type[Policy]) -> BatchEstimator:
        """Return the estimate of step times that `policy` uses."""
        return (
            self.estimator
            if own_form(policy, self.config) is None
            else make_estimator(self.config, self.hardware, policy)
        )


def own_form(
    policy: type[Policy], config: SimulationConfig
) -> Callable[[Profile, StepTimeModel], BatchEstimator] | None:
    """Return the paper's own estimator of `policy`, fitted to a profile; None if the policy has
    none or `--estimator` is not `paper`."""
    return policy.fit_estimator if config.estimator == "paper" else None


@functools.lru_cache(maxsize=8)
def _fitted(fit, hardware: Hardware) -> BatchEstimator:
    """Fit once per hardware: fitting is slow, and the compared policies share the profile."""
    return fit(hardware.profile, hardware.model)


def resolve(
    config: SimulationConfig,
    progress=None,
    sources: Sources = READ,
    policies: Sequence[PolicySpec] | None = None,
) -> Inputs:
    """Read and check everything. policies: replace those of `config`. Raises WorkloadError,
    ProfileError or SettingsError with one line."""
    if policies is None:
        policies = [parse_policy(text) for text in config.policy]
    labels = [spec.label for spec in policies]
    policies = tuple(  # two files may call their policies the same
        spec if labels.count(spec.label) == 1 else replace(spec, label=spec.text)
        for spec in policies
    )
    labels = [spec.label for spec in policies]
    for label in labels:
        if labels.count(label) > 1:
            raise SettingsError(
                f"--policy {label} is given twice; each column of the table needs its own settings"
            )
    for spec in policies:
        kv = spec.kv or config.kv
        if kv is not None:
            ledger_class(kv)
    parse_objectives(config.slo)
    parse_front_end(config.front_end)
    config, pools, hand_over = _fleet(config, sources)
    parse_router(config.router)
    policies = _of_pools(policies, pools)
    used = (*policies, *(pool.spec for pool in pools if pool.spec is not None))
    _check_used(config, used)
    _check_withdrawals(config, used)
    if any(one.speculate is not None for one in (config, *(pool.config for pool in pools))):
        from twinserve.sim.setup.speculation import check_speculation

        check_speculation(config, policies, pools)
    hardware = pools[0].hardware if pools else resolve_hardware(config, sources)
    if config.autoscale is not None:
        from twinserve.sim.setup.demand import check_autoscaling  # for those that scale

        check_autoscaling(config, hardware)
    config, failures = _failures(config, _machines(config, hardware, pools))
    workload, notices = resolve_workload(config, hardware, progress, sources, pools)
    if failures is not None:
        from twinserve.sim.setup.failures import check_crashes

        replicas = sum(count for _, count in _machines(config, hardware, pools))
        check_crashes(failures, replicas, workload.last_arrival_s)
    earlier = _learned(config, workload, hardware, used, notices, sources)
    said = (*_unserved(config), *workload.provenance.notices, *notices)
    said += () if workload.prefix is None else caching_differs(config, policies)
    said += tuple(_noise(pools, hardware))
    kept = (pools, earlier, hand_over, failures)
    return Inputs(config, workload, hardware, policies, said, *kept)


def _failures(
    config: SimulationConfig, machines: Machines
) -> tuple[SimulationConfig, Schedule | None]:
    """Return the settings with the content of the failure file, and the schedule of failures."""
    if config.failures is None and config.mttf is None:
        return config, None
    from twinserve.sim.setup.failures import resolve_failures  # for those that fail

    replicas = sum(count for _, count in machines)
    ranks = any(hardware.profile.dp > 1 for hardware, _ in machines)
    return resolve_failures(config, replicas, ranks)


def _unserved(config: SimulationConfig) -> tuple[str, ...]:
    """Return the parts of --from-vllm that matter and are not simulated."""
    if config.from_vllm is None:
        return ()
    from twinserve.sim.serve_line.settings import from_vllm  # for those that give one

    return from_vllm(config.from_vllm, vars(config)).warnings


def _noise(pools: Sequence[Pool], hardware: Hardware) -> tuple[str, ...]:
    """Return notices on partial or disturbed measurements of profiles, and on memory logs."""
    replicas = [pool.hardware for pool in pools] or [hardware]
    used = [one.profile for one in replicas]
    said = {line: None for one in replicas for line in one.notices} | {
        f"profile {profile.name}: {line}": None
        for profile in used
        if isinstance(profile.step_model, MeasuredModel) and profile.step_model.fit is not None
        for line in noise_lines(profile.step_model.fit)
    }
    return tuple(said)


def _fleet(
    config: SimulationConfig, sources: Sources
) -> tuple[SimulationConfig, tuple[Pool, ...], HandOver | None]:
    """Return the settings with the fleet file's content, the pools, and how pools hand KV over."""
    if config.fleet is None:
        return config, (), None
    from twinserve.sim.setup.fleet_file import read_fleet  # YAML is for those that need it

    file = read_fleet(config.fleet)
    router = file.settings.router
    if router is not None and config.router not in (DEFAULT_ROUTER, router):
        raise SettingsError(
            f"{file.where}: router: {router!r}, and --router {config.router!r}; keep one of them"
        )
    if router is not None:
        try:
            parse_router(router)
        except RegistryError as error:
            raise SettingsError(f"{file.where}: router: {error}") from None
    config = config.model_copy(update={"fleet": file.text, "router": router or config.router})
    return config, resolve_pools(file, config, sources), resolve_hand_over(file, config)


def _of_pools(policies: tuple[PolicySpec, ...], pools: tuple[Pool, ...]) -> tuple[PolicySpec, ...]:
    """Return the policies to run; pools with their own policies make one run with all names."""
    own = [pool.spec for pool in pools if pool.spec is not None]
    if not own or len(own) < len(pools):
        return policies
    if len(policies) > 1:
        raise SettingsError(
            "--policy: every pool of --fleet has a policy of its own, so all runs would be the "
            "same; drop --policy, or a pool's policy"
        )
    return (replace(own[0], label=" + ".join(dict.fromkeys(spec.label for spec in own))),)


def _machines(config: SimulationConfig, hardware: Hardware, pools: tuple[Pool, ...]) -> Machines:
    return [(pool.hardware, pool.replicas) for pool in pools] or [(hardware, config.replicas)]


def _learned(
    config: SimulationConfig,
    workload: Workload,
    hardware: Hardware,
    policies: tuple[PolicySpec, ...],
    notices: list[str],
    sources: Sources,
) -> Lengths | None:
    """Return the requests that predictors learn from, or None. Adds to `notices` what the user
    should know of the predictors."""
    earlier = None
    wanting = [spec.label for spec in policies if spec.given.wants_sample]
    if wanting:
        longest = hardware.limits.max_model_len
        earlier = earlier_lengths(config, workload, longest, sources)
        if earlier is None:
            notices.append(
                f"{wanting[0]}: its predictor of output lengths is not trained, because the run "
                f"leaves too few requests of {config.trace} for that; lower --requests"
            )
    if workload.applications:
        notices += dict.fromkeys(spec.given.notice for spec in policies if spec.given.notice)
    return earlier


def caching_differs(config: SimulationConfig, policies: Sequence[PolicySpec]) -> tuple[str, ...]:
    """Return a notice if only a user's own policy lacks prefix caching, by its default."""
    if config.prefix_caching is not None:
        return ()
    can = [p for p in policies if ledger_class(p.kv or config.kv or p.kv_name).caches_prefixes]
    can = [p for p in can if p.policy.uses_prefix_cache]
    on = [p.label for p in can if p.policy.prefix_caching]
    off = [p.label for p in can if p.own is not None and not p.policy.prefix_caching]
    said = f"prefix caching is by default off for {', '.join(off)}, on for {', '.join(on)}; "
    return (f"{said}--prefix-caching makes them equal",) if on and off else ()


def _check_used(config: SimulationConfig, policies: tuple[PolicySpec, ...]) -> None:
    """Raise SettingsError for a setting that no policy uses."""
    names = ", ".join(spec.label for spec in policies)
    if config.estimator != "paper" and not any(spec.uses_estimator for spec in policies):
        chosen = f"--estimator {config.estimator}"
        raise SettingsError(
            f"{chosen}: no step times are estimated by {names}; drop it, or add a policy that does"
        )
    if config.prefix_caching and not any(spec.policy.uses_prefix_cache for spec in policies):
        raise SettingsError(
            f"--prefix-caching: no prefix is looked up by {names}; drop it, or add a policy that "
            "does"
        )


def _check_withdrawals(config: SimulationConfig, policies: tuple[PolicySpec, ...]) -> None:
    """Raise SettingsError if clients may cancel but a policy cannot remove cancelled requests."""
    lacking = [spec.label for spec in policies if not spec.policy.withdraws()]
    given_up = (config.failures, config.mttf, config.grace)
    if any(setting is not None for setting in given_up) and lacking:
        raise SettingsError(
            f"--on-failure: policy {lacking[0]} has no on_withdraw, so its requests cannot leave "
            "a replica; add that method, or let nothing fail"
        )
    if config.client_timeout is not None and lacking:
        raise SettingsError(
            f"--client-timeout: policy {lacking[0]} has no on_withdraw, so it would plan "
            "cancelled requests; add that method, or drop --client-timeout"
        )


def make_estimator(
    config: SimulationConfig, hardware: Hardware, policy: type[Policy] | None = None
) -> BatchEstimator:
    """Return the estimate of step times for policies; `policy`: its own paper's form, if any."""
    if policy is not None and (fit := own_form(policy, config)) is not None:
        return _fitted(fit, hardware)
    swap = hardware.profile.swap_model()
    if hardware.speculation is not None:
        from twinserve.sim.setup.speculation import estimator_with_drafts

        return estimator_with_drafts(
            config.estimator,
            hardware.speculation,
            hardware.profile,
            hardware.model,
            hardware.limits,
        )
    if config.estimator == "perfect":
        return ModelEstimator(hardware.model, swap)
    if config.estimator not in ("paper", "bros"):
        from twinserve.profiles.forms.estimates import step_estimate

        model = step_estimate(config.estimator, hardware.profile, hardware.model)
        return ModelEstimator(model, swap)
    return LinearEstimator(BrosLinearModel.fit(hardware.model), swap)


def resolve_workload(
    config: SimulationConfig,
    hardware: Hardware,
    progress=None,
    sources: Sources = READ,
    pools: tuple[Pool, ...] = (),
) -> tuple[Workload, list[str]]:
    """Return the requests for every policy, and notices for the user."""
    machines = _machines(config, hardware, pools)
    workload, notices = _with_rate(config, machines, progress, sources)
    check_longest(pools, workload)
    workload = _of_fitting_length(workload, config, hardware.limits.max_model_len, notices)
    objectives = parse_objectives(config.slo)
    workload = with_objectives(workload, hardware, objectives)
    if config.pool:
        pool_objectives(objectives)
        if POOL_GROUP in workload.group_names:
            raise SettingsError(
                f"--pool: {config.trace} holds the pool of the run that it was exported from; "
                "drop --pool"
            )
        pool = BestEffortPool(config.pool, seed=config.seed)
        most = min(kind.limits.max_model_len for kind, _ in machines)
        if pool.longest > most:
            raise SettingsError(
                f"--pool: its requests have up to {pool.longest} tokens, the KV memory holds {most}"
            )
        workload = with_pool(workload, pool)
    if not len(workload) and not config.pool:
        raise WorkloadError(
            f"{config.trace}: no requests are left to simulate; widen --window or --requests"
        )
    return workload, notices


def with_objectives(
    workload: Workload, hardware: Hardware, objectives: Sequence[Objective]
) -> Workload:
    """Set objectives for requests without. hardware: step times, for those that grow with the
    prompt."""
    for service_class in ("rt", "be"):
        if found := of_class(objectives, service_class):
            workload = _with_objectives(workload, hardware, service_class, found)
    return workload


def _of_fitting_length(
    workload: Workload, config: SimulationConfig, longest: int, notices: list[str]
) -> Workload:
    """Limit requests to the model's context and the KV memory. A named trace is cut, with a notice;
    a user's file is refused (WorkloadError)."""
    over = int((workload.prompt_tokens + workload.output_tokens > longest).sum())
    if not over or not has_name(config.trace):
        check_fits(workload, longest)
        return workload
    notices.append(
        f"{over:,} of {len(workload):,} requests are longer than the {longest:,} tokens "
        "that this hardware allows: cut to that length (--cap-length sets another)"
    )
    return cap_length(workload, longest)


def _with_rate(
    config: SimulationConfig, machines: Machines, progress, sources: Sources
) -> tuple[Workload, list[str]]:
    if is_synthetic(config.trace):
        return _generated(config, machines)
    if config.rate is not None or config.duration is not None:
        flag = "--rate" if config.rate is not None else "--duration"
        if not _needs_arrivals(config):
            raise SettingsError(
                f"{flag} is for generated traces; {config.trace!r} has its own arrivals: use "
                "--rate-scale"
            )
    workload = sources.recorded(config, progress)
    if config.window is not None:
        workload = window(workload, *config.window)
    if config.requests is not None:
        workload = head(workload, config.requests)
    if config.cap_length is not None:
        workload = cap_length(workload, config.cap_length)
    factor, notices = config.rate_scale, []
    if config.load is not None:
        factor, said = _scale_for_load(config, config.load, workload, machines)
        notices.append(said)
    if factor is not None and factor != 1:
        workload = scale_rate(workload, factor)
    return workload, notices


def _needs_arrivals(config: SimulationConfig) -> bool:
    """Return whether the file has lengths only; --rate then sets arrivals."""
    return config.rate is not None and config.duration is None and Path(config.trace).exists()


def _generated(config: SimulationConfig, machines: Machines) -> tuple[Workload, list[str]]:
    if config.rate_scale is not None:
        raise SettingsError(
            f"--rate-scale is for recorded traces; {config.trace!r} is generated: use --rate"
        )
    recorded = {
        "--window": config.window,
        "--format": config.format,
        "--columns": config.columns,
        "--raw-arrivals": config.raw_arrivals or None,
    }
    flag = next((name for name, given in recorded.items() if given is not None), None)
    if flag is not None:
        raise SettingsError(f"{flag} is for recorded traces; {config.trace!r} is generated")
    rate, notices = config.rate, []
    duration = config.duration
    if duration is None and config.requests is None:
        duration = GENERATED_SECONDS
    if config.load is not None:
        sample = load_trace(config.trace, seed=config.seed, rate=1.0, count=2000)
        capacity = sum(n * len(sample) / service_seconds(sample, kind) for kind, n in machines)
        rate = float(f"{config.load * capacity:.3g}")
        notices.append(
            f"rate {rate:g} requests/s: --load {config.load:g} of estimated capacity "
            f"({_replicas(machines)})"
        )
    elif rate is None:
        rate = GENERATED_RATE
        notices.append(f"rate {rate:g} requests/s, the default (--rate or --load sets another)")
    workload = load_trace(
        config.trace, seed=config.seed, rate=rate, count=config.requests, duration_s=duration
    )
    if config.cap_length is not None:
        workload = cap_length(workload, config.cap_length)
    return workload, notices


def _scale_for_load(
    config: SimulationConfig, load: float, workload: Workload, machines: Machines
) -> tuple[float, str]:
    """Return the factor on the arrival rate that brings online load to the share `load` of
    capacity. Raises SettingsError if there is no rate to scale."""
    if workload.span_s <= 0:
        raise SettingsError(
            f"--load {load:g}: all requests of {config.trace} arrive at once, so there is no "
            "rate to set; drop it"
        )
    factor = float(f"{load / offered_load_of(workload, machines):.3g}")
    return (
        factor,
        f"rate scale {factor:g}: --load {load:g} of estimated capacity ({_replicas(machines)})",
    )


def _replicas(machines: Machines) -> str:
    count = sum(n for _, n in machines)
    return f"{count} replica{'s' * (count > 1)}"


def _with_objectives(
    workload: Workload, hardware: Hardware, service_class: str, objectives: dict[str, Objective]
) -> Workload:
    """Set objectives, by metric, for requests of the class without their own."""
    mine = workload.service_class == ("rt", "be").index(service_class)
    slo = {"ttft": workload.slo_ttft_s, "tpot": workload.slo_tpot_s}
    rule = "slo" if service_class == "rt" else f"slo {service_class}:"
    for metric, objective in objectives.items():
        bound = f"{objective.bound_s:g}s"
        floor = np.full(len(workload), objective.bound_s)
        if objective.prefills:
            bound = f"max({bound}, {objective.prefills:g} x prefill)"
            if len(workload):
                alone = prompt_seconds(
                    workload.prompt_tokens, hardware, hardware.model.step_seconds
                )
                floor = np.maximum(floor, objective.prefills * alone)
        rule += f" {metric}={bound}"
        if metric in slo:
            slo[metric] = np.where(np.isnan(slo[metric]) & mine, floor, slo[metric])
    provenance = workload.provenance.then(rule)
    return replace(workload, slo_ttft_s=slo["ttft"], slo_tpot_s=slo["tpot"], provenance=provenance)
