"""Times of single kernels on one GPU: the terms that step-time models are made of.

    python -m twinserve.experiments.campaign.operators OUT [--limit SECONDS] [--only gemm,decode]

Needs PyTorch alone. Where vLLM's CUDA build can be imported, attention is its FlashAttention 3
on paged KV, and norms, rope and cache writes are its kernels; without it attention is PyTorch's.
Stages run in the order of their worth and stop at the limit. Each row of OUT/operators.csv is
written as soon as it is measured; OUT/card.json says what the card is and how each stage ended.

Calls are captured into a CUDA graph and replayed. Weights and KV change from call to call, so that
together they exceed the L2 cache: a decode step finds none of them there, either. `--cpu` runs tiny
sizes without a GPU, to try the code.

Columns: stage, what, T (tokens or batch), n, k (sizes, named in `what`), extra, us (median of the
replays of one call, microseconds), us10 and us90 (percentiles), tflops, gbs (10^12 operations and
10^9 bytes a second).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F

from twinserve.experiments.attention.stock import flash3
from twinserve.experiments.campaign.bench import BF16, Bench

# hidden, intermediate, heads, KV heads, head size, vocabulary
MODELS = {
    "llama-3.1-8b": (4096, 14336, 32, 8, 128, 128256),
    "qwen2.5-14b": (5120, 13824, 40, 8, 128, 152064),
    "qwen3-32b": (5120, 25600, 64, 8, 128, 151936),
    "llama-3.1-70b": (8192, 28672, 64, 8, 128, 128256),
}
# experts, chosen for each token, hidden, intermediate
MIXTURES = {
    "mixtral": (8, 2, 4096, 14336),
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "gpt-oss-120b": (128, 4, 2880, 2880),
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


def fp8(bench: Bench) -> None:
    """The same products in FP8 (e4m3), with a scale for each tensor and one for each row."""
    for names, n, k in products():
        if ":head" in names:
            continue
        weights = bench.copies(
            lambda n=n, k=k: bench.randn(n, k, dtype=torch.half).to(torch.float8_e4m3fn), n * k
        )
        for tokens in (16, 64, 256, 1024, 4096, 16384):
            x = bench.randn(tokens, k, dtype=torch.half).to(torch.float8_e4m3fn)
            whole = torch.ones((), device=bench.device)
            rows = torch.ones(tokens, 1, device=bench.device), torch.ones(1, n, device=bench.device)
            flops, nbytes = 2.0 * tokens * n * k, 1.0 * n * k + tokens * (2.0 * n + k)
            for how, (a, b) in {"per tensor": (whole, whole), "per row": rows}.items():
                if how == "per row" and "llama" not in names:
                    continue
                calls = [
                    lambda w=w, x=x, a=a, b=b: torch._scaled_mm(
                        x, w.t(), scale_a=a, scale_b=b, out_dtype=BF16
                    )
                    for w in weights
                ]
                bench.row("fp8", names, tokens, n, k, f"e4m3 {how}", calls, flops, nbytes)


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
    try:
        flash = flash3()
    except Exception:  # noqa: BLE001 - no vLLM, or one for another machine
        flash = None
    alone = [(t, 0) for t in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)]
    after = [(t, p) for t in (128, 512, 2048, 8192) for p in (2048, 8192, 32768)]
    for heads, kv, size in HEADS if not bench.cpu else ((4, 2, 16),):
        name = f"{heads}/{kv} heads of {size}"
        if flash is None:
            _prefill_of_torch(bench, name, heads, kv, size)
            continue
        page = BLOCK * kv * size
        pool = [bench.randn(10**9 // page, BLOCK, kv, size) for _ in range(2)]
        several = [(512, 0, 4), (512, 0, 16), (2048, 0, 4)]
        for tokens, prefix, batch in [*((t, p, 1) for t, p in alone + after), *several]:
            calls = _attend(bench, flash, heads, kv, size, tokens, prefix, batch, pool)[:4]
            flops = 4.0 * heads * size * batch * (tokens * tokens / 2 + tokens * prefix)
            bench.row(
                "prefill", name, tokens, heads, prefix, f"flash 3, {batch} prompts", calls, flops
            )


def _prefill_of_torch(bench: Bench, name: str, heads: int, kv: int, size: int) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = SDPBackend.MATH if bench.cpu else SDPBackend.FLASH_ATTENTION
    for tokens in (64,) if bench.cpu else (128, 512, 2048, 8192, 32768):
        query = bench.randn(1, heads, tokens, size)
        key, value = (bench.randn(1, kv, tokens, size) for _ in range(2))
        with sdpa_kernel(kernel):
            calls = [
                lambda q=query, k=key, v=value: F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, enable_gqa=True
                )
            ]
            flops = 2.0 * heads * size * tokens * tokens
            bench.row("prefill", name, tokens, heads, 0, "flash 2, 1 prompts", calls, flops)


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


def _chosen(experts: int, top: int, tokens: int, skew: float) -> torch.Tensor:
    """tokens x top experts, drawn without replacement with probabilities of Zipf's law."""
    weights = torch.arange(1, experts + 1, dtype=torch.float64).pow(-skew)
    return torch.multinomial(weights.expand(tokens, -1), top, replacement=False)


