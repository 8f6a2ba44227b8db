"""Headless Chromium for tests of the page; tests are skipped without it."""

import atexit
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.rewards.processes import HANG_S

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@cache
def chromium() -> str:
    """Start Chromium, once for all tests of this process, and return its address."""
    profile = tempfile.TemporaryDirectory(prefix="creditflow-chromium-", ignore_cleanup_errors=True)
    flags = ("--headless", "--no-sandbox", "--no-first-run", "--remote-debugging-port=0", "--remote-allow-origins=*")
    process = subprocess.Popen(
        [str(CHROMIUM), *flags, f"--user-data-dir={profile.name}"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if address := re.search(r"^DevTools listening on (ws://\S+)", line):
            Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would block it
            atexit.register(profile.cleanup)
            atexit.register(process.wait)
            atexit.register(process.kill)
            return address[1]
    raise RuntimeError("Chromium ended at its start")


_CONNECTION = ExitStack()


@cache
def browser() -> Any:
    """Connect to Chromium, which takes half a second. Until `disconnect`, this thread can run no other event loop."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=1000 * HANG_S)
    playwright = _CONNECTION.enter_context(sync_playwright())
    return playwright.chromium.connect_over_cdp(chromium(), timeout=1000 * HANG_S)


def disconnect() -> None:
    _CONNECTION.close()
    browser.cache_clear()


def failure_of(request: "Request") -> list[str]:
    """A line for the console, unless the browser cancelled the request."""
    return [] if request.failure == "net::ERR_ABORTED" else [f"not loaded: {request.url}: {request.failure}"]


@contextmanager
def opened(url: str, scheme: str = "light", width: int = 1280) -> Iterator["Page"]:
    """Open `url` and wait until the page is ready; fail at the end if the console has any message.

    A request that the browser cancels, because the page goes elsewhere, is no failure.
    """
    pytest.importorskip("playwright")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    said: list[str] = []
    context = browser().new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("requestfailed", lambda request: said.extend(failure_of(request)))
    page.set_default_timeout(1000 * HANG_S)
    page.goto(url)
    page.wait_for_selector("body[data-ready=true]")
    yield page
    context.close()
    assert said == []
