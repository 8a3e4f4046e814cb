"""What is known of the error of step times, for `twinserve.profiles.evidence`:

python -m twinserve.experiments.validation.evidence profiles/data/evidence.json

Each mark is a measured time, or the mean over steps of one size, and the error of our prediction
(ours / measured - 1) by form of step times. `unseen_engine` and `unseen_gpu` are the errors with
constants fitted without the marks of that engine, or of that GPU. Of the roofline, `unseen_gpu` is
the largest with another family's constants. It needs aiconfigurator-core and the measured runs
(TWINSERVE_TRUTH).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from twinserve.experiments.measured.truth import truth_folder
from twinserve.experiments.study.output import table_lines
from twinserve.experiments.validation.left_out import (
    gpu_of,
    operators_of,
    operators_without,
    roofline_without,
    rooflines_of_other_families,
)
from twinserve.experiments.validation.main import H100_STEPS, STEPS, validate_run
from twinserve.experiments.validation.marks import MARKS
from twinserve.experiments.validation.runs import CASES, Case, read_run
from twinserve.experiments.validation.step_times import DECODES, validate_events
from twinserve.profiles.composition import StepComposition, decode_work
from twinserve.profiles.evidence import (
    FORMS,
    KINDS,
    LARGE_BATCH,
    LEAST_PROMPT,
    Mark,
    kind_of_model,
    marks,
)
from twinserve.profiles.measured.step_files import read_steps
from twinserve.profiles.names import ProfileName
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.traces.write import write_atomically

SOURCES = {
    "marks": "public marks of vLLM 0.14 to 0.19 (docs/profiles.md)",
    "steps": "single steps of vLLM 0.15.1 (docs/validation.md)",
    "events": "steps read off a run of vLLM 0.19.0 (docs/validation.md)",
    "run": "means over a run of vLLM 0.19.0 (docs/validation.md)",
}
LEAST_STEPS = 5  # of decodes of one range of sizes: fewer are noise
Steps = Sequence[tuple[StepComposition, float]]


def everything(truth: Path) -> dict:
    """The content of evidence.json."""
    marks = [*public_marks(), *sampled_steps(truth), *steps_of_runs(truth), *means_of_runs(truth)]
    return {"sources": SOURCES, "marks": [_written(mark) for mark in marks]}


def public_marks(left_out: bool = True) -> list[Mark]:
    """Of experiments/validation/marks.py. left_out: with the errors of refitted constants."""
    found = []
    for mark in MARKS:
        steps = [(decode_work(mark.requests, mark.context), mark.ms * 1e-3)]
        kind = decode_kind(mark.requests)
        found.append(_mark(mark.engine, kind, mark.requests, steps, "marks", left_out=left_out))
    return found


def sampled_steps(truth: Path) -> list[Mark]:
    """Of the recorded steps on H100: means over ranges of decodes, and each step with a prompt."""
    found = []
    for model, profile in STEPS:
        engine = profile.removesuffix("/operators")
        works, seconds = read_steps(truth / H100_STEPS, model)
        steps = list(zip(works, seconds.tolist(), strict=True))
        for above, to in zip(DECODES[:-1], DECODES[1:], strict=True):
            part = [
                (work, s)
                for work, s in steps
                if not work.new_tokens - work.decode_requests and above < work.decode_requests <= to
            ]
            if len(part) >= LEAST_STEPS:
                mean = round(np.mean([work.decode_requests for work, _ in part]))
                found.append(_mark(engine, decode_kind(mean), mean, part, "steps"))
        for work, s in steps:
            tokens = work.new_tokens - work.decode_requests
            if tokens >= LEAST_PROMPT:
                found.append(_mark(engine, "prefill", tokens, [(work, s)], "steps"))
    return found


def steps_of_runs(truth: Path) -> list[Mark]:
    """Read off the events of the dense runs."""
    found = []
    for case in CASES:
        if "ep2" in case.profile:
            continue
        read = {form: validate_events(truth, case, form) for form in (None, "roofline")}
        forms = {"operators": read[None], "roofline": read["roofline"]}
        for part in ("decode", "prompt"):
            for ranges in zip(*(forms[form][part] for form in forms), strict=True):
                mark = _of_range(case, part, dict(zip(forms, ranges, strict=True)))
                if mark is not None:
                    found.append(mark)
        if not any(mark.engine == case.profile and mark.kind != "prefill" for mark in found):
            found.append(_of_counts(case, {form: r["counted"][0] for form, r in forms.items()}))
    return found


def _of_range(case: Case, part: str, ranges: dict[str, dict]) -> Mark | None:
    """A row of `by_range` by form, if it has enough steps."""
    row = ranges["operators"]
    size = (row["above"] + 1 + row["to"]) // 2
    kind = decode_kind(size) if part == "decode" else "prefill"
    if row["steps"] < LEAST_STEPS if part == "decode" else row["above"] < LEAST_PROMPT:
        return None
    errors = {form: found["error"] for form, found in ranges.items()}
    return Mark(case.profile, kind, size, row["steps"], row["real_ms"], "events", errors)


def _of_counts(case: Case, counted: dict[str, dict]) -> Mark:
    """Of the tokens counted a second, where single steps of decodes cannot be read."""
    size = (counted["operators"]["above"] + 1 + counted["operators"]["to"]) // 2
    errors = {form: 1.0 / found["scale"] - 1.0 for form, found in counted.items()}
    return Mark(case.profile, decode_kind(size), size, None, None, "events", errors)


def means_of_runs(truth: Path) -> list[Mark]:
    """Mean TPOT, and of mixtures of experts mean TTFT, which has the wait in it, of the runs whose
    steps cannot be read."""
    found = []
    for case in CASES:
        mixture = "ep2" in case.profile
        if not mixture and "4090" not in case.folder:
            continue
        runs = {
            form: {row["metric"]: row for row in validate_run(truth, case, form)}
            for form in (("operators",) if mixture else ("operators", "roofline"))
        }
        running = read_run(truth, case).series.running
        size = round(float(running[running > 0].mean()))
        kinds = {"TPOT": decode_kind(size)} | ({"TTFT": "prefill"} if mixture else {})
        for metric, kind in kinds.items():
            errors = {form: run[metric]["mean"] for form, run in runs.items()}
            real = runs["operators"][metric]["real_s"] * 1e3
            # the size of a prompt: no one of them
            many = size if kind != "prefill" else None
            found.append(Mark(case.profile, kind, many, None, real, "run", errors))
    return found


def decode_kind(requests: float) -> str:
    return "decode_large" if requests >= LARGE_BATCH else "decode_small"


def _mark(
    engine: str, kind: str, size: int, steps: Steps, source: str, left_out: bool = True
) -> Mark:
    """Of steps that were measured one by one, on an engine whose marks a fit has seen."""
    name = ProfileName.parse(engine)
    real = float(np.mean([seconds for _, seconds in steps]))

    def error(model) -> float:
        return float(np.mean([model.step_seconds(work) for work, _ in steps])) / real - 1.0

    operators = operators_of(engine)
    models = {
        "roofline": derive_profile(name.model, name.gpu, name.tp).model(),
        "operators": None if operators is None else operators.model(),
    }
    unseen = {}
    others = {}
    if left_out:
        unseen = {
            "roofline": roofline_without(engine),
            "operators": operators_without(engine, whole_gpu=False),
        }
        others = {
            "roofline": max(map(error, rooflines_of_other_families(engine)), key=abs),
            "operators": error(operators_without(engine, whole_gpu=True)),
        }
    return Mark(
        engine,
        kind,
        size,
        len(steps) if source != "marks" else None,
        real * 1e3,
        source,
        {form: error(model) for form, model in models.items() if model is not None},
        {form: error(model) for form, model in unseen.items() if model is not None},
        others,
    )


def _written(mark: Mark) -> dict:
    """With what a reader wants to search by, and numbers of a length that can be read."""
    # /ep2 and the like name the form, not the engine
    name = ProfileName.parse(mark.engine)
    llm = load_profile(mark.engine).llm

    def short(errors: dict[str, float]) -> dict[str, float]:
        return {form: round(error, 4) for form, error in sorted(errors.items())}

    return {
        "engine": mark.engine,
        "model_kind": kind_of_model(llm),
        "gpu": name.gpu,
        "family": gpu_of(mark.engine).family,
        "tp": name.tp,
        "kind": mark.kind,
        "size": mark.size,
        "steps": mark.steps,
        "measured_ms": None if mark.measured_ms is None else float(f"{mark.measured_ms:.4g}"),
        "source": mark.source,
        "errors": short(mark.errors),
        "unseen_engine": short(mark.unseen_engine),
        "unseen_gpu": short(mark.unseen_gpu),
    }


def table() -> list[str]:
    """Of docs/profiles.md: the largest error of each engine's marks, in brackets that of constants
    which had not seen them, by kind of step and form."""
    engines = dict.fromkeys((mark.engine, mark.model_kind) for mark in marks())
    rows = []
    for engine, model_kind in engines:
        mine = [mark for mark in marks() if mark.engine == engine]
        cells = [_cell([m for m in mine if m.kind == k], f) for f in FORMS for k in KINDS]
        rows.append([f"`{engine}`", model_kind, *cells])
    kinds = [f"{form}: {kind.replace('_', ', ')}" for form in FORMS for kind in KINDS]
    return table_lines(["engine", "kind", *kinds], rows)


def _cell(found: Sequence[Mark], form: str) -> str:
    errors = [abs(mark.errors[form]) for mark in found if form in mark.errors]
    unseen = [abs(mark.unseen_engine[form]) for mark in found if form in mark.unseen_engine]
    if not errors:
        return "-"
    without = f" ({max(unseen) * 100:.1f} %)" if unseen else ""
    return f"{max(errors) * 100:.1f} %{without}, {len(errors)}"


def text(document: dict) -> str:
    """As it is written: JSON with one mark a line."""
    marks = ",\n".join(json.dumps(mark) for mark in document["marks"])
    return f'{{"sources": {json.dumps(document["sources"], indent=1)},\n"marks": [\n{marks}\n]}}\n'


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m twinserve.experiments.validation.evidence FILE")
    write_atomically(Path(sys.argv[1]), text(everything(truth_folder("vllm_runs"))).encode())
