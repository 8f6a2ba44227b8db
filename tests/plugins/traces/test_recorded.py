"""Tests of recorded spans of real runs against results checked by hand."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.plugins.traces import Converted, convert, read_spans
from tests.paths import TRACES

PLAN, FIRST = "First add 3 and 4, then double the sum.", "3 + 4 makes 7."
SECOND, VERDICT = "Twice 7 makes 14.", "Both parts are right, the answer is 14."
GRAPH = [
    # agent, turn, parents, response, scores
    ("planner", 0, (), PLAN, {}),
    ("executor", 0, (0,), FIRST, {"right": 1.0}),
    ("executor_again", 0, (0, 1), SECOND, {"right": 0.5}),
    ("verifier", 0, (1, 2), VERDICT, {}),
]
HELP = [
    ("triage", 0, (), '{"name": "look_up", "arguments": {"order": "A17"}}', {"found": 0.75}),
    ("triage", 1, (0,), '{"name": "transfer_to_refunds", "arguments": {}}', {}),
    ("refunds", 0, (0, 1), "The money for order A17 is on its way.", {}),
]
SEA = [
    ("writer", 0, (), "Draft 1: the sea is wide and blue.", {}),
    ("critic", 0, (0,), "Critique 1: say how it smells.", {"helpful": 0.25}),
    ("writer", 1, (0, 1), "Draft 2: the sea is wide and blue.", {}),
    ("critic", 1, (0, 1, 2), "Critique 2: say how it smells.", {}),
]


def steps_of(trajectory: Trajectory) -> list[tuple[str, int, tuple[int, ...], str, dict[str, float]]]:
    return [
        (step.agent, step.turn, step.parents, step.response, {name: s.rescaled for name, s in step.scores.items()})
        for step in trajectory.steps
    ]


def converted(name: str) -> tuple[Converted, Trajectory]:
    made = convert(read_spans(TRACES / name))
    (trajectory,) = made.trajectories
    TrajectoryBatch.from_trajectories([trajectory])
    assert trajectory.outcome is not None
    assert not made.mended
    return made, trajectory


@pytest.mark.parametrize(
    "name", ["langgraph_openinference.json", "langgraph_openinference.pb", "langgraph_openllmetry.json"]
)
def test_langgraph_run_has_four_steps_with_parents_by_text(name: str) -> None:
    made, trajectory = converted(name)
    assert steps_of(trajectory) == GRAPH
    assert trajectory.outcome is not None
    assert (trajectory.outcome.value, trajectory.answer, made.left_out) == (1.0, VERDICT, [])
    assert trajectory.task.text == "What is twice the sum of 3 and 4?"
    assert trajectory.steps[1].prompt == f"[system]\nYou are the executor.\n\n[user]\nPlan: {PLAN}\nDo part 1."


def test_doubly_instrumented_calls_are_steps_once() -> None:
    made, trajectory = converted("langgraph_twice.json")
    assert steps_of(trajectory) == GRAPH
    assert [span.what for span in made.left_out] == ["model call"] * 4
    assert all(span.reason.startswith("the same call as span") for span in made.left_out)
    assert made.passed_over == {"play": 1}


@pytest.mark.parametrize(
    ("name", "passed_over"),
    [
        ("openinference", {"Agent workflow": 1, "play": 1, "turn": 3, "look_up": 1, "handoff to refunds": 1}),
        ("otel", {"unknown": 4, "play": 1, "execute_tool look_up": 1, "agent_handoff OpenAI Agent": 1}),
    ],
)
def test_agents_sdk_run_with_a_tool_and_a_handoff(name: str, passed_over: dict[str, int]) -> None:
    made, trajectory = converted(f"agents_sdk_{name}.json")
    assert made.passed_over == passed_over
    assert steps_of(trajectory) == HELP  # one instrumentation omits empty arguments
    assert trajectory.outcome is not None
    assert (trajectory.outcome.value, made.left_out) == (0.0, [])
    assert trajectory.steps[0].info["rewards_by"] == {"found": "agent"}


def test_autogen_run_with_a_score_by_response_id() -> None:
    made, trajectory = converted("autogen_otel.json")
    assert steps_of(trajectory) == SEA
    assert made.left_out == []
    assert trajectory.steps[1].info["rewards_by"] == {"helpful": "link"}


@pytest.mark.parametrize("name", ["autogen_otel_logs", "autogen_otel_logs_before"])
def test_log_record_messages_are_found_in_any_file(name: str, tmp_path: Path) -> None:
    made, trajectory = converted(f"{name}.json")
    assert (steps_of(trajectory), made.left_out) == (SEA, [])
    recorded = json.loads((TRACES / f"{name}.json").read_text())
    files = []
    for part, encode in (("resourceLogs", LogsData), ("resourceSpans", TracesData)):
        (tmp_path / f"{part}.json").write_text(json.dumps({part: recorded[part]}))
        ids = json.loads(json.dumps({part: recorded[part]}), object_hook=in_base64)
        message = ParseDict(ids, encode()).SerializeToString()
        (tmp_path / f"{part}.pb").write_bytes(len(message).to_bytes(4, "big") + message)
        files.append(part)
    for form in ("json", "pb"):
        apart = convert(read_spans([tmp_path / f"{part}.{form}" for part in files]))
        assert list(map(steps_of, apart.trajectories)) == [SEA]
        alone = convert(read_spans(tmp_path / f"resourceLogs.{form}"))
        assert [step[3] for step in steps_of(alone.trajectories[0])] == [step[3] for step in SEA]
        assert alone.left_out == []


def in_base64(value: dict[str, Any]) -> dict[str, Any]:
    """Convert ids to base64, as in protobuf's JSON."""
    ids = ("traceId", "spanId", "parentSpanId")
    return {key: base64.b64encode(bytes.fromhex(one)).decode() if key in ids else one for key, one in value.items()}


def test_score_with_an_unknown_response_id_is_listed() -> None:
    made, trajectory = converted("autogen_openinference.json")
    assert [step[:4] for step in steps_of(trajectory)] == [step[:4] for step in SEA]
    (left,) = made.left_out
    assert (left.what, left.name) == ("reward", "helpful")
    assert left.reason == "what it is linked to (gen_ai.response.id chatcmpl-2) is not in the trajectory"
