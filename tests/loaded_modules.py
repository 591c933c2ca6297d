"""Stands in for loaded modules, for those who read them: `sys.modules` alone is what a test of somebody's replaces."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from lowtide.probes import originals


def load_instead(monkeypatch: pytest.MonkeyPatch, name: str, module: Any) -> None:
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(originals._LOADED, name, lambda: module)
    if name == "torch":
        monkeypatch.setattr(originals, "_OF_TORCH", [module])
