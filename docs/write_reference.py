"""Writes what pages show of the code: what is judged, all commands, and all options of `pytest --leakcheck`.

python docs/write_reference.py
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from typer.models import ArgumentInfo, OptionInfo

from lowtide.leakcheck.cli.commands import app
from lowtide.leakcheck.judging.rules import PEAK, RULES
from lowtide.leakcheck.resources.resource import Bound, Rule
from lowtide.pytest_plugin import plugin
from lowtide.reports.sizes import format_bytes

DOCS = Path(__file__).parent

BEGIN = "<!-- reference: written by docs/write_reference.py -->"
END = "<!-- reference: end -->"

_PLACES = {"process": "", "device": "per device: ", "card": "per card: "}

_TYPES: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclass
class Registered:
    """What the plugin registers with pytest.

    It stands in for the parser and for the configuration, so that only pytest's documented hooks are relied on.

    Attributes:
        options: the names, keywords and help of each option, in order.
        ini: the help of each setting of the configuration file, by name.
        markers: as `pytest --markers` prints them.
        group: the name and title of the option group.
    """

    options: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    ini: dict[str, str] = field(default_factory=dict)
    markers: list[str] = field(default_factory=list)
    group: tuple[str, str] = ("", "")

    def getgroup(self, name: str, description: str = "") -> Registered:
        self.group = (name, description)
        return self

    def addoption(self, name: str, **keywords: Any) -> None:
        self.options.append((name, keywords))

    def addini(self, name: str, text: str, **_: Any) -> None:
        self.ini[name] = text

    def addinivalue_line(self, name: str, line: str) -> None:
        assert name == "markers"
        self.markers.append(line)

    def getoption(self, _: str) -> None:
        return None


def registered() -> Registered:
    """What the plugin registers where `--leakcheck` is not given."""
    found: Any = Registered()
    plugin.pytest_addoption(found)
    plugin.pytest_configure(found)
    return typing.cast(Registered, found)


def pytest_reference() -> str:
    """The options, settings, markers and the fixture, as Markdown."""
    found = registered()
    rows = []
    for name, keywords in found.options:
        value = keywords.get("metavar")
        setting = name.removeprefix("--").replace("-", "_")
        shown = f"{name}={value}" if value else name
        rows.append((_code(shown), _code(setting) if setting in found.ini else "", keywords["help"]))
    markers = (line.partition(":") for line in found.markers)
    fixture = inspect.getdoc(plugin.leakcheck) or ""
    return "\n\n".join(
        [
            "## Options and settings",
            _table(("option", "setting in `[tool.pytest.ini_options]`", "what it does"), rows),
            "## Markers",
            "\n".join(f"- {_code(name)}: {text.strip()}" for name, _, text in markers),
            "## The fixture `leakcheck`",
            fixture,
        ]
    )


def command_reference() -> str:
    """Each command with its arguments and options, as Markdown."""
    return "\n\n".join(_command(info.name, info.callback) for info in app.registered_commands)


def _command(given: str | None, callback: Any) -> str:
    name = given or callback.__name__.replace("_", "-")
    hints = typing.get_type_hints(callback, include_extras=True)
    arguments, options = [], []
    for parameter in inspect.signature(callback).parameters.values():
        kind, info = typing.get_args(_annotated(hints[parameter.name]))[:2]
        if isinstance(info, ArgumentInfo):
            arguments.append((info.metavar or parameter.name.upper(), info.help or ""))
        else:
            options.append(_option(parameter, kind, info))
    last = [argument for argument, _ in arguments if argument.startswith("-- ")]
    first = [argument for argument, _ in arguments if argument not in last]
    usage = " ".join(["lowtide", name, *first, "[OPTIONS]", *last])
    parts = [f"## `lowtide {name}`", f"```\n{usage}\n```", inspect.getdoc(callback) or ""]
    if arguments:
        parts.append(_table(("argument", "what it is"), [(_code(shown), text) for shown, text in arguments]))
    parts.append(_table(("option", "default", "what it does"), options))
    return "\n\n".join(parts)


def _annotated(hint: Any) -> Any:
    # Python 3.10 puts an Optional around what has None as its default.
    return hint if hasattr(hint, "__metadata__") else typing.get_args(hint)[0]


def _option(parameter: inspect.Parameter, kind: Any, info: OptionInfo) -> tuple[str, str, str]:
    # In an annotation the first name is where a default would be.
    given = [name for name in (info.default, *(info.param_decls or ())) if isinstance(name, str) and name[:1] == "-"]
    names = given or [f"--{parameter.name.replace('_', '-')}"]
    kinds = [each for each in typing.get_args(kind) or (kind,) if each is not type(None)]
    value = info.metavar or _value(kinds[0])
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    shown = "" if default is None or default is False or default == "" else _code(str(default))
    if default is parameter.empty:
        shown = "required"
    return _code(f"{', '.join(names)} {value}".rstrip()), shown, info.help or ""


def _value(kind: Any) -> str:
    if kind is bool:
        return ""
    return "|".join(member.value for member in kind) if issubclass(kind, Enum) else _TYPES[kind]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    lines += [" | ".join(cells) for cells in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _code(text: str) -> str:
    # A pipe ends a table's cell, also within code.
    return "`" + text.replace("|", "\\|") + "`"


def judged_table() -> str:
    """What is judged, within which tolerance and at which rung, as Markdown."""
    # What people look for first are devices; the sort keeps the order within each kind.
    rows = [_judged(rule) for rule in sorted(RULES, key=lambda rule: rule.place == "process")]
    rows.append((*_judged(PEAK)[:2], "`peak=SIZE` of its marker", "not judged"))
    return _table(("resource", "what is counted", "after a test", "after an engine's shutdown"), rows)


def _judged(rule: Rule) -> tuple[str, ...]:
    tested, lived = (_bound(rule, bound) for bound in (rule.test, rule.life))
    return _code(rule.resource), f"{_PLACES[rule.place]}{rule.counts}", tested, lived


def _bound(rule: Rule, bound: Bound | None) -> str:
    if bound is None:
        return "not judged"
    text = _amount(rule, bound.tolerance)
    if bound.with_card is not None:
        text += f", with a card {_amount(rule, bound.with_card)}"
    rungs = (["settle"] if bound.settles else []) + [bound.rung.value]
    text += "; " + ", ".join(f"`{rung}`" for rung in rungs)
    return text + ("; from the second life" if bound.first_use else "")


def _amount(rule: Rule, amount: int) -> str:
    text = format_bytes(amount) if rule.unit == "bytes" and amount else str(amount)
    return text.replace(".0 ", " ")


PAGES = {
    "cli.md": command_reference,
    "judging.md": judged_table,
    "pytest-options.md": pytest_reference,
}


def with_reference(page: str, reference: str) -> str:
    """A page's text with the reference of today between its two marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} and {END!r}: put them where the reference belongs")
    return f"{before}{begin}\n\n{reference}\n\n{end}{after}"


def main() -> None:
    """Write the pages anew."""
    for name, reference in PAGES.items():
        page = DOCS / name
        page.write_text(with_reference(page.read_text(encoding="utf-8"), reference()), encoding="utf-8")


if __name__ == "__main__":
    main()
