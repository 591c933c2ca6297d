"""A server as a target: started, asked over HTTP, and ended; what it says where something fails."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lowtide.leakcheck.targets import server
from lowtide.leakcheck.targets.server import (
    LowtideServer,
    ServerError,
    ServerTarget,
    SglangServer,
    VllmServer,
    lowtide_server,
    sglang_server,
    vllm_server,
)
from lowtide.leakcheck.targets.target import TargetError, load_factory, make_target
from lowtide.reports.schema import read
from tests.waiting import HANG_S

SERVER = str(Path(__file__).with_name("answering_server.py"))

Make = Callable[..., ServerTarget]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes targets, with ways of the server and options of its command."""
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    made = []

    def of(kind: type[VllmServer | SglangServer], *ways: str, before: tuple[str, ...] = ()) -> ServerTarget:
        command = [sys.executable, SERVER, str(tmp_path / "notes"), *ways]
        made.append(kind([*before, *command], "cpu"))
        return made[-1]

    yield of
    for target in made:
        target.shutdown()


def requests(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "notes").read_text().splitlines()]


def logs(folder: Path) -> list[Path]:
    return list(folder.glob("lowtide-server-*.log"))


def test_a_life_of_vllm_s_server(make: Make, tmp_path: Path) -> None:
    target = make(VllmServer, "--enable-sleep-mode")
    assert (target.capabilities.sleep_levels, target.capabilities.wake_tags) == ((1,), ("weights", "kv_cache"))
    target.create({})
    process = target._process
    assert process is not None
    # In the order of the prompts, whatever that of the answer is.
    assert target.infer([3, 5], 2) == [[3, 4], [5, 6]]
    assert target.sleep(1, "wait") == {}
    target.wake(["weights"])
    target.wake(None)
    assert target.reset_prefix_cache() is True
    target.shutdown()
    target.shutdown()
    sent = {"prompt": [[10, 11, 12], [10, 11, 12, 13, 14]], "max_tokens": 2, "temperature": 0}
    assert requests(tmp_path) == [
        ["/v1/completions", {**sent, "ignore_eos": True, "return_token_ids": True}],
        ["/sleep?level=1", None],
        ["/wake_up?tags=weights", None],
        ["/wake_up", None],
        ["/reset_prefix_cache", None],
    ]
    assert (process.returncode, logs(tmp_path)) == (-15, [])


def test_a_server_that_says_the_contrary_of_what_it_was_asked_for_is_told(make: Make) -> None:
    wakeful, drowsy = (
        make(VllmServer, "wakeful", "--enable-sleep-mode"),
        make(VllmServer, "drowsy", "--enable-sleep-mode"),
    )
    for target in (wakeful, drowsy):
        target.create({})
    with pytest.raises(
        ServerError, match=r'POST /sleep was answered, and then /is_sleeping with {"is_sleeping": false}'
    ):
        wakeful.sleep(1, "wait")
    drowsy.sleep(1, "wait")
    drowsy.wake(["weights"])
    with pytest.raises(
        ServerError, match=r'POST /wake_up was answered, and then /is_sleeping with {"is_sleeping": true}'
    ):
        drowsy.wake(None)


@pytest.mark.parametrize("levels", [(), (1,)])
def test_vllm_s_server_loads_another_checkpoint_and_its_own_again(
    levels: tuple[int, ...], make: Make, tmp_path: Path
) -> None:
    sleeps = ["--enable-sleep-mode"] * len(levels)
    target = make(VllmServer, *sleeps, before=("--weights", str(tmp_path)))
    assert (target.capabilities.update_weights, target.capabilities.keeping_levels) == (True, levels)
    target.create({})
    for version in (1, 0):
        assert target.update_weights(version) is None
    assert requests(tmp_path) == [
        ["/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}],
        ["/reset_prefix_cache", None],
        ["/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/own"}}],
        ["/reset_prefix_cache", None],
    ]


def test_sglang_s_server_loads_another_checkpoint_and_its_own_again(make: Make, tmp_path: Path) -> None:
    target = make(SglangServer, "--enable-memory-saver", before=("--weights", str(tmp_path)))
    assert (target.capabilities.update_weights, target.capabilities.keeping_levels) == (True, ())
    target.create({})
    for version in (1, 0):
        target.update_weights(version)
    assert requests(tmp_path) == [
        ["/update_weights_from_disk", {"model_path": str(tmp_path)}],
        ["/update_weights_from_disk", {"model_path": "/own"}],
    ]


def test_weights_that_sglang_s_server_has_not_loaded_are_told(make: Make, tmp_path: Path) -> None:
    target = make(SglangServer, "refuses", before=("--weights", str(tmp_path)))
    target.create({})
    with pytest.raises(ServerError, match=r'/update_weights_from_disk was answered with {"success": false'):
        target.update_weights(1)


