"""What can be set, where, and which goes before which; what is refused; and that off means off."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from lowtide.pytest_plugin.items import read_markers
from lowtide.pytest_plugin.settings import read_settings

pytestmark = pytest.mark.nightly

if TYPE_CHECKING:
    from tests.pytest_plugin.conftest import InnerRun, RunInner

# Leaves a file of so many bytes in /dev/shm: exact to the byte, and needs no torch.
CONFTEST = """
    import gc
    import os
    import sys
    from pathlib import Path

    LEFT = []

    def leave(size):
        path = Path("/dev/shm", f"leakcheck_settings_{os.getpid()}_{len(LEFT)}")
        path.write_bytes(bytes(size))
        LEFT.append(path)

    def leak():
        first, *others = gc.get_threshold()
        gc.set_threshold(first + 1, *others)

    def pytest_configure(config):
        sys.modules["helper"] = sys.modules[__name__]

    def pytest_unconfigure(config):
        for path in LEFT:
            path.unlink()
"""

TOLERANCES = """
    import pytest
    from helper import leave

    def test_nothing():
        pass

    def test_1_byte():
        leave(1)

    def test_1000_bytes():
        leave(1000)

    def test_1001_bytes():
        leave(1001)

    @pytest.mark.leakcheck(tolerance="2KiB")
    def test_marked_2_kib_leaves_2_kib():
        leave(2048)

    @pytest.mark.leakcheck(tolerance=2048)
    def test_marked_2_kib_leaves_a_byte_more():
        leave(2049)

    @pytest.mark.leakcheck(tolerance=0)
    def test_marked_0_leaves_1_byte():
        leave(1)

    @pytest.mark.leakcheck(tolerance="2KiB")
    class TestMarked:
        def test_by_its_class(self):
            leave(2048)

        @pytest.mark.leakcheck(tolerance=0)
        def test_by_its_own_mark(self):
            leave(2048)

    @pytest.mark.no_leakcheck(reason="it is known")
    def test_excused():
        leave(1)

    @pytest.mark.no_leakcheck("it is known")
    def test_excused_by_position():
        leave(1)

    def test_after_an_excused_one():
        pass

    @pytest.fixture(scope="module")
    def leaving():
        leave(1)

    @pytest.mark.no_leakcheck(reason="it is known")
    def test_excused_with_a_fixture(leaving):
        pass
"""

EXCUSED = """
    import pytest
    from helper import leave

    pytestmark = pytest.mark.no_leakcheck(reason="it is known")

    @pytest.fixture(scope="module")
    def of_a_module():
        leave(1)

    def test_excused(of_a_module):
        pass
"""

EXCUSED_CLASS = """
    import pytest
    from helper import leave

    @pytest.fixture(scope="class")
    def of_a_class():
        leave(1)

    @pytest.mark.no_leakcheck(reason="it is known")
    class TestExcused:
        def test_excused(self, of_a_class):
            pass

    class TestJudged:
        def test_judged(self, of_a_class):
            pass
