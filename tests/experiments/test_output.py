"""Tables and plots as files, and verdicts on claims."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from twinserve.experiments.benchmark.measure import BenchmarkError
from twinserve.experiments.study.output import markdown_table, table_lines, write_plot
from twinserve.experiments.study.verdict import (
    Claim,
    counted,
    factor,
    judge,
    judge_bound,
    judge_direction,
    summary,
    worst,
)
from twinserve.sim.cli.main import main
from twinserve.sim.setup.config import SettingsError
from twinserve.traces.workload import WorkloadError
from twinserve.traces.write import write_atomically


def test_a_table_by_hand():
    rows = [["a", 1], ["b | c", ""]]
    assert table_lines(["", "n"], rows) == ["| | n |", "|---|---|", "| a | 1 |", "| b \\| c |  |"]
    assert (
        markdown_table(["x", "n"], iter(rows[:1]), ["---", "---:"])
        == "| x | n |\n|---|---:|\n| a | 1 |\n"
    )
    assert table_lines(["x", "n"], [], [" :-- ", " --: "]) == ["| x | n |", "| :-- | --: |"]


def drawn() -> Figure:
    canvas = Figure()
    canvas.subplots().plot([1, 2])
    return canvas


def test_a_plot_is_the_same_bytes_again_and_nothing_else_is_left(tmp_path):
    for name in ("a", "b"):
        write_plot(tmp_path / "plots" / f"{name}.png", drawn())
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["a.png", "b.png"]
    first, second = ((tmp_path / "plots" / f"{name}.png").read_bytes() for name in "ab")
    assert first == second and first[1:4] == b"PNG" and b"Software" not in first
    write_plot(tmp_path / "large.png", drawn(), dpi=240)
    assert len((tmp_path / "large.png").read_bytes()) > len(first)


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    taken = tmp_path / "plot.png"
    taken.mkdir()
    for write in (lambda: write_plot(taken, drawn()), lambda: write_atomically(taken, b"{}")):
        with pytest.raises(WorkloadError, match="cannot be written"):
            write()
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize(
    ("ours", "half", "paper", "neutral", "verdict"),
    [
        (-0.70, 0.05, -0.74, 0.0, "agrees"),
        (-0.70, 0.03, -0.74, 0.0, "near"),
        (-55.0, 4.0, -57.5, 0.0, "agrees"),
        (-57.5, 0.0, -57.5, 0.0, "agrees"),
        (1.03, 0.001, 1.03, 1.0, "agrees"),  # a small effect, and the same
        (-47.0, 12.0, -57.5, 0.0, "near"),  # too wide to stand for the number
        (-0.60, 0.1, -0.74, 0.0, "near"),
        (-0.60, 0.2, -0.74, 0.0, "direction only"),  # 1.7 to 5 times as fast
        (-78.9, 0.5, -61.1, 0.0, "direction only"),  # 4.7 times as fast, not 2.6
        (-89.8, 1.6, -61.1, 0.0, "direction only"),
        (-99.9, 0.01, -61.1, 0.0, "direction only"),
        (0.22, 0.01, 0.39, 1.0, "direction only"),  # a ratio below 1 is such a change, too
        (0.30, 0.01, 0.39, 1.0, "near"),
        (2.4, 0.1, 1.8, 1.0, "near"),
        (-57.5, 40.0, -57.5, 0.0, "direction only"),  # and much too wide
        (1.2, 0.1, 1.73, 1.0, "direction only"),
        (1.1, 0.01, 45.0, 1.0, "direction only"),
        (45.0, 1.0, 1.1, 1.0, "direction only"),
        (-30.0, 30.0, -57.5, 0.0, "not significant"),
        (1.18, 0.45, 1.23, 1.0, "not significant"),  # no effect is as likely
        (0.10, 5.0, -0.74, 0.0, "not significant"),
        (-0.70, np.nan, -0.74, 0.0, "not significant"),  # one seed tells nothing
        (1.04, 0.01, 1.73, 1.0, "no effect"),
        (0.97, 0.01, 1.73, 1.0, "no effect"),  # on either side
        (1.0, 0.0, 1.73, 1.0, "no effect"),
        (1.0, 0.01, 1.73, 1.0, "no effect"),
        (0.10, 0.05, -0.74, 0.0, "differs"),
        (np.nan, np.nan, -0.74, 0.0, "differs"),
        (0.80, 0.02, 0.78, None, "agrees"),
        (0.864, 0.01, 0.786, None, "agrees"),
        (0.866, 0.01, 0.786, None, "near"),
        (1.02, 0.01, 0.786, None, "differs"),
        (145.0, 67.0, 210.0, None, "not significant"),
        (210.0, 67.0, 210.0, None, "not significant"),
        (100.0, 67.0, 210.0, None, "differs"),
    ],
)
def test_verdicts(ours, half, paper, neutral, verdict):
    whole = 100.0 if abs(paper) > 50 else 1.0
    assert judge(ours, half, paper, neutral, whole) == verdict


EFFECT = st.floats(-2, 2).map(lambda x: round(x, 3))
HALF = st.floats(0, 1).map(lambda x: round(x, 3))
RANKS = {
    "agrees": 0, "near": 1, "direction only": 2, "no effect": 3, "not significant": 3, "differs": 4,
}  # fmt: skip


@given(EFFECT, HALF, EFFECT.filter(bool))
def test_a_word_of_an_effect_means_what_it_says(ours, half, paper):
    said = judge(ours, half, paper)
    if said in ("agrees", "near", "direction only"):
        assert ours * paper > 0 and half < abs(ours)
    if said == "no effect":
        assert abs(ours) < 0.05 or abs(ours) + half <= 0.05
    if said == "not significant":
        assert half >= abs(ours)
    if said == "differs":
        assert ours * paper < 0 and half < abs(ours)


# where a thousandth more or less is not a factor by itself
SLOPING = EFFECT.filter(lambda change: change >= -0.8)


@given(SLOPING, HALF, SLOPING.filter(lambda paper: abs(paper) >= 0.2))
def test_numbers_that_nearly_are_the_same_get_words_side_by_side(ours, half, paper):
    """Of an effect that is one: a paper's 3 % is near to none itself."""
    near = ours, ours + 0.001
    a, b = (RANKS[judge(one, half, paper)] for one in near)
    widths = (factor(one + side * half) - factor(one) for one in near for side in (-1, 1))
    wide = max(map(abs, widths)) > 0.25 * abs(factor(paper))
    assert abs(a - b) <= (2 if wide else 1)


