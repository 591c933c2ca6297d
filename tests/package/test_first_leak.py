"""The tutorial `docs/first-leak.md`: its code, run, says what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.waiting import HANG_S

PAGE = (Path(__file__).parents[2] / "docs" / "first-leak.md").read_text()
pytestmark = pytest.mark.nightly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        # With the comment, which is a line, too.
        (tmp_path / name).write_text(f"# {name}\n{code}")
    return tmp_path


def run(folder: Path, *words: str) -> str:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=HANG_S).stdout


def said_on_page(command: str) -> list[str]:
    """What the page shows of a command's output: each line that is not shortened, without numbers that vary."""
    shown = " ".join(re.findall(rf"```\n\$ {command}\n(.*?)```", PAGE, re.DOTALL)[0].split())
    return [part.strip() for part in re.split(r"…|\d{5,}|\d+ -> |[\d.]+s", shown) if len(part) > 20]


def test_the_test_leaves_what_the_page_says(folder: Path) -> None:
    said = " ".join(run(folder, "-W", "ignore", "-m", "pytest", "-q", "--leakcheck").split())
    missing = [part for part in said_on_page("pytest -q --leakcheck") if part not in said]
    assert missing == []


def test_with_both_changes_it_is_green_and_the_block_names_the_list(folder: Path) -> None:
    engine = folder / "my_engine.py"
    code = engine.read_text().replace("    @functools.lru_cache\n", "")
    ends = "        self.tokens.put(None)\n        self.detokenizer.join()\n        self.model = None\n"
    engine.write_text(code.replace("        self.model = None\n", ends))
    assert "1 judged, 0 with leaks" in run(folder, "-W", "ignore", "-m", "pytest", "-q", "--leakcheck")
    said = run(folder, "serve.py")
    assert said.split() == re.findall(r"\$ python serve\.py\n(.*?)```", PAGE, re.DOTALL)[0].split()
    engine.write_text(
        engine.read_text()
        .replace("Model(), []", "Model(), collections.deque(maxlen=100)")
        .replace("import f", "import collections\nimport f")
    )
    assert run(folder, "serve.py") == ""
