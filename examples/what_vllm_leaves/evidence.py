"""Shows what vLLM leaves behind, in loops and without lowtide: `python evidence.py NAME MODEL`.

MODEL is a folder with a `config.json` of a small Llama; the weights are dummies. `sockets`, `orphans` and `functions`
need a build of vLLM for CPUs; `imports` and `region` run with any. The page "What vLLM leaves" has what they print.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from pathlib import Path
from typing import Any

import psutil

OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "enforce_eager": True,
    "max_num_seqs": 4,
    "dtype": "float32",
}
LIVES = 3
MIB = 1 << 20


def live(model: str) -> None:
    """Create an engine, generate, shut it down, and let go of it."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": list(range(10, 26))}], params, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def sockets(model: str) -> None:
    """Count the socket files in the temporary folder after each life: nobody removes those that ZeroMQ binds."""

    def files() -> set[Path]:
        return {path for path in Path(tempfile.gettempdir()).iterdir() if path.is_socket()}

    before = files()
    for number in range(1, LIVES + 1):
        live(model)
        print(f"after life {number}: {len(files() - before)} socket files more than at the start")


def orphans(model: str) -> None:
    """Kill a server as the kernel does for want of memory, and see which of its processes go on, and for how long."""
    port = 8417
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items() if not isinstance(value, bool)]
    switches = [f"--{name.replace('_', '-')}" for name, value in OPTIONS.items() if value is True]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    server = psutil.Process(subprocess.Popen([*command, *flags, *switches], stdout=subprocess.DEVNULL).pid)
    deadline = time.monotonic() + 300
    while not answers(port):
        assert server.is_running(), "the server ended before it answered"
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(1)
    family = server.children(recursive=True)
    killed = time.monotonic()
    server.kill()
    for after in (1, 10, 30):
        time.sleep(max(0.0, killed + after - time.monotonic()))
        alive = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        said = ", ".join(f"{name_of(each)} {each.memory_full_info().uss // MIB} MiB" for each in alive)
        print(f"{after} s after SIGKILL of the server: {said or 'none of its processes'}")
    for process in alive:
        process.send_signal(signal.SIGKILL)


def name_of(process: psutil.Process) -> str:
    """What a process calls itself, or runs."""
    return " ".join(process.cmdline())[:60].strip() or process.name()


def answers(port: int) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def imports(model: str) -> None:
    """Keep an object of whoever imports vLLM's audio module first, for as long as the process lives."""

    class Buffer:
        """What a request holds while it runs."""

        def __init__(self) -> None:
            self.data = bytearray(64 * MIB)

    def handle() -> weakref.ref[Buffer]:
        buffer = Buffer()
        from vllm.multimodal.media import audio

        assert audio is not None
        return weakref.ref(buffer)

    kept = handle()
    gc.collect()
    from vllm.multimodal.media import audio

    error: Any = audio._torchcodec_import_exc
    assert error is not None, "torchcodec is installed: nothing to see"
    print(f"the 64 MiB of the function that imported it: {'kept' if kept() else 'gone'}")
    audio._torchcodec_import_exc = error.with_traceback(None)
    print(f"after _torchcodec_import_exc.with_traceback(None): {'kept' if kept() else 'gone'}")


def functions(model: str) -> None:
    """Compare what is replaced in torch and logging after each life, and what the environment has."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import logging

    import torch

    watched = {
        "torch.accelerator.synchronize": lambda: torch.accelerator.synchronize,
        "torch.accelerator.empty_cache": lambda: torch.accelerator.empty_cache,
        "torch.set_num_threads": lambda: torch.set_num_threads,
        "logging's record factory": logging.getLogRecordFactory,
        "VLLM_DIST_IDENT": lambda: os.environ.get("VLLM_DIST_IDENT"),
    }
    last = {name: read() for name, read in watched.items()}
    for number in range(1, LIVES + 1):
        live(model)
        now = {name: read() for name, read in watched.items()}
        print(f"life {number} changed: {', '.join(name for name in now if now[name] is not last[name]) or 'nothing'}")
        last = now


def region(model: str) -> None:
    """Fail to populate a region of offloaded blocks, as where the system is out of memory: the file stays."""
    from vllm.v1.kv_offload.cpu import shared_offload_region as offload

    def refuse(mapping: Any, offset: int, length: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    offload._madvise_populate_write = refuse
    for number in range(1, LIVES + 1):
        try:
            offload.SharedOffloadRegion(
                engine_id=f"evidence-{os.getpid()}-{number}",
                num_chunks=16,
                rank=None,
                kv_bytes_per_chunk=MIB,
                cpu_page_size=MIB,
            )
        except OSError as error:
            left = list(Path("/dev/shm").glob(f"vllm_offload_evidence-{os.getpid()}-*"))
            size = sum(path.stat().st_size for path in left) // MIB
            print(f"after failure {number} ({error.strerror}): {len(left)} files of {size} MiB in /dev/shm")
    for path in left:
        path.unlink()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
