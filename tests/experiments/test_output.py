"""Tables and plots as files, and verdicts on claims."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from twinserve.experiments.study.output import markdown_table, table_lines, write_plot
from twinserve.experiments.study.study import Claim, judge, judge_direction, worst
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
        (-0.60, 0.15, -0.74, 0.0, "agrees"),
        (-47.0, 12.0, -57.5, 0.0, "agrees"),
        (-57.5, 0.0, -57.5, 0.0, "agrees"),
        (-0.60, 0.2, -0.74, 0.0, "direction agrees"),  # too wide to stand for the number
        (-0.60, 0.1, -0.74, 0.0, "direction agrees"),
        (-57.5, 40.0, -57.5, 0.0, "direction agrees"),
        (1.2, 0.1, 1.73, 1.0, "direction agrees"),
        (-30.0, 30.0, -57.5, 0.0, "within the spread"),
        (1.18, 0.45, 1.23, 1.0, "within the spread"),  # no effect is as likely
        (0.10, 5.0, -0.74, 0.0, "within the spread"),
        (0.10, 0.05, -0.74, 0.0, "differs"),
        (1.0, 0.0, 1.73, 1.0, "differs"),
        (1.0, 0.01, 1.73, 1.0, "differs"),  # no effect, and surely not the paper's
        (0.8, 4.6, -15.2, 0.0, "differs"),
        (-0.70, np.nan, -0.74, 0.0, "within the spread"),  # one seed tells nothing
        (-0.60, np.nan, -0.74, 0.0, "within the spread"),
        (np.nan, np.nan, -0.74, 0.0, "differs"),
        (0.80, 0.02, 0.78, None, "agrees"),
        (0.87, 0.01, 0.78, None, "differs"),  # an amount has no direction
        (145.0, 67.0, 210.0, None, "within the spread"),
        (210.0, 67.0, 210.0, None, "within the spread"),
    ],
)
def test_verdicts(ours, half, paper, neutral, verdict):
    assert judge(ours, half, paper, neutral) == verdict


def test_a_direction_agrees_only_where_the_interval_is_on_its_side():
    cases = [(0.2, 0.1), (0.1, 0.1), (-0.1, 0.2), (-0.2, 0.1), (0.0, 0.0), (0.2, np.nan)]
    said = [
        "agrees",
        "within the spread",
        "within the spread",
        "differs",
        "differs",
        "within the spread",
    ]
    assert [judge_direction(*case) for case in cases] == said


def test_a_claim_of_several_parts_is_as_good_as_its_worst_part():
    assert worst("agrees", "agrees") == "agrees"
    assert worst("direction agrees", "within the spread", "agrees") == "within the spread"
    assert worst("differs", "within the spread") == "differs"


def test_a_reason_is_said_only_where_it_is_needed():
    assert Claim.judged("Fig. 1", "x", "1", "1", "agrees", "none").why == ""
    assert (
        Claim.judged("Fig. 1", "x", "1", "2", "within the spread", "few seeds").why == "few seeds"
    )


def test_no_effect_in_the_paper_is_no_direction():
    with pytest.raises(ValueError, match="judge it as an amount"):
        judge(0.1, 0.0, 0.0)
