"""What a notebook itself holds, by the names that its user knows: variables, `Out`, and the last error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from IPython.core.interactiveshell import InteractiveShell

from lowtide.reports.schema import Finding, Report
from lowtide.reports.statement import reworded

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


class CellNames:
    """The variables of the user before a cell runs: what is bound then, and to which object.

    Args:
        shell: whose variables.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        # By address: what a cell replaces must be able to end.
        self._bound = {name: id(value) for name, value in shell.user_ns.items()}

    def is_bound_since(self, name: str, value: object) -> bool:
        """Whether a variable was bound to a value after this was made."""
        return self._bound.get(name) != id(value)


def in_words_of_a_notebook(report: Report, shell: InteractiveShell, before: CellNames) -> Report:
    """The same report, with holders as the user of a notebook writes them, and how each is given back.

    Args:
        report: of a cell.
        shell: that has run it.
        before: the variables before it ran.
    """
    subjects = tuple(
        msgspec.structs.replace(
            subject, findings=tuple(_in_words(finding, shell, before) for finding in subject.findings)
        )
        for subject in report.subjects
    )
    return msgspec.structs.replace(report, subjects=subjects)


def _in_words(finding: Finding, shell: InteractiveShell, before: CellNames) -> Finding:
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
    """Without `__main__.` in front of names, which no cell needs."""
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


def _of_variable(finding: Finding, holder: str, name: str, shell: InteractiveShell, before: CellNames) -> Finding:
    # There is better advice about a thread than to delete its variable.
    if finding.advice is not None or finding.remedy is not None or not _begins_with(finding, holder, name, shell):
        return finding
    value = shell.user_ns[name]
    number = _output_of(value, shell)
    if not before.is_bound_since(name, value):
        advice = f"{name} was there before the cell, which has added {holder}: take it out where its use ends"
    elif number is not None:
        advice = _both(name, number)
    else:
        advice = f"the cell binds the variable {name}: `del {name}` gives it back, if it is not to stay"
    return msgspec.structs.replace(finding, advice=advice)


def _begins_with(finding: Finding, holder: str, name: str, shell: InteractiveShell) -> bool:
    """Whether a holder is a variable or in one, and does not only begin with a word that is a variable's name too."""
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
    """The finding with its texts for people changed; its path and its fingerprint stay."""
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
    """The variables that the user has bound, and none of those that IPython has."""
    return [name for name in shell.user_ns if not name.startswith("_") and name not in shell.user_ns_hidden]


def _value_of(shown: str, shell: InteractiveShell) -> Any:
    """The value under a name that IPython gives to what a cell has shown."""
    if shown.endswith("]"):
        return _outputs(shell).get(int(shown[shown.index("[") + 1 : -1]))
    return shell.user_ns.get(shown)


def _output_of(value: object, shell: InteractiveShell) -> int | None:
    """The number under which a value is in `Out`; the latest; None if it is not there."""
    return next((number for number in reversed(list(_outputs(shell))) if _outputs(shell)[number] is value), None)


def _outputs(shell: InteractiveShell) -> dict[int, Any]:
    outputs: dict[int, Any] = shell.user_ns.get("_oh", {})
    return outputs
