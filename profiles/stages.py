"""Pipeline stages: which layers of a model each has, and what that is in weights and KV."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

from twinserve.profiles.specs import ModelSpec


def layers_of_stages(layers: int, pp: int) -> list[int]:
    """As vLLM shares them (`distributed/utils.py`, `get_pp_indices`): those left over go to stages
    from the last but one backwards, since first and last hold embeddings besides."""
    counts = [layers // pp] * pp
    for i in range(layers % pp):
        counts[-2 - i] += 1
    return counts


def stage_models(llm: ModelSpec, pp: int) -> list[ModelSpec]:
    """The layers of each stage as a model of its own, with embeddings that count once. Dense layers
    of a mixture come first; layers with a window are spread evenly. What the model has beside its
    layers (`other_parameters`, a position table) is the first stage's."""
    bounds = [0, *accumulate(layers_of_stages(llm.layers, pp))]
    return [_stage(llm, start, end) for start, end in pairwise(bounds)]


def _stage(llm: ModelSpec, start: int, end: int) -> ModelSpec:
    windowed = llm.window_layers * end // llm.layers - llm.window_layers * start // llm.layers
    dense = max(0, min(end, llm.dense_layers) - start)
    return replace(
        llm,
        layers=end - start,
        dense_layers=dense,
        dense_intermediate=llm.dense_intermediate if dense else 0,
        window_layers=windowed,
        window=llm.window if windowed else 0,
        tied_embeddings=True,
        learned_positions=0 if start else llm.learned_positions,
        other_parameters=0 if start else llm.other_parameters,
    )


def without_embeddings(llm: ModelSpec, stage: int, pp: int) -> float:
    """Return the bytes that a stage of `stage_models` has less, because it has neither embeddings
    nor an output projection."""
    return 0.0 if stage in (0, pp - 1) else llm.head_parameters * llm.dtype_bytes
