"""The table of what lowtide says: every error, advice, message and reason in the code, as text to be read in one place.

    python -m tests.package.message_table

writes `messages.txt` beside this file anew. What stands in braces is put in when it is said. (What the commands and
options say for `--help` is in `docs/cli.md` and `docs/pytest-options.md`, which are written from the code likewise.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("messages.txt")
HOUSES = ("engine", "leakcheck", "probes", "pytest_plugin", "reports")

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


def table() -> str:
    """All messages, by module."""
    parts = []
    for house in HOUSES:
        for file in sorted((ROOT / house).rglob("*.py")):
            found = sorted(set(messages(ast.parse(file.read_text(encoding="utf-8")))))
            if found:
                parts.append("\n".join([f"[{file.relative_to(ROOT)}]", *found]))
    return "\n\n".join(parts) + "\n"


def messages(tree: ast.Module) -> Iterator[str]:
    """Each message in a module, with what kind of text it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield from _line(ast.unparse(node.exc.func).rpartition(".")[2], node.exc.args[0])
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in _SAID:
                    yield from _line(keyword.arg, keyword.value)
            called = ast.unparse(node.func)
            for argument in node.args if called in _SAYING else ():
                yield from _line(_SAYING[called], argument)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in _SAID:
                    yield from _line(str(key.value), value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in _SAID:
            yield from _line(node.targets[0].id, node.value)


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
    TABLE.write_text(table(), encoding="utf-8")
