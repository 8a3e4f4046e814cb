"""A Profile from a Measurement: fitted step times, the engine's own sizes, measured rates of the
link."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from twinserve.profiles.catalog import GPUS
from twinserve.profiles.forms.bros import SwapTimeModel
from twinserve.profiles.measured.fit import fit_steps
from twinserve.profiles.measured.model import HostTimes, noise_lines
from twinserve.profiles.measured.samples import (
    LEAVING,
    Measurement,
    StepSample,
    by_point,
    calm,
    disturbed,
)
from twinserve.profiles.models.config import read_config
from twinserve.profiles.names import ProfileName
from twinserve.profiles.operators.model import default_capture
from twinserve.profiles.profile import HOST_SWAP_BYTES, Profile
from twinserve.profiles.sampling import relative_nnls
from twinserve.profiles.specs import GpuSpec, ModelSpec, ProfileError, one_line

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_spec(folder: str | Path, name: str | None = None, dtype: str | None = None) -> ModelSpec:
    """Return the model of the config.json in `folder`, named after the folder; dtype: the engine's,
    if it is not the config's. Raises ProfileError for models whose cost a profile cannot hold."""
    folder = Path(folder)
    spec = read_config(folder / "config.json", name or folder.resolve().name.lower())
    return replace(spec, dtype_bytes=_DTYPE_BYTES[dtype]) if dtype in _DTYPE_BYTES else spec


def measured_profile(measurement: Measurement, llm: ModelSpec, name: str | None = None) -> Profile:
    """The profile of the engine that was measured. name: MODEL@DEVICE by default. ProfileError
    if the samples do not fix the tables."""
    from pydantic import ValidationError

    facts = measurement.provenance
    gpu, gpu_note = _device(facts)
    tp = int(facts["tensor_parallel_size"])
    settings = facts["settings"]
    rate, swap_note = _link(measurement)
    graphs = settings["graphs"] and facts["device_type"] == "gpu"
    captured = default_capture(settings["max_num_seqs"]) if graphs else 0
    fitted = fit_steps(measurement.steps, captured)
    fit = replace(fitted.fit, partial=facts.get("partial", ""))
    step_model = replace(fitted, host=_host_times(measurement), fit=fit)
    try:
        return Profile(
            name=name or str(ProfileName(llm.name, gpu.name, tp)),
            llm=llm,
            gpu=gpu,
            tp=tp,
            engine_version=facts["vllm"],
            source="measured",
            fit_error=step_model.fit.errors.get("all"),
            notes=" ".join(
                [_how(facts), *map(_sentence, noise_lines(fit)), gpu_note, swap_note]
            ).strip(),
            step_model=step_model,
            block_tokens=facts["block_tokens"],
            num_gpu_blocks=facts["num_blocks"],
            num_gpu_blocks_source="measured",
            gpu_memory_utilization=min(max(facts["gpu_memory_utilization"], 1e-6), 1.0),
            pcie_bytes_per_s=rate,
            host_swap_bytes=HOST_SWAP_BYTES * tp,
            max_model_len=min(
                settings["max_model_len"], facts["num_blocks"] * facts["block_tokens"]
            ),
            max_num_batched_tokens=settings["max_step_tokens"],
            max_num_seqs=settings["max_num_seqs"],
        )
    except ValidationError as error:
        raise ProfileError(f"the measurements make no profile: {one_line(error)}") from None


def _sentence(line: str) -> str:
    return f"{line[0].upper()}{line[1:]}."


def _how(facts: dict) -> str:
    settings = facts["settings"]
    graphs = "CUDA graphs" if settings["graphs"] else "eager"
    device = facts["device"] + (
        f", {settings['threads']} thread(s)" if facts["device_type"] == "cpu" else f", {graphs}"
    )
    return (
        f"Measured on {facts['date']} on {device}, torch {facts['torch']}, {facts['dtype']}, "
        "synchronous scheduling,"
        f" prefix caching {'on' if settings['prefix_caching'] else 'off'}, {facts['rounds']} "
        "rounds in"
        f" {facts['elapsed_s']:.0f} s, seed {facts['seed']}. fit_error is cross-validated over "
        "points."
    )


