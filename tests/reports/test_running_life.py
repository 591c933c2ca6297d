"""What a terminal shows while `lowtide run` runs, and that nothing of it is where there is no terminal."""

from __future__ import annotations

import gc
import io
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from rich.console import Console

from lowtide.leakcheck.cli import run as lives
from lowtide.leakcheck.cli.console import find_console
from lowtide.leakcheck.cli.run import shown_live
from lowtide.leakcheck.lives.script import SCRIPT, Event
from lowtide.reports import schema
from lowtide.reports.terminal.running_life import RunningLife
from lowtide.reports.terminal.sparkline import sparkline
from tests.reports.terminals import lines_of, sent_to_terminal
from tests.reports.test_widths import check_figures

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
MIB = 1 << 20

SIZES = {
    "RSS": [300 * MIB, 400 * MIB, 350 * MIB],
    "arena kv_cache": [0, 64 * MIB, 0],
    "arena runtime": [0, 0, 0],
    "driver, cuda:0": [600 * MIB, 900 * MIB, 610 * MIB],
}

DRAW = """
from lowtide.leakcheck.cli.console import find_console
from lowtide.leakcheck.cli.run import shown_live
from lowtide.leakcheck.lives.script import Event
console = find_console()
with shown_live(console) as show:
    for turn in range(3):
        show(Event(1, 1, "infer", turn, 3, {"arena weights": turn << 20, "RSS": 1 << 30}))
console.print("the end", style="bold red")
"""


def drawn(life: RunningLife, width: int = 80, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(width=width, file=file)
    with console.capture() as captured:
        console.print(life)
    return captured.get().splitlines()


def test_a_bar_is_as_high_as_the_largest_value_in_it() -> None:
    assert sparkline([0, 1, 2, 7], 40) == "▁▂▃█"
    assert sparkline([5] * 10, 40) == "█" * 10
    assert sparkline([0] * 80 + [9] + [0] * 79, 40) == "▁" * 20 + "█" + "▁" * 19


def test_arenas_come_first_and_what_never_held_anything_is_left_out() -> None:
    first, *others = drawn(RunningLife("cycle 1/2: sleep(1)", 2, 18, "12:00:00", SIZES))
    assert re.fullmatch(r"cycle 1/2: sleep\(1\) +[━╸╺ ]+ +2/18 since 12:00:00 *", first)
    assert others == [
        "arena kv_cache ▁█▁       0 B",
        "driver, cuda:0 ▆█▆ 610.0 MiB",
        "RSS            ▆█▇ 350.0 MiB",
    ]


@pytest.mark.parametrize("columns", [50, 60, 80, 200])
def test_no_line_is_too_long_and_the_count_of_stages_is_whole(columns: int) -> None:
    names = {"in " + "python -m a.server --model of-somebody " * 9: [MIB] * 500, **SIZES}
    life = RunningLife("cycle 1/2: sleep(level=1, tags=weights, mode=abort)" * 3, 98_765, 123_456, sizes=names)
    lines = drawn(life, columns)
    assert max(map(len, lines)) <= columns
    assert "98765/123456" in lines[0]
    assert any(line.startswith("arena kv_cache ") for line in lines)


def test_a_terminal_without_blocks_is_shown_sizes() -> None:
    lines = drawn(RunningLife("create", 1, 9, sizes=SIZES), encoding="latin-1")
    assert lines[1] == "arena kv_cache       0 B"
    "".join(lines).encode("latin-1")


def test_a_text_of_the_engine_s_is_no_markup_and_moves_no_cursor() -> None:
    (first, line) = drawn(RunningLife("infer[red]\x1b[2J", sizes={"in [bold]x\x1b[2J\n": [MIB]}))
    assert "\x1b" not in first + line
    assert first.startswith("infer[red]")
    assert line.startswith("in [bold]x")


def test_what_is_shown_live_keeps_whole_numbers_alone() -> None:
    class Sizes(dict[str, int]):
        """A mapping whose end can be seen."""

    class Seen(Event, frozen=True, weakref=True):
        """An event whose end can be."""

    file = io.StringIO()
    with shown_live(Console(file=file, force_terminal=True, width=80)) as show:
        show(Event(1, 1, "create", 0, 3, {"RSS": MIB}))
        show(Event(1, 1, "infer", 1, 3, {"RSS": MIB, "arena weights": 2 * MIB}))
        event = Seen(1, 1, "shutdown", 2, 3, Sizes(RSS=2 * MIB))
        seen = weakref.ref(event), weakref.ref(event.sizes)
        show(event)
        del event
        gc.collect()
        assert [reference() for reference in seen] == [None, None]
    # Before it was there, and after it went, there was nothing of it.
    assert re.search("arena weights.* ▁█▁", re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()))


def test_drawing_leaves_no_more_objects_after_each_life() -> None:
    def live(cycle: int) -> int:
        for turn in range(len(SCRIPT) + 1):
            sizes = {"RSS": cycle * 10**9 + turn * 10**7, "arena weights": turn << 24}
            doing, done = (*SCRIPT, "judgement")[turn], (cycle - 1) * len(SCRIPT) + turn
            show(Event(cycle, 3, doing, done, 3 * len(SCRIPT), sizes))
        return len(gc.get_objects())

    gc.collect()
    # A collection lets go of tuples of texts, though they are still there.
    gc.disable()
    try:
        with shown_live(Console(file=io.StringIO(), force_terminal=True, width=80)) as show:
            counts = [live(cycle) for cycle in (1, 2, 3)]
    finally:
        gc.enable()
    # Not one for each drawing.
    assert counts[2] - counts[1] < len(SCRIPT)


