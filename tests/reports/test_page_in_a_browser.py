"""The page in Chromium: the pictures are drawn, the console is clean, and no text of a report runs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lowtide.reports import schema
from lowtide.reports.comparison.changes import compare_reports, render_as_page
from lowtide.reports.html.page import render_html
from lowtide.reports.live.broadcast import Broadcast
from lowtide.reports.live.server import PageServer
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage
from tests.reports.small_reports import CORE, HOSTILE, LIFE, finding, report, stage, subject

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium")]

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
    return len(colours_of(canvas)) > 3


def colours_of(canvas: Any) -> set[int]:
    """The colours of a canvas, as ABGR."""
    pixels = "new Uint32Array(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.buffer)"
    return set(canvas.evaluate(f"canvas => [...new Set({pixels})]"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_life_is_drawn_and_fits(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    written = report(subject(name="run", stages=LIFE))
    size = {"width": width, "height": 844}
    opened = Opened(browser, tmp_path / "index.html", written, viewport=size, color_scheme=scheme)
    assert is_drawn(opened.tab)
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.said == []


def test_on_a_phone_what_leaked_and_what_to_do_are_on_the_first_screen(browser: Any, tmp_path: Path) -> None:
    written = report(*(subject(finding(), name=f"test_{turn}") for turn in range(3)))
    opened = Opened(browser, tmp_path / "index.html", written, viewport={"width": 390, "height": 844})
    bottom = "document.querySelector('.causes li').getBoundingClientRect().bottom"
    assert opened.tab.evaluate(bottom) < 844
    rules = "[...document.querySelector('.lines tbody tr').cells].map(cell => getComputedStyle(cell).borderBottomWidth)"
    assert opened.tab.evaluate(rules)[:2] == ["0px", "1px"], "the rule is below the subject"


@pytest.mark.parametrize("width", [1280, 320])
def test_names_without_end_leave_the_page_as_wide_as_the_window(browser: Any, tmp_path: Path, width: int) -> None:
    name = "n" * 5000
    process = msgspec.structs.replace(CORE, name=name)
    life = tuple(
        msgspec.structs.replace(
            stage(name, 1.0, turn << 20, held=turn << 20),
            processes=(ProcessStage(process=process, tensors={}, arenas={}, reserved={}, cards={name: turn << 20}),),
        )
        for turn in range(4)
    )
    path = (schema.Hop(type=name, edge=name, suspect=True),)
    leak = finding(message=name, holder=name, device=name, trend="growth", stage=name, path=path)
    opened = Opened(
        browser,
        tmp_path / "index.html",
        report(subject(leak, name=name, stages=life, reason=name), command=name, settings={name: name}),
        viewport={"width": width, "height": 844},
    )
    assert is_drawn(opened.tab)
    place = opened.tab.locator("[data-trends]")
    place.scroll_into_view_if_needed()
    place.locator("canvas").wait_for()
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.said == []


def test_code_on_a_narrow_phone_has_room_for_a_name(browser: Any, tmp_path: Path) -> None:
    leak = finding(remedy=schema.Remedy(action="lowtide.engine.runner.supports_kw.cache_clear()", returns_bytes=1))
    size = {"width": 320, "height": 844}
    opened = Opened(browser, tmp_path / "index.html", report(subject(leak, name="run")), viewport=size)
    assert opened.tab.locator(".code pre").first.bounding_box()["width"] > 100
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= 320


def test_a_life_of_thousands_of_stages_is_drawn(browser: Any, tmp_path: Path) -> None:
    held = LIFE[1].after

    def after(turn: int) -> schema.Readings:
        figures = ("tensors", "reserved", "driver", "pinned", "rss", "cache_bytes", "shared_memory")
        return msgspec.structs.replace(held, **dict.fromkeys(figures, turn << 10))

    life = tuple(msgspec.structs.replace(LIFE[1], cycle=turn, after=after(turn)) for turn in range(20_000))
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=life)))
    assert is_drawn(opened.tab)
    place = opened.tab.locator("[data-trends]")
    place.scroll_into_view_if_needed()
    place.locator("canvas").wait_for()
    assert opened.said == []


def test_on_paper_pictures_are_light(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=LIFE)), color_scheme="dark")
    assert is_drawn(opened.tab)
    canvas = opened.tab.locator(".chart canvas").first
    # `--text` of both themes, ABGR.
    dark, light = 0xFFEEE7E3, 0xFF30231C
    assert [each in colours_of(canvas) for each in (dark, light)] == [True, False]
    opened.tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.tab.wait_for_timeout(100)
    assert [each in colours_of(canvas) for each in (dark, light)] == [False, True]
    opened.tab.evaluate("dispatchEvent(new Event('afterprint'))")
    opened.tab.wait_for_timeout(100)
    assert [each in colours_of(canvas) for each in (dark, light)] == [True, False]
    opened.tab.emulate_media(media="print")
    assert opened.tab.evaluate("getComputedStyle(document.body).color") == "rgb(28, 35, 48)"


def test_another_process_is_chosen_by_keyboard(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=LIFE)))
    assert is_drawn(opened.tab)
    box = opened.tab.get_by_role("checkbox", name="VLLM::EngineCore, cpu")
    assert not box.is_checked()
    box.focus()
    opened.tab.keyboard.press("Space")
    assert is_drawn(opened.tab, 1)
    assert opened.said == []


def test_two_ranks_are_side_by_side_and_eight_can_be_chosen(browser: Any, tmp_path: Path) -> None:
    ranks = tuple(
        ProcessStage(
            process=ProcessName(pid=turn, name=f"VLLM::Worker_TP{turn}", rank=turn),
            tensors={},
            arenas={},
            reserved={f"cuda:{turn}": 5 << 20},
            cards={f"cuda:{turn}": 9 << 20},
        )
        for turn in range(8)
    )
    life = tuple(msgspec.structs.replace(each, processes=ranks) for each in LIFE)
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=life)))
    assert is_drawn(opened.tab)
    for box in opened.tab.locator(".choice input").all():
        box.uncheck()
    for turn in (3, 7):
        opened.tab.get_by_role("checkbox", name=f"VLLM::Worker_TP{turn}, rank {turn}, cuda:{turn}").check()
    one, other = (figure.bounding_box() for figure in opened.tab.locator("figure:visible").all())
    assert one["y"] == other["y"]
    assert one["x"] + one["width"] <= other["x"]
    assert opened.said == []


def test_one_cycle_is_seen_alone(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="run", stages=growing(5))))
    assert is_drawn(opened.tab)

    def said_in_the_middle() -> str:
        place = opened.tab.locator("[data-life] .chart").first.bounding_box()
        opened.tab.mouse.move(0, 0)
        opened.tab.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        opened.tab.wait_for_timeout(200)
        return str(opened.tab.locator(".tip b").first.inner_text())

    assert said_in_the_middle().endswith("cycle 3")
    opened.tab.get_by_role("combobox", name="cycle").select_option("5")
    assert said_in_the_middle().endswith("cycle 5")
    opened.tab.get_by_role("combobox", name="cycle").select_option("all")
    assert said_in_the_middle().endswith("cycle 3")
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


def leaks(count: int, **fields: Any) -> tuple[schema.Finding, ...]:
    """Leaks that differ, each with a path and a stack."""
    return tuple(
        finding(
            fingerprint=f"{turn:016x}",
            bytes=(turn + 1) << 20,
            holder=f"engine.CACHE_{turn}",
            message=f"held by engine.CACHE_{turn}",
            path=(
                schema.Hop(type="module", edge="engine", mark="innocent"),
                schema.Hop(type="dict", edge=f".CACHE_{turn}", suspect=True),
            ),
            allocated_at=(schema.Frame(file="a.py", line=turn, function="load", source="x = 1"),),
            remedy=schema.Remedy(action=f"engine.CACHE_{turn}.clear()", returns_bytes=1 << 20),
            **fields,
        )
        for turn in range(count)
    )


def growing(cycles: int) -> tuple[schema.Stage, ...]:
    """A life in which more is held in each cycle."""
    return tuple(
        msgspec.structs.replace(
            each, cycle=cycle, after=msgspec.structs.replace(each.after, tensors=cycle << 20, rss=cycle << 21)
        )
        for cycle in range(1, cycles + 1)
        for each in LIFE
    )


WHOLE = report(
    subject(
        *leaks(300, trend="growth", stage="infer"),
        name="engine",
        stages=growing(5),
        type_growth=(schema.TypeGrowth(type="dict", since="cycle 1", until="cycle 2", before=1, after=9),),
    ),
    subject(name="tests/test_quiet.py::test_b", reason="no card"),
)
"""A report with everything that a page draws, and more findings than it shows from the start."""


@pytest.fixture
def whole(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    opened = Opened(browser, tmp_path / "index.html", WHOLE)
    yield opened
    assert opened.said == []
    opened.tab.context.close()


def test_a_filter_finds_what_the_page_does_not_show(whole: Opened) -> None:
    tab = whole.tab
    assert "CACHE_250" not in tab.locator("body").inner_text()
    tab.get_by_role("searchbox").fill("cache_250 LEAK")
    assert tab.get_by_role("status").inner_text() == "1 of 301"
    tab.locator(".match summary").first.click()
    part = tab.locator(".match .finding")
    part.wait_for()
    assert "held by engine.CACHE_250" in part.inner_text()
    assert part.get_by_role("button", name="copy the remedy").is_visible()
    assert tab.locator("#all").is_hidden()
    tab.get_by_role("searchbox").fill("")
    assert tab.locator("#all").is_visible()
    assert tab.locator(".match").count() == 0


def test_a_filter_for_nothing_that_is_there_says_so(whole: Opened) -> None:
    whole.tab.get_by_role("searchbox").fill("no-such-thing")
    assert whole.tab.get_by_role("status").inner_text() == "0 of 301"
    assert whole.tab.locator(".match").count() == 0


def test_outcomes_are_filtered_by_keyboard(whole: Opened) -> None:
    box = whole.tab.get_by_role("checkbox", name="clean (1)")
    box.focus()
    whole.tab.keyboard.press("Space")
    assert "test_quiet" in whole.tab.locator(".match").inner_text()
    assert whole.tab.get_by_role("status").inner_text() == "1 of 301"


def test_many_matches_come_a_hundred_at_a_time(whole: Opened) -> None:
    whole.tab.get_by_role("searchbox").fill("engine")
    assert whole.tab.locator(".match").count() == 100
    whole.tab.get_by_role("button", name="show 100 of 200 more").click()
    assert whole.tab.locator(".match").count() == 200


def test_a_link_to_what_is_no_element_yet_shows_it(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "index.html"
    opened = Opened(browser, path, WHOLE)
    opened.tab.goto(f"{path.as_uri()}#s0f299")
    opened.tab.reload()
    part = opened.tab.locator(".match .finding")
    part.wait_for()
    assert "held by engine.CACHE_299" in part.inner_text()
    opened.tab.get_by_role("button", name="show the whole page").click()
    assert opened.tab.locator("#all").is_visible()
    assert opened.said == []


def test_what_a_link_showed_gives_way_to_the_whole_page(whole: Opened) -> None:
    tab = whole.tab
    tab.get_by_role("searchbox").fill("cache_250")
    tab.evaluate("location.hash = 's0f299'")
    tab.get_by_role("button", name="show the whole page").click()
    assert tab.locator("#all").is_visible()
    assert tab.get_by_role("searchbox").input_value() == ""


def test_an_address_that_links_to_nothing_is_no_error(whole: Opened) -> None:
    whole.tab.evaluate("location.hash = '%'")
    whole.tab.wait_for_timeout(100)
    assert whole.tab.locator("#all").is_visible()


GREW = (("tuple", 60_000, 7), ("KVBlock", 0, 2048), ("dict", 4_000, 30))


@pytest.mark.parametrize("kind", ["trends", "growth", "stacks", "holders"])
def test_each_picture_is_drawn(whole: Opened, kind: str) -> None:
    for folded in whole.tab.locator("details.whole > summary").all():
        folded.click()
    place = whole.tab.locator(f"[data-{kind}]").first
    place.scroll_into_view_if_needed()
    canvas = place.locator("canvas")
    canvas.wait_for()
    whole.tab.wait_for_timeout(200)
    assert len(colours_of(canvas)) > 8


def test_the_verdict_is_drawn_into_the_trend(browser: Any, tmp_path: Path) -> None:
    drawn = []
    for trend in ("growth", None):
        life = subject(finding(trend=trend, stage="infer"), name="engine", stages=growing(5))
        opened = Opened(browser, tmp_path / "index.html", report(life))
        place = opened.tab.locator("[data-trends]")
        place.scroll_into_view_if_needed()
        place.locator("canvas").wait_for()
        opened.tab.wait_for_timeout(200)
        drawn.append((colours_of(place.locator("canvas")), place.locator("ul").inner_text()))
        opened.tab.context.close()
    # The colour of what is bad, which nothing else in the picture has: `--bad` as the canvas has it, ABGR.
    assert [0xFF1E26B3 in colours for colours, _ in drawn] == [True, False]
    assert "tensors: growth (kept growing), 48.0 MiB, held by engine.cache.POOL[0]" in drawn[0][1]
    assert drawn[1][1] == ""


def test_the_types_that_grew_most_come_first_whatever_they_were_before(browser: Any, tmp_path: Path) -> None:
    grown = [
        schema.TypeGrowth(type=name, since="a", until="b", before=had, after=had + more) for name, had, more in GREW
    ]
    opened = Opened(browser, tmp_path / "index.html", report(subject(name="engine", type_growth=tuple(grown))))
    place = opened.tab.locator("[data-growth]")
    place.scroll_into_view_if_needed()
    place.locator("canvas").wait_for()
    option = place.evaluate("place => echarts.getInstanceByDom(place.querySelector('.chart')).getOption()")
    # From the bottom up, as ECharts draws categories.
    assert option["yAxis"][0]["data"] == ["tuple", "dict", "KVBlock"]
    assert option["series"][0]["data"] == [7, 30, 2048]
    opened.tab.context.close()


def test_a_frame_of_the_flame_graph_is_seen_alone_and_all_again(whole: Opened) -> None:
    whole.tab.get_by_text("Where it was allocated").click()
    place = whole.tab.locator("[data-stacks] .chart")
    canvas = place.locator("canvas")
    canvas.wait_for()
    while len(colours_of(canvas)) <= 8:
        whole.tab.wait_for_timeout(50)
    back = whole.tab.get_by_role("button", name="show all")
    assert back.is_hidden()
    # On a busy machine the frames are not where they belong yet.
    while back.is_hidden():
        place.click(position={"x": 20, "y": 40})
        whole.tab.wait_for_timeout(50)
    back.click()
    back.wait_for(state="hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nobody_is_kept_out(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    size = {"width": width, "height": 844}
    opened = Opened(browser, tmp_path / "index.html", WHOLE, viewport=size, color_scheme=scheme)
    for folded in opened.tab.locator("summary").all():
        folded.click()
    for place in opened.tab.locator("[data-life], [data-trends], [data-growth], [data-stacks], [data-holders]").all():
        place.scroll_into_view_if_needed()
        place.locator("canvas").first.wait_for()
    opened.tab.evaluate("scrollTo(0, 0)")
    found = Axe().run(opened.tab)
    assert [each["id"] for each in found.response["violations"]] == [], found.generate_report()
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= width
    # Whether axe looks at all: a picture without a text is what it must find.
    opened.tab.evaluate("document.querySelector('main').append(document.createElement('img'))")
    assert [each["id"] for each in Axe().run(opened.tab).response["violations"]] == ["image-alt"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nobody_is_kept_out_of_a_comparison(browser: Any, tmp_path: Path, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    later = report(subject(*leaks(3), name="engine"))
    path = tmp_path / "diff.html"
    path.write_text(render_as_page(compare_reports(WHOLE, later), "before", "after"))
    tab = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme).new_page()
    tab.goto(path.as_uri())
    found = Axe().run(tab)
    assert [each["id"] for each in found.response["violations"]] == [], found.generate_report()


def test_a_life_is_watched_until_its_report_is_there(browser: Any, tmp_path: Path) -> None:
    server = PageServer(tmp_path)
    answering = threading.Thread(target=server.serve)
    answering.start()
    try:
        tab = browser.new_context().new_page()
        said: list[str] = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(server.url)
        assert "WAITING" in tab.locator("h1").inner_text()
        broadcast = Broadcast(tmp_path, lambda: report(command=SCRIPT))
        broadcast.stage_begins("cycle 1 of 9: wake", lambda most: LIFE)
        tab.get_by_text("RUNNING: cycle 1 of 9: wake").wait_for()
        tab.locator("#live-life canvas").first.wait_for()
        box = tab.get_by_role("checkbox", name="VLLM::EngineCore, cpu")
        box.check()
        broadcast.stage_begins("cycle 9 of 9: infer", lambda most: growing(9))
        tab.get_by_text("RUNNING: cycle 9 of 9: infer").wait_for()
        tab.locator("#live-trends canvas").wait_for()
        # What was chosen stays chosen.
        assert box.is_checked()
        (tmp_path / "leakcheck.json").write_bytes(msgspec.json.encode(WHOLE))
        broadcast.close()
        tab.get_by_text("LEAK: 1 of 2 subjects leaked").wait_for()
        assert tab.get_by_role("searchbox").is_visible()
        assert said == []
    finally:
        server.close()
        answering.join()