def experts(bench: Bench) -> None:
    """Grouped products of mixtures by tokens and by skew, and the gather of their rows."""
    torch.manual_seed(0)
    for name, (count, top, hidden, inner) in MIXTURES.items():
        if bench.cpu:
            count, hidden, inner = max(4, top), 64, 64
        w = bench.randn(count, hidden, 2 * inner) * 0.02
        for tokens in [t for t in _tokens(bench) if t <= 8192]:
            for skew in (0.0, 0.96):
                chosen = _chosen(count, top, tokens, skew).flatten()
                counts = torch.bincount(chosen, minlength=count)
                ends = counts.cumsum(0).to(torch.int32).to(bench.device)
                touched, rows = int((counts > 0).sum()), len(chosen)
                x = bench.randn(rows, hidden)
                bench.row(
                    "experts", f"{name} gate_up", tokens, 2 * inner, hidden,
                    f"zipf {skew} touched {touched} rows {rows}",
                    [lambda x=x, w=w, ends=ends: torch._grouped_mm(x, w, offs=ends)],
                    4.0 * rows * hidden * inner, 4.0 * touched * hidden * inner,
                )  # fmt: skip
            order = torch.randperm(rows, device=bench.device)
            calls = [lambda x=x, order=order: x.index_select(0, order)]
            nbytes = 4.0 * rows * hidden
            bench.row("experts", f"{name} permute", tokens, hidden, top, "", calls, nbytes=nbytes)


def fused_experts(bench: Bench) -> None:
    """A whole layer of experts as vLLM runs it (Triton): align, two products, activation, sum."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts as layer

    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        for name, (count, top, hidden, inner) in MIXTURES.items():
            w1 = bench.randn(count, 2 * inner, hidden) * 0.02
            w2 = bench.randn(count, hidden, inner) * 0.02
            for tokens in (1, 4, 16, 64, 128, 256, 1024, 4096):
                for skew in (0.0, 0.96):
                    chosen = _chosen(count, top, tokens, skew)
                    touched = len(chosen.unique())
                    ids = chosen.to(bench.device, torch.int32)
                    shares = torch.full(ids.shape, 1 / top, device=bench.device)
                    x = bench.randn(tokens, hidden)
                    calls = [lambda x=x, w1=w1, w2=w2, s=shares, ids=ids: layer(x, w1, w2, s, ids)]
                    bench.row(
                        "fused_experts", name, tokens, inner, hidden,
                        f"zipf {skew} touched {touched}", calls,
                        6.0 * tokens * top * hidden * inner, 6.0 * touched * hidden * inner,
                    )  # fmt: skip


def small(bench: Bench) -> None:
    """Norms, rope, activation, cache writes and the sampler's parts."""
    try:
        import vllm._custom_ops  # noqa: F401 - registers the kernels

        own = None if bench.cpu else torch.ops
    except Exception:  # noqa: BLE001 - no vLLM: PyTorch's kernels alone
        own = None
    for sizes in ((4096, 14336, 128256), (8192, 28672, 151936)):
        for tokens in _tokens(bench):
            _small(bench, own, tokens, *sizes)


