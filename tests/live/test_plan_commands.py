"""The command lines of a plan are taken by the parser of the installed vLLM, and mean what the plan
was made with."""

import json
import shlex

import pytest

from twinserve.sim.plan.candidates import candidates
from twinserve.sim.plan.start import emitted, serve_arguments
from twinserve.sim.setup.config import SimulationConfig

pytestmark = pytest.mark.live


def parsed(line: str):
    """By vLLM's own command, up to where the server would start."""
    serve = pytest.importorskip("vllm.entrypoints.cli.serve").ServeSubcommand()
    parser = pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser()
    serve.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    program, *words = shlex.split(line)
    assert program == "vllm"
    args = parser.parse_args(words)
    return args.model_tag, args


def line(policy: str, index: int = 0, tp: int = 4, **settings) -> str:
    base = SimulationConfig(policy=(policy,), **settings)
    (one,), _ = candidates(base, "llama-3.1-70b", ["h100"], [tp], ["least-requests"], {}, 1000)
    return shlex.join(serve_arguments(one, index, (1.0, 0.05), 1000))


def test_vllm_takes_the_line_of_its_own_scheduler():
    model, args = parsed(line("vllm", 3, max_num_seqs=99, max_model_len=20_000))
    assert "Llama-3.1-70B" in model and args.port == 8003 and args.tensor_parallel_size == 4
    assert (args.max_num_seqs, args.max_model_len, args.block_size) == (99, 20_000, 16)
    assert args.async_scheduling is True and args.scheduler_cls is None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_vllm_takes_the_line_of_another_policy(asynchronous):
    settings = {"gpu_memory_utilization": 0.8, "kv_cache_dtype": "fp8"}
    _, args = parsed(line("bros:chunk=512,kv=paged", async_scheduling=asynchronous, **settings))
    kind = "PolicyAsyncScheduler" if asynchronous else "PolicyScheduler"
    assert args.scheduler_cls.endswith(f".{kind}") and args.async_scheduling is asynchronous
    assert (args.gpu_memory_utilization, args.kv_cache_dtype) == (0.8, "fp8")
    told = args.additional_config
    told = json.loads(told) if isinstance(told, str) else told
    assert (
        told["policy"] == "bros:chunk=512,kv=paged" and told["profile"] == "llama-3.1-70b@h100:tp4"
    )
    assert (told["slo_ttft_s"], told["slo_tpot_s"]) == (1.0, 0.05)


def test_the_script_that_a_plan_writes_is_taken():
    base = SimulationConfig(policy=("vllm",), max_num_seqs=48)
    (one,), _ = candidates(base, "llama-3.1-70b", ["h100"], [4], ["least-requests"], {}, 1000)
    text = emitted("vllm", one, 2, serve_arguments(one, 0, (1.0, 0.05), 1000))
    model, args = parsed(text.splitlines()[-1].removeprefix("exec "))
    assert model == "meta-llama/Llama-3.1-70B" and args.tensor_parallel_size == 4
    share = one.hardware.profile.gpu_memory_utilization
    assert (args.max_num_seqs, args.gpu_memory_utilization) == (48, share)