def test_a_terminal_that_is_gone_is_no_error_of_the_life_s() -> None:
    class Gone(io.StringIO):
        closed_at = 0

        def write(self, text: str) -> int:
            if self.closed_at:
                raise OSError(5, "Input/output error")
            return super().write(text)

    file = Gone()
    with shown_live(Console(file=file, force_terminal=True)) as show:
        show(Event(1, 1, "create", 0, 2, {"RSS": MIB}))
        file.closed_at = 1
        show(Event(1, 1, "shutdown", 1, 2, {"RSS": MIB}))
    assert "create" in file.getvalue()
    assert "shutdown" not in file.getvalue()


def test_an_interrupt_of_the_first_drawing_leaves_a_cursor() -> None:
    class Interrupted(io.StringIO):
        begun = False

        def write(self, text: str) -> int:
            if "starting" in text and not self.begun:
                self.begun = True
                raise KeyboardInterrupt
            return super().write(text)

    file = Interrupted()
    with pytest.raises(KeyboardInterrupt), shown_live(Console(file=file, force_terminal=True)):
        pass
    sent = file.getvalue()
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")


def test_a_terminal_is_drawn_on_in_colors_and_cleared() -> None:
    code, sent = sent_to_terminal(80, ["-c", DRAW], ROOT)
    assert code == 0, sent
    assert "▁▅█" in sent
    assert re.search(r"\x1b\[[0-9;]+m", sent)
    # The cursor is there again, and the drawing is not.
    assert sent.rindex("\x1b[?25h") > sent.rindex("\x1b[?25l")
    assert sent.endswith("the end\x1b[0m\r\n")


def test_with_no_color_it_is_drawn_without_any_style() -> None:
    code, sent = sent_to_terminal(80, ["-c", DRAW], ROOT, NO_COLOR="1")
    assert code == 0, sent
    assert "▁▅█" in sent
    assert re.findall(r"\x1b\[[0-9;]*m", sent) == []
    # Empty is as good as not set.
    _, sent = sent_to_terminal(80, ["-c", DRAW], ROOT, NO_COLOR="")
    assert re.search(r"\x1b\[[0-9;]+m", sent)


def test_a_dumb_terminal_is_sent_plain_text_alone() -> None:
    assert sent_to_terminal(80, ["-c", DRAW], ROOT, TERM="dumb") == (0, "the end\r\n")


@pytest.mark.parametrize(("is_terminal", "kind"), [(False, "xterm"), (True, "dumb")])
def test_what_cannot_be_drawn_on_is_left_alone(is_terminal: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would stand in for the streams that the engine writes to.
    monkeypatch.setattr(lives, "Live", None)
    file = io.StringIO()
    with shown_live(Console(file=file, force_terminal=is_terminal, _environ={"TERM": kind})) as show:
        show(Event(1, 1, "create", 0, 2, {"RSS": MIB}))
    assert file.getvalue() == ""


def test_without_a_terminal_nothing_is_drawn_whatever_the_environment_forces() -> None:
    forced = {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "TTY_INTERACTIVE": "1", "GITHUB_ACTIONS": "true"}
    done = subprocess.run(
        [sys.executable, "-c", DRAW], capture_output=True, text=True, check=True, cwd=ROOT, env={"PATH": "", **forced}
    )
    assert (done.stdout, done.stderr) == ("the end\n", "")
    assert not find_console(io.StringIO()).is_terminal


def test_a_run_shows_each_arena_live_and_ends_with_its_verdict(tmp_path: Path) -> None:
    arguments = ["-m", "lowtide", "run", "--device", "cpu", "--wide", "--report", str(tmp_path)]
    code, sent = sent_to_terminal(80, arguments, ROOT)
    lines = lines_of(sent)
    assert code == 0, lines
    assert max(map(len, lines)) <= 80
    report = schema.read(tmp_path)
    check_figures(report, lines)
    for stage in ("create", "sleep(2)", "shutdown", "judgement"):
        assert any(f"cycle 2/2: {stage}" in line and "/26 since" in line for line in lines)
    last = next(turn for turn, line in enumerate(lines) if "cycle 2/2: judgement" in line)
    # One bar per reading: before each life and after each of its stages.
    bars = dict(re.findall(r"^(\S.*?) +([▁▂▃▄▅▆▇█]+) ", "\n".join(lines[last + 1 : last + 7]), re.MULTILINE))
    assert list(bars) == ["arena kv_cache", "arena runtime", "arena weights", "arena workspace", "RSS"]
    assert bars["arena weights"] == "▁██▁██▁██████▁" * 2
    assert {len(line) for line in bars.values()} == {28}
    # Nobody draws in a thread of its own: it would be among those that are counted.
    assert {stage.after.threads for stage in report.subjects[0].stages} == {1}
    assert [line for line in lines if line][-1] == "CLEAN: 2 cycles, everything came back"
