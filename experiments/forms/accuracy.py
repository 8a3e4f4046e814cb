"""How well each form of step times describes an engine: recorded steps, and steps of the profile
that a simulation runs on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from twinserve.experiments.study.claims import texts
from twinserve.experiments.validation.main import STEPS
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.forms.estimates import FORMS, step_estimate
from twinserve.profiles.forms.step_fits import as_it_is, fit_forms
from twinserve.profiles.measured.step_files import read_steps
from twinserve.profiles.profile import Profile, derive_profile, load_profile

DATA = texts(__file__, "data.yaml")
LABELS = DATA.LABELS
KINDS = ("decodes", "prompts", "mixed")


def on_recorded_steps(truth: Path) -> pd.DataFrame:
    """model, steps, form, error (fitted to all steps), left_out (on fifths of the file that the fit
    has not seen), largest; mean absolute relative errors. What saw none of the steps has one number
    for both."""
    rows = []
    for model, name in STEPS:
        steps, seconds = read_steps(truth / "steps" / "h100_vllm_steps.csv.gz", model)
        profile = load_profile(name)
        derived = derive_profile(profile.llm, profile.gpu, profile.tp)
        fits = [
            *fit_forms(steps, seconds, profile.model()),
            as_it_is("roofline", derived.model(), steps, seconds),
        ]
        for fit in fits:
            row = {
                "model": model,
                "steps": len(steps),
                "form": fit.form,
                "error": fit.error,
                "left_out": fit.cross_error,
            }
            rows.append(row | {"largest": fit.largest_error})
    return pd.DataFrame(rows)


def drawn_steps(seed: int, each: int) -> dict[str, list[StepComposition]]:
    """Steps of an engine under load, by kind: 1 to 200 decodes of uneven contexts; 1 to 4 prompts
    or chunks of 16 to 2,048 tokens, a third of them on a prefix."""
    rng = np.random.default_rng(seed)
    found: dict[str, list[StepComposition]] = {kind: [] for kind in KINDS}
    for kind in KINDS:
        for _ in range(each):
            n, context, longest = 0, 0, 0
            new = resident = np.zeros(0, np.int64)
            if kind != "prompts":
                lengths = 16 + rng.exponential(
                    float(rng.integers(200, 2000)), int(rng.integers(1, 201))
                ).astype(np.int64)
                n, context, longest = len(lengths), int(lengths.sum()), int(lengths.max())
            if kind != "decodes":
                new = np.exp(rng.uniform(np.log(16), np.log(2048), int(rng.integers(1, 5)))).astype(
                    np.int64
                )
                resident = rng.integers(0, 4096, len(new)) * (rng.random(len(new)) < 1 / 3)
            found[kind].append(StepComposition(n, context, longest, new, resident))
    return found


def on_a_profile(profile: Profile, seed: int = 0, each: int = 400) -> pd.DataFrame:
    """form, kind, error (mean absolute relative), bias (mean relative): each form fitted to the
    profile as a policy fits it, then asked for steps of `drawn_steps`."""
    truth, rows = profile.model(), []
    steps = drawn_steps(seed, each)
    for form in FORMS:
        model = step_estimate(form, profile, truth)
        for kind, works in steps.items():
            wrong = np.array([model.step_seconds(w) / truth.step_seconds(w) - 1.0 for w in works])
            rows.append(
                {
                    "form": form,
                    "kind": kind,
                    "error": float(np.abs(wrong).mean()),
                    "bias": float(wrong.mean()),
                }
            )
    return pd.DataFrame(rows)
