"""The site: pages written from the code are those of today, and a page loads nothing from another place."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

import lowtide
from lowtide.engine.defects import DEFECTS
from lowtide.leakcheck.cli.commands import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """The text below each heading of the second level."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", ["cli.md", "judging.md", "pytest-options.md"])
def test_a_reference_page_is_that_of_the_code(name: str) -> None:
    writer = script("write_reference")
    text = page(name)
    assert writer.with_reference(text, writer.PAGES[name]()) == text, (
        f"docs/{name} is old: run python docs/write_reference.py"
    )


def test_readme_and_page_count_the_historical_bugs_and_name_each() -> None:
    readme, bugs = (DOCS.parent / "README.md").read_text(encoding="utf-8"), page("defects.md")
    assert f" {len(DEFECTS)} historical bugs" in readme
    assert f"\n{len(DEFECTS)} lifecycle bugs" in bugs
    assert [name for name in DEFECTS if f"| `{name}` |" not in bugs] == []


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="put them where the reference belongs"):
        script("write_reference").with_reference("# A page\n", "")


def mend(width: Annotated[int, typer.Option(help="How wide.")] = 3) -> None:
    """Mend it."""


def test_a_new_command_and_a_new_option_show_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, other = script("write_reference"), typer.Typer()
    other.command()(mend)
    monkeypatch.setattr(writer, "app", other)
    assert "## `lowtide mend`" in writer.command_reference()
    assert "| `--width INT` | `3` | How wide. |" in writer.command_reference()


def test_every_command_and_option_of_the_help_is_on_the_page() -> None:
    reported = sections(page("cli.md"))
    commands = [
        info.name or getattr(info.callback, "__name__", "").replace("_", "-") for info in app.registered_commands
    ]
    assert list(reported) == [f"`lowtide {name}`" for name in commands]
    for name in commands:
        help_text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
        options = set(OPTION.findall(help_text))
        assert "--help" in options
        assert options - {"--help"} <= set(OPTION.findall(reported[f"`lowtide {name}`"])), name


def test_help_prints_square_brackets_and_whole_sentences() -> None:
    """Rich takes square brackets for markup, and typer may keep the line ends of a docstring."""
    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).stdout
    assert "A random model of this size [default: tiny]." in text
    assert "2 bad input or could not be measured, 130 interrupted." in text


def test_every_option_setting_and_marker_that_pytest_lists_is_on_the_page() -> None:
    command = [sys.executable, "-m", "pytest"]
    done = [
        subprocess.run([*command, flag], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for flag in ("--help", "--markers")
    ]
    text = page("pytest-options.md")
    options = {name for name in OPTION.findall(done[0]) if name.startswith("--leakcheck")}
    settings = set(re.findall(r"^ *(leakcheck_\w+)", done[0], re.MULTILINE))
    markers = set(re.findall(r"pytest\.mark\.(\w*leakcheck\([^)]*\))", done[1]))
    assert (len(options), len(markers)) == (len(settings) + 1, 2)
    assert options <= set(OPTION.findall(text))
    assert [name for name in (*settings, *markers) if f"`{name}`" not in text] == []


def test_the_python_interface_has_every_public_name() -> None:
    from lowtide import engine, targets

    reported = set(re.findall(r"^(?:::: |      heading: )([\w.]+)$", page("api.md"), re.MULTILINE))
    names = {f"lowtide.{name}" for name in lowtide.__all__ if name != "__version__"}
    # A type's alias and a table of settings have no documentation of their own.
    names |= {f"lowtide.targets.{name}" for name in targets.__all__ if name != "TargetFactory"}
    errors = {name for name in engine.__all__ if name.endswith("Error")}
    names |= {f"lowtide.engine.{name}" for name in set(engine.__all__) - errors - {"PRESETS"}}
    assert names <= reported
    assert "lowtide.engine.errors" in reported


def test_each_heading_of_the_python_interface_imports_what_stands_below_it() -> None:
    blocks = re.findall(r"^::: ([\w.]+)((?:\n    .+)*)", page("api.md"), re.MULTILINE)
    assert len(blocks) > 20
    assert sum("heading: lowtide" in options for _, options in blocks) > 10
    for path, options in blocks:
        heading = re.search(r"^ +heading: (\S+)", options, re.MULTILINE)
        assert heading is None or found(heading[1]) is found(path), path
        assert found(path).__doc__


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if importlib.util.find_spec(module) is not None and hasattr(importlib.import_module(module), name):
        return getattr(importlib.import_module(module), name)
    return importlib.import_module(path)


@pytest.mark.nightly
def test_the_site_builds_without_a_warning_and_loads_nothing_from_another_place(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(script("check_site").outside(site)) == []
    for source in DOCS.glob("*.md"):
        assert (site / f"{source.stem}.html").exists()
    assert "serve_one_request" not in (site / "api.html").read_text(encoding="utf-8")
    assert "raise_for_leaks" in (site / "api.html").read_text(encoding="utf-8")
    assert [file.name for file in site.rglob("*") if file.suffix == ".py" or file.name == "vllm-sleep.txt"] == []


@pytest.mark.parametrize(
    ("html", "address"),
    [
        ('<script src="https://cdn.example/a.js"></script>', "https://cdn.example/a.js"),
        ('<link rel="stylesheet" href="//fonts.example/css">', "//fonts.example/css"),
        ('<link rel="preconnect" href="https://fonts.example" crossorigin>', "https://fonts.example"),
        ('<img src="http://badges.example/b.svg">', "http://badges.example/b.svg"),
        ("<style>@import 'https://a.example/b.css';</style>", "https://a.example/b.css"),
        ('<p style="background: url(https://a.example/b.png)">', "https://a.example/b.png"),
        ('<pre class="mermaid">graph</pre>', "mermaid"),
    ],
)
def test_what_a_page_would_load_is_found(html: str, address: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f"<html><body>{html}</body></html>")
    assert list(script("check_site").outside(tmp_path)) == [f"a.html: {address}"]


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://elsewhere.example">a link</a>',
        '<link rel="canonical" href="https://here.example/a.html">',
        '<script src="assets/a.js"></script>',
        '<svg xmlns="http://www.w3.org/2000/svg"></svg>',
    ],
)
def test_what_a_reader_follows_and_what_lies_in_the_site_is_none_of_it(html: str) -> None:
    assert script("check_site").loads(html) == []


def test_a_style_sheet_and_a_picture_are_read_too(tmp_path: Path) -> None:
    checker = script("check_site")
    with pytest.raises(ValueError, match="make docs"):
        list(checker.outside(tmp_path))
    (tmp_path / "a.html").write_text("<p>")
    (tmp_path / "a.css").write_text("@font-face { src: url('https://fonts.example/a.woff2') }")
    (tmp_path / "a.svg").write_text('<svg><style>p { background: url("//a.example/b") }</style></svg>')
    assert list(checker.outside(tmp_path)) == ["a.css: https://fonts.example/a.woff2", "a.svg: //a.example/b"]
