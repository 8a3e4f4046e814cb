"""The application workload of Justitia's evaluation (Yang et al., Sec. V-A): 300 task graphs of
nine classes, 72 % small, 26 % medium, 2 % large. They arrive as requests do in Mooncake's trace,
within 18, 9 or 6 minutes (1x, 2x, 3x).

`apps` is `apps:2x`. A workload carries its graphs as groups with stages, and class and text of each
in `applications`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from twinserve.traces.apps.classes import CLASSES, KINDS, Sample, draw
from twinserve.traces.workload import ApplicationInfo, Provenance, Workload, WorkloadError

Reshape = Callable[[Sample], Sample]

ARRIVALS = "mooncake:conversation"
APPLICATIONS = 300
WINDOW_MINUTES = {"apps:1x": 18, "apps:2x": 9, "apps:3x": 6}
ALIASES = {"apps": "apps:2x"}
# a class of a size is as likely as another one of it
SHARES = {"small": 0.72, "medium": 0.26, "large": 0.02}
DESCRIPTIONS = {
    "apps": "300 LLM applications (task graphs of nine classes) in 9 minutes: apps:2x",
    **{name: f"the same in {minutes} minutes" for name, minutes in WINDOW_MINUTES.items()},
}


def is_apps(name: str) -> bool:
    """Whether a trace name stands for this workload."""
    return name in DESCRIPTIONS


def load(
    name: str = "apps",
    *,
    seed: int = 0,
    count: int = APPLICATIONS,
    reshape: Reshape | None = None,
    **mooncake,
) -> Workload:
    """Return the application workload of a name. Its arrivals are `count` of those of Mooncake's
    conversation trace, drawn with `seed` and shrunk to the window. `mooncake` locates that trace
    (search_path, cache_dir, offline, progress: see `load_trace`). If only its replica is at hand,
    the workload is marked as a replica and says so.

    reshape  makes another application of each that was drawn: for studies of what sizes and shapes
             do

    Same name, count, seed, arrivals and reshape: same workload. Raises WorkloadError.
    """
    from twinserve.traces.load import load_trace

    if not is_apps(name):
        raise WorkloadError(
            f"'{name}' is no application workload: choose from {', '.join(DESCRIPTIONS)}"
        )
    if count < 1:
        raise WorkloadError(f"{count} applications: give 1 or more")
    full = ALIASES.get(name, name)
    recorded = load_trace(ARRIVALS, seed=seed, **mooncake)
    window_s = 60.0 * WINDOW_MINUTES[full]
    w = applications(
        _compressed(recorded.known_arrivals_s, count, window_s, seed), seed, reshape=reshape
    )
    origin = recorded.provenance
    notices = origin.notices
    if origin.replica:
        what = f"{full}: arrivals are those of the embedded replica of {ARRIVALS}"
        notices = (f"{what}; do not report them as the original",)
    made = f"applications(count={count}, window={window_s:g}s, arrivals={ARRIVALS}, seed={seed})"
    transforms = (
        (*origin.transforms, made) if reshape is None else (*origin.transforms, made, "reshaped")
    )
    return replace(
        w,
        provenance=Provenance(
            full, origin.path, origin.sha256, origin.replica, transforms, notices
        ),
    )


def _rng(seed: int, *key: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0xA995, *key)))


def _compressed(arrivals_s: np.ndarray, count: int, window_s: float, seed: int) -> np.ndarray:
    """Return float64[count] recorded arrivals, ascending, shrunk to the window (seconds)."""
    if count > len(arrivals_s):
        recorded = f"the {len(arrivals_s)} arrivals of {ARRIVALS}"
        raise WorkloadError(f"{count} applications are more than {recorded}: take fewer")
    chosen = np.sort(_rng(seed, 0).choice(len(arrivals_s), count, replace=False))
    first, last = arrivals_s[0], arrivals_s[-1]
    span = float(last - first)
    return (arrivals_s[chosen] - first) * (window_s / span if span > 0 else 0.0)


def kinds(count: int, seed: int) -> list[str]:
    """Return classes of `count` applications by arrival, with sizes' shares as exact as
    possible."""
    rng = _rng(seed, 1)
    sizes = list(SHARES)
    exact = np.array([SHARES[size] for size in sizes]) * count
    counts = np.floor(exact).astype(int)
    for i in np.argsort(counts - exact, kind="stable")[: count - counts.sum()]:
        counts[i] += 1
    drawn = []
    for size, n in zip(sizes, counts.tolist(), strict=True):
        of_size = [c.kind for c in CLASSES if c.size == size]
        drawn += [of_size[i] for i in rng.integers(len(of_size), size=n).tolist()]
    return [drawn[i] for i in rng.permutation(count).tolist()]


def applications(
    arrival_s: np.ndarray,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    reshape: Reshape | None = None,
) -> Workload:
    """One application at each time of `arrival_s` (float64[n], seconds, ascending), of the given
    classes or of the mix.

    Application i is a function of (seed, i, its class) alone, and of `reshape` (see `load`).
    """
    chosen = kinds(len(arrival_s), seed) if classes is None else list(classes)
    samples = [draw(kind, _rng(seed, 2, i, KINDS.index(kind))) for i, kind in enumerate(chosen)]
    return from_samples(
        arrival_s, samples if reshape is None else [reshape(sample) for sample in samples]
    )


def from_samples(arrival_s: Sequence[float], samples: Sequence[Sample]) -> Workload:
    """Return a workload: groups `KIND-i`, requests `KIND-i/STAGE.j`, stages without a pause."""
    rows = [
        (
            arrival_s[i] if stage == 0 else np.nan,
            prompt,
            output,
            i,
            stage,
            f"{sample.kind}-{i}/{stage}.{j}",
        )
        for i, sample in enumerate(samples)
        for stage, requests in enumerate(sample.stages)
        for j, (prompt, output) in enumerate(requests)
    ]
    if not rows:
        raise WorkloadError("no applications: give at least one")
    arrival, prompt, output, group, stage, ids = map(list, zip(*rows, strict=True))
    arrival = np.array(arrival, np.float64)
    order = np.argsort(arrival, kind="stable")  # closed-loop rows, NaN, come last
    return Workload.build(
        arrival[order],
        np.array(prompt)[order],
        np.array(output)[order],
        group=np.array(group, np.int64)[order],
        stage=np.array(stage, np.int64)[order],
        ids=[ids[i] for i in order.tolist()],
        group_names=[f"{sample.kind}-{i}" for i, sample in enumerate(samples)],
        applications={
            i: ApplicationInfo(sample.kind, sample.text) for i, sample in enumerate(samples)
        },
        provenance=Provenance("applications"),
    )
