"""Draws one life from a report as a picture: what the process holds on its device after each stage, line by line.

Usage: python docs/draw_life.py REPORT_FOLDER OUTPUT.svg
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from lowtide.reports.schema import Ledger, Stage, read

COLOURS = ("#4e79a7", "#59a14f", "#f28e2b", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#bab0ac")
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 920, 380, 64, 44, 46, 230
GIB = 1 << 30


def merged(ledger: Ledger) -> dict[str, int]:
    """The lines, the small ones of libraries and torch's pools taken together."""
    sizes: dict[str, int] = {}
    for line in ledger.lines:
        name = line.name if line.name.startswith("arena") else "context, kernels, libraries, torch"
        sizes[name] = sizes.get(name, 0) + line.bytes
    sizes["unexplained"] = ledger.unexplained or 0
    return sizes


def draw(stages: list[Stage], title: str) -> str:
    """The picture of these stages, with the reading before the first one in front."""
    names = ["before", *(stage.name for stage in stages)]
    columns = [merged(stages[0].before.ledgers[0]), *(merged(stage.after.ledgers[0]) for stage in stages)]
    lines = sorted({name for column in columns for name in column}, key=lambda name: (name == "unexplained", name))
    lines.sort(key=lambda name: -max(column.get(name, 0) for column in columns))
    top = max(sum(column.values()) for column in columns)
    plot_width, plot_height = WIDTH - LEFT - LEGEND, HEIGHT - TOP - BOTTOM
    step = plot_width / len(columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(0, int(top / GIB) + 2, max(1, int(top / GIB / 4))):
        y = TOP + plot_height * (1 - tick * GIB / (top * 1.05))
        if y < TOP:
            break
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + plot_width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick} GiB</text>')
    for turn, (name, column) in enumerate(zip(names, columns, strict=True)):
        x, y = LEFT + turn * step + step * 0.15, float(TOP + plot_height)
        for colour, line in zip(COLOURS, lines, strict=False):
            height = plot_height * max(column.get(line, 0), 0) / (top * 1.05)
            y -= height
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{step * 0.7:.1f}" height="{height:.1f}" fill="{colour}"/>'
            )
        parts.append(f'<text x="{x + step * 0.35:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{name}</text>')
        total = sum(column.values()) / GIB
        parts.append(f'<text x="{x + step * 0.35:.1f}" y="{y - 5:.1f}" text-anchor="middle">{total:.1f}</text>')
    for turn, (colour, line) in enumerate(zip(COLOURS, lines, strict=False)):
        y = TOP + 10 + 22 * turn
        x = LEFT + plot_width + 16
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    report = read(Path(sys.argv[1]))
    (subject,) = report.subjects
    last = subject.stages[-1].cycle
    stages = [stage for stage in subject.stages if stage.cycle == last]
    device = ", ".join(report.machine.devices) or "CPU"
    title = f"{subject.id}, life {last}: GiB of this process on one {device}, after each stage ({subject.outcome})"
    Path(sys.argv[2]).write_text(draw(stages, title))


if __name__ == "__main__":
    main()
