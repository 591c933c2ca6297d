"""`lowtide ps`: who holds which card, what the dead have left, and CI's precheck, with NVML's double."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import Result
from typer.testing import CliRunner

from lowtide.leakcheck.cli.commands import app
from lowtide.probes.device.driver import NoDriver
from lowtide.probes.device.driver.nvml import NvmlDriver
from lowtide.probes.host.process_files import MARK
from lowtide.probes.processes import outside_view, shared_memory_files
from lowtide.reports.processes import listing
from tests.probes import left_processes
from tests.probes.fake_drivers import FakeNvml
from tests.probes.left_processes import holder
from tests.waiting import HANG_S

SHIPPED = Path(__file__).parents[3] / "reports" / "processes" / "lowtide-ps-1.schema.json"
MIB = 1 << 20

Ps = Callable[..., Result]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # The double's processes have no card open.
    monkeypatch.setattr(outside_view, "_CARD_DEVICES", ())
    return FakeNvml()


@pytest.fixture
def shm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stands in for /dev/shm, so that tests beside this one do not see its files, nor this one theirs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lowtide-tests-") as folder:
        read = shared_memory_files.read_shared_memory
        monkeypatch.setattr(outside_view, "read_shared_memory", lambda: read(Path(folder)))
        yield Path(folder)


@pytest.fixture
def ps(nvml: FakeNvml, shm: Path, monkeypatch: pytest.MonkeyPatch) -> Ps:
    monkeypatch.setattr("lowtide.probes.device.driver.find_driver", lambda: NvmlDriver(nvml))
    return lambda *args: CliRunner().invoke(app, ["ps", *args])


def document(ps: Ps, *args: str) -> Any:
    return json.loads(ps("--json", *args).stdout)


def words(text: str, start: str) -> list[str]:
    """The line that begins so, by its columns."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(start)]
    return [word for word in line.split("  ") if word]


def test_an_orphan_on_a_card_is_one_and_its_twin_has_its_parent(ps: Ps, nvml: FakeNvml) -> None:
    with (
        holder("lowtide-ps-orphan", 100 * MIB, left=True) as orphan,
        holder("lowtide-ps-twin", MIB, left=False) as twin,
    ):
        nvml.compute[0] = [(orphan, 60 * MIB), (twin, 10 * MIB)]
        done = ps()
        found = {each["pid"]: each for each in document(ps)["processes"]}
    assert done.exit_code == 0
    assert words(done.stdout, str(orphan))[3:5] == ["60.0 MiB", "orphan"]
    assert words(done.stdout, str(twin))[3:5] == ["10.0 MiB", str(os.getpid())]
    assert "cuda:0: 100.0 MiB of 1000.0 MiB in use" in done.stdout
    assert "30.0 MiB held by no process that the driver lists, as the driver needs for contexts\n" in done.stdout
    assert "200.0 MiB held by no process that the driver lists: another container's?\n" in done.stdout
    assert found[orphan]["is_orphan"]
    assert not found[twin]["is_orphan"]
    assert found[orphan]["shared_memory"] == {"lowtide-ps-orphan": MIB}
    assert found[orphan]["private"] > 100 * MIB


def listed(ps: Ps, pid: int) -> Any:
    """One process; others of this machine may be orphans too."""
    return next(each for each in document(ps)["processes"] if each["pid"] == pid)


def test_a_process_that_is_not_seen_here_is_listed_with_its_bytes(ps: Ps, nvml: FakeNvml) -> None:
    gone = 2**22 + 1
    nvml.compute[1] = [(gone, 120 * MIB)]
    done = ps()
    columns = [word.strip() for word in words(done.stdout, str(gone))]
    assert columns == [str(gone), "not seen here (another container, or ended)", "120.0 MiB"]
    process = listed(ps, gone)
    assert (process["is_here"], process["cards"]) == (False, [{"device": "cuda:1", "bytes": 120 * MIB}])