def _small(bench: Bench, own, tokens: int, hidden: int, inner: int, vocabulary: int) -> None:
    x, rest = bench.randn(tokens, hidden), bench.randn(tokens, hidden)
    weight = torch.ones(hidden, device=bench.device, dtype=BF16)

    def row(what, n, extra, call, **how) -> None:
        bench.row("small", what, tokens, n, 0, extra, [call], **how)

    row("rms norm", hidden, "torch", lambda: F.rms_norm(x, (hidden,), weight))
    row("residual add", hidden, "torch", lambda: x.add(rest))
    if own is not None:
        norm = own._C.fused_add_rms_norm
        row("fused add, rms norm", hidden, "vllm", lambda: norm(x, rest, weight, 1e-5))
        _rope_and_write(bench, row, own, tokens, hidden // 128)
    if tokens <= 4096:
        both, out = bench.randn(tokens, 2 * inner), bench.randn(tokens, inner)
        if own is not None:
            row("silu and multiply", inner, "vllm", lambda: own._C.silu_and_mul(out, both))
        gate, up = both[:, :inner], both[:, inner:]
        row("silu and multiply", inner, "torch, two kernels", lambda: F.silu(gate) * up)
    if tokens <= 512:
        _sampler(bench, row, tokens, vocabulary)


def _rope_and_write(bench: Bench, row, own, tokens: int, heads: int) -> None:
    kv, size = 8, 128
    positions = torch.arange(tokens, device=bench.device)
    q, k, v = (bench.randn(tokens, h * size) for h in (heads, kv, kv))
    turns = bench.randn(65536, size)
    row(
        "rope", heads, "vllm",
        lambda: own._C.rotary_embedding(positions, q, k, size, turns, True),
    )  # fmt: skip
    pool = [bench.randn(65536 // BLOCK, BLOCK, kv, size) for _ in range(2)]
    slots = torch.randperm(65536, device=bench.device)[:tokens]
    scale = torch.ones((), device=bench.device)
    k3, v3 = k.view(tokens, kv, size), v.view(tokens, kv, size)
    write = own._C_cache_ops.reshape_and_cache_flash
    row("kv write", kv, "vllm", lambda: write(k3, v3, *pool, slots, "auto", scale, scale))


def _sampler(bench: Bench, row, tokens: int, vocabulary: int) -> None:
    logits = bench.randn(tokens, vocabulary, dtype=torch.float32)

    def top_p() -> torch.Tensor:
        ordered, places = logits.sort(dim=-1)
        masked = ordered.softmax(-1).cumsum(-1) <= 0.1
        return logits.scatter(-1, places, ordered.masked_fill(masked, -math.inf))

    def draw() -> torch.Tensor:
        shares = logits.softmax(-1, dtype=torch.float32)
        return shares.div_(torch.empty_like(shares).exponential_()).argmax(-1)

    row("argmax of logits", vocabulary, "fp32", lambda: logits.argmax(-1))
    row("draw from logits", vocabulary, "fp32", draw, graph=False, replays=3)
    row("sort of logits", vocabulary, "fp32", lambda: logits.sort(-1), graph=False, replays=3)
    row("top-p of logits", vocabulary, "fp32", top_p, graph=False, replays=3)


def launches(bench: Bench) -> None:
    """Kernels that do next to nothing, eager and in a graph."""
    x = torch.zeros(1, device=bench.device)
    for count in (10,) if bench.cpu else (100, 1000):

        def many(count: int = count) -> None:
            for _ in range(count):
                x.add_(1)

        what = f"{count} tiny kernels"
        bench.row("launches", what, 0, count, 0, "eager", [many], graph=False)
        bench.row("launches", what, 0, count, 0, "in a graph", [many], target_us=1.0)


def transfers(bench: Bench) -> None:
    """Host to device and back, by size; pinned and pageable host memory."""
    for kib in (64,) if bench.cpu else (16, 64, 256, 1024, 4096, 16384, 65536, 262144):
        for kind in ("pinned", "pageable"):
            pin = kind == "pinned" and not bench.cpu
            host = torch.empty(kib * 1024, dtype=torch.uint8, pin_memory=pin)
            device = torch.empty(kib * 1024, dtype=torch.uint8, device=bench.device)
            for what, to, source in (("to device", device, host), ("to host", host, device)):
                call = lambda to=to, source=source: to.copy_(source, non_blocking=True)  # noqa: E731
                how = {"graph": False, "target_us": 500.0, "nbytes": 1024.0 * kib}
                bench.row("transfers", what, 0, kib * 1024, 0, kind, [call], **how)


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


STAGES = (
    bandwidth, gemm, decode, prefill, launches, small, experts, fused_experts, fp8, transfers, clock
)  # fmt: skip
ON_GPU = (decode, fused_experts, fp8)  # kernels that a CPU does not have


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
