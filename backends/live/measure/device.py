"""What the engine runs on: names and versions, and rates of a device that no catalogue has."""

import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path

from twinserve.backends.live.versions import installed_vllm


def describe_machine() -> dict:
    """Versions, device name, memory (bytes), cores, load and date."""
    import torch

    facts = {
        "vllm": installed_vllm(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        return facts | {
            "device": device.name,
            "device_type": "gpu",
            "memory_bytes": device.total_memory,
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return facts | {"device": cpu_name(), "device_type": "cpu", "memory_bytes": memory}


def bare_rates() -> dict[str, float]:
    """Return the best of five: FLOP/s of a matrix product; bytes/s of a copy in memory (read and
    written); and bytes/s of a copy between host and device (on a CPU: in memory)."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    size = 8192 if gpu else 768
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    big = torch.empty((1 << 30) if gpu else (32 << 20), dtype=torch.uint8, device=device)
    host = torch.empty((256 << 20) if gpu else (32 << 20), dtype=torch.uint8, pin_memory=gpu)
    other, away = torch.empty_like(big), torch.empty_like(host, device=device, pin_memory=False)
    return {
        "matmul_flops": 2.0 * size**3 / _best(lambda: a @ a, gpu),
        "memory_bytes_per_s": 2.0 * big.numel() / _best(lambda: other.copy_(big), gpu),
        "link_bytes_per_s": host.numel() / _best(lambda: away.copy_(host, non_blocking=True), gpu),
    }


def _best(call, gpu: bool) -> float:
    import torch

    seconds = []
    for _ in range(5):
        if gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def cpu_name() -> str:
    """Return the CPU's name, or else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
