"""What is known of the error of step times, for `twinserve.profiles.evidence`:

python -m twinserve.experiments.validation.evidence profiles/data/evidence.json

Each mark is a measured time, or the mean over steps of one size, and the error of our prediction
(ours / measured - 1) by form of step times. `unseen_engine` and `unseen_gpu` are the errors with
constants fitted without the marks of that engine, or of that GPU. Of the roofline, `unseen_gpu` is
the largest with another family's constants. It needs aiconfigurator-core and the measured runs
(TWINSERVE_TRUTH).
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from twinserve.experiments.measured.truth import truth_folder
from twinserve.experiments.study.output import table_lines
from twinserve.experiments.validation.left_out import (
    MARKS,
    gpu_of,
    operators_of,
    operators_without,
    roofline_without,
    rooflines_of_other_families,
)
from twinserve.experiments.validation.main import DENSE, H100_STEPS, STEPS, validate_run
from twinserve.experiments.validation.runs import CASES, Case, read_run
from twinserve.experiments.validation.step_times import DECODES, validate_events
from twinserve.profiles.composition import StepComposition, StepTimeModel
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
    """Of data.yaml. left_out: with the errors of refitted constants."""
    return [_mark(mark.engine, mark.requests, [mark.step], "marks", left_out) for mark in MARKS]


def sampled_steps(truth: Path) -> list[Mark]:
    """Of the recorded steps on H100: means over ranges of decodes, and each step with a prompt."""
    found = []
    for model, profile in STEPS:
        engine = profile.removesuffix("/operators")
        works, seconds = read_steps(truth / H100_STEPS, model)
        steps = list(zip(works, seconds.tolist(), strict=True))
        alone = [step for step in steps if not _prompt_tokens(step[0])]
        for above, to in zip(DECODES[:-1], DECODES[1:], strict=True):
            part = [step for step in alone if above < step[0].decode_requests <= to]
            if len(part) >= LEAST_STEPS:
                mean = round(np.mean([work.decode_requests for work, _ in part]))
                found.append(_mark(engine, mean, part, "steps"))
        for step in steps:
            if (tokens := _prompt_tokens(step[0])) >= LEAST_PROMPT:
                found.append(_mark(engine, tokens, [step], "steps", kind="prefill"))
    return found


def _prompt_tokens(work: StepComposition) -> int:
    return work.new_tokens - work.decode_requests


def steps_of_runs(truth: Path) -> list[Mark]:
    """Read off the events of the dense runs; of tokens counted a second, where single steps of
    decodes cannot be read."""
    found = []
    for case in DENSE.values():
        read = {form: validate_events(truth, case, form) for form in FORMS}
        rows = {
            part: [dict(zip(FORMS, rows, strict=True)) for rows in zip(*of_form, strict=True)]
            for part in ("decode", "prompt", "counted")
            for of_form in [[read[form][part] for form in FORMS]]
        }
        decodes = [row for row in rows["decode"] if row["operators"]["steps"] >= LEAST_STEPS]
        counted = [] if decodes else rows["counted"]
        prompts = [row for row in rows["prompt"] if row["operators"]["above"] >= LEAST_PROMPT]
        found += [_of_range(case, row, decode_kind) for row in decodes]
        found += [_of_range(case, row, lambda size: "prefill") for row in prompts]
        found += [_of_range(case, row, decode_kind) for row in counted]
    return found


def _of_range(case: Case, row: dict[str, dict], kind: Callable[[int], str]) -> Mark:
    """row: by form, as of `by_range` or `counted`."""
    one = row["operators"]
    size, seen = (one["above"] + 1 + one["to"]) // 2, "real_ms" in one
    steps, real_ms = (one["steps"], one["real_ms"]) if seen else (None, None)
    errors = {f: row[f]["error"] if seen else 1.0 / row[f]["scale"] - 1.0 for f in row}
    return Mark(case.profile, kind(size), size, steps, real_ms, "events", errors)


def means_of_runs(truth: Path) -> list[Mark]:
    """Mean TPOT, and of mixtures of experts mean TTFT, which has the wait in it, of the runs whose
    steps cannot be read."""
    found = []
    for case in CASES:
        mixture = case.label not in DENSE
        if not mixture and "4090" not in case.folder:
            continue
        runs = {
            form: {row["metric"]: row for row in validate_run(truth, case, form)}
            for form in (("operators",) if mixture else FORMS)
        }
        running = read_run(truth, case).series.running
        size = round(float(running[running > 0].mean()))
        for metric in ("TPOT", "TTFT") if mixture else ("TPOT",):
            errors = {form: run[metric]["mean"] for form, run in runs.items()}
            real_ms = runs["operators"][metric]["real_s"] * 1e3
            # of TTFT no one size of a prompt
            of = ("prefill", None) if metric == "TTFT" else (decode_kind(size), size)
            found.append(Mark(case.profile, *of, None, real_ms, "run", errors))
    return found


def decode_kind(requests: float) -> str:
    return "decode_large" if requests >= LARGE_BATCH else "decode_small"


def _mark(
    engine: str, size: int, steps: Steps, source: str, left_out: bool = True, kind: str = ""
) -> Mark:
    """Of steps that were measured one by one, on an engine whose marks a fit has seen. kind: of
    decodes by default."""
    name = ProfileName.parse(engine)
    real = float(np.mean([seconds for _, seconds in steps]))

    def error(model: StepTimeModel) -> float:
        return float(np.mean([model.step_seconds(work) for work, _ in steps])) / real - 1.0

    def errors(roofline: StepTimeModel | None, operators: StepTimeModel | None) -> dict:
        models = {"roofline": roofline, "operators": operators}
        return {form: error(model) for form, model in models.items() if model is not None}

    operators = operators_of(engine)
    roofline = derive_profile(name.model, name.gpu, name.tp).model()
    found = errors(roofline, None if operators is None else operators.model())
    unseen, others = {}, {}
    if left_out:
        unseen = errors(roofline_without(engine), operators_without(engine, whole_gpu=False))
        others = errors(
            max(rooflines_of_other_families(engine), key=lambda model: abs(error(model))),
            operators_without(engine, whole_gpu=True),
        )
    count = None if source == "marks" else len(steps)
    kind = kind or decode_kind(size)
    return Mark(engine, kind, size, count, real * 1e3, source, found, unseen, others)


def _written(mark: Mark) -> dict:
    """With what a reader wants to search by, and numbers of a length that can be read."""
    # /ep2 and the like name the form, not the engine
    name, said = ProfileName.parse(mark.engine), asdict(mark)
    said |= {"model_kind": kind_of_model(load_profile(mark.engine).llm), "gpu": name.gpu}
    said |= {"family": gpu_of(mark.engine).family, "tp": name.tp}
    if mark.measured_ms is not None:
        said["measured_ms"] = float(f"{mark.measured_ms:.4g}")
    for kind in ("errors", "unseen_engine", "unseen_gpu"):
        said[kind] = {form: round(error, 4) for form, error in sorted(said[kind].items())}
    first = ("engine", "model_kind", "gpu", "family", "tp")
    return {key: said[key] for key in dict.fromkeys((*first, *said))}


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
