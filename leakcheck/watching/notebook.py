"""The cell magic `%%leakcheck`: runs a cell in the user's namespace, and shows what it leaves behind.

What a notebook itself holds has the names that its user knows: variables, `Out`, and the last error.
"""

from __future__ import annotations

import asyncio
import io
import keyword
import math
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from IPython.core.displayhook import DisplayHook
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic_arguments import MagicArgumentParser
from rich.console import Console

from lowtide.leakcheck.watching.check import LeakCheck
from lowtide.reports import terminal
from lowtide.reports.schema import Finding, Report
from lowtide.reports.sizes import parse_bytes
from lowtide.reports.statement import reworded

_WIDTH = 100
"""Columns of the report as text, where HTML is not shown."""

_SHOWN_VALUE = re.compile(r"^(?:_{1,3}|_\d+|(?:_oh|Out)\[\d+\])(?!\w)")
"""The start of an expression for a value that a cell has shown, which IPython keeps under several names."""

_NAME = re.compile(r"^[^\W\d]\w*")

_FORGET_ERROR = (
    "import gc, sys; sys.last_type = sys.last_value = sys.last_exc = sys.last_traceback = None; "
    "get_ipython().last_execution_result = get_ipython().InteractiveTB.tb = None; gc.collect()"
)
"""The error itself, and not its traceback alone: those from which it was raised have tracebacks of their own.

Not `traceback.clear_frames`: who has looked at a frame's variables, as IPython does, has left a copy of them in it; and
what has rendered them is in a cycle."""

_LAST_ERROR = re.compile(r"sys\.last_(?:exc|traceback|value)\b")

_CODE = re.compile(r"[\w.\[\]'\"-]+")

_LOCAL = re.compile(r"f_locals\['(\w+)'\]")


def register(shell: InteractiveShell) -> None:
    """Give a shell the cell magic `%%leakcheck`; legal twice."""
    # IPython's own types are those of the method before it was wrapped.
    offering: Any = shell
    offering.register_magic_function(CellCheck(shell), "cell", "leakcheck")


