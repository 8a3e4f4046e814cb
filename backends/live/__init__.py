"""A live vLLM V1 engine as the executor of plans. Nothing here is imported by the simulator until a
live engine is asked for; modules that import vLLM at their top say so."""