def test_a_server_that_does_not_say_what_it_has_loaded_is_told(make: Make, tmp_path: Path) -> None:
    target = make(VllmServer, "speechless", before=("--weights", str(tmp_path)))
    target.create({})
    with pytest.raises(ServerError, match="GET /v1/models was not answered with its root: JSONDecodeError"):
        target.update_weights(0)


@pytest.mark.parametrize(("words", "named"), [((), "nothing"), (("/none", "vllm", "serve"), "/none")])
def test_weights_that_are_no_folder_are_refused(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(TargetError, match=f"--weights is followed by {named}: give the folder of another checkpoint"):
        VllmServer(["--weights", *words], "cpu")


def test_a_life_of_sglang_s_server(make: Make, tmp_path: Path) -> None:
    target = make(SglangServer, "--enable-memory-saver")
    target.create({})
    assert target.infer([3, 5], 2) == [[3, 4], [5, 6]]
    target.sleep(1, "wait")
    target.wake(["weights"])
    target.wake(None)
    target.reset_prefix_cache()
    assert requests(tmp_path)[1:] == [
        ["/release_memory_occupation", {"tags": ["weights", "kv_cache"]}],
        ["/resume_memory_occupation", {"tags": ["weights"]}],
        ["/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}],
        ["/flush_cache", None],
    ]


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
def test_one_that_was_not_started_to_sleep_does_not(kind: type[VllmServer], make: Make) -> None:
    assert (make(kind).capabilities.sleep_levels, make(kind).capabilities.wake_tags) == ((), ())


def test_our_own_sleeps_at_both_levels_without_being_asked(make: Make, tmp_path: Path) -> None:
    target = make(LowtideServer)
    assert (target.capabilities.sleep_levels, target.capabilities.wake_tags) == ((1, 2), ("weights", "kv_cache"))
    target.create({})
    assert target.infer([3, 5], 2) == [[3, 4], [5, 6]]
    target.sleep(2, "wait")
    assert requests(tmp_path)[1:] == [["/sleep?level=2", None]]


def test_a_port_that_the_command_names_is_the_one_that_is_asked(make: Make, tmp_path: Path) -> None:
    port = server._free_port()
    target = make(VllmServer, "--port", str(port))
    target.create({})
    assert target._url == f"http://127.0.0.1:{port}"
    assert target.infer([2], 1) == [[2]]


def test_one_that_ends_says_why_and_what_it_wrote_stays(make: Make, tmp_path: Path) -> None:
    target = make(VllmServer, "ends")
    with pytest.raises(ServerError, match="ended with 3 before it was ready; it wrote last: the weights are not there"):
        target.create({})
    target.shutdown()
    (log,) = logs(tmp_path)
    assert log.read_text() == "loading\nthe weights are not there\n-----\n"


def test_one_that_is_not_ready_in_time_is_not_waited_for(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(VllmServer)
    monkeypatch.setattr(server, "START_S", 0.0)
    with pytest.raises(ServerError, match=r"was not ready after 0 s; it wrote last: nothing"):
        target.create({})


def test_an_answer_that_is_an_error_is_told(make: Make) -> None:
    target = make(VllmServer, "fails")
    target.create({})
    with pytest.raises(
        ServerError, match=re.compile(r"POST /sleep was answered with 500: .*no memory is left", re.DOTALL)
    ):
        target.sleep(1, "wait")


def test_one_that_has_died_is_told(make: Make) -> None:
    target = make(VllmServer)
    target.create({})
    assert target._process is not None
    target._process.kill()
    target._process.wait()
    with pytest.raises(ServerError, match=r"POST /sleep was not answered: .*refused"):
        target.sleep(1, "wait")


def test_one_that_does_not_end_is_killed_and_told(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make(VllmServer, "stays")
    target.create({})
    process = target._process
    assert process is not None
    monkeypatch.setattr(server, "END_S", 0.2)
    with pytest.raises(ServerError, match=r"had not ended 0\.2 s after SIGTERM"):
        target.shutdown()
    assert process.returncode == -9


def test_a_port_that_is_another_server_s_is_refused(make: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = make(VllmServer, "--port", str(taken.getsockname()[1]))
        with pytest.raises(TargetError, match="of the command is in use"):
            target.create({})
    assert target._process is None


def test_no_proxy_is_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    # It keeps the proxies of its first call.
    monkeypatch.setattr(server.urllib.request, "_opener", None)
    target = make(VllmServer)
    target.create({})
    assert target.infer([2], 1) == [[2]]


@pytest.mark.parametrize(
    ("way", "said"),
    [("speechless", "was answered with what is no JSON: 'not here'"), ("short", "was not answered: IncompleteRead")],
)
def test_an_answer_that_is_none_is_told(way: str, said: str, make: Make) -> None:
    target = make(VllmServer, way)
    target.create({})
    with pytest.raises(ServerError, match=f"POST /v1/completions {said}"):
        target.infer([3], 1)


def test_what_is_asked_after_its_end_is_not_answered(make: Make, tmp_path: Path) -> None:
    target = make(VllmServer)
    target.create({})
    target.shutdown()
    with pytest.raises(ServerError, match=r"POST /sleep was not answered: .*refused.*$"):
        target.sleep(1, "wait")
    assert logs(tmp_path) == []


def test_completions_without_token_ids_are_refused(make: Make) -> None:
    target = make(VllmServer, "wordless")
    target.create({})
    with pytest.raises(TargetError, match="no token_ids: vLLM"):
        target.infer([3], 1)


def test_a_command_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TargetError, match="no-such-server cannot be started: No such file"):
        VllmServer(["no-such-server"], "cpu").create({})
    assert logs(tmp_path) == []


@pytest.mark.parametrize("factory", [vllm_server, sglang_server, lowtide_server])
def test_without_a_command_it_says_how_to_give_one(factory: Callable[[], ServerTarget]) -> None:
    pytest.importorskip("torch")
    with pytest.raises(TargetError, match="write it after --, such as -- vllm serve MODEL"):
        make_target(factory)


def test_a_factory_is_called_with_what_follows_it() -> None:
    pytest.importorskip("torch")
    target = make_target(load_factory("lowtide.targets:vllm_server", ["serve", "--enable-sleep-mode"]))
    assert target.capabilities.sleep_levels == (1,)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ways", "outcome", "holders"), [((), "clean", []), (("keeps",), "leak", ["__main__.KEPT[0]"])]
)
def test_what_a_sleep_of_a_server_keeps_is_found_in_its_process(
    ways: tuple[str, ...], outcome: str, holders: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    served = [sys.executable, SERVER, str(tmp_path / "notes"), "engine", *ways, "--enable-sleep-mode"]
    asked = ["check", "lowtide.targets:vllm_server", "--cycles", "2", "--report", str(tmp_path / "report")]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *asked, "--", *served], capture_output=True, text=True, timeout=HANG_S
    )
    (subject,) = read(tmp_path / "report").subjects
    assert (subject.outcome, [finding.holder for finding in subject.findings]) == (outcome, holders), done.stdout
    found = [finding for finding in subject.findings if finding.process is not None]
    assert [finding.process.name for finding in found if finding.process] == ["python answering_server.py"] * len(
        holders
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "turns", "found"),
    [
        ([], 20, []),
        (["--defect", "encoder-cache"], 0, [("tensors", "infer", "lowtide::Engine")]),
        (["--defect", "encoder-cache", "--twin"], 0, []),
        (["--defect", "rank-keeps"], 0, [("arena", f"sleep({level})", "lowtide::Wo_TP1") for level in (1, 2)]),
        (["--defect", "rank-keeps", "--twin"], 0, []),
        (["--defect", "orphan-core"], 0, [("processes", "shutdown", "lowtide::Engine")]),
    ],
)
def test_what_our_own_server_leaves_is_found_in_its_processes(
    options: list[str], turns: int, found: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    served = [sys.executable, "-m", "lowtide", "serve", "--device", "cpu", *options]
    asked = ["check", "lowtide.targets:lowtide_server", "--turns", str(turns), "--report", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *asked, "--", *served], capture_output=True, text=True, timeout=HANG_S
    )
    (subject,) = read(tmp_path).subjects
    findings = [(each.resource, each.stage, each.process.name if each.process else "") for each in subject.findings]
    try:
        assert (subject.outcome, findings) == ("leak" if found else "clean", found), done.stdout
        assert done.returncode == bool(found)
    finally:
        for left in re.findall(r"pid (\d+) \(lowtide::Engine\) runs on", done.stdout):
            with suppress(ProcessLookupError):
                os.kill(int(left), signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.parametrize(("options", "outcome"), [((), "clean"), (("--defect", "sync-of-nothing"), "leak")])
def test_other_weights_are_loaded_into_our_own_server_and_judged(
    options: tuple[str, ...], outcome: str, tmp_path: Path
) -> None:
    checkpoint = pytest.importorskip("tests.engine.random_checkpoint")
    others = str(checkpoint.write_preset(tmp_path / "others", 1))
    served = ["--weights", others, sys.executable, "-m", "lowtide", "serve", "--device", "cpu", *options]
    asked = ["check", "lowtide.targets:lowtide_server", "--cycles", "2", "--report", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", *asked, "--", *served], capture_output=True, text=True, timeout=HANG_S
    )
    (subject,) = read(tmp_path).subjects
    assert subject.outcome == outcome, done.stdout
    assert "update_weights" in {stage.name for stage in subject.stages}