class CellCheck:
    """The magic of one shell, which runs the cells."""

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
        # By address: what a cell replaces must be able to end.
        before = {name: id(value) for name, value in self._shell.user_ns.items()}
        with _check(options) as check:
            # Nothing here may hold what the cell has made or raised: it would be a holder.
            succeeded = self._succeeds(code)
        report = in_words_of_a_notebook(check.report, self._shell, before)
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
        metavar="SIZE",
        help="What may stay of each resource, as 4096 or 1MiB [default: 0].",
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
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


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
    return _CellLeakCheck(
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


Bound = Mapping[str, int]
"""The variables of a shell's user before a cell runs, each with the address of what is bound to it."""


def in_words_of_a_notebook(report: Report, shell: InteractiveShell, before: Bound) -> Report:
    """Return a cell's report with holders as the user of a notebook writes them, and how each is given back."""
    subjects = tuple(
        msgspec.structs.replace(
            subject, findings=tuple(_in_words(finding, shell, before) for finding in subject.findings)
        )
        for subject in report.subjects
    )
    return msgspec.structs.replace(report, subjects=subjects)


def _in_words(finding: Finding, shell: InteractiveShell, before: Bound) -> Finding:
    finding = _without_module(finding, shell.user_module.__name__)
    if finding.holder is None:
        return finding
    shown = _SHOWN_VALUE.match(finding.holder)
    if shown is not None:
        return _of_output(finding, finding.holder, shown[0], shell)
    if _LAST_ERROR.match(finding.holder):
        return _of_the_last_error(finding, finding.holder)
    name = _NAME.match(finding.holder)
    if name is not None and name[0] in shell.user_ns and name[0] not in shell.user_ns_hidden:
        return _of_variable(finding, finding.holder, name[0], shell, before)
    # Of an error that a variable holds, IPython keeps nothing.
    if any(hop.type == "traceback" for hop in finding.path):
        return _of_the_last_error(finding, finding.holder)
    return finding


def _without_module(finding: Finding, module: str) -> Finding:
    """Return the finding without `__main__.` in front of names, which no cell needs."""
    prefix = re.compile(rf"(?<![\w.]){re.escape(module)}\.(?=[^\W\d])")

    def shorter(text: str) -> str:
        return prefix.sub("", text)

    return _with_texts(finding, shorter)


def _of_output(finding: Finding, holder: str, shown: str, shell: InteractiveShell) -> Finding:
    # Not `%reset out`, which leaves the value in `user_ns_hidden`.
    value = _value_of(shown, shell)
    number = _output_of(value, shell)
    if number is None:
        return finding
    rest = holder[len(shown) :]
    bound = next((name for name in _variables(shell) if shell.user_ns[name] is value), None)
    if bound is not None:
        return msgspec.structs.replace(_renamed(finding, holder, bound + rest), advice=_both(bound, number))
    return msgspec.structs.replace(
        _renamed(finding, holder, f"Out[{number}]{rest}"),
        advice=f"IPython keeps what the cell has shown, as Out[{number}]: `%xdel _{number}` gives it back, and with a "
        "`;` at the end of its last line it is not kept",
    )


class _CellLeakCheck(LeakCheck):
    """Judges a cell, of whose variables more is known than the code that deletes them."""

    _names_changes = False


def _of_variable(finding: Finding, holder: str, name: str, shell: InteractiveShell, before: Bound) -> Finding:
    # There is better advice about a thread than to delete its variable.
    if finding.advice is not None or finding.remedy is not None or not _begins_with(finding, holder, name, shell):
        return finding
    value = shell.user_ns[name]
    number = _output_of(value, shell)
    if before.get(name) == id(value):
        advice = f"{name} was there before the cell, which has added {holder}: take it out where its use ends"
    elif number is not None:
        advice = _both(name, number)
    else:
        advice = f"the cell binds the variable {name}: `del {name}` gives it back, if it is not to stay"
    return msgspec.structs.replace(finding, advice=advice)


def _begins_with(finding: Finding, holder: str, name: str, shell: InteractiveShell) -> bool:
    """Return whether a holder is a variable or in one, and does not only begin with a variable's name."""
    edges = [hop.edge for hop in finding.path[:2]]
    return edges == [shell.user_module.__name__, f".{name}"] or _CODE.fullmatch(holder) is not None


def _both(name: str, number: int) -> str:
    return f"the cell binds the variable {name}, and IPython keeps it as Out[{number}]: `%xdel {name}` gives both back"


def _of_the_last_error(finding: Finding, holder: str) -> Finding:
    error = type(getattr(sys, "last_value", None)).__name__
    local = _LOCAL.search(holder)
    words = f"the traceback of the last error ({error})"
    if local is not None:
        rest = holder[local.end() :]
        words = f"the variable {local[1]}{rest} in {words}"
    return msgspec.structs.replace(
        _renamed(finding, holder, words),
        advice=f"IPython keeps the last error for %debug and %tb: `{_FORGET_ERROR}` gives it back",
    )


def _renamed(finding: Finding, holder: str, name: str) -> Finding:
    return reworded(finding, finding.message.replace(holder, name), holder=name)


def _with_texts(finding: Finding, change: Callable[[str], str]) -> Finding:
    """Return the finding with its texts for people changed; its path and its fingerprint stay."""
    remedy = finding.remedy
    return reworded(
        finding,
        change(finding.message),
        holder=None if finding.holder is None else change(finding.holder),
        advice=None if finding.advice is None else change(finding.advice),
        remedy=None if remedy is None else msgspec.structs.replace(remedy, action=change(remedy.action)),
        tried=tuple(msgspec.structs.replace(each, action=change(each.action)) for each in finding.tried),
        changed=tuple(change(each) for each in finding.changed),
        parts=tuple(_with_texts(part, change) for part in finding.parts),
    )


def _variables(shell: InteractiveShell) -> list[str]:
    """Return the variables that the user has bound, and none of those that IPython has."""
    return [name for name in shell.user_ns if not name.startswith("_") and name not in shell.user_ns_hidden]


def _value_of(shown: str, shell: InteractiveShell) -> Any:
    """Return the value under a name that IPython gives to what a cell has shown."""
    if shown.endswith("]"):
        return _outputs(shell).get(int(shown[shown.index("[") + 1 : -1]))
    return shell.user_ns.get(shown)


def _output_of(value: object, shell: InteractiveShell) -> int | None:
    """Return the latest number under which a value is in `Out`; None if it is not there."""
    return next((number for number in reversed(list(_outputs(shell))) if _outputs(shell)[number] is value), None)


def _outputs(shell: InteractiveShell) -> dict[int, Any]:
    outputs: dict[int, Any] = shell.user_ns.get("_oh", {})
    return outputs
