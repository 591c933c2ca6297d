"""`lowtide run` and `lowtide check`: whole lives are run, judged against suppressions, and reported; `lowtide serve`.

While lives run they are drawn on a terminal, from the readings that their judge takes anyway; who watches the folder of
a report is told the same.
"""

from __future__ import annotations

import datetime
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cached_cell_len
from rich.console import Console
from rich.live import Live

import lowtide
from lowtide.leakcheck.cli.console import (
    INTERRUPTED,
    KnownLeaks,
    ReportFolder,
    Wide,
    begin_report,
    check_positive,
    check_writable,
    ended_with,
    find_console,
    interruptible,
    load_suppressions,
    make_report,
    refuse,
    show_judged,
)
from lowtide.leakcheck.targets.target import Device, TargetError, device_name, load_factory
from lowtide.reports.terminal.running_life import RunningLife

if TYPE_CHECKING:
    from lowtide.engine import EngineConfig
    from lowtide.engine.defects import Defect
    from lowtide.leakcheck.lives.lifecycle import LifecycleRun
    from lowtide.leakcheck.lives.script import Event
    from lowtide.leakcheck.suppressions.entries import Suppressions

_Cycles = Annotated[int, typer.Option(help="Whole lives, one after the other; the first warms libraries up.")]
_Tenant = Annotated[
    bool, typer.Option("--tenant", help="While it sleeps, a second process takes what it freed on the card.")
]
_Calibration = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Report folder of a calibration: its tolerances for what one life may leave."),
]
_Turns = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Infer N times more in a row, 12 or more, update the weights as often, and judge what grows "
        "[default: 0, no more].",
    ),
]
_UntilDecided = Annotated[
    bool, typer.Option("--until-decided", help="Infer on, up to ten times as often, until it is known what grows.")
]
_Native = Annotated[
    bool,
    typer.Option(
        "--native",
        help="With --turns: record which calls allocate while host memory seems to grow, by memray or tracemalloc. "
        "On a card: record which library asks the driver for memory (extra cupti).",
    ),
]

_KeepHeap = Annotated[
    bool,
    typer.Option(
        "--keep-heap", help="With --report: keep the heap in which the last life leaves something, for `lowtide heap`."
    ),
]


class Preset(str, Enum):
    """Random models by size."""

    TINY = "tiny"
    ONE_B = "1b"
    EIGHT_B = "8b"


RunsOn = Annotated[Device, typer.Option(help="Where the engine runs; auto takes a card if there is one.")]
RandomModel = Annotated[Preset | None, typer.Option(help="A random model of this size [default: tiny].")]
Checkpoint = Annotated[Path | None, typer.Option(help="A Hugging Face checkpoint folder instead of a preset.")]
Ranks = Annotated[int, typer.Option(help="Ranks that have a part of the model each, in a process of its own each.")]
Bug = Annotated[str | None, typer.Option(help="Switch a historical bug on; see `lowtide defects`.")]
Twin = Annotated[bool, typer.Option("--twin", help="With --defect: the engine that the bug needs, without the bug.")]


def run(
    device: RunsOn = Device.AUTO,
    preset: RandomModel = None,
    model: Checkpoint = None,
    cycles: _Cycles = 2,
    seed: Annotated[int, typer.Option(help="Seed of random weights and prompts.")] = 0,
    tensor_parallel_size: Ranks = 1,
    engine_process: Annotated[
        bool, typer.Option("--engine-process", help="Run the engine's core in a process of its own.")
    ] = False,
    defect: Bug = None,
    twin: Twin = False,
    report: ReportFolder = None,
    suppressions: KnownLeaks = None,
    tenant: _Tenant = False,
    calibration: _Calibration = None,
    turns: _Turns = 0,
    until_decided: _UntilDecided = False,
    native: _Native = False,
    keep_heap: _KeepHeap = False,
    wide: Wide = False,
) -> None:
    """Drive the reference engine through its life, account for every byte, and judge.

    Exit codes: 0 clean, 1 a leak was found or a suppression has expired or is not needed, 2 bad input or could not be
    measured, 130 interrupted.
    """
    check_engine_options(preset, model, defect, twin=twin)
    options = _options(cycles, turns, until_decided, native, tenant)
    known = _known(report, suppressions, keep_heap)
    with interruptible("interrupted before there was anything to report"):
        # Only now: importing torch takes seconds, and refusing bad input should not.
        from lowtide.leakcheck.lives.lifecycle import check_run
        from lowtide.leakcheck.targets.reference import FixedReference

        size, separate = tensor_parallel_size, engine_process
        settings = {"seed": seed, "tensor_parallel_size": size, "engine_process": separate}
        active, config = configure_engine(device, preset, model, settings, defect, twin=twin)
        tolerances = load_tolerances(calibration, config.device)
        if active is not None:
            options["turns"] = options["turns"] or active.turns

        make_run = partial(
            check_run,
            factory=lambda: FixedReference(config, active.prompt_scale if active is not None else 1),
            tolerances_on=lambda device: tolerances,
            **options,
        )
        with _switched_on(active, twin=twin):
            code = live(f"run[{config.model}]", make_run, report, known, keep_heap=keep_heap, wide=wide)
    raise typer.Exit(code)


