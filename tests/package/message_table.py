"""The table of what lowtide says: every error, advice, message and reason in the code, as text to be read in one place.

    python -m tests.package.message_table

writes `messages.txt` beside this file anew. What stands in braces is put in when it is said. (What the commands and
options say for `--help` is in `docs/cli.md` and `docs/pytest-options.md`, which are written from the code likewise.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

TABLE = Path(__file__).with_name("messages.txt")

_SAID = frozenset({"advice", "amount", "came", "message", "reason", "said", "what", "why"})
"""Arguments, variables and entries that hold a text for people."""

_SAYING = {
    "Note": "note",
    "noted": "note",
    "refuse": "refused",
    "reworded": "message",
    "say": "printed",
    "typer.echo": "printed",
    "warnings.warn": "warning",
}
"""Functions whose arguments are for people, and what to call them."""

_FEWEST_WORDS = 3
"""Of a text that is not a name or a code."""


def table(found: Iterable[tuple[str, Sequence[str]]]) -> str:
    """All messages, by module.

    Args:
        found: the messages of each module, after its path.
    """
    return "\n\n".join("\n".join([f"[{path}]", *lines]) for path, lines in found if lines) + "\n"


def messages(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Each message in a module's nodes, with what kind of text it is."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield from _line(ast.unparse(node.exc.func).rpartition(".")[2], node.exc.args[0])
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in _SAID:
                    yield from _line(keyword.arg, keyword.value)
            if node.args and (called := _dotted(node.func)) in _SAYING:
                for argument in node.args:
                    yield from _line(_SAYING[called], argument)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in _SAID:
                    yield from _line(str(key.value), value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in _SAID:
            yield from _line(node.targets[0].id, node.value)


def _dotted(function: ast.expr) -> str:
    """A function's name, with that of the module that it is taken from."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return function.id if isinstance(function, ast.Name) else ""


def _line(kind: str, value: ast.expr) -> Iterator[str]:
    # (A note has the mark before it that joins it to its sentence.)
    words = _text(value).lstrip(" ,;:").split()
    if len(words) >= _FEWEST_WORDS:
        yield f"{kind}: {' '.join(words)}"


def _text(value: ast.expr) -> str:
    """A text with what is put into it in braces; empty for what is no text."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else ""
    if isinstance(value, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"
            for part in value.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _text(value.left) + (_text(value.right) or "{…}")
    if isinstance(value, ast.IfExp):
        return " | ".join(filter(None, (_text(value.body), _text(value.orelse))))
    return ""


if __name__ == "__main__":
    # It reads the messages by this module.
    from tests.package import house

    TABLE.write_text(table((code.path, code.messages) for code in house.modules()), encoding="utf-8")
