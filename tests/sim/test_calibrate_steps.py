"""`calibrate --from-steps` and `profiles fit`: one function under two names, and what it
refuses."""

import pandas as pd
import pytest

from tests.commands import refused, status
from tests.profiles.recorded_steps import slower_host, write_steps
from twinserve.profiles.composition import StepComposition
from twinserve.profiles.profile import load_profile
from twinserve.sim.cli import calibrate as calibrating
from twinserve.sim.cli.main import main

PROFILE = "llama-3.1-8b@l40s"


@pytest.fixture
def steps(tmp_path):
    """Steps of the roofline profile on a slower host."""
    names = ["mine" if i % 4 else "other" for i in range(80)]
    return write_steps(tmp_path / "steps.csv", slower_host(load_profile(PROFILE).model()), names)


def _run(*arguments) -> None:
    assert not status(main, arguments)


def _error(capsys, *arguments) -> str:
    return refused(capsys, main, arguments)


def test_both_names_print_and_write_the_same(steps, tmp_path, capsys):
    printed = []
    for name, command in (("a", ("profiles", "fit")), ("b", ("calibrate", "--from-steps"))):
        out = tmp_path / f"{name}.json"
        _run(*command, steps, "--profile", PROFILE, "--model", "mine", "--out", out)
        printed.append(capsys.readouterr().out.replace(str(out), "OUT"))
    assert printed[0] == printed[1] and "60 steps" in printed[0]
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_the_host_terms_are_found_again_and_stand_in_the_profile(steps, tmp_path, capsys):
    _run("calibrate", "--from-steps", steps, "--profile", PROFILE, "--out", tmp_path / "mine.json")
    before, after = load_profile(PROFILE), load_profile(tmp_path / "mine.json")
    was, now = before.step_model.efficiency, after.step_model.efficiency
    assert now.host_s - was.host_s == pytest.approx(2e-3, rel=1e-6)
    assert now.host_request_s - was.host_request_s == pytest.approx(1e-5, rel=1e-6)
    assert (
        after.source == "measured" and after.fit_error < 1e-9 and "Host terms fitted" in after.notes
    )
    assert now.gemm_mfu == was.gemm_mfu


def test_a_profile_is_replaced_only_if_told_to(steps, tmp_path, capsys):
    out = tmp_path / "mine.json"
    out.write_text("mine")
    for command in (("profiles", "fit"), ("calibrate", "--from-steps")):
        given = (*command, steps, "--profile", PROFILE, "--out")
        assert "is there already" in _error(capsys, *given, out) and out.read_text() == "mine"
        assert "ends in .json" in _error(capsys, *given, tmp_path / "mine.txt")
        assert "--overwrite is for --out" in _error(capsys, *command, steps, "--overwrite")
    _run("calibrate", "--from-steps", steps, "--profile", PROFILE, "--out", out, "--overwrite")
    assert load_profile(out).source == "measured"


@pytest.mark.parametrize(("form", "limit"), [("bros", 0.12), ("table", 0.06)])
def test_another_form_replaces_the_step_times(form, limit, steps, tmp_path, capsys):
    out = tmp_path / "mine.json"
    _run("calibrate", "--from-steps", steps, "--profile", PROFILE, "--form", form, "--out", out)
    found, before = load_profile(out), load_profile(PROFILE)
    assert found.step_model.form == form and 0 < found.fit_error < limit
    assert found.num_gpu_blocks == before.num_gpu_blocks and found.llm == before.llm
    # it predicts a step of the recorded engine better than the profile that it came from
    work = StepComposition(64, 64 * 900, 900)
    truth = before.model().step_seconds(work) + 2e-3 + 64e-5
    assert abs(found.model().step_seconds(work) / truth - 1) < abs(
        before.model().step_seconds(work) / truth - 1
    )


def test_without_a_profile_the_published_forms_are_compared(steps, capsys):
    _run("calibrate", "--from-steps", steps)
    shown = capsys.readouterr().out
    assert "80 steps" in shown and all(
        form in shown for form in ("bros", "echo", "layerkv", "table")
    )
    assert "profile" not in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--graphs"], "--graphs: --from-steps starts no engine"),
        (["--threads", "2"], "--threads: --from-steps"),
        (["--engine-arg", "a=1"], "--engine-arg: --from-steps"),
        (["--quick"], "--quick: --from-steps"),
        (["--out", "x.json"], "--profile"),
        (["--form", "bros"], "--out"),
        (["--form", "echo", "--out", "x.json", "--profile", PROFILE], "choose host, bros, table"),
        (["--out", "x.json", "--profile", "nobody@h100"], "nobody"),
    ],
)
def test_what_makes_no_sense_with_steps_is_one_line(
    arguments, words, steps, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert words in _error(capsys, "calibrate", "--from-steps", steps, *arguments)
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--model is needed"),
        (["--model", "tiny"], "--out is needed"),
        (["--model", "tiny", "--out", "x.json", "--form", "bros"], "--form: is for recorded steps"),
        (
            ["--model", "tiny", "--out", "x.json", "--profile", PROFILE],
            "--profile: is for recorded steps",
        ),
    ],
)
def test_measuring_an_engine_still_needs_what_it_needed(arguments, words, capsys):
    assert words in _error(capsys, "calibrate", *arguments)


def test_a_form_without_host_terms_gets_none(steps, tmp_path, capsys):
    table = tmp_path / "table.json"
    _run(
        "calibrate", "--from-steps", steps, "--profile", PROFILE, "--form", "table", "--out", table
    )
    capsys.readouterr()
    said = _error(
        capsys, "calibrate", "--from-steps", steps, "--profile", table, "--out", tmp_path / "x.json"
    )
    assert "'table' has no host terms" in said and not (tmp_path / "x.json").exists()


def test_prompts_alone_give_no_bros_form(tmp_path, capsys):
    model = load_profile(PROFILE).model()
    rows = [
        (model.step_seconds(StepComposition(n, n * 500, 500)), n, n * 500) for n in range(1, 40)
    ]
    path = tmp_path / "decodes.csv"
    pd.DataFrame(rows, columns=["seconds", "decode_requests", "decode_context"]).to_csv(
        path, index=False
    )
    out = tmp_path / "x.json"
    said = _error(
        capsys, "profiles", "fit", path, "--profile", PROFILE, "--form", "bros", "--out", out
    )
    assert "one phase only" in said and not out.exists()


def test_what_an_interrupted_calibration_kept_is_not_touched(tmp_path, monkeypatch, capsys):
    """Neither replaced nor removed by the next one of the same --out, however that ends."""
    measured = []

    def measure(*arguments):
        kept = arguments[-1]
        kept.write_text(f"steps {len(measured)}")
        measured.append(kept)
        if len(measured) < 3:
            raise KeyboardInterrupt
        return "profile"

    monkeypatch.setattr(calibrating, "_model", lambda *_: (tmp_path, None))
    monkeypatch.setattr(calibrating, "_effort", lambda *_: None)
    monkeypatch.setattr(calibrating, "_measure", measure)
    monkeypatch.setattr(calibrating, "_finish", lambda profile, out: out.write_text(profile))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            calibrating.calibrate(model="tiny", out=tmp_path / "p.json")
        assert f"note: the measured steps are in {measured[-1]}" in capsys.readouterr().err
    calibrating.calibrate(model="tiny", out=tmp_path / "p.json")
    assert [kept.read_text() for kept in measured[:2]] == ["steps 0", "steps 1"]
    assert {*tmp_path.iterdir()} == {tmp_path / "p.json", *measured[:2]}
