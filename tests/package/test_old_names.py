"""A module's old name still imports the module, and warns whoever imports it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lowtide import old_names
from lowtide.old_names import DOCUMENTED, RENAMED, RENAMED_MEMBERS

ROOT = Path(__file__).parents[2]


WARNED = {old: new for old, new in RENAMED.items() if old not in DOCUMENTED}


@pytest.mark.parametrize(("old", "new"), [pytest.param(*pair, id=pair[0]) for pair in sorted(WARNED.items())])
def test_the_old_name_is_the_same_module(old: str, new: str) -> None:
    module = importlib.import_module(new)
    spec, loader, name = module.__spec__, module.__loader__, module.__name__
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old} is now {new}: import it from there")) as reported:
        found = importlib.import_module(old)
    assert found is module
    assert (module.__spec__, module.__loader__, module.__name__) == (spec, loader, name)
    assert len(reported) == 1


@pytest.mark.parametrize("old", sorted(DOCUMENTED))
def test_a_documented_name_imports_in_silence(old: str) -> None:
    sys.modules.pop(old, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(old) is importlib.import_module(RENAMED[old])


OLD_MEMBERS = [
    (old, member, current)
    for old, new in sorted(RENAMED.items())
    for member, current in RENAMED_MEMBERS.get(new, {}).items()
]


@pytest.mark.parametrize(("old", "member", "current"), OLD_MEMBERS)
def test_an_old_module_has_its_members_by_their_old_names(old: str, member: str, current: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match="is now"):
        module = importlib.import_module(old)
    assert getattr(module, member) is getattr(module, current)


def test_each_renamed_member_is_reached_by_an_old_module() -> None:
    assert {RENAMED[old] for old, *_ in OLD_MEMBERS} == set(RENAMED_MEMBERS)


def test_the_warning_shows_the_line_that_imports() -> None:
    sys.modules.pop("lowtide.leakcheck.cards", None)
    with pytest.warns(DeprecationWarning, match="is now") as reported:
        import lowtide.leakcheck.cards as cards
    assert reported[0].filename == __file__
    assert cards.__name__ == "lowtide.leakcheck.baseline.device_memory"


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lowtide\.leakcheck\.no_such_module"):
        importlib.import_module("lowtide.leakcheck.no_such_module")


def test_installed_once() -> None:
    old_names.install()
    assert sum(type(finder) is old_names.OldNames for finder in sys.meta_path) == 1


def test_what_the_packages_of_an_old_module_s_name_offer() -> None:
    from lowtide.leakcheck.cli import main
    from lowtide.leakcheck.cli.commands import main as command
    from lowtide.leakcheck.suppressions import Suppressions
    from lowtide.probes.heap import SharedWalk, find_paths

    assert main is command
    assert {each.__module__ for each in (SharedWalk, find_paths)} == {"lowtide.probes.heap.holders"}
    assert Suppressions.__module__ == "lowtide.leakcheck.suppressions.entries"


def test_nothing_here_uses_an_old_name() -> None:
    names = "|".join(re.escape(name) for name in sorted(WARNED, key=len, reverse=True))
    used = re.compile(rf"\b(?:{names})\b(?!\.)")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    # Without a repository, as in a source archive, the folders are read instead.
    files = [ROOT / name for name in listed] or [
        file for part in ("tests", "docs") for file in (ROOT / part).rglob("*")
    ]
    own = {Path(__file__), ROOT / "lowtide" / "old_names.py"}
    texts = {
        file: file.read_text(encoding="utf-8")
        for file in files
        if file.suffix in (".py", ".md", ".toml") and file.is_file() and file not in own
    }
    assert len(texts) > 100
    assert [str(file) for file, text in texts.items() if used.search(text)] == []
