"""Count the calls of our own Python functions in fixed runs: `python tests/sim/call_count.py`.

Prints JSON: calls by run. With the plain twins, so that a compiler changes nothing. Comprehensions
and lambdas are left out, because versions of Python differ in them.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

RUNS = {
    "vllm": {"policy": ("vllm",), "max_num_seqs": 8},
    "bros": {"policy": ("bros",), "pool": 4, "num_blocks": 400},
}
TRACE = {
    "trace": "sharegpt", "requests": 40, "rate": 8.0, "seed": 1, "profile": "llama-3.1-8b@h100",
}  # fmt: skip


def calls(function: Callable[[], object]) -> int:
    """Calls of named functions of twinserve while `function` runs."""
    ours: dict[CodeType, bool] = {}
    count = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call":
            code = frame.f_code
            if code not in ours:
                parts = Path(code.co_filename).parts
                ours[code] = "twinserve" in parts and not code.co_name.startswith("<")
            count += ours[code]

    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def main() -> None:
    os.environ["TWINSERVE_NATIVE"] = "0"
    from twinserve.sim.setup.config import SimulationConfig
    from twinserve.sim.setup.inputs import resolve
    from twinserve.sim.setup.run import Simulation

    found = {}
    for name, settings in RUNS.items():
        inputs = resolve(SimulationConfig(**TRACE, **settings))
        simulation = Simulation(inputs, inputs.policies[0])
        found[name] = calls(simulation.run)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
