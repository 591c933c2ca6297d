"""A report on the terminal: `report` renders it, `telling_table` chooses the columns that are shown."""

from lowtide.reports.terminal.life_tables import ledger_table, process_table, stage_table
from lowtide.reports.terminal.report import (
    finding_text,
    growth_table,
    is_long,
    not_judged_text,
    render,
    render_subject,
    render_worst,
    verdict_lines,
)

__all__ = [
    "finding_text",
    "growth_table",
    "is_long",
    "ledger_table",
    "not_judged_text",
    "process_table",
    "render",
    "render_subject",
    "render_worst",
    "stage_table",
    "verdict_lines",
]
