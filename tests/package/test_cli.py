"""The command line as its user sees it: in a process of its own, by exit code and output."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jsonschema
import msgspec
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from lowtide.engine.defects import DEFECTS
from lowtide.leakcheck.cli import commands as cli
from lowtide.leakcheck.cli import defects as defects_module
from lowtide.leakcheck.cli import fuzz as fuzz_command
from lowtide.leakcheck.lives import lifecycle
from lowtide.leakcheck.lives.fuzz import Found
from lowtide.leakcheck.lives.script import Coverage
from lowtide.leakcheck.suppressions.entries import load
from lowtide.reports import schema
from tests.leakcheck.small_target import SmallTarget
from tests.reports.terminals import lines_of, sent_to_terminal
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def lowtide(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowtide", *map(str, args)]
    # One thread: beside another test on the other core, torch's threads would mostly wait for each other.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)


def report_of(folder: Path) -> schema.Report:
    return schema.read(folder)


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("report")
    return lowtide("run", "--device", "cpu", "--report", folder), folder


def test_a_clean_run_says_so_and_exits_0(clean_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, _ = clean_run
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CLEAN: 2 cycles, everything came back" in done.stdout
    assert done.stderr == ""


def test_the_table_has_a_row_per_stage_and_the_ledger_its_lines(
    clean_run: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = clean_run
    for column in ("tensors", "allocated", "reserved", "weights", "kv cache", "runtime", "workspace", "driver", "RSS"):
        assert column in done.stdout
    for line in (
        "malloc in use",
        "Python's heap in use",
        "arena kv_cache",
        "host pool sleeping weights",
        "unexplained",
    ):
        assert line in done.stdout
    assert done.stdout.count("sleep(2)") >= 2


def test_the_report_folder_has_all_its_files(clean_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, folder = clean_run
    rendered = {"index.html", "junit.xml", "summary.md", "leakcheck.sarif", "metrics.txt", "trace.json"}
    assert {path.name for path in folder.iterdir()} == {"leakcheck.json"} | rendered


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


LEAKING = ("run", "--device", "cpu", "--cycles", "1", "--defect", "shutdown-noop")


@pytest.fixture(scope="module")
def leaking_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    folder = tmp_path_factory.mktemp("leaking")
    return lowtide(*LEAKING, "--report", folder), folder


def test_a_defect_is_found_and_exits_1(leaking_run: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    done, folder = leaking_run
    assert done.returncode == 1, done.stdout + done.stderr
    # One per holder, or one for all where no holder is known.
    findings = report_of(folder).subjects[0].findings
    assert {(finding.resource, finding.device) for finding in findings} == {("tensors", "cpu")}
    assert sum(finding.bytes for finding in findings) > 64 << 20
    assert all(f"{finding.resource}/{finding.cause} {finding.message}" in done.stdout for finding in findings)


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
    refused(
        "use one of bound-method-cache, frozen-heap",
        "run",
        "--device",
        "cpu",
        "--defect",
        "nonsense",
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("run", "--preset", "huge"), "'--preset'"),
        (("run", "--cycles", "x"), "'--cycles'"),
        (("run", "--bogus"), "--bogus: see `lowtide run --help`"),
        (("run", "extra"), "extra"),
        (("frobnicate",), "frobnicate"),
        (("suppress",), "DIR"),
    ],
)
def test_what_makes_no_sense_is_reported_in_one_line(args: tuple[str, ...], said: str) -> None:
    refused(said, *args)


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


def subject(outcome: schema.Outcome) -> schema.Subject:
    return schema.Subject(id="a", outcome=outcome, findings=() if outcome == "clean" else (LEAK,))


@pytest.mark.parametrize(
    ("note", "ran", "said", "code"),
    [
        ("", True, "1 of 2 found as they must be, 0 not, 1 need a card", 0),
        ("WRONG: expected nothing", True, "0 of 2 found as they must be, 1 not, 1 need a card", 1),
        ("could not be measured: no output", False, "0 of 2 found as they must be, 1 not, 1 need a card", 2),
    ],
)
def test_verified_defects_decide_the_exit_code(
    note: str, ran: bool, said: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = list(DEFECTS.values())[:2]

    def verified(defects: object, device: str, *, jobs: int, in_core: bool) -> Iterator[defects_module.Verified]:
        assert (device, jobs, in_core) == ("cpu", 3, False)
        run = defects_module.VerifiedRun(subject("leak") if ran else None, 1.0, "")
        yield defects_module.Verified(first, "cpu", run, defects_module.VerifiedRun(subject("clean"), 1.0, ""), note)
        yield defects_module.Verified(second, "", None, None, "needs a card")

    monkeypatch.setattr(defects_module, "verify", verified)
    # As many as are told here.
    monkeypatch.setattr("lowtide.engine.defects.DEFECTS", {first.name: first, second.name: second})
    done = invoke("defects", "--verify", "--device", "cpu", "--jobs", "3")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (code, said)
    assert f"| `{first.name}` | {first.source} |" in done.stdout
    assert done.stderr.splitlines() == [
        f"1/2 {first.name}: {note or 'as it must be'}",
        f"2/2 {second.name}: needs a card",
    ]


def test_no_process_cannot_verify() -> None:
    done = invoke("defects", "--verify", "--jobs", "0")
    assert (done.exit_code, done.stderr) == (2, "lowtide: --jobs 0 is not possible: use 1 or more\n")


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


# The command, which makes a file as soon as an engine has an arena. (From outside it does not show: how much memory the
# imports take depends on what torch was built for, and Ctrl-C in the middle of those is not what is tested here.)
TELLING = """
import pathlib, sys
from lowtide.engine.device_allocator.arena import Arena
from lowtide.leakcheck.cli.commands import main

