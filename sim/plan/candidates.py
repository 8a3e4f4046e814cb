"""Candidates of a plan: GPU kinds, tensor-parallel degrees, policies and routers, as replicas of
one kind. A candidate that cannot hold the model or the longest request is left out, with the
reason."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from twinserve.errors import worded
from twinserve.own_code import label
from twinserve.policies.registry import POLICIES
from twinserve.profiles.catalog import find_gpu, find_model
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import Profile, load_profile
from twinserve.profiles.specs import ProfileError
from twinserve.sim.fleet.routers.registry import ROUTERS
from twinserve.sim.plan.prices import Prices
from twinserve.sim.plan.trial import SOURCES
from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.setup.hardware import Hardware, resolve_hardware

GPUS = ("h100", "h200", "l40s", "a100")
TP = (1, 2, 4, 8)


@dataclass(frozen=True)
class Candidate:
    """A kind of replica. config: its settings, with one policy and one replica; usd_per_hour: of
    one replica, None if no price of its GPU is known."""

    gpu: str
    tp: int
    policy: str
    router: str
    config: SimulationConfig
    hardware: Hardware
    usd_per_hour: float | None

    @property
    def label(self) -> str:
        return f"{self.gpu} tp{self.tp} {self.policy} {self.router}"

    @property
    def names(self) -> dict[str, str]:
        """Policy and router; of a file, by the names of their classes."""
        return {"policy": label(POLICIES, self.policy), "router": label(ROUTERS, self.router)}


@dataclass(frozen=True)
class LeftOut:
    """A candidate that no number of replicas makes fit, with the reason."""

    gpu: str
    tp: int
    reason: str


def candidates(
    base: SimulationConfig,
    model: str,
    gpus: Sequence[str],
    tp: Sequence[int],
    routers: Sequence[str],
    prices: Prices,
    longest: int,
) -> tuple[list[Candidate], list[LeftOut]]:
    """All combinations, in the order given.

    base     settings that all have in common, with the policies
    longest  tokens of the longest request, prompt and output

    Raises ProfileError for an unknown model or GPU, SettingsError for a list that holds
    nothing, or the same twice.
    """
    own = own_profile(model)
    if own is not None:
        if own.dp > 1:
            raise SettingsError(
                f"--model {model}: is one of {own.dp} data-parallel ranks that share experts, and "
                "a plan needs independent replicas; give a profile of one engine"
            )
        if own.pp > 1:
            raise SettingsError(
                f"--model {model}: has {own.pp} pipeline stages, which are not planned for; give a "
                "profile without them"
            )
        gpus, tp = [own.gpu.name], [own.tp]
    else:
        find_model(model)
    names = [find_gpu(gpu).name for gpu in gpus] if own is None else list(gpus)
    for flag, given in (("gpus", names), ("tp", tp), ("policy", base.policy), ("router", routers)):
        check_list(flag, list(given))
    found, left_out = [], []
    for gpu in names:
        for ranks in tp:
            try:
                hardware = _hardware(base, model, gpu, ranks, longest)
            except (ProfileError, SettingsError) as error:
                left_out.append(LeftOut(gpu, ranks, worded(error)))
                continue
            price = prices.get(gpu)
            for policy in base.policy:
                for router in routers:
                    config = _config(base, model, gpu, ranks).model_copy(
                        update={"policy": (policy,), "router": router}
                    )
                    usd = None if price is None else price.usd_per_hour * ranks
                    found.append(Candidate(gpu, ranks, policy, router, config, hardware, usd))
    return found, left_out


def check_list(flag: str, given: list) -> None:
    """Raises SettingsError if the list is empty, or holds a count below 1 or something twice."""
    if not given:
        raise SettingsError(f"--{flag}: names nothing; give at least one")
    for one in given:
        if isinstance(one, int) and one < 1:
            raise SettingsError(f"--{flag} {one}: is no count; give whole numbers above 0")
        if given.count(one) > 1:
            raise SettingsError(f"--{flag}: {one} is given twice; keep one of them")


def own_profile(model: str) -> Profile | None:
    """Return the profile of this file, None if `model` names none. Raises ProfileError."""
    path = Path(model)
    if path.suffix != ".json" or path.name == "config.json" or not path.is_file():
        return None
    return load_profile(path)


def _config(base: SimulationConfig, model: str, gpu: str, tp: int) -> SimulationConfig:
    own = own_profile(model)
    if own is not None:
        return base.model_copy(update={"profile": model, "block_tokens": own.block_tokens})
    return base.model_copy(update={"profile": str(ProfileName(model, gpu, tp))})


def _hardware(base: SimulationConfig, model: str, gpu: str, tp: int, longest: int) -> Hardware:
    hardware = resolve_hardware(_config(base, model, gpu, tp), SOURCES)
    most = hardware.limits.max_model_len
    if longest > most:
        raise SettingsError(
            f"the longest request has {longest:,} tokens, and a replica holds {most:,}"
        )
    return hardware
