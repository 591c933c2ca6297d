"""Takes the pictures of a report's page that README.md shows, in both themes.

Usage: python docs/draw_page.py docs/data/vllm-life.json docs/page

Needs Chromium and Playwright. Writes docs/page-light.png and docs/page-dark.png.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from lowtide.reports.html.page import render_html
from lowtide.reports.schema import decode

SIZE = {"width": 1180, "height": 860}


def take(browser: Browser, page: Path, scheme: str, output: Path) -> None:
    """One picture of what a browser shows of a page in a theme (`light` or `dark`)."""
    tab = browser.new_context(viewport=SIZE, color_scheme=scheme).new_page()
    tab.goto(page.as_uri())
    tab.locator("[data-life] canvas").first.wait_for()
    tab.wait_for_timeout(300)
    tab.screenshot(path=output)


def main() -> None:
    report, prefix = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "index.html"
        page.write_text(render_html(decode(Path(report).read_bytes(), report)))
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            take(browser, page, scheme, Path(f"{prefix}-{scheme}.png"))
        browser.close()


if __name__ == "__main__":
    main()
