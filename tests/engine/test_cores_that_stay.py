"""What becomes of a core that its client has left running, when the client's process ends in its turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.engine import EngineConfig, LLMEngine
from lowtide.engine.core_process import CoreClient
from lowtide.engine.defects import find_defect
from tests.waiting import wait_until

pytestmark = pytest.mark.nightly

CLIENT = """
import sys
from lowtide.engine import EngineConfig, LLMEngine
from lowtide.engine.defects import find_defect

defect = find_defect(sys.argv[1])
twin = len(sys.argv) > 2
with defect.trigger() if twin else defect.switched_on():
    engine = LLMEngine(defect.configure(EngineConfig(kv_cache_bytes=1 << 20), twin=twin))
    engine.create()
    pid = engine._core.process.pid
    engine.shutdown()
    print(pid, flush=True)
    sys.stdin.read()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "after_shutdown", "after_the_client"),
    [
        (["orphan-core"], True, True),
        (["core-ignores-shutdown"], True, False),
        (["orphan-core", "twin"], False, False),
    ],
    ids=["orphan-core", "core-ignores-shutdown", "twin"],
)
def test_a_core_outlives_its_shutdown_or_its_client(
    arguments: list[str], after_shutdown: bool, after_the_client: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        core = int(client.stdout.readline())
        try:
            assert is_alive(core) == after_shutdown
            client.kill()
            client.wait()
            if after_the_client:
                # So long after its connection has ended.
                time.sleep(1)
                assert is_alive(core)
            else:
                wait_until(lambda: not is_alive(core))
        finally:
            if is_alive(core):
                os.kill(core, signal.SIGKILL)


@pytest.mark.parametrize("name", ["orphan-core", "core-ignores-shutdown"])
def test_the_context_of_the_defect_ends_what_it_has_left(name: str) -> None:
    defect = find_defect(name)
    with defect.switched_on():
        engine = LLMEngine(defect.configure(EngineConfig(kv_cache_bytes=1 << 20)))
        engine.create()
        core = engine._core
        assert isinstance(core, CoreClient)
        engine.shutdown()
        engine.shutdown()
        assert is_alive(core.process.pid)
    assert not is_alive(core.process.pid)


def test_a_killed_core_leaves_its_file_and_one_that_is_shut_down_does_not() -> None:
    defect = find_defect("shared-memory-of-the-dead")
    for twin in (False, True):
        with defect.trigger() if twin else defect.switched_on():
            engine = LLMEngine(defect.configure(EngineConfig(kv_cache_bytes=1 << 20), twin=twin))
            engine.create()
            core = engine._core
            assert isinstance(core, CoreClient)
            mapped = Path(f"/proc/{core.process.pid}/maps").read_text().split()
            (path,) = {Path(word) for word in mapped if word.startswith("/dev/shm/vllm_offload_")}
            assert path.stat().st_size == 8 << 20
            engine.shutdown()
            assert not is_alive(core.process.pid)
            assert path.exists() == (not twin)
        assert not path.exists()
