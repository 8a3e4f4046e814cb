"""Start `vllm serve` on an emulated GPU: what can be known before is checked, then this process
becomes it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

from twinserve.backends.live.emulate.model import write_model
from twinserve.backends.live.emulate.settings import EXECUTOR, KEY, WORKER, emulated
from twinserve.backends.live.needs import require
from twinserve.backends.live.serving.process import VLLM, named_vllm
from twinserve.backends.live.versions import LiveEngineError, installed_vllm
from twinserve.policies.registry import parse_policy
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import Hardware, resolve_hardware
from twinserve.sim.setup.serving import scheduler_class

_MIDDLEWARE = "twinserve.backends.live.serving.attributes.CheckAttributes"
_CONFIG = "--additional-config"


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
            options.setdefault("profile", config.profile)
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
    """Become `vllm serve` on the hardware of `config`. LiveEngineError, one line, where vLLM is
    missing or another release, or where nothing can listen at the port. The engine's process ends
    with this one, however that ends."""
    hardware = resolve_hardware(config)
    further = engine_arguments(config, hardware, policy, arguments)
    check_port(host, port)
    require("emulating", *(["serving"] if policy else []))
    model, name = hardware.profile.llm, hardware.profile.name.partition("@")[0]
    folder = Path(tempfile.gettempdir()) / f"twinserve-{os.getuid()}-emulated-{name}"
    vocab = None if tokenizer is None else model.vocab
    write_model(folder, model, hardware.limits.max_model_len, vocab)
    command = ["serve", str(folder), "--host", host, "--port", str(port)]
    command += ["--served-model-name", name, *further]
    if tokenizer is not None:
        command += ["--tokenizer", tokenizer]
    release = installed_vllm()
    named = Path(tempfile.gettempdir()) / f"twinserve-{os.getuid()}-vllm-{release}"
    paths = [str(named_vllm(named)), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.execv(VLLM[0], [*VLLM, *command])
