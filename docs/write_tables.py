"""Writes the table of what is judged into the pages that show it, from the one in the code.

python docs/write_tables.py
"""

from __future__ import annotations

from pathlib import Path

from lowtide.leakcheck.judging.rules import RULES, Bound, Rule
from lowtide.reports.sizes import format_bytes

PAGES = ("judging.md", "pytest.md")

BEGIN = "<!-- judged: written by docs/write_tables.py -->"
END = "<!-- judged: end -->"

_PLACES = {"process": "", "device": "per device: ", "card": "per card: "}


def table() -> str:
    """The table, as Markdown."""
    rows = ["| resource | what is counted | after a test | after an engine's shutdown |", "| --- | --- | --- | --- |"]
    # What people look for first are devices; the sort keeps the order within each kind.
    rows += [_row(rule) for rule in sorted(RULES, key=lambda rule: rule.place == "process")]
    return "\n".join(rows)


def _row(rule: Rule) -> str:
    tested, lived = (_bound(rule, bound) for bound in (rule.test, rule.life))
    return f"| `{rule.resource}` | {_PLACES[rule.place]}{rule.counts} | {tested} | {lived} |"


def _bound(rule: Rule, bound: Bound | None) -> str:
    if bound is None:
        return "not judged"
    text = _amount(rule, bound.tolerance)
    if bound.with_card is not None:
        text += f", with a card {_amount(rule, bound.with_card)}"
    rungs = (["settle"] if bound.settles else []) + [bound.rung.value]
    text += "; " + ", ".join(f"`{rung}`" for rung in rungs)
    return text + ("; from the second life" if bound.first_use else "")


def _amount(rule: Rule, amount: int) -> str:
    text = format_bytes(amount) if rule.unit == "bytes" and amount else str(amount)
    return text.replace(".0 ", " ")


def with_table(page: str) -> str:
    """A page's text with the table of today between its two marks.

    Raises:
        ValueError: the page has no marks.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN!r} and {END!r}: put them where the table belongs")
    return f"{before}{begin}\n\n{table()}\n\n{end}{after}"


def main() -> None:
    """Write the pages anew."""
    for name in PAGES:
        page = Path(__file__).parent / name
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
