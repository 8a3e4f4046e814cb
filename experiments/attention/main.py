"""Measure the bidirectional attention kernels on a GPU: right against the reference, then how fast.

    python -m twinserve.experiments.attention --out DIR [--time-limit 600] [--tune]

Needs torch and Triton; where vLLM is installed its own kernels run beside ours, on forward blocks.
Writes DIR/attention_kernel.json after every case. Without a GPU: `--dry-run` with
TRITON_INTERPRET=1 goes through everything in tiny sizes (its times mean nothing), and `--compile
90` compiles the kernels for a Hopper GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from twinserve.formats import Format, same, whole_file

KERNELS: Format[dict] = Format(
    "kernel timings",
    version=1,
    by="python -m twinserve.experiments.attention --out DIR",
    upgrades=(same,),
)


BLOCK = 16  # tokens, when timing
MAX_GIB = 40.0  # of KV of a case


@dataclass(frozen=True)
class Shape:
    """Attention of one layer."""

    name: str
    heads: int
    kv_heads: int
    head: int


@dataclass(frozen=True)
class Sizes:
    """What is measured: prompts of `prefill` tokens; decode batches of `batches` requests with
    `contexts` tokens each, as far as their KV fits in MAX_GIB; mixed: (decodes, their context,
    new tokens of one prompt, tokens before it)."""

    shapes: tuple[Shape, ...]
    prefill: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    mixed: tuple[tuple[int, int, int, int], ...]
    checks: int
    repeat_s: float = 0.1


FULL = Sizes(
    (
        Shape("llama-3.1-8b", 32, 8, 128),
        Shape("qwen2.5-14b", 40, 8, 128),
        Shape("head-64", 16, 4, 64),
    ),
    (128, 512, 2048, 8192, 16384),
    (1, 8, 32, 128, 256),
    (128, 1024, 4096, 16384),
    ((32, 2048, 512, 0), (128, 2048, 2048, 0), (64, 8192, 2048, 6144)),
    checks=24,
)
TINY = Sizes(
    (Shape("tiny", 4, 2, 16),), (20,), (1, 2), (40,), ((2, 20, 18, 4),), checks=2, repeat_s=0.0
)


class Report:
    """results: what is written. Every addition rewrites the file as a whole, so it is readable at
    any time."""

    def __init__(self, folder: Path, limit_s: float, **about) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "attention_kernel.json"
        parts: dict = {"complete": False, "checks": [], "times": [], "tuning": []}
        self.results: dict = KERNELS.numbered({**about, **parts})
        self._end = time.monotonic() + limit_s
        self.write()

    @property
    def out_of_time(self) -> bool:
        return time.monotonic() > self._end

    def add(self, part: str, **row) -> None:
        self.results[part].append(row)
        print(part, json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        with whole_file(self.path) as partial:
            partial.write_text(json.dumps(self.results, indent=1))


# -- right -----------------------------------------------------------------------------------------
def check(report: Report, sizes: Sizes, device) -> int:
    """Random batches over shared blocks, every slot that is not the sequence's own NaN. Returns how
    many were wrong."""
    import torch

    from twinserve.backends.live.attention import launch
    from twinserve.backends.live.attention.cache import split_cache
    from twinserve.experiments.attention.batches import LAYOUTS, make_batch

    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (device.type == "cuda")
    allowed = {torch.float16: 4e-3, torch.float32: 1e-4, torch.bfloat16: 3e-2}
    wrong = 0

    def there(array):
        return None if array is None else torch.from_numpy(array).to(device)

    for number in range(sizes.checks):
        shape = sizes.shapes[number % len(sizes.shapes)]
        dtype, layout = dtypes[number // 2 % len(dtypes)], LAYOUTS[number // 3 % len(LAYOUTS)]
        block, group = (16, 32)[number % 2], shape.heads // shape.kv_heads
        kinds = {"partial": number % 4 >= 2, "decodes_only": number % 8 == 7}
        size = shape.kv_heads, group, shape.head, dtype
        batch = make_batch(number, 4, block, *size, longest=70, layout=layout, **kinds)
        keys, values = split_cache(batch.kv_cache.to(device), shape.head)
        arrays = there(batch.table), there(batch.lengths), there(batch.query_start)
        splits, decodes = (1, 4)[number % 2], int((batch.new == 1).sum())
        step = launch.Batch(*arrays, len(batch.query), decodes, splits, there(batch.first))
        out = torch.full_like(batch.query, torch.nan, device=device)
        launch.store(batch.key.to(device), batch.value.to(device), keys, values, step)
        launch.attend(out, batch.query.to(device), keys, values, step, batch.scale)
        expected = batch.answer(keys.cpu(), values.cpu())
        error = float((out.cpu().float() - expected).abs().max())
        fine = bool(error <= allowed[dtype])  # NaN is not
        wrong += not fine
        of = {"shape": shape.name, "dtype": str(dtype), "layout": layout, "block": block}
        seen = {"max_error": error, "allowed": allowed[dtype], "fine": fine}
        report.add("checks", number=number, **of, **kinds, shared_blocks=batch.shared, **seen)
    return wrong


# -- fast ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens, the last new[i] of them to compute."""

    kind: str
    shape: Shape
    lengths: tuple[int, ...]
    new: tuple[int, ...]

    def kv_bytes(self, element: int) -> int:
        return 2 * sum(self.lengths) * self.shape.kv_heads * self.shape.head * element

    def flops(self) -> int:
        pairs = sum(
            n * (2 * length - n + 1) // 2 for length, n in zip(self.lengths, self.new, strict=True)
        )
        return 4 * self.shape.heads * self.shape.head * pairs


