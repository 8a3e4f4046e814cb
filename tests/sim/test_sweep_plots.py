"""Plots of sweeps: what is drawn by default, and legends that nothing cuts or covers."""

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from tests.examples import examples
from twinserve.sim.report.over import with_digits
from twinserve.sim.setup.config import SettingsError
from twinserve.sim.sweep.draw import choose_x, choose_y, parse_plot, plot, write_plots

NAMES = ("mean_ttft_ms", "output_throughput")


def table(policies, loads, names=NAMES) -> pd.DataFrame:
    rows = [{"policy": p, "load": x} for p in policies for x in loads]
    frame = pd.DataFrame(rows)
    for number, name in enumerate(names):
        frame[name] = np.arange(len(frame), dtype=float) + number
        frame[f"{name}_ci"] = 0.5
    return frame


LABELS = st.lists(st.text("abcdefg:=,", min_size=1, max_size=90), min_size=2, max_size=24)


@pytest.mark.slow
@examples(8)
@given(LABELS.map(lambda found: [f"{i}{text}" for i, text in enumerate(found)]), st.integers(1, 4))
@example([f"bros:chunk={2**i},kv=paged,replacement=false" for i in range(12)], 1)
def test_a_legend_is_inside_the_figure_and_beside_the_panels(labels, panels):
    names = [f"number{i}" for i in range(panels)]
    figure = plot(table(labels, [0.5, 0.9], names), ["policy", "load"], "load", names)
    figure.canvas.draw()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0 and box.x1 <= whole.x1
    assert box.y0 >= whole.y0 and box.y1 <= whole.y1
    assert [text.get_text() for text in legend.get_texts()] == labels
    for ax in figure.axes:
        assert not box.overlaps(ax.get_window_extent())
        assert ax.get_window_extent().height > 60


def test_a_line_for_each_policy_with_its_error_bars():
    figure = plot(table(["vllm", "bros"], [0.9, 0.5]), ["policy", "load"], "load", NAMES)
    first, _ = figure.axes
    lines = [c.lines[0] for c in first.containers]
    assert [line.get_xdata().tolist() for line in lines] == [[0.5, 0.9]] * 2
    assert [line.get_ydata().tolist() for line in lines] == [[1, 0], [3, 2]]
    low, high = first.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == (0.5, 1.5)


def test_over_a_setting_that_is_no_number_values_are_places():
    figure = plot(table(["vllm", "bros"], [0.5]), ["policy", "load"], "policy", NAMES)
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels == ["vllm", "bros"] and not figure.legends


def test_by_default_the_number_with_most_values_is_the_axis():
    frame = table(["vllm", "bros", "echo", "x"], [0.5, 0.9]).assign(pool=4)
    assert choose_x(frame, ["policy", "load", "pool"]) == "load"
    assert choose_x(frame[:2], ["policy", "pool"]) is None
    assert choose_x(frame, ["policy", "pool"]) == "policy"


def test_numbers_that_no_run_has_are_refused_with_the_nearest():
    frame = table(["vllm"], [0.5])
    assert choose_y(frame, []) == ["output_throughput"]
    with pytest.raises(SettingsError, match=r"mean_tft_ms: no run .*mean 'mean_ttft_ms'"):
        choose_y(frame, ["mean_tft_ms"])


def test_what_to_draw_is_read_from_the_flag():
    assert parse_plot(["x=rate-scale", "y=a,b", "y=c"]) == (
        "rate_scale", ["a", "b", "c"], "page", "",
    )  # fmt: skip
    assert parse_plot(["size=column", "title=A, b"]) == (None, [], "column", "A, b")
    for wrong in (["x=a", "x=b"], ["x="], ["load"], ["x=a,b"]):
        with pytest.raises(SettingsError, match="--plot"):
            parse_plot(wrong)


@pytest.mark.slow
def test_files_are_the_same_bytes_and_without_a_date(tmp_path):
    frame = table(["vllm", "bros"], [0.5, 0.9])
    for folder in ("a", "b"):
        write_plots(tmp_path / folder, plot(frame, ["policy", "load"], "load", NAMES))
    for kind in ("png", "svg", "pdf"):
        first, second = ((tmp_path / f / f"plot.{kind}").read_bytes() for f in ("a", "b"))
        assert first == second
        assert not re.search(rb"CreationDate|<dc:date>|Matplotlib v", first)


def test_numbers_have_the_digits_of_their_intervals():
    assert with_digits(0.2213, 0.1234) == "0.22 ± 0.12"
    assert with_digits(68.66, 2.04) == "68.7 ± 2.0" and with_digits(3713.4, 417.2) == "3,713 ± 417"
    assert with_digits(1.0, 0.0) == "1 ± 0" and with_digits(12345.6, np.nan) == "12,346"
    assert with_digits(21.6012, 0.00704) == "21.6012 ± 0.0070"
    assert with_digits(495.2, 99.7) == "495 ± 100" and with_digits(-0.17, 14.0) == "0 ± 14"
    assert with_digits(np.nan, 1.0) == "-"


@pytest.mark.parametrize("names", [["_m:Ed", "vllm"], ["", "_hidden", "b$x_1$"]])
def test_every_line_has_its_own_name_whatever_that_is(names):
    """matplotlib leaves out labels that begin with `_`, and would take `$` for mathematics."""
    rows = [
        {"policy": name, "rate": rate, "x": 1.0 + k, "x_ci": 0.1}
        for k, name in enumerate(names)
        for rate in (1, 2)
    ]
    figure = plot(pd.DataFrame(rows), ["policy", "rate"], "rate", ["x"])
    (legend,) = figure.legends
    shown = [text.get_text().replace("\\$", "$") for text in legend.get_texts()]
    assert shown == names
    panel = figure.axes[0]
    drawn = [container.lines[0].get_color() for container in panel.containers]
    assert [to_hex(handle.get_color()) for handle in legend.legend_handles] == drawn
