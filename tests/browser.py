"""A headless Chromium, driven through ChromeDriver by the W3C's WebDriver protocol: nothing but the
standard library, and the two programs (Debian: packages chromium and chromium-driver)."""

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
