"""`lowtide run`: the reference engine's life."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.leakcheck.cli.console import Wide, interruptible, refuse
from lowtide.leakcheck.cli.judged_lives import live, load_suppressions, load_tolerances, snapshots_in
from lowtide.leakcheck.cli.reporting import check_writable
from lowtide.leakcheck.targets.target import Device, device_name

if TYPE_CHECKING:
    from lowtide.engine import EngineConfig
    from lowtide.engine.defects import Defect
    from lowtide.leakcheck.lives.lifecycle import LifecycleRun
    from lowtide.leakcheck.lives.script import Event
    from lowtide.probes.device.driver import Driver


class Preset(str, Enum):
    """Random models by size."""

    TINY = "tiny"
    ONE_B = "1b"
    EIGHT_B = "8b"


def run(
    device: Annotated[Device, typer.Option(help="Where the engine runs; auto takes a card if there is one.")] = (
        Device.AUTO
    ),
    preset: Annotated[Preset | None, typer.Option(help="A random model of this size [default: tiny].")] = None,
    model: Annotated[Path | None, typer.Option(help="A Hugging Face checkpoint folder instead of a preset.")] = None,
    cycles: Annotated[int, typer.Option(help="Whole lives, one after the other; the first warms libraries up.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of random weights and prompts.")] = 0,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Ranks that have a part of the model each, in a process of its own each.")
    ] = 1,
    engine_process: Annotated[
        bool, typer.Option("--engine-process", help="Run the engine's core in a process of its own.")
    ] = False,
    defect: Annotated[str | None, typer.Option(help="Switch a historical bug on; see `lowtide defects`.")] = None,
    twin: Annotated[
        bool, typer.Option("--twin", help="With --defect: the engine that the bug needs, without the bug.")
    ] = False,
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
    """Drive the reference engine through its life, account for every byte, and judge.

    Exit codes: 0 clean, 1 a leak was found or a suppression has expired or is not needed, 2 bad input or could not be
    measured, 130 interrupted.
    """
    if cycles < 1:
        refuse(f"--cycles {cycles} is not possible: use 1 or more")
    if preset is not None and model is not None:
        refuse("--preset and --model exclude each other: give one of them")
    if twin and defect is None:
        refuse("--twin needs --defect NAME: it is that engine without the bug")
    known = load_suppressions(suppressions)
    if report is not None:
        check_writable(report)
    with interruptible("interrupted before there was anything to report"):
        # Only now: importing torch takes seconds, and refusing bad input should not.
        from lowtide.engine import EngineError
        from lowtide.engine.defects import find_defect
        from lowtide.leakcheck.lives.lifecycle import LifecycleRun
        from lowtide.leakcheck.lives.tenant import tenant_of
        from lowtide.leakcheck.targets.reference import ReferenceLife

        settings = {
            "model": str(model) if model else (preset or Preset.TINY).value,
            "device": device_name(device),
            "seed": seed,
            "tensor_parallel_size": tensor_parallel_size,
            "engine_process": engine_process,
        }
        try:
            active = find_defect(defect) if defect is not None else None
            config, vocab_size = _configure(settings, active, twin=twin)
        except EngineError as error:
            refuse(str(error))
        tolerances = load_tolerances(calibration, config.device)

        def make_run(driver: Driver, show: Callable[[Event], None]) -> LifecycleRun:
            return LifecycleRun(
                f"run[{config.model}]",
                lambda: ReferenceLife(config, vocab_size, active.prompt_scale if active is not None else 1),
                device=config.device,
                driver=driver,
                cycles=cycles,
                listener=show,
                tenant=tenant_of(config.device) if tenant else None,
                tolerances=tolerances,
                snapshots=snapshots_in(report),
            )

        with ExitStack() as stack:
            if active is not None:
                stack.enter_context(active.trigger() if twin else active.switched_on())
            code = live(make_run, report, known, wide=wide)
    raise typer.Exit(code)


def _configure(settings: Mapping[str, Any], defect: Defect | None, *, twin: bool) -> tuple[EngineConfig, int]:
    """Return the engine's settings and the size of its vocabulary, checked as far as that goes without memory.

    Raises:
        EngineError: something cannot work.
    """
    from lowtide.engine import EngineConfig, LLMEngine
    from lowtide.engine.config import load_model_config

    config = EngineConfig(**settings)
    if defect is not None:
        config = defect.configure(config, twin=twin)
    LLMEngine(config).check()
    return config, load_model_config(config).vocab_size