PARTS = st.integers(0, 128).map(lambda parts: parts / 64)  # exact in binary, as are their sums


@given(PARTS, st.sampled_from((0.25, 1.0, 64.0)), PARTS)
def test_the_unit_of_an_effect_does_not_matter(half, paper, factor):
    ours = paper * factor
    said = judge(ours, half, paper)
    assert judge(128 * ours, 128 * half, 128 * paper, 0.0, 128.0) == said
    assert judge(1 + ours, half, 1 + paper, 1.0) == said


def test_a_direction_agrees_only_where_the_interval_is_on_its_side():
    said = {
        (0.2, 0.1): "agrees", (0.1, 0.1): "not significant", (-0.1, 0.2): "not significant",
        (-0.2, 0.1): "differs", (0.04, 0.01): "no effect", (-0.04, 0.01): "no effect",
        (0.0, 0.0): "no effect", (0.2, np.nan): "not significant", (np.nan, np.nan): "differs",
    }  # fmt: skip
    assert {case: judge_direction(*case) for case in said} == said
    assert judge_direction(4.0, 1.0, whole=100.0) == "no effect"
    assert judge_direction(4.0, 1.0, whole=10.0) == "agrees"


def test_a_bound_has_no_effect_to_be_near_to():
    assert judge_bound(0.01, 0.001) == "agrees"
    assert judge_bound(-0.01, 0.001) == judge_bound(0.0, 0.0) == "differs"
    assert judge_bound(0.01, 0.02) == judge_bound(0.01, np.nan) == "not significant"


