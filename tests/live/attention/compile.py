"""Compile the attention kernels for a GPU that need not be there: `--compile 90`.

Shows what a CPU's interpreter cannot: that types fit, that the tensor cores are used, that a kernel
keeps to its registers."""

import re
import subprocess
import tempfile

ELEMENT = "bf16"
_TENSORS = ("out", "query", "key", "value", "key_cache", "value_cache")


def compile_all(capability: int) -> list[str]:
    """Compile every kernel in the forms that models of head size 128 use, for compute capability
    `capability` (90: Hopper). A line for each: name, settings, shared memory in bytes, registers a
    thread, bytes of stack (what did not fit into registers).

    Raises RuntimeError where Triton interprets, and whatever Triton raises."""
    import triton

    from twinserve.backends.live.attention import launch, triton_kernel

    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    pre, dec = launch.PREFILL, launch.DECODE
    sizes = {"HEAD": 128, "BLOCK": 16, "PRECISION": "tf32"}
    forms = [(triton_kernel.join_splits, None, {"HEAD": 128, "SPLITS": 16})]
    for partial in (False, True):
        of_heads = {"HEADS": 8, "HEADS_UP": 8, "HEAD": 128, "BLOCK": 16, "PARTIAL": partial}
        forms.append((triton_kernel.store, None, of_heads))
        for group in (4, 5):  # Llama-3.1-8B, Qwen2.5-14B
            common = {**sizes, "GROUP": group, "PARTIAL": partial}
            forms.append((triton_kernel.prefill, pre, common))
            forms += [(triton_kernel.decode, dec, {**common, "SPLITS": n}) for n in (1, 16)]
    lines = []
    for kernel, tuning, constants in forms:
        if tuning is not None:
            constants = {**constants, "ROWS": tuning.rows, "TILE": tuning.tile}
        warps, stages = (4, 2) if tuning is None else (tuning.warps, tuning.stages)
        shared, registers, stack = _compile(kernel, constants, warps, stages, capability)
        of = " ".join(f"{name}={value}" for name, value in constants.items())
        lines.append(
            f"{kernel.fn.__name__} {of} warps={warps} stages={stages}: {shared} bytes shared, "
            f"{registers} registers, {stack} bytes of stack"
        )
    return lines


def _compile(
    kernel, constants: dict, warps: int, stages: int, capability: int
) -> tuple[int, int, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        **dict.fromkeys(_TENSORS, f"*{ELEMENT}"),
        **dict.fromkeys(("part_total", "part_weight", "part_top"), "*fp32"),
        **dict.fromkeys(("table", "first", "seq_lens", "query_start"), "*i32"),
        "scale": "fp32",
    }
    names = [parameter.name for parameter in kernel.params]
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if n.startswith("stride_") or signature[n].startswith("*")
    }
    built = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    return (built.metadata.shared, *_registers(built.asm["cubin"]))


def _registers(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of its stack), as written in the machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    return int(re.search(r"REG:(\d+)", said)[1]), int(re.search(r"STACK:(\d+)", said)[1])
