"""Operator tables from per-layer kernel times, as the profiler of LLMServingSim 2 writes them (csv,
microseconds a layer).

One folder holds, for a stem GPU__MODEL__tpN: `dense` (layer, tokens); `per_sequence` (lm_head and
sampler by sequences); `attention` (one chunk on a prefix with decodes of equal contexts); and
`skew` (two lengths of context, three iterations added up). Only numbers derived from them are kept:
times of all layers, thinned to the points that a simulation needs, noise that falls with more work
taken out.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.profiles.operators.interpolation import Curve, never_falling
from twinserve.profiles.operators.model import OperatorForm, capture_sizes
from twinserve.profiles.specs import ModelSpec, ProfileError

# layers of the model that are no part of the repeated block
ONCE = ("embedding", "final_layernorm")
TIMES = {"layernorm": 2}  # before attention and before the MLP
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)
PREFIXES = (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
CONTEXTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BESIDE_CHUNKS = (16, 128, 512, 1024, 2048)
SKEW_ITERATIONS = 3
MICRO = 1e-6
# FlashAttention-2 leaves a context to one block of threads once there are this many (request, KV
# head) pairs for each of twice the SMs; below it splits contexts, and a long one costs no more than
# its bytes.
SPLIT_LIMIT = 0.8 * 2
# Prompts are computed whole as well, in one step: the tables, which end at 2,048 tokens, go on to
# here.
LONGEST_STEP = 16384

Communication = Callable[[np.ndarray], np.ndarray]


def read_layers(folder: Path, stem: str, name: str) -> pd.DataFrame:
    """One table; ProfileError names the file that is missing or lacks a column."""
    path = Path(folder) / f"{stem}__{name}.csv.gz"
    try:
        table = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: cannot be read ({error})") from None
    if table.columns[-1] not in ("time_us", "alpha"):
        raise ProfileError(
            f"{path}: the last column is {table.columns[-1]!r}, not 'time_us'; give a per-layer "
            "table"
        )
    return table


def form_from_layers(
    folder: Path,
    stem: str,
    llm: ModelSpec,
    tp: int,
    *,
    sms: int,
    capture_tokens: int = 512,
    comm: Communication | None = None,
    gather: Communication | None = None,
    measured: tuple[np.ndarray, np.ndarray] | None = None,
    host_s: float = 0.0,
    host_request_s: float = 0.0,
) -> OperatorForm:
    """The tables of one stem as an OperatorForm.

    comm    seconds of communication of all layers by tokens; None: none
    gather  seconds to gather the logits of so many rows
    measured  (tokens, seconds) instead of the table `dense`
    sms     streaming multiprocessors of the GPU, for the limit where contexts are no longer split
    """
    per_row = read_layers(folder, stem, "per_sequence")
    tokens, token_s = (
        measured if measured is not None else _dense(read_layers(folder, stem, "dense"), llm.layers)
    )
    sampled = np.array(sorted({*per_row.sequences}), float)
    row_s = sum(
        MICRO * _curve(rows, "sequences").of(sampled) for _, rows in per_row.groupby("layer")
    )
    if gather is not None:
        row_s = row_s + gather(sampled)
    attention = _attention(read_layers(folder, stem, "attention"), llm.layers)
    skew = _skew(
        read_layers(folder, stem, "skew"), llm.layers, SPLIT_LIMIT * sms / max(llm.kv_heads / tp, 1)
    )
    return OperatorForm(
        tokens=_points(tokens),
        token_s=_times(token_s),
        # falls where another algorithm takes over
        comm_s=_times(comm(tokens)) if comm is not None else (),
        rows=_points(sampled),
        row_s=_times(never_falling(row_s)),
        capture_tokens=capture_tokens,
        host_s=host_s,
        host_request_s=host_request_s,
        **attention,
        **skew,
    )


def _dense(table: pd.DataFrame, layers: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, seconds of all layers), from captured sizes and every larger one."""
    tokens = np.array(
        [t for t in sorted({*table.tokens}) if t > 512 or t in capture_sizes(512)], float
    )
    token_s = np.zeros(len(tokens))
    for layer, rows in table.groupby("layer"):
        count = 1 if layer in ONCE else TIMES.get(layer, 1) * layers
        token_s += count * MICRO * _curve(rows, "tokens").of(tokens)
    token_s = never_falling(token_s)
    longest = max(LONGEST_STEP, 2 * tokens[-1])
    return np.append(tokens, longest), np.append(token_s, _beyond(tokens, token_s, longest))


def _beyond(x: np.ndarray, y: np.ndarray, end: float) -> float:
    """y at `end` > x[-1], with the slope of the upper half of the axis.

    GEMM times rise in steps of whole waves of tiles, with a plateau between the last points. Its
    slope is a tenth of the mean one, and would compute long prompts faster than the GPU multiplies.
    """
    half = x[-1] / 2
    return y[-1] + (y[-1] - Curve(x, y).at(half)) / (x[-1] - half) * (end - x[-1])


