"""What the stages of a campaign share: models, time that is left, the folder, and one engine for
several stages."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from twinserve.experiments.study.claims import texts
from twinserve.formats import Format, same
from twinserve.profiles.catalog import MODELS
from twinserve.sim.results.files import dump_json
from twinserve.traces.write import write_atomically

# Of each JSON file of a campaign's own; locked.json has the number of locked.parquet, too.
CAMPAIGN: Format[dict] = Format(
    "files of campaigns", version=1, by="name another --out", upgrades=(same,)
)
STEPS = "steps"
FOLDER = "models"
LOG = "log.txt"
LEAST_S = 5.0  # less is not worth beginning anything
# guess for an engine that was not started before: with graphs and compilation, and without
FIRST_START_S = {True: 75.0, False: 40.0}


@dataclass(frozen=True)
class Model:
    """One model and the sizes that a campaign gives its engine (`models.yaml`).

    name          of profiles.catalog.MODELS; config: what else its config.json has (None: the tiny
                  model with seeded weights)
    max_num_seqs  requests a step; seats are what the engine of the validation has room for: model
                  runner V2 keeps a seat for every request that holds memory, paused ones too
    ledger_blocks, host_blocks  KV memory of the policies in the validation: less than half of the
                  engine's pool, so that one engine serves every policy
    budget_tokens, chunk  tokens a step of the policies in the validation, and of one prompt under
                          BROS, which may exceed the budget by a chunk; the engine takes
                          max_step_tokens
    cap_tokens    prompt and output of a request in the validation: what has been measured, at most
    shipped       profiles to compare the measured one with; the first one is planned with until
                  there is a measured one
    """

    name: str
    max_step_tokens: int
    ledger_blocks: int
    host_blocks: int
    budget_tokens: int
    shipped: tuple[str, ...]
    max_num_seqs: int = 256
    max_model_len: int = 32768
    block_tokens: int = 16
    chunk: int = 2048
    cap_tokens: int = 16384
    seats: int = 1024
    num_blocks: int | None = None
    dtype: str = "auto"
    quick: bool = False
    config: dict | None = None


MODEL_SIZES = {key: Model(**of) for key, of in vars(texts(__file__, "models.yaml")).items()}


def default_policies(key: str) -> tuple[str, ...]:
    """With steps that the model's engine has room for."""
    size = MODEL_SIZES[key]
    layerkv = f"layerkv:max_num_batched_tokens={size.max_step_tokens}"
    return ("vllm", f"bros:chunk={size.chunk}", "echo", "justitia", layerkv)


class OutOfTime(Exception):
    """A stage used up the seconds it was given."""


class StageError(RuntimeError):
    """Nothing came of a stage; one line."""


class Deadline:
    """seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left; negative when it is over."""
        return self._end - time.monotonic()

    @property
    def near(self) -> bool:
        """Whether there is too little left to start anything."""
        return self.left < LEAST_S

    def look(self, *what: object) -> None:
        """For what reports its progress: raises OutOfTime when the time is over."""
        if self.left < 0:
            raise OutOfTime

    def within(self, seconds: float) -> Deadline:
        """The earlier of this one and `seconds` from now."""
        found = Deadline(0.0)
        found._end = min(self._end, time.monotonic() + seconds)
        return found


