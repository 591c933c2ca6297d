"""A documented module's old name still imports the module, in silence."""

from __future__ import annotations

import importlib
import sys

import pytest

from lowtide import old_names
from lowtide.old_names import RENAMED


@pytest.mark.parametrize(("old", "new"), [pytest.param(*pair, id=pair[0]) for pair in sorted(RENAMED.items())])
def test_the_old_name_is_the_same_module(old: str, new: str) -> None:
    module = importlib.import_module(new)
    spec, loader, name = module.__spec__, module.__loader__, module.__name__
    sys.modules.pop(old, None)
    # A warning would be an error here.
    assert importlib.import_module(old) is module
    assert (module.__spec__, module.__loader__, module.__name__) == (spec, loader, name)


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lowtide\.leakcheck\.no_such_module"):
        importlib.import_module("lowtide.leakcheck.no_such_module")


def test_installed_once() -> None:
    old_names.install()
    assert sum(type(finder) is old_names.OldNames for finder in sys.meta_path) == 1


def test_programs_of_the_fuzzer_find_what_they_import() -> None:
    from lowtide.leakcheck.checked_life import CheckedLife, Fault, Lives

    assert {each.__name__ for each in (CheckedLife, Fault, Lives)} == {"CheckedLife", "Fault", "Lives"}


def test_what_the_packages_of_an_old_module_s_name_offer() -> None:
    from lowtide.leakcheck.cli import main
    from lowtide.leakcheck.cli.commands import main as command
    from lowtide.leakcheck.suppressions import Suppressions
    from lowtide.probes.heap import SharedWalk, find_paths

    assert main is command
    assert {each.__module__ for each in (SharedWalk, find_paths)} == {"lowtide.probes.heap.holders"}
    assert Suppressions.__module__ == "lowtide.leakcheck.suppressions.entries"
