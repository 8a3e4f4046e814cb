"""What a steered server counts: steps, drift, decision times. A JSON file and a log line."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from twinserve.formats import whole_file

if TYPE_CHECKING:
    from twinserve.backends.live.serving.decider import Decider

logger = logging.getLogger("vllm.twinserve")  # below vLLM's own, for its format and level

_RECENT = 10_000  # decisions that the 99th percentile is taken over
_EVERY_S = 1.0  # so often the file is rewritten while steps are made


class ServingStats:
    """labels: what is served, put into the file as it is. path: the JSON file, None for none."""

    def __init__(self, labels: dict, path: Path | None, log_every: int) -> None:
        self._labels = labels
        self._path = path
        self._log_every = log_every
        self._written = 0.0
        self._recent = np.zeros(_RECENT)
        self._ends_written = 0
        self._decision_s = 0.0
        self.decisions = 0
        self.steps = 0
        self.arrived = self.finished = self.aborted = self.refused = 0
        self.preempted = self.hit_tokens = self.prompt_tokens = self.output_tokens = 0

    def decided(self, seconds: float) -> None:
        self._recent[self.decisions % _RECENT] = seconds
        self._decision_s += seconds
        self.decisions += 1

    @property
    def line_due(self) -> bool:
        """A log line is due after this step."""
        return self.steps % self._log_every == 0

    @property
    def file_due(self) -> bool:
        """The file is a second old."""
        return self._path is not None and time.monotonic() - self._written >= _EVERY_S

    @property
    def ended(self) -> int:
        """Requests that are no more."""
        return self.finished + self.aborted + self.refused

    @property
    def last_word_due(self) -> bool:
        """Requests ended that the file does not count, and no further step may come."""
        return self._path is not None and self.ended != self._ends_written

    def values(self, drift: int, first_drift: str, decider: Decider) -> dict:
        """For the file."""
        recent = self._recent[: self.decisions]
        counts = {
            name: getattr(self, name)
            for name in (
                "steps decisions arrived finished aborted refused preempted hit_tokens "
                "prompt_tokens output_tokens"
            ).split()
        }
        return {
            **self._labels,
            **counts,
            "drift": drift,
            "first_drift": first_drift,
            "restarts": decider.restarts,
            "waiting": decider.waiting(),
            **{f"predicted_{name}": n for name, n in asdict(decider.predictions).items()},
            "decision_mean_s": self._decision_s / self.decisions if self.decisions else 0.0,
            "decision_p99_s": float(np.percentile(recent, 99)) if len(recent) else 0.0,
        }

    def line(self, values: dict) -> str:
        drifted = f" ({values['first_drift']})" if values["first_drift"] else ""
        return (
            f"policy {values['policy']}: {values['steps']} steps, drift "
            f"{values['drift']}{drifted}, "
            f"{values['finished']} of {values['arrived']} requests finished, {values['aborted']} "
            "aborted; "
            f"a decision takes {1e3 * values['decision_mean_s']:.2f} ms (p99 "
            f"{1e3 * values['decision_p99_s']:.2f} ms)"
        )

    def write(self, values: dict) -> None:
        """Replace the file; readers see old or new. A full disk does not stop the server."""
        if self._path is None:
            return
        self._written, self._ends_written = time.monotonic(), self.ended
        try:
            with whole_file(self._path) as partial:
                text = json.dumps(values, indent=2, sort_keys=True, allow_nan=False)
                partial.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            logger.warning("stats_path %s cannot be written: %s", self._path, error.strerror)
