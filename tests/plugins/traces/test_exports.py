"""Tests of recordings of tracing SDKs against results checked by hand."""

import json
from pathlib import Path

import pytest

from creditflow.data import Trajectory, TrajectoryBatch
from creditflow.errors import DataError
from creditflow.plugins.traces import Converted, convert, read_spans
from tests.paths import TRACES
from tests.plugins.traces.test_fuzz import places

EXPORTS = TRACES / "exports"
TASKS = ("What is 3 + 4?", "What is 5 + 6?")
SAID = {TASKS[0]: ("3 + 4 makes 7.", "Right: 7."), TASKS[1]: ("5 + 6 makes 12.", "Wrong: not 12.")}
OUTCOMES = {TASKS[0]: 1.0, TASKS[1]: 0.0}
LABEL = ("reward", "tone", "it is no number, but a label: 'dry'")


def made_from(*names: str) -> tuple[Converted, dict[str, Trajectory]]:
    """The conversion of recordings, and its trajectories by task."""
    made = convert(read_spans([EXPORTS / f"{name}.json" for name in names]))
    TrajectoryBatch.from_trajectories(made.trajectories)
    assert not made.mended
    return made, {trajectory.task.text.removeprefix("Original Task: "): trajectory for trajectory in made.trajectories}


def steps_of(trajectory: Trajectory) -> list[tuple[str, int, tuple[int, ...], str]]:
    return [(step.agent, step.turn, step.parents, step.response) for step in trajectory.steps]


def left(made: Converted) -> list[tuple[str, str, str]]:
    return [(one.what, one.name, one.reason) for one in made.left_out]


@pytest.mark.parametrize(
    "name",
    ["langfuse", "langsmith", "langsmith_langgraph", "langsmith_otel", "mlflow", "mlflow_otlp", "phoenix", "vercel"],
)
def test_recorded_run_has_two_agents_per_task(name: str) -> None:
    _, by_task = made_from(name)
    assert sorted(by_task) == sorted(TASKS)
    for task, trajectory in by_task.items():
        solved, checked = SAID[task]
        assert steps_of(trajectory) == [("solver", 0, (), solved), ("checker", 0, (0,), checked)]
        assert [step.prompt for step in trajectory.steps] == [
            f"[system]\nYou are the solver.\n\n[user]\n{task}",
            f"[system]\nYou are the checker.\n\n[user]\n{task}\n{solved}\nRight?",
        ]
        assert {(step.policy, step.info["parents_by"]) for step in trajectory.steps[1:]} == {("rote", "text")}
        assert trajectory.steps[0].temperature == (1.0 if name == "langsmith_langgraph" else 0.7)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("langfuse", "langfuse_scores"), [LABEL, LABEL]),
        (("langsmith", "langsmith_feedback"), []),
        (("mlflow",), [LABEL, LABEL]),
        (("phoenix", "phoenix_annotations", "phoenix_trace_annotations"), []),
    ],
)
def test_recorded_scores_reach_step_and_trajectory(names: tuple[str, ...], labels: list[tuple[str, str, str]]) -> None:
    for order in (names, names[::-1]):
        made, by_task = made_from(*order)
        assert left(made) == labels
        for task, trajectory in by_task.items():
            assert trajectory.outcome is not None
            assert (trajectory.outcome.value, trajectory.info["outcome"]) == (OUTCOMES[task], "outcome")
            solver, checker = trajectory.steps
            assert {name: score.value for name, score in solver.scores.items()} == {"right": OUTCOMES[task]}
            assert (solver.info["rewards_by"], checker.scores) == ({"right": "link"}, {})


def test_scores_without_their_spans_are_listed() -> None:
    for name, n in (("langfuse_scores", 6), ("langsmith_feedback", 4), ("phoenix_annotations", 2)):
        made = convert(read_spans(EXPORTS / f"{name}.json"))
        assert (made.trajectories, len(made.left_out)) == ([], n)


def test_strands_graph_has_an_agent_per_node() -> None:
    made, by_task = made_from("strands")
    for task, trajectory in by_task.items():
        solved, checked = SAID[task]
        assert steps_of(trajectory) == [("solver", 0, (), solved), ("checker", 0, (0,), checked)]
        assert trajectory.steps[1].prompt.endswith(f"From solver:  - Agent: {solved}\n")
        assert trajectory.outcome is None
    assert left(made) == []


def test_vercel_reward_attribute_is_the_outcome() -> None:
    _, by_task = made_from("vercel")
    assert {task: trajectory.outcome and trajectory.outcome.value for task, trajectory in by_task.items()} == OUTCOMES


def test_gateway_events_have_tokens_and_last_reward() -> None:
    made, by_task = made_from("agent_lightning_1")
    for task, trajectory in by_task.items():
        assert steps_of(trajectory) == [
            ("agent", turn, (0,) if turn else (), said) for turn, said in enumerate(SAID[task])
        ]
        assert trajectory.outcome is not None
        assert (trajectory.outcome.value, trajectory.steps[0].scores["reward"].value) == (OUTCOMES[task], 0.25)
        ids = trajectory.steps[0].response_ids
        assert ids == tuple(len(word) for word in SAID[task][0].split())
        assert trajectory.steps[0].logprobs == tuple(-id / 10 for id in ids)
    assert left(made) == []


def test_export_lines_read_as_one_list(tmp_path: Path) -> None:
    for name in ("langsmith", "mlflow", "langfuse_scores", "agent_lightning_1"):
        file = tmp_path / f"{name}.jsonl"
        records = json.loads((EXPORTS / f"{name}.json").read_text())
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert read_spans(file) == read_spans(EXPORTS / f"{name}.json")


def test_record_of_another_form_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    runs = json.loads((EXPORTS / "langsmith.json").read_text())
    file.write_text(json.dumps([*runs, {"odd": 1}]))
    with pytest.raises(DataError, match=rf"record {len(runs) + 1}: expected a record of LangSmith, got {{'odd': 1}}"):
        read_spans(file)


@pytest.mark.parametrize(
    "name", ["langfuse_scores", "langsmith_feedback", "phoenix_annotations", "mlflow", "agent_lightning_1"]
)
def test_number_beyond_floats_is_no_score(name: str, tmp_path: Path) -> None:
    records = json.loads((EXPORTS / f"{name}.json").read_text())
    for holder, key in list(places(records)):
        if key in ("value", "score", "latency_ms"):
            holder[key] = 10**400
    file = tmp_path / "damaged.json"
    file.write_text(json.dumps(records))
    spans = [EXPORTS / f"{name.partition('_')[0]}.json"] if name.startswith(("langf", "langs", "ph")) else []
    made = convert(read_spans([file, *spans]))
    assert made.trajectories
    scores = [score for trajectory in made.trajectories for step in trajectory.steps for score in step.scores.values()]
    assert all(score.status == "failed" for score in scores)