def test_a_number_of_another_container_s_is_not_that_of_a_process_here(
    ps: Ps, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # There is a card's device, and the process of this number has not opened it.
    monkeypatch.setattr(outside_view, "_CARD_DEVICES", (tmp_path,))
    monkeypatch.setattr(outside_view, "_CARD_FILES", ("/no such device",))
    nvml.compute[0] = [(os.getpid(), 60 * MIB)]
    process = listed(ps, os.getpid())
    assert (process["is_here"], process["name"]) == (False, "")
    monkeypatch.setattr(outside_view, "_CARD_FILES", ("/",))
    assert listed(ps, os.getpid())["is_here"]


@pytest.mark.parametrize(("limit", "code"), [("1GiB", 0), ("200MiB", 0), ("199MiB", 1), ("0", 1)])
def test_a_card_that_holds_more_in_total_fails_the_precheck(ps: Ps, limit: str, code: int) -> None:
    done = ps("--fail-above", limit)
    assert done.exit_code == code, done.output
    assert ("ABOVE" in done.stdout) == bool(code)
    if limit == "199MiB":
        assert "ABOVE 199.0 MiB: cuda:1 in use: 200.0 MiB" in done.stdout


def test_an_orphan_that_holds_more_on_host_and_cards_fails_the_precheck(ps: Ps, nvml: FakeNvml) -> None:
    with holder("lowtide-ps-orphan", 300 * MIB, left=True) as orphan:
        nvml.compute[0] = [(orphan, 60 * MIB)]
        assert ps("--fail-above", "1GiB").exit_code == 0
        done = document(ps, "--fail-above", "250MiB")
    ((what, size),) = [(each["what"], each["bytes"]) for each in done["exceeded"]]
    assert what.startswith(f"orphan {orphan} (")
    assert 360 * MIB < size < 420 * MIB


def test_an_orphan_of_an_engine_is_listed_without_a_card(ps: Ps) -> None:
    code = left_processes.TITLE + "take_title(b'VLLM::EngineCore')\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_processes, "HOLD", code + left_processes.HOLD)
        with holder("lowtide-ps-engine", 30 * MIB, left=True) as orphan:
            done = ps()
        with holder("lowtide-ps-engine", 30 * MIB, left=False) as twin:
            clean = ps()
    assert "orphans of engines, without a card:" in done.stdout
    assert words(done.stdout, str(orphan))[1].strip() == "VLLM::EngineCore [vllm engine-core]"
    assert words(clean.stdout, str(twin))[4].strip() == str(os.getpid())


def test_an_engine_is_listed_without_a_card_with_who_has_started_it_and_another_program_is_not(ps: Ps) -> None:
    code = left_processes.TITLE + "take_title(b'VLLM::EngineCore')\n"
    with holder("lowtide-ps-other", 30 * MIB, left=False) as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(left_processes, "HOLD", code + left_processes.HOLD)
        with holder("lowtide-ps-engine", 30 * MIB, left=False) as engine:
            done = ps()
            found = {each["pid"]: each for each in document(ps)["processes"]}
    assert "\nengines, without a card:\n" in done.stdout
    assert words(done.stdout, str(engine))[4].strip() == str(os.getpid())
    assert (found[engine]["role"], found[engine]["is_orphan"]) == ("vllm engine-core", False)
    assert os.getpid() in found
    assert other not in found


def test_an_orphan_of_a_program_that_was_watched_is_listed_and_another_is_not(
    ps: Ps, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These tests may be watched themselves.
    monkeypatch.delenv(MARK, raising=False)
    with holder("lowtide-ps-any", MIB, left=True) as stranger:
        monkeypatch.setenv(MARK, "0123456789abcdef")
        with holder("lowtide-ps-watched", MIB, left=True) as watched:
            listed = {each["pid"] for each in document(ps)["processes"]}
    assert watched in listed
    assert stranger not in listed


def test_files_of_dead_libraries_are_listed_and_count_and_others_are_only_listed(
    ps: Ps, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_view, "read_card_holders", lambda driver: ())
    # What others have left on this machine would count, too.
    monkeypatch.setattr(outside_view, "_left_processes", list)
    (shm / "model.bin").write_bytes(b"x" * 30 * MIB)
    assert ps("--fail-above", "25MiB").exit_code == 0
    left = shm / "nccl-pS1234"
    left.write_bytes(b"x" * 26 * MIB)
    done = ps("--fail-above", "25MiB")
    assert done.exit_code == 1
    assert [word.strip() for word in words(done.stdout, "26.0 MiB")][-2:] == ["NCCL", f"rm -- {left}"]
    assert "may be kept on purpose" in done.stdout
    assert "ABOVE 25.0 MiB: files that dead processes left in /dev/shm: 26.0 MiB" in done.stdout


def test_without_a_driver_the_files_are_listed_and_the_precheck_is_not_passed(
    ps: Ps, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.probes.device.driver.find_driver", lambda: NoDriver("no library"))
    (shm / "nccl-pS1234").write_bytes(b"x" * MIB)
    done, checked = ps(), ps("--fail-above", "1GiB")
    assert done.exit_code == 0
    assert done.stdout.startswith("no card: no driver to ask: no library\n")
    assert f"rm -- {shm}/nccl-pS1234" in done.stdout
    assert checked.exit_code == 2
    assert "could not be measured" in checked.output


def test_where_nothing_can_be_measured_it_says_so(ps: Ps, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lowtide.probes.device.driver.find_driver", lambda: NoDriver("no library"))
    read = shared_memory_files.read_shared_memory
    monkeypatch.setattr(outside_view, "read_shared_memory", lambda: read(tmp_path / "none"))
    done = ps()
    assert done.exit_code == 2
    assert "not measured: /dev/shm: " in done.stdout


def test_a_card_that_the_driver_does_not_count_is_not_below_any_limit(ps: Ps, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide.probes.device.driver.card_holders import CardHolders

    lost = CardHolders("cuda:0", None, 1000, 0, {}, "NVML: GPU is lost")
    monkeypatch.setattr(outside_view, "read_card_holders", lambda driver: (lost,))
    assert ps().exit_code == 0
    done = ps("--fail-above", "1GiB")
    assert done.exit_code == 2
    assert "not measured: cuda:0: NVML: GPU is lost" in done.stdout


def test_a_size_that_is_none_is_refused(ps: Ps) -> None:
    done = ps("--fail-above", "much")
    assert done.exit_code == 2
    assert "lowtide: --fail-above: 'much' is no size" in done.output


def test_the_shipped_schema_is_that_of_the_types_and_fits_what_is_printed(ps: Ps, nvml: FakeNvml) -> None:
    nvml.compute[0] = [(os.getpid(), MIB), (2**22 + 1, None)]
    shipped = json.loads(SHIPPED.read_text())
    assert shipped == json.loads(json.dumps(listing.json_schema()))
    jsonschema.Draft202012Validator.check_schema(shipped)
    jsonschema.validate(document(ps, "--fail-above", "0"), shipped, cls=jsonschema.Draft202012Validator)


def test_it_loads_no_torch() -> None:
    code = "import sys; from lowtide.leakcheck.cli import app; app(['ps'], standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_is_listed_again_until_ctrl_c() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "lowtide", "ps", "--watch", "0.5s"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        # The first line of each list names the machine's driver, or says that there is none.
        first = process.stdout.readline()
        for line in process.stdout:
            if line == first:
                break
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=HANG_S)
    assert (process.returncode, said) == (130, "lowtide: ended\n")


def test_a_watch_is_no_check(ps: Ps) -> None:
    assert ps("--watch", "1s", "--json").exit_code == 2
    assert ps("--watch", "1s", "--fail-above", "1GiB").exit_code == 2
    assert ps("--watch", "0.1s").exit_code == 2
    assert ps("--watch", "soon").exit_code == 2
