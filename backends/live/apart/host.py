"""The process of one engine of a fleet with prefill apart from decode. It follows commands over a
pipe, one message and one answer at a time.

A step has two halves, `step` and `end`: between them other engines may do theirs, and KV may land.
"""

import contextlib
import dataclasses
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from twinserve.backends.live.apart.decided import Decided, Ended
from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine
from twinserve.backends.live.engine.planned import PlannedStep
from twinserve.backends.live.versions import LiveEngineError

GOING = "going"  # said now and then while an answer takes long
_SCHEDULER = "twinserve.backends.live.apart.scheduler.ApartScheduler"
_PLAIN = "vllm.v1.core.sched.scheduler.Scheduler"


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of an engine in its fleet.

    role       kv_producer or kv_consumer
    folder     of all engines of the fleet
    recompute  what follows a load that failed; else its request ends
    """

    name: str
    role: str
    folder: Path
    lease_s: float
    recompute: bool

    def arguments(self) -> dict:
        """Return the arguments for vLLM."""
        from vllm.config import KVTransferConfig

        extra = {"folder": str(self.folder), "name": self.name, "lease_s": self.lease_s}
        transfer = KVTransferConfig(
            kv_connector="ApartConnector",
            kv_connector_module_path="twinserve.backends.live.apart.connector",
            kv_role=self.role,
            kv_load_failure_policy="recompute" if self.recompute else "fail",
            kv_connector_extra_config=extra,
        )
        return {"kv_transfer_config": transfer}


def main(pipe: Connection, settings: LiveSettings, part: Part | None) -> None:
    """part: None: an engine that stands alone."""
    try:
        if part is None:
            alone = dataclasses.replace(settings, scheduler=_PLAIN)
            _Alone(pipe, VllmEngine(alone)).serve()
        else:
            extra = settings.extra | part.arguments()
            engine = VllmEngine(dataclasses.replace(settings, scheduler=_SCHEDULER, extra=extra))
            _Host(pipe, engine).serve()
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # its runner has gone
    except Exception as error:
        said = str(error)
        if not isinstance(error, LiveEngineError):  # what runs it says this in one line
            traceback.print_exc()
            said = f"{type(error).__name__}: {' '.join(said.split())}"
        with contextlib.suppress(ConnectionError):
            pipe.send(("error", said))


class _Over(Exception):
    """Of the session."""


class _Served:
    def __init__(self, pipe: Connection, engine: VllmEngine) -> None:
        self.pipe, self.engine = pipe, engine

    def serve(self) -> None:
        self.pipe.send(("answer", self.engine.vocab))
        try:
            while True:
                self.obey()
        except _Over:
            self.engine.close()
            self.pipe.send(("answer", None))

    def obey(self) -> str:
        """One message; what it asked for."""
        verb, *values = self.pipe.recv()
        if verb == "close":
            raise _Over
        self.pipe.send(("answer", getattr(self, f"do_{verb}")(*values)))
        return verb


class _Host(_Served):
    def __init__(self, pipe: Connection, engine: VllmEngine) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        super().__init__(pipe, engine)
        self.now = 0.0
        self.scheduler, self.worker = engine.scheduler, get_kv_transfer_group()
        self.connector = engine.scheduler.connector
        self.connector.clock = self.worker.clock = lambda: self.now
        self.worker.on_word = True
        self.connector.handed_over = {}
        engine.scheduler.hold = self._hold
        self._decided: Decided | None = None

    def obey(self) -> str:
        verb = super().obey()
        if verb == "step":
            answer = self.engine.step(PlannedStep())  # `_hold` has the first half's answer
            handed_over, self.connector.handed_over = self.connector.handed_over, {}
            ended = Ended(self.scheduler.finished, answer.tokens, handed_over)
            self.pipe.send(("answer", ended))
        return verb

    def do_step(self, now: float) -> None:
        self.now = now

    def _hold(self, decided: Decided) -> tuple[list[str], list[str], set[int]]:
        """The step is under way: until the word that it has ended, KV may land."""
        self.pipe.send(("answer", decided))
        while True:
            verb, *values = self.pipe.recv()
            if verb == "end":
                self.now = values[0]
                return self.worker.ended()
            if verb != "land":
                raise LiveEngineError(f"{verb} while a step is under way")
            self.pipe.send(("answer", self.do_land(*values)))

    def do_land(self, request: str) -> bool:
        return self.worker.land(request)

    def do_submit(self, request: str, prompt: list[int], output: int, at_s: float, params) -> None:
        transfer = {"kv_transfer_params": params} if params else None
        self.engine.submit(request, prompt, output, at_s, attributes=transfer)

    def do_abort(self, request: str) -> None:
        self.engine.abort(request)


class _Alone(_Served):
    def do_answers(self, requests: list[tuple[str, list[int], int]]) -> dict[str, list[int]]:
        """Of (name, prompt, output tokens): all at once, greedily."""
        for name, prompt, output in requests:
            self.engine.submit(name, prompt, output)
        left: dict[str, Any] = {name: [] for name, _, _ in requests}
        going = len(left)
        while going:
            answer = self.engine.step(PlannedStep())
            going -= len(answer.finished)
            for name, tokens in answer.tokens.items():
                left[name] += tokens
            if answer.tokens:
                self.pipe.send((GOING, None))
        return left
