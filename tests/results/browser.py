"""Chromium without a screen, driven by its command line."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (.ci/run installs it)")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # nothing leaves this machine
)


class Visit(NamedTuple):
    """What happened when a page was opened.

    Attributes:
        dom: the page after its scripts.
        console: lines that the page wrote to the console, errors of loading included.
        requests: addresses that were asked for, without the page itself and what is inside it.
    """

    dom: str
    console: list[str]
    requests: list[str]


def visit(page: Path, *flags: str) -> Visit:
    """Opens a file."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "net.json"
        words = [CHROMIUM, *_FLAGS, f"--user-data-dir={folder}/profile", "--enable-logging=stderr"]
        ended = subprocess.run(
            [*words, f"--log-net-log={log}", "--dump-dom", *flags, page.as_uri()],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        events = _events(log)
    starts = [event["params"] for event in events if {"url", "initiator"} <= event.get("params", {}).keys()]
    # The browser's own attempts, to update itself and the like, have no origin.
    asked = {start["url"] for start in starts if start["initiator"] != "not an origin"}
    return Visit(
        ended.stdout,
        [line for line in ended.stderr.splitlines() if "CONSOLE" in line],
        sorted(address for address in asked if not address.startswith(("file:", "data:"))),
    )


def screenshot(page: Path, picture: Path, width: int, height: int) -> None:
    """Draws a file to a PNG of `width` x `height` pixels."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--user-data-dir={folder}", f"--window-size={width},{height}", f"--screenshot={picture}"]
        subprocess.run([CHROMIUM, *_FLAGS, *flags, page.as_uri()], capture_output=True, timeout=60, check=True)


def _events(log: Path) -> list[dict[str, Any]]:
    text = log.read_text()
    try:
        return json.loads(text)["events"]
    except ValueError:  # the browser left before it closed the list
        return json.loads(text.rstrip().rstrip(",") + "]}")["events"]
