"""From timed steps to a MeasuredModel.

All coefficients enter linearly, so every part is a non-negative least squares on relative errors.
It is reweighted so that the sum of absolute errors is minimised: like a median, it ignores a few
delayed repeats. Each point counts the same, however many repeats it has.

Why not the fastest repeat: on a quiet machine the spread is the engine's own, and a simulated run
should have its median, not its best case. If others have the core, medians fail (half of the
repeats wait), so disturbed repeats are recognised and set aside (`samples.settled`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twinserve.profiles.composition import StepComposition, StepTimeModel
from twinserve.profiles.measured.model import FitReport, MeasuredModel, TrafficTimes
from twinserve.profiles.measured.samples import (
    LEAVING,
    TRAFFIC,
    StepSample,
    by_point,
    disturbed_share,
    settled,
    unsettled,
)
from twinserve.profiles.specs import ProfileError

CHECK = "check"  # samples of this kind are never fitted
FOLDS = 5
_ROUNDS = 12  # of reweighting; the coefficients settle within a few
_HUBER = 3.0  # standard deviations beyond which a sample's weight falls
_FLOOR = 2e-3  # relative error below which a sample's weight grows no further
# weight of a guess for a cell of the decode table that was not measured, beside a measured point
_PRIOR = 0.02
_WORTH = 0.9  # share of the error that a least time of large steps may leave


def fit_steps(samples: Sequence[StepSample], captured: int = 0) -> MeasuredModel:
    """The tables of all samples that are not for checking, with their FitReport. captured: tokens
    of the engine's largest CUDA graph.

    ProfileError where steps of a kind are missing: two batch sizes and two contexts of pure decode
    steps, and two sizes of steps with prompt tokens.
    """
    measured = [s for s in samples if s.kind not in (LEAVING, TRAFFIC) and not s.first]
    calm = settled(measured)
    fitted = [s for s in calm if s.kind != CHECK]
    model = _fit(fitted, captured)
    report = _report(model, fitted, [s for s in calm if s.kind == CHECK])
    noise, left = disturbed_share(measured), len(unsettled(measured))
    report = replace(report, disturbed=noise, unsettled=left)
    traffic = settled([s for s in samples if s.kind == TRAFFIC])
    if traffic:
        held = _held_out_traffic(model, traffic)
        model = replace(model, traffic=_traffic(model, traffic))
        report = replace(report, traffic_steps=len(traffic), **held)
    return replace(model, fit=report)


def _traffic(model: MeasuredModel, samples: Sequence[StepSample]) -> TrafficTimes:
    """What is left of the samples beyond the tables. Huber's estimate: the mean of nearly all of
    them, for sums of steps must come out right, but no few steps that the machine held up."""
    from scipy.optimize import nnls

    seconds = _seconds(samples)
    left = (seconds - [model.repeated_seconds(s.work) for s in samples]) / seconds
    works = [(s.work.decode_requests, s.work.churn) for s in samples]
    rows = [
        (
            1.0,
            n,
            c.joined,
            c.changed,
            c.swapped_out,
            c.swapped_in,
            c.swapped_out_tokens,
            c.swapped_in_tokens,
        )
        for n, c in works
    ]
    features = np.array(rows) / seconds[:, None]
    factor = np.ones(len(samples))
    for _ in range(_ROUNDS):
        found, _ = nnls(features * factor[:, None], left * factor)
        away = np.abs(left - features @ found)
        # a normal distribution's standard deviation
        scale = max(1.4826 * float(np.median(away)), 1e-9)
        factor = np.sqrt(np.minimum(1.0, _HUBER * scale / np.maximum(away, 1e-12)))
    return TrafficTimes(*found.tolist())


def _held_out_traffic(model: MeasuredModel, samples: Sequence[StepSample]) -> dict[str, float]:
    """Errors in traffic, of each round as predicted from the others: of a step (mean absolute), and
    of their sum."""
    errors, predicted, measured = [], 0.0, 0.0
    rounds = {s.round for s in samples}
    for number in sorted(rounds):
        rest = [s for s in samples if s.round != number] if len(rounds) > 1 else samples
        held = replace(model, traffic=_traffic(model, rest))
        for sample in samples:
            if sample.round == number:
                seconds = held.step_seconds(sample.work)
                errors.append(abs(seconds / sample.seconds - 1.0))
                predicted, measured = predicted + seconds, measured + sample.seconds
    return {
        "traffic_error": float(np.mean(errors)),
        "traffic_total_error": predicted / measured - 1.0,
    }


def point_errors(model: StepTimeModel, samples: Sequence[StepSample]) -> dict[int, float]:
    """point -> median over its samples of predicted / measured, less one."""
    return {
        point: float(np.median([model.step_seconds(s.work) / s.seconds for s in of_point])) - 1.0
        for point, of_point in by_point(samples).items()
    }


def _fit(samples: Sequence[StepSample], captured: int) -> MeasuredModel:
    decodes = [s for s in samples if not len(s.work.prefill_new)]
    others = [s for s in samples if len(s.work.prefill_new)]
    even = [s for s in decodes if not _is_skewed(s.work)]
    batches = _knots([s.work.decode_requests for s in even])
    contexts = _knots([s.work.decode_context // s.work.decode_requests for s in even])
    tokens = _knots([s.work.new_tokens for s in others])
    for what, knots in (
        ("batch sizes", batches),
        ("contexts", contexts),
        ("sizes of steps with prompt tokens", tokens),
    ):
        if len(knots) < 2:
            raise ProfileError(
                f"a profile needs measured steps of two {what} or more; measure more"
            )
    table = _decode_table(even, batches, contexts)
    model = MeasuredModel(
        batches, contexts, table, tokens, (0.0,) * len(tokens), 0.0, 0.0, 0.0, 0.0, 0.0
    )
    model = replace(model, skew=_skew(model, [s for s in decodes if _is_skewed(s.work)]))
    return _with_launches(_with_prefill(model, others), others, captured)


def _knots(values: Sequence[int]) -> tuple[int, ...]:
    """Powers of two that have values near them. A knot without data would leave open which of its
    two intervals rises."""
    near = np.unique(np.round(np.log2(np.maximum(values, 1)))) if len(values) else ()
    return tuple(2 ** int(k) for k in near)


def _is_skewed(work: StepComposition) -> bool:
    return work.decode_context_max > 1.25 * work.decode_context / max(work.decode_requests, 1) + 8


def _ramps(values: np.ndarray, knots: Sequence[int]) -> np.ndarray:
    """float64[m, k]: a column of ones, then for each interval how much of it lies below the value
    (the last one goes on past its end). Non-negative coefficients of these make a function that
    never falls."""
    edges = np.array(knots, float)
    ramps = (np.asarray(values, float)[:, None] - edges[:-1]) / np.diff(edges)
    ramps[:, :-1] = np.minimum(ramps[:, :-1], 1.0)
    return np.column_stack([np.ones(len(values)), np.maximum(ramps, 0.0)])


def _decode_features(
    n: np.ndarray, x: np.ndarray, batches: Sequence[int], contexts: Sequence[int]
) -> np.ndarray:
    # products of ramps: with coefficients >= 0 D rises in both, and longer contexts cost larger
    # batches no less
    return np.einsum("mi,mj->mij", _ramps(n, batches), _ramps(x, contexts)).reshape(len(n), -1)


def _decode_table(
    samples: Sequence[StepSample], batches, contexts
) -> tuple[tuple[float, ...], ...]:
    n = np.array([s.work.decode_requests for s in samples], float)
    x = np.array([s.work.decode_context / s.work.decode_requests for s in samples])
    features = _decode_features(n, x, batches, contexts)
    seconds, weights = _seconds(samples), _weights(samples)
    guesses = _unmeasured(n, x, seconds, batches, contexts)
    if len(guesses):
        rows = np.array(guesses)
        features = np.vstack(
            [features, _decode_features(rows[:, 0], rows[:, 1], batches, contexts)]
        )
        seconds, weights = (
            np.append(seconds, rows[:, 2]),
            np.append(weights, np.full(len(rows), _PRIOR)),
        )
    found = _absolute_nnls(features, seconds, weights)
    grid_n, grid_x = np.meshgrid(batches, contexts, indexing="ij")
    table = _decode_features(grid_n.ravel(), grid_x.ravel(), batches, contexts) @ found
    table = table.reshape(len(batches), len(contexts))
    # rounding of the products: never falling must hold exactly
    table = np.maximum.accumulate(np.maximum.accumulate(table, axis=0), axis=1)
    return tuple(tuple(row) for row in table.tolist())


def _unmeasured(n, x, seconds, batches, contexts) -> list[tuple[float, float, float]]:
    """(requests, context, seconds) at knots that memory did not allow to measure: from the two
    longest contexts that the same batch size was measured at, continued."""
    guesses = []
    for batch in batches:
        here = (n > 0.9 * batch) & (n < 1.1 * batch)
        known = [c for c in contexts if (here & (x > 0.8 * c) & (x < 1.6 * c)).any()]
        if len(known) < 2 or known[-1] == contexts[-1]:
            continue
        a, b = ((here & (x > 0.8 * c) & (x < 1.6 * c)) for c in known[-2:])
        slope = max(
            (np.median(seconds[b]) - np.median(seconds[a])) / (np.mean(x[b]) - np.mean(x[a])), 0.0
        )
        end = float(np.median(seconds[b]) - slope * np.mean(x[b]))
        guesses += [(float(batch), float(c), end + slope * c) for c in contexts if c > known[-1]]
    return guesses


def _skew(model: MeasuredModel, samples: Sequence[StepSample]) -> float:
    """How far towards the longest context the mean moves, from batches of uneven contexts."""
    if not samples:
        return 0.0
    from scipy.optimize import minimize_scalar

    seconds, weights = _seconds(samples), _weights(samples)

    def error(share: float) -> float:
        moved = replace(model, skew=float(share))
        predicted = np.array([moved.step_seconds(s.work) for s in samples])
        return float((weights * np.abs(predicted / seconds - 1)).sum())

    found = minimize_scalar(error, bounds=(0.0, 1.0), method="bounded", options={"xatol": 1e-3})
    return float(found.x) if error(float(found.x)) < error(0.0) else 0.0


def _with_prefill(model: MeasuredModel, samples: Sequence[StepSample]) -> MeasuredModel:
    works = [s.work for s in samples]
    ramps = _ramps(np.array([w.new_tokens for w in works]), model.tokens)
    rest = np.array([_prefill_terms(model, w) for w in works])
    found = _absolute_nnls(np.column_stack([ramps, rest]), _seconds(samples), _weights(samples))
    k = ramps.shape[1]
    request, decode_request, pair, attended, share = found[k:].tolist()
    heights = tuple(np.cumsum(found[:k]).tolist())
    return replace(
        model,
        token_s=heights,
        prefill_request_s=request,
        decode_request_s=decode_request,
        pair_s=pair,
        attended_s=attended,
        decode_share=share,
    )


def _with_launches(
    model: MeasuredModel, samples: Sequence[StepSample], captured: int
) -> MeasuredModel:
    """With the least time of steps beyond the CUDA graphs that leaves the least absolute error, if
    that is worth it."""
    larger = [s for s in samples if s.work.new_tokens > captured]
    if not captured or not larger:
        return model
    seconds, weights = _seconds(larger), _weights(larger)
    tables = np.array([model.step_seconds(s.work) for s in larger])

    def error(launch_s: float) -> float:
        return float((weights * np.abs(np.maximum(tables, launch_s) / seconds - 1.0)).sum())

    launch_s = min(seconds.tolist(), key=error)
    if error(launch_s) > _WORTH * error(0.0):
        return model
    return replace(model, captured=captured, launch_s=launch_s)


def _prefill_terms(model: MeasuredModel, work: StepComposition) -> tuple[float, ...]:
    new, resident, n = work.prefill_new, work.prefill_resident, work.decode_requests
    pairs = float((new * (2 * resident + new + 1)).sum()) / 2
    contexts = 0.0
    if n:
        alone = model.step_seconds(StepComposition(n, work.decode_context, work.decode_context_max))
        contexts = alone - model.step_seconds(StepComposition(n, 0, 0))
    return len(new), n, pairs, int((new + resident).sum()), contexts


def _seconds(samples: Sequence[StepSample]) -> np.ndarray:
    return np.array([s.seconds for s in samples])


def _weights(samples: Sequence[StepSample]) -> np.ndarray:
    """float64[m]: those of one point add up to one."""
    points = np.array([s.point for s in samples])
    _, index, counts = np.unique(points, return_inverse=True, return_counts=True)
    return 1.0 / counts[index]


def _absolute_nnls(features: np.ndarray, seconds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Non-negative coefficients (float64[k]) that minimise the weighted sum of absolute relative
    errors."""
    from scipy.optimize import nnls

    scaled = features / seconds[:, None]
    # columns differ by ten orders of magnitude (pairs against ones): equal norms keep nnls accurate
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0.0] = 1.0
    scaled /= norms
    factor = np.sqrt(weights)
    for _ in range(_ROUNDS):
        found, _ = nnls(scaled * factor[:, None], factor, maxiter=100 * scaled.shape[1])
        factor = np.sqrt(weights / np.maximum(np.abs(scaled @ found - 1.0), _FLOOR))
    return found / norms


