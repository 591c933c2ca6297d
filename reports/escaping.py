"""Escapes what is printed: a name or a message is a program's or a file's, and must not act on what shows it.

Every text that is shown passes here once, where a line, a cell or an attribute is made of it. What each medium needs
besides (HTML, Markdown, XML) is its own.
"""

from __future__ import annotations

import json
import re

_ACTING = re.compile(
    "["
    r"\x00-\x1f\x7f-\x9f"  # what moves a cursor or ends a line
    r"\xad\u200b\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # what nobody sees
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # after which text is shown in another order than it has
    r"\u2028\u2029"  # further ends of lines
    r"\ud800-\udfff\ufffe\uffff"  # what UTF-8 or XML do not have
    "]"
    # What logs of CI systems act on wherever it stands in a line: of GitHub, Azure and TeamCity, GitLab, Travis.
    r"|#(?=#\w*\[)|s(?=ection_(?:start|end):)|t(?=ravis_fold:)"
)

_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def one_line(text: str) -> str:
    r"""Return a text as one line in which nothing acts on what shows it: `\x1b`, `\n`, `\u202e` stand for characters.

    A command to a CI system (`::error::`, `##[group]`, `##vso[…]`, `section_start:`) has its first character so, too.
    Letters of any script stay as they are.
    """
    line = escape_characters(text)
    body = line.lstrip()
    return f"{line[: len(line) - len(body)]}\\x3a{body[1:]}" if body.startswith("::") else line


def escape_characters(text: str) -> str:
    """Return the same for a text in the middle of a line, where `::` commands nothing."""
    return _ACTING.sub(_escaped, text)


def escape_json(text: str) -> str:
    """Return a JSON text that says the same, without the characters that `one_line` escapes and JSON allows."""
    return "\n".join(_ACTING.sub(_json_escaped, line) for line in text.split("\n"))


def escape_toml(quoted: str) -> str:
    """Return a quoted text of TOML that says the same, without those characters."""
    return _ACTING.sub(_toml_escaped, quoted)


def _escaped(found: re.Match[str]) -> str:
    char = found[0]
    # `ascii` leaves those alone with which a command begins.
    return _NAMED.get(char) or (f"\\x{ord(char):02x}" if char.isascii() else ascii(char)[1:-1])


def _json_escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1] if not found[0].isascii() else f"\\u{ord(found[0]):04x}"


def _toml_escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