"""

FILES = {
    "conftest.py": CONFTEST,
    "test_tolerance.py": TOLERANCES,
    "test_excused.py": EXCUSED,
    "test_excused_class.py": EXCUSED_CLASS,
}


def failed(run: InnerRun) -> set[str]:
    """The names of the tests that failed."""
    return {test.rpartition("::")[2] for test in run.phases if run.counted(test).startswith("failed")}


OVER_1000 = {"test_1001_bytes", "test_marked_2_kib_leaves_a_byte_more", "test_marked_0_leaves_1_byte"}


@pytest.fixture(scope="module")
def by_default(run_inner: RunInner) -> InnerRun:
    return run_inner(FILES, settle=0.0)


def test_by_default_nothing_may_stay(by_default: InnerRun) -> None:
    assert failed(by_default) >= {"test_1_byte", "test_1000_bytes", "test_1001_bytes"}
    assert by_default.counted("test_tolerance.py::test_nothing") == "passed"


def test_the_marker_goes_before_the_default(by_default: InnerRun) -> None:
    assert by_default.counted("test_tolerance.py::test_marked_2_kib_leaves_2_kib") == "passed"


def test_one_byte_more_than_the_marker_allows_fails(by_default: InnerRun) -> None:
    assert "test_marked_2_kib_leaves_a_byte_more" in failed(by_default)


def test_the_marker_of_a_class_is_for_its_tests(by_default: InnerRun) -> None:
    assert by_default.counted("test_tolerance.py::TestMarked::test_by_its_class") == "passed"


def test_the_nearest_marker_counts(by_default: InnerRun) -> None:
    assert "test_by_its_own_mark" in failed(by_default)


@pytest.mark.parametrize("test", ["test_excused", "test_excused_by_position"])
def test_a_test_with_no_leakcheck_passes_and_the_report_has_its_reason(by_default: InnerRun, test: str) -> None:
    subject = by_default.subject(f"test_tolerance.py::{test}")
    assert by_default.counted(subject.id) == "passed"
    assert (subject.outcome, subject.reason, subject.findings) == ("skipped", "it is known", ())


def test_what_an_excused_test_left_is_not_the_next_ones(by_default: InnerRun) -> None:
    assert by_default.is_clean("test_tolerance.py::test_after_an_excused_one")


def test_a_fixture_is_excused_with_its_class_or_module(by_default: InnerRun) -> None:
    subject = by_default.subject("module fixture 'of_a_module' (test_excused.py)")
    assert (subject.outcome, subject.reason, subject.findings) == ("skipped", "it is known", ())
    assert "module fixture 'of_a_module' (test_excused.py)" not in by_default.blamed
    assert by_default.report is not None
    of_a_class = "class fixture 'of_a_class' (test_excused_class.py)"
    outcomes = [found.outcome for found in by_default.report.subjects if found.id == of_a_class]
    assert outcomes == ["skipped", "leak"]


def test_a_fixture_is_judged_though_a_test_that_uses_it_is_excused(by_default: InnerRun) -> None:
    assert "module fixture 'leaving' (test_tolerance.py)" in by_default.blamed


def test_the_terminal_counts_what_was_not_judged(by_default: InnerRun) -> None:
    assert "7 not judged" in by_default.out


def test_the_header_says_the_defaults(by_default: InnerRun) -> None:
    assert "leakcheck: tolerance none, host memory 64.0 MiB; a leak fails its test" in by_default.out


@pytest.fixture(scope="module")
def by_ini(run_inner: RunInner) -> InnerRun:
    ini = "[pytest]\nleakcheck_tolerance = 1000\n"
    return run_inner({**FILES, "pytest.ini": ini}, settle=0.0)


def test_the_configuration_file_goes_before_the_default(by_ini: InnerRun) -> None:
    assert by_ini.counted("test_tolerance.py::test_1000_bytes") == "passed"


def test_one_byte_more_than_the_configuration_file_allows_fails(by_ini: InnerRun) -> None:
    assert "test_1001_bytes" in failed(by_ini)


def test_the_marker_goes_before_the_configuration_file(by_ini: InnerRun) -> None:
    assert "test_marked_0_leaves_1_byte" in failed(by_ini)
    assert by_ini.counted("test_tolerance.py::test_marked_2_kib_leaves_2_kib") == "passed"


def test_the_header_says_the_tolerance(by_ini: InnerRun) -> None:
    assert "leakcheck: tolerance 1000 B" in by_ini.out


@pytest.fixture(scope="module")
def by_own_table(run_inner: RunInner) -> InnerRun:
    source = "from helper import leave\n\ndef test_at():\n    leave(2048)\n\ndef test_over():\n    leave(2049)\n"
    project = '[tool.pytest.ini_options]\n[tool.lowtide]\ntolerance = "2KiB"\nsettle = 0\n'
    return run_inner({"conftest.py": CONFTEST, "test_it.py": source, "pyproject.toml": project})


def test_the_table_of_its_own_in_pyproject_goes_before_the_default(by_own_table: InnerRun) -> None:
    assert failed(by_own_table) == {"test_over"}


def test_an_unknown_key_in_the_table_of_its_own_is_refused_with_what_is_allowed(run_inner: RunInner) -> None:
    project = "[tool.pytest.ini_options]\n[tool.lowtide]\ntolerence = 1\n"
    refused = run_inner({"test_it.py": "def test_it():\n    pass\n", "pyproject.toml": project})
    assert refused.code == pytest.ExitCode.USAGE_ERROR
    assert (
        "[tool.lowtide] of pyproject.toml: 'tolerence' is unknown: use tolerance, settle" in refused.out + refused.err
    )


@pytest.fixture(scope="module")
def by_command_line(run_inner: RunInner) -> InnerRun:
    ini = "[pytest]\nleakcheck_tolerance = 10\nleakcheck_action = warn\n"
    args = ["--leakcheck-tolerance", "1000", "--leakcheck-action", "fail"]
    return run_inner({**FILES, "pytest.ini": ini}, *args, settle=0.0)


def test_the_command_line_goes_before_the_configuration_file(by_command_line: InnerRun) -> None:
    assert by_command_line.counted("test_tolerance.py::test_1000_bytes") == "passed"
    assert "test_1001_bytes" in failed(by_command_line)


def test_the_command_line_goes_before_the_marker(by_command_line: InnerRun) -> None:
    assert "test_marked_2_kib_leaves_a_byte_more" in failed(by_command_line)
    assert by_command_line.counted("test_tolerance.py::test_marked_0_leaves_1_byte") == "passed"
    assert "test_by_its_class" in failed(by_command_line)


def test_the_action_of_the_command_line_goes_before_that_of_the_configuration_file(by_command_line: InnerRun) -> None:
    assert by_command_line.code == pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module")
def warned(run_inner: RunInner) -> InnerRun:
    source = """
        import pytest
        from helper import leak, leave

        @pytest.fixture(scope="module")
        def leaving():
            leave(1)

        def test_leaking(leaving):
            leak()

        def test_leaking_then_skipping():
            leak()
            pytest.skip("not here")

        def test_checking(leakcheck):
            leak()
            assert leakcheck.check()
    """
    toml = """
        [tool.pytest.ini_options]
        leakcheck_action = "warn"
        leakcheck_device = "cpu"
        leakcheck_settle = "0.0"
        leakcheck_report = "report"
    """
    files = {"conftest.py": CONFTEST, "test_warn.py": source, "pyproject.toml": toml}
    return run_inner(files, "--leakcheck", leakcheck=False)


def test_with_action_warn_leaks_pass(warned: InnerRun) -> None:
    assert warned.totals == {"passed": 2, "skipped": 1}
    assert warned.code == pytest.ExitCode.OK


def test_with_action_warn_leaks_are_reported(warned: InnerRun) -> None:
    assert warned.blamed == [
        "test_warn.py::test_leaking",
        "test_warn.py::test_leaking_then_skipping",
        "test_warn.py::test_checking",
        "module fixture 'leaving' (test_warn.py)",
    ]


def test_with_action_warn_the_terminal_calls_a_leak_a_warning(warned: InnerRun) -> None:
    assert "warning test_warn.py::test_leaking globals/not-restored" in warned.out
    assert "LEAK" not in warned.out


def test_with_action_warn_the_header_says_so(warned: InnerRun) -> None:
    assert "a leak is reported and fails nothing" in warned.out


def test_with_action_warn_a_check_in_the_middle_returns_what_it_found(warned: InnerRun) -> None:
    assert warned.counted("test_warn.py::test_checking") == "passed"


def test_the_header_says_that_cards_are_not_judged_with_device_cpu(warned: InnerRun) -> None:
    assert "leakcheck: not judged here: cards (device cpu)" in warned.out


def test_settings_are_read_from_pyproject(warned: InnerRun) -> None:
    assert warned.report is not None


def thread_that_ends_after(seconds: float) -> dict[str, str]:
    test = f"""
        import threading
        import time

        def test_a_thread_that_ends():
            threading.Thread(target=time.sleep, args=({seconds},), daemon=True).start()
    """
    return {"test_threads.py": test}


def test_a_thread_that_ends_within_the_time_to_settle_is_no_leak(run_inner: RunInner) -> None:
    run = run_inner(thread_that_ends_after(0.3), settle=60.0)
    assert run.is_clean("test_threads.py::test_a_thread_that_ends")


def test_a_thread_that_ends_after_the_time_to_settle_is_a_leak(run_inner: RunInner) -> None:
    # Long after it: a machine may be so slow that half a second passes before the first reading.
    run = run_inner(thread_that_ends_after(600.0), settle=0.0)
    assert run.leaks("test_threads.py::test_a_thread_that_ends") == [("threads", "call")]


def refused(run: InnerRun, *parts: str) -> None:
    """The run ended at its start, with one line that has all these parts."""
    assert run.code == pytest.ExitCode.USAGE_ERROR, run.out + run.err
    assert "Traceback" not in run.out + run.err
    (line,) = [line for line in run.err.splitlines() if line.startswith("ERROR")]
    for part in parts:
        assert part in line
    assert run.phases == {}


CLEAN = {"test_clean.py": "def test_clean():\n    pass\n"}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--leakcheck-tolerance", "much", "use bytes such as 4096, or a unit such as 512KiB"),
        ("--leakcheck-tolerance", "-1", "use bytes such as 4096"),
        ("--leakcheck-settle", "soon", "use 0 or more"),
        ("--leakcheck-settle", "nan", "use 0 or more"),
        ("--leakcheck-action", "explode", "use fail or warn"),
        ("--leakcheck-device", "tpu", "use auto or cpu or cuda"),
        ("--leakcheck-suppressions", "nowhere.toml", "nowhere.toml"),
        ("--leakcheck-report", "test_clean.py", "report folder"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_allowed(
    run_inner: RunInner, option: str, value: str, allowed: str
) -> None:
    run = run_inner(CLEAN, "--leakcheck", f"{option}={value}", leakcheck=False)
    refused(run, option, value, allowed)


def test_a_bad_value_in_the_configuration_file_is_refused_and_names_the_file(run_inner: RunInner) -> None:
    run = run_inner({**CLEAN, "pytest.ini": "[pytest]\nleakcheck_action = explode\n"})
    refused(run, "leakcheck_action in pytest.ini", "'explode'", "use fail or warn")


def test_an_empty_value_on_the_command_line_is_refused(run_inner: RunInner) -> None:
    refused(run_inner(CLEAN, "--leakcheck-tolerance="), "--leakcheck-tolerance", "use bytes such as 4096")


def test_cuda_without_a_card_is_refused(run_inner: RunInner) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    refused(run_inner(CLEAN, "--leakcheck-device=cuda"), "--leakcheck-device cuda", "torch sees no card here")


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("no_leakcheck", "test_marked.py::test_marked: @pytest.mark.no_leakcheck needs one argument, reason="),
        ("leakcheck(tolerance='1MiB', settle=1)", "test_marked.py::test_marked: @pytest.mark.leakcheck takes argu"),
        ("leakcheck(tolerance='much')", "test_marked.py::test_marked: @pytest.mark.leakcheck(tolerance=…): 'much' is"),
        ("leakcheck(peak='2 bananas')", "test_marked.py::test_marked: @pytest.mark.leakcheck(peak=…): '2 bananas' is"),
    ],
    ids=["no-reason", "unknown-argument", "bad-size", "bad-peak"],
)
def test_a_marker_that_makes_no_sense_is_refused_before_anything_runs(
    run_inner: RunInner, mark: str, message: str
) -> None:
    source = f"import pytest\n\n@pytest.mark.{mark}\ndef test_marked():\n    pass\n"
    refused(run_inner({**CLEAN, "test_marked.py": source}), message)


def item_with(mark: pytest.MarkDecorator) -> Any:
    """As much of a test with one marker as is looked at."""
    return SimpleNamespace(
        nodeid="test_it.py::test_it",
        get_closest_marker=lambda name: mark.mark if mark.name == name else None,
        iter_markers=lambda name: [mark.mark] if mark.name == name else [],
    )


@pytest.mark.parametrize(
    "mark",
    [
        pytest.mark.no_leakcheck(),
        pytest.mark.no_leakcheck(reason=" "),
        pytest.mark.no_leakcheck(reason=None),
        pytest.mark.no_leakcheck(why="known"),
        pytest.mark.no_leakcheck("known", reason="known"),
        pytest.mark.no_leakcheck("known", "to all"),
        pytest.mark.leakcheck(),
        pytest.mark.leakcheck("1MiB"),
        pytest.mark.leakcheck(settle=1),
        pytest.mark.leakcheck(tolerance=-1),
        pytest.mark.leakcheck(tolerance=1.5),
        pytest.mark.leakcheck(tolerance=True),
        pytest.mark.leakcheck(tolerance=None),
        pytest.mark.leakcheck(peak=-1),
        pytest.mark.leakcheck(peak="-1MiB"),
    ],
    ids=lambda mark: f"{mark.name}-{mark.args}-{mark.kwargs}",
)
def test_markers_with_other_arguments_are_refused(mark: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match=r"test_it\.py::test_it: @pytest\.mark\."):
        read_markers(item_with(mark))


def test_of_several_markers_the_nearest_counts_for_each_argument() -> None:
    marks = [pytest.mark.leakcheck(peak="2KiB"), pytest.mark.leakcheck(peak="1KiB", tolerance=7)]
    item: Any = SimpleNamespace(
        nodeid="test_it.py::test_it",
        get_closest_marker=lambda name: None,
        iter_markers=lambda name: [mark.mark for mark in marks],
    )
    found = read_markers(item)
    assert (found.peak, found.tolerance, found.cycles, found.excused) == (2048, 7, None, "")


def test_the_markers_are_registered(run_inner: RunInner) -> None:
    run = run_inner({}, "--markers", leakcheck=False)
    assert "@pytest.mark.leakcheck(tolerance, cycles, peak):" in run.out
    assert "@pytest.mark.no_leakcheck(reason):" in run.out


def test_help_names_every_option(run_inner: RunInner) -> None:
    run = run_inner({}, "--help", leakcheck=False)
    for name in ("", "-tolerance", "-settle", "-action", "-report", "-suppressions", "-device"):
        assert f"--leakcheck{name}" in run.out
        assert not name or f"leakcheck{name.replace('-', '_')} (string):" in run.out


SUPPRESSED = {
    "conftest.py": CONFTEST,
    "lowtide.toml": """
        [[suppressions]]
        path = "helper.leak*"
        reason = "never there"
        owner = "core"

        [[suppressions]]
        path = "*"
        resource = "globals"
        cause = "not-restored"
        reason = "gc is tuned at start"
    """,
    "sub/test_suppressed.py": """
        from helper import leak

        def test_known():
            leak()
    """,
}


@pytest.fixture(scope="module")
def suppressed(run_inner: RunInner) -> InnerRun:
    return run_inner(SUPPRESSED)


def test_a_known_leak_passes_and_is_reported_with_its_reason(suppressed: InnerRun) -> None:
    assert suppressed.counted("sub/test_suppressed.py::test_known") == "passed"
    (finding,) = suppressed.subject("sub/test_suppressed.py::test_known").findings
    assert str(finding.suppressed_by).endswith("gc is tuned at start")


def test_a_suppression_that_nothing_matches_fails_the_run(suppressed: InnerRun) -> None:
    assert suppressed.code == pytest.ExitCode.TESTS_FAILED
    assert "lowtide.toml:2: unused (owner: core)" in suppressed.out


def test_settings_with_a_path_are_relative_to_the_configuration_file(run_inner: RunInner) -> None:
    ini = "[pytest]\nleakcheck_suppressions = known.toml\nleakcheck_report = told\n"
    known = SUPPRESSED["lowtide.toml"].partition("[[suppressions]]")[2].partition("[[suppressions]]")[2]
    files = {
        "conftest.py": CONFTEST,
        "pytest.ini": ini,
        "known.toml": f"[[suppressions]]{known}",
        "sub/test_suppressed.py": SUPPRESSED["sub/test_suppressed.py"],
    }
    run = run_inner(files, "--leakcheck", "--leakcheck-settle=0", leakcheck=False, where="sub")
    assert run.code == pytest.ExitCode.OK, run.out + run.err
    assert (run.folder / "told" / "leakcheck.json").is_file()


HEAVY = ("torch", "numpy", "psutil", "msgspec", "rich", "hypothesis", "jinja2", "lowtide.leakcheck", "lowtide.reports")


def test_the_plugin_alone_loads_nothing_heavy() -> None:
    script = f"import sys, lowtide.pytest_plugin.plugin; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture(scope="module")
def off(run_inner: RunInner) -> InnerRun:
    source = f"""
        import sys

        def test_nothing_heavy_was_loaded():
            assert [name for name in {HEAVY} if name in sys.modules] == []

        def test_leaking():
            from helper import leak
            leak()

        class Engine:
            def generate(self):
                return "text"

        def test_the_fixture(leakcheck):
            with leakcheck.stage("create"):
                engine = leakcheck.engine(Engine(), infer="generate")
            assert engine.generate() == "text"
            assert leakcheck.check() == ()

        def test_a_stage_lets_errors_through(leakcheck):
            try:
                with leakcheck.stage("create"):
                    raise ValueError("no")
            except ValueError:
                return
            assert 0

        def test_the_fixture_loads_nothing_heavy_either(leakcheck):
            test_nothing_heavy_was_loaded()
    """
    files = {"conftest.py": CONFTEST, "test_off.py": source}
    return run_inner(files, "--leakcheck-report=report", "--leakcheck-action=warn", leakcheck=False)


@pytest.mark.parametrize("test", ["test_nothing_heavy_was_loaded", "test_the_fixture_loads_nothing_heavy_either"])
def test_without_leakcheck_nothing_heavy_is_loaded(off: InnerRun, test: str) -> None:
    assert off.counted(f"test_off.py::{test}") == "passed", off.out


def test_without_leakcheck_nothing_is_judged_reported_or_printed(off: InnerRun) -> None:
    assert off.counted("test_off.py::test_leaking") == "passed"
    assert off.report is None
    assert "leakcheck" not in off.out


@pytest.mark.parametrize("test", ["test_the_fixture", "test_a_stage_lets_errors_through"])
def test_without_leakcheck_the_fixture_works_and_does_nothing(off: InnerRun, test: str) -> None:
    assert off.counted(f"test_off.py::{test}") == "passed"


FIXTURE = """
    import gc
    import threading
    import pytest
    import torch
    from helper import leak

    KEPT = []

    class Engine:
        version = 1

        def __init__(self):
            self.parts = []

        def load(self):
            self.parts.append(torch.ones(1000))

        def generate(self, prompt, *, tokens=1):
            KEPT.append(torch.ones(2000))
            return prompt * tokens

        def failing(self):
            raise RuntimeError("no")

        def shut(self):
            self.parts.clear()

    def test_stages(leakcheck):
        with leakcheck.stage("load_weights"):
            KEPT.append(torch.ones(3000))
        with leakcheck.stage("capture"):
            leak()

    def test_nested_stages(leakcheck):
        with leakcheck.stage("outer"):
            with leakcheck.stage("inner"):
                leak()

    def test_after_a_stage(leakcheck):
        with leakcheck.stage("create"):
            pass
        leak()

    def test_engine(leakcheck):
        engine = leakcheck.engine(Engine(), create="load", infer="generate", shutdown="shut")
        engine.load()
        assert engine.generate("a", tokens=3) == "aaa"
        engine.shut()

    def test_engine_keeps_its_attributes(leakcheck):
        original = Engine()
        engine = leakcheck.engine(original, infer="generate")
        assert engine.version == 1
        engine.version = 2
        assert original.version == 2

    def test_engine_lets_errors_through(leakcheck):
        with pytest.raises(RuntimeError, match="no"):
            leakcheck.engine(Engine(), infer="failing").failing()

    def test_engine_wrong_method(leakcheck):
        leakcheck.engine(Engine(), wake="wake_up")

    def test_engine_wrong_stage(leakcheck):
        leakcheck.engine(Engine(), dream="generate")

    def test_check_green(leakcheck):
        tensor = torch.ones(1000)
        del tensor
        assert leakcheck.check() == ()

    def test_check_red(leakcheck):
        tensor = torch.ones(1000)
        leakcheck.check()

    def test_check_red_then_put_back(leakcheck):
        before = gc.get_threshold()
        leak()
        with pytest.raises(pytest.fail.Exception, match="gc.get_threshold"):
            leakcheck.check()
        gc.set_threshold(*before)
        assert leakcheck.check() == ()

    KEPT = []

    def test_check_red_twice_and_at_the_end(leakcheck):
        KEPT.append(torch.ones(1000))
        KEPT.append(open("/dev/zero"))
        for _ in range(2):
            with pytest.raises(pytest.fail.Exception):
                leakcheck.check()

    def test_check_red_and_another_leak_at_its_address(leakcheck):
        tensor = torch.ones(1000)
        with pytest.raises(pytest.fail.Exception):
            leakcheck.check()
        address = tensor.data_ptr()
        del tensor
        KEPT.append([torch.ones(1000) for _ in range(50)])
        assert any(kept.data_ptr() == address for kept in KEPT[-1])

    def test_check_red_for_a_freeze(leakcheck):
        gc.freeze()
        with pytest.raises(pytest.fail.Exception):
            leakcheck.check()

    @pytest.fixture
    def engine():
        engine = Engine()
        engine.load()
        yield engine

    def test_check_with_a_fixture(engine, leakcheck):
        assert leakcheck.check() == ()

    def test_check_with_a_fixture_after_it(leakcheck, engine):
        assert leakcheck.check() == ()
        assert engine

    @pytest.fixture
    def leaving():
        leak()

    def test_that_a_fixture_leaks_for(leakcheck, leaving):
        leakcheck.check()
