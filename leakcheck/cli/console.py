"""What all commands print with, and how they begin, write and end a report.

Standard output and error never change how a command ends, whatever reads them, and in whatever encoding.
"""

from __future__ import annotations

import codecs
import datetime
import errno
import importlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, cast

import msgspec
import typer
from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

import lowtide
from lowtide.reports.escaping import escape_characters, escape_json, one_line
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.schema import Begun, Report, ReportError, Subject, encode, exit_code
from lowtide.reports.terminal import render

if TYPE_CHECKING:
    from lowtide.leakcheck.suppressions.entries import Suppressions
    from lowtide.probes.device.driver import Driver
    from lowtide.reports.folder import UnfinishedReport


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""

_EXTRAS = {
    "httpx": "watch",
    "hypothesis": "fuzz",
    "mcp": "mcp",
    "opentelemetry": "watch",
    "prometheus_client": "serve",
    "starlette": "serve",
    "torch": "engine",
    "uvicorn": "serve",
}
"""What some commands need beside the others, and the extra with which it comes."""

WITHOUT_TERMINAL = 100
"""Columns of a table where nobody says how wide the output is shown, as in a log of a CI."""

Wide = Annotated[bool, typer.Option("--wide", help="Show all columns, not only the most telling ones that fit.")]

_SPELLED = {
    "\N{RIGHTWARDS ARROW}": "->",
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{MIDDLE DOT}": "-",
    "\N{MULTIPLICATION SIGN}": "x",
    "\N{MINUS SIGN}": "-",
    "\N{EM DASH}": "-",
    **dict(zip("▁▂▃▄▅▆▇█", "_.,-~=+#", strict=True)),
}
"""What lowtide prints and some encodings do not have, in ASCII."""

_CANNOT_BE_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def find_console(output: TextIO | None = None) -> Console:
    """Return where to print: as wide as its terminal; elsewhere tables take `COLUMNS` or 100, and prose is not folded.

    Without a terminal no control code is printed, whatever the environment forces; with `NO_COLOR` neither colours nor
    other styles.

    Args:
        output: None for standard output.
    """
    # What stands in brackets, or between colons, is a name's and no markup.
    console = partial(Console, file=output, markup=False, emoji=False, highlight=False)
    if (output or sys.stdout).isatty():
        made = console(color_system=None if colors_are_off() else "auto")
    else:
        columns = os.environ.get("COLUMNS", "")
        width = int(columns) if columns.isdecimal() and int(columns) else WITHOUT_TERMINAL
        made = console(width=width, soft_wrap=True, force_terminal=False)
    made.push_render_hook(_EscapesLines())
    return made


class _EscapesLines(RenderHook):
    """Escapes what is printed when its lines are laid out: a cell that was folded may begin one."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(each) for each in renderables]


class _Escaped(msgspec.Struct, frozen=True):
    shown: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        begun = ""
        for segment in console.render(self.shown, options):
            if segment.control:
                yield segment
                continue
            shown = []
            for turn, text in enumerate(segment.text.split("\n")):
                begun = begun if turn == 0 else ""
                shown.append(escape_characters(text) if begun.strip() else one_line(text))
                begun += text
            yield segment._replace(text="\n".join(shown))


def colors_are_off() -> bool:
    """Return whether the user wants no colours: https://no-color.org."""
    return os.environ.get("NO_COLOR", "") != ""


def progress_line(console: Console) -> Progress:
    """Return a line with what is being done, how far and since when: on a terminal alone, and gone when it is done."""
    return Progress(
        SpinnerColumn(),
        # What is done gives way to the figures where both do not fit.
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(bar_width=20),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=7)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        console=console,
        disable=not sys.stdout.isatty() or console.is_dumb_terminal,
        transient=True,
        expand=True,
    )


def say(*lines: str, err: bool = False) -> None:
    """Print lines. A line break within one is data, and shown as such: it may be of a file, or name one."""
    typer.echo("\n".join(map(one_line, lines)), err=err)


def write(text: str | bytes) -> None:
    """Write to standard output what is in a format with escapes of its own: JSON, Markdown, a page, a CI's commands."""
    typer.echo(text, nl=False)


def write_json(report: Report) -> None:
    """Write a report to standard output as JSON."""
    write(escape_json(encode(report).decode()))