def cases(sizes: Sizes) -> Iterator[Case]:
    for shape in sizes.shapes:
        for batch, context in itertools.product(sizes.batches, sizes.contexts):
            yield Case("decode", shape, (context,) * batch, (1,) * batch)
        for tokens in sizes.prefill:
            yield Case("prefill", shape, (tokens,), (tokens,))
        for decodes, context, tokens, before in sizes.mixed:
            yield Case(
                "mixed", shape, (*(context,) * decodes, before + tokens), (*(1,) * decodes, tokens)
            )


class Run:
    """A case's tensors on the device. The same KV serves all layouts of its blocks: none, half or
    all backward, or blocks left early (every second one holds three quarters of its slots)."""

    def __init__(self, case: Case, device, dtype) -> None:
        import torch

        block = BLOCK
        self.case, self.device = case, device
        shape = case.shape
        lengths = np.asarray(case.lengths)
        self.width = int(-(-lengths.max() * 8 // (7 * block))) + 2
        need = np.maximum(1, -(-lengths * 8 // (7 * block)) + 2)
        rng = np.random.default_rng(0)
        pool = rng.permutation(int(need.sum()))
        self.blocks = np.zeros((len(lengths), self.width), np.int64)
        for i, (end, count) in enumerate(zip(np.cumsum(need), need, strict=True)):
            self.blocks[i, :count] = pool[end - count : end]
        self.num_blocks = len(pool)
        torch.manual_seed(0)
        size = (self.num_blocks, 2, block, shape.kv_heads, shape.head)
        cache = torch.empty(size, device=device, dtype=dtype).normal_()
        self.keys, self.values = cache[:, 0], cache[:, 1]
        start = np.concatenate([[0], np.cumsum(case.new)])
        self.query = torch.empty(
            (int(start[-1]), shape.heads, shape.head), device=device, dtype=dtype
        ).normal_()
        self.out = torch.empty_like(self.query)
        self.lengths = torch.from_numpy(lengths).to(device, torch.int32)
        self.start = torch.from_numpy(start).to(device, torch.int32)
        self.scale = shape.head**-0.5

    def batch(self, layout: str):
        import torch

        from twinserve.backends.live.attention import launch, slots

        rng = np.random.default_rng(1)
        backward = {"half": rng.random(self.blocks.shape) < 0.5}.get(
            layout, np.full(self.blocks.shape, layout == "backward")
        )
        table = slots.entries_of(self.blocks, backward)
        first = None
        if layout == "partial":
            counts = np.full(2 * self.num_blocks, BLOCK, np.int32)
            counts[self.num_blocks // 2 : self.num_blocks] = BLOCK * 3 // 4
            room = np.empty((len(table), self.width + 1), np.int32)
            first = torch.from_numpy(slots.first_positions(table, counts, room)).to(self.device)
        decodes = sum(n == 1 for n in self.case.new)
        splits = launch.splits_for(
            decodes, self.case.shape.kv_heads, max(self.case.lengths), self.device
        )
        return launch.Batch(
            torch.from_numpy(table).to(self.device),
            self.lengths,
            self.start,
            len(self.query),
            decodes,
            splits,
            first,
        )

    def ours(self, layout: str, **tuning) -> Callable[[], None]:
        from twinserve.backends.live.attention import launch

        batch = self.batch(layout)
        return lambda: launch.attend(
            self.out, self.query, self.keys, self.values, batch, self.scale, **tuning
        )


def measure(run: Callable[[], None], device, repeat_s: float) -> dict[str, float]:
    """median_us and the quartiles on the device, replayed as a CUDA graph; host_us: what a call
    costs the host. On a CPU all are the host's."""
    started = time.perf_counter()
    run()
    if device.type != "cuda":
        took_us = (time.perf_counter() - started) * 1e6
        return {"median_us": took_us, "host_us": took_us}
    import torch
    from triton.testing import do_bench

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # graphs are captured on a stream that has run the kernels before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    quartiles = [0.25, 0.5, 0.75]
    times_ms = do_bench(graph.replay, rep=int(repeat_s * 1000), quantiles=quartiles)
    calls = 20
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    host_s = (time.perf_counter() - started) / calls
    torch.cuda.synchronize()
    low, median, high = (1e3 * t for t in times_ms)
    return {"median_us": median, "low_us": low, "high_us": high, "host_us": host_s * 1e6}


def time_all(report: Report, sizes: Sizes, device, dtype) -> None:
    from twinserve.experiments.attention.stock import stock_kernels

    stock, missing = stock_kernels() if device.type == "cuda" else ({}, {"all": "no GPU"})
    report.results["stock_missing"] = missing
    for case in cases(sizes):
        if report.out_of_time:
            return
        if case.kv_bytes(dtype.itemsize) > MAX_GIB * 2**30:
            report.add("times", **about(case), skipped=f"KV above {MAX_GIB} GiB")
            continue
        held = Run(case, device, dtype)
        kinds = {f"ours_{layout}": held.ours(layout) for layout in ("forward", "half", "partial")}
        longest = max(case.lengths), max(case.new)
        for name, prepare in stock.items():
            tensors = held.out, held.query, held.keys, held.values, held.batch("forward")
            kinds[name] = prepare(*tensors, *longest, held.scale)
        for name, run in kinds.items():
            report.add("times", **about(case), kernel=name, **_timed(case, run, held, sizes))


def _timed(case: Case, run: Callable[[], None], held: Run, sizes: Sizes) -> dict:
    try:
        figures = measure(run, held.device, sizes.repeat_s)
    except Exception as error:  # noqa: BLE001 - the other kernels are still worth their time
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    seconds = figures["median_us"] / 1e6
    return {
        **{name: round(value, 2) for name, value in figures.items()},
        "kv_gb_per_s": round(case.kv_bytes(held.keys.itemsize) / seconds / 1e9, 1),
        "tflops": round(case.flops() / seconds / 1e12, 2),
    }


def about(case: Case) -> dict:
    return {
        "kind": case.kind,
        "shape": case.shape.name,
        "sequences": len(case.lengths),
        "context": max(case.lengths),
        "new_tokens": sum(case.new),
    }


def tune(report: Report, sizes: Sizes, device, dtype) -> None:
    """Other tile sizes, warps and stages, on the longest prompt and the middle of the decode
    table."""
    from twinserve.backends.live.attention.launch import DECODE, PREFILL

    shape = sizes.shapes[0]
    prompt = min(8192, sizes.prefill[-1])
    context, width = sizes.contexts[-1], sizes.batches[len(sizes.batches) // 2]
    prefill = Case("prefill", shape, (prompt,), (prompt,))
    decode = Case("decode", shape, (context,) * width, (1,) * width)
    grids = {
        "prefill": (prefill, PREFILL, ((64, 128), (32, 64, 128), (4, 8), (2, 3))),
        "decode": (decode, DECODE, ((16,), (32, 64, 128), (2, 4, 8), (2, 3, 4))),
    }
    for which, (case, start, grid) in grids.items():
        held = Run(case, device, dtype)
        for rows, tile, warps, stages in itertools.product(*grid):
            if report.out_of_time:
                return
            tuning = replace(start, rows=rows, tile=tile, warps=warps, stages=stages)
            # too much shared memory, say, fails; the next may do
            found = _timed(case, held.ours("half", **{which: tuning}), held, sizes)
            report.add("tuning", **about(case), **asdict(tuning), **found)
            if device.type != "cuda":
                break  # one shows that it works


# -- command ---------------------------------------------------------------------------------------
OPTIONS: dict[str, dict] = {
    "--out": {"type": Path, "default": Path("attention_kernel"), "help": "folder for the results"},
    "--time-limit": {"type": float, "default": 540.0, "help": "seconds; no case is begun later"},
    "--shapes": {"nargs": "*", "help": "only these: " + ", ".join(s.name for s in FULL.shapes)},
    "--tune": {"action": "store_true", "help": "other tile sizes instead of timing all cases"},
    "--dry-run": {"action": "store_true", "help": "tiny, on a CPU with TRITON_INTERPRET=1"},
    "--compile": {
        "type": int,
        "metavar": "CC",
        "help": "only compile, for this compute capability",
    },
}


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 if a check failed; 2 if what it needs is missing."""
    parser = argparse.ArgumentParser(prog="attention_kernel", description=__doc__.splitlines()[0])
    for name, how in OPTIONS.items():
        parser.add_argument(name, **how)
    options = parser.parse_args(arguments)
    try:
        import torch
        import triton
    except ImportError as error:
        print(f"{error}: the kernels need torch and triton", file=sys.stderr)
        return 2
    if options.compile:
        from twinserve.experiments.attention.compile import compile_all

        print(*compile_all(options.compile), sep="\n")
        return 0
    sizes = TINY if options.dry_run else FULL
    if options.shapes:
        sizes = replace(sizes, shapes=tuple(s for s in sizes.shapes if s.name in options.shapes))
    wrong = {
        "--dry-run and TRITON_INTERPRET=1 go together": (
            options.dry_run != bool(triton.knobs.runtime.interpret)
        ),
        "torch finds no GPU; --dry-run with TRITON_INTERPRET=1 needs none": (
            not options.dry_run and not torch.cuda.is_available()
        ),
        f"--shapes {options.shapes}: no such shape": not sizes.shapes,
    }
    for said in [said for said, is_wrong in wrong.items() if is_wrong][:1]:
        print(said, file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    name = "CPU interpreter" if options.dry_run else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    about = {"device": name, "versions": versions, "dtype": str(dtype), "block": BLOCK}
    report = Report(options.out, options.time_limit, **about)
    failed = check(report, sizes, device)
    (tune if options.tune else time_all)(report, sizes, device, dtype)
    report.results["complete"] = not report.out_of_time
    report.write()
    if failed:
        print(f"{failed} of {sizes.checks} checks failed", file=sys.stderr)
    return int(failed > 0)