def _report(
    model: MeasuredModel, fitted: Sequence[StepSample], checks: Sequence[StepSample]
) -> FitReport:
    points = by_point(fitted)
    kinds = {point: of_point[0].kind for point, of_point in points.items()}
    errors: dict[str, list[float]] = {}
    for point, error in _held_out(points, model.captured).items():
        errors.setdefault(kinds[point], []).append(abs(error))
    means = {kind: float(np.mean(errors[kind])) for kind in sorted(errors)}
    every = [error for of_kind in errors.values() for error in of_kind]
    quartiles = [np.percentile(_seconds(p), [25, 50, 75]) for p in points.values() if len(p) > 2]
    return FitReport(
        points=len(points),
        steps=len(fitted),
        residual=float(np.mean(np.abs(list(point_errors(model, fitted).values())))),
        errors={"all": float(np.mean(every)), **means} if every else {},
        check_error=float(np.mean(np.abs(list(point_errors(model, checks).values()))))
        if checks
        else None,
        spread=float(np.median([(high - low) / middle for low, middle, high in quartiles]))
        if quartiles
        else 0.0,
    )


def _held_out(points: dict[int, list[StepSample]], captured: int) -> dict[int, float]:
    """point -> its error when predicted from the points of the other folds; a fold that leaves too
    little is left out."""
    order = np.random.default_rng(0).permutation(sorted(points))
    errors: dict[int, float] = {}
    for fold in range(FOLDS):
        held = set(order[fold::FOLDS].tolist())
        rest = [s for point, of_point in points.items() if point not in held for s in of_point]
        try:
            model = _fit(rest, captured)
        except ProfileError:
            continue
        errors |= point_errors(model, [s for point in held for s in points[point]])
    return errors
