"""Decision identity: our policy `vllm` against the unmodified scheduler of vLLM, step by step."""
