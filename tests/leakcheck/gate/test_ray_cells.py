"""Cells on a real Ray cluster of this machine: reports and logs come back, and a lost worker's cell runs again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.leakcheck.gate.cells import RayCluster
from lowtide.leakcheck.gate.gate import Gate
from lowtide.leakcheck.gate.matrix import GateError
from lowtide.reports.schema import exit_code
from tests.leakcheck.gate.test_gate import MACHINE, by_id, cell, is_running

pytest.importorskip("ray", reason="Ray is not installed: install lowtide[ray]")

from ray.cluster_utils import Cluster

# Ray keeps processes, threads and files of its own until it is shut down.
pytestmark = [pytest.mark.nightly, pytest.mark.no_leakcheck(reason="a Ray cluster lives as long as this file's tests")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster("local", Path.cwd()) as connected:
        yield connected


IN_A_FOLDER = """
print('here I am')
(FOLDER / "snapshots").mkdir(parents=True)
(FOLDER / "snapshots" / "cycle-1.pickle").write_text("what torch said")
report()
"""


# The first: one process connects to one cluster at a time, and the others share theirs.
def test_a_cell_whose_node_is_lost_runs_again_on_another(tmp_path: Path) -> None:
    mark = tmp_path / "node"
    body = f"""
    import os, psutil, signal
    mark = Path({str(mark)!r})
    # The command's parent is the guardian, that one's is Ray's worker, and that one's the node.
    worker = psutil.Process(os.getppid()).parent()
    node = worker.parent()
    assert node.name() == "raylet", node.name()
    print("node", node.pid)
    if not mark.exists():
        mark.write_text(str(node.pid))
        # All that Ray has there, as when the machine goes.
        node.kill()
        worker.kill()
        time.sleep(600)
    assert mark.read_text() != str(node.pid)
    report()
    """
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=1)
        with RayCluster(nodes.address, Path.cwd()) as cluster:
            report = Gate([cell("lost", body)], tmp_path / "report", MACHINE, cluster=cluster).run()
    finally:
        nodes.shutdown()
    assert mark.exists()
    (subject,) = report.subjects
    assert (subject.id, subject.outcome, subject.reason) == ("lost/life", "clean", "")


def test_cells_run_on_the_cluster_and_their_files_come_back(cluster: RayCluster, tmp_path: Path) -> None:
    cells = [cell("one", IN_A_FOLDER), cell("two", "report(marks='a')"), cell("bad", "sys.exit(2)")]
    report = Gate(cells, tmp_path, MACHINE, cluster=cluster).run()
    found = by_id(report)
    assert {name: subject.outcome for name, subject in found.items()} == {
        "one/life": "clean",
        "two/life": "leak",
        "bad": "error",
    }
    assert exit_code(report) == 1
    log = (tmp_path / "cells/one/log.txt").read_text()
    assert log.startswith("(on ")
    assert log.endswith(")\nhere I am\n")
    assert (tmp_path / "cells/two/leakcheck.json").exists()
    assert (tmp_path / "cells/one/snapshots/cycle-1.pickle").read_text() == "what torch said"


def test_a_cell_whose_worker_is_killed_runs_again(cluster: RayCluster, tmp_path: Path) -> None:
    mark = tmp_path / "killed-once"
    body = f"""
    import os, psutil, signal
    mark = Path({str(mark)!r})
    if not mark.exists():
        mark.touch()
        subprocess.Popen(["env", "-i", "setsid", "sleep", "4711.8"])
        # Its parent is the guardian, and that one's parent Ray's worker.
        os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        time.sleep(600)
    report()
    """
    report = Gate([cell("lost", body)], tmp_path / "report", MACHINE, cluster=cluster).run()
    assert mark.exists()
    assert [(subject.id, subject.outcome) for subject in report.subjects] == [("lost/life", "clean")]
    assert not is_running("4711.8")


def test_a_cell_that_loses_every_worker_is_an_error(cluster: RayCluster, tmp_path: Path) -> None:
    body = "import os, psutil, signal; os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL); time.sleep(600)"
    (subject,) = Gate([cell("lost", body)], tmp_path, MACHINE, cluster=cluster).run().subjects
    assert subject.outcome == "error"
    assert subject.reason.startswith("lost by the cluster after 3 more tries: ")


def test_a_folder_that_a_node_lacks_is_said(cluster: RayCluster, tmp_path: Path) -> None:
    elsewhere = RayCluster("local", tmp_path / "nowhere", _ray=cluster._ray, _task=cluster._task)
    (subject,) = Gate([cell("one", "report()")], tmp_path, MACHINE, cluster=elsewhere).run().subjects
    assert "is not on this node: the nodes need the project at the same path" in subject.reason


def test_a_cluster_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(GateError, match=r"--ray .* cannot be reached: "),
        RayCluster("127.0.0.1:1", Path.cwd()),
    ):
        pass
