"""Where something was measured, in lines."""

from __future__ import annotations


def machine_lines(computer: dict) -> list[str]:
    """What a report's `machine` says."""
    libraries = ", ".join(f"{name} {number}" for name, number in computer["versions"].items())
    load = computer["load_average_1min"]
    return [
        f"Machine: {computer['cpu']}, {computer['cores']} cores, {computer['system']}; "
        + ("on one core" if computer["core"] is not None else "not pinned to a core")
        + ("" if load is None else f"; load average at the start {load:.2f}"),
        f"Python {computer['python']}; {libraries}",
    ]
