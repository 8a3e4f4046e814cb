"""Check what can be known, then become `vllm serve` on an emulated GPU."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from twinserve.backends.live.emulate.model import write_model
from twinserve.backends.live.emulate.settings import (
    EXECUTOR,
    KEY,
    WORKER,
    emulated,
    with_absolute_path,
)
from twinserve.backends.live.needs import require
from twinserve.backends.live.route.settings import router_of
from twinserve.backends.live.serving.process import VLLM, end_with_parent, named_vllm
from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.policies.registry import parse_policy
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Hardware, resolve_hardware
from twinserve.sim.setup.serving import scheduler_class

_MIDDLEWARE = "twinserve.backends.live.serving.attributes.CheckAttributes"
_CONFIG = "--additional-config"
_ROUTE = (
    sys.executable,
    "-c",
    "from twinserve.sim.cli.entry import twinserve; twinserve()",
    "route",
)
_LOCAL = "127.0.0.1"


def check_port(host: str, port: int) -> None:
    """Raises LiveEngineError, one line, if no server can listen at the port."""
    try:
        if not 0 <= port < 1 << 16:
            raise OverflowError("there is none beyond 65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            line.bind(address)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise LiveEngineError(f"--port {port} of {host}: {why}; choose another one") from None


def engine_arguments(
    config: SimulationConfig, hardware: Hardware, policy: str | None, given: Sequence[str]
) -> list[str]:
    """Arguments of `vllm serve` for this hardware. policy: as on the command line; None: vLLM's own
    scheduler. given: further ones; a JSON object of --additional-config is taken apart."""
    limits = hardware.limits
    given, options = _taken(list(given))
    options[KEY] = emulated(config, hardware).model_dump()
    arguments = [
        "--load-format", "dummy", "--dtype", "bfloat16", "--generation-config", "vllm",
        "--worker-cls", WORKER, "--distributed-executor-backend", EXECUTOR, "--enforce-eager",
        "--block-size", str(hardware.block_tokens), "--max-num-seqs", str(limits.max_num_seqs),
        "--max-num-batched-tokens", str(limits.max_num_batched_tokens),
        "--max-model-len", str(limits.max_model_len),
    ]  # fmt: skip
    if config.prefix_caching is False:
        arguments.append("--no-enable-prefix-caching")
    if policy is not None:
        scheduler = scheduler_class(config.async_scheduling)
        arguments += ["--scheduler-cls", scheduler, "--middleware", _MIDDLEWARE]
        options["policy"] = policy
        if parse_policy(policy).uses_estimator:
            options.setdefault("profile", with_absolute_path(config.profile))
    return [*arguments, _CONFIG, json.dumps(options), *given]


def _taken(given: list[str]) -> tuple[list[str], dict]:
    """`given` without its --additional-config, and what that says."""
    for i, word in enumerate(given):
        name, _, text = word.partition("=")
        if name != _CONFIG:
            continue
        rest = given[i + 1 :]
        if not text:
            text, rest = (rest[:1] or [""])[0], rest[1:]
        try:
            options = json.loads(text)
        except ValueError:
            options = None
        if not isinstance(options, dict):
            raise LiveEngineError(f"{_CONFIG} {text!r}: no JSON object; write one")
        return given[:i] + rest, options
    return given, {}


def serve(
    config: SimulationConfig,
    host: str,
    port: int,
    policy: str | None = None,
    tokenizer: str | None = None,
    arguments: Sequence[str] = (),
) -> None:
    """Become `vllm serve` on the hardware of `config`; with replicas, `twinserve route` before as
    many of them, at the ports behind `port`. LiveEngineError, one line, where vLLM is missing or
    another release, or where nothing can listen at a port. The engine's process, and each server of
    a fleet, ends with this one, however that ends."""
    hardware = resolve_hardware(config)
    further = engine_arguments(config, hardware, policy, arguments)
    behind = [port + 1 + i for i in range(config.replicas)] if config.replicas > 1 else []
    if behind:
        router_of(config.router, profile=config.profile)
    for at, each in [(host, port), *((_LOCAL, each) for each in behind)]:
        check_port(at, each)
    require("emulating", *(["serving"] if policy else []))
    model, name = hardware.profile.llm, hardware.profile.name.partition("@")[0]
    folder = Path(tempfile.gettempdir()) / f"twinserve-{os.getuid()}-emulated-{name}"
    vocab = None if tokenizer is None else model.vocab
    write_model(folder, model, hardware.limits.max_model_len, vocab)
    command = [*VLLM, "serve", str(folder), "--served-model-name", name, *further]
    if tokenizer is not None:
        command += ["--tokenizer", tokenizer]
    release = installed_vllm()
    named = Path(tempfile.gettempdir()) / f"twinserve-{os.getuid()}-vllm-{release}"
    paths = [str(named_vllm(named)), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for each in behind:
        here = ["--host", _LOCAL, "--port", str(each)]
        subprocess.Popen([*command, *here], preexec_fn=partial(end_with_parent, signal.SIGTERM))
    if behind:
        command = [*_ROUTE, "--router", config.router, "--profile", config.profile]
        command += [word for each in behind for word in ("--worker", f"http://{_LOCAL}:{each}")]
    os.execv(command[0], [*command, "--host", host, "--port", str(port)])
