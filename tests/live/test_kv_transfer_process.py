"""The same with the engine core in a process of its own and the worker in a third one, as `vllm
serve` runs them."""

import json
import os
from pathlib import Path

import pytest

from tests.live.engine import Output, same_answer
from tests.live.test_kv_transfer_live import SETTINGS, SLOT_BYTES, make_requests, swap_arguments
from twinserve.backends.live.engine import tiny_model
from twinserve.backends.live.engine.engine import LiveSettings, engine_environment

pytestmark = [pytest.mark.nightly, pytest.mark.live]


def ask(model, requests, num_blocks: int, **arguments) -> dict[str, Output]:
    """The answers of an engine with `num_blocks`, in other processes where `arguments` say so."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=True,
            async_scheduling=False,
            num_gpu_blocks_override=num_blocks + 1,
            block_size=SETTINGS["block_tokens"],
            max_num_seqs=SETTINGS["max_num_seqs"],
            max_num_batched_tokens=SETTINGS["max_num_batched_tokens"],
            max_model_len=SETTINGS["max_model_len"],
            enable_prefix_caching=True,
            scheduler_reserve_full_isl=False,
            **arguments,
        )
    )
    try:
        for name, (prompt, output_tokens) in requests.items():
            asked = SamplingParams(
                max_tokens=output_tokens,
                temperature=0.0,
                ignore_eos=True,
                logprobs=2,
                detokenize=False,
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, asked)
        answers = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    (answer,) = output.outputs
                    best = [{t: p.logprob for t, p in ranks.items()} for ranks in answer.logprobs]
                    answers[output.request_id] = Output(list(answer.token_ids), best)
        return answers
    finally:
        engine.engine_core.shutdown()


def test_swapping_works_across_processes(vllm, tmp_path):
    from vllm.distributed import cleanup_dist_env_and_memory

    model, requests = tiny_model.write_model(tmp_path / "tiny_llama"), make_requests(8)
    report = tmp_path / "report.json"
    with engine_environment(LiveSettings(model, None, 32, 8, 96, 448)):
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
        )
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes longer than all steps
        undisturbed = ask(model, requests, 120)
        cleanup_dist_env_and_memory()
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        swapping = {"period": 3, "away": 5, "report": str(report)}
        answers = ask(
            model,
            requests,
            SETTINGS["num_blocks"],
            distributed_executor_backend="mp",
            additional_config={"swapping": swapping},
            **swap_arguments(1500, "kv_both"),
        )
    verdicts = {name: same_answer(undisturbed[name], answers[name]) for name in requests}
    assert set(verdicts.values()) == {"same"}, verdicts
    totals = json.loads(report.read_text())
    assert totals["counts"]["back"] >= 20 and totals["counts"]["reused"] >= 10
    assert SLOT_BYTES * totals["tokens"]["out"] <= totals["bytes"]
