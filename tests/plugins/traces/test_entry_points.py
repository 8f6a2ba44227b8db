"""Tests of conventions from other distributions."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.forks import fast_python

MODULE = """
from creditflow.plugins.traces.conventions.base import Convention, Reward

def messages(attributes):
    read = [{"role": "user", "content": attributes["acme.question"]}] if "acme.question" in attributes else []
    return read, [{"role": "assistant", "content": attributes["acme.answer"]}] if "acme.answer" in attributes else []

def rewards(span, entries):
    if "acme.grade" in span.attributes:
        yield Reward([("grade", span.attributes["acme.grade"] / 10)])

CONVENTION = Convention(
    name="acme", kinds=("acme.kind",), calls=(("acme.kind", ("llm",)),),
    messages=messages, message_attributes=("acme.question", "acme.answer"),
    model=("acme.model",), prompt_ids=("acme.ids.in",), response_ids=("acme.ids.out",),
    agent_kinds=(("acme.kind", ("worker",), "acme.worker"),),
    rewards=rewards, reward_prefixes=("acme.grade",),
)
"""


def install(folder: Path, target: str) -> None:
    """Write a distribution with one entry point into `folder`."""
    (folder / "acme_traces.py").write_text(MODULE)
    information = folder / "acme_traces-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-traces\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[creditflow.traces]\nacme = {target}\n")


def span(id: str, parent: str | None, start: int, **attributes: object) -> dict[str, object]:
    """A span in Agent Lightning's form; attribute `a_b` is named `acme.a.b`."""
    return {
        "rollout_id": "r", "attempt_id": "a", "sequence_id": 0, "trace_id": "7", "span_id": id, "parent_id": parent,
        "name": id, "status": {"status_code": "OK", "description": None},
        "attributes": {f"acme.{name.replace('_', '.')}": value for name, value in attributes.items()},
        "events": [], "links": [], "start_time": start, "end_time": start + 1, "resource": {"attributes": {}},
    }  # fmt: skip


SPANS = [
    span("work", None, 1, kind="worker", worker="writer"),
    span("one", "work", 2, kind="llm", question="Add 1 and 2.", answer="The sum is 3.", model="m", grade=5,
         ids_in=[1, 2], ids_out=[3, 4]),
    span("two", "work", 4, kind="llm", question="Check: The sum is 3.", answer="Right.", model="m", grade=10,
         ids_in=[1, 2], ids_out=[5]),
]  # fmt: skip


def creditflow(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    command = [fast_python(), "-m", "creditflow", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def test_installed_convention_is_read_by_every_command(tmp_path: Path) -> None:
    install(tmp_path, "acme_traces:CONVENTION")
    (tmp_path / "spans.json").write_text(json.dumps(SPANS))
    commands = {
        ("convert", "spans.json", "-o", "steps.parquet", "--credit", "run"): (
            "1 trajectory of 1 task, 2 steps",
            "writer",
            "grade",
        ),
        ("why", "run", "r/a/0"): ("grade",),
        ("report", "run"): (),
    }
    for arguments, parts in commands.items():
        result = creditflow(tmp_path, *arguments)
        assert result.returncode == 0, result.stdout + result.stderr
        assert all(part in result.stdout for part in parts)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("acme_traces:MISSING", "entry point 'acme' of creditflow.traces: acme_traces:MISSING cannot be loaded"),
        (
            "acme_traces:messages",
            "entry point 'acme' of creditflow.traces: expected an object of type Convention, got function",
        ),
    ],
)
def test_unusable_entry_point_is_refused(tmp_path: Path, target: str, message: str) -> None:
    install(tmp_path, target)
    (tmp_path / "spans.json").write_text(json.dumps(SPANS))
    result = creditflow(tmp_path, "convert", tmp_path / "spans.json", "-o", tmp_path / "plain.parquet")
    assert result.returncode == 2
    assert message in result.stderr