class Store:
    """The folder of a campaign. Files appear whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, *names: str) -> Path:
        """A file or folder of the campaign; the folder around it is there."""
        found = self.folder.joinpath(*names)
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def write(self, value: Mapping[str, object], *names: str) -> None:
        """`value` as JSON."""
        target = self.path(*names)
        write_atomically(target, dump_json(CAMPAIGN.numbered(value), target.name).encode())

    def read(self, *names: str) -> dict | None:
        """JSON from before; None without one. Raises StageError for one of a later version."""
        file = self.folder.joinpath(*names)
        try:
            document = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return CAMPAIGN.read(document, file, StageError)

    def say(self, text: str) -> None:
        """A line for the terminal and the log."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        self._log(line + "\n")

    def failed(self, what: str, error: BaseException) -> None:
        """What went wrong: a line, and all of it in the log."""
        self.say(f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self._log("".join(traceback.format_exception(error)))

    def _log(self, text: str) -> None:
        with self.path(LOG).open("a", encoding="utf-8") as log:
            log.write(text)


def model_config(key: str) -> dict:
    """The config.json of model `key`."""
    from twinserve.backends.live.engine.tiny_model import config

    model = MODEL_SIZES[key]
    if model.config is None:
        return config()
    llm = MODELS[model.name]
    return {
        **model.config,
        "hidden_size": llm.hidden,
        "intermediate_size": llm.intermediate,
        "num_hidden_layers": llm.layers,
        "num_attention_heads": llm.heads,
        "num_key_value_heads": llm.kv_heads,
        "head_dim": llm.head_dim,
        "vocab_size": llm.vocab,
        "max_position_embeddings": llm.max_positions,
        "tie_word_embeddings": llm.tied_embeddings,
    }


def model_folder(store: Store, key: str) -> Path:
    """The folder with the model's config.json: random weights but for the tiny one."""
    folder = store.folder / FOLDER / MODEL_SIZES[key].name
    if not (folder / "config.json").exists():
        if MODEL_SIZES[key].config is None:
            from twinserve.backends.live.engine.tiny_model import write_model

            return write_model(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(model_config(key), indent=1))
    return folder


def mode_name(key: str, graphs: bool) -> str:
    return f"{key}-{'graphs' if graphs else 'eager'}"


class Engines:
    """One engine at a time, kept while stages ask for the same one. start_s: what the last start
    took."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.start_s = 0.0
        self._engine = None
        self._key = None
        self._adopts = True

    def get(self, key: str, graphs: bool, swap: bool, extra: dict, deadline: Deadline):
        """The VllmEngine of model `key` with the measuring scheduler; swap: with host memory, and
        seats to spare.

        Without swap any running engine of the model will do. Raises what vLLM raises, and OutOfTime
        if a start would leave no time to use it.
        """
        wanted = (key, graphs, swap, json.dumps(extra, sort_keys=True, default=str))
        if self._engine is not None and (
            self._key == wanted or (not swap and self._key == (key, graphs, True, wanted[3]))
        ):
            self._engine.scheduler.can_adopt = self._adopts
            return self._engine
        from twinserve.backends.live.measure.measure import SCHEDULER

        engine = self.start(key, graphs, swap, {"scheduler_cls": SCHEDULER, **extra}, deadline)
        self._key, self._adopts = wanted, engine.scheduler.can_adopt
        if deadline.left < 0:
            raise OutOfTime("the engine's start used up the time; give the stage more")
        return engine

    def start(self, key: str, graphs: bool, swap: bool, extra: dict, deadline: Deadline):
        """A new VllmEngine in place of the one that runs, never given to another stage. extra:
        vLLM engine arguments."""
        expected = self.expected_s(key, graphs)
        if deadline.left < expected + LEAST_S:
            raise OutOfTime(
                f"{deadline.left:.0f} s are left, but an engine takes {expected:.0f} s to start"
            )
        self.close()
        from twinserve.backends.live.engine.engine import LiveSettings, VllmEngine

        size = MODEL_SIZES[key]
        settings = LiveSettings(
            model=model_folder(self.store, key),
            num_blocks=size.num_blocks,
            block_tokens=size.block_tokens,
            max_num_seqs=size.seats if swap else size.max_num_seqs,
            max_step_tokens=size.max_step_tokens,
            max_model_len=size.max_model_len,
            weights="dummy" if size.config else "safetensors",
            dtype=size.dtype,
            prefix_caching=True,
            swap_blocks=2 * size.host_blocks if swap else 0,
            graphs=graphs,
            extra=extra,
        )
        begun = time.monotonic()
        self._engine = VllmEngine(settings)
        self.start_s = time.monotonic() - begun
        blocks = self._engine.num_blocks
        kind = f"{size.name}{', with swapping' if swap else ''}"
        self.store.say(f"an engine took {self.start_s:.1f} s to start: {kind}, {blocks:,} blocks")
        started = {"start_s": self.start_s, "num_blocks": blocks, "swap": swap}
        self._write(key, graphs, [*self._starts(key, graphs), started])
        return self._engine

    def expected_s(self, key: str, graphs: bool) -> float:
        """Seconds that a start may take: the last one's."""
        if known := self._starts(key, graphs):
            return known[-1]["start_s"]
        return FIRST_START_S[graphs] if MODEL_SIZES[key].config else LEAST_S

    def note(self, key: str, graphs: bool, facts: dict) -> None:
        """Add `facts` to what is written about the last start."""
        starts = self._starts(key, graphs)
        self._write(key, graphs, [*starts[:-1], {**starts[-1], **facts}])

    def _starts(self, key: str, graphs: bool) -> list[dict]:
        name = f"{mode_name(key, graphs)}-starts.json"
        return (self.store.read(STEPS, name) or {"starts": []})["starts"]

    def _write(self, key: str, graphs: bool, starts: list[dict]) -> None:
        self.store.write({"starts": starts}, STEPS, f"{mode_name(key, graphs)}-starts.json")

    def close(self) -> None:
        """Stop the engine. One that does not stop in order is reported, and ends with the
        process."""
        engine, self._engine, self._key = self._engine, None, None
        if engine is not None:
            try:
                engine.close()
            except Exception as error:  # noqa: BLE001 - what was measured is worth more
                self.store.failed("the engine's stop", error)


def clear(engine) -> None:
    """Abort whatever is left on `engine`, and forget prefixes and counts."""
    from twinserve.backends.live.engine.planned import PlannedStep

    core = engine._client.engine_core  # there is no public way to abort a request
    core.abort_requests(list(engine.scheduler.requests))
    engine.step(PlannedStep())
    for name in ("execute_model", "sample_tokens"):
        vars(core.model_executor).pop(name, None)  # a test bench watched these
    engine.forget_prefixes()
    engine.scheduler.forget_counts()


@contextlib.contextmanager
def ignoring_time() -> Iterator[None]:
    with contextlib.suppress(OutOfTime):
        yield
