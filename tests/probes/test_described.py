"""Whose code it is: what was installed anywhere on the import path is a library's, the rest is the program's."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

from lowtide.probes.objects.described import installed_in, is_library, is_of_python, is_of_site


def test_folders_of_every_kind_of_installation_are_found(tmp_path: Path) -> None:
    project, target, scheme = tmp_path / "project", tmp_path / "packages", tmp_path / "user" / "site-packages"
    for folder in (project / "numbers", target / "six-1.0.dist-info", scheme):
        folder.mkdir(parents=True)
    entries = ["", str(project), str(target), str(scheme), str(tmp_path / "missing")]
    assert installed_in(entries, project) == {str(target), str(scheme)}


def test_where_the_program_is_run_is_the_programs(tmp_path: Path) -> None:
    (tmp_path / "built-1.0.dist-info").mkdir()
    assert not installed_in([str(tmp_path)], tmp_path)


def test_pythons_own_code_is_distinguished_from_what_was_installed_beside_it() -> None:
    installed = f"{sysconfig.get_path('purelib')}/torch/functional.py"
    assert is_library(installed)
    assert is_of_site(installed)
    assert not is_of_python(installed)
    assert is_library(os.__file__)
    assert is_of_python(os.__file__)
    assert not is_library(__file__)