def refuse(message: str) -> NoReturn:
    """End with one line and exit code 2."""
    say(f"lowtide: {message}", err=True)
    raise typer.Exit(2)


def check_positive(**options: int) -> None:
    """Refuse an option that counts something and is less than 1."""
    for name, value in options.items():
        if value < 1:
            refuse(f"--{name} {value} is not possible: use 1 or more")


@contextmanager
def interruptible(said: str) -> Iterator[None]:
    """End the command with one line and exit code 130 when Ctrl-C comes in here."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"lowtide: {said}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def report_own_error(error: BaseException) -> None:
    """Say in one line what went wrong in lowtide itself, and where its traceback is."""
    say(f"lowtide: {_described(error)}", err=True)


def _described(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        remedy = f'pip install "lowtide[{_EXTRAS[package]}]"' if package in _EXTRAS else f"install {package}"
        return f"this command needs {package}, which cannot be imported ({error}): {remedy}"
    if isinstance(error, SystemExit):
        return f"nothing was judged: the program that ran ended the process by sys.exit({error.code!r})"
    said = f"an error of lowtide itself: {type(error).__name__}: {error}"
    traceback = "".join(format_exception(error))
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="lowtide-error-", suffix=".txt", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            file.write(traceback)
    except OSError:
        say(*traceback.splitlines(), err=True)
        return f"{said}; please report it with this traceback"
    return f"{said}; please report it with the traceback in {file.name}"


class GuardedStream:
    """Standard output or error, or the bytes below one, with its writes guarded; all else is the stream's.

    Attributes:
        problem: why it could not be written, in words; None where all was written, or nobody reads it any more.
    """

    def __init__(self, stream: Any, above: GuardedStream | None = None) -> None:
        self._stream = stream
        self._noted_by = above or self
        self.problem: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> GuardedStream:
        """Where bytes are written; guarded likewise."""
        return GuardedStream(self._stream.buffer, self)

    def write(self, data: str | bytes) -> int:
        """Write a text, or bytes, or drop them where none can be written any more."""
        self.attempt(self._stream.write, data)
        return len(data)

    def flush(self) -> None:
        """Hand on what was written."""
        self.attempt(self._stream.flush)

    def attempt(self, call: Callable[..., object], *arguments: object) -> None:
        """Make a call that writes. Where that is not possible, this is noted, and all that follows is dropped.

        It is no error for the caller: a life whose lines nobody can read still has a report, and a verdict.
        """
        try:
            call(*arguments)
        except OSError as error:
            if error.errno in _CANNOT_BE_WRITTEN:
                self._noted_by.problem = f"the output cannot be written: {os.strerror(error.errno)}"
            elif not isinstance(error, BrokenPipeError):
                raise
            # What the stream still has is written when the process ends, too.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def guard_standard_output() -> GuardedStream:
    """Keep any write to standard output or error from ending in a traceback, which has the exit code of a leak.

    What the encoding does not have is spelled in ASCII, letters by their numbers. Where the reader has gone away, as
    `head` does, the rest is dropped: the exit code is still the verdict's.
    """
    sys.stderr = cast(TextIO, _guarded(sys.stderr))
    guarded = _guarded(sys.stdout)
    sys.stdout = cast(TextIO, guarded)
    return guarded


def _guarded(stream: TextIO | GuardedStream | None) -> GuardedStream:
    if isinstance(stream, GuardedStream):
        return stream
    if stream is None:  # closed by who started this process, as daemons do
        stream = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed with the process
    if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
        codecs.register_error("lowtide-ascii", _spell)
        stream.reconfigure(errors="lowtide-ascii")
    return GuardedStream(stream)


def _spell(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_SPELLED.get(each) or ascii(each)[1:-1] for each in missing), error.end


ReportFolder = Annotated[Path | None, typer.Option(help="Folder for the report (JSON, HTML, JUnit, Markdown).")]
KnownLeaks = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Known leaks that may stay; an entry that none needs fails.")
]


def check_writable(folder: Path | None) -> None:
    """Make sure that the report, if there is to be one, can be written before hours are spent on what goes into it."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(f"--report {folder} cannot be written to ({error.strerror}): choose another folder")


