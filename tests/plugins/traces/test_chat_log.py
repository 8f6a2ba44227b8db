"""Tests of chat logs."""

import json
from pathlib import Path
from typing import Any

import pytest

from creditflow.data import Trajectory
from creditflow.errors import DataError
from creditflow.plugins.traces import convert, from_chat_log, read_spans


def trajectories(*lines: Any) -> list[Trajectory]:
    made = convert(from_chat_log(lines))
    assert made.left_out == []
    return made.trajectories


def test_assistant_message_is_a_step_reading_all_before() -> None:
    messages = [
        {"role": "user", "content": "What is 3 + 4?"},
        {"role": "assistant", "content": "I shall add them up.", "name": "planner", "reward": 0.5},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "7", "name": "solver"},
    ]
    (trajectory,) = trajectories({"messages": messages, "reward": 1.0})
    assert [(step.agent, step.parents, step.response) for step in trajectory.steps] == [
        ("planner", (), "I shall add them up."),
        ("solver", (0,), "7"),
    ]
    prompt = "[user]\nWhat is 3 + 4?\n\n[assistant]\nI shall add them up.\n\n[user]\nGo on."
    assert trajectory.steps[1].prompt == prompt
    assert {name: score.value for name, score in trajectory.steps[0].scores.items()} == {"reward": 0.5}
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 1.0


def completion(text: str, *more: str, **attributes: Any) -> dict[str, Any]:
    choices = [{"message": {"role": "assistant", "content": said}, "finish_reason": "stop"} for said in (text, *more)]
    return {"id": f"id-{text}", "choices": choices, "usage": {"prompt_tokens": 3, "completion_tokens": 2}, **attributes}


def asked(text: str) -> dict[str, Any]:
    return {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": text}]}


def test_calls_with_one_id_form_one_trajectory() -> None:
    first = {"trajectory_id": "p", "agent": "a", "request": asked("Plan it."), "response": completion("first, second")}
    second = {"trajectory_id": "p", "agent": "b", "request": asked("first, second"), "response": completion("done"),
              "reward": {"right": 1.0, "short": 0.25}}  # fmt: skip
    other = {"request": asked("Hello"), "response": completion("Hi")}
    trajectory, alone = trajectories(first, other, second)
    assert (trajectory.id, [(step.agent, step.parents) for step in trajectory.steps]) == ("p", [("a", ()), ("b", (0,))])
    assert {name: score.value for name, score in trajectory.steps[1].scores.items()} == {"right": 1.0, "short": 0.25}
    assert (trajectory.steps[0].temperature, trajectory.steps[0].policy) == (0.5, "m")
    assert alone.steps[0].response == "Hi"


def test_first_choice_of_a_call_is_the_step() -> None:
    made = convert(from_chat_log([{"request": asked("Choose"), "response": completion("one", "two")}]))
    assert [step.response for step in made.trajectories[0].steps] == ["one"]
    assert [(left.what, left.name) for left in made.left_out] == [("choice", "two")]


def test_vllm_token_ids_and_logprobs_are_kept() -> None:
    response = completion("ab", prompt_token_ids=[1, 2])
    response["choices"][0] |= {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}
    (trajectory,) = trajectories({"request": asked("x"), "response": response})
    step = trajectory.steps[0]
    assert (step.prompt_ids, step.response_ids, step.logprobs) == ((1, 2), (3, 4), (-1.0, -2.0))


def test_unknown_line_is_refused_with_its_number() -> None:
    with pytest.raises(DataError, match=r"chat log: record 2: expected a record of a chat log \(a list `messages`, or"):
        from_chat_log([{"messages": []}, {"text": "hello"}])


def test_lines_of_several_files_join_only_by_id(tmp_path: Path) -> None:
    for name in ("a", "b"):
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"Hello from {name}."}]
        lines = [{"messages": said}, {"messages": said, "trajectory_id": "both"}]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    made = convert(read_spans([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]))
    assert made.mended == {}  # equal texts of two trajectories are two calls
    assert [[step.response for step in trajectory.steps] for trajectory in made.trajectories] == [
        ["Hello from a."],
        ["Hello from a.", "Hello from b."],
        ["Hello from b."],
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, [{"messages": []}, {}])))
    with pytest.raises(DataError, match=r"b\.jsonl: record 2: expected"):
        read_spans([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])


