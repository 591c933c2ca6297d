"""The command line as its user sees it: in a process of its own, by exit code and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import torch

from lowtide.reports import schema

ROOT = Path(__file__).parents[2]


def lowtide(*args: str | Path, timeout: float = 200) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", *map(str, args)]
    # One thread: beside another test on the other core, torch's threads would mostly wait for each other.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT, env=env)


def report_of(folder: Path) -> schema.Report:
    return schema.read(folder)


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("report")
    return lowtide("run", "--device", "cpu", "--report", folder), folder


def test_a_clean_run_says_so_and_exits_0(clean_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = clean_run
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CLEAN: 2 cycle(s), everything came back" in done.stdout
    assert done.stderr == ""


def test_the_table_has_a_row_per_stage_and_the_ledger_its_lines(
    clean_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = clean_run
    for column in ("tensors", "allocated", "reserved", "weights", "kv cache", "runtime", "workspace", "driver", "RSS"):
        assert column in done.stdout
    for line in ("interpreter", "arena kv_cache", "host pool sleeping weights", "unexplained", "total"):
        assert line in done.stdout
    assert done.stdout.count("sleep(2)") >= 2


def test_the_report_folder_has_all_its_files(clean_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = clean_run
    assert {path.name for path in folder.iterdir()} == {"leakcheck.json", "index.html", "junit.xml", "summary.md"}


def test_the_report_fits_the_schema_that_is_shipped(
    clean_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, folder = clean_run
    shipped = json.loads((ROOT / "reports" / "lowtide-report-1.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(shipped)
    document = json.loads((folder / "leakcheck.json").read_text())
    jsonschema.validate(document, shipped, cls=jsonschema.Draft202012Validator)
    assert document["schema"] == "lowtide-report/1"


def test_every_ledger_of_the_report_adds_up(clean_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ledgers = [
        ledger
        for stage in report_of(clean_run[1]).subjects[0].stages
        for readings in (stage.before, stage.after)
        for ledger in readings.ledgers
    ]
    assert ledgers
    for ledger in ledgers:
        assert ledger.total == sum(line.bytes for line in ledger.lines) + (ledger.unexplained or 0)


def test_asleep_at_level_2_the_process_gave_back_what_the_arenas_had_mapped(
    clean_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    sleeps = [stage for stage in report_of(clean_run[1]).subjects[0].stages if stage.name == "sleep(2)"]
    assert [stage.cycle for stage in sleeps] == [1, 2]
    for stage in sleeps:
        assert stage.before.rss - stage.after.rss >= 0.95 * sum(stage.before.arenas.values())


def test_after_the_second_life_everything_is_at_the_baseline_exactly(
    clean_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    second = [stage for stage in report_of(clean_run[1]).subjects[0].stages if stage.cycle == 2]
    before, after = second[0].before, second[-1].after
    assert after.arenas == before.arenas == {}
    for name in ("tensors", "pinned", "host_pools", "descriptors", "threads", "native_threads", "processes"):
        assert getattr(after, name) == getattr(before, name), name


@pytest.mark.parametrize("defect", ["shutdown-noop", "worker-keeps-everything"])
def test_a_defect_is_found_and_exits_1(defect: str, tmp_path: Path) -> None:
    done = lowtide("run", "--device", "cpu", "--cycles", "2", "--defect", defect, "--report", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    (finding,) = report_of(tmp_path).subjects[0].findings
    assert (finding.resource, finding.device, finding.stage) == ("tensors", "cpu", "shutdown")
    assert finding.bytes > 64 << 20
    assert "did not come back at shutdown" in done.stdout


def test_one_cycle_says_what_it_could_not_judge(tmp_path: Path) -> None:
    done = lowtide("run", "--device", "cpu", "--cycles", "1", "--report", tmp_path)
    assert done.returncode == 0
    assert "not judged: host-memory" in done.stdout
    assert {item.what for item in report_of(tmp_path).subjects[0].not_measured} >= {"host-memory", "file-descriptors"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_cuda_without_a_card_is_refused() -> None:
    refused("torch sees no card here: use device 'cpu'", "run", "--device", "cuda")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused("config.json is missing", "run", "--device", "cpu", "--model", tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    refused("is neither a preset", "run", "--device", "cpu", "--model", tmp_path / "nowhere")


def test_a_report_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused("cannot be written to", "run", "--device", "cpu", "--report", tmp_path / "file" / "report")


@pytest.mark.parametrize("cycles", ["0", "-1"])
def test_no_cycles_are_refused(cycles: str) -> None:
    refused(f"--cycles {cycles} is not possible: use 1 or more", "run", "--cycles", cycles)


def test_an_unknown_defect_is_refused_with_those_there_are() -> None:
    refused("use one of shutdown-noop, worker-keeps-everything", "run", "--device", "cpu", "--defect", "nonsense")


def test_preset_and_model_together_are_refused(tmp_path: Path) -> None:
    refused("--preset and --model exclude each other", "run", "--preset", "tiny", "--model", tmp_path)


def refused(message: str, *args: str | Path) -> None:
    done = lowtide(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowtide: ")
    assert message in line


def test_version_and_help() -> None:
    from lowtide import __version__

    assert lowtide("--version").stdout == f"lowtide {__version__}\n"
    assert "--defect" in lowtide("run", "--help").stdout


def test_defects_are_listed_with_their_source() -> None:
    done = lowtide("defects")
    assert done.returncode == 0
    assert "shutdown-noop" in done.stdout
    assert "vllm#38503" in done.stdout


def test_a_checkpoint_folder_runs(write_checkpoint_anywhere: Callable[[], Path], tmp_path: Path) -> None:
    folder = write_checkpoint_anywhere()
    done = lowtide("run", "--device", "cpu", "--cycles", "1", "--model", folder, "--report", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert report_of(tmp_path).subjects[0].id == f"run[{folder}]"


@pytest.fixture
def write_checkpoint_anywhere(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    def write() -> Path:
        import transformers

        folder = tmp_path_factory.mktemp("checkpoint")
        config = transformers.LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        return folder

    return write


@pytest.mark.parametrize("delay", [0.0, 0.4, 1.0], ids=["at-once", "early", "later"])
def test_ctrl_c_shuts_down_writes_what_there_is_and_exits_130(delay: float, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lowtide", "run", "--device", "cpu", "--cycles", "500", "--report", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        # The first arena in the process's memory says that the run is under way.
        wait_until(lambda: "torch" in Path(f"/proc/{process.pid}/maps").read_text() and _grown(process.pid))
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, out + err
    assert "interrupted in cycle" in out
    assert "Traceback" not in err
    (subject,) = report_of(tmp_path).subjects
    assert subject.reason.startswith("interrupted in cycle")
    assert subject.stages[-1].name == "shutdown"
    assert subject.stages[-1].after.arenas == {}
    assert subject.findings == ()


def _grown(pid: int) -> bool:
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident > 300 << 20


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the run never got under way"
        time.sleep(0.02)
