"""The engine makes no more Python calls than `call_count.json` says.

A feature that adds calls to each step shows here, on any machine. If the calls are worth it, write
the file anew in the same commit and say why:

    python tests/sim/call_count.py > tests/sim/call_count.json
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.call_count import RUNS, calls

FOLDER = Path(__file__).parent
MAY_RISE = 0.03


@pytest.mark.slow
def test_fixed_runs_make_no_more_calls_than_the_file_says():
    command = [sys.executable, str(FOLDER / "call_count.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    kept = json.loads((FOLDER / "call_count.json").read_text())
    assert list(kept) == list(RUNS)
    rises = {name: found[name] / kept[name] - 1 for name in RUNS}
    more = {name: f"{rise:+.1%}" for name, rise in rises.items() if rise > MAY_RISE}
    assert not more, f"more Python calls than call_count.json says: {more}; {__doc__}"


def test_calls_of_other_packages_do_not_count():
    from twinserve.policies.plan import StepPlan

    def work() -> None:
        json.dumps({"a": 1})
        for _ in range(5):
            bool(StepPlan())  # a method of ours
        [len(str(i)) for i in range(9)]

    assert calls(work) == 5 * calls(lambda: bool(StepPlan())) > 0
    with pytest.raises(ZeroDivisionError):
        calls(lambda: 1 / 0)
    assert sys.getprofile() is None
