"""The public door for engines: each name is the one of its home, and torch is loaded by those alone that need it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import lowtide.targets
from tests.waiting import HANG_S


@pytest.mark.parametrize("name", lowtide.targets.__all__)
def test_a_name_is_the_one_of_its_home(name: str) -> None:
    homes = {"reference": "reference", "transformers_model": "transformers_target"}
    home = "server" if name.endswith("_server") else homes.get(name, "target")
    assert getattr(lowtide.targets, name) is getattr(importlib.import_module(f"lowtide.leakcheck.targets.{home}"), name)


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match=r"module 'lowtide\.targets' has no attribute 'Engine'"):
        lowtide.targets.Engine  # noqa: B018


def test_declaring_what_an_engine_can_do_loads_no_torch() -> None:
    program = (
        "import sys\nfrom lowtide.targets import Capabilities\nprint(Capabilities().device, 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (run.returncode, run.stdout, run.stderr) == (0, "cpu False\n", "")
