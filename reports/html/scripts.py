"""The scripts of a page: what is in it as code, allowed by its hash, and as data, which nothing executes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import msgspec

_HIDDEN = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})
"""What would end a script's element, or a line of it, as JSON has it in strings without that."""


def drawing() -> tuple[str, ...]:
    """ECharts, and what draws with it; in the order in which they must run."""
    return _script("echarts/echarts.js"), _script("pictures.js")


def copying() -> tuple[str, ...]:
    """What copies a remedy, or an entry for what is known."""
    return (_script("copying.js"),)


@cache
def _script(name: str) -> str:
    return (resources.files("lowtide.reports.html") / name).read_text()


def as_data(value: Any) -> str:
    """Some data as JSON for an element `script` of a type that is not executed."""
    return msgspec.json.encode(value).decode().translate(_HIDDEN)


def security_policy(run: Iterable[str]) -> str:
    """A Content-Security-Policy under which some scripts run and nothing else, and nothing is loaded from anywhere.

    Args:
        run: the scripts, as they stand in the page.
    """
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run)
    scripts = f"script-src {hashes}; " if hashes else ""
    return f"default-src 'none'; {scripts}style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
