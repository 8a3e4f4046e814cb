"""LayerKV's two looks ahead: how long prompts may hold up those that decode (eq. 1), and how many
blocks will be free (eq. 5). Functions of arrays, so that an example can be added up by hand."""

import numpy as np


def allowed_prefill_seconds(
    slo: np.ndarray, past_s: np.ndarray, past: np.ndarray, lower: np.ndarray, tpot: float
) -> np.ndarray:
    """Eq. 1, float64[n]: T_allow = T_slo (N_past + N_future) - (T_past + T_future); may be
    negative. No objective, no limit.

    slo    seconds a token, NaN for none; past_s: since the first token, waits included
    past   tokens generated; lower: lower bound of the predicted length. N_future = max(1, lower -
           past)
    tpot   current seconds a token; T_future = tpot * N_future
    """
    future = np.maximum(1, lower - past)
    allowed = slo * (past + future) - (past_s + tpot * future)
    return np.where(np.isnan(slo), np.inf, allowed)


def available_cells(
    free: int,
    blocks: np.ndarray,
    resident: np.ndarray,
    left: np.ndarray,
    block_tokens: int,
    horizon: int,
) -> np.ndarray:
    """Eq. 5, int64[horizon + 1]: free cells at the beginning of this and of the next `horizon`
    stages.

    A stage is `block_tokens` steps, so that a sequence takes one more block in it. By the paper's
    conservative assumption this is one in each layer that it has on the device. All that it holds
    is released after the stage in which it is expected to end.

    blocks, resident  of each sequence: blocks in its table, layers on the device
    left  tokens that it is expected to generate yet, at least 1 (inf: not known)
    """
    available = np.empty(horizon + 1, np.int64)
    available[0] = free
    ends = np.ceil(left / block_tokens)  # the stage in which it ends, from 1 on
    for stage in range(1, horizon + 1):
        allocated = int(resident[ends >= stage].sum())
        ended = ends == stage
        released = int(((blocks[ended] + stage) * resident[ended]).sum())
        available[stage] = available[stage - 1] + released - allocated
    return available
