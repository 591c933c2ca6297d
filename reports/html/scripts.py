"""The scripts of a page: what is in it as code, allowed by its hash, and as data, which nothing executes."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

from lowtide.reports.schema import json_bytes

_LEVEL = 6
"""Of the compression: a higher one takes several times as long, for a few percent."""


def drawing() -> tuple[str, ...]:
    """ECharts, and what draws with it; in the order in which they must run, after `unpacking`."""
    return tuple(map(_script, ("echarts/echarts.js", "drawing.js", "life.js", "charts.js")))


def unpacking() -> tuple[str, ...]:
    """Return what unpacks the data of a page."""
    return (_script("stored.js"),)


def filtering() -> tuple[str, ...]:
    """Return what filters a page's findings; after `unpacking`."""
    return (_script("filter.js"),)


def following() -> tuple[str, ...]:
    """Return what follows a running life that a server tells of; after `drawing`, if there is anything to draw."""
    return (_script("following.js"),)


def copying() -> tuple[str, ...]:
    """Return what copies a remedy, or an entry for what is known."""
    return (_script("copying.js"),)


@cache
def _script(name: str) -> str:
    return (resources.files("lowtide.reports.html") / name).read_text("utf-8")


def as_json(value: Any) -> str:
    """Return some data as JSON."""
    return json_bytes(value).decode()


def as_stored(value: Any) -> str:
    """Return some data as text that ends no element and executes nothing: zlib's compressed JSON, in base64."""
    return base64.b64encode(zlib.compress(json_bytes(value), _LEVEL)).decode()


def security_policy(run: Iterable[str], *, connects: bool = False) -> str:
    """Return a Content-Security-Policy under which some scripts run, and nothing else, and nothing is loaded.

    Args:
        run: the scripts, as they stand in the page.
        connects: whether they may ask the server that the page is from.
    """
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in run)
    allowed = {
        "default-src": "'none'",
        "script-src": hashes,
        "connect-src": "'self'" if connects else "",
        "style-src": "'unsafe-inline'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in allowed.items() if value)