def _curve(rows: pd.DataFrame, axis: str) -> Curve:
    rows = rows.sort_values(axis)
    return Curve(rows[axis], rows.time_us)


def _attention(table: pd.DataFrame, layers: int) -> dict:
    """Return the `decode`, `chunk` and `beside` tables, seconds of all layers."""
    alone = table[table.prefill_chunk == 0].pivot(
        index="n_decode", columns="kv_decode", values="time_us"
    )
    requests, contexts = np.array(alone.index, float), np.array(alone.columns, float)
    decode_us = never_falling(alone.to_numpy())
    chunks = table[
        (table.n_decode == 0) & table.prefill_chunk.isin(CHUNKS) & table.kv_prefill.isin(PREFIXES)
    ]
    chunks = chunks.pivot(index="prefill_chunk", columns="kv_prefill", values="time_us")
    chunk, chunk_us = _denser(np.array(chunks.index, float), never_falling(chunks.to_numpy()))
    beside = table[
        (table.n_decode > 0) & (table.kv_prefill == 0) & table.prefill_chunk.isin(BESIDE_CHUNKS)
    ]
    beside = beside[beside.kv_decode.isin(CONTEXTS)]
    counts = sorted({*beside.n_decode})
    boxes = []
    for size in BESIDE_CHUNKS:
        part = beside[beside.prefill_chunk == size].pivot(
            index="n_decode", columns="kv_decode", values="time_us"
        )
        part = part.reindex(index=counts, columns=list(CONTEXTS))
        boxes.append(part.to_numpy() - chunks.loc[size, 0])
    whole = [i for i in range(len(counts)) if all(np.isfinite(box[i]).all() for box in boxes)]
    box = np.maximum(never_falling(np.array(boxes)[:, whole, :]), 0.0)
    scale = MICRO * layers
    return {
        "requests": _points(requests),
        "context": _points(contexts),
        "decode_s": _rows(decode_us * scale),
        "chunk": _points(chunk),
        "prefix": _points(np.array(chunks.columns, float)),
        "chunk_s": _rows(chunk_us * scale),
        "beside_chunk": _points(np.array(BESIDE_CHUNKS, float)),
        "beside_requests": _points(np.array(counts, float)[whole]),
        "beside_context": _points(np.array(CONTEXTS, float)),
        "beside_s": tuple(_rows(part * scale) for part in box),
    }


def _denser(chunk: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Twice as many chunk sizes: a chunk's time over its size is close to linear, while the time
    itself bends."""
    middle = (chunk[:-1] + chunk[1:]) / 2
    rate = values / chunk[:, None]
    between = middle[:, None] * (rate[:-1] + rate[1:]) / 2
    between = np.clip(between, values[:-1], values[1:])
    order = np.argsort(np.concatenate([chunk, middle]))
    return np.concatenate([chunk, middle])[order], np.concatenate([values, between])[order]


def _skew(table: pd.DataFrame, layers: int, limit: float) -> dict:
    """Seconds of all layers for each token by which one context stands out of the mean of n, alone
    and with chunks.

    From the rows with a single long context. Its excess over the mean of the K longest is (1 - 1/K)
    of its excess over the short ones. K (about seven) keep the memory busy.
    """
    one = table[
        (table.nb == 1) & table.kv_big.between(1024, 8192) & (table.n >= 4) & (table.kp <= 2048)
    ]
    per_token = (one.t_skew_us - one.t_mean_us) / SKEW_ITERATIONS / (one.kv_big - one.kv_mean)
    per_token *= (1 - 1 / one.n) / (1 - 1 / 7)
    medians = per_token.groupby([one.pc > 0, one.n]).median().clip(lower=0.0)
    alone, beside = medians[False], medians[True]
    axis = sorted({*alone.index} & {*beside.index})
    points = [(float(n), alone[n], beside[n]) for n in axis]
    last = max((i for i, p in enumerate(points) if p[0] < limit), default=-1)
    if 0 <= last < len(points) - 1:  # splitting stops at once, not gradually
        edge = float(np.interp(limit, axis, [p[2] for p in points]))
        points[last + 1 : last + 1] = [
            (limit - 0.5, points[last][1], edge),
            (limit, points[last + 1][1], edge),
        ]
    requests, skew, skew_beside = (np.array(column) for column in zip(*points, strict=True))
    return {
        "skew_requests": _points(requests),
        "skew_s": _times(skew * MICRO * layers),
        "skew_beside_s": _times(skew_beside * MICRO * layers),
    }


def _points(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{v:.6g}") for v in values)


def _times(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(f"{v:.5g}") for v in values)


def _rows(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return tuple(_times(row) for row in values)