def check_engine_options(preset: Preset | None, model: Path | None, defect: str | None, *, twin: bool) -> None:
    """Refuse options of an engine that contradict each other."""
    if preset is not None and model is not None:
        refuse("--preset and --model exclude each other: give one of them")
    if twin and defect is None:
        refuse("--twin needs --defect NAME: it is that engine without the bug")


def _options(cycles: int, turns: int, until_decided: bool, native: bool, tenant: bool) -> dict[str, Any]:
    """Return the options of lives for `check_run`; refuse those that are not possible."""
    check_positive(cycles=cycles)
    if until_decided and not turns:
        refuse("--until-decided needs --turns N: as many inferences are made in any case")
    if native and not turns and find_spec("cupti") is None:
        refuse(
            "--native needs --turns N: calls are recorded while memory seems to grow with these; or the extra cupti, "
            "to record which library asks a card's driver for memory"
        )
    if turns:
        from lowtide.leakcheck.findings.turn_growth import FEWEST_TURNS

        if turns < FEWEST_TURNS:
            refuse(f"--turns {turns} is not possible: what grows shows from {FEWEST_TURNS} turns on")
    return {"cycles": cycles, "turns": turns, "until_decided": until_decided, "native": native, "tenant": tenant}


def _known(report: Path | None, suppressions: Path | None, keep_heap: bool) -> Suppressions:
    """Return what is suppressed; refuse a report that cannot be written, or that `--keep-heap` needs."""
    if keep_heap and report is None:
        refuse("--keep-heap needs --report DIR: the heap is kept in it")
    known = load_suppressions(suppressions)
    check_writable(report)
    return known


def configure_engine(
    device: Device,
    preset: Preset | None,
    model: Path | None,
    settings: Mapping[str, Any],
    defect: str | None,
    *,
    twin: bool,
) -> tuple[Defect | None, EngineConfig]:
    """Return the bug and the engine's settings, checked as far as that goes without memory.

    Ends the command where something cannot work.
    """
    from lowtide.engine import EngineConfig, EngineError, LLMEngine
    from lowtide.engine.defects import find_defect

    name = str(model) if model else (preset or Preset.TINY).value
    try:
        bug = None if defect is None else find_defect(defect)
        config = EngineConfig(model=name, device=device_name(device), **settings)
        if bug is not None:
            config = bug.configure(config, twin=twin)
        LLMEngine(config).check()
        return bug, config
    except EngineError as error:
        refuse(str(error))


def _switched_on(defect: Defect | None, *, twin: bool) -> AbstractContextManager[object]:
    if defect is None:
        return nullcontext()
    return defect.trigger() if twin else defect.switched_on()


def load_tolerances(calibration: Path | None, device: str) -> dict[str, int]:
    """Read the tolerances of a life on a device from a calibration's report folder; {} without one."""
    from lowtide.leakcheck.gate.calibration import CalibrationError, read_tolerances

    try:
        return {} if calibration is None else read_tolerances(calibration, device)
    except CalibrationError as error:
        refuse(f"--calibration {error}")


def live(
    name: str,
    make_run: Callable[..., LifecycleRun],
    report: Path | None,
    suppressions: Suppressions,
    *,
    keep_heap: bool,
    wide: bool,
) -> int:
    """Live all lives, on a terminal in view of its user, and show and write the verdict.

    Returns:
        The command's exit code.
    """
    from lowtide.leakcheck.findings.heap_file import HeapFile
    from lowtide.probes.device.allocator_snapshots import AllocatorSnapshots
    from lowtide.probes.device.driver import find_driver
    from lowtide.reports.heap.kept_heap import kept_files, remove_old
    from lowtide.reports.live.broadcast import Broadcast

    console = find_console()
    # Until the report is there: who watches the folder goes on to that.
    with ExitStack() as watched, ExitStack() as stack:
        driver = stack.enter_context(closing(find_driver()))
        listeners = [stack.enter_context(shown_live(console))]
        snapshots = heap = None
        if report is not None:
            broadcast = watched.enter_context(closing(Broadcast(report, lambda: make_report(None, driver))))
            listeners.append(lambda event: broadcast.stage_begins(event.text, event.latest_stages))
            # What stages and the heap of an earlier run have left there goes.
            snapshots = AllocatorSnapshots(report)
            snapshots.remove_old()
            remove_old(report)
            heap = HeapFile.beside(str(report), name, lowtide.__version__) if keep_heap else None
        life = make_run(name, driver=driver, listener=partial(_tell, listeners), snapshots=snapshots, heap=heap)
        today = datetime.date.today()
        unfinished = stack.enter_context(begin_report(report, driver, "cycle"))
        if unfinished is not None:
            life.keep = lambda so_far: unfinished.add([suppressions.judge(so_far, today)[0]], goes_on=True)
        subject, used = suppressions.judge(life.run(), today)
        written = make_report(subject, driver)
        stack.close()
        heaps = [] if report is None else kept_files(report)
        notes = [f"kept heap: lowtide heap {shlex.quote(str(file))}" for file in heaps]
        # A run that ended early may not have come to what an entry is for.
        code, unwritten = show_judged(
            console, written, report, suppressions, used, *notes, ran_all=not subject.reason, wide=wide
        )
    return ended_with(INTERRUPTED if life.interrupted else code, unwritten)


