"""The page in Chromium: the pictures are drawn, the console is clean, and no text of a report runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowtide.reports import schema
from lowtide.reports.html.page import render_html
from tests.reports.small_reports import CORE, HOSTILE, LIFE, finding, report, stage, subject

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")

SCRIPT = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root in a container there is no sandbox to be had.
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


class Opened:
    """A page in a tab, with what the console said."""

    def __init__(self, browser: Any, path: Path, written: schema.Report, **settings: Any) -> None:
        path.write_text(render_html(written))
        self.said: list[str] = []
        self.tab = browser.new_context(**settings).new_page()
        self.tab.on("console", lambda message: self.said.append(message.text))
        self.tab.on("pageerror", lambda error: self.said.append(str(error)))
        self.tab.goto(path.as_uri())
        self.tab.wait_for_load_state()


def is_drawn(tab: Any, turn: int = 0) -> bool:
    """Whether a picture's canvas has anything but the background on it."""
    # What is not seen is not drawn.
    tab.locator("[data-life]").scroll_into_view_if_needed()
    canvas = tab.locator(".chart canvas").nth(turn)
    canvas.wait_for()
    canvas.scroll_into_view_if_needed()
    tab.wait_for_timeout(100)
    count = "canvas => new Set(new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, "
    count += "canvas.height).data.buffer)).size"
    return bool(canvas.evaluate(count) > 3)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_life_is_drawn_and_fits(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    written = report(subject(name="run", stages=LIFE))
    size = {"width": width, "height": 844}
    opened = Opened(browser, tmp_path / "index.html", written, viewport=size, color_scheme=scheme)
    assert is_drawn(opened.tab)
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.said == []


def test_another_process_is_chosen_by_keyboard(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=LIFE)))
    assert is_drawn(opened.tab)
    box = opened.tab.get_by_role("checkbox", name="VLLM::EngineCore, cpu")
    assert not box.is_checked()
    box.focus()
    opened.tab.keyboard.press("Space")
    assert is_drawn(opened.tab, 1)
    assert opened.said == []


def test_what_is_under_the_pointer_is_said_in_bytes(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=LIFE)))
    assert is_drawn(opened.tab)
    place = opened.tab.locator(".chart").first.bounding_box()
    opened.tab.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
    tip = opened.tab.locator(".tip")
    tip.wait_for()
    assert "create, cycle 1" in tip.inner_text() or "infer, cycle 1" in tip.inner_text()
    assert "weights\t40.0 MiB\t98 %" in tip.inner_text()


def test_a_remedy_is_copied(browser: Any, tmp_path: Path) -> None:
    leak = finding(remedy=schema.Remedy(action="pool.CACHE.clear()  # <b>", returns_bytes=48 << 20))
    written = report(subject(leak, name="run"))
    opened = Opened(browser, tmp_path / "index.html", written, permissions=["clipboard-read", "clipboard-write"])
    button = opened.tab.get_by_role("button", name="copy the remedy")
    button.click()
    assert opened.tab.evaluate("navigator.clipboard.readText()") == "pool.CACHE.clear()  # <b>"
    assert button.inner_text() == "copied"
    assert opened.said == []


def test_no_text_of_a_report_runs_or_changes_the_page(browser: Any, tmp_path: Path) -> None:
    for text in (SCRIPT, HOSTILE):
        process = msgspec.structs.replace(CORE, name=text)
        life = tuple(
            msgspec.structs.replace(
                stage(text, 1.0, 40, held=held),
                processes=tuple(msgspec.structs.replace(each, process=process) for each in LIFE[0].processes),
            )
            for held in (1, 2)
        )
        hostile = finding(message=text, holder=text, stage=text, path=(schema.Hop(type=text, edge=text),))
        written = report(subject(hostile, name=text, stages=life, reason=text), command=text)
        opened = Opened(browser, tmp_path / "index.html", written)
        assert is_drawn(opened.tab)
        for box in opened.tab.get_by_role("checkbox").all():
            box.check()
        place = opened.tab.locator(".chart").first.bounding_box()
        opened.tab.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        opened.tab.wait_for_timeout(200)
        assert opened.tab.title().startswith("lowtide: ")
        assert opened.tab.locator("img").count() == 0
        assert opened.said == []


def test_a_script_that_is_not_the_pages_own_does_not_run(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    opened = Opened(browser, path, report(subject(name="run", stages=LIFE)))
    path.write_text(path.read_text().replace("</body>", f"{SCRIPT}</body>"))
    opened.tab.goto(path.as_uri())
    opened.tab.wait_for_timeout(200)
    assert opened.tab.title().startswith("lowtide: ")
    assert any("Content Security Policy" in said for said in opened.said)
