"""Times of single kernels on one GPU: the terms that step-time models are made of.

    python -m twinserve.experiments.campaign.operators OUT [--limit SECONDS] [--only gemm,decode]

Matrix products and memory need PyTorch alone; attention is FlashAttention 3 of vLLM's CUDA build on
paged KV, and is left out without it.
Stages run in the order of their worth and stop at the limit. Each row of OUT/operators.csv is
written as soon as it is measured; OUT/card.json says what the card is and how each stage ended.

Calls are captured into a CUDA graph and replayed. Weights and KV change from call to call, so that
together they exceed the L2 cache: a decode step finds none of them there, either. `--cpu` runs tiny
sizes without a GPU, to try the code.

Columns: stage, what, T (tokens or batch), n, k (sizes, named in `what`), extra, us, us10, us90,
tflops and gbs. `us` is the median of the replays of one call (microseconds), us10 and us90 are
percentiles; tflops and gbs are 10^12 operations and 10^9 bytes a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F

from twinserve.experiments.campaign.bench import Bench

# hidden, intermediate, heads, KV heads, head size, vocabulary
MODELS = {
    "llama-3.1-8b": (4096, 14336, 32, 8, 128, 128256),
    "qwen2.5-14b": (5120, 13824, 40, 8, 128, 152064),
    "qwen3-32b": (5120, 25600, 64, 8, 128, 151936),
    "llama-3.1-70b": (8192, 28672, 64, 8, 128, 128256),
}
# heads, KV heads, head size of one rank
HEADS = ((32, 8, 128), (40, 8, 128), (64, 8, 128), (16, 2, 128), (8, 1, 128), (64, 8, 64))
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
BLOCK = 16  # tokens of a KV block


def _tokens(bench: Bench) -> tuple[int, ...]:
    return (1, 16) if bench.cpu else TOKENS


def products() -> list[tuple[str, int, int]]:
    """(names, n, k) of every matrix product of MODELS at TP 1 to 8, each shape once."""
    seen: dict[tuple[int, int], list[str]] = {}
    for name, (hidden, inner, heads, kv, size, vocabulary) in MODELS.items():
        for tp in (1, 2, 4, 8):
            if name == "llama-3.1-70b" and tp == 1:
                continue
            for what, n, k in (
                ("qkv", (heads + 2 * kv) * size // tp, hidden),
                ("o", hidden, heads * size // tp),
                ("gate_up", 2 * inner // tp, hidden),
                ("down", hidden, inner // tp),
                ("head", vocabulary // tp, hidden),
            ):
                seen.setdefault((n, k), []).append(f"{name}:tp{tp}:{what}")
    return [(" ".join(names), n, k) for (n, k), names in seen.items()]


def gemm(bench: Bench) -> None:
    """y = x w^T in bf16, as torch.nn.functional.linear computes it: T x k by n x k."""
    for names, n, k in products()[: 2 if bench.cpu else None]:
        weights = bench.copies(lambda n=n, k=k: bench.randn(n, k) * 0.02, 2 * n * k)
        for tokens in _tokens(bench):
            if ":head" in names and tokens > 512:
                continue
            x = bench.randn(tokens, k)
            calls = [lambda w=w, x=x: F.linear(x, w) for w in weights]
            nbytes = 2.0 * (n * k + tokens * (n + k))
            bench.row("gemm", names, tokens, n, k, "bf16", calls, 2.0 * tokens * n * k, nbytes)


def _attend(bench: Bench, flash, heads, kv, size, new, context, batch, pool):
    """Calls of attention: each of `batch` requests has `new` query tokens after `context` of KV."""
    total = new + context
    blocks = -(-total // BLOCK)
    keys, values = pool
    query = bench.randn(batch * new, heads, size)
    starts = torch.arange(0, batch * new + 1, new, device=bench.device, dtype=torch.int32)
    used = torch.full((batch,), total, device=bench.device, dtype=torch.int32)
    out = torch.empty_like(query)
    many = max(1, min(16, len(keys) // (blocks * batch)))  # so that calls find other KV
    picked = torch.randperm(len(keys), device=bench.device, dtype=torch.int32)
    tables = picked[: many * blocks * batch].view(many, batch, blocks)
    return [
        lambda table=table: flash(
            query, keys, values, max_seqlen_q=new, cu_seqlens_q=starts, max_seqlen_k=total,
            seqused_k=used, block_table=table, causal=True, out=out, fa_version=3,
            num_splits=32 if new == 1 else 0,
        )
        for table in tables
    ]  # fmt: skip


def flash3():
    """vLLM's function for paged KV. Raises what an import raises, or RuntimeError without it."""
    from vllm.vllm_flash_attn import flash_attn_interface as interface

    if not interface.FA3_AVAILABLE:
        raise RuntimeError(f"FlashAttention 3 is unavailable: {interface.FA3_UNAVAILABLE_REASON}")
    return interface.flash_attn_varlen_func


