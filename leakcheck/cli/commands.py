"""The `lowtide` command: its subcommands in the order of the help, and how it ends on bad input."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import lowtide
from lowtide.leakcheck.cli.bisect_step import STOPS_BISECT, bisect_step
from lowtide.leakcheck.cli.console import INTERRUPTED, colors_are_off, guard_standard_output, report_own_error, say
from lowtide.leakcheck.cli.defects import defects
from lowtide.leakcheck.cli.execute import execute
from lowtide.leakcheck.cli.fuzz import fuzz
from lowtide.leakcheck.cli.gate import gate
from lowtide.leakcheck.cli.heap import heap
from lowtide.leakcheck.cli.init import init
from lowtide.leakcheck.cli.mcp import mcp
from lowtide.leakcheck.cli.reports import diff, history, open_page, report, suppress
from lowtide.leakcheck.cli.run import check, run, serve
from lowtide.leakcheck.cli.running import ask, attach, ps, watch
from lowtide.leakcheck.cli.snapshot import snapshot
from lowtide.leakcheck.lives.script import Interrupts
from lowtide.leakcheck.processes.process_exit import end

app = typer.Typer(
    name="lowtide",
    help="Does an inference engine's memory come back, and if not, who holds it?",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""click's; where typer has it from differs between its versions."""


def main() -> None:
    """Run the command line and end the process; what the command's program has left running does not keep it."""
    code = command_line()
    # All is said, and the end is near.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end(code)


def command_line() -> int:
    """Run the command line and return its exit code.

    Bad input and errors of lowtide itself are reported in one line, with exit code 2.

    Output that cannot be written is, too, where it does not end with another one already. After Ctrl-C whatever went
    wrong is its consequence.
    """
    interrupts, output = Interrupts(), None
    try:
        with interrupts:
            output = guard_standard_output()
            if "--help" in sys.argv or not sys.argv[1:]:
                _choose_help_styles()
            if not sys.argv[1:]:
                app()
            code = _run(interrupts)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code and interrupts.heard:
        code = INTERRUPTED
    if output is not None:
        output.flush()
    if output is not None and output.problem is not None:
        say(f"lowtide: {output.problem}", err=True)
        code = code or 2
    return code


def _run(interrupts: Interrupts) -> int:
    """Return the exit code of the command line."""
    try:
        return app(standalone_mode=False, prog_name="lowtide") or 0
    except _UsageError as error:
        said = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "lowtide"
        say(f"lowtide: {said.rstrip('.')}: see `{command} --help`", err=True)
    except BaseException as error:  # noqa: BLE001 - the exit code of an error would be that of a leak
        if isinstance(error, KeyboardInterrupt) or interrupts.heard:
            return INTERRUPTED
        # typer makes others of an end of input and of a broken pipe.
        report_own_error(error.__context__ or error if isinstance(error, SystemExit | typer.Abort) else error)
    return STOPS_BISECT if "bisect-step" in sys.argv[1:2] else 2


def _choose_help_styles() -> None:
    """Let typer, which prints the help, follow the rules of `find_console`.

    By itself it prints control codes also without a terminal, in GitHub Actions or with `FORCE_COLOR`, and with
    `NO_COLOR` still other styles than colours.
    """
    # Only here: it loads all that renders Markdown.
    from typer import rich_utils

    if not sys.stdout.isatty():
        rich_utils.FORCE_TERMINAL = False
    if colors_are_off():
        rich_utils.COLOR_SYSTEM = None


def _version(wanted: bool) -> None:
    if wanted:
        say(f"lowtide {lowtide.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


_COMMANDS: tuple[Callable[..., None], ...] = (
    *(run, check, serve, suppress, defects, fuzz, gate, bisect_step, history, init, ps, ask, attach),
    *(report, open_page, diff, snapshot, watch, heap, mcp),
)
"""In the order of the help."""

for command in _COMMANDS:
    app.command("open" if command is open_page else None)(command)
# What follows the command is its own: `lowtide exec vllm serve --port 1` needs no `--`.
app.command("exec", context_settings={"allow_interspersed_args": False})(execute)
