"""What importing costs."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from lowtide.probes import native


@pytest.mark.parametrize("module", ["lowtide", "lowtide.probes.stages", "lowtide.leakcheck.cli.commands"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {{'torch', 'numpy', 'transformers', 'triton'}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_what_is_written_in_c_is_built_where_there_is_a_compiler() -> None:
    # Else the tests of it skip themselves, and all that is read takes the longer way.
    assert native.heap is not None
