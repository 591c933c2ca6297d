"""A report has the settings that were in effect: those that were given, and the others."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import typer
from typer.testing import CliRunner

import lowtide
from lowtide.leakcheck.cli.console import command_settings
from lowtide.pytest_plugin.settings import Settings


class Size(str, Enum):
    SMALL = "small"


def test_a_block_s_report_has_its_policy() -> None:
    with lowtide.LeakCheck(tolerance=7, processes=False) as check:
        pass
    settings = check.report.settings
    assert (settings["tolerance"], settings["processes"], settings["settle"]) == ("7", "False", "0.5")


def test_a_command_s_report_has_its_options() -> None:
    seen: list[dict[str, str]] = []
    app = typer.Typer()

    @app.command()
    def grow(files: list[Path], size: Size = Size.SMALL, seed: int = 3, report: Path | None = None) -> None:
        seen.append(command_settings())

    done = CliRunner().invoke(app, ["a b", "c", "--seed", "5"])
    assert (done.exit_code, done.output) == (0, "")
    assert seen == [{"files": "'a b' c", "seed": "5", "size": "small"}]
    assert command_settings() == {}


def test_the_password_of_an_address_is_not_in_a_report() -> None:
    seen: list[dict[str, str]] = []
    app = typer.Typer()

    @app.command()
    def keep(history: str, page: str) -> None:
        seen.append(command_settings())

    CliRunner().invoke(app, ["postgresql://me:secret@host:5432/name", "http://host:80/a@b"])
    assert seen == [{"history": "postgresql://me:***@host:5432/name", "page": "http://host:80/a@b"}]


def test_a_test_run_s_report_has_what_leakcheck_was_told() -> None:
    settings = Settings(4096, True, 0.5, "fail", None, None, "auto", "auto", False)
    texts = settings.as_texts()
    assert texts["tolerance"] == "4096"
    assert texts["budget"] == "30.0"
    assert [*texts] == [*Settings.__struct_fields__]
