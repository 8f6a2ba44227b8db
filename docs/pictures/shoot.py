"""Take the screenshots of the docs: `python docs/pictures/shoot.py RUN TRAJECTORY`.

RUN was trained by `creditflow train arithmetic_chain trainer.val_before_train=true
trainer.test_freq=5 data.val_max_samples=128`; TRAJECTORY is one of its last training step, with raised and with lowered
steps.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
from playwright.sync_api import FloatRect, sync_playwright

HERE = Path(__file__).parent
WIDTH = 1180


@dataclass(frozen=True)
class Look:
    """A colour scheme and a size of the window."""

    suffix: str
    """The end of the pictures' file names."""
    scheme: Literal["light", "dark"] = "light"
    width: int = WIDTH
    height: int = 960
    below: int = 760
    """Height of the picture of a trajectory."""


LOOKS = (Look(""), Look("_dark", "dark"), Look("_narrow", width=390, height=844, below=844))


def main(run: Path, trajectory: str) -> None:
    """Serve the run and take its screenshots."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    view = subprocess.Popen([sys.executable, "-m", "creditflow", "view", str(run), "--port", str(port)])
    try:
        _wait_for(url)
        _shoot(url, trajectory)
    finally:
        view.terminate()


def _wait_for(url: str) -> None:
    for _ in range(300):
        try:
            httpx.get(url).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    raise TimeoutError(f"no view at {url}")


def _shoot(url: str, trajectory: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for look in LOOKS:
            size = {"width": look.width, "height": look.height}
            page = browser.new_context(viewport=size, color_scheme=look.scheme).new_page()  # type: ignore[arg-type]
            page.set_default_timeout(120_000)
            page.goto(url)
            page.wait_for_selector("svg.trajectory")
            page.screenshot(path=HERE / f"report_top{look.suffix}.png")
            page.goto(f"{url}#trajectory={trajectory}&training_step={trajectory.split('-')[1]}")
            page.wait_for_selector(f"text=Trajectory {trajectory}")
            page.evaluate("document.querySelector('#others').style.position = 'static'")
            top = page.evaluate("document.querySelector('#trajectory').getBoundingClientRect().top + window.scrollY")
            clip: FloatRect = {"x": 0, "y": top - 8, "width": look.width, "height": look.below}
            page.screenshot(path=HERE / f"report_trajectory{look.suffix}.png", full_page=True, clip=clip)
            page.close()
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
