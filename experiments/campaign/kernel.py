"""Stage `kernel` of a campaign: experiments.attention in a process of its own, a shape at a
time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from twinserve.experiments.attention.main import KERNELS
from twinserve.experiments.campaign.setup import Deadline, Engines, StageError, Store

KERNEL = "kernel"
SHAPES = {
    "8b": ("llama-3.1-8b", "qwen2.5-14b"),
    "14b": ("qwen2.5-14b", "llama-3.1-8b"),
    "tiny": ("tiny",),
}
LEAST_S = 20.0  # less is not worth a start
COMMAND = (sys.executable, "-m", "twinserve.experiments.attention")


def measure_kernels(
    store: Store, engines: Engines, key: str, deadline: Deadline, tune: bool = True
) -> None:
    """Check and time the kernels for the model's shape, then other tile sizes, then the other
    model's shape. A part that was cut off is kept under another name and done anew. Raises
    StageError where no part measured anything, or a check was wrong."""
    engines.close()  # the kernels want the memory
    shapes = SHAPES[key]
    parts = [shapes[0], *(["tune"] if tune else []), *shapes[1:]]
    wrong: list[str] = []
    tried = 0
    for part in parts:
        known = store.read(KERNEL, part, "attention_kernel.json", form=KERNELS)
        if known and known.get("complete"):
            continue
        if key != "tiny" and deadline.left < LEAST_S:
            store.say(
                f"kernel {part}: {deadline.left:.0f} s are left, and it wants {LEAST_S:.0f} s"
            )
            break
        folder = store.path(KERNEL, part, "attention_kernel.json").parent
        if known:
            number = len(list(folder.glob("cut-*.json"))) + 1
            os.replace(folder / "attention_kernel.json", folder / f"cut-{number}.json")
        tried += 1
        if why := _one(store, key, part, folder, deadline):
            wrong.append(f"{part}: {why}")
            store.say(f"kernel {wrong[-1]}")
    if wrong and (len(wrong) == tried or any("checks" in why for why in wrong)):
        raise StageError(wrong[0])


def _one(store: Store, key: str, part: str, folder: Path, deadline: Deadline) -> str:
    """What went wrong; empty where nothing did."""
    command = [*COMMAND, "--out", str(folder)]
    command += ["--time-limit", f"{max(deadline.left - 10.0, 1.0):.0f}"]
    environment = dict(os.environ)
    if key == "tiny":
        command.append("--dry-run")
        environment["TRITON_INTERPRET"] = "1"
    elif part != "tune":
        command += ["--shapes", part]
    if part == "tune":
        command.append("--tune")
    begun = time.monotonic()
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None and deadline.left > 0:
                time.sleep(min(2.0, max(deadline.left, 0.0)))
                store.saved(KERNEL)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    found = store.read(KERNEL, part, "attention_kernel.json", form=KERNELS) or {}
    wrong = sum(not check["fine"] for check in found.get("checks", []))
    store.saved(KERNEL)
    store.say(
        f"kernel {part}: exit {process.returncode}, {len(found.get('checks', []))} checks "
        f"({wrong} wrong), "
        f"{len(found.get('times', []))} times, {len(found.get('tuning', []))} tilings, "
        f"{time.monotonic() - begun:.0f} s"
    )
    if wrong:
        return f"{wrong} checks are wrong"
    if any("median_us" in row for row in [*found.get("times", []), *found.get("tuning", [])]):
        return ""
    said = (folder / "output.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return f"nothing was measured; {said[-1] if said else 'no output'}"
