"""KV tensors of a CPU engine in memory that other processes of this machine can map. One engine
reads the other's cache as a network card would."""

import os
from pathlib import Path

import torch


def share(tensor: torch.Tensor) -> dict:
    """Move the memory of `tensor`, and of all tensors that share it, to where other processes can
    map it. Values stay. Returns what `attach` needs, as JSON values."""
    storage = tensor.untyped_storage()
    fd, size = storage._share_fd_cpu_()
    return {
        "pid": os.getpid(),
        "fd": fd,
        "bytes": size,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }


def alive(about: dict) -> bool:
    """Return whether the process that shares a tensor still runs."""
    return Path(f"/proc/{about['pid']}/fd/{about['fd']}").exists()


def attach(about: dict) -> torch.Tensor:
    """Return the tensor of another process or this one; writes are seen by both. Raises
    FileNotFoundError if that process has gone."""
    if not alive(about):
        raise FileNotFoundError(f"process {about['pid']} and its KV cache have gone")
    dtype = getattr(torch, about["dtype"])
    size = about["bytes"] // dtype.itemsize
    file = f"/proc/{about['pid']}/fd/{about['fd']}"
    try:
        flat = torch.from_file(file, shared=True, size=size, dtype=dtype)
    except RuntimeError as error:
        if alive(about):
            raise
        raise FileNotFoundError(f"process {about['pid']} has just gone") from error
    return flat.as_strided(about["shape"], about["stride"], about["offset"])
