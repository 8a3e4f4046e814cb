"""Files that vLLM's own code writes are read, and its own benchmark draws our stated loads. No
server: the client's requests are answered by a function here."""

import argparse
import asyncio
import json
import logging
import time

import numpy as np
import pytest

from twinserve.backends.live.engine import tiny_model
from twinserve.traces.load import load_trace
from twinserve.traces.readers.formats import detect_format, read_file, read_measurement

pytestmark = pytest.mark.live

SEED = 3
FLAGS = {
    "num-prompts": 12, "request-rate": 100, "burstiness": 0.5, "random-input-len": 40,
    "random-output-len": 6, "random-range-ratio": 0.5, "random-prefix-len": 32,
}  # fmt: skip
STATED = "vllm:" + ",".join(f"{name}={value}" for name, value in FLAGS.items())


@pytest.fixture
def serve(vllm, monkeypatch):
    """vLLM's client, whose requests take 30 ms and 5 ms a token; the third one fails."""
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    asked = []

    async def answer(request_func_input, session, pbar=None):
        asked.append(request_func_input)
        out = RequestFuncOutput(prompt_len=request_func_input.prompt_len)
        out.start_time = time.perf_counter()
        if len(asked) == 3:
            out.error = "Service Unavailable"
            return out
        n = request_func_input.output_len
        await asyncio.sleep(0.03)
        out.success, out.output_tokens, out.ttft = True, n, 0.03
        out.itl, out.latency = [0.005] * (n - 1), 0.03 + 0.005 * (n - 1)
        return out

    async def as_they_are(base_url, model_id, requests, ssl_context=None):
        return requests

    async def nothing(base_url, session):
        return None

    monkeypatch.setitem(serve.ASYNC_REQUEST_FUNCS, "openai", answer)
    monkeypatch.setattr(serve, "_align_prompts_to_server_tokenizer", as_they_are)
    monkeypatch.setattr(serve, "fetch_spec_decode_metrics", nothing)
    monkeypatch.setattr(serve, "fetch_diffusion_metrics", nothing)
    return serve


def bench(serve, folder, *further: str):
    """Its result file, with details."""
    tiny_model.write_model(folder / "model")
    tiny_model.write_tokenizer(folder / "model")
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    words = ["--backend", "openai", "--model", "tiny", "--tokenizer", str(folder / "model")]
    words += ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]
    words += ["--dataset-name", "random", "--seed", str(SEED), "--disable-tqdm"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(folder)]
    words += ["--result-filename", "bench.json", *further]
    for name, value in FLAGS.items():
        words += [f"--{name}", str(value)]
    serve.main(parser.parse_args(words))
    return folder / "bench.json"


def test_a_result_of_vllm_bench_serve_is_read(serve, tmp_path):
    file = bench(serve, tmp_path)
    assert detect_format(file.read_bytes(), "f") == "vllm-bench"
    found = read_measurement(file)
    assert len(found) == 12 and found.failed == 1
    assert not any("fields not used" in notice for notice in found.notices), found.notices
    served = found.served
    assert found.ttft_s[served] == pytest.approx(0.03)
    assert found.tpot_s[served] == pytest.approx(0.005)
    # vLLM's own numbers over the same requests
    assert found.ttft_s[served].mean() * 1000 == pytest.approx(found.stated["mean_ttft_ms"])
    assert found.tpot_s[served].mean() * 1000 == pytest.approx(found.stated["mean_tpot_ms"])
    assert found.output_tokens[served].sum() == found.stated["total_output_tokens"]
    assert len(read_file(file)) == 11


def test_a_closed_loop_of_vllm_bench_serve_is_a_closed_loop_here(serve, tmp_path):
    file = bench(serve, tmp_path, "--max-concurrency", "2")
    w, told = read_file(file), json.loads(file.read_text())
    assert w.concurrency == 2
    # when they would have been sent without the limit; the one that failed is not among them
    starts = np.array(told["start_times"])
    sent = np.sort((starts - told["queue_times"])[[not error for error in told["errors"]]])
    assert np.diff(w.arrival_s) == pytest.approx(np.diff(sent), abs=1e-6)
    assert w.span_s < np.ptp(starts)
    assert "closed loop" not in " ".join(w.provenance.notices)


def test_lengths_are_those_that_vllm_sends(serve, tmp_path):
    found = read_measurement(bench(serve, tmp_path))
    ours = load_trace(STATED, seed=SEED)
    assert found.prompt_tokens.tolist() == ours.prompt_tokens.tolist()
    served = found.served
    assert found.output_tokens[served].tolist() == ours.output_tokens[served].tolist()


