"""The report in a real browser: what is hovered is what is in the runs' files, light and dark, wide
and on a phone, with nothing loaded."""

import base64
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parameters import mostly_nightly
from tests.sim.reported import write_toy
from tests.sim.test_report_folders import (
    COMPARISON,
    HOSTILE,
    PLAN,
    TEX,
    hostile_plan,
    put,
    put_sweep,
    put_validation,
)
from twinserve.sim.report.chart import number, plain
from twinserve.sim.report.html import write_report
from twinserve.sim.results.files import read_run

# A headless Chromium, driven through ChromeDriver by the W3C's WebDriver protocol: nothing but
# the standard library, and the two programs (Debian: packages chromium and chromium-driver).
_ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)


def programs() -> tuple[str, str] | None:
    """(browser, driver); None where one of them is not installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


def need_browser() -> None:
    """Skips a test where there is none, unless it is said that there must be one."""
    if programs() is None:
        reason = "no browser: chromium and chromedriver are not on the path"
        if os.environ.get("TWINSERVE_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)


class Browser:
    """One window. Sizes and places are CSS pixels."""

    def __init__(self, url: str, session: str) -> None:
        self._url = f"{url}/session/{session}"

    def _call(self, what: str, body: dict | None = None) -> Any:
        return _post(f"{self._url}/{what}", body or {})

    def _devtools(self, command: str, **given) -> Any:
        return self._call("goog/cdp/execute", {"cmd": command, "params": given})

    def open(self, page: Path, width: int = 1100, dark: bool = False) -> None:
        """The page, when all of its charts are drawn."""
        self._devtools(
            "Emulation.setDeviceMetricsOverride",
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        self.turn(dark)
        self._call("url", {"url": page.resolve().as_uri()})
        charts = self.run("return document.querySelectorAll('script[data-chart]').length")
        for _ in range(600):
            if not charts or self.run("return document.body.dataset.drawn") == str(charts):
                return
            time.sleep(0.1)
        raise AssertionError(f"{charts} charts are not drawn: {self.errors()}")

    def turn(self, dark: bool, media: str = "") -> None:
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self._devtools("Emulation.setEmulatedMedia", media=media, features=features)

    def run(self, script: str, *given) -> Any:
        """What a function with this body returns."""
        return self._call("execute/sync", {"script": script, "args": list(given)})

    def point(self, x: float, y: float) -> None:
        """Moves the mouse there, in the window."""
        for place in ((x + 40, y + 40), (x, y)):
            move = {
                "type": "pointerMove",
                "duration": 20,
                "x": round(place[0]),
                "y": round(place[1]),
            }
            mouse = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
            self._call("actions", {"actions": [mouse | {"actions": [move]}]})
        time.sleep(0.2)

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def errors(self) -> list[str]:
        """What the console complained of since it was asked last."""
        return [entry["message"] for entry in self._call("se/log", {"type": "browser"})]

    def picture(self, file: Path, height: int | None = None) -> None:
        """A PNG of the whole page, or of its first `height` pixels."""
        size = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": height or size[1], "scale": 1}
        found = self._devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    found = programs()
    assert found is not None
    program, driver = found
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as profile:
        process = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait(url)
            options = {"binary": program, "args": [*_ARGUMENTS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = _post(f"{url}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = Browser(url, made["sessionId"])
            try:
                yield session
            finally:
                urllib.request.urlopen(urllib.request.Request(session._url, method="DELETE"))
        finally:
            process.terminate()
            process.wait(20)


def _wait(url: str) -> None:
    for _ in range(300):
        try:
            with urllib.request.urlopen(f"{url}/status", timeout=5) as answer:
                if json.load(answer)["value"]["ready"]:
                    return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("chromedriver does not answer")


def _post(url: str, body: dict) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from None


pytestmark = pytest.mark.slow

# The place in the window of the point of a chart: its chart's key, the label of its curve, and its
# number among the points; the chart is scrolled into the middle first.
PLACE = """
const figure = document.querySelector(`figure[data-key="${arguments[0]}"]`);
const plot = figure.querySelector(".plot");
plot.scrollIntoView({block: "center"});
const view = Bokeh.index.roots.find(v => plot.contains(v.el));
const line = view.model.renderers.find(r => r.name === arguments[1] && r.glyph.type !== "Segment");
const data = line.data_source.data;
const get = name => data instanceof Map ? data.get(name) : data[name];
const n = arguments[2] < 0 ? get("x").length + arguments[2] : arguments[2];
const box = view.canvas_view.el.getBoundingClientRect();
const sx = view.frame.x_scale.compute(get("x")[n]), sy = view.frame.y_scale.compute(get("y")[n]);
return {x: box.x + sx, y: box.y + sy, of: [get("x")[n], get("y")[n]]};
"""
# What is said in the tooltips that are shown, in their order.
SAID = """
const found = [];
function walk(node) {
  if (node.nodeType === 3) { const t = node.textContent.trim(); if (t) found.push(t); return; }
  if (node.tagName === "STYLE") return;
  for (const child of node.shadowRoot ? [...node.shadowRoot.childNodes] : []) walk(child);
  for (const child of node.childNodes ?? []) walk(child);
}
const seen = [];
function tooltips(node) {
  if (node.className?.includes?.("bk-Tooltip") && node.getBoundingClientRect().width > 0) {
    seen.push(node);
    return;
  }
  for (const child of node.shadowRoot ? [...node.shadowRoot.children] : []) tooltips(child);
  for (const child of node.children ?? []) tooltips(child);
}
tooltips(document.body);
seen.forEach(walk);
return found;
"""
# Distinct colours of a chart's text and grid as its model has them.
INKS = """
return [...new Set(Bokeh.documents.flatMap(d => d.roots()[0].below.map(
  a => String(a.major_label_text_color))))];
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("seen") / "all"
    for i, name in enumerate(("first", "second", "third_with_options_of_its_own_said")):
        write_toy(path / "runs" / name, seed=i % 2, prefer_rt=bool(i), place=i, every_s=1.0)
    put_sweep(path / "sweep")
    put(path / "plan", "plan", PLAN)
    put(path / "compared", "comparison", COMPARISON)
    put_validation(path / "validated")
    return path