def test_a_claim_of_several_parts_is_as_good_as_its_worst_part():
    assert worst("agrees", "agrees") == "agrees"
    assert worst("direction only", "not significant", "agrees") == "not significant"
    assert worst("differs", "no effect") == "differs"


def test_a_summary_counts_claims_of_a_direction_only():
    claims = [
        Claim("Fig. 1", "x", "1", "1", verdict, directed=directed)
        for verdict, directed in (
            ("differs", True),
            ("agrees", True),
            ("agrees", True),
            ("agrees", False),
            ("near", False),
        )
    ]
    assert counted(claims) == {"agrees": 2, "differs": 1}
    assert summary(claims) == "3 claims of a direction: 2 agrees, 1 differs. 2 others."
    assert summary([]) == "0 claims of a direction: none. 0 others."


def test_a_reason_is_said_only_where_it_is_needed():
    assert Claim.judged("Fig. 1", "x", "1", "1", "agrees", "none").why == ""
    assert Claim.judged("Fig. 1", "x", "1", "2", "not significant", "few seeds").why == "few seeds"


def test_no_effect_in_the_paper_is_no_direction():
    with pytest.raises(ValueError, match="judge it as an amount"):
        judge(0.1, 0.0, 0.0)


# The command lines of the experiments: whatever is wrong with the input is one line and exit
# status 2, as for `twinserve`.
def ended(capsys, main, *arguments: str) -> tuple[int, str]:
    """Exit status, and the one line on stderr, below what is said of the runs."""
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    said = re.sub(r"\A\d+ runs\n", "", capsys.readouterr().err)
    assert said.startswith("error: ") and said.count("\n") == 1
    return stopped.value.code, said


def main_of(name: str):
    """`twinserve study NAME`."""
    return lambda arguments: main(["study", name, *arguments])


def interrupted(*_, **__):
    raise KeyboardInterrupt


def raising(error: Exception):
    def work(*_, **__):
        raise error

    return work


def test_a_measurement_that_failed_is_a_line(capsys, monkeypatch, tmp_path):
    failed = raising(BenchmarkError("a command\nfailed"))
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", failed)
    said = ended(capsys, main_of("bros"), "fig2", "--out", str(tmp_path))
    assert said == (2, "error: a command failed\n")


def test_a_defect_is_not_taken_for_bad_input(monkeypatch, tmp_path):
    defect = raising(ValueError("no such axis"))
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", defect)
    with pytest.raises(ValueError, match="no such axis"):
        main_of("bros")(["fig2", "--out", str(tmp_path)])


def test_a_study_ends_as_the_others(capsys, monkeypatch, tmp_path):
    bros = main_of("bros")
    assert ended(capsys, bros, "--nonsense")[0] == 2
    code, said = ended(capsys, main, "study", "bross")
    assert code == 2 and "did you mean 'bros'?" in said
    code, said = ended(capsys, bros, "fig0", "--out", str(tmp_path))
    assert code == 2 and "no figure 'fig0'" in said
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", interrupted)
    code, said = ended(capsys, bros, "fig2", "--out", str(tmp_path))
    assert code == 130 and "goes on from there" in said


def test_counts_below_one_are_refused(capsys):
    for name in ("systems", "apart"):
        for option in ("--seeds", "--workers"):
            code, said = ended(capsys, main_of(name), option, "0")
            assert code == 2 and option in said


def test_settings_errors_of_points_are_a_line(capsys, monkeypatch, tmp_path):
    refused = raising(SettingsError("three  is\ntoo many"))
    monkeypatch.setattr("twinserve.experiments.study.study.shown_grid", refused)
    said = ended(capsys, main_of("bros"), "fig2", "--out", str(tmp_path))
    assert said == (2, "error: three is too many\n")
