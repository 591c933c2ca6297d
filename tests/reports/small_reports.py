"""Small reports that test modules of renderings share."""

from __future__ import annotations

from typing import Any

import msgspec

from lowtide.reports import schema
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage

MIB = 1 << 20

FINDING = schema.Finding(
    resource="tensors",
    cause="module-global",
    bytes=48 << 20,
    count=3,
    device="cuda:0",
    stage="shutdown",
    message="48.0 MiB of tensors did not come back, held by engine.cache.POOL",
    fingerprint="0123456789abcdef",
    holder="engine.cache.POOL[0]",
)

HOSTILE = 'a"b\\c\r\n::error::x\n%0A,file=y:z {0} [text](1) <b>\x1b[31m \udc80 🌊'
"""A text with all that some format gives a meaning to."""


def finding(**fields: Any) -> schema.Finding:
    return msgspec.structs.replace(FINDING, **fields)


def subject(*findings: schema.Finding, name: str = "tests/test_a.py::test_b", **fields: Any) -> schema.Subject:
    outcome = "leak" if any(each.suppressed_by is None for each in findings) else "clean"
    return msgspec.structs.replace(schema.Subject(id=name, outcome=outcome, findings=findings), **fields)


def report(*subjects: schema.Subject, **fields: Any) -> schema.Report:
    machine = schema.Machine(
        platform="Linux", python="3.11", torch="2.13", cpus=2, memory=1 << 34, devices=("H200",), driver="nvml"
    )
    made = schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="2026-01-31T12:00:00+00:00",
        command="lowtide run",
        machine=machine,
        subjects=subjects,
    )
    return msgspec.structs.replace(made, **fields)


def ledger(device: str, total: int, **lines: int) -> schema.Ledger:
    named = tuple(schema.LedgerLine(name=name, bytes=size) for name, size in lines.items())
    return schema.Ledger(
        device=device, source="nvml", total=total, lines=named, unexplained=total - sum(lines.values())
    )


def readings(*ledgers: schema.Ledger) -> schema.Readings:
    zeros = dict.fromkeys(schema.Readings.__struct_fields__, 0)
    return msgspec.convert({**zeros, "arenas": {}, "ledgers": ledgers}, schema.Readings)


CORE = ProcessName(pid=77, name="VLLM::EngineCore")


def stage(name: str, seconds: float, weights: int, *, first: bool = False, held: int | None = None) -> schema.Stage:
    others = () if held is None else (ProcessStage(process=CORE, tensors={"cuda:0": held}, arenas={}, reserved={}),)
    return schema.Stage(
        name=name,
        cycle=1,
        seconds=seconds,
        before=readings(ledger("cuda:0", MIB, weights=0)) if first else readings(),
        after=readings(ledger("cuda:0", weights + MIB, weights=weights)),
        tokens_per_second=30.0 if name == "infer" else None,
        processes=others,
    )


LIFE = (
    stage("create", 2.0, 40 * MIB, first=True, held=5 * MIB),
    stage("infer", 0.5, 40 * MIB, held=6 * MIB),
    stage("sleep(1)", 0.0, 0, held=0),
)
