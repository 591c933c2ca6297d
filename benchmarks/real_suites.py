"""What `--leakcheck` adds to the tests of six other projects, from their source distributions.

Each suite runs without and with `--leakcheck` in turn, in a process of its own, in an environment beside this one that
has what its tests need (made once, in the folder given).  Told for each: seconds, and processor time of the process and
of all that it started, which a busy machine changes less; how many tests there were, how many of them left something,
and what lowtide says of its own time.  The goal: 1.15 times as long where nothing leaks, 1.5 where much does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import write


@dataclass(frozen=True)
class Suite:
    """Tests of a project.

    Attributes:
        release: its name and version.
        needs: what its tests need beside it and torch.
        arguments: those of pytest, from the folder of its sources.
        plugins: those of pytest that they need; the others that are installed here are not loaded.
    """

    release: str
    needs: tuple[str, ...]
    arguments: tuple[str, ...]
    plugins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Return the project's name."""
        return self.release.partition("==")[0]


_UVICORN = ("httpx", "pytest-mock", "trustme", "cryptography", "websockets", "httptools", "uvloop", "a2wsgi", "wsproto")
_TORNADO = ("concurrent", "escape", "gen", "http1connection", "httputil", "ioloop", "locks", "queues", "routing")
_TRANSFORMERS = ("transformers", "accelerate", "datasets", "parameterized")

SUITES = (
    Suite(
        "uvicorn==0.54.0",
        (*_UVICORN, "python-dotenv", "PyYAML", "watchfiles", "typing_extensions"),
        ("tests", *(f"--ignore=tests/{part}" for part in ("benchmarks", "supervisors", "test_subprocess.py"))),
        ("pytest_mock", "anyio.pytest_plugin"),
    ),
    Suite("tornado==6.6.1", (), tuple(f"tornado/test/{name}_test.py" for name in _TORNADO)),
    Suite("e3nn==0.6.0", ("opt_einsum_fx", "scipy", "sympy"), ("tests/math", "-k", "not compile")),
    Suite(
        "starlette==1.10.0",
        ("httpx", "itsdangerous", "jinja2", "python-multipart", "trio"),
        ("tests", "-k", "not trio"),
        ("anyio.pytest_plugin",),
    ),
    Suite("compressed-tensors==0.20.0", _TRANSFORMERS, ("tests/test_configs", "tests/test_quantization")),
    Suite("linear_operator==0.6.1", ("jaxtyping", "mpmath"), ("test/operators", "-k", "Diag or Toeplitz or Kronecker")),
)


def environment(folder: Path, suite: Suite) -> Path:
    """Return the Python with which a suite runs: what it needs, and all that the Python of this program has."""
    made = folder / f"env-{suite.name}"
    python, ready = made / "bin" / "python", made / "ready"
    wanted = "\n".join((suite.release, *suite.needs))
    if ready.exists() and ready.read_text() == wanted:
        return python
    shutil.rmtree(made, ignore_errors=True)
    venv.create(made, with_pip=True)
    (site,) = made.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # What is installed beside it stays as it is: another torch would be another test.
    frozen = subprocess.run([sys.executable, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    pinned = [line for line in frozen.splitlines() if re.match(r"(torch|numpy|pytest|pluggy)==", line)]
    (made / "pinned.txt").write_text("\n".join(pinned))
    command = [python, "-m", "pip", "install", "-q", "-c", made / "pinned.txt", suite.release, *suite.needs]
    subprocess.run(command, check=True)
    ready.write_text(wanted)
    return python


def sources(folder: Path, suite: Suite, python: Path) -> Path:
    """Return the folder of a suite's source distribution."""
    into = folder / f"source-{suite.name}"
    if not into.exists():
        with tempfile.TemporaryDirectory(dir=folder) as got:
            download = [
                python,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "--no-binary=:all:",
                "-d",
                got,
                suite.release,
            ]
            subprocess.run(download, check=True)
            (archive,) = Path(got).iterdir()
            with tarfile.open(archive) as files:
                files.extractall(into, filter="data")
    (source,) = into.iterdir()
    return source


def run(python: Path, source: Path, suite: Suite, *, checked: bool) -> dict[str, Any]:
    """Run a suite once, and return what it took and said."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", *(f"-p{plugin}" for plugin in suite.plugins)]
    if checked:
        options += ["-p", "lowtide.pytest_plugin.plugin", "--leakcheck"]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [python, "-m", "pytest", *options, *suite.arguments],
            cwd=source,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        output.seek(0)
        said = output.read()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", said[-2000:])}
    if not counts.get("passed"):
        raise SystemExit(f"{suite.name}: no test passed\n{said[-3000:]}")
    found = re.search(r"(\d+) judged, (\d+) with leaks", said)
    own = re.search(r"judging ([\d.]+) s, remedies ([\d.]+) s", said)
    return {
        "seconds": took,
        "processor_s": used.ru_utime + used.ru_stime,
        "outcomes": counts,
        **({"judged": int(found[1]), "with_leaks": int(found[2])} if found else {}),
        **({"judging_s": float(own[1]), "remedies_s": float(own[2])} if own else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where environments and sources are kept; made if it is not there")
    parser.add_argument("--suites", default=",".join(suite.name for suite in SUITES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for suite in (suite for suite in SUITES if suite.name in asked.suites.split(",")):
        python = environment(folder, suite)
        source = sources(folder, suite, python)
        rounds: list[dict[str, dict[str, Any]]] = []
        for turn in range(asked.rounds):
            order = (False, True) if turn % 2 == 0 else (True, False)
            took = {checked: run(python, source, suite, checked=checked) for checked in order}
            rounds.append({"plain": took[False], "leakcheck": took[True]})
            print(suite.name, rounds[-1], file=sys.stderr, flush=True)
        ratios = {
            figure: statistics.median(each["leakcheck"][figure] / each["plain"][figure] for each in rounds)
            for figure in ("seconds", "processor_s")
        }
        results[suite.release] = {"ratio": ratios, "rounds": rounds}
    write("real_suites", results, asked.out)


if __name__ == "__main__":
    main()
