"""One small file of each tool whose measurements are read, to its published schema: three requests,
of which the last one failed where the tool tells."""

import json


def vllm_bench(**changes) -> str:
    return json.dumps(
        {
            "backend": "openai", "model_id": "m", "num_prompts": 3, "request_rate": 4.0,
            "burstiness": 1.0, "max_concurrency": None, "duration": 2.0, "completed": 2,
            "failed": 1, "total_input_tokens": 30, "total_output_tokens": 5,
            "request_throughput": 1.0, "input_lens": [10, 20, 30], "output_lens": [3, 2, 0],
            "start_times": [812.5, 813.0, 813.25], "ttfts": [0.2, 0.3, 0.0],
            "itls": [[0.1, 0.1], [0.05], []], "latencies": [0.4, 0.35, 0.0],
            "generated_texts": ["abc", "de", ""], "errors": ["", "", "Service Unavailable"],
            "mean_ttft_ms": 250.0,
        }
        | changes
    )  # fmt: skip


def aiperf() -> str:
    def metric(value, unit="ms"):
        return {"value": value, "unit": unit}

    def row(session, turn, start_ns, metrics, error=None, phase="profiling"):
        metadata = {
            "x_request_id": f"{session}{turn}",
            "x_correlation_id": session,
            "turn_index": turn,
            "request_start_ns": start_ns,
            "benchmark_phase": phase,
            "was_cancelled": error is not None,
        }
        return json.dumps({"metadata": metadata, "metrics": metrics, "error": error}) + "\n"

    def served(prompt, output, ttft, e2el):
        return {
            "input_sequence_length": metric(prompt, "tokens"),
            "output_sequence_length": metric(output, "tokens"),
            "time_to_first_token": metric(ttft),
            "request_latency": metric(e2el),
            "inter_chunk_latency": metric([(e2el - ttft) / (output - 1)] * (output - 1)),
        }

    start = 1_759_813_207_000_000_000
    return (
        row("w", 0, start - 10**9, served(9, 9, 9, 99), phase="warmup")
        + row("a", 0, start, served(10, 3, 200, 400))
        + row("a", 1, start + 900_000_000, served(20, 2, 300, 350))
        + row("b", 0, start + 10**9, {"error_isl": metric(30, "tokens")}, {"type": "Cancelled"})
    )


def guidellm() -> str:
    def row(name, start, prompt, output, ttft, itl, latency):
        return {
            "request_id": name, "prompt_tokens": prompt, "output_tokens": output,
            "request_start_time": start, "request_latency": latency, "time_to_first_token_ms": ttft,
            "inter_token_latency_ms": itl,
            "info": {"conversation_id": None, "turn_index": 0, "error": None},
        }  # fmt: skip

    failed = row("c", 1761.75, 30, None, None, None, None)
    failed["info"]["error"] = "connection reset"
    requests = {
        "successful": [
            row("a", 1761.0, 10, 3, 200.0, 100.0, 0.4),
            row("b", 1761.5, 20, 2, 300.0, 50.0, 0.35),
        ],
        "incomplete": [],
        "errored": [failed],
    }
    return json.dumps(
        {"metadata": {"version": 1}, "benchmarks": [{"requests": requests}]}, indent=1
    )


def inference_perf() -> str:
    def row(start, end, prompt, times, error=None):
        response = {"output_tokens": len(times), "output_token_times": times}
        return {
            "start_time": start,
            "end_time": end,
            "request": "{}",
            "response": "",
            "info": {
                "request_metrics": {"text": {"input_tokens": prompt}},
                "response_metrics": None if error else response,
                "input_tokens": prompt,
            },
            "error": error,
        }

    return json.dumps(
        [
            row(81.0, 81.41, 10, [81.2, 81.3, 81.4]),
            row(81.5, 81.86, 20, [81.8, 81.85]),
            row(81.75, 81.8, 30, [], {"error_type": "Timeout", "error_msg": "slow"}),
        ]
    )


def vllm_log() -> str:
    def prompt(name, n):
        ids = list(range(n))
        return (
            f"DEBUG 12-31 23:59:58 [request_logger.py:56] Request {name} details: prompt: 'it''s', "
            f"prompt_token_ids: {ids}, prompt_embeds shape: None.\n"
        )

    def received(name, at):
        return (
            f"(APIServer pid=7) INFO {at} [request_logger.py:65] Received request {name}: params: "
            "SamplingParams(n=1, temperature=0.0, max_tokens=9, min_tokens=0), "
            "lora_request: None.\n"
        )

    def generated(name, at, tokens):
        return (
            f"DEBUG {at} [request_logger.py:98] Generated response {name} (streaming complete) "
            f"details: output_token_ids: {tokens}\n"
            f"INFO {at} [request_logger.py:105] Generated response {name} (streaming complete): "
            "output: 'x y', finish_reason: stop\n"
        )

    return (
        "INFO 12-31 23:59:50 [api_server.py:1] Started server process\n"
        + prompt("cmpl-a-0", 10)
        + received("cmpl-a-0", "12-31 23:59:58")
        + prompt("cmpl-b-0", 20)
        + received("cmpl-b-0", "12-31 23:59:59")
        + generated("cmpl-a-0", "01-01 00:00:01", [5, 6, 7])
        + generated("cmpl-b-0", "01-01 00:00:02", [5, 6])
        + prompt("cmpl-c-0", 30)
        + received("cmpl-c-0", "01-01 00:00:03")
    )


def _span(start_ns, **attributes) -> dict:
    def value(v):
        return {"intValue": str(v)} if isinstance(v, int) else {"doubleValue": v}

    names = {
        "prompt": "gen_ai.usage.prompt_tokens",
        "output": "gen_ai.usage.completion_tokens",
        "ttft": "gen_ai.latency.time_to_first_token",
        "e2el": "gen_ai.latency.e2e",
        "queued": "gen_ai.latency.time_in_queue",
        "decode": "gen_ai.latency.time_in_model_decode",
    }
    return {
        "name": "llm_request",
        "startTimeUnixNano": str(start_ns),
        "attributes": [{"key": names[k], "value": value(v)} for k, v in attributes.items()],
    }


def otel() -> str:
    start = 1_761_000_000_000_000_000
    spans = [
        _span(
            start + 500_000_000, prompt=20, output=2, ttft=0.3, e2el=0.35, queued=0.1, decode=0.05
        ),
        _span(start, prompt=10, output=3, ttft=0.2, e2el=0.4, queued=0.0, decode=0.2),
        {"name": "http receive", "startTimeUnixNano": str(start), "attributes": []},
    ]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"scope": {}, "spans": spans}]}]})


def prometheus() -> str:
    """TTFT of a server that restarted between the second and the third sample."""

    def series(part, values, **labels):
        name = f"vllm:time_to_first_token_seconds_{part}"
        times = (1000, 1060, 1120)
        return {
            "metric": {"__name__": name, "engine": "0", **labels},
            "values": [[t, str(v)] for t, v in zip(times, values, strict=True)],
        }

    result = [
        series("bucket", (5, 8, 2), le="0.1"),
        series("bucket", (5, 10, 4), le="1.0"),
        series("bucket", (5, 10, 4), le="+Inf"),
        series("sum", (1.0, 2.5, 0.8)),
        series("count", (5, 10, 4)),
    ]
    data = {"resultType": "matrix", "result": result}
    return json.dumps({"status": "success", "data": data})


FILES = {
    "vllm-bench": vllm_bench, "aiperf": aiperf, "guidellm": guidellm,
    "inference-perf": inference_perf, "vllm-log": vllm_log, "otel": otel,
}  # fmt: skip
