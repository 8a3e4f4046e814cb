"""The Triton kernels without a GPU: run by Triton's interpreter, and compiled for one."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.live]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            if os.environ.get("TWINSERVE_REQUIRE_LIVE"):
                pytest.fail(f"{name} is not installed (TWINSERVE_REQUIRE_LIVE is set)")
            pytest.skip(f"{name} is not installed")


def run(*arguments: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_kernels_in_the_interpreter():
    said = run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/live/attention_kernel_cases.py",
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert int(re.search(r"(\d+) passed", said)[1]) >= 20
    assert "skipped" not in said


@pytest.mark.nightly
def test_the_kernels_compile_for_a_gpu(tmp_path):
    """To machine code of a Hopper GPU, by Triton and its own assembler; needs no GPU."""
    said = run(
        "-m", "tests.live.attention", "--compile", "90",
        TRITON_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    built = [line for line in said.splitlines() if line.endswith(" bytes of stack")]
    assert len(built) >= 8
    assert all(line.endswith(" 0 bytes of stack") for line in built if "join_splits" not in line)


def test_the_checks_go_through_in_tiny_sizes(tmp_path):
    run(
        "-m", "tests.live.attention", "--dry-run", "--out", str(tmp_path),
        TRITON_INTERPRET="1",
    )  # fmt: skip
    checks = json.loads((tmp_path / "attention_kernel.json").read_text())["checks"]
    assert len(checks) == 2 and all(check["fine"] for check in checks)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dry-run"], "--dry-run and TRITON_INTERPRET=1 go together"),
        ([], "torch finds no GPU; --dry-run with TRITON_INTERPRET=1 needs none"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path, arguments, said):
    import torch

    if not arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = ["-m", "tests.live.attention", "--out", str(tmp_path), *arguments]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (2, said)