def test_conversation_reward_belongs_to_the_trajectory() -> None:
    talk = [{"role": "user", "content": "Plan"}, {"role": "assistant", "content": "A"}]
    first = {"session_id": "s", "messages": talk}
    second = {"session_id": "s", "messages": [{"role": "user", "content": "Do"}, {"role": "assistant", "content": "B"}],
              "reward": {"right": 0.75, "short": 0.5}}  # fmt: skip
    (trajectory,) = trajectories(first, second)
    assert trajectory.outcome is not None
    assert trajectory.outcome.value == 0.75
    assert (trajectory.info["outcome"], trajectory.info["rewards"]) == ("right", {"short": 0.5})
    assert all(step.scores == {} for step in trajectory.steps)


@pytest.mark.parametrize("more", [{}, {"reward": 0.5}, {"tool_calls": None, "rewards": {"right": 1.0}}])
def test_repeated_messages_count_once(more: dict[str, Any]) -> None:
    said = ("Plan it.", "First add.", "And then?", "Then halve.")
    talk = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(said)]
    first = {"session_id": "s", "messages": [talk[0], talk[1] | more]}
    made = convert(from_chat_log([first, {"session_id": "s", "messages": talk}]))
    (trajectory,) = made.trajectories
    assert [step.response for step in trajectory.steps] == ["First add.", "Then halve."]
    assert [left.reason for left in made.left_out] == ["the same call as span 1.1"]
    assert trajectory.steps[1].parents == (0,)


@pytest.mark.parametrize("name", ["outcome", "final_reward"])
def test_call_outcome_is_the_trajectory_outcome(name: str) -> None:
    calls = [
        {"trajectory_id": "p", "request": asked("Plan it."), "response": completion("first, second")},
        {"trajectory_id": "p", "request": asked("Do it."), "response": completion("done"),
         "reward": {name: 1.0, "style": 0.5}},
    ]  # fmt: skip
    (trajectory,) = trajectories(*calls)
    assert (trajectory.outcome and trajectory.outcome.value, trajectory.info["outcome"]) == (1.0, name)
    assert [list(step.scores) for step in trajectory.steps] == [[], ["style"]]


def test_lines_without_a_response_are_listed() -> None:
    user = {"role": "user", "content": "Hi"}
    answered = [user, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    made = convert(from_chat_log([{"messages": [user]}, {"messages": answered}]))
    after = "1 of its messages come after the last response"
    listed = [(left.what, left.name, left.reason) for left in made.left_out]
    assert listed == [("record", f"line {n}", after) for n in (1, 2)]
    (left,) = convert(from_chat_log([{"request": {"messages": [user]}, "response": {"answer": "Hello."}}])).left_out
    assert (left.what, left.reason) == ("model call", "its response is in a form that is not known: answer")


@pytest.mark.parametrize(
    ("written", "beside"), [((None,), ("a", "b")), (("a",), (None, None)), (("a", "b"), (None,) * 2)]
)
def test_equal_calls_in_two_forms_are_counted_once_each(written: tuple, beside: tuple) -> None:
    content = [{"type": "tool_use", "name": "roll", "input": {"d": 6}, **({"id": id} if id else {})} for id in written]
    function = {"name": "roll", "arguments": '{"d": 6}'}
    calls = [{"type": "function", "function": function, **({"id": id} if id else {})} for id in beside]
    reply = {"role": "assistant", "content": content, "tool_calls": calls}
    (trajectory,) = convert(from_chat_log([{"messages": [{"role": "user", "content": "q"}, reply]}])).trajectories
    assert trajectory.steps[0].response.count("roll") == 2
