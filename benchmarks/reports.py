"""The page of a large report in headless Chromium: how long until something is seen, and until a filter has answered.

Goals, for 10,000 findings and 1,000 cycles: first paint within 2 s, a filter within 100 ms, and besides the report's
data at most 1 MB. The floor is what Chromium needs for a page of the same bytes that is one text and nothing else.
Needs Chromium (`apt install chromium`) and Playwright.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import machine
import msgspec
from playwright.sync_api import Browser, Page, sync_playwright

from lowtide.reports import perfetto, schema
from lowtide.reports.html.page import render_html
from lowtide.reports.processes.stage_processes import ProcessName, ProcessStage

MIB = 1 << 20
STAGES = ("create", "infer", "sleep(1)", "wake", "infer", "shutdown")
RANKS = 8
MOST_FOR_PAGE = 1_000_000
"""Bytes of a page that is not data."""

FILTER = """async text => {
  const box = document.querySelector("input[type=search]");
  const began = performance.now();
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - began;
}"""


def life(cycles: int) -> tuple[schema.Stage, ...]:
    """A life with ranks in processes of their own, of which one keeps a little more in each cycle."""
    return tuple(_stage(name, cycle) for cycle in range(1, cycles + 1) for name in STAGES)


def _stage(name: str, cycle: int) -> schema.Stage:
    held = {"sleep(1)": 300 * MIB, "shutdown": 0}.get(name, 40_000 * MIB + cycle * 4096)
    readings = _readings(held, cycle)
    others = tuple(
        ProcessStage(
            process=ProcessName(pid=1000 * cycle + rank, name=f"VLLM::Worker_TP{rank}", rank=rank),
            tensors={"cuda:0": held},
            arenas={"cuda:0": {"weights": held // 2, "kv_cache": held // 3}},
            reserved={"cuda:0": held // 8},
            cards={f"cuda:{rank}": held + 600 * MIB},
            host=900 * MIB + cycle * 8192,
            contexts={f"cuda:{rank}": 518 * MIB},
            unexplained={"cpu": 10 * MIB, f"cuda:{rank}": 12 * MIB},
        )
        for rank in range(RANKS if name != "shutdown" else 0)
    )
    return schema.Stage(name=name, cycle=cycle, seconds=0.5, before=readings, after=readings, processes=others)


def _readings(held: int, cycle: int) -> schema.Readings:
    lines = {"context": 518 * MIB, "arena weights": held // 2, "arena kv_cache": held // 3, "torch": held // 8}
    total = sum(lines.values()) + 7 * MIB
    ledger = schema.Ledger(
        device="cuda:0",
        source="nvml",
        total=total,
        lines=tuple(schema.LedgerLine(name=name, bytes=size) for name, size in lines.items()),
        unexplained=7 * MIB,
    )
    zeros: dict[str, Any] = dict.fromkeys(schema.Readings.__struct_fields__, 0)
    zeros |= {"arenas": {"weights": held // 2}, "ledgers": (ledger,), "rss": 900 * MIB + cycle * 8192, "driver": total}
    return msgspec.convert(zeros, schema.Readings)


def findings(count: int) -> Iterator[schema.Finding]:
    """Leaks, of which ten each are one leak in other tests."""
    for turn in range(count):
        leak = turn // 10
        yield schema.Finding(
            resource="tensors",
            cause="module-global",
            bytes=(1 + leak % 4000) * 65_536,
            count=1 + leak % 7,
            device="cuda:0",
            stage="shutdown",
            message=f"tensors did not come back, held by engine.caches.CACHE_{leak}",
            fingerprint=f"{leak:016x}",
            holder=f"engine.caches.CACHE_{leak}[0]",
            path=tuple(
                schema.Hop(type=type_, edge=edge, suspect=suspect, retains_bytes=65_536)
                for type_, edge, suspect in (
                    ("module", "engine.caches", False),
                    ("dict", f".CACHE_{leak}", True),
                    ("list", "[0]", False),
                    ("Tensor", "", False),
                )
            ),
            allocated_at=tuple(
                schema.Frame(file=f"engine/layer_{leak % 90}.py", line=10 + depth, function=f"f{depth}", source="x = y")
                for depth in range(6)
            ),
            remedy=schema.Remedy(action=f"engine.caches.CACHE_{leak}.clear()", returns_bytes=65_536),
        )


def large_report(count: int, cycles: int, one_subject: bool) -> schema.Report:
    """A report of many findings and a long life.

    Args:
        count: findings.
        cycles: of the life.
        one_subject: whether all findings are of the life, or each of a test of its own.
    """
    leaks = tuple(findings(count))
    described = machine.describe()
    tests: Iterable[schema.Subject] = (
        ()
        if one_subject
        else (
            schema.Subject(id=f"tests/test_many.py::test_{turn}[cuda-{turn % 7}]", outcome="leak", findings=(leak,))
            for turn, leak in enumerate(leaks)
        )
    )
    return schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="2026-01-31T12:00:00+00:00",
        command="lowtide check engine:Target",
        machine=schema.Machine(
            platform="Linux",
            python=described["python"],
            torch=described["torch"],
            cpus=described["cores"],
            memory=described["memory_bytes"],
            devices=("cuda:0",),
            driver="nvml",
        ),
        subjects=(
            schema.Subject(
                id="engine", outcome="leak", stages=life(cycles), findings=leaks if one_subject else leaks[:1]
            ),
            *tests,
        ),
    )


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    began = time.perf_counter()
    return call(), time.perf_counter() - began


def first_paint(page: Page, path: Path) -> dict[str, float]:
    """Milliseconds from the start of a load until something is seen, and until all is there."""
    page.goto(path.as_uri())
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
    loaded = "performance.getEntriesByType('navigation')[0].loadEventEnd"
    page.wait_for_function(f"{loaded} > 0")
    return {
        "first_paint_ms": round(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")),
        "loaded_ms": round(page.evaluate(loaded)),
    }


def floor(browser: Browser, size: int, folder: Path) -> dict[str, float]:
    """The same for a page of as many bytes that has one script of a type which is not run."""
    path = folder / "floor.html"
    path.write_text(f"<!doctype html><p>text<script type='application/json'>{'x' * size}</script>")
    return first_paint(browser.new_page(), path)


def measure(browser: Browser, report: schema.Report, folder: Path, repeats: int) -> dict[str, Any]:
    """One page: how large, how long it takes to build, to be seen, to draw, and to filter."""
    text, seconds = timed(lambda: render_html(report))
    path = folder / "index.html"
    path.write_text(text)
    loads = [first_paint(browser.new_page(), path) for _ in range(repeats)]
    page = browser.new_page()
    first_paint(page, path)
    page.evaluate(FILTER, "no-such-text")
    filters = {
        text: round(statistics.median(page.evaluate(FILTER, text) for _ in range(repeats)), 1)
        for text in ("CACHE_77", "test_many", "layer_8", "shutdown", "no-such-text", "")
    }
    return {
        "page_bytes": len(text.encode()),
        "built_s": round(seconds, 2),
        "first_paint_ms": statistics.median(each["first_paint_ms"] for each in loads),
        "loaded_ms": statistics.median(each["loaded_ms"] for each in loads),
        "floor": floor(browser, len(text), folder),
        "filter_ms": filters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--findings", type=int, default=10_000)
    parser.add_argument("--cycles", type=int, default=1_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()

    empty = large_report(1, 1, one_subject=True)
    results: dict[str, Any] = {
        "findings": args.findings,
        "cycles": args.cycles,
        "goals": {"first_paint_ms": 2000, "filter_ms": 100, "bytes_beside_data": MOST_FOR_PAGE},
        "bytes_beside_data": len(render_html(empty).encode()),
    }
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        results["chromium"] = browser.version
        for name, one_subject in (("a test for each finding", False), ("all findings in one life", True)):
            report = large_report(args.findings, args.cycles, one_subject)
            results[name] = measure(browser, report, Path(folder), args.repeats)
            trace, seconds = timed(lambda report=report: perfetto.render_trace(report))
            results[name]["trace"] = {"bytes": len(trace), "built_s": round(seconds, 2)}
        browser.close()
    machine.write("reports", results, args.out)


if __name__ == "__main__":
    main()
