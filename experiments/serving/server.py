"""`vllm serve` of the model `small` on the CPU, its engine's limits, and its predicted figures."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path

from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.serving.client import bench
from twinserve.backends.live.serving.process import CPU_ENGINE, ServerProcess
from twinserve.profiles.profile import load_profile, save_profile
from twinserve.sim.cli.main import main

NAME = "small"
ENGINE = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}
BLOCK_TOKENS = 32
# what no profile says of a CPU engine; its KV memory holds more than 16 of the longest requests
ON_A_CPU = ["--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"]


def write_small(folder: Path) -> Path:
    """The model with its tokenizer, in a folder of its name."""
    model = folder / NAME
    tiny_model.write_model(model, name=NAME)
    tiny_model.write_tokenizer(model)
    return model


def start(folder: Path, model: Path, arguments: Sequence[str]) -> ServerProcess:
    """A server that is coming up (`wait`), without prefix caching."""
    given = [*ON_A_CPU, "--no-enable-prefix-caching", *arguments]
    environment = {**CPU_ENGINE, "OMP_NUM_THREADS": "1"}
    return ServerProcess(folder, model, given, NAME, environment)


@contextmanager
def serving(folder: Path, model: Path, arguments: Sequence[str]) -> Iterator[ServerProcess]:
    """The same, up and warm, until the end of the block. folder: new, for its log."""
    folder.mkdir(parents=True)
    server = start(folder, model, arguments)
    try:
        server.wait()
        warm = {"num_prompts": 20, "random_input_len": 60, "random_output_len": 10}
        bench(server, folder / "warm.json", {"request_rate": 10, **warm}, 7)
        yield server
    finally:
        server.stop()


def engine_arguments() -> list[str]:
    """Of a server with the limits of `ENGINE`."""
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in ENGINE.items()]
    return [*(word for pair in pairs for word in pair), "--block-size", str(BLOCK_TOKENS)]


def any_cpu(model: Path, out: Path) -> Path:
    """A profile to begin with: the roofline of a core that does 100 GFLOP/s and reads 20 GB/s: no
    real core's numbers."""
    profile = load_profile(f"{model / 'config.json'}@l40s")
    rates = {"name": "a-cpu", "peak_flops": 1e11, "memory_bytes_per_s": 2e10}
    save_profile(profile.model_copy(update={"gpu": replace(profile.gpu, **rates)}), out)
    return out


def calibrate(files: Sequence[Path], begin: Path, out: Path) -> bool:
    """`twinserve calibrate --from-serving`; what it says goes to a text next to `out`. Whether
    there is a profile: it writes none if it makes nothing better."""
    words = ["calibrate", "--from-serving", *map(str, files), "--out", str(out)]
    words += ["--profile", str(begin), "--block-tokens", str(BLOCK_TOKENS)]
    limits = zip(("max-num-seqs", "max-step-tokens", "max-model-len"), ENGINE.values(), strict=True)
    words += [word for name, value in limits for word in (f"--{name}", str(value))]
    with out.with_suffix(".txt").open("w") as said, redirect_stdout(said), redirect_stderr(said):
        with suppress(SystemExit):
            main(words)
    return out.exists()