def _tell(listeners: Iterable[Callable[[Event], None]], event: Event) -> None:
    for hear in listeners:
        hear(event)


@contextmanager
def shown_live(console: Console) -> Iterator[Callable[[Event], None]]:
    """Yield a listener for lives, which draws each event on a terminal that can be drawn on, else does nothing.

    What it has drawn is gone when the block ends.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda event: None
        return
    # No thread draws: the lives' own threads are counted. What the engine prints goes above the drawing; what goes to
    # a file stays with that.
    live = Live(
        RunningLife("starting"),
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
    try:
        # In here, since Ctrl-C may come when the cursor is hidden already.
        with suppress(OSError):
            live.start(refresh=True)
        yield DrawnLife(live).show
    finally:
        with suppress(OSError):
            live.stop()


class DrawnLife:
    """Keeps the sizes of the readings so far, as whole numbers alone, and draws them."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._sizes: dict[str, list[int]] = {}
        self._readings = 0

    def show(self, event: Event) -> None:
        """Draw what starts now, with the reading before it; a terminal that is gone is no error of the life's."""
        for name in event.sizes:
            self._sizes.setdefault(name, [0] * self._readings)
        for name, sizes in self._sizes.items():
            sizes.append(event.sizes.get(name, 0))
        self._readings += 1
        since = time.strftime("%H:%M:%S")
        drawing = RunningLife(event.text, event.done, event.total, since, self._sizes)
        with suppress(OSError):
            self._live.update(drawing, refresh=True)
        # It would keep each text that was drawn, and be among the objects of which there are more after each life.
        cached_cell_len.cache_clear()


def check(
    target: Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help="What makes your engine's target.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ARGUMENT...", help="What it is called with, such as the command of a server."),
    ] = None,
    cycles: _Cycles = 2,
    report: ReportFolder = None,
    suppressions: KnownLeaks = None,
    tenant: _Tenant = False,
    calibration: _Calibration = None,
    turns: _Turns = 0,
    until_decided: _UntilDecided = False,
    native: _Native = False,
    keep_heap: _KeepHeap = False,
    wide: Wide = False,
) -> None:
    """Drive your engine through one fixed life (create, infer, every sleep, wake, shutdown) again and again, and judge.

    Exit codes: as those of `run`.
    """
    options = _options(cycles, turns, until_decided, native, tenant)
    known = _known(report, suppressions, keep_heap)
    with interruptible("interrupted before there was anything to report"):
        from lowtide.leakcheck.lives.lifecycle import check_run

        try:
            factory, tolerances_on = load_factory(target, arguments or ()), partial(load_tolerances, calibration)
            make_run = partial(check_run, factory=factory, tolerances_on=tolerances_on, **options)
            code = live(f"check[{target}]", make_run, report, known, keep_heap=keep_heap, wide=wide)
        except TargetError as error:
            refuse(str(error))
    raise typer.Exit(code)


def serve(
    device: RunsOn = Device.AUTO,
    preset: RandomModel = None,
    model: Checkpoint = None,
    host: Annotated[str, typer.Option(help="Name or address to listen at; anybody who gets there may use it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="To listen at; 0 takes one that is free.")] = 8000,
    seed: Annotated[int, typer.Option(help="Seed of random weights, and of requests that bring none.")] = 0,
    tensor_parallel_size: Ranks = 1,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at the same time; others wait.")] = 64,
    max_model_len: Annotated[
        int | None, typer.Option(help="Prompt and output tokens of one request [default: what fits].")
    ] = None,
    defect: Bug = None,
    twin: Twin = False,
) -> None:
    """Serve the reference engine over HTTP as vLLM serves one, its core in a process of its own.

    It answers /v1/completions, /v1/models, /health, /metrics, /sleep, /wake_up, /is_sleeping and /reset_prefix_cache.
    SIGTERM and Ctrl-C end it: the core first, then the connections.

    Exit codes: 0 after Ctrl-C, 2 bad input, a port in use, or an engine that has ended by itself.
    """
    check_engine_options(preset, model, defect, twin=twin)
    with interruptible("interrupted before it served"):
        # Before the engine, so that what is missing is said before seconds are spent.
        from lowtide.engine import EngineError, LLMEngine
        from lowtide.engine.server import serve as serve_engine

        settings = {
            "seed": seed,
            "tensor_parallel_size": tensor_parallel_size,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "engine_process": True,
        }
        active, config = configure_engine(device, preset, model, settings, defect, twin=twin)
        try:
            with _switched_on(active, twin=twin):
                serve_engine(LLMEngine(config), host, port)
        except EngineError as error:
            refuse(str(error))