def decode(bench: Bench) -> None:
    """One query token a request on paged KV: T requests of `k` tokens of context."""
    flash = flash3()
    for heads, kv, size in HEADS:
        page = BLOCK * kv * size
        pool = [bench.randn(2 * 10**9 // page, BLOCK, kv, size) for _ in range(2)]
        for context in (128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072):
            for batch in (1, 4, 16, 32, 64, 128, 256):
                if batch * (context // BLOCK + 1) > len(pool[0]):
                    continue
                calls = _attend(bench, flash, heads, kv, size, 1, context, batch, pool)
                bench.row(
                    "decode", f"{heads}/{kv} heads of {size}", batch, heads, context,
                    f"flash 3, blocks of {BLOCK}", calls, 4.0 * heads * size * batch * context,
                    4.0 * kv * size * batch * context,
                )  # fmt: skip


def prefill(bench: Bench) -> None:
    """Causal attention of one prompt's T tokens after `k` tokens of context, and of several."""
    flash = flash3()
    alone = [(t, 0) for t in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)]
    after = [(t, p) for t in (128, 512, 2048, 8192) for p in (2048, 8192, 32768)]
    for heads, kv, size in HEADS:
        name = f"{heads}/{kv} heads of {size}"
        page = BLOCK * kv * size
        pool = [bench.randn(10**9 // page, BLOCK, kv, size) for _ in range(2)]
        several = [(512, 0, 4), (512, 0, 16), (2048, 0, 4)]
        for tokens, prefix, batch in [*((t, p, 1) for t, p in alone + after), *several]:
            calls = _attend(bench, flash, heads, kv, size, tokens, prefix, batch, pool)[:4]
            flops = 4.0 * heads * size * batch * (tokens * tokens / 2 + tokens * prefix)
            bench.row(
                "prefill", name, tokens, heads, prefix, f"flash 3, {batch} prompts", calls, flops
            )


def bandwidth(bench: Bench) -> None:
    """Reads, copies and gathers of pages, by size."""
    for mib in (1,) if bench.cpu else (1, 4, 16, 64, 256, 1024):
        n = mib * 2**19
        xs = bench.copies(lambda n=n: bench.randn(n), 2 * n)
        y = torch.empty_like(xs[0])
        extra = f"{mib} MiB"
        sums = [lambda x=x: x.sum() for x in xs]
        bench.row("bandwidth", "read (sum)", 0, n, 0, extra, sums, nbytes=2.0 * n)
        moves = [lambda x=x, y=y: y.copy_(x) for x in xs]
        bench.row("bandwidth", "copy", 0, n, 0, extra, moves, nbytes=4.0 * n)
        pages = [x.view(-1, 2048) for x in xs]  # 4 KiB: 16 tokens of a head of 128 in 16 bits
        order = torch.randperm(len(pages[0]), device=bench.device)
        picks = [lambda p=p, order=order: p.index_select(0, order) for p in pages]
        bench.row("bandwidth", "gather of 4 KiB pages", 0, n, 0, extra, picks, nbytes=4.0 * n)


def clock(bench: Bench) -> None:
    """Products of 8,192 for a minute: the rate and the clock of each second."""
    n = 64 if bench.cpu else 8192
    a, b = bench.randn(n, n), bench.randn(n, n)
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    for second in range(1 if bench.cpu else 60):
        extra = ""
        if not bench.cpu:
            command = ["nvidia-smi", query, "--format=csv,noheader"]
            extra = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        bench.row(
            "clock", f"second {second}", n, n, n, extra, [lambda: a @ b], 2.0 * n**3,
            target_us=9e5, most=1000, replays=1, graph=False,
        )  # fmt: skip


STAGES = (bandwidth, gemm, decode, prefill, clock)
ON_GPU = (decode, prefill)  # kernels that a CPU does not have


def card(cpu: bool) -> dict:
    """What the device is, as the driver says it."""
    found: dict = {"torch": torch.__version__, "cuda": torch.version.cuda, "cpus": os.cpu_count()}
    if not cpu:
        found["name"] = torch.cuda.get_device_name()
        found["free and total bytes"] = torch.cuda.mem_get_info()
        smi = subprocess.run(["nvidia-smi"], capture_output=True, text=True)
        found["nvidia-smi"] = smi.stdout
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds (default 240)")
    parser.add_argument("--only", default="", help="names of stages, joined by commas")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes, without a GPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.out, options.limit, options.cpu)
    found = {**card(options.cpu), "stages": {}, "not captured": bench.not_captured}
    for stage in STAGES:
        if options.only and stage.__name__ not in options.only.split(","):
            continue
        if options.cpu and stage in ON_GPU:
            continue
        told = bench.run(stage)
        if not options.cpu:
            torch.cuda.empty_cache()
        found["stages"][stage.__name__] = told
        (options.out / "card.json").write_text(json.dumps(found, indent=1))
        print(stage.__name__, told, flush=True)


if __name__ == "__main__":
    main()
