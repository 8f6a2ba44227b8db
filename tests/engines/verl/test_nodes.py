"""Runs on a Ray cluster of two nodes, each with its own devices, on this machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl_cpu")

import verl_cpu
from ray.cluster_utils import Cluster

from tests.engines.verl.runs import Run
from tests.paths import TOY
from tests.rewards.processes import HANG_S, until

pytestmark = pytest.mark.slow

MANY = 1000
"""More training steps than the run makes before its node is killed."""
NODE = {"num_cpus": 12, "num_gpus": 1, "object_store_memory": 300 << 20}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head and another node, with the environment of verl on a CPU."""
    for name, value in {**verl_cpu.environment(), "RAY_worker_register_timeout_seconds": "300"}.items():
        monkeypatch.setenv(name, value)
    nodes = Cluster(initialize_head=True, head_node_args=NODE)
    nodes.add_node(**NODE)
    yield nodes
    nodes.shutdown()


def start(cluster: Cluster, folder: Path, steps: int) -> subprocess.Popen[str]:
    """Begin or go on with a run whose training takes a device of each node."""
    command = [
        *(sys.executable, "-m", "creditflow", "train", str(TOY), f"trainer.default_local_dir={folder}"),
        *("trainer.device=auto", f"trainer.total_training_steps={steps}", "trainer.save_freq=1"),
        *("--engine", "verl", "--", *verl_cpu.options(), "trainer.nnodes=2"),
        f"++ray_kwargs.ray_init.address={cluster.address}",
    ]
    return subprocess.Popen(command, env=os.environ.copy(), stderr=subprocess.PIPE, text=True)


def finished_steps(folder: Path) -> int:
    """The number of training steps in the metrics."""
    file = folder / "metrics.jsonl"
    rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max([row["step"] for row in rows], default=0)


def test_run_on_two_nodes_survives_the_loss_of_one(cluster: Cluster, tmp_path: Path):
    """A killed node ends the run with advice; on a cluster with a new node, the same command goes on."""
    folder = tmp_path / "run"
    process = start(cluster, folder, MANY)
    until(lambda: process.poll() is not None or finished_steps(folder) >= 1)
    assert process.poll() is None, process.communicate()[1]
    (other,) = cluster.worker_nodes
    cluster.remove_node(other, allow_graceful=False)
    _, stderr = process.communicate(timeout=HANG_S)
    assert process.returncode == 1, stderr
    assert "run the same command again" in stderr
    steps = finished_steps(folder) + 2
    cluster.add_node(**NODE)
    again = start(cluster, folder, steps)
    _, stderr = again.communicate(timeout=HANG_S)
    assert again.returncode == 0, stderr
    trained = Run(folder)
    assert [row["step"] for row in trained.metrics if row["step"] > 0] == list(range(1, steps + 1))
    assert (trained.series("actor/grad_norm") > 0).all()
