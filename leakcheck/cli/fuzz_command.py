"""What `lowtide fuzz` does: searches, shows how far it is, prints and writes what it found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from lowtide.leakcheck.cli.console import progress_line
from lowtide.leakcheck.fuzzing.fault_sweep import Swept
from lowtide.leakcheck.fuzzing.fuzz import Found, as_program, fuzz
from lowtide.leakcheck.fuzzing.shared_sweep import shared_sweep
from lowtide.leakcheck.fuzzing.target_source import TargetSource
from lowtide.leakcheck.fuzzing.witness import Killed, kill_in_each_stage
from lowtide.leakcheck.lives.script import Coverage
from lowtide.leakcheck.targets.reference_target import THOROUGH, ReferenceTarget
from lowtide.leakcheck.targets.small_checkpoint import SmallCheckpoint
from lowtide.leakcheck.targets.target import TargetError, TargetFactory, load_factory, make_target
from lowtide.probes.device.driver import find_driver
from lowtide.reports.escaping import one_line
from lowtide.reports.hanging_text import HangingText
from lowtide.reports.outcomes import judged_as, largest_of_each
from lowtide.reports.schema import Finding, NotMeasured, ReportError, Subject
from lowtide.reports.terminal import finding_text, not_judged_text

if TYPE_CHECKING:
    from lowtide.engine.defects import Defect

PROGRAM = "life.py"
"""The file of a report's folder that has the life that fails."""


@dataclass(frozen=True)
class Subjected:
    """What is fuzzed.

    Attributes:
        name: of the subject in the report.
        factory: makes a target.
        source: how a program gets at the same.
        context: what is switched on meanwhile.
        from_outside: the same for a program that will be killed, and must leave no files; None if `source` leaves none.
        thorough: the configuration whose faults are swept: with everything that can fail.
        not_measured: what cannot fail here, and why.
    """

    name: str
    factory: TargetFactory
    source: TargetSource
    context: AbstractContextManager[object]
    from_outside: TargetSource | None = None
    thorough: Mapping[str, Any] = field(default_factory=dict)
    not_measured: tuple[NotMeasured, ...] = ()


def named_target(name: str) -> Subjected:
    """The user's own, as MODULE:FACTORY.

    Raises:
        TargetError: there is none of that name.
    """
    module, _, attribute = name.partition(":")
    factory = load_factory(name)
    imported = f"from {module} import {attribute.partition('.')[0]}"
    return Subjected(name, factory, TargetSource([imported], attribute), nullcontext())


def reference_target(device: str, defect: Defect | None, shape: Mapping[str, Any] | None = None) -> Subjected:
    """The reference engine, with a historical bug or without.

    Args:
        device: "cpu" or "cuda:N".
        defect: the bug.
        shape: settings that say in how many processes the engine is.

    Raises:
        ConfigError: the bug cannot show on this device.
    """
    imports = ["from lowtide.leakcheck.reference_target import ReferenceTarget"]
    own = dict(shape or {})
    if defect is None:
        make = f"lambda: ReferenceTarget({device!r}{f', {own!r}' if own else ''})"
        factory = lambda: ReferenceTarget(device, own)  # noqa: E731
        return Subjected("reference", factory, TargetSource(imports, make), nullcontext(), thorough=THOROUGH)
    defect.check(device)
    settings = {**own, **defect.settings}
    if settings.get("engine_process") or settings.get("tensor_parallel_size", 1) > 1:
        # The processes that the engine starts get the bug too.
        own["process_extensions"] = (defect.extension("activated"),)
    imports.append("from lowtide.engine.defects import DEFECTS")
    known = f"DEFECTS[{defect.name!r}]"
    written = f"{own!r} | {known}.settings" if own else f"{known}.settings"
    make = f"lambda: ReferenceTarget({device!r}, {written}, {known}.prompt_scale)"
    return Subjected(
        f"reference with {defect.name}",
        lambda: ReferenceTarget(device, {**own, **defect.settings}, defect.prompt_scale),
        TargetSource(imports, make, f"{known}.activate()"),
        # Not with what makes it show from outside: that is for the search to find.
        defect.activate(),
        thorough={name: value for name, value in THOROUGH.items() if name not in defect.settings},
    )