def load_suppressions(path: Path | None) -> Suppressions:
    """Read the user's entries, then the shipped ones."""
    from lowtide.leakcheck.suppressions.entries import Suppressions, load, shipped
    from lowtide.leakcheck.suppressions.toml import SuppressionError

    try:
        own = load(path).entries if path is not None else ()
    except SuppressionError as error:
        refuse(f"--suppressions {error}")
    return Suppressions((*own, *shipped().entries))


def show_on_github(report: Report) -> None:
    """Append the summary to the page of a step of GitHub Actions, and mark the holders' lines."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    from lowtide.reports.github import append_summary, render_annotations

    try:
        append_summary(report, os.environ)
    except ReportError as error:
        # The exit code is about the engine: it stays what the report says.
        say(f"lowtide: {error}", err=True)
    write(render_annotations(report, Path.cwd()))


@contextmanager
def begin_report(folder: Path | None, driver: Driver, part: str = "") -> Iterator[UnfinishedReport | None]:
    """Keep in a folder what the run in this block finishes, in case that it is killed.

    Args:
        folder: of the report, which is written after the block; after an error in it there is none. None for no report.
        driver: as that of `make_report`.
        part: what is finished one after the other, as `cycle`.
    """
    from lowtide.reports.folder import UnfinishedReport

    if folder is None:
        yield None
        return
    unfinished = UnfinishedReport(folder, Begun(report=make_report(None, driver), part=part))
    try:
        yield unfinished
    except BaseException:
        unfinished.remove()
        raise


def make_report(subject: Subject | None, driver: Driver) -> Report:
    """Return the report of one subject, or of none yet, with this machine and the command line."""
    from lowtide.reports.from_snapshot import report_of

    command = shlex.join(["lowtide", *sys.argv[1:]])
    return report_of([] if subject is None else [subject], lowtide.__version__, command, driver, command_settings())


def write_report(report: Report, folder: Path | None, *, is_final: bool = True) -> tuple[Path | None, str]:
    """Write a report; return where it is, and why it could not be written. Both are empty without a folder.

    What was found is shown all the same, and then why: see `ended_with`.
    """
    from lowtide.reports.folder import write_folder

    try:
        return (None, "") if folder is None else (write_folder(report, folder, is_final=is_final), "")
    except ReportError as error:
        return None, str(error)


def show_judged(
    console: Console,
    report: Report,
    folder: Path | None,
    known: Suppressions,
    used: Collection[str],
    *notes: str,
    ran_all: bool,
    wide: bool = False,
) -> tuple[int, str]:
    """Write the report of one subject and show it; return the exit code, and why it could not be written.

    Args:
        console: where it is shown.
        report: what was judged.
        folder: of the report; None for none.
        known: what is suppressed.
        used: the entries of that which matched something.
        notes: lines below where it is.
        ran_all: whether all was run that an entry may be for.
        wide: whether all columns of the tables are shown.
    """
    from lowtide.leakcheck.suppressions.entries import problems

    # Written before it is shown: a pipe that breaks must not cost the report.
    where, unwritten = write_report(report, folder)
    console.print(render(report, *([] if where is None else [f"report: {where}"]), *notes, wide=wide))
    (subject,) = report.subjects
    wrong = problems(known.entries, used, datetime.date.today(), subject.findings, ran_all=ran_all)
    for problem in wrong:
        console.print(HangingText(f"SUPPRESSION {problem}", style="red"))
    return exit_code(report) or (1 if wrong else 0), unwritten


def ended_with(code: int, unwritten: str) -> int:
    """Return the exit code of a verdict, or say why its report could not be written and return 2."""
    if unwritten:
        say(f"lowtide: {unwritten}", err=True)
    return 2 if unwritten else code


def command_settings() -> dict[str, str]:
    """Return all arguments and options of the command that runs; nothing outside of one."""
    # click's, which typer takes from elsewhere in some versions.
    package = typer.Context.__mro__[1].__module__.rpartition(".")[0]
    context = importlib.import_module(f"{package}.globals").get_current_context(silent=True)
    given = {} if context is None else context.params
    return {name: _shown(value) for name, value in sorted(given.items()) if value is not None}


def _shown(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    shown = shlex.join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    # A report is read by more people than the address of a database.
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]*@", r"\1***@", shown)
