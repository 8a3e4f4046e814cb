"""The table side by side: what it shows, what it leaves out, and that it fits."""

import io
from functools import cache

import pytest
from rich.console import Console

from tests.sim.test_results_rows import toy_rows
from twinserve.sim.report.table import number, percent, print_table, render_table, table_rows
from twinserve.sim.results.metrics import summarise
from twinserve.sim.results.options import MetricsOptions


def summary(**classes) -> dict:
    """A hand-made summary of one class, with what a test sets."""
    latency = {"mean_ttft_ms": 100.0, "p90_ttft_ms": 400.0, "p99_ttft_ms": 900.0}
    return {"classes": {"rt": latency | classes}}


def line(text: str, title: str) -> str:
    return next(row for row in text.splitlines() if row.strip().startswith(title))


def test_one_column_a_run_with_the_best_marked():
    text = render_table({"fcfs": summary(mean_ttft_ms=250.0), "bros": summary(mean_ttft_ms=50.0)})
    assert text.splitlines()[0].split() == ["fcfs", "bros"]
    assert line(text, "TTFT mean / p90 / p99, ms").split("ms")[1].replace(" ", "") == (
        "250/400/90050/400/900*"
    )
    assert text.endswith("* best of the line\n")


def test_higher_is_better_for_attainment():
    text = render_table({"a": summary(ttft_attainment=0.25), "b": summary(ttft_attainment=0.75)})
    assert line(text, "TTFT attainment").split()[2:] == ["25.0", "%", "75.0", "%", "*"]


def test_no_difference_as_shown_is_no_best():
    text = render_table({"a": summary(mean_ttft_ms=100.01), "b": summary(mean_ttft_ms=100.04)})
    assert "*" not in text
    assert "*" not in render_table({"alone": summary()})


def test_a_number_that_a_run_lacks_is_a_dash_and_not_the_best():
    rows = {"a": summary(ttft_attainment=None), "b": summary(ttft_attainment=0.5)}
    assert line(render_table(rows), "TTFT attainment").split() == [
        "TTFT", "attainment", "-", "50.0", "%",
    ]  # fmt: skip


@cache
def toy_summary() -> dict:
    return summarise(toy_rows(), MetricsOptions(goodput={"ttft": 100.0}))


@pytest.mark.parametrize("runs", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("width", [80, 120])
def test_it_fits_the_width_and_shows_every_run(runs, width):
    labels = [f"policy-number-{i}" for i in range(runs)]
    text = render_table(dict.fromkeys(labels, toy_summary()), ["a short note"], width)
    assert max(map(len, text.splitlines())) <= width
    assert all(label in text for label in labels)
    assert "note: a short note" in text and "\x1b" not in text
    assert text.count("KV peak") == text.count("TTFT mean")  # each part is a whole table


def test_colour_replaces_the_mark_on_a_terminal_and_not_under_no_color(monkeypatch):
    runs = {"a": summary(), "b": summary(mean_ttft_ms=50.0)}

    def printed() -> str:
        sink = io.StringIO()
        print_table(runs, console=Console(file=sink, force_terminal=True, width=80))
        return sink.getvalue()

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = printed()
    assert "\x1b[1;32m" in coloured and "*" not in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = printed()
    assert "\x1b[1;32m" not in plain and "best of the line" in plain


def test_it_can_be_written_where_only_ascii_can():
    raw = io.BytesIO()
    sink = io.TextIOWrapper(raw, encoding="ascii")
    print_table(
        {"a": summary(), "b": summary(mean_ttft_ms=9.0)}, console=Console(file=sink, width=80)
    )
    sink.flush()
    assert b"TTFT" in raw.getvalue()


def test_labels_and_notices_are_text_and_not_markup():
    text = render_table({"[bold]x[/bold]": summary()}, ["trace [mooncake] is a replica"])
    assert "[bold]x[/bold]" in text and "[mooncake]" in text


def test_rows_for_other_renderers_carry_the_same_cells():
    sections = dict(table_rows({"a": summary(), "b": summary(mean_ttft_ms=50.0)}))
    (row,) = sections["Real-time"]
    assert row.cells == ["100 / 400 / 900", "50 / 400 / 900"] and row.best == [False, True]


def test_numbers_are_short():
    shown = [number(v) for v in (0, 0.01234, 0.456, 1.5, 12.34, 123.4, 12345.6)]
    assert shown == ["0", "0.0123", "0.46", "1.50", "12.3", "123", "12,346"]
    assert [percent(v) for v in (0.0, 0.5, 0.99996, 1.0)] == [
        "0.0 %", "50.0 %", "99.99 %", "100.0 %",
    ]  # fmt: skip
