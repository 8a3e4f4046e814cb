"""What is measured: every policy as a server has it by default, and some with one thing changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinserve.policies.registry import parse_policy, policy_names

HOST_BLOCKS = 1024  # more than a flood ever has on the host


@dataclass(frozen=True)
class Case:
    """policy: as `--additional-config` has it, None: vLLM with its own scheduler; options: further
    keys of it; host_blocks: room for swapped KV; note: what is changed."""

    policy: str | None
    options: dict = field(default_factory=dict)
    host_blocks: int = 0
    note: str = ""

    @property
    def name(self) -> str:
        shown = "vLLM's own scheduler" if self.policy is None else f"`{self.policy}`"
        return f"{shown}{', ' * bool(self.note)}{self.note}"


STOCK = Case(None)
CHANGED = {
    "bros": (
        Case("bros:chunk=fit"),
        Case("bros:chunk=fit", host_blocks=HOST_BLOCKS, note="swapping"),
        Case("bros:chunk=64,reserve=true"),
        Case("bros:chunk=64,reserve=true", host_blocks=HOST_BLOCKS, note="swapping"),
        Case("bros:chunk=64"),
        Case("bros:chunk=64", {"kv": "bidirectional"}, note="half of the blocks"),
        Case("bros:chunk=256,reserve=true"),
    )
}


def cases(policies: list[str] | None = None) -> list[Case]:
    """Of these policies; all by default. Raises RegistryError."""
    if policies is not None:
        return [Case(parse_policy(text).text) for text in policies]
    found = []
    for name in policy_names():
        found += [Case(name), *CHANGED.get(name, ())]
    return found
