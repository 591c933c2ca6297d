"""What pytest loads: options, markers and the fixture; everything else is imported when `--leakcheck` is given.

Off means off: this module imports nothing but pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from lowtide.pytest_plugin.fixture import Leakcheck

_SETTINGS = (
    ("tolerance", "SIZE", "bytes that a test may leave of each resource, such as 1MiB (default: 0)"),
    ("settle", "SECONDS", "how long to wait, while nothing moves, for what comes back by itself (default: 0.5)"),
    ("action", "fail|warn", "what a leak does to its test (default: fail)"),
    ("report", "DIR", "folder for the report (JSON, HTML, JUnit, Markdown)"),
    (
        "suppressions",
        "FILE",
        "known leaks that do not fail (default: lowtide.toml or pyproject.toml, if they have any)",
    ),
    ("device", "auto|cpu|cuda", "judge cards too, or the host only; cuda insists on a card (default: auto)"),
    (
        "stacks",
        "auto|all|off",
        "record where memory is allocated: on cards, which is cheap; on the host too; nowhere (default: auto)",
    ),
    (
        "growth",
        "SIZE",
        "report at once what grows test after test under a class, module, package or session fixture by more than this "
        "(default: when the fixture ends)",
    ),
    (
        "cycles",
        "SIZE",
        "report what comes back only when Python's collector runs as a leak, where it is this much and more (default: "
        "16 MiB and more are noted)",
    ),
    (
        "processes",
        "auto|off",
        "judge what tests leave in the program's other processes too, by a thread in each of them (default: auto)",
    ),
    (
        "budget",
        "SECONDS",
        "how long to look for what the holders of one test's leaks retain; four times as long for trying all remedies "
        "(default: 30)",
    ),
    (
        "keep-heap",
        "N",
        "keep the walked heap of the first N tests that leak in the report's folder, for `lowtide heap` (default: 0)",
    ),
    (
        "native",
        "",
        "while host memory seems to grow with each test, record which calls allocate: with native code by memray "
        "(extra `native`), else by tracemalloc; and which library asks a card's driver for memory (extra `cupti`)",
    ),
    ("remedies", "on|off", "when the last test is over, try what gives each leak back (default: on)"),
    (
        "warmup",
        "on|off",
        "use a card once before a test does, so that what its first use takes hides no leak (default: on)",
    ),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, and the same as settings in the configuration file."""
    group = parser.getgroup("leakcheck", "memory leaks (lowtide)")
    group.addoption("--leakcheck", action="store_true", default=None, help="judge what every test leaves behind")
    for name, value, text in _SETTINGS:
        how = {"metavar": value} if value else {"action": "store_const", "const": "on"}
        group.addoption(f"--leakcheck-{name}", default=None, help=text, **how)
        key = f"leakcheck_{name.replace('-', '_')}"
        parser.addini(key, f"{text}; the option --leakcheck-{name} goes before it", default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and the checker if it is asked for."""
    config.addinivalue_line(
        "markers",
        "leakcheck(tolerance, cycles, peak): how much this test may leave, such as '1MiB'; peak: by how much memory "
        "may rise while it runs",
    )
    config.addinivalue_line("markers", "no_leakcheck(reason): what this test leaves is not judged; say why")
    if config.getoption("leakcheck"):
        from lowtide.pytest_plugin.settings import read_settings

        settings = read_settings(config)
        # Only now: what makes no sense is refused before half a second goes into loading what judges.
        from lowtide.pytest_plugin.checker import Checker

        config.pluginmanager.register(Checker(config, settings), "lowtide-checker")


@pytest.fixture
def leakcheck(request: pytest.FixtureRequest) -> Leakcheck:
    """Stages inside a test, a check in its middle, and the stages of a foreign engine; does nothing when off."""
    from lowtide.pytest_plugin.fixture import Leakcheck

    return Leakcheck(request.config.pluginmanager.get_plugin("lowtide-checker"))