make, under_way = Arena.__init__, pathlib.Path(sys.argv.pop(1))

def tell(self, *args, **kwargs):
    make(self, *args, **kwargs)
    under_way.touch()

Arena.__init__ = tell
main()
"""


@pytest.mark.parametrize("delay", [0.0, 0.4, 1.0], ids=["at-once", "early", "later"])
def test_ctrl_c_shuts_down_writes_what_there_is_and_exits_130(delay: float, tmp_path: Path) -> None:
    under_way = tmp_path / "under way"
    command = [sys.executable, "-c", TELLING, str(under_way)]
    process = subprocess.Popen(
        [*command, "run", "--device", "cpu", "--cycles", "500", "--report", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        # A shell starts its background jobs, and with them all their children, deaf to it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        wait_until(under_way.exists)
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, out + err
    assert "interrupted in cycle" in out
    # Of one that hits a finalizer Python tells itself, and drops it.
    assert "Traceback" not in err or "Exception ignored in" in err
    (subject,) = report_of(tmp_path).subjects
    assert subject.reason.startswith("interrupted in cycle")
    assert subject.stages[-1].name == "shutdown"
    assert subject.stages[-1].after.arenas == {}
    assert subject.findings == ()


# Suppressions. In this process, where nothing needs one of its own: another costs seconds.


LEAK = schema.Finding(
    resource="tensors",
    cause="lru-cache",
    bytes=32 << 20,
    count=8,
    device="cpu",
    stage="shutdown",
    message="32.0 MiB did not come back",
    fingerprint="0123456789abcdef",
)


def invoke(*args: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def write_report(folder: Path, *findings: schema.Finding) -> Path:
    machine = schema.Machine(
        platform="Linux", python="3.11", torch="2.13", cpus=2, memory=1 << 34, devices=(), driver="none"
    )
    report = schema.Report(
        schema="lowtide-report/1",
        version="0.1.0",
        created="now",
        command="lowtide run",
        machine=machine,
        subjects=(schema.Subject(id="a", outcome="leak", findings=findings),),
    )
    schema.write(report, folder)
    return folder


def entry(fingerprint: str, *more: str) -> str:
    return "\n".join(["[[suppressions]]", f'fingerprint = "{fingerprint}"', 'reason = "known"', *more, ""])


def test_suppress_writes_an_entry_per_leak_and_says_where_and_what_is_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = msgspec.structs.replace(LEAK, fingerprint="f" * 16, message="a\nb")
    write_report(tmp_path / "report", LEAK, other)
    done = invoke("suppress", "report")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "lowtide.toml:1: 0123456789abcdef tensors/lru-cache: 32.0 MiB did not come back",
        "lowtide.toml:7: ffffffffffffffff tensors/lru-cache: a\\nb",
        "2 written to lowtide.toml",
        "Now say in the reason of each why it may stay: lowtide.toml does not load before.",
    ]
    path = tmp_path / "lowtide.toml"
    path.write_text(path.read_text().replace("TODO", "known"))
    assert [found.fingerprint for found in load(path).entries] == ["0123456789abcdef", "f" * 16]


def test_suppress_adds_to_the_file_that_is_given_what_it_does_not_have(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text('[project]\nname = "x"\n')
    report = write_report(tmp_path / "report", LEAK)
    assert f"1 written to {file}\n" in invoke("suppress", report, "--file", file).stdout
    before = file.read_bytes()
    assert before.startswith(b'[project]\nname = "x"\n\n[[tool.lowtide.suppressions]]\n')
    done = invoke("suppress", report, "--file", file)
    assert (done.exit_code, done.stdout) == (0, f"nothing to write: 1 leak already listed in {file}\n")
    assert file.read_bytes() == before


def test_suppress_says_so_if_there_is_nothing_to_write(tmp_path: Path) -> None:
    known = msgspec.structs.replace(LEAK, suppressed_by="x:1: known")
    report = write_report(tmp_path / "report", known)
    done = invoke("suppress", report, "--file", tmp_path / "lowtide.toml")
    assert (done.exit_code, done.stdout) == (0, f"nothing to write: {report} has no leak that is not suppressed\n")
    assert not (tmp_path / "lowtide.toml").exists()


@pytest.mark.parametrize(
    ("report", "file", "problem"),
    [
        ("nowhere", "lowtide.toml", "leakcheck.json cannot be read: No such file or directory"),
        ("broken", "lowtide.toml", "leakcheck.json is not a lowtide-report/1 report: "),
        ("report", "not.toml", "not.toml:1: not TOML: "),
        ("report", "nowhere/lowtide.toml", "lowtide.toml: cannot be written: No such file or directory"),
        ("report", "report", "report: is no file"),
    ],
)
def test_suppress_refuses_bad_input_in_one_line_and_changes_nothing(
    tmp_path: Path, report: str, file: str, problem: str
) -> None:
    write_report(tmp_path / "report", LEAK)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "leakcheck.json").write_bytes(b"\xff{")
    (tmp_path / "not.toml").write_text("[\n")
    done = invoke("suppress", tmp_path / report, "--file", tmp_path / file)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowtide: ")
    assert problem in line
    assert sorted(item.name for item in tmp_path.iterdir()) == ["broken", "not.toml", "report"]
    assert (tmp_path / "not.toml").read_text() == "[\n"


@pytest.mark.parametrize(
    "args", [("run", "--suppressions", "nowhere.toml"), ("suppress", "nowhere")], ids=["run", "suppress"]
)
def test_what_is_refused_is_refused_before_torch_is_imported(args: tuple[str, ...]) -> None:
    code = f"""