@pytest.fixture(scope="module")
def page(folder) -> Path:
    need_browser()
    pytest.importorskip("bokeh", reason="bokeh is not installed: pip install 'twinserve[report]'")
    return write_report([folder], folder.parent / "page.html")


@pytest.fixture(scope="module")
def window(page):
    with browser() as found:
        yield found


def hovered(window, key: str, label: str, n: int) -> tuple[list[str], list[float]]:
    """(texts of the tooltips at the n-th point of a curve, its numbers as the chart has them)."""
    place = window.run(PLACE, key, label, n)
    window.point(place["x"], place["y"])
    return window.run(SAID), place["of"]


@pytest.mark.nightly
def test_a_hovered_point_says_the_numbers_of_its_run(window, page, folder):
    window.open(page)
    for name in ("first", "second"):
        summary = read_run(folder / "runs" / name).summary
        said, _ = hovered(window, "throughput-ttft", name, 0)
        x = number(summary["total_token_throughput"])
        y = number(summary["classes"]["rt"]["p99_ttft_ms"])
        assert name in said and x in said and y in said, said


@pytest.mark.nightly
def test_a_hovered_curve_says_a_number_that_is_in_the_rows(window, page, folder):
    window.open(page)
    rows = read_run(folder / "runs" / "second").rows.requests
    rows = rows[rows["service_class"] == "rt"]
    ttft = sorted(rows["first_token_s"] - rows["arrival_s"])
    for n in (0, len(ttft) // 2, -1):
        said, (x, y) = hovered(window, "cdf-rt-ttft_s", "second", n)
        assert "second" in said and x == pytest.approx(ttft[n])
        assert f"{x:.6g}" in said and f"{y:.6g}" in said, said
        assert y == pytest.approx((n % len(ttft) + 1) / len(ttft))


@pytest.mark.nightly
def test_intervals_and_rows_of_other_chapters_are_hovered_too(window, page):
    window.open(page)
    said, _ = hovered(window, "sweep-classes.rt.slo_attainment", "bros", 1)
    assert {"bros", "4", "0.8", "0.75 to 0.85", "bros, rate=4"} <= set(said), said
    said, _ = hovered(window, "plan-front", "on the front", 0)
    assert "2 x h100 tp2, undecided" in said and "7.5" in said, said


@pytest.mark.parametrize("width", mostly_nightly([1100, 390], 390))
def test_the_page_fits_its_width_loads_nothing_and_complains_of_nothing(window, page, width):
    window.errors()
    window.open(page, width)
    assert window.run("return document.documentElement.scrollWidth") <= width
    window.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    inside = (
        "return [...document.querySelectorAll('.wide')].map(t => [t.scrollWidth, t.clientWidth])"
    )
    assert all(0 < full <= shown for full, shown in window.run(inside))  # wrapped, or lists
    window.open(page, 700)
    window.turn(dark=False, media="print")
    assert window.run("return document.documentElement.scrollWidth") <= 700
    window.open(page, width)
    assert window.run("return performance.getEntriesByType('resource').length") == 0
    assert [m for m in window.errors() if "[bokeh" not in m] == []
    charts = window.run(
        "return [...document.querySelectorAll('.plot')].map(p => [p.offsetWidth, p.offsetHeight])"
    )
    assert len(charts) > 20
    assert all(width * 0.7 < w <= width and h > 200 for w, h in charts)


@pytest.mark.nightly
def test_it_turns_dark_and_light_with_the_system(window, page):
    window.open(page)
    paper = "return getComputedStyle(document.body).backgroundColor"
    light = window.run(paper), window.run(INKS)
    window.turn(dark=True)
    dark = window.run(paper), window.run(INKS)
    assert len(light[1]) == len(dark[1]) == 1 and light[0] != dark[0] and light[1] != dark[1]
    window.open(page, dark=True)
    assert (window.run(paper), window.run(INKS)) == dark


@pytest.mark.nightly
def test_a_name_in_the_key_hides_its_curve_and_shows_it_again(window, page):
    window.open(page)
    shown = """
    const root = Bokeh.documents.map(d => d.roots()[0]).find(r => r.renderers.some(
      p => p.name === "second" && p.glyph.type === "Step"));
    return root.renderers.filter(p => p.name === "second").map(p => p.visible);
    """
    button = 'figure[data-key="cdf-rt-ttft_s"] button[data-name="second"]'
    assert all(window.run(shown))
    window.click(button)
    assert not any(window.run(shown))
    window.click(button)
    assert all(window.run(shown))


@pytest.mark.nightly
def test_hostile_names_are_text_in_keys_and_tooltips(window, tmp_path):
    put(tmp_path / "all" / "plan", "plan", hostile_plan())
    put_sweep(tmp_path / "all" / "sweep", axis=TEX)
    write_toy(tmp_path / "all" / "<b>$$x$$<i>", n=20)
    write_toy(tmp_path / "all" / "other", n=20, seed=1)
    page = write_report([tmp_path / "all"], tmp_path / "p.html")
    window.errors()
    window.open(page)
    said, _ = hovered(window, "plan-front", "on the front", 0)
    assert any(plain(HOSTILE) in text for text in said), said
    said, _ = hovered(window, "throughput-ttft", "<b>$$x$$<i>", 0)
    assert "<b>$$x$$<i>" in said, said
    assert window.run("return document.querySelectorAll('img, b').length") == 0
    assert [m for m in window.errors() if "[bokeh" not in m] == []
