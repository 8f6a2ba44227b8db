"""Tests of the command `creditflow simulate`."""

import json
from pathlib import Path

from typer.testing import CliRunner

from creditflow.cli import app


def test_steps_beside_a_graph_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text(json.dumps([[], [0]]))
    done = CliRunner().invoke(app, ["simulate", "--steps", "5", "--graph", str(tmp_path / "graph.json")])
    message = f"error: --steps: {tmp_path}/graph.json has a number of steps of its own; leave --steps out\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", message)
