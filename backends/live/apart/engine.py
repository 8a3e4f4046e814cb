"""Engines in processes of their own, as their runner sees them. Imports no vLLM."""

import multiprocessing
from typing import Any

from twinserve.backends.live.apart.decided import Decided, Ended
from twinserve.backends.live.apart.host import GOING, Part, main
from twinserve.backends.live.engine.engine import LiveSettings
from twinserve.backends.live.versions import LiveEngineError

START_S = 900.0  # until an engine is up: a large model is read, and its graphs may be captured
ANSWER_S = 300.0  # for a word of an engine that is up
_END_S = 10.0  # for one that was told to end
_PRELOAD = "twinserve.backends.live.apart.preload"


class Process:
    """An engine that starts; `wait` until it is up. Methods raise LiveEngineError if the engine
    fails, or says nothing for too long. Call `close` at the end.

    part  None: it stands alone, and answers
    """

    def __init__(self, settings: LiveSettings, part: Part | None = None) -> None:
        self.name = part.name if part else "alone"
        context = multiprocessing.get_context("forkserver")  # vLLM is imported once
        context.set_forkserver_preload([_PRELOAD])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=main, args=(theirs, settings, part), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> int:
        """Wait until the engine is up. Returns the token ids of its vocabulary."""
        return self._answer(START_S)

    def answers(self, requests: list[tuple[str, list[int], int]]) -> dict[str, list[int]]:
        """Return the token ids that the engine gives to (name, prompt, output tokens)."""
        return self._ask("answers", requests)

    def submit(
        self, request: str, prompt: list[int], output: int, at_s: float, params: dict | None
    ) -> None:
        """params: `kv_transfer_params`."""
        self._ask("submit", request, prompt, output, at_s, params)

    def abort(self, request: str) -> None:
        self._ask("abort", request)

    def step(self, now: float) -> Decided:
        """Begin a step at `now` (seconds): schedule and compute."""
        self._ask("step", now)
        return self._answer()

    def end(self, now: float) -> Ended:
        """End the step, and return what ended with it."""
        return self._ask("end", now)

    def land(self, request: str) -> bool:
        """End the wait for the request's load. Returns whether it is whole. At any time."""
        return self._ask("land", request)

    def close(self) -> None:
        """End the process, by force if it does not end in time."""
        try:
            self._pipe.send(("close",))
            self._process.join(_END_S)
        except OSError:
            pass  # it went before
        finally:
            for end in (self._process.terminate, self._process.kill):
                if self._process.is_alive():
                    end()
                    self._process.join(_END_S)
            self._pipe.close()

    def kill(self) -> None:
        """Kill the process at once, as if its machine had failed."""
        self._process.kill()
        self._process.join()

    def _ask(self, *message: Any) -> Any:
        try:
            self._pipe.send(message)
        except OSError as error:
            raise LiveEngineError(f"engine {self.name} has gone") from error
        return self._answer()

    def _answer(self, most_s: float = ANSWER_S) -> Any:
        kind, value = GOING, None
        while kind == GOING:
            try:
                if not self._pipe.poll(most_s):
                    raise LiveEngineError(f"engine {self.name} has not answered for {most_s:g} s")
                kind, value = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise LiveEngineError(f"engine {self.name} has gone") from error
        if kind == "error":
            raise LiveEngineError(f"engine {self.name}: {value}")
        return value
