"""`lowtide check`: the life of a user's engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lowtide.leakcheck.cli.console import Wide, interruptible, refuse
from lowtide.leakcheck.cli.judged_lives import live, load_suppressions, load_tolerances, snapshots_in
from lowtide.leakcheck.cli.reporting import check_writable
from lowtide.leakcheck.targets.target import TargetError, load_factory

if TYPE_CHECKING:
    from lowtide.leakcheck.lives.lifecycle import LifecycleRun
    from lowtide.leakcheck.lives.script import Event
    from lowtide.probes.device.driver import Driver


def check(
    target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="What makes your engine's target.")],
    cycles: Annotated[int, typer.Option(help="Whole lives, one after the other; the first warms libraries up.")] = 2,
    report: Annotated[Path | None, typer.Option(help="Folder for the report (JSON, HTML, JUnit, Markdown).")] = None,
    suppressions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Known leaks that may stay; an entry that none needs fails.")
    ] = None,
    tenant: Annotated[
        bool, typer.Option("--tenant", help="While it sleeps, a second process takes what it freed on the card.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Report folder of a calibration: its tolerances for what one life may leave."),
    ] = None,
    wide: Wide = False,
) -> None:
    """Drive your engine through one fixed life (create, infer, every sleep, wake, shutdown) again and again, and judge.

    Exit codes: as those of `run`.
    """
    if cycles < 1:
        refuse(f"--cycles {cycles} is not possible: use 1 or more")
    known = load_suppressions(suppressions)
    if report is not None:
        check_writable(report)
    with interruptible("interrupted before there was anything to report"):
        from lowtide.leakcheck.lives.target_life import check_run

        try:
            factory = load_factory(target)

            def make_run(driver: Driver, show: Callable[[Event], None]) -> LifecycleRun:
                return check_run(
                    f"check[{target}]",
                    factory,
                    driver=driver,
                    cycles=cycles,
                    listener=show,
                    tenant=tenant,
                    tolerances_on=partial(load_tolerances, calibration),
                    snapshots=snapshots_in(report),
                )

            code = live(make_run, report, known, wide=wide)
        except TargetError as error:
            refuse(str(error))
    raise typer.Exit(code)