import sys
from lowtide.leakcheck.cli import commands as cli
try:
    cli.app({list(args)!r})
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("lowtide: ")
    assert "cannot be read: No such file or directory" in line


def test_a_run_without_its_file_of_suppressions_makes_no_report_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(entry("0" * 16, "color = 3"))
    done = invoke("run", "--suppressions", tmp_path / "bad.toml", "--report", tmp_path / "report")
    assert done.exit_code == 2
    assert f"lowtide: --suppressions {tmp_path / 'bad.toml'}:4: unknown key 'color'" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.fixture
def lived(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every run end at once, with a given subject."""

    def end_with(
        outcome: schema.Outcome, *findings: schema.Finding, reason: str = "", interrupted: bool = False
    ) -> None:
        class Lived:
            def __init__(self, name: str, *args: object, **settings: object) -> None:
                self.name = name
                self.interrupted = interrupted

            def run(self) -> schema.Subject:
                return schema.Subject(id=self.name, outcome=outcome, findings=findings, reason=reason)

        monkeypatch.setattr(lifecycle, "LifecycleRun", Lived)

    return end_with


def run_with(folder: Path, text: str) -> tuple[Result, schema.Subject]:
    (folder / "lowtide.toml").write_text(text)
    done = invoke("run", "--device", "cpu", "--suppressions", folder / "lowtide.toml", "--report", folder / "report")
    (subject,) = report_of(folder / "report").subjects
    return done, subject


def test_a_run_whose_leaks_are_known_is_clean_and_says_why(lived: Callable[..., None], tmp_path: Path) -> None:
    lived("leak", LEAK)
    done, subject = run_with(tmp_path, entry("0123456789abcdef"))
    assert done.exit_code == 0, done.output
    assert "known tensors/lru-cache 32.0 MiB did not come back\n    suppressed by lowtide.toml:1: known" in done.stdout
    assert "everything came back but 1 known finding" in done.stdout
    assert "SUPPRESSION" not in done.stdout
    assert subject.outcome == "clean"
    assert subject.findings[0].suppressed_by == "lowtide.toml:1: known"


def test_a_run_with_a_leak_that_is_not_known_is_a_leak(lived: Callable[..., None], tmp_path: Path) -> None:
    lived("leak", LEAK, msgspec.structs.replace(LEAK, fingerprint="f" * 16))
    done, subject = run_with(tmp_path, entry("0123456789abcdef"))
    assert done.exit_code == 1
    assert "LEAK: 1 finding, and 1 known" in done.stdout
    assert subject.outcome == "leak"


def test_an_entry_that_has_expired_or_is_not_needed_fails_a_clean_run(
    lived: Callable[..., None], tmp_path: Path
) -> None:
    lived("clean")
    done, subject = run_with(tmp_path, entry("0" * 16, 'owner = "[ana]"') + entry("1" * 16, "expires = 2020-01-31"))
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-2:] == [
        "SUPPRESSION lowtide.toml:1: unused (owner: [ana]): no finding matches it, delete the entry",
        "SUPPRESSION lowtide.toml:5: expired on 2020-01-31: fix the leak, or renew the entry",
    ]
    assert subject.outcome == "clean"


def test_a_run_that_ended_early_calls_no_entry_unused_and_keeps_its_exit_code(
    lived: Callable[..., None], tmp_path: Path
) -> None:
    lived("error", reason="cycle 1: create raised MemoryError")
    done, _ = run_with(tmp_path, entry("0" * 16) + entry("1" * 16, "expires = 2020-01-31"))
    assert done.exit_code == 2
    assert "unused" not in done.stdout
    assert "SUPPRESSION lowtide.toml:4: expired on 2020-01-31" in done.stdout
    lived("error", reason="interrupted in cycle 1", interrupted=True)
    assert run_with(tmp_path, entry("0" * 16))[0].exit_code == 130


def test_where_the_report_cannot_be_written_the_verdict_is_shown_first(
    lived: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "leakcheck.json").mkdir()
    lived("leak", LEAK)
    done = invoke("run", "--device", "cpu", "--report", tmp_path)
    why = "cannot be written: Is a directory; choose another report folder\n"
    assert (done.exit_code, done.stderr) == (2, f"lowtide: {tmp_path / 'leakcheck.json'} {why}")
    assert done.stdout.splitlines()[-1] == "LEAK: 1 finding"
    assert "report: " not in done.stdout


def test_a_terminal_gets_the_worst_of_a_long_report_and_all_else_the_whole(tmp_path: Path) -> None:
    each = [{"bytes": turn, "message": f"{turn} B", "fingerprint": f"{turn}"} for turn in range(50)]
    write_report(tmp_path, *(msgspec.structs.replace(LEAK, **fields) for fields in each))
    arguments = ["-m", "lowtide", "report", str(tmp_path)]
    code, sent = sent_to_terminal(100, arguments, ROOT)
    lines = [line.strip() for line in lines_of(sent)]
    shown = [line for line in lines if line.startswith("tensors/")]
    assert (code, shown[0], shown[-1]) == (1, "tensors/lru-cache 49 B", "tensors/lru-cache 30 B")
    rest = " ".join(lines[lines.index("tensors/lru-cache 30 B") :])
    assert f"… 30 findings more: lowtide report {tmp_path} --all, or " in re.sub(r" +", " ", rest)
    assert "LEAK: 1 of 1 subject leaked" in lines
    assert (tmp_path / "junit.xml").exists()
    code, sent = sent_to_terminal(100, [*arguments, "--all"], ROOT)
    assert (code, sent.count("tensors/lru-cache")) == (1, 50)
    assert invoke("report", tmp_path).stdout.count("tensors/lru-cache") == 50


def test_a_report_in_a_folder_that_cannot_be_written_is_shown(tmp_path: Path) -> None:
    write_report(tmp_path, LEAK)
    (tmp_path / "junit.xml").mkdir()
    done = invoke("report", tmp_path)
    why = "cannot be written: Is a directory; choose another report folder\n"
    assert (done.exit_code, done.stderr) == (2, f"lowtide: {tmp_path / 'junit.xml'} {why}")
    assert done.stdout.splitlines()[-1] == "LEAK: 1 finding"


def test_without_a_file_the_shipped_entries_count(lived: Callable[..., None], tmp_path: Path) -> None:
    lived("leak", msgspec.structs.replace(LEAK, cause="library-workspace", holder="workspace at 0x7f0000000000"))
    done = invoke("run", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "suppressed by shipped_suppressions.toml:" in done.stdout


def test_a_real_leak_is_suppressed_from_its_report(
    leaking_run: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    # Also what the other tests of this part take for granted: a run's findings have fingerprints that stay the same.
    file = tmp_path / "lowtide.toml"
    assert invoke("suppress", leaking_run[1], "--file", file).exit_code == 0
    file.write_text(file.read_text().replace("TODO", "known"))
    done = lowtide(*LEAKING, "--suppressions", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CLEAN: 1 cycle" in done.stdout
    assert "SUPPRESSION" not in done.stdout


# --- check ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("json:nothing",), "module 'json' has no attribute 'nothing'"),
        (("json",), "'json' names no target: write MODULE:FACTORY"),
        (("builtins:dict",), "made a dict without `capabilities`"),
        (("json:loads",), "made no target: it raised TypeError"),
        (("json:loads", "--cycles", "0"), "--cycles 0 is not possible: use 1 or more"),
        (("json:loads", "--turns", "11"), "--turns 11 is not possible: what grows shows from 12 turns on"),
        (("json:loads", "--until-decided"), "--until-decided needs --turns N"),
        (("json:loads", "--suppressions", "nowhere.toml"), "--suppressions nowhere.toml"),
    ],
)
def test_a_check_that_cannot_be_made_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = invoke("check", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_users_engine_goes_through_the_fixed_life(tmp_path: Path) -> None:
    done = lowtide("check", "tests.leakcheck.small_target:SmallTarget", "--report", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CLEAN: 2 cycles, everything came back" in done.stdout
    (subject,) = report_of(tmp_path).subjects
    assert subject.id == "check[tests.leakcheck.small_target:SmallTarget]"
    assert len(subject.stages) == 2 * 8


def test_what_a_users_engine_leaves_fails_its_check(tmp_path: Path) -> None:
    done = lowtide("check", "tests.leakcheck.lives.test_target_life:Keeps", "--cycles", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "tests.leakcheck.lives.test_target_life.KEPT" in done.stdout


REQUESTS: list[bytes] = []


class Remembers(SmallTarget):
    """Keeps 2 KB of each inference, and not beyond the life."""

    def infer(self, prompt_lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        REQUESTS.append(bytes(2000 + len(REQUESTS)))
        return super().infer(prompt_lengths, max_tokens)

    def shutdown(self) -> None:
        REQUESTS.clear()
        super().shutdown()


@pytest.mark.parametrize(
    ("target", "code"), [(f"{__name__}:Remembers", 1), (f"{SmallTarget.__module__}:SmallTarget", 0)]
)
def test_what_grows_with_each_of_many_inferences_fails_it(target: str, code: int) -> None:
    done = lowtide("check", target, "--cycles", "1", "--turns", "12")
    assert done.returncode == code, done.stdout + done.stderr
    told = f"{__name__}.REQUESTS takes 1 item (2.0 KiB) in each of 7 inferences"
    assert (told in done.stdout) == bool(code)


KILLED = """
import os, signal, torch
from tests.leakcheck.small_target import KEPT, SmallTarget

class IsKilled(SmallTarget):
    lives = 0

    def create(self, config):
        IsKilled.lives += 1
        if IsKilled.lives == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().create(config)
        KEPT.append(torch.ones(1000))
"""


def test_a_check_that_is_killed_has_reported_the_lives_before(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, "-m", "lowtide", "check", "killed:IsKilled", "--cycles", "9", "--report", "report"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    # What is killed removes nothing, and a long path is too long for its sockets.
    with tempfile.TemporaryDirectory() as short:
        env |= {"TMPDIR": short}
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, cwd=tmp_path, env=env)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    shown = invoke("report", tmp_path / "report")
    assert shown.exit_code == 1
    assert "tests.leakcheck.small_target.KEPT" in shown.stdout
    assert "LEAK: 1 finding in 2 cycles" in shown.stdout
    assert "the run has not come to its end: 2 cycles were finished" in shown.stdout
    assert (tmp_path / "report" / "junit.xml").exists()


def test_a_check_of_an_engine_in_another_process_is_not_measured(tmp_path: Path) -> None:
    target = "tests.leakcheck.spawned_target:SpawnedTarget"
    done = lowtide("check", target, "--cycles", "1", "--report", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(re.findall(r"not judged: memory of pid \d+ \(EngineCore\)", done.stdout)) == 1
    assert "CLEAN" not in done.stdout
    assert "NOT JUDGED: nothing can be concluded" in done.stdout
    summary = (tmp_path / "summary.md").read_text()
    assert "NOT MEASURED: 1 of 1 subject" in summary
    assert summary.count("EngineCore") == 1


def test_random_lives_of_an_engine_in_another_process_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    process = schema.OtherProcess(pid=7, name="EngineCore", host=1 << 30)
    missing = schema.NotMeasured(what="memory of pid 7 (EngineCore): 1.0 GiB host", why="move it", process=process)
    monkeypatch.setattr(
        "lowtide.leakcheck.lives.fuzz.fuzz", lambda *args, **kwargs: Found(Coverage(), 1.0, not_measured=(missing,))
    )
    done = invoke("fuzz", "--device", "cpu")
    assert done.exit_code == 2
    assert done.stdout.count("not judged: memory of pid 7 (EngineCore): 1.0 GiB host; move it") == 1
    assert "CLEAN" not in done.stdout


# --- fuzz -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--examples", "0"), "--examples 0 is not possible: use 1 or more"),
        (("--steps", "0"), "--steps 0 is not possible"),
        (("--faults", "--jobs", "0"), "--jobs 0 is not possible: use 1 or more"),
        (("--jobs", "2"), "--jobs 2 shares out the points of --faults: add --faults, or leave --jobs out"),
        (("--target", "nowhere"), "'nowhere' names no target: write MODULE:FACTORY"),
        (("--target", "json:nothing"), "module 'json' has no attribute 'nothing'"),
        (("--target", "json:loads", "--defect", "wake-oom"), "--target and --defect exclude each other"),
        (("--", "serve"), "'serve' is for a target of yours: name what makes it with --target MODULE:FACTORY"),
        (("--defect", "nothing"), "there is no defect 'nothing'"),
        (("--device", "cpu", "--defect", "never-release"), "'never-release' cannot show on cpu: use --device cuda"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    done = invoke("fuzz", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_search_prints_the_life_that_fails_and_keeps_it(tmp_path: Path) -> None:
    # In a process of its own: the example database is kept in the current directory.
    target = "tests.leakcheck.lives.test_checked_life:ForgetsAtWake"
    done = lowtide("fuzz", "--target", target, "--seed", "1", "--report", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "weights changed its contents between sleep and wake" in done.stdout
    assert "LEAK: 1 finding; " in done.stdout
    program = (tmp_path / "life.py").read_text()
    assert program in done.stdout
    assert "from tests.leakcheck.lives.test_checked_life import ForgetsAtWake" in program
    assert "    life.create()\n    life.sleep(" in program
    assert json.loads((tmp_path / "leakcheck.json").read_text())["subjects"][0]["outcome"] == "leak"


@pytest.mark.parametrize("which", ["write_bytes", "write_text"], ids=["the report", "the life"])
def test_what_was_found_is_shown_even_if_it_cannot_be_written(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    def search(*args: object, **settings: object) -> tuple[schema.Subject, str, str]:
        # By the time that it has ended the disk is full.
        monkeypatch.setattr(Path, which, refuses)
        return subject("leak"), "life.create()", "3 lives"

    monkeypatch.setattr(fuzz_command, "search", search)
    done = invoke("fuzz", "--device", "cpu", "--report", tmp_path)
    assert done.exit_code == 2
    assert "LEAK: 1 finding; 3 lives" in done.stdout
    assert "life.create()" in done.stdout
    assert "No space left on device; choose another report folder" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_failing_every_point_prints_how_many_there_are(tmp_path: Path) -> None:
    # Of an earlier run into the same folder.
    (tmp_path / "life.py").write_text("it failed")
    done = lowtide(
        "fuzz", "--target", "tests.leakcheck.lives.test_witness:Bare", "--faults", "--jobs", "2", "--report", tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CLEAN: every fault point was failed once" in done.stdout
    assert re.search(r"create +map +2 +2 +survived", done.stdout)
    for stage in ("create", "infer", "shutdown"):
        assert re.search(rf"{stage} +kill +1 +1 +nothing stayed", done.stdout)
    assert not (tmp_path / "life.py").exists()


@pytest.mark.parametrize("command", [("run", "--device", "cpu"), ("check", "tests.leakcheck.small_target:SmallTarget")])
@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["no-color", "dumb"])
def test_a_life_is_shown_without_a_style_and_on_a_dumb_terminal_not_at_all(
    command: tuple[str, ...], environment: dict[str, str]
) -> None:
    code, sent = sent_to_terminal(100, ["-m", "lowtide", *command], ROOT, **environment)
    assert code == 0, sent
    assert re.findall(r"\x1b\[[0-9;]*m", sent) == []
    assert ("cycle 2/2: shutdown" in sent) == ("\x1b" in sent) == ("NO_COLOR" in environment)
    assert max(map(len, lines_of(sent))) <= 100


ENTRY = '[[suppressions]]\nfingerprint = "0123456789abcdef"\nreason = "{}"\nowner = "tests"\nexpires = {}\n'


def test_entries_in_force_pass_a_check(tmp_path: Path) -> None:
    own, project, other = tmp_path / "lowtide.toml", tmp_path / "pyproject.toml", tmp_path / "sub" / "pyproject.toml"
    other.parent.mkdir()
    own.write_text(ENTRY.format("vllm#1: a cache that is bounded", "2999-01-01"))
    project.write_text(ENTRY.format("the same", "2999-01-01").replace("[[", "[[tool.lowtide."))
    other.write_text("[project]\nname = 'none'\n")
    done = invoke("suppress", "--check", own, project, other)
    assert (done.exit_code, done.output) == (0, "")


def test_entries_that_are_not_in_force_are_a_line_each(tmp_path: Path) -> None:
    old, broken, empty = (tmp_path / name / "lowtide.toml" for name in ("old", "broken", "empty"))
    for path, text in (
        (old, ENTRY.format("known", "2020-01-01")),
        (broken, "[[suppressions]\n"),
        (empty, ENTRY.format("", "2999-01-01")),
    ):
        path.parent.mkdir()
        path.write_text(text)
    done = invoke("suppress", "--check", old, broken, empty)
    lines = done.output.splitlines()
    assert (done.exit_code, len(lines)) == (2, 3)
    assert lines[0].startswith(f"lowtide: {old}:1: expired on 2020-01-01 (owner: tests): ")
    assert lines[1].startswith(f"lowtide: {broken}:")
    assert lines[2].startswith(f"lowtide: {empty}:")
    # Nothing is written, and a second folder is no report.
    assert old.read_text() == ENTRY.format("known", "2020-01-01")
    assert "2 folders are too many" in invoke("suppress", old.parent, broken.parent).output