def _device(facts: dict) -> tuple[GpuSpec, str]:
    """The catalogued GPU of that name, or one described by what its bare rates were measured to
    be."""
    words = facts["device"].lower().replace("rtx ", "rtx").replace("-", " ").split()
    large = facts["memory_bytes"] > 60e9
    if facts["device_type"] == "gpu":
        for key in (*words, f"a100-{80 if large else 40}g" if "a100" in words else ""):
            spec = GPUS.get(key)
            if spec is not None and abs(spec.memory_bytes / facts["memory_bytes"] - 1) < 0.1:
                return spec, ""
    spec = GpuSpec(
        name="cpu" if facts["device_type"] == "cpu" else "-".join(words),
        family=facts["device_type"],
        peak_flops=facts["matmul_flops"],
        memory_bytes_per_s=facts["memory_bytes_per_s"],
        memory_bytes=facts["memory_bytes"],
        pcie_bytes_per_s=facts["link_bytes_per_s"],
    )
    return (
        spec,
        "The gpu's rates are those of a matrix product and of plain copies on this machine, no "
        "data sheet's.",
    )


def _link(measurement: Measurement) -> tuple[float, str]:
    """bytes/s of KV over the link, and what that number is."""
    swaps = [s for s in measurement.swaps if s.nbytes and s.seconds > 0]
    sizes = sorted({s.nbytes for s in swaps})
    if len(sizes) >= 2:
        medians = [np.median([s.seconds for s in swaps if s.nbytes == size]) for size in sizes]
        model = SwapTimeModel.fit(np.array(sizes), np.array(medians))
        rate = 1.0 / model.seconds_per_byte
        return (
            rate,
            f"Swapping: {len(swaps)} transfers measured, {model.base_s * 1e6:.0f} us + bytes at "
            "the given rate.",
        )
    why = measurement.provenance.get("swap") or "too few transfers"
    rate = measurement.provenance["link_bytes_per_s"]
    return rate, f"Swapping was not measured ({why}); pcie_bytes_per_s is that of a plain copy."


def _host_times(measurement: Measurement) -> HostTimes | None:
    steps = [s for s in measurement.steps if np.isfinite(s.exec_s)]
    steps = calm(steps) or steps
    if not steps:
        return None
    # medians of points, so that one delayed step does not tilt the line
    points = [p for p in by_point(steps).values() if p[0].kind != LEAVING]
    rows = np.array([p[0].work.decode_requests + len(p[0].work.prefill_new) for p in points], float)
    host = np.array([np.median([s.seconds - s.exec_s for s in p]) for p in points])
    (step_s, request_s), _ = relative_nnls(
        np.column_stack([np.ones(len(rows)), rows]), np.maximum(host, 1e-9)
    )
    facts = measurement.provenance
    return HostTimes(
        step_s=float(step_s),
        request_s=float(request_s),
        empty_s=facts["empty_s"],
        submit_s=facts["submit_s"],
        leave_s=_leave_seconds(measurement.steps),
        first_s=_first_seconds(steps),
        loop_s=facts.get("loop_s", 0.0),
    )


def _leave_seconds(steps: list[StepSample]) -> float:
    """Samples of kind "leaving" come in pairs: a step, and the next one, in which all its requests
    end."""
    leaving = [s for s in steps if s.kind == LEAVING]
    if not leaving:
        return 0.0
    pairs = list(zip(leaving[::2], leaving[1::2], strict=True))
    noisy = disturbed(leaving).reshape(-1, 2).any(axis=1)
    pairs = [pair for pair, flag in zip(pairs, noisy, strict=True) if not flag] or pairs
    return max(
        float(np.median([(b.seconds - a.seconds) / b.work.decode_requests for a, b in pairs])), 0.0
    )


def _first_seconds(steps: list[StepSample]) -> float:
    extra = []
    for of_point in by_point([s for s in steps if len(s.work.prefill_new)]).values():
        first, later = ([s.seconds for s in of_point if s.first is flag] for flag in (True, False))
        if first and later:
            extra.append(np.median(first) - np.median(later))
    return max(float(np.median(extra)), 0.0) if extra else 0.0
