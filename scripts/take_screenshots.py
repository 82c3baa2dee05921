"""Pictures of the page under traffic, into docs/images/: a server with the embedded model, a load, headless Chromium.

python scripts/take_screenshots.py          # needs Chromium (make browser); about two minutes
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PORT = 8765
URL = f"http://127.0.0.1:{PORT}"
SERVE = ["serve", "--port", str(PORT), "--num-threads", "1", "--max-num-seqs", "16", "--decode-sizes", "1,2,4,8,12",
         "--prefill-graph", "recording", "--prefill-sizes", "32,64,128"]  # fmt: skip
LOAD = ["bench", "serve", "--base-url", f"{URL}/v1", "--rate", "0.8", "--num-requests", "60", "--prompt-len", "60",
        "--output-len", "40"]  # fmt: skip
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
SIZES = {"light": (1280, 800), "dark": (1280, 800), "phone": (390, 844)}
START_TIMEOUT_S = 300
WARM_UP_S = 25
LATEST_PADDED = "shownSteps().findLastIndex((step) => step.num_padding_tokens > 0)"


def main() -> None:
    """Start, load, take, stop."""
    command = [sys.executable, "-m", "graphrunner.entrypoints.cli.main"]
    server = subprocess.Popen([*command, *SERVE])
    try:
        wait_ready()
        load = subprocess.Popen([*command, *LOAD], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(WARM_UP_S)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            for name in SIZES:
                take(browser, name)
            browser.close()
        load.terminate()
    finally:
        server.terminate()
        server.wait()


def wait_ready() -> None:
    """Return when the server takes requests."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            if httpx.get(f"{URL}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise TimeoutError("the server did not become ready")


def take(browser: Browser, name: str) -> None:
    """One picture, a question under way and a step with padding pointed at."""
    width, height = SIZES[name]
    page = browser.new_page(
        viewport={"width": width, "height": height},
        color_scheme="dark" if name == "dark" else "light",
        device_scale_factor=1.5 if name == "phone" else 1,
    )
    page.set_default_timeout(120_000)
    page.goto(URL)
    for question in ("Name three rivers of Europe, one a line.", "Which of them is the longest?"):
        page.fill("#text", question)
        page.press("#text", "Enter")
        if question.startswith("Name"):
            page.wait_for_selector(".turn .foot")
    page.wait_for_timeout(3000)
    if name == "phone":
        page.click("nav button[data-view=engine]")
        page.wait_for_timeout(1000)
    box = page.locator("#strip i").nth(max(0, page.evaluate(LATEST_PADDED))).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
    page.screenshot(path=IMAGES / f"page-{name}.png")
    page.close()


if __name__ == "__main__":
    main()