def checkpoint_target(device: str, shape: Mapping[str, Any] | None = None) -> Subjected:
    """The reference engine with its weights in the shards of a checkpoint, which can be damaged; see the above."""
    own = dict(shape or {})
    plain = reference_target(device, None, own)
    if find_spec("safetensors") is None:
        why = 'the package safetensors is not installed: pip install "lowtide[models]"'
        return replace(plain, not_measured=(NotMeasured(what="damaged shards", why=why),))
    written = SmallCheckpoint()
    imports = [
        "from lowtide.leakcheck.reference_target import ReferenceTarget",
        "from lowtide.leakcheck.small_checkpoint import SmallCheckpoint",
    ]
    make = f"lambda: ReferenceTarget({device!r}, {own!r} | {{'model': written.folder}})"
    return Subjected(
        "reference",
        lambda: ReferenceTarget(device, {**own, "model": written.folder}),
        TargetSource(imports, make, "SmallCheckpoint() as written"),
        written,
        plain.source,
        THOROUGH,
    )


def search(
    subjected: Subjected, *, examples: int, seed: int | None, steps: int, console: Console
) -> tuple[Subject, str, str]:
    """Random lives, with a progress line.

    Returns:
        What was found, for a report; the life that fails as a program, empty where none does; how much was tried.

    Raises:
        TargetError: the target cannot be driven.
    """
    with progress_line(console) as progress, subjected.context:
        task = progress.add_task("loading", total=examples)

        def show(coverage: Coverage) -> None:
            what = "shrinking" if coverage.failed else "lives"
            found = "1 finding" if coverage.failed else "no finding"
            said = f"{what}: {len(coverage.states)} states, {len(coverage.edges)} edges, {found}"
            progress.update(task, description=said, completed=min(coverage.lives, examples))

        found = fuzz(subjected.factory, examples=examples, seed=seed, steps=steps, listener=show)
    program = as_program(found.life, subjected.source) if found.life else ""
    outcome, unseen = judged_as("leak" if found.findings else "clean", found.not_measured)
    subject = Subject(
        id=f"fuzz[{subjected.name}]",
        outcome="error" if found.reason else outcome,
        reason=found.reason or unseen,
        findings=found.findings,
        not_measured=found.not_measured,
    )
    return subject, program, _summary(found)


def fail_all(subjected: Subjected, *, jobs: int = 1, console: Console) -> tuple[Subject, str, Table]:
    """Every fault point of every stage, and a kill in each, with a progress line.

    Args:
        subjected: what is fuzzed.
        jobs: processes at the same time that fail points.
        console: where the progress line is shown.

    Returns:
        What was found, for a report; the first life that fails as a program, empty where none does; the points.

    Raises:
        TargetError: the target cannot be driven.
    """
    swept: list[Swept] = []
    table = _points_table()
    with progress_line(console) as progress, subjected.context:
        task = progress.add_task("loading", total=None)

        def show(stage: str, kind: str, at: int, points: int) -> None:
            progress.update(task, description=f"{stage}: {kind}", completed=at, total=points)

        able = make_target(subjected.factory).capabilities
        items = shared_sweep(subjected.source, able, config=subjected.thorough, jobs=jobs, listener=show)
        killed: list[Killed] = []
        unknown = ""
        driver = find_driver()
        try:
            for item in items:
                swept.append(item)
                if item.points or item.findings:
                    verdict = "; ".join(finding.message for finding in item.findings) or "survived"
                    _add_row(table, item.stage, item.kind, str(item.points), str(item.raised), verdict)
            for dead in kill_in_each_stage(
                subjected.from_outside or subjected.source,
                able,
                config=subjected.thorough,
                driver=driver,
                listener=lambda stage: progress.update(task, description=f"{stage}: kill", total=None),
            ):
                killed.append(dead)
                verdict = "; ".join(finding.message for finding in dead.findings) or "nothing stayed"
                _add_row(table, dead.stage, "kill", "1", "1", verdict)
        except TargetError as error:
            if not swept:
                raise
            # What was found before is not lost for it.
            unknown = str(error)
        finally:
            driver.close()
    table.add_row("all", "", str(sum(item.points for item in swept)), str(sum(item.raised for item in swept)), "")
    life = next((item.life for item in swept if item.findings), ())
    subject = _sweep_subject(subjected, (*swept, *killed), unknown)
    return subject, as_program(life, subjected.source) if life else "", table


