"""Check the bidirectional attention kernels on a GPU against the reference.

    python -m tests.live.attention --out DIR

Needs torch and Triton. Writes DIR/attention_kernel.json. Without a GPU: `--dry-run` with
TRITON_INTERPRET=1 checks tiny sizes, and `--compile 90` compiles the kernels for a Hopper GPU.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twinserve.formats import whole_file


@dataclass(frozen=True)
class Shape:
    """Attention of one layer."""

    name: str
    heads: int
    kv_heads: int
    head: int


FULL = (
    Shape("llama-3.1-8b", 32, 8, 128),
    Shape("qwen2.5-14b", 40, 8, 128),
    Shape("head-64", 16, 4, 64),
)
TINY = (Shape("tiny", 4, 2, 16),)
CHECKS = {FULL: 24, TINY: 2}


def checks(shapes: tuple[Shape, ...], device) -> Iterator[dict]:
    """Random batches over shared blocks, every slot that is not the sequence's own NaN: a row
    each, with its largest error and whether that is `fine`."""
    import torch

    from tests.live.attention.batches import LAYOUTS, make_batch
    from twinserve.backends.live.attention import launch
    from twinserve.backends.live.attention.cache import split_cache

    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (device.type == "cuda")
    allowed = {torch.float16: 4e-3, torch.float32: 1e-4, torch.bfloat16: 3e-2}

    def there(array):
        return None if array is None else torch.from_numpy(array).to(device)

    for number in range(CHECKS[shapes]):
        shape = shapes[number % len(shapes)]
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
        of = {"shape": shape.name, "dtype": str(dtype), "layout": layout, "block": block}
        seen = {"max_error": error, "allowed": allowed[dtype], "fine": fine}
        yield {"number": number, **of, **kinds, "shared_blocks": batch.shared, **seen}


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0; 1 if a check failed; 2 if what it needs is missing."""
    parser = argparse.ArgumentParser(prog="attention_kernel", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, default=Path("attention_kernel"), help="folder for the results")
    add("--dry-run", action="store_true", help="tiny, on a CPU with TRITON_INTERPRET=1")
    add("--compile", type=int, metavar="CC", help="only compile, for this compute capability")
    options = parser.parse_args(arguments)
    try:
        import torch
        import triton
    except ImportError as error:
        print(f"{error}: the kernels need torch and triton", file=sys.stderr)
        return 2
    if options.compile:
        from tests.live.attention.compile import compile_all

        print(*compile_all(options.compile), sep="\n")
        return 0
    wrong = {
        "--dry-run and TRITON_INTERPRET=1 go together": (
            options.dry_run != bool(triton.knobs.runtime.interpret)
        ),
        "torch finds no GPU; --dry-run with TRITON_INTERPRET=1 needs none": (
            not options.dry_run and not torch.cuda.is_available()
        ),
    }
    for said in [said for said, is_wrong in wrong.items() if is_wrong][:1]:
        print(said, file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    name = "CPU interpreter" if options.dry_run else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    rows = []
    for row in checks(TINY if options.dry_run else FULL, device):
        print(json.dumps(row), flush=True)
        rows.append(row)
    report = {"device": name, "versions": versions, "checks": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    with whole_file(options.out / "attention_kernel.json") as partial:
        partial.write_text(json.dumps(report, indent=1))
    failed = sum(not row["fine"] for row in rows)
    if failed:
        print(f"{failed} of {len(rows)} checks failed", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