@pytest.mark.parametrize(
    "flags",
    [
        {"request_rate": 4.0},
        {"request_rate": 4.0, "burstiness": 0.5},
        {"request_rate": 4.0, "burstiness": float("inf")},
        {"ramp_up_strategy": "linear", "ramp_up_start_rps": 2, "ramp_up_end_rps": 9},
        {"ramp_up_strategy": "exponential", "ramp_up_start_rps": 2, "ramp_up_end_rps": 9},
    ],
)
def test_arrivals_are_those_that_vllm_draws(serve, monkeypatch, flags):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(serve.asyncio, "sleep", sleep)
    monkeypatch.setattr(serve.time, "time", lambda: 0.0)

    async def drawn():
        np.random.seed(SEED)
        rate = {"request_rate": float("inf"), **flags}
        async for _ in serve.get_request([type("R", (), {"timestamp": None})] * 50, **rate):
            pass

    asyncio.run(drawn())
    name = "vllm:num_prompts=50," + ",".join(f"{k}={v}" for k, v in flags.items())
    assert load_trace(name, seed=SEED).arrival_s.tolist() == pytest.approx(waits, rel=1e-12)


def test_prefixes_of_the_repetition_dataset_come_in_vllms_order(vllm, tmp_path):
    from vllm.benchmarks.datasets import PrefixRepetitionRandomDataset
    from vllm.tokenizers import get_tokenizer

    tiny_model.write_model(tmp_path)
    tiny_model.write_tokenizer(tmp_path)
    tokenizer = get_tokenizer(str(tmp_path))
    sizes = {"prefix_len": 32, "suffix_len": 16, "num_prefixes": 4, "output_len": 5}
    theirs = PrefixRepetitionRandomDataset(random_seed=SEED).sample(tokenizer, 22, **sizes)
    stated = ",".join(f"prefix_repetition_{k}={v}" for k, v in sizes.items())
    name = f"vllm:dataset_name=prefix_repetition,num_prompts=22,{stated}"
    ours = load_trace(name, seed=SEED)
    assert [request.prompt_len for request in theirs] == ours.prompt_tokens.tolist()
    heads = [tuple(request.prompt.split()[:32]) for request in theirs]
    first = {head: heads.index(head) for head in heads}
    same = {tuple(ours.prefix.of(row)[:2]): row for row in reversed(range(len(ours)))}
    assert [first[h] for h in heads] == [
        same[tuple(ours.prefix.of(row)[:2])] for row in range(len(ours))
    ]


def _named(record: logging.LogRecord) -> bool:
    record.vllm_process_name = "APIServer"  # as a server's process is called
    return True


@pytest.mark.parametrize("outputs", [True, False])
def test_a_log_that_vllm_writes_is_read(vllm, tmp_path, monkeypatch, outputs):
    from vllm.entrypoints.serve.utils import request_logger
    from vllm.logger import _DATE_FORMAT, _FORMAT
    from vllm.logging_utils import NewLineFormatter
    from vllm.sampling_params import SamplingParams

    handler = logging.FileHandler(tmp_path / "server.log")
    handler.setFormatter(NewLineFormatter(_FORMAT, datefmt=_DATE_FORMAT))
    handler.addFilter(_named)
    monkeypatch.setattr(request_logger.logger, "level", logging.DEBUG)
    request_logger.logger._cache.clear()
    request_logger.logger.addHandler(handler)
    try:
        writer = request_logger.RequestLogger(max_log_len=None)
        for i, (prompt, output) in enumerate(((10, 3), (20, 2))):
            params = SamplingParams(max_tokens=9)
            ids = list(range(prompt))
            writer.log_inputs(f"cmpl-{i}-0", "line\nof 'text'", ids, None, params, None)
            if outputs:
                said = (f"cmpl-{i}-0", "it's\ntext", list(range(output)), "stop")
                writer.log_outputs(*said, is_streaming=True)
    finally:
        request_logger.logger.removeHandler(handler)
        request_logger.logger._cache.clear()
        handler.close()
    found = read_measurement(tmp_path / "server.log")
    assert found.name == "vllm-log" and found.prompt_tokens.tolist() == [10, 20]
    assert found.output_tokens.tolist() == ([3, 2] if outputs else [9, 9])
