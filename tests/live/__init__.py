"""The real vLLM engine, with real forward passes, against our policy and ledger."""
