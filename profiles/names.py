"""Names of profiles, and the shipped ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib import resources

from twinserve.profiles.catalog import MODELS, find_model, gpu_name, known_id, nearest
from twinserve.profiles.models.config import is_reference
from twinserve.profiles.specs import ProfileError

EVIDENCE_FILE = "evidence.json"  # beside the shipped profiles, and none itself (evidence.py)
MOST_RANKS = 4096  # of a name; what a model can be split over is `ranks.py`


@dataclass(frozen=True)
class ProfileName:
    """MODEL@GPU[:tpN][:ppN][:dpN][:ep][/FORM], parsed; `str()` gives the canonical form. MODEL is a
    name of the catalogue, a config.json or an id in the hub cache. FORM names a shipped alternative
    to the profile that the plain name gives."""

    model: str
    gpu: str
    tp: int = 1
    form: str = ""
    dp: int = 1
    ep: bool = False
    pp: int = 1

    def __str__(self) -> str:
        ranks = f":tp{self.tp}" if self.tp > 1 else ""
        ranks += f":pp{self.pp}" if self.pp > 1 else ""
        ranks += f":dp{self.dp}" if self.dp > 1 else ""
        ranks += ":ep" if self.ep else ""
        return f"{self.model}@{self.gpu}{ranks}" + (f"/{self.form}" if self.form else "")

    @property
    def file_name(self) -> str:
        return (
            f"{self.model}_{self.gpu}_tp{self.tp}"
            + (f"_{self.form}" if self.form else "")
            + ".json"
        )

    @classmethod
    def parse(cls, text: str) -> ProfileName:
        match = re.fullmatch(
            r"(.+)@([^@:/]+)((?::[a-z]+\d*)*)(?:/([a-z0-9]+))?", text.strip(), re.IGNORECASE
        )
        if not match:
            raise ProfileError(
                f"unknown profile {text!r}: give MODEL@GPU, MODEL@GPU:tpN or a .json file"
                f"{nearest(text.lower(), list_profiles())}"
            )
        model, gpu, said, form = match.groups()
        ranks = _ranks(said, text)
        # a folder that bears a name of the catalogue is not it, as `find_model` has it
        known = model.lower() in MODELS
        model = model.lower() if known or not is_reference(model) else known_id(model) or model
        gpu = gpu_name(gpu)
        more = {"dp": ranks["dp"], "ep": bool(ranks["ep"]), "pp": ranks["pp"]}
        return cls(model, gpu, ranks["tp"], (form or "").lower(), **more)

    @classmethod
    def of_file(cls, file_name: str) -> ProfileName:
        """The name whose `file_name` this is."""
        model, gpu, tp, *form = file_name.removesuffix(".json").split("_")
        return cls(model, gpu, int(tp.removeprefix("tp")), *form)


def with_ranks(name: str, tp: int | None, pp: int | None, dp: int | None, ep: bool | None) -> str:
    """Return the name with other ranks; None: those that it has. Data-parallel and expert-parallel
    ranks need a mixture of experts; dense models have replicas. Raises ProfileError."""
    if name.endswith(".json") and "@" not in name:
        raise ProfileError(f"{name}: a profile's file has its ranks; give the ranks no flag")
    known = ProfileName.parse(name)
    found = replace(known, tp=tp or known.tp, pp=pp or known.pp, form="" if tp else known.form)
    if find_model(known.model).experts:
        ranks = found.tp * (dp or known.dp)
        found = replace(found, dp=dp or known.dp, ep=(known.ep if ep is None else ep) and ranks > 1)
    return str(found)


def _ranks(said: str, text: str) -> dict[str, int]:
    """Of a name's `:tp4:dp2:ep`. ProfileError for what it cannot say."""
    found = {"tp": 1, "pp": 1, "dp": 1, "ep": 0}
    given = [part for part in said.lower().split(":") if part]
    for part in given:
        kind, number = part.rstrip("0123456789"), part.lstrip("abcdefghijklmnopqrstuvwxyz")
        if kind == "ep" and number:
            raise ProfileError(
                f"{text!r}: experts are spread over all ranks of :tpN and :dpN; write :ep "
                "without a number"
            )
        if kind not in found or (kind != "ep" and not 1 <= int(number or 0) <= MOST_RANKS):
            raise ProfileError(
                f"{text!r}: {part!r} is not understood; write MODEL@GPU:tpN:ppN, and of a mixture "
                "of experts :dpN and :ep"
            )
        if sum(other.rstrip("0123456789") == kind for other in given) > 1:
            raise ProfileError(f"{text!r}: {kind} is given twice; keep one of them")
        found[kind] = int(number or 1)
    return found


def list_profiles() -> list[str]:
    """Names of the shipped profiles, sorted. Any other MODEL@GPU:tpN of known parts is derived when
    loaded."""
    files = [entry.name for entry in shipped_folder().iterdir() if entry.name.endswith(".json")]
    return sorted(str(ProfileName.of_file(name)) for name in files if name != EVIDENCE_FILE)


def shipped_folder():
    """Return the package's folder of profiles (importlib.resources.abc.Traversable)."""
    return resources.files("twinserve.profiles.data")
