"""The page in headless Chromium (`make browser` installs it): chat, live view, phone, dark, keys, failures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from loopback import RunningServer, start_server
from stepping_engine import SteppingEngine

from graphrunner.entrypoints.openai.server_options import ServerOptions

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
WAIT_MS = 20_000
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: make browser installs it")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    server = start_server(lambda: SteppingEngine(num_steps=500))
    yield server
    server.stop()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """A function: url, context options -> a page that must not have said anything bad by the end of the test."""
    problems: list[str] = []
    contexts = []

    def make(url: str, **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda said: problems.append(said.text) if "Content Security" in said.text else None)
        page.goto(url)
        return page

    yield make
    for context in contexts:
        context.close()
    assert problems == []


def until(page: Any, expression: str) -> None:
    """Wait for an expression to hold; the page's policy forbids the evaluation that Playwright's own waiting does."""
    for _ in range(WAIT_MS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"waited in vain for {expression}")


def ask(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def test_chat_streams(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url)
    page.wait_for_selector("#state[data-state=ready]")
    assert page.inner_text("#model") == "fake-model"
    ask(page, "hi")
    page.wait_for_selector(".turn .foot")
    assert page.inner_text(".turn.assistant .body") == "Hello, world!"
    assert "14 tokens" in page.inner_text(".turn .foot") and page.inner_text("#send") == "Send"
    ask(page, "again")
    until(page, "document.querySelectorAll('.foot').length === 2")
    page.click("#settings summary")
    page.click("#clear")
    assert page.locator(".turn").count() == 0 and page.is_visible("#empty")


def test_a_reply_is_text_and_code(open_page: Any, server: RunningServer) -> None:
    """Markup in a reply is shown, never obeyed; fences become blocks."""
    server.engine.script = "<img src=x onerror=alert(1)> `a`\n```python\nprint(1)\n```\nend"
    try:
        page = open_page(server.url)
        ask(page, "hi")
        page.wait_for_selector(".turn .foot")
        assert page.locator(".turn img").count() == 0
        assert page.inner_text(".turn.assistant .body").startswith("<img src=x onerror=alert(1)> a")
        assert page.inner_text(".turn pre code") == "print(1)" and page.inner_text(".turn.assistant .body").endswith(
            "end"
        )
    finally:
        server.engine.script = "Hello, world!"


def test_stop(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url)
    server.engine.script = "x" * 2000
    try:
        ask(page, "slow")
        until(page, "document.querySelector('.turn.assistant .body').textContent.length > 2")
        assert page.inner_text("#send") == "Stop"
        page.click("#send")
        page.wait_for_selector(".turn .foot")
        assert "stopped" in page.inner_text(".turn .foot")
        server.wait_until(lambda: not server.engine.live)
    finally:
        server.engine.script = "Hello, world!"


def test_live_view(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url, viewport={"width": 1400, "height": 900})
    page.wait_for_selector("#strip i")
    assert page.locator("#strip i").count() > 100
    assert "decode_cuda_graph_runner" in page.inner_text("#legend") and "padding" in page.inner_text("#legend")
    assert "2 waiting, 5 preemptions" in page.inner_text("#waiting")
    assert page.inner_text("#pages") == "25 %" and "30 of 120" in page.inner_text("#pages-note")
    assert page.inner_text("#coverage") in ("87 %", "88 %")
    assert "NUM_TOKENS" in page.inner_text("#misses") and "4t x 4r greedy" in page.inner_text("#keys")
    decode, eager = (page.evaluate(_BAR_COLOR, runner) for runner in (True, False))
    assert decode != eager


_BAR_COLOR = """(isGraph) => {
  const step = steps.slice(-60).find((each) => each.is_graph === isGraph);
  return getComputedStyle(document.querySelector(`#strip i[data-id="${step.id}"]`)).backgroundColor;
}"""


def test_hover_and_keys_tell_of_a_step(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url, viewport={"width": 1400, "height": 900})
    page.wait_for_selector("#strip i")
    box = page.locator("#strip i").nth(20).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    told = page.inner_text("#tip")
    assert "step" in told and ("replayed a graph" in told or "no graph: NUM_TOKENS" in told) and "of padding" in told
    page.mouse.move(5, 5)
    assert page.is_hidden("#tip")
    page.focus("#strip")
    seen = set()
    for _ in range(9):
        page.keyboard.press("ArrowLeft")
        seen.add(page.inner_text("#tip").split("\n")[-1])
    assert len(seen) == 2 and "replayed a graph" in seen, "eight steps in a row hold an eager one"
    page.keyboard.press("Escape")
    assert page.is_hidden("#tip")


def test_new_steps_arrive(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url)
    page.wait_for_selector("#strip i")
    last = page.evaluate("steps[steps.length - 1].id")
    ask(page, "hi")
    until(page, f"steps[steps.length - 1].id >= {last + 13}")


def test_another_engine_starts_anew(open_page: Any, server: RunningServer) -> None:
    """Behind the same front a new core counts steps and tokens from 0."""
    page = open_page(server.url)
    page.wait_for_selector("#strip i")
    page.evaluate("clearTimeout(timer); seen = { at: 0, tokens: 5 }; takeRate({ num_output_tokens: 0 })")
    assert page.evaluate("steps.length") == 0
    page.evaluate("poll()")
    until(page, "steps.length > 100")


def test_phone(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    page.wait_for_selector("#state[data-state=ready]")
    assert page.is_visible("#chat") and page.is_hidden("#engine")
    page.click("nav button[data-view=engine]")
    assert page.is_visible("#strip") and page.is_hidden("#chat")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out sideways"
    page.wait_for_selector("#strip i")
    page.tap("#strip")
    assert page.is_visible("#tip")
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


def test_light_and_dark(open_page: Any, server: RunningServer) -> None:
    page = open_page(server.url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    light = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == light, "the choice is kept"


def test_key_and_errors(open_page: Any) -> None:
    server = start_server(lambda: SteppingEngine(num_steps=10), ServerOptions(port=0, api_key=("k1",)))
    try:
        page = open_page(server.url)
        page.wait_for_selector("#state[data-state='needs a key']")
        ask(page, "hi")
        page.wait_for_selector(".turn.error")
        assert "API key" in page.inner_text(".turn.error")
        page.fill("#key", "k1")
        page.press("#key", "Tab")
        page.wait_for_selector("#state[data-state=ready]")
        ask(page, "hi")
        page.wait_for_selector(".turn .foot")
    finally:
        server.stop()
    page.wait_for_selector("#state[data-state=unreachable]")
