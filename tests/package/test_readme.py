"""What people read first: short, with a picture that is drawn from a stored finding, and nothing that leads nowhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from lowtide.engine.defects import DEFECTS
from lowtide.leakcheck.cli.commands import app
from tests.package.test_docs import OPTION, page, script, sections

ROOT = Path(__file__).parents[2]
READ_FIRST = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES = sorted(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md"))
FENCED = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(lowtide [^`\n]+)`")
COMMAND = re.compile(r"^lowtide (\w+)([^\n#]*)", re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("name", [name for name in READ_FIRST if (ROOT / name).exists()])
def test_each_link_leads_to_a_file_and_its_heading(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if re.match(r"https?:", path):
            continue
        target = ROOT / path
        assert target.is_file(), link
        if anchor:
            text = target.read_text(encoding="utf-8")
            assert anchor in [slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)], link


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/running.md", "docs/defects.md"])
def test_each_command_that_is_shown_exists_with_its_options(name: str) -> None:
    reported = sections(page("cli.md"))
    text = (ROOT / name).read_text(encoding="utf-8")
    shown = COMMAND.findall("\n".join([*FENCED.findall(text), *INLINE.findall(text)]))
    assert shown
    for command, rest in shown:
        assert f"`lowtide {command}`" in reported, command
        assert set(OPTION.findall(rest)) <= set(OPTION.findall(reported[f"`lowtide {command}`"])), (command, rest)
    assert len(app.registered_commands) == len(reported)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES])
def test_each_option_of_the_plugin_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = {option for option in OPTION.findall(text) if option.startswith("--leakcheck")}
    assert named <= {option for option, _ in script("write_reference").registered().options}


def words(svg: str) -> list[str]:
    """The words of a picture, line by line."""
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return " ".join(text.text or "" for text in texts).replace("\xa0", " ").split()


def test_the_picture_is_drawn_from_the_stored_finding() -> None:
    stored = (ROOT / "docs" / "data" / "vllm-sleep.txt").read_text(encoding="utf-8")
    shown = (ROOT / "docs" / "vllm-leak.svg").read_text(encoding="utf-8")
    title = "pytest --leakcheck: vLLM 0.24.0 after sleep and shutdown, one H200"
    assert words(shown) == words(script("draw_finding").draw(stored, title))
    # Between two words a picture may have a style's border, where the text has none.
    assert "".join(words(shown)).endswith("".join(stored.split()))


def test_the_picture_asks_for_nothing_outside_itself() -> None:
    shown = (ROOT / "docs" / "vllm-leak.svg").read_text(encoding="utf-8")
    assert re.findall(r"https?://\S+", shown) == ['http://www.w3.org/2000/svg">']


def test_the_table_of_historical_bugs_has_a_row_for_each() -> None:
    here, _, in_core = page("defects.md").partition("## With the core in a process of its own")
    for table, names in (
        (here, list(DEFECTS)),
        (in_core, [name for name, defect in DEFECTS.items() if "cpu" in defect.devices]),
    ):
        assert sorted(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == sorted(names)