"""

ENGINES = """
    import torch
    from lowtide.engine.config import EngineConfig
    from lowtide.engine.llm_engine import LLMEngine
    from lowtide.engine.request import SamplingParams
    from helper import leak

    KEPT = []

    class TestReferenceEngine:
        def make(self, leakcheck):
            engine = LLMEngine(EngineConfig(model="tiny", device="cpu", max_num_seqs=2))
            return leakcheck.engine(
                engine, create="create", infer="generate", sleep="sleep", wake="wake", shutdown="shutdown"
            )

        def test_whole_life(self, leakcheck):
            engine = self.make(leakcheck)
            engine.create()
            (before,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
            engine.sleep(level=1)
            engine.wake()
            (after,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
            assert before.token_ids == after.token_ids
            engine.shutdown()
            assert leakcheck.check() == ()

        def test_never_shut_down(self, leakcheck):
            engine = self.make(leakcheck)
            engine.create()
            KEPT.append(engine)

    class TestTransformers:
        def make(self, leakcheck):
            import transformers

            class Model(transformers.LlamaForCausalLM):
                def prefill(self, tokens):
                    leak()
                    return self(tokens)

            torch.manual_seed(0)
            config = transformers.LlamaConfig(
                vocab_size=100,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=0,
            )
            return leakcheck.engine(Model(config).eval(), create="prefill", infer="generate")

        def test_generate(self, leakcheck):
            model = self.make(leakcheck)
            prompt = torch.tensor([[1, 2, 3]])
            tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
            assert tokens.shape == (1, 7)

        def test_leaking_method(self, leakcheck):
            model = self.make(leakcheck)
            assert model.prefill(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 100)
"""


@pytest.fixture(scope="module")
def used(run_inner: RunInner) -> InnerRun:
    # The larger heap, with transformers in it, comes last.
    return run_inner({"conftest.py": CONFTEST, "test_fixture.py": FIXTURE, "test_later_engines.py": ENGINES})


def test_a_leak_is_said_to_be_there_since_its_stage(used: InnerRun) -> None:
    assert used.leaks("test_fixture.py::test_stages") == [("globals", "capture"), ("tensors", "load_weights")]


def test_nested_stages_are_named_with_their_outer_one(used: InnerRun) -> None:
    assert used.leaks("test_fixture.py::test_nested_stages") == [("globals", "outer/inner")]


def test_what_appears_after_a_stage_appeared_in_the_call(used: InnerRun) -> None:
    assert used.leaks("test_fixture.py::test_after_a_stage") == [("globals", "call")]


def test_a_wrapped_engines_methods_are_stages(used: InnerRun) -> None:
    assert used.leaks("test_fixture.py::test_engine") == [("tensors", "infer")]


@pytest.mark.parametrize("test", ["test_engine_keeps_its_attributes", "test_engine_lets_errors_through"])
def test_a_wrapped_engine_is_otherwise_the_engine(used: InnerRun, test: str) -> None:
    assert used.counted(f"test_fixture.py::{test}") in ("passed", "failed")
    assert "AssertionError" not in used.message(f"test_fixture.py::{test}")


def test_a_wrong_method_is_refused_on_one_line_with_those_that_there_are(used: InnerRun) -> None:
    assert used.message("test_fixture.py::test_engine_wrong_method").endswith(
        "leakcheck.engine(wake='wake_up'): Engine has no method 'wake_up'; it has failing, generate, load, shut"
    )


def test_a_wrong_stage_is_refused(used: InnerRun) -> None:
    assert "dream" in used.message("test_fixture.py::test_engine_wrong_stage")


@pytest.mark.parametrize(
    "test", ["test_check_green", "test_check_with_a_fixture", "test_check_with_a_fixture_after_it"]
)
def test_a_check_in_the_middle_passes_where_everything_is_back(used: InnerRun, test: str) -> None:
    assert used.counted(f"test_fixture.py::{test}") == "passed"
    assert used.is_clean(f"test_fixture.py::{test}")


def test_a_check_in_the_middle_fails_where_something_is_not_back(used: InnerRun) -> None:
    assert used.counted("test_fixture.py::test_check_red") == "failed"
    assert "tensors/frame: 3.9 KiB in 1 tensor on cpu, since call" in used.message("test_fixture.py::test_check_red")


@pytest.mark.parametrize(
    ("test", "leaks"), [("test_check_red", ("tensors", "call")), ("test_check_red_then_put_back", ("globals", "call"))]
)
def test_what_a_failed_check_found_is_a_leak_though_it_is_back_at_the_end(
    used: InnerRun, test: str, leaks: tuple[str, str]
) -> None:
    subject = used.subject(f"test_fixture.py::{test}")
    assert (subject.outcome, used.leaks(subject.id)) == ("leak", [leaks])
    assert used.counted(subject.id) == "failed"
    assert "leakcheck.check() found it" in subject.findings[0].message


@pytest.mark.parametrize(
    ("test", "resources"),
    [
        ("test_check_red_twice_and_at_the_end", ["file-descriptors", "tensors"]),
        ("test_check_red_and_another_leak_at_its_address", ["tensors", "tensors"]),
        ("test_check_red_for_a_freeze", ["gc-frozen"]),
    ],
)
def test_the_same_leak_of_a_check_and_of_the_end_is_reported_once(
    used: InnerRun, test: str, resources: list[str]
) -> None:
    assert sorted(resource for resource, _ in used.leaks(f"test_fixture.py::{test}")) == resources


def test_what_a_function_fixture_leaves_is_still_judged_where_there_is_a_check(used: InnerRun) -> None:
    assert used.counted("test_fixture.py::test_that_a_fixture_leaks_for") == "failed"
    assert used.leaks("test_fixture.py::test_that_a_fixture_leaks_for") == [("globals", "setup")]


def test_the_reference_engine_comes_back_from_its_whole_life(used: InnerRun) -> None:
    assert used.counted("test_later_engines.py::TestReferenceEngine::test_whole_life") == "passed", used.out
    assert used.is_clean("test_later_engines.py::TestReferenceEngine::test_whole_life")


def test_a_reference_engine_that_is_never_shut_down_leaks_since_its_create(used: InnerRun) -> None:
    leaks = used.leaks("test_later_engines.py::TestReferenceEngine::test_never_shut_down")
    assert leaks
    assert all(stage.startswith("create") for _, stage in leaks)


def test_a_transformers_model_that_generates_comes_back(used: InnerRun) -> None:
    assert used.counted("test_later_engines.py::TestTransformers::test_generate") == "passed", used.out
    assert used.is_clean("test_later_engines.py::TestTransformers::test_generate")


def test_what_a_wrapped_transformers_model_leaks_is_a_leak_of_its_stage(used: InnerRun) -> None:
    assert used.leaks("test_later_engines.py::TestTransformers::test_leaking_method") == [("globals", "create")]


def test_an_interpreter_whose_collector_tells_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr("lowtide.pytest_plugin.settings.young_generations_tell", lambda: False)
    with pytest.raises(pytest.UsageError, match=r"needs CPython 3\.10 to 3\.13"):
        read_settings(pytestconfig)