def _add_row(table: Table, *cells: str) -> None:
    # As text, not as a string: what stands in brackets is no markup.
    table.add_row(*(Text(one_line(cell)) for cell in cells))


def _points_table() -> Table:
    return Table(
        Column("stage", overflow="fold"),
        Column("fails", overflow="fold"),
        Column("points", justify="right", no_wrap=True),
        Column("raised", justify="right", no_wrap=True),
        Column("", overflow="fold"),
        box=None,
    )


def _sweep_subject(subjected: Subjected, tried: Sequence[Swept | Killed], unknown: str) -> Subject:
    """What every fault point and every kill found, each finding once; `unknown` says why not everything was tried."""
    findings: dict[str, Finding] = {}
    for found in [found for item in tried for found in item.findings]:
        # The same in several stages is one.
        findings.setdefault(found.fingerprint, found)
    # The same of each stage.
    unmeasured = [missing for item in tried for missing in item.not_measured]
    not_measured = (*subjected.not_measured, *largest_of_each(unmeasured))
    outcome, unseen = judged_as("leak" if findings else "error" if unknown else "clean", not_measured)
    return Subject(
        id=f"faults[{subjected.name}]",
        outcome=outcome,
        reason=unknown or unseen,
        findings=tuple(findings.values()),
        not_measured=not_measured,
    )


def verdict(subject: Subject, attempts: str | Table) -> Iterator[RenderableType]:
    """What is shown in the end."""
    if isinstance(attempts, Table):
        yield attempts
    for missing in subject.not_measured:
        if missing.process is not None and subject.outcome == "unsupported":
            continue  # its reason says so
        yield not_judged_text(missing)
    for finding in subject.findings:
        yield finding_text(finding)
    if isinstance(attempts, str):
        tried = attempts
    else:
        ended = bool(subject.reason) and subject.outcome != "unsupported"
        tried = "not everything was tried" if ended else "every fault point was failed once"
    if subject.outcome == "clean":
        yield HangingText(f"CLEAN: {tried}", style="bold green")
    if subject.outcome == "unsupported":
        yield HangingText(subject.reason, style="yellow")
        yield HangingText(f"NOT JUDGED: nothing can be concluded; {tried}", style="bold yellow")
    elif subject.reason:
        yield HangingText(f"NOT MEASURED: {subject.reason}; {tried}", style="bold yellow")
    if subject.outcome == "leak":
        yield HangingText(f"LEAK: {len(subject.findings)} finding(s); {tried}", style="bold red")


def write_program(folder: Path, program: str) -> None:
    """Puts the life that fails beside the report; where none does, one of an earlier report goes.

    Raises:
        ReportError: the folder cannot be written to.
    """
    path = folder / PROGRAM
    try:
        if program:
            path.write_text(program, encoding="utf-8")
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror}; choose another report folder") from error


def _summary(found: Found) -> str:
    seen = found.coverage
    rate = seen.lives / found.seconds if found.seconds else 0.0
    return (
        f"{seen.lives} lives, {seen.calls} calls, {len(seen.states)} states, {len(seen.edges)} edges in "
        f"{found.seconds:.1f} s ({rate:.1f} lives/s)"
    )
