"""Programs that must not notice the agent in them: each is run with it and without, on each Python that is given.

Goal: all of them print the same, and end with the same code.  Those that need a library are run where it is installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

from lowtide.probes.processes.agents import BOOTSTRAP, Agents
from tests.probes.agent_programs import PROGRAMS, outcomes


def differing(python: str, bootstrap: str, names: list[str]) -> dict[str, dict[str, str]]:
    """What programs say with the agent and without, where that is not the same."""
    agents = Agents()
    agents.start()
    folder = Path(tempfile.mkdtemp())
    try:
        given = agents.environment()
        without = {name: value for name, value in os.environ.items() if name not in given}
        both = {}
        for kind, environment in (("without", without), ("with", {**without, **given, "PYTHONPATH": bootstrap})):
            # The same name for both, which programs print.
            both[kind] = outcomes(python, environment, folder / "run", names)
            shutil.rmtree(folder / "run")
    finally:
        agents.stop()
        shutil.rmtree(folder)
    return {
        name: {kind: repr(found[name]) for kind, found in both.items()}
        for name in names
        if both["with"][name] != both["without"][name]
    }


def has_library(python: str, name: str) -> bool:
    return not name or not subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    parser.add_argument("--only", action="append", help="the name of a program")
    parser.add_argument("--bootstrap", default=str(BOOTSTRAP), help="the folder of another version's agent")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    args = parser.parse_args()
    results: dict[str, object] = {}
    for python in args.pythons:
        names = [name for name in args.only or PROGRAMS if has_library(python, PROGRAMS[name].needs)]
        found = differing(python, args.bootstrap, names)
        results[python] = {"programs": len(names), "the_same": len(names) - len(found), "differing": found}
        print(f"{python}: {len(names) - len(found)} of {len(names)} the same", flush=True)
        for name, both in found.items():
            print(f"  {name}:", *(f"    {kind}: {text}" for kind, text in both.items()), sep="\n", flush=True)
    machine.write("programs_with_agents", results, args.out)


if __name__ == "__main__":
    main()
