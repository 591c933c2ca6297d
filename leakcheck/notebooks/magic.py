"""The cell magic `%%leakcheck`: runs a cell in the user's namespace, and shows what it leaves behind."""

from __future__ import annotations

import asyncio
import io
import keyword
import math
import sys
from argparse import ArgumentTypeError, Namespace
from contextlib import suppress
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import MagicArgumentParser
from rich.console import Console

from lowtide.leakcheck.notebooks.kept_names import CellNames, in_words_of_a_notebook
from lowtide.leakcheck.watching.check import LeakCheck
from lowtide.reports import terminal
from lowtide.reports.schema import Report

_WIDTH = 100
"""Columns of the report as text, where HTML is not shown."""


def register(shell: InteractiveShell) -> None:
    """Give a shell the cell magic `%%leakcheck`; legal twice."""
    # IPython's own types are those of the method before it was wrapped.
    offering: Any = shell
    offering.register_magic_function(CellCheck(shell), "cell", "leakcheck")


class CellCheck:
    """The magic of one shell.

    Args:
        shell: runs the cells.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._parser = _parser()
        # `%%leakcheck?` shows it.
        self.__doc__ = self._parser.format_help()

    def __call__(self, line: str, cell: str) -> None:
        """Run the cell, show its report, and end as the cell has ended.

        Raises:
            UsageError: an option is wrong, or the cell awaits while a kernel's loop is running.
            LeaksFoundError: with `--fail`, the cell has left something, or could not be judged.
        """
        options = self._parser.parse_argstring(line)
        self._refuse_awaiting(cell)
        # Line numbers of a traceback are those of the whole cell; a magic in it must stay in its first line.
        code = cell if cell.startswith("%%") else f"# %%leakcheck {line}\n{cell}"
        if options.warmup and not self._succeeds(code):
            self._fail_as_shown()
        names = CellNames(self._shell)
        with _check(options) as check:
            # Nothing here may hold what the cell has made or raised: it would be a holder.
            succeeded = self._succeeds(code)
        report = in_words_of_a_notebook(check.report, self._shell, names)
        _show(report, self._shell)
        if options.into is not None:
            self._shell.push({options.into: report}, interactive=False)
        if not succeeded:
            self._fail_as_shown()
        if options.fail:
            report.raise_for_leaks()

    def _succeeds(self, code: str) -> bool:
        """Run code as a cell; IPython shows its values, and its error if there is one."""
        shell = self._shell
        interactivity = shell.ast_node_interactivity
        # IPython looks for the `;` that hides a value in the whole cell, which ends with a parenthesis here.
        if DisplayHook.semicolon_at_end_of_expression(code):
            shell.ast_node_interactivity = "none"
        try:
            succeeded: bool = shell.run_cell(code).success
        finally:
            shell.ast_node_interactivity = interactivity
        # It holds the last value and the error until another cell has ended.
        shell.last_execution_result = None
        return succeeded

    def _fail_as_shown(self) -> None:
        """End with the error that IPython has shown last, so that `Run all` stops, and do not show it twice."""
        error = getattr(sys, "last_value", None)
        if error is None:
            return
        shell: Any = self._shell
        hidden = ("showtraceback", "showsyntaxerror", "showindentationerror")

        # IPython has no other way to say that a cell failed with an error that is shown already. What is shown next is
        # compared and not awaited: whoever has called the magic may have caught the error.
        def show_once(name: str, *args: Any, **keywords: Any) -> None:
            for each in hidden:
                vars(shell).pop(each, None)
            if sys.exc_info()[1] is not getattr(sys, "last_value", None):
                getattr(shell, name)(*args, **keywords)

        for name in hidden:
            setattr(shell, name, lambda *args, _name=name, **keywords: show_once(_name, *args, **keywords))
        raise error

    def _refuse_awaiting(self, cell: str) -> None:
        """IPython cannot await in a cell inside a cell where its loop runs already, as it does in a kernel."""
        try:
            asyncio.get_running_loop()
            awaits = self._shell.should_run_async(cell, transformed_cell=self._shell.transform_cell(cell))
        except (RuntimeError, SyntaxError):
            return
        if awaits:
            raise UsageError(
                "%%leakcheck cannot judge a cell with a top-level await in a kernel: write "
                "`with lowtide.LeakCheck() as check:` around the await, and then `check`"
            )


def _parser() -> MagicArgumentParser:
    parser = MagicArgumentParser(
        "%%leakcheck",
        description="Run the cell and report what it leaves behind: memory on every device, threads, processes, files.",
        add_help=False,
    )
    add = parser.add_argument
    add("--name", default="cell", help="What to call the cell in the report [default: cell].")
    add(
        "--tolerance",
        type=_bytes,
        default=0,
        metavar="BYTES",
        help="Bytes that may stay of each resource [default: 0].",
    )
    add(
        "--settle",
        type=_seconds,
        default=0.5,
        metavar="SECONDS",
        help="How long nothing moves until waiting for threads, processes or the driver ends [default: 0.5].",
    )
    add(
        "--stacks",
        choices=("auto", "all", "off"),
        default="auto",
        help="Whose memory's allocation is recorded with its stack: cards, the host too, or none [default: auto].",
    )
    add("--remedies", action="store_true", help="Try what would give a leak back; that deletes what the cell left.")
    add("--no-processes", action="store_true", help="Do not judge what the cell leaves in other processes.")
    add("--warmup", action="store_true", help="Run the cell once before: what a first use alone leaves is not judged.")
    add("--fail", action="store_true", help="Raise LeaksFoundError if something stays, so that `Run all` stops.")
    add("--into", type=_variable, metavar="NAME", help="The variable that takes the report.")
    return parser


def _bytes(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no number of bytes")
    return int(text)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ArgumentTypeError(f"{text!r} is no number of seconds")


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise ArgumentTypeError(f"{text!r} is no name of a variable")
    return text


def _check(options: Namespace) -> LeakCheck:
    return LeakCheck(
        options.name,
        tolerance=options.tolerance,
        settle=options.settle,
        stacks=options.stacks,
        remedies=options.remedies,
        processes=not options.no_processes,
    )


def _show(report: Report, shell: InteractiveShell) -> None:
    # In a kernel, rich would show HTML of its own.
    console = Console(file=io.StringIO(), width=_WIDTH, force_jupyter=False, force_terminal=False, no_color=True)
    with console.capture() as text:
        for part in terminal.render_subject(report.subjects[0]):
            console.print(part)
    shell.display_pub.publish({"text/html": report._repr_html_(), "text/plain": text.get().rstrip("\n")})
